//! What the JetStream queue does when the broker dies, is full, or is not as it should be.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{LONG, Load, SECOND, broker, config, load, queue, spec};
use tokio::time::{sleep, timeout};
use trommel_queue::test_server::NatsServer;
use trommel_queue::{
    Broker, BrokerConfig, ConsumerSpec, Disposition, Published, Queue, QueueErrorKind, QueueSpec,
    Stream,
};
use trommel_types::Message;

/// Publishers and consumers survive three kills of the broker: each message is stored once and
/// worked on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_when_the_broker_is_killed() {
    const MESSAGES: u64 = 2000;
    let mut server = NatsServer::start();
    let broker = broker(&server).await;
    let queue = Arc::new(queue(&broker, 3 * SECOND).await);

    let mut tasks = Vec::new();
    for publisher in 0..4 {
        let queue = Arc::clone(&queue);
        tasks.push(tokio::spawn(async move {
            for number in (publisher..MESSAGES).step_by(4) {
                queue
                    .publish(&format!("load-{number}"), load(number))
                    .await
                    .unwrap();
                sleep(Duration::from_millis(4)).await;
            }
        }));
    }
    let (seen, mut settled) = tokio::sync::mpsc::channel(100);
    for _ in 0..2 {
        let queue = Arc::clone(&queue);
        let seen = seen.clone();
        tokio::spawn(async move {
            loop {
                for delivery in queue.pull(20, SECOND).await.unwrap() {
                    let (number, attempt) = (delivery.message().number, delivery.attempt());
                    assert_eq!(**delivery.message(), load(number), "came as another");
                    // A word on a delivery that has expired is refused, and the repeat counts.
                    let word = delivery.settle(Disposition::Done).await.is_ok();
                    if seen.send((number, attempt, word)).await.is_err() {
                        return;
                    }
                }
            }
        });
    }
    drop(seen);

    // A delivery whose ack was lost comes again, unless the broker had kept the ack and died before it
    // could say so: what counts is that each message came, and that none is left.
    let (mut done, mut came, mut repeats) = (BTreeMap::new(), BTreeSet::new(), 0);
    let mut kills = 0;
    while came.len() < MESSAGES as usize {
        let Ok(next) = timeout(LONG, settled.recv()).await else {
            let missing: Vec<_> = (0..MESSAGES).filter(|it| !came.contains(it)).collect();
            panic!("messages are missing after {kills} kills: {missing:?}");
        };
        let (number, attempt, word) = next.unwrap();
        came.insert(number);
        // A server that is killed may forget the newest attempts, so a repeat may carry no higher one.
        if word && done.insert(number, attempt).is_some() {
            repeats += 1;
        }
        if kills < 3 && came.len() > (kills + 1) * MESSAGES as usize / 4 {
            kills += 1;
            server.kill();
            sleep(Duration::from_millis(300)).await;
            server.start_again();
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(kills, 3);
    eprintln!("{repeats} repeats over {kills} kills");
    // What was unsettled because its word was lost comes again, and then all is gone.
    let end = Instant::now() + LONG;
    loop {
        let stats = broker.stream_stats(Stream::Tasks).await.unwrap().unwrap();
        if stats.messages == 0 {
            // Ids were recognised over the restarts: no message was stored twice.
            assert_eq!(stats.last_sequence, MESSAGES);
            break;
        }
        assert!(Instant::now() < end, "{stats:?} is left");
        sleep(Duration::from_millis(100)).await;
    }
}

/// An idle pull hears of messages after the broker has come back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_pull_outlives_a_restart() {
    let mut server = NatsServer::start();
    let broker = broker(&server).await;
    let queue = Arc::new(queue(&broker, 30 * SECOND).await);
    let pull = tokio::spawn({
        let queue = Arc::clone(&queue);
        async move { queue.pull(1, LONG).await.unwrap() }
    });
    sleep(Duration::from_millis(200)).await;
    server.restart();
    queue.publish("load-1", load(1)).await.unwrap();
    let pulled = timeout(10 * SECOND, pull).await.expect("asleep").unwrap();
    assert_eq!(pulled[0].message().number, 1);
}

/// A stream and a consumer that somebody removed are made again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_consumer_is_restored() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let queue = queue(&broker, 30 * SECOND).await;
    assert!(
        queue
            .pull(1, Duration::from_millis(50))
            .await
            .unwrap()
            .is_empty()
    );
    assert!(
        broker
            .delete_consumer(Stream::Tasks, "normal")
            .await
            .unwrap()
    );
    assert!(
        !broker
            .delete_consumer(Stream::Tasks, "normal")
            .await
            .unwrap()
    );
    queue.publish("load-1", load(1)).await.unwrap();
    let pulled = queue.pull(1, 20 * SECOND).await.unwrap();
    assert_eq!(pulled[0].message().number, 1);
}

