use std::future::Future;
use std::pin::Pin;
use std::sync::Barrier;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use trommel_types::TopLabel;

use super::*;
use crate::LiveOptions;
use crate::wanted::Resolved;

mod live;

const LONG: Duration = Duration::from_secs(60);

/// Images of one byte that mean trouble; any other byte is its image's score.
const FAILS: u8 = 255;
const PANICS: u8 = 254;
const LOSES_DEVICE: u8 = 253;
const HANGS: u8 = 252;

/// A backend that answers at once, or once the gate opens.
#[derive(Clone, Default)]
struct Fake {
    batches: Arc<Mutex<Vec<Vec<u8>>>>,
    /// Images that were run as lone ones, if there is a way for them.
    lone: Option<Arc<Mutex<Vec<u8>>>>,
    gate: Option<Arc<Gate>>,
    /// What images that hang wait for.
    hang: Arc<Gate>,
    fixed: Option<usize>,
    /// Images at once that there is memory for, at start and later, if there is not for any number.
    room: [Option<usize>; 2],
}

#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn pass(&self) {
        drop(
            self.changed
                .wait_while(self.open.lock().unwrap(), |open| !*open)
                .unwrap(),
        );
    }
}

impl Fake {
    fn check(&self, room: Option<usize>, images: usize) -> Result<(), InferError> {
        if room.is_some_and(|room| self.computed(images) > room) {
            return Err(InferError::new(InferErrorKind::OutOfMemory, "no room"));
        }
        Ok(())
    }
}

impl Backend for Fake {
    fn run(&mut self, images: &[Image]) -> Result<Vec<Result<Scores, InferError>>, InferError> {
        self.check(self.room[1], images.len())?;
        let images: Vec<u8> = images.iter().map(|image| image.pixels[0]).collect();
        self.batches.lock().unwrap().push(images.clone());
        if let Some(gate) = &self.gate {
            gate.pass();
        }
        if images.contains(&HANGS) {
            self.hang.pass();
        }
        assert!(!images.contains(&PANICS), "told to");
        for (trouble, kind) in [
            (FAILS, InferErrorKind::ModelFailed),
            (LOSES_DEVICE, InferErrorKind::DeviceLost),
        ] {
            if images.contains(&trouble) {
                return Err(InferError::new(kind, "told to"));
            }
        }
        Ok(images.into_iter().map(|image| Ok(scores(image))).collect())
    }

    fn run_lone(&mut self, image: &Image) -> Option<Scores> {
        let image = image.pixels[0];
        self.lone.as_ref()?.lock().unwrap().push(image);
        (image != FAILS).then(|| scores(image))
    }

    fn computed(&self, images: usize) -> usize {
        self.fixed.unwrap_or(images)
    }

    fn blank(&mut self, images: usize) -> Result<(), InferError> {
        self.check(self.room[0], images)
    }

    fn warm_up(&mut self, images: usize) -> Result<(), InferError> {
        self.blank(images)
    }

    fn end_profiling(&mut self) -> Result<String, InferError> {
        unreachable!("nothing is profiled here")
    }
}

fn scores(image: u8) -> Scores {
    let top = TopLabel {
        label: "it".into(),
        class: 0,
        score: f32::from(image),
    };
    Scores {
        top: vec![top],
        logits: None,
        embedding: None,
    }
}

fn options(instances: usize, max_batch: usize, max_wait: Duration) -> EngineOptions {
    EngineOptions {
        instances,
        max_batch,
        max_wait,
        run_timeout: LONG,
        live: LiveOptions::default(),
    }
}

fn start(fake: &Fake, options: EngineOptions) -> Instances {
    let fake = fake.clone();
    Instances::start("test", options, None, move |_| Ok(fake.clone())).unwrap()
}

type Answer = Pin<Box<dyn Future<Output = Result<Scores, InferError>> + Send>>;

fn classify(instances: &Instances, image: u8) -> Answer {
    classify_in(instances, image, Lane::Normal)
}

/// That of the lane of [`classify`].
fn room(instances: &Instances) -> &Semaphore {
    &instances.shared().room[Lane::Normal as usize]
}

