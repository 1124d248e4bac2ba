//! The client side of the control API.

use std::time::{Duration, Instant};

use async_nats::RequestErrorKind;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde::de::DeserializeOwned;
use tokio::select;
use tokio::time::interval;
use trommel_queue::Broker;
use trommel_types::JobRequest;

use crate::WorkerError;
use crate::distributed::control::{JobId, JobPage, ListRequest, ModelReply, SubmitReply};
use crate::distributed::dead::DeadLetter;
use crate::distributed::job_store::json;
use crate::distributed::presence::Presence;
use crate::distributed::retry::{RetryReply, RetryRequest};
use crate::distributed::status::JobStatus;
use crate::distributed::why::JobReasons;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time to wait for one worker. A worker that was stopped may have been chosen to answer; the next
/// request may reach another one, and all requests can be repeated.
const ATTEMPT: Duration = Duration::from_secs(2);

/// Longest wait for anyone to answer.
const RESTART: Duration = Duration::from_secs(2);

/// Sends requests to the workers.
#[derive(Clone)]
pub struct Client {
    broker: Broker,
    prefix: String,
}

impl Client {
    /// Uses this broker.
    pub fn new(broker: Broker, prefix: &str) -> Self {
        Self {
            broker,
            prefix: prefix.to_owned(),
        }
    }

    /// Submits a job.
    ///
    /// # Errors
    /// When it is refused, with the reason, or there is no answer.
    pub async fn submit(&self, request: &JobRequest) -> Result<SubmitReply, WorkerError> {
        self.ask("submit", json(request)).await
    }

    /// The status of a job.
    ///
    /// # Errors
    /// When there is no such job or no answer.
    pub async fn status(&self, id: &str) -> Result<JobStatus, WorkerError> {
        let id = id.to_owned();
        self.ask("status", json(&JobId { id })).await
    }

    /// Why a job makes no progress.
    ///
    /// # Errors
    /// When there is no such job or no answer.
    pub async fn why(&self, id: &str) -> Result<JobReasons, WorkerError> {
        let id = id.to_owned();
        self.ask("why", json(&JobId { id })).await
    }

    /// A page of jobs, the newest first.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn list(&self, page: &ListRequest) -> Result<JobPage, WorkerError> {
        self.ask("list", json(page)).await
    }

    /// The dead letters of a job.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn dead(&self, id: &str) -> Result<Vec<DeadLetter>, WorkerError> {
        let id = id.to_owned();
        self.ask("dead", json(&JobId { id })).await
    }

    /// Ends a job; committed rows stay.
    ///
    /// # Errors
    /// When there is no such job, it has ended already, or there is no answer.
    pub async fn cancel(&self, id: &str) -> Result<(), WorkerError> {
        let id = id.to_owned();
        let JobId { .. } = self.ask("cancel", json(&JobId { id })).await?;
        Ok(())
    }

    /// Retries failed rows of a job.
    ///
    /// # Errors
    /// When it is refused, with the reason, or there is no answer.
    pub async fn retry(&self, request: &RetryRequest) -> Result<RetryReply, WorkerError> {
        self.ask("retry", json(request)).await
    }

    /// The live workers, with their counters.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn workers(&self) -> Result<Vec<Presence>, WorkerError> {
        self.ask("workers", Bytes::new()).await
    }

    /// The models available to jobs.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn models(&self) -> Result<Vec<ModelReply>, WorkerError> {
        self.ask("models", Bytes::new()).await
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        endpoint: &str,
        body: Bytes,
    ) -> Result<T, WorkerError> {
        let subject = format!("{}.api.{endpoint}", self.prefix);
        let (patience, attempt) = match endpoint {
            // A worker may have to read a new model completely first.
            "submit" | "models" => (3 * PATIENCE, 3 * ATTEMPT),
            "cancel" | "retry" => (PATIENCE, ATTEMPT),
            _ => (PATIENCE, ATTEMPT / 4),
        };
        let asked = Instant::now();
        let mut attempts = interval(attempt);
        let mut answers = FuturesUnordered::new();
        let answer = loop {
            let answer = select! {
                biased;
                Some(answer) = answers.next() => answer,
                _ = attempts.tick() => {
                    let left = patience.saturating_sub(asked.elapsed());
                    let request = async_nats::Request::new().payload(body.clone()).timeout(Some(left));
                    answers.push(self.broker.client().send_request(subject.clone(), request));
                    continue;
                }
            };
            match answer {
                Ok(answer) => break answer,
                Err(error) => match error.kind() {
                    // A worker may be restarting.
                    RequestErrorKind::NoResponders if asked.elapsed() < RESTART => {
                        attempts.reset_after(RESTART / 10);
                    }
                    RequestErrorKind::NoResponders | RequestErrorKind::TimedOut => {
                        return Err(WorkerError::NobodyAnswers);
                    }
                    _ => {
                        let reason = format!("the workers gave no answer: {error}");
                        return Err(WorkerError::Refused(reason));
                    }
                },
            }
        };
        let headers = answer.headers.unwrap_or_default();
        if let Some(reason) = headers.get("Nats-Service-Error") {
            return Err(WorkerError::Refused(reason.to_string()));
        }
        serde_json::from_slice(&answer.payload).map_err(|error| {
            WorkerError::Refused(format!("the workers' answer cannot be read: {error}"))
        })
    }
}
