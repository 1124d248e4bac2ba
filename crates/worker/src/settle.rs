use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc;
use trommel_queue::{Delivery, Disposition, Queue, QueueError, QueueErrorKind};
use trommel_types::{Classification, Failure, ImageRef, Message, Outcome, PreparedImage};

use crate::disposition::{TaskError, disposition};
use crate::distributed::Said;
use crate::job::ModelId;
use crate::{Progress, RetryPolicy, WorkerError, metrics};

/// Ends deliveries: durable outcomes first, then the word to the queue.
#[derive(Clone)]
pub(crate) struct Settler {
    pub(crate) results: Arc<dyn Queue<Classification>>,
    pub(crate) retry: RetryPolicy,
    pub(crate) progress: Arc<Progress>,
    /// Where others learn why images are put off.
    pub(crate) said: Option<mpsc::Sender<Said>>,
}

impl Settler {
    fn say<T: Subject>(&self, message: &T, attempt: u32, error: &TaskError) {
        let Some(said) = &self.said else { return };
        let image = message.image();
        // Where much is said, the latest word is not missed.
        drop(said.try_send(Said {
            stage: T::STAGE.to_owned(),
            job: image.job.to_string(),
            uri: image.uri.clone(),
            attempt,
            error: error.to_string(),
            at: now(),
        }));
    }

    /// Refuses a delivery that came back more often than the policy allows, before any work: it
    /// may be what kills its worker.
    pub(crate) fn check_attempt(&self, attempt: u32) -> Result<(), TaskError> {
        if attempt > self.retry.max_deliveries.get() {
            return Err(TaskError::Poisoned {
                attempts: attempt - 1,
            });
        }
        Ok(())
    }

    /// Tells the queue what became of `delivery`, which was to get an outcome of each of `models`.
    ///
    /// An image that no attempt can label gets its failed rows before its delivery is
    /// dead-lettered, so that a crash between the two repeats it and never loses it.
    ///
    /// # Errors
    /// Those of the queues, when no waiting cures them, and of a device that is gone: then the
    /// process ends and redelivery does the rest.
    pub(crate) async fn settle<T: Subject>(
        &self,
        delivery: Delivery<T>,
        outcome: Result<(), TaskError>,
        models: impl Iterator<Item = &ModelId>,
    ) -> Result<(), WorkerError> {
        let attempt = delivery.attempt();
        let outcome = match outcome {
            Err(TaskError::Infer(error)) if error.is_fatal() => return Err(error.into()),
            Err(TaskError::Worker(error)) if !error.is_of_one_image() => return Err(error),
            outcome => outcome,
        };
        let disposition = match &outcome {
            Ok(()) => Disposition::Done,
            Err(error) => disposition(error, attempt, &self.retry),
        };
        match (&disposition, &outcome) {
            (Disposition::Retry { after }, Err(error)) => {
                self.progress.count_retried();
                self.say(&**delivery.message(), attempt, error);
                tracing::warn!(uri = delivery.message().image().uri, attempt, ?after, %error, "will be tried again");
            }
            (Disposition::DeadLetter { .. }, Err(error)) => {
                let failure = Failure {
                    kind: error.kind(),
                    error: error.to_string(),
                };
                for model in models {
                    let failure = failure.clone();
                    self.publish(delivery.message().failed(failure, attempt, model))
                        .await?;
                }
            }
            _ => {}
        }
        metrics::settled(T::STAGE, &disposition);
        Ok(delivery.settle(disposition).await.or_else(expired)?)
    }

    /// Publishes an outcome; it is stored when this returns.
    pub(crate) async fn publish(&self, classification: Classification) -> Result<(), WorkerError> {
        let id = message_id(&classification.image, &classification.model);
        self.results.publish(&id, classification).await?;
        Ok(())
    }
}

/// Passes over a settle that came too late: the image is another worker's now, whose outcome repeats
/// this one.
pub(crate) fn expired(error: QueueError) -> Result<(), QueueError> {
    if error.kind() == QueueErrorKind::Expired {
        tracing::debug!(%error, "settled too late");
        return Ok(());
    }
    Err(error)
}

/// `(job, model, index)`: the deduplication id of every publish from preprocess on.
pub(crate) fn message_id(image: &ImageRef, model: &str) -> String {
    format!("{}/{model}/{}", image.job, image.index)
}

/// A message that is about one image.
pub(crate) trait Subject: Message {
    /// The stage that works on such messages.
    const STAGE: &'static str;

    fn image(&self) -> &ImageRef;

    /// The row of an image that has no label.
    fn failed(&self, failure: Failure, attempt: u32, model: &ModelId) -> Classification;
}

impl Subject for ImageRef {
    const STAGE: &'static str = "preprocess";

    fn image(&self) -> &ImageRef {
        self
    }

    fn failed(&self, failure: Failure, attempt: u32, model: &ModelId) -> Classification {
        Classification {
            image: self.without_inline_bytes(),
            model: Arc::clone(&model.name),
            model_version: Arc::clone(&model.version),
            bytes: self.size,
            original: None,
            outcome: Outcome::Failed(failure),
            attempts: attempt,
            finished_at: now(),
        }
    }
}

impl Subject for PreparedImage {
    const STAGE: &'static str = "infer";

    fn image(&self) -> &ImageRef {
        &self.image
    }

    fn failed(&self, failure: Failure, attempt: u32, model: &ModelId) -> Classification {
        self.outcome(Outcome::Failed(failure), attempt, model)
    }
}

/// The row of a prepared image.
pub(crate) trait PreparedImageExt {
    fn outcome(&self, outcome: Outcome, attempt: u32, model: &ModelId) -> Classification;
}

impl PreparedImageExt for PreparedImage {
    fn outcome(&self, outcome: Outcome, attempt: u32, model: &ModelId) -> Classification {
        Classification {
            image: self.image.clone(),
            model: Arc::clone(&model.name),
            model_version: Arc::clone(&model.version),
            bytes: Some(self.bytes),
            original: Some(self.original),
            outcome,
            // The first delivery of each stage is no repeat.
            attempts: self.attempts + attempt - 1,
            finished_at: now(),
        }
    }
}

/// Microseconds since the Unix epoch, UTC.
pub(crate) fn now() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}
