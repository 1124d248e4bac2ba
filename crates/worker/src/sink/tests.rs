use std::num::NonZeroUsize;

use async_trait::async_trait;
use trommel_queue::{MemoryQueue, MemoryQueueConfig, Published, QueueStats};
use trommel_sink::{Committed, Format, JobRecord, Summary};
use trommel_storage::StorageError;
use trommel_types::{Content, ErrorKind, Failure, ImageRef, Lane, Scores};

use super::*;

/// Counts rows and keeps none.
struct Counted {
    job: JobRecord,
    ledger: Ledger,
}

#[async_trait]
impl ResultSink for Counted {
    fn job(&self) -> &JobRecord {
        &self.job
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    async fn commit(&mut self, rows: Vec<Arc<Classification>>) -> Result<Committed, StorageError> {
        self.ledger.count(rows)
    }

    async fn finish(self: Box<Self>) -> Result<Summary, StorageError> {
        Ok(self.summary())
    }
}

fn counted() -> Box<dyn ResultSink> {
    Box::new(Counted {
        job: JobRecord {
            job_id: "job".to_owned(),
            run: "00000000".to_owned(),
            spec_hash: String::new(),
            source: "folder photos".to_owned(),
            model: "digits".to_owned(),
            model_version: "1".to_owned(),
            options: BTreeMap::new(),
            format: Format::Jsonl,
            columns: Vec::new(),
            logits: false,
            embedding: false,
            embedding_type: Default::default(),
            escape_formulas: false,
            retry: None,
            created_at: 0,
        },
        ledger: Ledger::default(),
    })
}

fn row(index: u64, outcome: Outcome) -> Classification {
    Classification {
        image: ImageRef {
            job: "job".into(),
            lane: Lane::Normal,
            index,
            uri: format!("photos/{index}.jpg"),
            content: Content::Whole,
            etag: None,
            size: None,
            columns: Vec::new(),
        },
        model: "digits".into(),
        model_version: "1".into(),
        bytes: None,
        original: None,
        outcome,
        attempts: 1,
        finished_at: 0,
    }
}

/// R7: after the crash of a sink its failed rows were counted again, and the job was ended.
#[tokio::test]
async fn a_failed_row_that_comes_again_counts_once() {
    let intake: Arc<dyn Queue<Classification>> =
        Arc::new(MemoryQueue::new(MemoryQueueConfig::default()));
    for time in 0..5 {
        for index in 0..10 {
            let failure = Failure {
                kind: ErrorKind::NotFound,
                error: "there is no such file".to_owned(),
            };
            let row = row(index, Outcome::Failed(failure));
            intake
                .publish(&format!("{time}/{index}"), row)
                .await
                .unwrap();
        }
    }
    for index in 10..100 {
        let row = row(index, Outcome::Ok(Scores::default()));
        intake.publish(&format!("ok/{index}"), row).await.unwrap();
    }
    let progress = Arc::new(Progress::default());
    progress.set_listed(100, true);
    let (committed, counts) = watch::channel(Counts::default());
    let ctx = Arc::new(Context {
        intake,
        config: SinkConfig {
            // So that repeats meet rows in their own part and in earlier ones.
            part_rows: NonZeroUsize::new(14).unwrap(),
            ..SinkConfig::default()
        },
        held: HeldRows::new(u64::MAX),
        // Ten of a hundred are fine, fifty are proof of a hopeless job.
        max_failure_rate: Some(0.12),
        progress: Arc::clone(&progress),
        committed,
        shared: None,
    });
    let ended = run(ctx, counted(), CancellationToken::new()).await;
    assert!(ended.is_ok(), "{:?}", ended.err());
    let counts = counts.borrow();
    assert_eq!((counts.committed, counts.failed()), (100, 10));
    // Else an ingest worker would wait for them, and never queue again what the broker has lost.
    assert_eq!(progress.pending(), 0);
}

/// R50.
#[test]
fn parts_of_a_slow_model_wait_longer_the_more_there_are_up_to_a_bound() {
    let config = SinkConfig::default();
    let seconds = |parts| interval(&config, parts).as_secs();
    let steps = [0, 99, 100, 250, 1100, 1_000_000].map(seconds);
    assert_eq!(steps, [5, 5, 10, 15, 60, 60]);
}

#[tokio::test]
async fn a_part_is_due_by_its_bytes_however_few_its_rows() {
    let (mut ctx, _) = idle(true);
    ctx.config.part_bytes = NonZeroUsize::new(100_000).unwrap();
    let queue = MemoryQueue::new(MemoryQueueConfig::default());
    let mut part = OpenPart::default();
    for index in 0..2 {
        let row = row(
            index,
            Outcome::Ok(Scores {
                top: Vec::new(),
                logits: Some(vec![0.0; 21_841]),
                embedding: None,
            }),
        );
        queue.publish(&index.to_string(), row).await.unwrap();
        assert!(!part.is_due(&ctx, Duration::MAX), "87 KB of 100");
        part.add(queue.pull(1, Duration::ZERO).await.unwrap(), &ctx);
    }
    assert!(part.is_due(&ctx, Duration::MAX));
}

#[test]
fn the_sinks_of_a_process_share_the_bytes_of_open_parts() {
    let held = HeldRows::new(100);
    let (one, other) = (HeldBytes::new(&held, 60), HeldBytes::new(&held, 40));
    assert!(held.is_full());
    drop(other);
    assert!(!held.is_full());
    drop(one);
    assert_eq!(held.bytes.load(Relaxed), 0);
}

/// Gives nothing, at once or never, and notes how long it was asked to wait.
struct Idle {
    asked: std::sync::Mutex<Vec<Duration>>,
    answers: bool,
}

#[async_trait::async_trait]
impl Queue<Classification> for Idle {
    async fn publish(&self, _: &str, _: Classification) -> Result<Published, QueueError> {
        unreachable!("a sink publishes nothing")
    }

