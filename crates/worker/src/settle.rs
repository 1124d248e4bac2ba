use std::collections::BTreeMap;
use std::sync::Arc;

use trommel_infer::Answer;
use trommel_queue::{Delivery, Disposition, Queue, QueueError, QueueErrorKind};
use trommel_types::{
    Classification, Failure, ImageRef, Message, Outcome, PreparedImage, Role, Scalar,
};

use crate::clock::now;
use crate::fault::{Remedy, TaskError, remedy};
use crate::job::{Jobs, ModelId};
use crate::reports::{PutOff, Reports};
use crate::{Progress, RetryPolicy, WorkerError, metrics};

/// Deliveries of a message before further ones are counted in a way that survives the worker.
const UNCOUNTED: u32 = 2;

/// Where rows go.
#[derive(Clone)]
pub(crate) enum RowQueues {
    /// One queue for all models.
    Shared(Arc<dyn Queue<Classification>>),
    /// The queue of each model, by name.
    ByModel(BTreeMap<Arc<str>, Arc<dyn Queue<Classification>>>),
}

impl RowQueues {
    fn of(&self, model: &str) -> Result<&Arc<dyn Queue<Classification>>, WorkerError> {
        match self {
            Self::Shared(queue) => Ok(queue),
            Self::ByModel(queues) => queues
                .get(model)
                .ok_or_else(|| WorkerError::Model(format!("the job has no model {model}"))),
        }
    }
}

/// Ends deliveries: durable outcomes first, then the ack to the queue.
#[derive(Clone)]
pub(crate) struct Settler {
    pub(crate) results: RowQueues,
    pub(crate) jobs: Arc<dyn Jobs>,
    pub(crate) retry: RetryPolicy,
    pub(crate) progress: Arc<Progress>,
    /// Where reasons for postponed images are published.
    pub(crate) reports: Reports,
}

impl Settler {
    /// Refuses a delivery whose work was begun more often than the policy allows, before any work:
    /// it may kill its worker.
    ///
    /// Only begun work counts: a delivery that was prefetched and returned is not an attempt. The
    /// first two deliveries are not counted, so that the normal case costs nothing.
    pub(crate) async fn check_attempt<T: Subject>(
        &self,
        delivery: &Delivery<T>,
    ) -> Result<(), TaskError> {
        let (attempt, message) = (delivery.attempt(), delivery.message());
        if attempt == 1 && T::STAGE == Role::Preprocess {
            let attempts = self.jobs.begin(message.image());
            if attempts >= self.retry.max_deliveries.get() {
                return Err(TaskError::Poisoned { attempts });
            }
        }
        if attempt <= UNCOUNTED {
            return Ok(());
        }
        let (stage, job) = (T::STAGE.as_str(), &message.image().job);
        let id = message.id();
        let begun = self.jobs.try_again(stage, job, &id, attempt).await?;
        if begun > self.retry.max_deliveries.get() {
            return Err(TaskError::Poisoned {
                attempts: begun - 1,
            });
        }
        Ok(())
    }

    /// Settles `delivery`, which was to get an outcome for each of `models`.
    ///
    /// An image that no attempt can label gets its failed rows before its delivery is
    /// dead-lettered, so that a crash in between repeats it and never loses it.
    ///
    /// # Errors
    /// Errors that end this process; redelivery does the rest.
    pub(crate) async fn settle<T: Subject>(
        &self,
        delivery: Delivery<T>,
        outcome: Result<(), TaskError>,
        models: impl Iterator<Item = &ModelId>,
    ) -> Result<(), WorkerError> {
        let attempt = delivery.attempt();
        let disposition = match outcome {
            Ok(()) => Disposition::Done,
            Err(error) => match remedy(&error, attempt, &self.retry) {
                Remedy::EndWorker => return Err(into_worker_error(error)),
                Remedy::FailJob => {
                    let job = Arc::clone(&delivery.message().image().job);
                    self.jobs.fail(&job, into_worker_error(error)).await?;
                    Disposition::Done
                }
                Remedy::FailImage(kind) => {
                    let failure = Failure {
                        kind,
                        error: error.to_string(),
                    };
                    for model in models {
                        let failure = failure.clone();
                        self.publish(delivery.message().failed(failure, attempt, model))
                            .await?;
                    }
                    Disposition::DeadLetter {
                        reason: error.to_string(),
                    }
                }
                Remedy::SetAside => Disposition::DeadLetter {
                    reason: error.to_string(),
                },
                Remedy::Retry { after } => {
                    self.put_off(&**delivery.message(), attempt, &error);
                    Disposition::Retry { after }
                }
            },
        };
        metrics::settled(T::STAGE.as_str(), &disposition);
        Ok(delivery.settle(disposition).await.or_else(expired)?)
    }

    fn put_off<T: Subject>(&self, message: &T, attempt: u32, error: &TaskError) {
        let image = message.image();
        self.progress.count_retried();
        tracing::warn!(uri = image.uri, job = %image.job, attempt, %error, "will be tried again");
        self.reports.put_off(PutOff {
            stage: T::STAGE,
            job: image.job.to_string(),
            uri: image.uri.clone(),
            attempt,
            error: error.to_string(),
            at: now(),
        });
    }

    /// Publishes the model's answer for an image; it is stored when this returns. Values of the
    /// model's own columns follow those of the source.
    pub(crate) async fn publish_answer(
        &self,
        image: &PreparedImage,
        attempt: u32,
        model: &ModelId,
        answer: Answer,
    ) -> Result<(), WorkerError> {
        let Answer { scores, columns } = answer;
        let mut row = image.outcome(Outcome::Ok(scores), attempt, model);
        if !columns.is_empty() {
            // A retried row already has those of its failed row.
            let of_source = self.jobs.columns(&image.image.job).await?;
            row.image.columns.resize(of_source, Scalar::Null);
            row.image.columns.extend(columns);
        }
        self.publish(row).await
    }

