//! The contract of a [`Queue`] as tests. Every implementation runs all of them, see [`all`].
//!
//! A test fails by panicking. Times are real and generous, so that a test says something about a
//! queue on a busy machine and about a server.

#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, timeout};
use trommel_types::Message;

use crate::{Delivery, Disposition, Published, Queue, QueueErrorKind};

/// What the tests send.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    number: u64,
}

impl Message for Note {}

/// Makes queues of one implementation.
#[async_trait]
pub trait Fixture: Sync {
    /// An empty queue that holds `capacity` messages, whose ack deadline is [`ACK_WAIT`] and whose
    /// longest work is [`MAX_WORK`].
    async fn queue(&self, capacity: usize) -> Arc<dyn Queue<Note>>;
}

/// The ack deadline of every queue under test.
pub const ACK_WAIT: Duration = Duration::from_millis(400);

/// The longest work of every queue under test.
pub const MAX_WORK: Duration = Duration::from_millis(1600);

/// Longer than anything here may take on a healthy queue.
const LONG: Duration = Duration::from_secs(20);
/// Long enough to be sure that nothing comes.
const SHORT: Duration = Duration::from_millis(60);

/// Runs the whole contract, each test on a queue of its own.
pub async fn all(fixture: &impl Fixture) {
    first_in_first_out(fixture).await;
    a_pull_is_bounded_and_expires(fixture).await;
    an_unsettled_delivery_is_repeated(fixture).await;
    a_late_word_has_no_effect(fixture).await;
    a_retry_waits_and_counts(fixture).await;
    a_repeat_comes_before_what_is_new(fixture).await;
    a_dead_letter_never_comes_back(fixture).await;
    an_id_is_stored_once(fixture).await;
    a_full_queue_makes_publishers_wait(fixture).await;
    a_dropped_publish_leaves_nothing_behind(fixture).await;
    a_dropped_pull_takes_nothing(fixture).await;
    a_waiting_pull_is_woken(fixture).await;
    an_extension_starts_the_deadline_anew(fixture).await;
    a_guard_keeps_a_delivery_alive(fixture).await;
    work_that_hangs_is_kept_alive_no_longer_than_the_longest_work(fixture).await;
    each_message_goes_to_one_consumer(fixture).await;
    nothing_is_lost_and_nothing_made_up(fixture).await;
}

async fn publish(queue: &Arc<dyn Queue<Note>>, number: u64) -> Published {
    in_time(queue.publish(&format!("id-{number}"), Note { number }))
        .await
        .unwrap()
}

async fn pull_one(queue: &Arc<dyn Queue<Note>>) -> Delivery<Note> {
    let mut pulled = queue.pull(1, LONG).await.unwrap();
    pulled.pop().expect("a message was to come")
}

async fn pull_nothing(queue: &Arc<dyn Queue<Note>>) {
    let pulled = queue.pull(10, SHORT).await.unwrap();
    assert!(pulled.is_empty(), "{:?} came unasked", pulled[0].message());
}

async fn in_time<T>(work: impl Future<Output = T>) -> T {
    timeout(LONG, work).await.expect("it takes too long")
}

async fn first_in_first_out(fixture: &impl Fixture) {
    let queue = fixture.queue(100).await;
    for number in 0..50 {
        assert_eq!(publish(&queue, number).await, Published::Stored);
    }
    let mut numbers = Vec::new();
    while numbers.len() < 50 {
        for delivery in queue.pull(7, LONG).await.unwrap() {
            assert_eq!(delivery.attempt(), 1);
            numbers.push(delivery.message().number);
            delivery.settle(Disposition::Done).await.unwrap();
        }
    }
    assert_eq!(numbers, (0..50).collect::<Vec<_>>());
}

async fn a_pull_is_bounded_and_expires(fixture: &impl Fixture) {
    let queue = fixture.queue(100).await;
    let start = Instant::now();
    pull_nothing(&queue).await;
    assert!(
        start.elapsed() >= SHORT,
        "an empty pull waits for its expiry"
    );
    for number in 0..5 {
        publish(&queue, number).await;
    }
    let pulled = queue.pull(3, LONG).await.unwrap();
    assert!(
        (1..=3).contains(&pulled.len()),
        "{} of at most 3",
        pulled.len()
    );
}

async fn an_unsettled_delivery_is_repeated(fixture: &impl Fixture) {
    let queue = fixture.queue(10).await;
    publish(&queue, 1).await;
    let start = Instant::now();
    drop(pull_one(&queue).await);
    let repeated = pull_one(&queue).await;
    assert_eq!((repeated.message().number, repeated.attempt()), (1, 2));
    assert!(
        start.elapsed() >= ACK_WAIT.mul_f64(0.9),
        "came back after {:?}",
        start.elapsed()
    );
    repeated.settle(Disposition::Done).await.unwrap();
    sleep(ACK_WAIT).await;
    pull_nothing(&queue).await;
}

