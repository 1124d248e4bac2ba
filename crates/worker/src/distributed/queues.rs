//! The queues between the roles, as streams and consumers of the broker.

use std::num::NonZeroU32;
use std::sync::Arc;

use trommel_queue::{Broker, ConsumerSpec, Queue, QueueError, QueueSpec, Stream};
use trommel_types::{
    Classification, ImageRef, JobModel, JobRequest, Lane, Message, PreparedImage, Role,
};

use crate::WorkerConfig;
use crate::distributed::lanes::Lanes;
use crate::distributed::names::{
    Subjects, jobs_consumer, kept_id, results_consumer, tasks_consumer, tensors_consumer,
};

/// Unsettled deliveries of one consumer, over all workers.
const MAX_ACK_PENDING: NonZeroU32 = NonZeroU32::new(20_000).expect("20,000 is not 0");
/// Ack waits of results. A sink holds a whole part of them and has to extend each one, which costs
/// the broker a message; nothing waits for their expiry, as the next sink opens its own consumer.
const RESULT_ACK_WAITS: u32 = 6;
/// Messages that a worker requests ahead, to hide the round trip.
const PREFETCH: usize = 16;

/// Which ends of a queue this process uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    /// It only publishes.
    Publish,
    /// It also pulls.
    Both,
}

/// Jobs, from users to ingest.
pub(crate) async fn jobs(
    broker: &Broker,
    subjects: &Subjects,
    config: &WorkerConfig,
    ends: Ends,
) -> Result<Arc<dyn Queue<JobRequest>>, QueueError> {
    let lane = |lane| {
        let (publish, dead) = (subjects.clone(), subjects.clone());
        QueueSpec {
            stream: Stream::Jobs,
            subject: Arc::new(move |job: &JobRequest| publish.jobs(job.lane)),
            consumer: (ends == Ends::Both)
                .then(|| consumer(jobs_consumer(lane), subjects.jobs(lane), config, true)),
            dead_subject: Arc::new(move |job: &JobRequest| {
                dead.dead(Role::Ingest.as_str(), &kept_id(job))
            }),
            on_malformed: None,
        }
    };
    lanes(broker, lane, |job| job.lane).await
}

/// Tasks, from ingest to preprocess.
pub(crate) async fn tasks(
    broker: &Broker,
    subjects: &Subjects,
    config: &WorkerConfig,
    ends: Ends,
) -> Result<Arc<dyn Queue<ImageRef>>, QueueError> {
    let lane = |lane| {
        let (publish, dead) = (subjects.clone(), subjects.clone());
        QueueSpec {
            stream: Stream::Tasks,
            subject: Arc::new(move |image: &ImageRef| publish.tasks(image.lane, &image.job)),
            consumer: (ends == Ends::Both).then(|| task_consumer(subjects, config, lane)),
            dead_subject: Arc::new(move |image: &ImageRef| {
                dead.dead(Role::Preprocess.as_str(), &image.job)
            }),
            on_malformed: None,
        }
    };
    lanes(broker, lane, |image| image.lane).await
}

/// Tensors of a model, from preprocess to infer.
pub(crate) async fn tensors_of(
    broker: &Broker,
    subjects: &Subjects,
    config: &WorkerConfig,
    model: &JobModel,
) -> Result<Arc<dyn Queue<PreparedImage>>, QueueError> {
    let lane = |lane| QueueSpec {
        consumer: Some(tensor_consumer(subjects, config, model, lane)),
        ..tensor_spec(subjects)
    };
    lanes(broker, lane, |tensor| tensor.image.lane).await
}

/// Creates the consumers of tasks, and of the tensors of these models, before anyone pulls from
/// them, so that workers can be scaled from zero by their backlog.
pub(crate) async fn ensure_consumers(
    broker: &Broker,
    subjects: &Subjects,
    config: &WorkerConfig,
    models: &[JobModel],
) -> Result<(), QueueError> {
    for lane in Lane::OF_JOBS {
        let tasks = task_consumer(subjects, config, lane);
        broker.ensure_consumer(Stream::Tasks, &tasks).await?;
        for model in models {
            let tensors = tensor_consumer(subjects, config, model, lane);
            broker.ensure_consumer(Stream::Tensors, &tensors).await?;
        }
    }
    Ok(())
}

