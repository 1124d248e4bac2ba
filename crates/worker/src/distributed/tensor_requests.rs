//! The infer role for requests: tensors arrive over core NATS, and each answer goes back to the
//! sender.
//!
//! Nothing is stored: if a process dies, the waiting serve worker sends its tensors again or
//! answers with an error.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use trommel_infer::{Engine, InferError, Wanted};
use trommel_queue::{Broker, Request, Requests};
use trommel_types::{
    Failure, Lane, LiveAnswer, LiveOutcome, LiveTensor, Message, RefusalReason, Role, Scores,
    WarmModel,
};

use crate::admission::{Admission, Entry};
use crate::asked_rows::AskedRows;
use crate::distributed::infer_models::ModelEngines;
use crate::distributed::names::Subjects;
use crate::distributed::repository::Repository;
use crate::fatal::Fatal;
use crate::fault::{Scope, TaskError};
use crate::trace::continued;
use crate::{ServeConfig, WorkerError};

/// The header of requests that do not need the labels of a warm model.
pub(crate) const LABELS: &str = "Trommel-Labels";

/// A warm model, and the requests for it.
pub(crate) struct WarmRequests {
    model: Arc<Warm>,
    requests: Requests,
}

struct Warm {
    name: Arc<str>,
    engine: Arc<Engine>,
    admission: Arc<Admission>,
    asked: AskedRows,
}

/// Loads a model, keeps it, and accepts requests for it from now on.
///
/// # Errors
/// If it cannot run, or the broker denies its subject.
pub(crate) async fn open(
    broker: &Broker,
    subjects: &Subjects,
    repository: &Arc<Repository>,
    engines: &ModelEngines,
    config: &ServeConfig,
    name: &str,
) -> Result<WarmRequests, WorkerError> {
    let (models, named) = (Arc::clone(repository), name.to_owned());
    let known = tokio::task::spawn_blocking(move || models.model(&named));
    let known = known.await.map_err(|_| WorkerError::Panicked {
        what: "looking for a model",
    })??;
    let wanted = Arc::new(Wanted::default());
    let engine = engines.keep(&known.id, &wanted).await?;
    let subject = subjects.infer(&known.id.name, &known.id.version);
    // As many as are computed at once, and as many waiting.
    let least = 2 * engine.stats().instances;
    let model = Arc::new(Warm {
        name: Arc::clone(&known.id.name),
        asked: AskedRows::of(Arc::clone(&engine).into()),
        engine,
        admission: Arc::new(Admission::new(least, config.queue.get(), config.slo)),
    });
    let requests = broker.requests(&subject, Role::Infer.as_str()).await?;
    Ok(WarmRequests { model, requests })
}

/// Answers until `shutdown` fires, then the requests received by then.
///
/// # Errors
/// If a device is lost.
pub(crate) async fn run(
    warm: WarmRequests,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let WarmRequests {
        model,
        mut requests,
    } = warm;
    let (open, fatal) = (TaskTracker::new(), Fatal::new(&shutdown));
    while let Some(Some(request)) = fatal.token().run_until_cancelled(requests.next()).await {
        let mut coming = begin(&model, request, &open, &fatal);
        while let Some(request) = requests.next_now() {
            coming = begin(&model, request, &open, &fatal);
        }
        // A batch only waits for images that are on their way.
        if !coming {
            model.engine.flush_lane(Lane::Live);
        }
    }
    // A failed process replies to its requests that another one should be asked.
    match requests.leave().await {
        Ok(rest) => {
            for request in rest {
                begin(&model, request, &open, &fatal);
            }
            model.engine.flush_lane(Lane::Live);
        }
        Err(error) => tracing::debug!(%error, "requests in flight may be lost"),
    }
    open.close();
    open.wait().await;
    fatal.into_result()
}