async fn a_late_word_has_no_effect(fixture: &impl Fixture) {
    let queue = fixture.queue(10).await;
    publish(&queue, 1).await;
    let late = pull_one(&queue).await;
    let repeated = pull_one(&queue).await;
    assert_eq!(repeated.attempt(), 2);
    let error = late.settle(Disposition::Done).await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::Expired);
    assert_eq!(
        queue.stats().await.unwrap().in_flight,
        1,
        "the repeat is still in flight"
    );
    repeated.settle(Disposition::Done).await.unwrap();
}

async fn a_retry_waits_and_counts(fixture: &impl Fixture) {
    let queue = fixture.queue(10).await;
    publish(&queue, 1).await;
    let start = Instant::now();
    let after = Duration::from_millis(200);
    pull_one(&queue)
        .await
        .settle(Disposition::Retry { after })
        .await
        .unwrap();
    pull_nothing(&queue).await;
    let repeated = pull_one(&queue).await;
    assert_eq!(repeated.attempt(), 2);
    assert!(
        start.elapsed() >= after,
        "came back after {:?}",
        start.elapsed()
    );
    repeated
        .settle(Disposition::Retry {
            after: Duration::ZERO,
        })
        .await
        .unwrap();
    assert_eq!(pull_one(&queue).await.attempt(), 3);
}

async fn a_repeat_comes_before_what_is_new(fixture: &impl Fixture) {
    let queue = fixture.queue(10).await;
    publish(&queue, 1).await;
    publish(&queue, 2).await;
    pull_one(&queue)
        .await
        .settle(Disposition::Retry {
            after: Duration::ZERO,
        })
        .await
        .unwrap();
    assert_eq!(pull_one(&queue).await.message().number, 1);
}

async fn a_dead_letter_never_comes_back(fixture: &impl Fixture) {
    let queue = fixture.queue(10).await;
    publish(&queue, 1).await;
    let dead = Disposition::DeadLetter {
        reason: "undecodable".to_owned(),
    };
    pull_one(&queue).await.settle(dead).await.unwrap();
    sleep(ACK_WAIT).await;
    pull_nothing(&queue).await;
    let stats = queue.stats().await.unwrap();
    assert_eq!(
        (stats.waiting, stats.in_flight, stats.dead_letters),
        (0, 0, 1)
    );
}

async fn an_id_is_stored_once(fixture: &impl Fixture) {
    let queue = fixture.queue(10).await;
    assert_eq!(publish(&queue, 1).await, Published::Stored);
    assert_eq!(
        publish(&queue, 1).await,
        Published::Duplicate,
        "while it waits"
    );
    let delivery = pull_one(&queue).await;
    assert_eq!(
        publish(&queue, 1).await,
        Published::Duplicate,
        "while it is in flight"
    );
    delivery.settle(Disposition::Done).await.unwrap();
    assert_eq!(
        publish(&queue, 1).await,
        Published::Duplicate,
        "after it was settled"
    );
    pull_nothing(&queue).await;
}

async fn a_full_queue_makes_publishers_wait(fixture: &impl Fixture) {
    let queue = fixture.queue(2).await;
    publish(&queue, 1).await;
    publish(&queue, 2).await;
    let waiting = tokio::spawn({
        let queue = Arc::clone(&queue);
        async move { publish(&queue, 3).await }
    });
    sleep(SHORT).await;
    assert!(
        !waiting.is_finished(),
        "a third message found room in a queue of two"
    );
    // What is in flight still takes its place: only a settled one makes room.
    let delivery = pull_one(&queue).await;
    sleep(SHORT).await;
    assert!(!waiting.is_finished(), "a delivery in flight made room");
    delivery.settle(Disposition::Done).await.unwrap();
    assert_eq!(in_time(waiting).await.unwrap(), Published::Stored);
    assert_eq!(queue.stats().await.unwrap().waiting, 2);
}

async fn a_dropped_publish_leaves_nothing_behind(fixture: &impl Fixture) {
    let queue = fixture.queue(1).await;
    publish(&queue, 1).await;
    let given_up = timeout(SHORT, queue.publish("id-2", Note { number: 2 })).await;
    assert!(
        given_up.is_err(),
        "a second message found room in a queue of one"
    );
    pull_one(&queue)
        .await
        .settle(Disposition::Done)
        .await
        .unwrap();
    // Neither the place nor the id is taken.
    assert_eq!(publish(&queue, 2).await, Published::Stored);
    assert_eq!(pull_one(&queue).await.message().number, 2);
}

async fn a_dropped_pull_takes_nothing(fixture: &impl Fixture) {
    let queue = fixture.queue(100).await;
    for number in 0..20 {
        // A pull that waits is dropped about when its message comes.
        let pull = timeout(Duration::from_micros(200 * number), queue.pull(1, LONG));
        let (pulled, _) = tokio::join!(pull, publish(&queue, number));
        let delivery = match pulled {
            Ok(pulled) => pulled.unwrap().pop().unwrap(),
            Err(_) => pull_one(&queue).await,
        };
        assert_eq!((delivery.message().number, delivery.attempt()), (number, 1));
        delivery.settle(Disposition::Done).await.unwrap();
    }
}

