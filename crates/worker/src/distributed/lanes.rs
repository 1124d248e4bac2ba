//! Several queues as one, the most urgent first.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::select_all;
use trommel_queue::{Delivery, Published, Queue, QueueError, QueueStats};
use trommel_types::{Lane, Message};

/// One queue per lane. A pull takes from the most urgent lane that has messages.
pub(crate) struct Lanes<T> {
    /// In the order of [`Lane::OF_JOBS`].
    queues: [Arc<dyn Queue<T>>; 3],
    lane_of: fn(&T) -> Lane,
    pulls: AtomicUsize,
}

impl<T: Message> Lanes<T> {
    /// `queues` in the order of [`Lane::OF_JOBS`]; `lane_of` determines the lane of a message.
    pub(crate) fn new(queues: [Arc<dyn Queue<T>>; 3], lane_of: fn(&T) -> Lane) -> Self {
        Self {
            queues,
            lane_of,
            pulls: AtomicUsize::new(0),
        }
    }
}

#[async_trait]
impl<T: Message> Queue<T> for Lanes<T> {
    async fn publish(&self, id: &str, message: T) -> Result<Published, QueueError> {
        let lane = (self.lane_of)(&message).place_of_job();
        self.queues[lane].publish(id, message).await
    }

    async fn pull(&self, limit: usize, expiry: Duration) -> Result<Vec<Delivery<T>>, QueueError> {
        let pull = self.pulls.fetch_add(1, Ordering::Relaxed);
        for lane in Lane::order(pull) {
            let pulled = self.queues[lane.place_of_job()]
                .pull(limit, Duration::ZERO)
                .await?;
            if !pulled.is_empty() {
                return Ok(pulled);
            }
        }
        // A pull that is dropped takes nothing, so the loser loses nothing.
        let waiting = self.queues.iter().map(|queue| queue.pull(limit, expiry));
        select_all(waiting).await.0
    }

    async fn stats(&self) -> Result<QueueStats, QueueError> {
        let mut sum = QueueStats::default();
        for queue in &self.queues {
            let stats = queue.stats().await?;
            sum.waiting += stats.waiting;
            sum.in_flight += stats.in_flight;
            sum.dead_letters += stats.dead_letters;
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use trommel_queue::{Disposition, MemoryQueue, MemoryQueueConfig};
    use trommel_types::JobRequest;

    use super::*;

    fn lanes() -> Lanes<JobRequest> {
        let queue = || {
            Arc::new(MemoryQueue::new(MemoryQueueConfig::default())) as Arc<dyn Queue<JobRequest>>
        };
        Lanes::new([queue(), queue(), queue()], |job| job.lane)
    }

    async fn publish(lanes: &Lanes<JobRequest>, id: &str, lane: Lane) {
        let job = JobRequest {
            id: id.to_owned(),
            lane,
            ..JobRequest::default()
        };
        lanes.publish(id, job).await.unwrap();
    }

    async fn pull(lanes: &Lanes<JobRequest>) -> Option<String> {
        let pulled = lanes.pull(1, Duration::from_millis(20)).await.unwrap();
        let delivery = pulled.into_iter().next()?;
        let id = delivery.message().id.clone();
        delivery.settle(Disposition::Done).await.unwrap();
        Some(id)
    }

    #[tokio::test]
    async fn the_most_urgent_comes_first() {
        let lanes = lanes();
        publish(&lanes, "low", Lane::Low).await;
        publish(&lanes, "normal", Lane::Normal).await;
        publish(&lanes, "high", Lane::High).await;
        assert_eq!(lanes.stats().await.unwrap().waiting, 3);
        for expected in ["high", "normal", "low"] {
            assert_eq!(pull(&lanes).await.unwrap(), expected);
        }
        assert_eq!(pull(&lanes).await, None);
    }

    #[tokio::test]
    async fn the_least_urgent_does_not_starve() {
        let lanes = lanes();
        publish(&lanes, "low", Lane::Low).await;
        for number in 0..48 {
            publish(&lanes, &format!("high-{number}"), Lane::High).await;
        }
        let mut pulled = Vec::new();
        for _ in 0..32 {
            pulled.push(pull(&lanes).await.unwrap());
        }
        assert!(pulled.contains(&"low".to_owned()), "{pulled:?}");
    }

    #[tokio::test]
    async fn a_waiting_pull_hears_of_any_lane() {
        let lanes = Arc::new(lanes());
        let waiting = tokio::spawn({
            let lanes = Arc::clone(&lanes);
            async move { lanes.pull(1, Duration::from_secs(20)).await }
        });
        publish(&lanes, "low", Lane::Low).await;
        let pulled = waiting.await.unwrap().unwrap();
        assert_eq!(pulled[0].message().id, "low");
    }
}
