use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_nats::HeaderMap;
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use trommel_queue::{Broker, LIVE_FRAME, LIVE_FRAME_TIME, LiveFrame, LiveReader, subject_token};
use trommel_types::Classification;
use trommel_worker::{LiveConfig, NotAnswered, ServedModel};

use crate::ServeError;
use crate::entrance::{Asked, Entrance, Image, outcome};
use crate::live_turns::{Dropped, Turns};
use crate::metrics;

/// The job id in the rows of frames.
const JOB: &str = "live";
/// Headers of a frame that are copied to its result.
const PASSED_ON: [&str; 2] = [LIVE_FRAME, LIVE_FRAME_TIME];

/// Classifies the newest frames of live sources, and publishes the results.
///
/// Processes with the same model share the frames.
pub struct LiveSources {
    reader: LiveReader,
    work: Arc<Work>,
    /// Frames processed at once.
    abreast: usize,
}

struct Work {
    broker: Broker,
    entrance: Arc<Entrance>,
    model: Arc<ServedModel>,
    turns: Mutex<Turns>,
    /// Wakes waiters when a frame may be taken.
    changed: Notify,
}

impl LiveSources {
    /// Starts reading the sources in the settings; `abreast` frames are processed at once.
    ///
    /// # Errors
    /// If there is no such model, or the broker denies the frames to this user.
    pub async fn start(
        broker: &Broker,
        entrance: Arc<Entrance>,
        config: &LiveConfig,
        abreast: usize,
    ) -> Result<Self, ServeError> {
        let model = model_of(&entrance, config)?;
        let durable = format!("live-{}", subject_token(model.name()));
        let reader = broker.read_live(&durable, &config.sources).await;
        let reader = reader.map_err(|error| ServeError::Nats(error.to_string()))?;
        metrics::begin_live();
        Ok(Self {
            reader,
            work: Arc::new(Work {
                broker: broker.clone(),
                entrance,
                model,
                turns: Mutex::new(Turns::new(config.clone())),
                changed: Notify::new(),
            }),
            abreast: abreast.max(1),
        })
    }

    /// Classifies until `stop` fires, then finishes the frames in progress.
    ///
    /// # Errors
    /// If the broker denies the frames.
    pub async fn run(self, stop: CancellationToken) -> Result<(), ServeError> {
        let Self {
            mut reader,
            work,
            abreast,
        } = self;
        let (permits, open) = (Arc::new(Semaphore::new(abreast)), TaskTracker::new());
        let ended = loop {
            let has_ready = work.turns().has_ready();
            tokio::select! {
                () = stop.cancelled() => break Ok(()),
                frame = reader.next() => match frame {
                    Ok(frame) => work.offer(frame),
                    Err(error) => break Err(ServeError::Nats(error.to_string())),
                },
                permit = Arc::clone(&permits).acquire_owned(), if has_ready => {
                    let frame = work.turns().take();
                    let (Some(frame), Ok(permit)) = (frame, permit) else { continue };
                    let work = Arc::clone(&work);
                    open.spawn(async move {
                        work.work_on(frame).await;
                        drop(permit);
                    });
                }
                // A source may have room again.
                () = work.changed.notified() => {}
            }
        };
        open.close();
        open.wait().await;
        ended
    }
}

/// The model that classifies frames.
fn model_of(entrance: &Entrance, config: &LiveConfig) -> Result<Arc<ServedModel>, ServeError> {
    let mut models = entrance.answers.models();
    let found = match &config.model {
        Some(name) => entrance.answers.model(name),
        None => models.next().filter(|_| models.next().is_none()),
    };
    found.cloned().ok_or_else(|| {
        ServeError::Settings(match &config.model {
            Some(name) => format!("live.model = {name}: no model of this name answers requests; name one that does"),
            None => "several models answer requests; name the one that classifies live sources with live.model".to_owned(),
        })
    })
}

impl Work {
    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn offer(&self, frame: LiveFrame) {
        metrics::live_dropped(Dropped::Replaced, frame.replaced);
        let dropped = if frame.payload.len() > self.entrance.config.max_body.get() {
            Some(Dropped::TooLarge)
        } else {
            let mut turns = self.turns();
            let dropped = turns.offer(frame, Instant::now());
            metrics::live_sources(turns.sources());
            dropped
        };
        if let Some(reason) = dropped {
            metrics::live_dropped(reason, 1);
        }
    }

    async fn work_on(&self, frame: LiveFrame) {
        let source = frame.source.clone();
        let taken = taken_at(&frame);
        match self.classify(frame).await {
            Ok(row) => metrics::live_done(outcome(&row), now_micros().saturating_sub(taken)),
            Err(NotAnswered::Full { .. }) => metrics::live_dropped(Dropped::Shed, 1),
            Err(error) => {
                tracing::warn!(source, %error, "a frame has no result");
                metrics::live_done("error", now_micros().saturating_sub(taken));
            }
        }
        self.turns().done(&source);
        self.changed.notify_one();
    }

    async fn classify(&self, frame: LiveFrame) -> Result<Classification, NotAnswered> {
        let admitted = self.model.admit(1)?;
        let asked = Asked {
            id: JOB.into(),
            wanted: Arc::clone(self.model.wanted()),
            deadline: None,
        };
        let shape = asked.shape(&self.model);
        let image = Image {
            uri: format!(
                "nats://{}#{}",
                self.broker.live_subject(&frame.source),
                frame.sequence
            ),
            bytes: frame.payload,
        };
        let row = self.entrance.one(admitted, asked, image).await?;
        let mut headers = HeaderMap::new();
        for name in PASSED_ON {
            if let Some(value) = frame.headers.get(name) {
                headers.insert(name, value.as_str());
            }
        }
        let subject = self.broker.live_results(&frame.source);
        match serde_json::to_vec(&shape.row(&row)) {
            Ok(result) => {
                let client = self.broker.client();
                let published = client.publish_with_headers(subject, headers, result.into());
                if let Err(error) = published.await {
                    tracing::warn!(%error, "the result of a frame was not sent");
                }
            }
            Err(error) => tracing::warn!(%error, "the result of a frame has no JSON form"),
        }
        Ok(row)
    }
}

/// When a frame was taken, in microseconds since the Unix epoch: from its header, else its arrival
/// at the broker.
fn taken_at(frame: &LiveFrame) -> i64 {
    let header = frame.headers.get(LIVE_FRAME_TIME);
    let millis = header.and_then(|millis| millis.as_str().trim().parse::<i64>().ok());
    millis.map_or(frame.stored_at, |millis| millis.saturating_mul(1000))
}

fn now_micros() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
    })
}
