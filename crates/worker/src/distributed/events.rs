//! What is told of a job to whoever listens: core NATS, nothing is kept.

use async_nats::HeaderMap;
use trommel_queue::Broker;

use crate::distributed::names::Subjects;
use crate::distributed::record::{Job, JobState};
use crate::distributed::registry::json;

/// Tells that a job has ended.
pub(crate) async fn ended(broker: &Broker, subjects: &Subjects, job: &Job) {
    let what = match job.state {
        JobState::Complete => "completed",
        JobState::Cancelled => "cancelled",
        JobState::Failed => "failed",
        JobState::Queued | JobState::Running => return,
    };
    let subject = subjects.event(&job.request.id, what);
    let told = serde_json::json!({
        "job": job.request.id,
        "state": job.state,
        "reason": job.reason,
        "finished_at": job.finished_at,
    });
    if let Err(error) = broker
        .publish_event(&subject, json(&told), HeaderMap::new())
        .await
    {
        tracing::warn!(subject, %error, "an event was not sent");
    }
}