    /// Publishes an outcome; it is stored when this returns. A row that does not fit into a message
    /// becomes a failed row with that reason.
    pub(crate) async fn publish(&self, row: Classification) -> Result<(), WorkerError> {
        let id = message_id(&row.image, &row.model);
        let results = self.results.of(&row.model)?;
        match results.publish(&id, row.clone()).await {
            Err(error) if error.kind() == QueueErrorKind::TooLarge => {
                tracing::warn!(id, %error, "the row is cut");
                results.publish(&id, row.cut(&error.to_string())).await?;
            }
            published => drop(published?),
        }
        self.jobs.end(&row);
        Ok(())
    }
}

fn into_worker_error(error: TaskError) -> WorkerError {
    match error {
        TaskError::Worker(error) => error,
        TaskError::Infer(error) => error.into(),
        TaskError::Queue(error) => error.into(),
        TaskError::Storage(error) => error.into(),
        TaskError::Prepare(_)
        | TaskError::TimedOut { .. }
        | TaskError::Expired
        | TaskError::Poisoned { .. }
        | TaskError::NoJob { .. } => WorkerError::Request(error.to_string()),
    }
}

/// Ignores a late settle: the image belongs to another worker now, whose outcome repeats this one.
pub(crate) fn expired(error: QueueError) -> Result<(), QueueError> {
    if error.kind() == QueueErrorKind::Expired {
        tracing::debug!(%error, "settled too late");
        return Ok(());
    }
    Err(error)
}

/// `(job, model, index)`: the deduplication id of all publishes from preprocess on.
pub(crate) fn message_id(image: &ImageRef, model: &str) -> String {
    format!("{}/{model}/{}", image.job, image.index)
}

/// A message about one image.
pub(crate) trait Subject: Message {
    /// The stage that processes such messages.
    const STAGE: Role;

    fn image(&self) -> &ImageRef;

    /// Identifies the message among those of its job.
    fn id(&self) -> String;

    /// The row of an image that has no label.
    fn failed(&self, failure: Failure, attempt: u32, model: &ModelId) -> Classification;
}

impl Subject for ImageRef {
    const STAGE: Role = Role::Preprocess;

    fn image(&self) -> &ImageRef {
        self
    }

    fn id(&self) -> String {
        self.index.to_string()
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
    const STAGE: Role = Role::Infer;

    fn image(&self) -> &ImageRef {
        &self.image
    }

    fn id(&self) -> String {
        format!("{}/{}", self.model, self.image.index)
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
            // The first delivery of each stage is not a repeat.
            attempts: self.attempts + attempt - 1,
            finished_at: now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use async_trait::async_trait;
    use trommel_infer::Wanted;
    use trommel_queue::{MemoryQueue, MemoryQueueConfig};
    use trommel_types::{Content, Lane};

    use super::*;
    use crate::job::Planned;

    /// Counts how often work was begun, like the broker for all workers.
    #[derive(Default)]
    struct Begun(AtomicU32);

    #[async_trait]
    impl Jobs for Begun {
        async fn plan(&self, _: &ImageRef) -> Result<Planned, WorkerError> {
            Ok(Planned::Unknown)
        }

        async fn rows(&self, _: &ImageRef) -> Result<Arc<Wanted>, WorkerError> {
            Ok(Arc::default())
        }

        async fn columns(&self, _: &str) -> Result<usize, WorkerError> {
            Ok(0)
        }

        async fn fail(&self, _: &str, error: WorkerError) -> Result<(), WorkerError> {
            Err(error)
        }

        async fn try_again(
            &self,
            _: &'static str,
            _: &str,
            _: &str,
            _: u32,
        ) -> Result<u32, WorkerError> {
            Ok(self.0.fetch_add(1, Ordering::Relaxed) + 1)
        }
    }

    async fn hand_back(delivery: Delivery<ImageRef>) {
        let again = Disposition::Retry {
            after: Duration::ZERO,
        };
        delivery.settle(again).await.unwrap();
    }

    /// R8: next to a busy lane, images that were never processed ended as poisoned.
    #[tokio::test]
    async fn a_delivery_that_was_handed_back_unworked_is_no_attempt() {
        let tasks = MemoryQueue::new(MemoryQueueConfig::default());
        let settler = Settler {
            results: RowQueues::Shared(Arc::new(MemoryQueue::new(MemoryQueueConfig::default()))),
            jobs: Arc::new(Begun::default()),
            retry: RetryPolicy::default(),
            progress: Arc::default(),
            reports: Reports::default(),
        };
        let image = ImageRef {
            job: "job".into(),
            index: 0,
            lane: Lane::Low,
            uri: "a.jpg".to_owned(),
            content: Content::Whole,
            etag: None,
            size: None,
            columns: Vec::new(),
        };
        tasks.publish("job/0", image).await.unwrap();
        let next = async || {
            let pulled = tasks.pull(1, Duration::from_secs(10)).await.unwrap();
            pulled.into_iter().next().unwrap()
        };
        for _ in 0..50 {
            hand_back(next().await).await;
        }
        for _ in 0..settler.retry.max_deliveries.get() {
            let delivery = next().await;
            assert!(delivery.attempt() > 50);
            settler.check_attempt(&delivery).await.unwrap();
            hand_back(delivery).await;
        }
        let refused = settler.check_attempt(&next().await).await.unwrap_err();
        let begun = settler.retry.max_deliveries.get();
        assert!(
            matches!(refused, TaskError::Poisoned { attempts } if attempts == begun),
            "{refused}"
        );
    }
}
