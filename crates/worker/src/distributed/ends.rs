//! The end of a job: its record, the event, and cleaning up in the broker.

use async_nats::HeaderMap;
use trommel_queue::{Broker, Stream};

use crate::WorkerError;
use crate::distributed::job_store::{JobStore, json};
use crate::distributed::names::{Subjects, key};
use crate::distributed::record::{Job, JobState, Reason};

/// Ends a job as failed, unless it has ended already.
pub(crate) async fn fail(
    store: &JobStore,
    broker: &Broker,
    subjects: &Subjects,
    id: &str,
    reason: Reason,
) -> Result<(), WorkerError> {
    end(store, broker, subjects, id, JobState::Failed, Some(reason)).await?;
    Ok(())
}

/// Ends a job, unless it has ended already; returns its record if this call ended it. Whoever ends
/// the job sends the event, once. The sinks remove its waiting messages.
pub(crate) async fn end(
    store: &JobStore,
    broker: &Broker,
    subjects: &Subjects,
    id: &str,
    state: JobState,
    reason: Option<Reason>,
) -> Result<Option<Job>, WorkerError> {
    let ended = store.end(id, state, reason).await?;
    if let Some(job) = &ended {
        let what = match state {
            JobState::Complete => "completed",
            JobState::Cancelled => "cancelled",
            _ => "failed",
        };
        let told = serde_json::json!({
            "job": id,
            "state": job.state,
            "reason": job.reason,
            "finished_at": job.finished_at,
        });
        event(broker, subjects, id, what, &told).await;
    }
    Ok(ended)
}

/// Publishes over core NATS; nothing is stored.
pub(crate) async fn event(
    broker: &Broker,
    subjects: &Subjects,
    id: &str,
    what: &str,
    body: &serde_json::Value,
) {
    let subject = subjects.event(id, what);
    let sent = broker.publish_event(&subject, json(body), HeaderMap::new());
    if let Err(error) = sent.await {
        tracing::warn!(subject, %error, "an event was not sent");
    }
}

/// Removes the queued messages of a job that has ended: its rows are no longer needed. A sink that
/// still holds the job commits the rows that it has; others are dropped.
pub(crate) async fn sweep(
    broker: &Broker,
    subjects: &Subjects,
    job: &Job,
) -> Result<(), WorkerError> {
    let (id, lane) = (job.id(), job.lane());
    for (stream, subject) in [
        (Stream::Tasks, subjects.tasks(lane, id)),
        (Stream::Tensors, subjects.tensors_of_job(lane, id)),
        (Stream::Results, subjects.results(id, "*")),
    ] {
        broker.purge_subject(stream, &subject).await?;
    }
    Ok(())
}

/// Removes state that only a running job needs: claims of parts, and counts of attempts.
pub(crate) async fn clear(store: &JobStore, job: &Job) -> Result<(), WorkerError> {
    let id = job.id();
    store.kv().remove(&key::all_tried(id)).await?;
    for model in job.models() {
        store.kv().remove(&key::claims(id, &model.name)).await?;
    }
    Ok(())
}
