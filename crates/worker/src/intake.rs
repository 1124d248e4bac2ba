use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use trommel_queue::{Delivery, Queue};
use trommel_types::Message;

use crate::WorkerError;

/// A queue from which nothing has come for this long is idle.
const IDLE_AFTER: Duration = Duration::from_millis(5);
/// Bounds how long a queue keeps one request open.
const EXPIRY: Duration = Duration::from_secs(30);

/// How a stage takes deliveries from its queue: never more than it may hold at once.
pub(crate) struct Intake<T: Message> {
    queue: Arc<dyn Queue<T>>,
    permits: Arc<Semaphore>,
}

impl<T: Message> Intake<T> {
    pub(crate) fn new(queue: Arc<dyn Queue<T>>, max_in_flight: usize) -> Self {
        Self {
            queue,
            permits: Arc::new(Semaphore::new(max_in_flight)),
        }
    }

    /// Waits for a permit, then for a delivery. Work is in hand while the permit lives. Calls
    /// `when_idle` each time that the queue turns out to be empty.
    ///
    /// Cancel-safe: a pull that is dropped takes nothing from the queue.
    ///
    /// # Errors
    /// Only those that no waiting can cure.
    pub(crate) async fn next_delivery(
        &self,
        when_idle: impl Fn(),
    ) -> Result<(Delivery<T>, OwnedSemaphorePermit), WorkerError> {
        let permit = Arc::clone(&self.permits)
            .acquire_owned()
            .await
            .expect("the semaphore of an intake is never closed");
        let mut expiry = IDLE_AFTER;
        loop {
            if let Some(delivery) = self.queue.pull(1, expiry).await?.into_iter().next() {
                return Ok((delivery, permit));
            }
            when_idle();
            expiry = EXPIRY;
        }
    }
}