/// A server that crashed may have forgotten what it delivered, and does not answer a word on that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_word_that_is_never_answered_ends_although_the_delivery_is_kept_alive() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let mut spec = spec(2 * SECOND);
    spec.consumer.as_mut().unwrap().confirm_acks = true;
    let queue = broker.queue(spec).await.unwrap();
    queue.publish("load-1", load(1)).await.unwrap();
    let delivery = queue.pull(1, 20 * SECOND).await.unwrap().remove(0);
    let _kept = delivery.keep_alive();
    let removed = broker.delete_consumer(Stream::Tasks, "normal").await;
    assert!(removed.unwrap());
    let settled = tokio::time::timeout(20 * SECOND, delivery.settle(Disposition::Done)).await;
    let error = settled.expect("it ends").unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::Expired);
    // It comes again.
    let again = queue.pull(1, 20 * SECOND).await.unwrap();
    assert_eq!(again[0].message().number, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_stream_makes_publishers_wait() {
    let server = NatsServer::start();
    let config = BrokerConfig {
        tensors_max_bytes: 100_000,
        ..config(&server)
    };
    let broker = Broker::connect(&config, "test").await.unwrap();
    broker.ensure_streams().await.unwrap();
    let spec = QueueSpec {
        stream: Stream::Tensors,
        subject: Arc::new(|_| "trommel.tensors.m.normal".to_owned()),
        consumer: Some(ConsumerSpec::new("m-normal", "trommel.tensors.m.normal")),
        ..spec(SECOND)
    };
    let queue = Arc::new(broker.queue(spec).await.unwrap());
    let big = |number| Load {
        number,
        filling: vec![0; 30_000],
    };
    for number in 0..3 {
        let stored = queue.publish(&format!("big-{number}"), big(number)).await;
        assert_eq!(stored.unwrap(), Published::Stored);
    }
    let waiting = tokio::spawn({
        let queue = Arc::clone(&queue);
        async move { queue.publish("big-3", big(3)).await.unwrap() }
    });
    sleep(SECOND).await;
    assert!(!waiting.is_finished(), "100 kB of room held 120 kB");
    for delivery in queue.pull(1, SECOND).await.unwrap() {
        delivery.settle(Disposition::Done).await.unwrap();
    }
    let stored = timeout(5 * SECOND, waiting).await.expect("it sleeps on");
    assert_eq!(stored.unwrap(), Published::Stored);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_malformed_message_is_dead_lettered() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let told = Arc::new(AtomicUsize::new(0));
    let spec = QueueSpec {
        on_malformed: Some(Arc::new({
            let told = Arc::clone(&told);
            move |bytes, _, subject| {
                assert_eq!((bytes, subject), (&b"junk"[..], "trommel.tasks.normal.job"));
                told.fetch_add(1, Ordering::Relaxed);
            }
        })),
        ..spec(SECOND)
    };
    let queue = broker.queue(spec).await.unwrap();
    let mut heard = broker.subscribe("trommel.dead.>").await.unwrap();
    broker
        .client()
        .publish("trommel.tasks.normal.job", "junk".into())
        .await
        .unwrap();
    queue.publish("load-1", load(1)).await.unwrap();
    let mut numbers = Vec::new();
    while numbers.is_empty() {
        for delivery in queue.pull(10, LONG).await.unwrap() {
            numbers.push(delivery.message().number);
            delivery.settle(Disposition::Done).await.unwrap();
        }
    }
    assert_eq!(numbers, [1]);
    let letter = timeout(10 * SECOND, heard.next()).await.unwrap().unwrap();
    assert_eq!(letter.subject, "trommel.dead.malformed.tasks");
    assert_eq!(&letter.payload[..], b"junk");
    let headers = letter.headers.unwrap();
    assert_eq!(
        headers.get("Trommel-Subject").unwrap().as_str(),
        "trommel.tasks.normal.job"
    );
    assert!(
        headers
            .get("Trommel-Reason")
            .unwrap()
            .as_str()
            .contains("not a message")
    );
    sleep(2 * SECOND).await;
    assert!(
        queue
            .pull(10, Duration::from_millis(100))
            .await
            .unwrap()
            .is_empty()
    );
    assert_eq!(told.load(Ordering::Relaxed), 1, "it came again");
    assert_eq!(queue.stats().await.unwrap().dead_letters, 1);
    let count = broker.subject_count(Stream::Dead, "trommel.dead.malformed.*");
    assert_eq!(count.await.unwrap(), 1);
    let purged = broker.purge_subject(Stream::Dead, "trommel.dead.malformed.tasks");
    assert_eq!(purged.await.unwrap(), 1);
    assert_eq!(
        broker
            .stream_stats(Stream::Dead)
            .await
            .unwrap()
            .unwrap()
            .messages,
        0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_tells_why_and_holds_the_message() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let queue = queue(&broker, 10 * SECOND).await;
    let mut heard = broker.subscribe("trommel.dead.>").await.unwrap();
    queue.publish("load-7", load(7)).await.unwrap();
    let delivery = queue.pull(1, LONG).await.unwrap().pop().unwrap();
    let reason = "two\nlines".to_owned();
    delivery
        .settle(Disposition::DeadLetter { reason })
        .await
        .unwrap();
    let letter = timeout(LONG, heard.next()).await.unwrap().unwrap();
    assert_eq!(letter.subject, "trommel.dead.test.7");
    assert_eq!(Load::decode(&letter.payload).unwrap(), load(7));
    let headers = letter.headers.unwrap();
    let header = |name| headers.get(name).unwrap().as_str().to_owned();
    assert_eq!(header("Trommel-Reason"), "two lines");
    assert_eq!(header("Trommel-Attempt"), "1");
    assert_eq!(header("Trommel-Stream"), "TROMMEL_TASKS");
    assert_eq!(header("Trommel-Sequence"), "1");
    assert_eq!(
        broker
            .stream_stats(Stream::Tasks)
            .await
            .unwrap()
            .unwrap()
            .messages,
        0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_is_too_large_is_refused() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    assert_eq!(broker.max_payload(), 1 << 20);
    let queue = queue(&broker, SECOND).await;
    let filling = vec![0; 1 << 20];
    let error = queue
        .publish("huge", Load { number: 1, filling })
        .await
        .unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::TooLarge);
    assert!(error.to_string().contains("`max_payload`"), "{error}");
}

/// R16, R32: an error text of any length fits, and bulk is left out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_stays_small() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let queue = queue(&broker, 10 * SECOND).await;
    let mut heard = broker.subscribe("trommel.dead.>").await.unwrap();
    let filling = vec![0; 70_000];
    queue
        .publish("job/m/7", Load { number: 7, filling })
        .await
        .unwrap();
    let delivery = queue.pull(1, LONG).await.unwrap().pop().unwrap();
    let reason = "x".repeat(200_000);
    let dead = Disposition::DeadLetter { reason };
    delivery.settle(dead).await.unwrap();
    let letter = timeout(LONG, heard.next()).await.unwrap().unwrap();
    assert_eq!(
        (&*letter.subject, letter.payload.len()),
        ("trommel.dead.test.7", 0)
    );
    let headers = letter.headers.unwrap();
    assert!(headers.get("Trommel-Reason").unwrap().as_str().len() < 1100);
    assert_eq!(headers.get("Trommel-Id").unwrap().as_str(), "job/m/7");
    assert_eq!(headers.get("Trommel-Left-Out").unwrap().as_str(), "message");
    let api = async_nats::jetstream::new(broker.client().clone());
    let stream = api.get_stream("TROMMEL_DEAD").await.unwrap();
    assert_eq!(stream.cached_info().config.max_bytes, 10 << 20);
    // Malformed bytes are cut.
    let junk = vec![0xc1; 100_000];
    let subject = "trommel.tasks.normal.job";
    let client = broker.client();
    client.publish(subject, junk.into()).await.unwrap();
    let pulled = queue.pull(1, SECOND).await.unwrap();
    assert!(pulled.is_empty());
    let letter = timeout(LONG, heard.next()).await.unwrap().unwrap();
    assert_eq!(letter.payload.len(), 64 << 10);
}

/// What was requested and came for nobody is given back when the queue is closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_queue_gives_back_what_it_prefetched() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let mut greedy = spec(LONG);
    greedy.consumer.as_mut().unwrap().prefetch = 16;
    let greedy = broker.queue(greedy).await.unwrap();
    for number in 0..10 {
        greedy
            .publish(&format!("load-{number}"), load(number))
            .await
            .unwrap();
    }
    let first = greedy.pull(1, LONG).await.unwrap().pop().unwrap();
    first.settle(Disposition::Done).await.unwrap();
    sleep(Duration::from_millis(200)).await;
    greedy.close().await;
    // Well before the minute of the ack deadline.
    let other = queue(&broker, LONG).await;
    let mut numbers = BTreeSet::new();
    while numbers.len() < 9 {
        let pulled = other.pull(10, 5 * SECOND).await.unwrap();
        assert!(!pulled.is_empty(), "only {numbers:?} came back");
        for delivery in pulled {
            numbers.insert(delivery.message().number);
            delivery.settle(Disposition::Done).await.unwrap();
        }
    }
    assert_eq!(numbers, (1..10).collect());
}

/// Work that takes longer than the ack deadline is not repeated while its guard lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_deliveries_are_kept_alive_together() {
    const MESSAGES: usize = 500;
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let queue = queue(&broker, SECOND).await;
    for number in 0..MESSAGES as u64 {
        queue
            .publish(&format!("load-{number}"), load(number))
            .await
            .unwrap();
    }
    let mut held = Vec::new();
    while held.len() < MESSAGES {
        for delivery in queue.pull(100, LONG).await.unwrap() {
            assert_eq!(delivery.attempt(), 1);
            held.push((delivery.keep_alive(), delivery));
        }
    }
    sleep(3 * SECOND).await;
    assert!(
        queue
            .pull(10, Duration::from_millis(50))
            .await
            .unwrap()
            .is_empty()
    );
    for (guard, delivery) in held {
        delivery.settle(Disposition::Done).await.unwrap();
        drop(guard);
    }
    sleep(2 * SECOND).await;
    assert_eq!(
        broker
            .stream_stats(Stream::Tasks)
            .await
            .unwrap()
            .unwrap()
            .messages,
        0
    );
}
