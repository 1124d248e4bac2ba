use super::*;
use futures::stream;
use trommel_queue::{MemoryQueue, MemoryQueueConfig};

/// Records announcements, and fails if anything is published before.
#[derive(Default)]
struct Notes(Mutex<Vec<Announced>>);

#[async_trait]
impl Checkpoint for Notes {
    async fn announce(&self, to: Announced) -> Result<(), WorkerError> {
        self.0.lock().unwrap().push(to);
        Ok(())
    }

    async fn room(&self) -> Result<u64, WorkerError> {
        assert!(!self.0.lock().unwrap().is_empty(), "nothing was announced");
        Ok(2)
    }
}

fn found(uri: &str) -> Result<Found, StorageError> {
    Ok(Found {
        uri: uri.to_owned(),
        content: Content::Whole,
        etag: None,
        size: None,
        columns: Vec::new(),
    })
}

fn context(queue: Arc<dyn Queue<ImageRef>>, notes: &Arc<Notes>, start: Start) -> Context {
    Context {
        job: "job".into(),
        lane: Lane::default(),
        output: queue,
        window: 3,
        place: Place::at(start.stored),
        start,
        checkpoint: Arc::clone(notes) as Arc<dyn Checkpoint>,
        mark: no_mark,
        fails: None,
        progress: Arc::default(),
    }
}

/// Lists these uris from `start`; gives what was published and announced.
async fn listed(
    uris: &[&str],
    start: Start,
) -> (Result<(), WorkerError>, Vec<u64>, Option<Announced>) {
    let queue: Arc<dyn Queue<ImageRef>> = Arc::new(MemoryQueue::new(MemoryQueueConfig::default()));
    let notes = Arc::new(Notes::default());
    if start.announced.index > 0 {
        notes.0.lock().unwrap().push(start.announced);
    }
    let ctx = context(Arc::clone(&queue), &notes, start);
    let images: Vec<_> = uris.iter().map(|uri| found(uri)).collect();
    let images = stream::iter(images).boxed();
    let choice = Choice::Resume(Vec::new());
    let ended = run(Arc::new(ctx), images, choice, CancellationToken::new()).await;
    let pulled = queue.pull(100, std::time::Duration::ZERO).await.unwrap();
    let indices = pulled.iter().map(|task| task.message().index).collect();
    let last = notes.0.lock().unwrap().last().copied();
    (ended, indices, last)
}

#[tokio::test]
async fn what_is_published_was_announced_before() {
    let (ended, indices, last) = listed(&["a", "b", "c"], Start::default()).await;
    ended.unwrap();
    assert_eq!(indices, [0, 1, 2]);
    assert_eq!(last.unwrap().index, 3);
}

#[tokio::test]
async fn a_restarted_listing_goes_on_where_the_last_one_was() {
    let (_, _, announced) = listed(&["a", "b", "c"], Start::default()).await;
    let start = Start {
        stored: 1,
        announced: announced.unwrap(),
        ..Start::default()
    };
    let (ended, indices, last) = listed(&["a", "b", "c", "d"], start).await;
    ended.unwrap();
    assert_eq!(indices, [1, 2, 3]);
    assert_eq!(last.unwrap().index, 4);
}

#[tokio::test]
async fn a_source_that_changed_is_noticed_before_anything_is_published() {
    // R3: images after the checkpoint that were already published were listed again by index,
    // so that one was lost and one duplicated.
    let (_, _, announced) = listed(&["a", "b", "c"], Start::default()).await;
    let start = Start {
        stored: 1,
        announced: announced.unwrap(),
        ..Start::default()
    };
    for changed in [&["a", "a2", "b", "c"][..], &["a", "c"], &["b", "c", "d"]] {
        let (ended, indices, _) = listed(changed, start.clone()).await;
        let error = ended.unwrap_err();
        assert!(
            matches!(error, WorkerError::SourceChanged { listed: 3 }),
            "{error}"
        );
        assert_eq!(indices, Vec::<u64>::new(), "{changed:?}");
    }
}

#[tokio::test]
async fn a_listing_goes_on_while_its_tasks_wait_so_that_few_announcements_cover_it() {
    let full = MemoryQueueConfig {
        capacity: 1,
        ..MemoryQueueConfig::default()
    };
    let notes = Arc::new(Notes::default());
    let ctx = context(Arc::new(MemoryQueue::new(full)), &notes, Start::default());
    let listed = Arc::clone(&ctx.progress);
    // As a thread sends them that lists.
    let listing = stream::iter(0..CHUNK / 64).then(async |_| {
        tokio::task::yield_now().await;
        stream::iter((0..64).map(|_| found("a")))
    });
    let choice = Choice::Resume(Vec::new());
    let listing = listing.flatten().boxed();
    let all = run(Arc::new(ctx), listing, choice, CancellationToken::new());
    let mut all = pin!(all);
    for _ in 0..CHUNK {
        assert!(
            futures::poll!(&mut all).is_pending(),
            "nobody takes the tasks"
        );
    }
    assert_eq!(listed.listed(), CHUNK as u64);
    let announced = notes.0.lock().unwrap().len();
    assert!(announced <= 3, "{announced}");
}

#[tokio::test]
async fn a_source_is_compared_with_what_was_announced_before() {
    let (_, _, announced) = listed(&["a", "b", "c"], Start::default()).await;
    let start = Start {
        announced: announced.unwrap(),
        ..Start::default()
    };
    for (uris, is_same) in [
        (&["a", "b", "c"][..], true),
        (&["a", "b", "c", "d"], true),
        (&["a", "b"], false),
        (&["a", "c", "b", "d"], false),
    ] {
        let images: Vec<_> = uris.iter().map(|uri| found(uri)).collect();
        let checked = check(stream::iter(images).boxed(), &start, false).await;
        assert_eq!(checked.is_ok(), is_same, "{uris:?}");
    }
}

/// After a broker lost all messages of a job, its tasks waited in memory until as many images were
/// listed as ever before.
#[tokio::test]
async fn a_listing_that_was_compared_is_published_from_its_start() {
    let (_, _, announced) = listed(&["a", "b", "c"], Start::default()).await;
    for is_checked in [false, true] {
        let queue = Arc::new(MemoryQueue::new(MemoryQueueConfig::default()));
        let notes = Arc::new(Notes::default());
        notes.0.lock().unwrap().push(announced.unwrap());
        let start = Start {
            announced: announced.unwrap(),
            is_checked,
            ..Start::default()
        };
        let ctx = context(
            Arc::clone(&queue) as Arc<dyn Queue<ImageRef>>,
            &notes,
            start,
        );
        let listing = stream::iter([found("a")]).chain(stream::pending());
        let choice = Choice::Resume(Vec::new());
        let token = CancellationToken::new();
        let mut all = pin!(run(Arc::new(ctx), listing.boxed(), choice, token));
        for _ in 0..10 {
            assert!(futures::poll!(&mut all).is_pending());
        }
        let pulled = queue.pull(100, std::time::Duration::ZERO).await.unwrap();
        assert_eq!(pulled.len(), usize::from(is_checked));
    }
}