    async fn pull(
        &self,
        _: usize,
        expiry: Duration,
    ) -> Result<Vec<Delivery<Classification>>, QueueError> {
        self.asked.lock().unwrap().push(expiry);
        match self.answers {
            true => Ok(Vec::new()),
            false => std::future::pending().await,
        }
    }

    async fn stats(&self) -> Result<QueueStats, QueueError> {
        Ok(QueueStats::default())
    }
}

fn idle(answers: bool) -> (Context, Arc<Idle>) {
    let asked = std::sync::Mutex::default();
    let intake = Arc::new(Idle { asked, answers });
    let context = Context {
        intake: Arc::clone(&intake) as Arc<dyn Queue<Classification>>,
        config: SinkConfig::default(),
        held: HeldRows::new(u64::MAX),
        max_failure_rate: None,
        progress: Arc::default(),
        committed: watch::Sender::default(),
        shared: None,
    };
    (context, intake)
}

#[tokio::test]
async fn an_idle_sink_asks_seldom_and_sees_the_listing_end_at_once() {
    let (part, interval) = (OpenPart::default(), Duration::from_secs(5));
    let (quiet, intake) = idle(true);
    quiet.next_deliveries(&part, interval).await.unwrap();
    assert_eq!(*intake.asked.lock().unwrap(), [IDLE]);

    let (waiting, _) = idle(false);
    let ended = Arc::clone(&waiting.progress);
    let next = waiting.next_deliveries(&part, interval);
    tokio::pin!(next);
    assert!(futures::poll!(&mut next).is_pending());
    ended.listing_ended();
    assert!(next.await.unwrap().is_empty());
}

#[test]
fn a_few_failures_prove_nothing_and_many_do() {
    assert!(wilson_lower_bound(2, 2) < 0.2, "two of two may be bad luck");
    assert!(wilson_lower_bound(20, 20) > 0.2, "twenty of twenty are not");
    assert!(wilson_lower_bound(250, 1000) > 0.2);
    assert!(
        wilson_lower_bound(210, 1000) < 0.2,
        "within the noise of 0.2"
    );
    assert_eq!(wilson_lower_bound(0, 0), 0.0);
}