fn task_consumer(subjects: &Subjects, config: &WorkerConfig, lane: Lane) -> ConsumerSpec {
    consumer(
        tasks_consumer(lane),
        subjects.tasks(lane, "*"),
        config,
        false,
    )
}

fn tensor_consumer(
    subjects: &Subjects,
    config: &WorkerConfig,
    model: &JobModel,
    lane: Lane,
) -> ConsumerSpec {
    let name = tensors_consumer(model, lane);
    let subject = subjects.tensors(&model.name, &model.version, lane, "*");
    consumer(name, subject, config, false)
}

/// Tensors of all models, for publishing only.
pub(crate) async fn tensors(
    broker: &Broker,
    subjects: &Subjects,
) -> Result<Arc<dyn Queue<PreparedImage>>, QueueError> {
    Ok(Arc::new(broker.queue(tensor_spec(subjects)).await?))
}

fn tensor_spec(subjects: &Subjects) -> QueueSpec<PreparedImage> {
    let (publish, dead) = (subjects.clone(), subjects.clone());
    QueueSpec {
        stream: Stream::Tensors,
        subject: Arc::new(move |tensor: &PreparedImage| {
            let image = &tensor.image;
            publish.tensors(&tensor.model, &tensor.model_version, image.lane, &image.job)
        }),
        consumer: None,
        dead_subject: Arc::new(move |tensor: &PreparedImage| {
            dead.dead(Role::Infer.as_str(), &tensor.image.job)
        }),
        on_malformed: None,
    }
}

/// Results of a job and model, from infer to its sink, which holds their lease. Results that an
/// earlier holder did not settle are redelivered at once: its consumer is replaced.
pub(crate) async fn results_of(
    broker: &Broker,
    subjects: &Subjects,
    config: &WorkerConfig,
    job: &str,
    model: &str,
) -> Result<Arc<dyn Queue<Classification>>, QueueError> {
    let mut spec = result_spec(subjects);
    let name = results_consumer(job, model);
    let mut consumer = consumer(name, subjects.results(job, model), config, true);
    // The sink holds a whole part before it settles any of it.
    let part = u32::try_from(2 * config.sink.part_rows.get()).unwrap_or(u32::MAX);
    consumer.max_ack_pending = consumer.max_ack_pending.saturating_add(part);
    consumer.prefetch = 256;
    consumer.ack_wait = consumer.ack_wait.saturating_mul(RESULT_ACK_WAITS);
    broker
        .delete_consumer(Stream::Results, &consumer.durable)
        .await?;
    spec.consumer = Some(consumer);
    Ok(Arc::new(broker.queue(spec).await?))
}

/// Results of all jobs, for publishing only.
pub(crate) async fn results(
    broker: &Broker,
    subjects: &Subjects,
) -> Result<Arc<dyn Queue<Classification>>, QueueError> {
    Ok(Arc::new(broker.queue(result_spec(subjects)).await?))
}

fn result_spec(subjects: &Subjects) -> QueueSpec<Classification> {
    let (publish, dead) = (subjects.clone(), subjects.clone());
    QueueSpec {
        stream: Stream::Results,
        subject: Arc::new(move |row: &Classification| publish.results(&row.image.job, &row.model)),
        consumer: None,
        dead_subject: Arc::new(move |row: &Classification| {
            dead.dead(Role::Sink.as_str(), &row.image.job)
        }),
        on_malformed: None,
    }
}

fn consumer(
    durable: String,
    filter_subject: String,
    config: &WorkerConfig,
    confirm_acks: bool,
) -> ConsumerSpec {
    ConsumerSpec {
        ack_wait: config.broker.ack_wait,
        max_ack_pending: MAX_ACK_PENDING,
        prefetch: PREFETCH,
        confirm_acks,
        ..ConsumerSpec::new(durable, filter_subject)
    }
}

async fn lanes<T: Message>(
    broker: &Broker,
    spec: impl Fn(Lane) -> QueueSpec<T>,
    lane_of: fn(&T) -> Lane,
) -> Result<Arc<dyn Queue<T>>, QueueError> {
    let [high, normal, low] = Lane::OF_JOBS.map(spec);
    let queues: [Arc<dyn Queue<T>>; 3] = [
        Arc::new(broker.queue(high).await?),
        Arc::new(broker.queue(normal).await?),
        Arc::new(broker.queue(low).await?),
    ];
    Ok(Arc::new(Lanes::new(queues, lane_of)))
}