fn classify_in(instances: &Instances, image: u8, lane: Lane) -> Answer {
    let shared = Arc::clone(instances.shared());
    let image = Image {
        pixels: Bytes::from(vec![image]),
        wanted: Arc::new(Resolved {
            top_k: 1,
            ..Resolved::default()
        }),
    };
    Box::pin(async move { shared.classify(image, lane).await })
}

/// Calls for each image and polls the calls in order, so that they are accepted in order.
fn classify_all(instances: &Instances, images: &[u8]) -> Vec<Answer> {
    images
        .iter()
        .map(|&image| {
            let mut answer = classify(instances, image);
            match answer
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
            {
                Poll::Pending => answer,
                Poll::Ready(answer) => Box::pin(std::future::ready(answer)),
            }
        })
        .collect()
}

fn is_pending(answer: &mut Answer) -> bool {
    matches!(
        answer
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop())),
        Poll::Pending
    )
}

async fn kinds(answers: Vec<Answer>) -> Vec<Option<InferErrorKind>> {
    let mut kinds = Vec::new();
    for answer in answers {
        kinds.push(answer.await.err().map(|error| error.kind()));
    }
    kinds
}

fn wait_until(condition: impl Fn() -> bool) {
    let since = Instant::now();
    while !condition() {
        assert!(since.elapsed() < LONG, "it never happens");
        thread::sleep(Duration::from_millis(1));
    }
}

#[tokio::test]
async fn every_image_gets_its_own_answer() {
    let fake = Fake::default();
    let instances = start(&fake, options(3, 4, Duration::from_millis(1)));
    let calls: Vec<_> = (0..200u8)
        .map(|image| (image, tokio::spawn(classify(&instances, image))))
        .collect();
    for (image, call) in calls {
        assert_eq!(call.await.unwrap(), Ok(scores(image)));
    }
    let stats = instances.stats();
    assert_eq!(stats.images, 200);
    assert_eq!(stats.batches as usize, fake.batches.lock().unwrap().len());
    assert!(
        fake.batches
            .lock()
            .unwrap()
            .iter()
            .all(|batch| batch.len() <= 4)
    );
    assert!(stats.fill > 0.0 && stats.fill <= 1.0);
}

#[tokio::test]
async fn a_batch_closes_when_full_when_flushed_and_when_it_has_waited() {
    let fake = Fake::default();
    let instances = start(&fake, options(1, 2, LONG));
    let answers = classify_all(&instances, &[1, 2, 3]);
    wait_until(|| fake.batches.lock().unwrap().len() == 1);
    instances.shared().flush();
    assert_eq!(kinds(answers).await, [None; 3]);
    assert_eq!(*fake.batches.lock().unwrap(), [vec![1, 2], vec![3]]);

    let waits = start(&fake, options(1, 2, Duration::from_millis(5)));
    let since = Instant::now();
    assert_eq!(classify(&waits, 4).await, Ok(scores(4)));
    assert!(since.elapsed() >= Duration::from_millis(5));
}

#[tokio::test]
async fn a_batch_grows_while_no_session_can_take_it() {
    let gate = Arc::new(Gate::default());
    let fake = Fake {
        gate: Some(Arc::clone(&gate)),
        ..Fake::default()
    };
    let instances = start(&fake, options(1, 4, Duration::ZERO));
    let mut answers = classify_all(&instances, &[1]);
    wait_until(|| fake.batches.lock().unwrap().len() == 1);
    // None of them may wait, but the only session is busy.
    answers.extend(classify_all(&instances, &[2, 3, 4, 5, 6]));
    gate.open();
    assert_eq!(kinds(answers).await, [None; 6]);
    let batches = fake.batches.lock().unwrap();
    assert_eq!(*batches, [vec![1], vec![2, 3, 4, 5], vec![6]]);
}

