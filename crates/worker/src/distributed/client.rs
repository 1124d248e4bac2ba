//! The control API from the user's side.

use std::time::{Duration, Instant};

use async_nats::RequestErrorKind;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use trommel_queue::Broker;
use trommel_types::JobRequest;

use crate::WorkerError;
use crate::distributed::control::{JobId, ModelReply, SubmitReply};
use crate::distributed::presence::Presence;
use crate::distributed::registry::json;
use crate::distributed::status::JobStatus;
use crate::distributed::why::JobReasons;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same where a worker may have to look at a model for the first time, which reads all of it.
const PATIENCE_WITH_MODELS: Duration = Duration::from_secs(30);

/// Longest wait for somebody who answers at all.
const RESTART: Duration = Duration::from_secs(2);

/// Asks the workers.
#[derive(Clone)]
pub struct Client {
    broker: Broker,
    prefix: String,
}

impl Client {
    /// Asks by way of this broker.
    pub fn new(broker: Broker, prefix: &str) -> Self {
        Self {
            broker,
            prefix: prefix.to_owned(),
        }
    }

    /// Submits a job.
    ///
    /// # Errors
    /// When it is refused, with the reason, or nobody answers.
    pub async fn submit(&self, request: &JobRequest) -> Result<SubmitReply, WorkerError> {
        self.ask("submit", json(request)).await
    }

    /// How a job stands.
    ///
    /// # Errors
    /// When there is no such job, or nobody answers.
    pub async fn status(&self, id: &str) -> Result<JobStatus, WorkerError> {
        let id = id.to_owned();
        self.ask("status", json(&JobId { id })).await
    }

    /// Why a job does not move.
    ///
    /// # Errors
    /// When there is no such job, or nobody answers.
    pub async fn why(&self, id: &str) -> Result<JobReasons, WorkerError> {
        let id = id.to_owned();
        self.ask("why", json(&JobId { id })).await
    }

    /// All jobs, the newest first.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn list(&self) -> Result<Vec<JobStatus>, WorkerError> {
        self.ask("list", Bytes::new()).await
    }

    /// Ends a job; what is committed stays.
    ///
    /// # Errors
    /// When there is no such job, it has ended already, or nobody answers.
    pub async fn cancel(&self, id: &str) -> Result<(), WorkerError> {
        let id = id.to_owned();
        let JobId { .. } = self.ask("cancel", json(&JobId { id })).await?;
        Ok(())
    }

    /// The workers that are alive, with what they have done.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn workers(&self) -> Result<Vec<Presence>, WorkerError> {
        self.ask("workers", Bytes::new()).await
    }

    /// The models that jobs may name.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn models(&self) -> Result<Vec<ModelReply>, WorkerError> {
        self.ask("models", Bytes::new()).await
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        endpoint: &str,
        body: Bytes,
    ) -> Result<T, WorkerError> {
        let subject = format!("{}.api.{endpoint}", self.prefix);
        let patience = match endpoint {
            "submit" | "models" => PATIENCE_WITH_MODELS,
            _ => PATIENCE,
        };
        let asked = Instant::now();
        let answer = loop {
            let request = async_nats::Request::new()
                .payload(body.clone())
                .timeout(Some(patience));
            let answer = self.broker.client().send_request(subject.clone(), request);
            match answer.await {
                Ok(answer) => break answer,
                Err(error) => match error.kind() {
                    // A worker may be about to restart.
                    RequestErrorKind::NoResponders if asked.elapsed() < RESTART => {
                        tokio::time::sleep(RESTART / 10).await;
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
