//! The in-process queue keeps the contract of every queue.

use std::sync::Arc;

use async_trait::async_trait;
use trommel_queue::testsuite::{self, ACK_WAIT, Fixture, MAX_WORK, Note};
use trommel_queue::{MemoryQueue, MemoryQueueConfig, Queue};

struct Memory;

#[async_trait]
impl Fixture for Memory {
    async fn queue(&self, capacity: usize) -> Arc<dyn Queue<Note>> {
        let config = MemoryQueueConfig {
            capacity,
            ack_wait: ACK_WAIT,
            max_work: MAX_WORK,
            dedupe_window: 10_000,
            ..MemoryQueueConfig::default()
        };
        Arc::new(MemoryQueue::new(config))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeps_the_contract() {
    testsuite::all(&Memory).await;
}