#[tokio::test]
async fn images_beyond_the_room_wait_outside() {
    let gate = Arc::new(Gate::default());
    let fake = Fake {
        gate: Some(Arc::clone(&gate)),
        ..Fake::default()
    };
    let instances = start(&fake, options(1, 2, LONG));
    let first = classify_all(&instances, &[1, 2]);
    wait_until(|| fake.batches.lock().unwrap().len() == 1);

    // One batch is computed, one is formed ahead, one is forming; the next waits outside.
    let inside = classify_all(&instances, &[3, 4, 5, 6]);
    let mut outside = classify_all(&instances, &[7]);
    assert_eq!(room(&instances).available_permits(), 0);
    gate.open();
    assert_eq!(kinds(first).await, [None; 2]);
    assert_eq!(kinds(inside).await, [None; 4]);
    assert!(
        is_pending(&mut outside[0]),
        "it is in a batch that is not full"
    );
    instances.shared().flush();
    assert_eq!(kinds(outside).await, [None]);
    assert_eq!(room(&instances).available_permits(), 4);
}

#[tokio::test]
async fn instances_work_side_by_side() {
    struct Meeting(Arc<Barrier>);
    impl Backend for Meeting {
        fn run(&mut self, images: &[Image]) -> Result<Vec<Result<Scores, InferError>>, InferError> {
            self.0.wait(); // for the other instance, which has to be running at the same time
            Ok(images
                .iter()
                .map(|image| Ok(scores(image.pixels[0])))
                .collect())
        }

        fn blank(&mut self, _images: usize) -> Result<(), InferError> {
            Ok(())
        }

        fn warm_up(&mut self, images: usize) -> Result<(), InferError> {
            self.blank(images)
        }

        fn end_profiling(&mut self) -> Result<String, InferError> {
            unreachable!("nothing is profiled here")
        }
    }
    let barrier = Arc::new(Barrier::new(2));
    let make = move |_| Ok(Meeting(Arc::clone(&barrier)));
    let instances = Instances::start("test", options(2, 1, LONG), None, make).unwrap();
    assert_eq!(kinds(classify_all(&instances, &[1, 2])).await, [None; 2]);
}

#[tokio::test]
async fn a_poison_image_takes_no_neighbour_with_it() {
    let fake = Fake::default();
    let instances = start(&fake, options(1, 4, LONG));
    let answers = kinds(classify_all(&instances, &[1, FAILS, 3, 4])).await;
    assert_eq!(
        answers,
        [None, Some(InferErrorKind::ModelFailed), None, None]
    );
    let runs = fake.batches.lock().unwrap().clone();
    assert_eq!(
        runs,
        [vec![1, FAILS, 3, 4], vec![1], vec![FAILS], vec![3], vec![4]]
    );
    let stats = instances.stats();
    assert_eq!((stats.batches, stats.images, stats.retried), (1, 4, 4));
}

#[tokio::test]
async fn a_poison_image_alone_is_not_run_twice() {
    let fake = Fake::default();
    let instances = start(&fake, options(1, 1, LONG));
    let answers = kinds(classify_all(&instances, &[FAILS])).await;
    assert_eq!(answers, [Some(InferErrorKind::ModelFailed)]);
    assert_eq!(*fake.batches.lock().unwrap(), [vec![FAILS]]);
}

#[tokio::test]
async fn a_panic_answers_everybody_and_ends_the_engine() {
    let gate = Arc::new(Gate::default());
    let fake = Fake {
        gate: Some(Arc::clone(&gate)),
        ..Fake::default()
    };
    let instances = start(&fake, options(1, 2, LONG));
    let mut answers = classify_all(&instances, &[1, PANICS]);
    wait_until(|| fake.batches.lock().unwrap().len() == 1);
    // Formed, forming, and outside.
    answers.extend(classify_all(&instances, &[3, 4, 5, 6, 7]));
    gate.open();
    assert_eq!(
        kinds(answers).await,
        [Some(InferErrorKind::EngineStopped); 7]
    );
    let late = classify(&instances, 8).await.unwrap_err();
    assert_eq!(late.kind(), InferErrorKind::EngineStopped);
    assert!(late.is_fatal());
}