async fn a_waiting_pull_is_woken(fixture: &impl Fixture) {
    let queue = fixture.queue(10).await;
    let waiting = tokio::spawn({
        let queue = Arc::clone(&queue);
        async move { pull_one(&queue).await.message().number }
    });
    sleep(SHORT).await;
    publish(&queue, 7).await;
    let woken = timeout(Duration::from_secs(2), waiting).await;
    assert_eq!(woken.expect("the pull slept on").unwrap(), 7);
}

async fn an_extension_starts_the_deadline_anew(fixture: &impl Fixture) {
    let queue = fixture.queue(10).await;
    publish(&queue, 1).await;
    let delivery = pull_one(&queue).await;
    for _ in 0..4 {
        sleep(ACK_WAIT / 2).await;
        delivery.extend().await.unwrap();
    }
    pull_nothing(&queue).await;
    delivery.settle(Disposition::Done).await.unwrap();
}

async fn a_guard_keeps_a_delivery_alive(fixture: &impl Fixture) {
    let queue = fixture.queue(10).await;
    publish(&queue, 1).await;
    let delivery = pull_one(&queue).await;
    let guard = delivery.keep_alive();
    sleep(2 * ACK_WAIT).await;
    pull_nothing(&queue).await;
    drop(guard);
    pull_nothing(&queue).await;
    let repeated = pull_one(&queue).await;
    assert_eq!(
        repeated.attempt(),
        2,
        "without the guard the deadline runs again"
    );
    assert!(delivery.settle(Disposition::Done).await.is_err());
}

/// R20: a guard that is never dropped does not keep its message from everyone else.
async fn work_that_hangs_is_kept_alive_no_longer_than_the_longest_work(fixture: &impl Fixture) {
    let queue = fixture.queue(10).await;
    publish(&queue, 1).await;
    let hung = pull_one(&queue).await;
    let _guard = hung.keep_alive();
    let start = Instant::now();
    let repeated = pull_one(&queue).await;
    assert_eq!(repeated.attempt(), 2);
    assert!(
        start.elapsed() >= MAX_WORK.mul_f64(0.9),
        "came back after {:?}",
        start.elapsed()
    );
    let error = hung.extend().await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::Expired);
    assert!(hung.settle(Disposition::Done).await.is_err());
    repeated.settle(Disposition::Done).await.unwrap();
}

async fn each_message_goes_to_one_consumer(fixture: &impl Fixture) {
    const MESSAGES: u64 = 400;
    let queue = fixture.queue(50).await;
    let consumers: Vec<_> = (0..4)
        .map(|_| {
            let queue = Arc::clone(&queue);
            tokio::spawn(async move {
                let mut numbers = Vec::new();
                loop {
                    let pulled = queue.pull(3, Duration::from_millis(300)).await.unwrap();
                    if pulled.is_empty() {
                        return numbers;
                    }
                    for delivery in pulled {
                        numbers.push(delivery.message().number);
                        delivery.settle(Disposition::Done).await.unwrap();
                    }
                }
            })
        })
        .collect();
    for number in 0..MESSAGES {
        publish(&queue, number).await;
    }
    let mut numbers = Vec::new();
    for consumer in consumers {
        numbers.extend(in_time(consumer).await.unwrap());
    }
    numbers.sort_unstable();
    assert_eq!(numbers, (0..MESSAGES).collect::<Vec<_>>());
}

/// Settles at random and at last as done: every message ends once, none is left.
async fn nothing_is_lost_and_nothing_made_up(fixture: &impl Fixture) {
    const MESSAGES: u64 = 200;
    let queue = fixture.queue(20).await;
    let publisher = tokio::spawn({
        let queue = Arc::clone(&queue);
        async move {
            for number in 0..MESSAGES {
                publish(&queue, number).await;
            }
        }
    });
    let (mut done, mut dead) = (BTreeSet::new(), BTreeSet::new());
    while done.len() + dead.len() < MESSAGES as usize {
        let delivery = in_time(pull_one(&queue)).await;
        let number = delivery.message().number;
        let after = Duration::from_millis(number % 5);
        match (number % 4, delivery.attempt()) {
            (1, 1 | 2) => delivery.settle(Disposition::Retry { after }).await.unwrap(),
            (2, 1) => drop(delivery),
            (3, _) => {
                assert!(dead.insert(number), "{number} came back from the dead");
                let reason = "unlucky".to_owned();
                delivery
                    .settle(Disposition::DeadLetter { reason })
                    .await
                    .unwrap();
            }
            _ => {
                assert!(done.insert(number), "{number} came back after it was done");
                delivery.settle(Disposition::Done).await.unwrap();
            }
        }
    }
    in_time(publisher).await.unwrap();
    assert!(done.is_disjoint(&dead));
    let stats = queue.stats().await.unwrap();
    assert_eq!(
        (stats.waiting, stats.in_flight, stats.dead_letters),
        (0, 0, MESSAGES / 4)
    );
}
