//! A model that infer workers run: the serve role asks them by core NATS, one tensor a request.

use std::sync::Arc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use trommel_infer::Wanted;
use trommel_queue::{Answered, Broker, QueueError};
use trommel_types::{
    LiveAnswer, LiveOutcome, LiveTensor, Message, RefusalReason, RowOptions, Shape, WarmModel,
};

use crate::distributed::tensor_requests::LABELS;
use crate::job::ModelId;
use crate::live_engine::{EngineAnswer, LiveImage};
use crate::readiness::Need;
use crate::{NotAnswered, WorkerError};

/// Time between two checks for infer workers.
const LOOK: Duration = Duration::from_secs(1);
/// How often a tensor is sent: a second time if its worker died or is stopping.
const TRIES: u32 = 2;

/// A model on infer workers.
pub(crate) struct RemoteModel {
    pub(crate) id: ModelId,
    broker: Broker,
    subject: String,
    shape: Shape,
    /// Time limit for a worker, before another one is tried.
    limit: Duration,
    labels: OnceLock<Vec<Arc<str>>>,
    warm: Need,
}

impl RemoteModel {
    /// A model with this shape; a worker that has not answered within `limit` counts as dead.
    /// `warm` is set once a worker answers.
    pub(crate) fn new(
        id: ModelId,
        broker: Broker,
        subject: String,
        shape: Shape,
        limit: Duration,
        warm: Need,
    ) -> Self {
        Self {
            id,
            broker,
            subject,
            shape,
            limit,
            labels: OnceLock::new(),
            warm,
        }
    }

    /// Its classes, once an infer worker has reported them.
    pub(crate) fn labels(&self) -> Option<&[Arc<str>]> {
        self.labels.get().map(Vec::as_slice)
    }

    /// Checks repeatedly whether an infer worker with the warm model answers, until `shutdown`
    /// fires.
    pub(crate) async fn watch(
        self: Arc<Self>,
        shutdown: CancellationToken,
    ) -> Result<(), WorkerError> {
        let looking = async {
            loop {
                self.look().await?;
                sleep(LOOK).await;
            }
        };
        shutdown
            .run_until_cancelled(looking)
            .await
            .unwrap_or(Ok(()))
    }

    async fn look(&self) -> Result<(), WorkerError> {
        let headers: &[_] = match self.labels.get() {
            Some(_) => &[(LABELS, "no")],
            None => &[],
        };
        let hello = bytes::Bytes::new();
        let asked = self
            .broker
            .ask_once(&self.subject, headers, hello, self.limit);
        let warm = match asked.await? {
            Answered::With(answer) => WarmModel::decode(&answer),
            Answered::ByNobody | Answered::Not => {
                self.warm.set(false);
                return Ok(());
            }
        };
        match warm {
            Ok(warm) if *warm.model_version == *self.id.version => {
                if !warm.labels.is_empty() {
                    self.labels.get_or_init(|| warm.labels);
                }
                self.warm.set(true);
            }
            Ok(_) => self.warm.set(false),
            Err(error) => {
                tracing::warn!(model = %self.id.name, %error, "an infer worker answers what is not understood");
                self.warm.set(false);
            }
        }
        Ok(())
    }

    /// Has an image classified. The death of a worker costs time, not the answer: the tensor is
    /// sent again if the deadline allows.
    ///
    /// # Errors
    /// Why there is no row.
    pub(crate) async fn classify(
        &self,
        image: LiveImage,
        wanted: &Wanted,
        coming: u32,
    ) -> Result<EngineAnswer, NotAnswered> {
        let LiveImage {
            request,
            pixels,
            deadline,
        } = image;
        let mut tensor = LiveTensor {
            request,
            model: Arc::clone(&self.id.name),
            model_version: Arc::clone(&self.id.version),
            rows: rows(wanted),
            pixels,
            shape: self.shape,
            deadline_ms: None,
            coming,
        };
        let mut last = NotAnswered::Away(self.away("no infer worker with it answered in time"));
        for _ in 0..TRIES {
            let now = Instant::now();
            let left = deadline.map(|deadline| deadline.saturating_duration_since(now));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(NotAnswered::Expired);
            }
            tensor.deadline_ms = left.map(|left| left.as_millis().max(1) as u64);
            let limit = left.map_or(self.limit, |left| left.min(self.limit));
            let payload = tensor.encode().into();
            let asked = self.broker.ask_once(&self.subject, &[], payload, limit);
            match asked.await.map_err(|error| refused(&error))? {
                Answered::With(answer) => match self.read(&answer)? {
                    Ok(answer) => return Ok(answer),
                    // This worker is stopping; another one may not be.
                    Err(unavailable) => last = unavailable,
                },
                Answered::ByNobody => {
                    self.warm.set(false);
                    let reason = "no infer worker has it warm; start one with --role infer --serve";
                    return Err(NotAnswered::Away(self.away(reason)));
                }
                Answered::Not => {}
            }
        }
        Err(last)
    }

    /// A worker's reply; the inner error is one that another worker may not give.
    fn read(&self, answer: &[u8]) -> Result<Result<EngineAnswer, NotAnswered>, NotAnswered> {
        let answer = LiveAnswer::decode(answer).map_err(|error| {
            NotAnswered::Away(self.away(&format!("an infer worker's answer is invalid: {error}")))
        })?;
        match answer.outcome {
            LiveOutcome::Ok(scores) => Ok(Ok(EngineAnswer::Scores(scores))),
            LiveOutcome::Failed(failure) => Ok(Ok(EngineAnswer::Failed(failure))),
            LiveOutcome::Refused(refusal) => match refusal.reason {
                RefusalReason::Full => Err(NotAnswered::Full {
                    model: Arc::clone(&self.id.name),
                }),
                RefusalReason::Deadline => Err(NotAnswered::Expired),
                RefusalReason::Settings => Err(NotAnswered::Settings(refusal.error)),
                RefusalReason::Unavailable => Ok(Err(NotAnswered::Away(self.away(&refusal.error)))),
            },
        }
    }

    fn away(&self, reason: &str) -> String {
        format!(
            "model {} in version {}: {reason}",
            self.id.name, self.id.version
        )
    }
}

/// The row options, as messages have them.
fn rows(wanted: &Wanted) -> RowOptions {
    RowOptions {
        top_k: wanted.top_k,
        logits: wanted.logits,
        embedding: wanted.embedding,
        labels: wanted.labels.clone(),
        threshold: wanted.threshold,
        thresholds: wanted.thresholds.clone(),
        ..RowOptions::default()
    }
}

/// The broker does not permit the request.
fn refused(error: &QueueError) -> NotAnswered {
    NotAnswered::Away(error.to_string())
}

#[cfg(test)]
mod tests {
    use trommel_types::LabelSet;

    use super::*;

    #[test]
    fn what_a_row_holds_survives_the_way() {
        let wanted = Wanted {
            logits: true,
            labels: Some(LabelSet {
                names: vec!["cat".to_owned()],
                ..LabelSet::default()
            }),
            threshold: Some(0.25),
            thresholds: [("cat".to_owned(), 0.5)].into(),
            ..Wanted::default()
        };
        assert_eq!(Wanted::from(&rows(&wanted)), wanted);
    }
}
