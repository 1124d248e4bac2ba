use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use trommel_queue::{Delivery, Disposition, Queue};
use trommel_types::Message;

use crate::metrics::{self, InFlight};
use crate::{Role, WorkerError};

/// A queue is idle after this time without messages.
const IDLE_AFTER: Duration = Duration::from_millis(5);
/// Longest time that a queue keeps one request open.
const EXPIRY: Duration = Duration::from_secs(30);
/// Most deliveries per request; a request for one costs a broker as much as one for many.
const PULL: usize = 64;

/// Work is in flight while this lives.
pub(crate) struct InHand {
    _permit: OwnedSemaphorePermit,
    _in_flight: InFlight,
}

/// Takes deliveries from a stage's queue, never more than it may hold at once.
pub(crate) struct Intake<T: Message> {
    stage: &'static str,
    queue: Arc<dyn Queue<T>>,
    permits: Arc<Semaphore>,
    /// Deliveries taken together with the last one, not handed out yet.
    ahead: Mutex<VecDeque<(Delivery<T>, OwnedSemaphorePermit)>>,
}

impl<T: Message> Intake<T> {
    pub(crate) fn new(stage: Role, queue: Arc<dyn Queue<T>>, max_in_flight: usize) -> Self {
        Self {
            stage: stage.as_str(),
            queue,
            permits: Arc::new(Semaphore::new(max_in_flight)),
            ahead: Mutex::default(),
        }
    }

    /// Waits for a permit, then for a delivery. Calls `when_idle` each time the queue is empty.
    ///
    /// Cancel-safe: a pull that is dropped takes nothing from the queue.
    ///
    /// # Errors
    /// Only permanent ones.
    pub(crate) async fn next_delivery(
        &self,
        when_idle: impl Fn(),
    ) -> Result<(Delivery<T>, InHand), WorkerError> {
        let ahead = self.ahead().pop_front();
        if let Some((delivery, permit)) = ahead {
            return Ok(self.hand_out(delivery, permit));
        }
        let permit = Arc::clone(&self.permits)
            .acquire_owned()
            .await
            .expect("the semaphore of an intake is never closed");
        let mut expiry = IDLE_AFTER;
        loop {
            let more: Vec<_> =
                std::iter::repeat_with(|| Arc::clone(&self.permits).try_acquire_owned())
                    .map_while(Result::ok)
                    .take(PULL - 1)
                    .collect();
            let pulled = self.queue.pull(1 + more.len(), expiry).await?;
            let mut pulled = pulled.into_iter();
            if let Some(delivery) = pulled.next() {
                self.ahead().extend(pulled.zip(more));
                return Ok(self.hand_out(delivery, permit));
            }
            when_idle();
            expiry = EXPIRY;
        }
    }

    fn hand_out(
        &self,
        delivery: Delivery<T>,
        permit: OwnedSemaphorePermit,
    ) -> (Delivery<T>, InHand) {
        let in_hand = InHand {
            _permit: permit,
            _in_flight: metrics::delivered(self.stage, &delivery),
        };
        (delivery, in_hand)
    }

    /// Returns deliveries that were not handed out, so that others get them at once. For a stage
    /// that has stopped.
    pub(crate) async fn give_back(&self) {
        loop {
            let Some((delivery, _permit)) = self.ahead().pop_front() else {
                return;
            };
            let again = Disposition::Retry {
                after: Duration::ZERO,
            };
            if let Err(error) = delivery.settle(again).await {
                tracing::debug!(%error, "a delivery is given back by its deadline");
            }
        }
    }

    fn ahead(&self) -> MutexGuard<'_, VecDeque<(Delivery<T>, OwnedSemaphorePermit)>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use trommel_queue::{MemoryQueue, MemoryQueueConfig};
    use trommel_types::JobRequest;

    use super::*;

    async fn queue(messages: usize) -> Arc<dyn Queue<JobRequest>> {
        let queue = MemoryQueue::new(MemoryQueueConfig::default());
        for number in 0..messages {
            let id = number.to_string();
            queue.publish(&id, JobRequest::default()).await.unwrap();
        }
        Arc::new(queue)
    }

    #[tokio::test]
    async fn no_more_is_taken_than_may_be_in_hand() {
        let queue = queue(10).await;
        let intake = Intake::new(Role::Preprocess, Arc::clone(&queue), 3);
        let mut in_hand = Vec::new();
        for _ in 0..3 {
            in_hand.push(intake.next_delivery(|| ()).await.unwrap());
        }
        assert_eq!(queue.stats().await.unwrap().in_flight, 3);
        let next = intake.next_delivery(|| ());
        let next = tokio::time::timeout(Duration::from_millis(50), next).await;
        assert!(next.is_err(), "a fourth one came");
        in_hand.pop();
        assert!(intake.next_delivery(|| ()).await.is_ok());
    }

    #[tokio::test]
    async fn what_was_taken_ahead_is_given_back() {
        let queue = queue(10).await;
        let intake = Intake::new(Role::Preprocess, Arc::clone(&queue), 5);
        let in_hand = intake.next_delivery(|| ()).await.unwrap();
        assert_eq!(queue.stats().await.unwrap().in_flight, 5);
        intake.give_back().await;
        let stats = queue.stats().await.unwrap();
        assert_eq!((stats.waiting, stats.in_flight), (9, 1));
        drop(in_hand);
    }
}