#[tokio::test]
async fn a_lost_device_is_told_to_its_batch_and_ends_the_engine() {
    let fake = Fake::default();
    let instances = start(&fake, options(1, 2, LONG));
    let answers = kinds(classify_all(&instances, &[1, LOSES_DEVICE])).await;
    assert_eq!(answers, [Some(InferErrorKind::DeviceLost); 2]);
    wait_until(|| room(&instances).is_closed());
    let late = classify(&instances, 3).await.unwrap_err();
    assert_eq!(late.kind(), InferErrorKind::EngineStopped);
    assert_eq!(fake.batches.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn dropping_the_engine_finishes_what_it_has_accepted() {
    let gate = Arc::new(Gate::default());
    let fake = Fake {
        gate: Some(Arc::clone(&gate)),
        ..Fake::default()
    };
    let instances = start(&fake, options(1, 2, LONG));
    let accepted = {
        let mut answers = classify_all(&instances, &[1, 2]);
        wait_until(|| fake.batches.lock().unwrap().len() == 1);
        answers.extend(classify_all(&instances, &[3, 4, 5, 6]));
        answers
    };
    let outside = classify_all(&instances, &[7]);
    let dropped = thread::spawn(move || drop(instances));
    assert_eq!(kinds(outside).await, [Some(InferErrorKind::EngineStopped)]);
    gate.open();
    assert_eq!(kinds(accepted).await, [None; 6]);
    dropped.join().unwrap();
    assert_eq!(
        *fake.batches.lock().unwrap(),
        [vec![1, 2], vec![3, 4], vec![5, 6]]
    );
}

#[tokio::test]
async fn an_image_whose_caller_has_left_is_passed_over() {
    let gate = Arc::new(Gate::default());
    let fake = Fake {
        gate: Some(Arc::clone(&gate)),
        ..Fake::default()
    };
    let instances = start(&fake, options(1, 2, LONG));
    let first = classify_all(&instances, &[1, 2]);
    wait_until(|| fake.batches.lock().unwrap().len() == 1);
    let mut rest = classify_all(&instances, &[3, 4, 5, 6]);
    let outside = classify_all(&instances, &[7]);
    drop(rest.remove(0)); // formed
    drop(rest.remove(2)); // forming
    drop(outside);
    gate.open();
    assert_eq!(kinds(first).await, [None; 2]);
    assert_eq!(kinds(rest).await, [None; 2]);
    assert_eq!(
        *fake.batches.lock().unwrap(),
        [vec![1, 2], vec![4], vec![5]]
    );
    assert_eq!(room(&instances).available_permits(), 4);
}

/// R20: a run that never ended held its images, its permits and its instance for good.
#[tokio::test]
async fn a_run_that_hangs_is_given_up_and_its_instance_goes_on() {
    let fake = Fake::default();
    let options = EngineOptions {
        run_timeout: Duration::from_millis(250),
        ..options(1, 2, LONG)
    };
    let made = Arc::new(Mutex::new(0));
    let make = {
        let (fake, made) = (fake.clone(), Arc::clone(&made));
        move |_| {
            *made.lock().unwrap() += 1;
            Ok(fake.clone())
        }
    };
    let instances = Instances::start("test", options, None, make).unwrap();
    let hung = kinds(classify_all(&instances, &[1, HANGS])).await;
    assert_eq!(hung, [Some(InferErrorKind::Timeout); 2]);
    assert_eq!(kinds(classify_all(&instances, &[3, 4])).await, [None; 2]);
    assert_eq!(*made.lock().unwrap(), 2, "another session has the place");
    assert_eq!(room(&instances).available_permits(), 4);

    // More threads that hang than there are instances end the engine.
    let hung = kinds(classify_all(&instances, &[HANGS, 6])).await;
    assert_eq!(hung, [Some(InferErrorKind::Timeout); 2]);
    wait_until(|| room(&instances).is_closed());
    let late = classify(&instances, 7).await.unwrap_err();
    assert!(late.is_fatal());
    drop(instances); // waits for no thread that hangs
    fake.hang.open();
}

#[tokio::test]
async fn padding_and_fill_are_counted() {
    let fake = Fake {
        fixed: Some(4),
        ..Fake::default()
    };
    let instances = start(&fake, options(1, 4, LONG));
    let answers = classify_all(&instances, &[1, 2, 3, 4, 5]);
    instances.shared().flush();
    assert_eq!(kinds(answers).await, [None; 5]);
    let stats = instances.stats();
    assert_eq!((stats.batches, stats.images, stats.padded), (2, 5, 3));
    assert_eq!(stats.fill, 5.0 / 8.0);
    assert!(stats.compute > Duration::ZERO);
}

#[tokio::test]
async fn batches_that_find_no_memory_are_halved_and_no_image_is_lost() {
    let fake = Fake {
        room: [Some(6), Some(3)],
        ..Fake::default()
    };
    let instances = start(&fake, options(1, 10, Duration::from_millis(1)));
    assert_eq!(instances.stats().max_batch, 5);
    let answers = classify_all(&instances, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(kinds(answers).await, [None; 9]);
    let stats = instances.stats();
    assert_eq!((stats.images, stats.retried, stats.max_batch), (9, 0, 3));
    let mut seen = fake.batches.lock().unwrap().concat();
    seen.sort_unstable();
    assert_eq!(seen, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

/// N9: an engine that begins with batches of one does not stay there, and what it has learned is heard of.
#[tokio::test]
async fn a_size_that_proves_faster_is_gone_over_to() {
    let (fake, heard) = (Fake::default(), Arc::new(Mutex::new(Vec::new())));
    let learning = Learning {
        doubtful: true,
        learned: {
            let heard = Arc::clone(&heard);
            Box::new(move |size| heard.lock().unwrap().push(size))
        },
    };
    let made = fake.clone();
    let make = move |_| Ok(made.clone());
    let options = options(1, 1, Duration::ZERO);
    let instances = Instances::start("test", options, Some((learning, 4)), make).unwrap();
    assert_eq!(room(&instances).available_permits(), 8);
    // Times are reported instead of measured: an image takes half as long in batches of double the size.
    for _ in 0..200 {
        let size = instances.stats().max_batch;
        let tried = instances.shared().largest().min(2 * size);
        for size in [size, tried] {
            let time = Duration::from_secs(1) * 8 / size as u32;
            instances.shared().took(size, time * size as u32, true);
        }
    }
    assert_eq!(*heard.lock().unwrap(), [2, 4]);
    assert_eq!(instances.stats().max_batch, 4);
    assert_eq!(kinds(classify_all(&instances, &[1, 2, 3])).await, [None; 3]);
    assert_eq!(fake.batches.lock().unwrap().concat(), [1, 2, 3]);
}

#[tokio::test]
async fn urgent_images_go_before_those_that_came_first() {
    let gate = Arc::new(Gate::default());
    let fake = Fake {
        gate: Some(Arc::clone(&gate)),
        ..Fake::default()
    };
    let instances = start(&fake, options(1, 2, LONG));
    // The first batch is being computed when the others come.
    let mut answers = classify_all(&instances, &[1, 2]);
    while fake.batches.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    answers.extend(classify_all(&instances, &[3, 4]));
    for image in [5, 6] {
        let mut answer = classify_in(&instances, image, Lane::High);
        assert!(is_pending(&mut answer));
        answers.push(answer);
    }
    gate.open();
    assert_eq!(kinds(answers).await, [None; 6]);
    assert_eq!(*fake.batches.lock().unwrap(), [[1, 2], [5, 6], [3, 4]]);
}

#[test]
fn a_batch_that_cannot_be_smaller_and_finds_no_memory_is_an_error_at_start() {
    let fake = Fake {
        fixed: Some(8),
        room: [Some(4), None],
        ..Fake::default()
    };
    let started = Instances::start("test", options(1, 8, LONG), None, move |_| Ok(fake.clone()));
    assert_eq!(started.unwrap_err().kind(), InferErrorKind::OutOfMemory);
}

#[test]
fn an_instance_that_cannot_start_stops_the_others() {
    let calls = Mutex::new(0);
    let alive = Arc::new(());
    let probe = Arc::clone(&alive);
    let error = Instances::start("test", options(3, 2, LONG), None, move |_| {
        let _holds = &probe;
        let mut calls = calls.lock().unwrap();
        *calls += 1;
        if *calls == 2 {
            return Err(InferError::new(InferErrorKind::ModelFailed, "told to"));
        }
        Ok(Fake::default())
    })
    .unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::ModelFailed);
    assert_eq!(Arc::strong_count(&alive), 1, "every thread has ended");
}

#[test]
fn a_panic_at_start_is_an_error() {
    let make = |_| -> Result<Fake, InferError> { panic!("told to") };
    let error = Instances::start("test", options(2, 2, LONG), None, make).unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::EngineStopped);
    assert!(error.to_string().contains("panicked at start"), "{error}");
}