/// Starts a request on its own task: its image is in the engine's queue when this returns. Returns
/// whether the sender is preparing more images.
fn begin(model: &Arc<Warm>, request: Request, open: &TaskTracker, fatal: &Fatal) -> bool {
    if request.payload().is_empty() {
        let answer = model.describe(&request);
        open.spawn(send(request, answer));
        return false;
    }
    let since = Instant::now();
    let tensor = match LiveTensor::decode(request.payload()) {
        Ok(tensor) => tensor,
        Err(error) => {
            let answer = LiveAnswer::refused(RefusalReason::Settings, error.to_string());
            open.spawn(send(request, answer.encode()));
            return false;
        }
    };
    let coming = tensor.coming > 0;
    let span = tracing::debug_span!(
        "infer.request",
        request_id = %tensor.request,
        trace_id = tracing::field::Empty
    );
    let span = continued(span, &request.origin());
    let (model, fatal) = (Arc::clone(model), fatal.clone());
    let work = async move {
        let answer = model.answer(tensor, since, &fatal).await;
        send(request, answer.encode()).await;
    };
    let mut work = Box::pin(work.instrument(span));
    // Polled here, so that a flush includes the image.
    if (&mut work).now_or_never().is_none() {
        open.spawn(work);
    }
    coming
}

async fn send(request: Request, answer: Vec<u8>) {
    if let Err(error) = request.answer(answer.into()).await {
        tracing::warn!(%error, "an answer was not sent");
    }
}

impl Warm {
    fn describe(&self, request: &Request) -> Vec<u8> {
        let engine = &self.engine;
        let labels = match request.header(LABELS) {
            Some("no") => Vec::new(),
            _ => engine.labels().to_vec(),
        };
        let warm = WarmModel {
            model: Arc::clone(&self.name),
            model_version: Arc::clone(engine.version()),
            labels,
        };
        warm.encode()
    }

    async fn answer(&self, tensor: LiveTensor, since: Instant, fatal: &Fatal) -> LiveAnswer {
        if fatal.has_failed() {
            return unavailable("the device of this worker is lost");
        }
        let deadline = tensor.deadline_ms.map(Duration::from_millis);
        let deadline = deadline.and_then(|left| since.checked_add(left));
        let Some(entry) = self.admission.enter(1, since) else {
            let error = format!(
                "model {} has as many requests as it answers in time; try again later",
                self.name
            );
            return LiveAnswer::refused(RefusalReason::Full, error);
        };
        let wanted = match self.asked.get(Wanted::from(&tensor.rows)).await {
            Ok(wanted) => wanted,
            Err(error) => {
                return LiveAnswer::refused(RefusalReason::Settings, error.to_string());
            }
        };
        let work = self.engine.classify(tensor.pixels, Lane::Live, &wanted);
        let classified = match deadline {
            None => work.await,
            Some(deadline) => match timeout_at(deadline.into(), work).await {
                Ok(classified) => classified,
                Err(_) => {
                    let error = "the deadline of the request has passed";
                    return LiveAnswer::refused(RefusalReason::Deadline, error);
                }
            },
        };
        self.outcome(classified, entry, fatal)
    }

    fn outcome(
        &self,
        classified: Result<Scores, InferError>,
        entry: Entry,
        fatal: &Fatal,
    ) -> LiveAnswer {
        let error = match classified {
            Ok(scores) => {
                entry.answered(Instant::now());
                return LiveAnswer {
                    outcome: LiveOutcome::Ok(scores),
                };
            }
            Err(error) => TaskError::from(error),
        };
        let message = error.to_string();
        match error.scope() {
            Scope::Image(kind) => {
                entry.answered(Instant::now());
                let error = message;
                LiveAnswer {
                    outcome: LiveOutcome::Failed(Failure { kind, error }),
                }
            }
            Scope::Job(_) => LiveAnswer::refused(RefusalReason::Settings, message),
            Scope::Nothing => unavailable(message),
            Scope::Worker => {
                if let TaskError::Infer(error) = error {
                    fatal.check(Err(error.into()));
                }
                unavailable(message)
            }
        }
    }
}

fn unavailable(message: impl Into<String>) -> LiveAnswer {
    LiveAnswer::refused(RefusalReason::Unavailable, message)
}
