//! Live images: before jobs, and alone where nothing else is there.

use super::*;

/// Runs 12 images of a job, of which the first batch is held until an image of `lane` has come, in batches
/// of 4. A batch of more than one image takes longer than it may while live work comes.
async fn beside(lane: Lane, fixed: Option<usize>) -> Vec<Vec<u8>> {
    let gate = Arc::new(Gate::default());
    let fake = Fake {
        gate: Some(Arc::clone(&gate)),
        fixed,
        ..Fake::default()
    };
    let options = EngineOptions {
        live: LiveOptions {
            max_wait: LONG,
            hold: Duration::ZERO,
            ..LiveOptions::default()
        },
        ..options(1, 4, LONG)
    };
    let instances = start(&fake, options);
    let mut answers = classify_all(&instances, &[1, 2, 3, 4]);
    wait_until(|| fake.batches.lock().unwrap().len() == 1);
    answers.extend(classify_all(&instances, &[5, 6, 7, 8, 9, 10, 11, 12]));
    let mut other = classify_in(&instances, 100, lane);
    assert!(is_pending(&mut other));
    answers.push(other);
    instances.shared().flush_lane(lane);
    gate.open();
    assert_eq!(kinds(answers).await, [None; 13]);
    let batches = fake.batches.lock().unwrap();
    batches.clone()
}

#[tokio::test]
async fn live_images_go_first_and_batches_of_jobs_are_small_while_they_come() {
    let batches = beside(Lane::Live, None).await;
    assert_eq!(batches[..2], [vec![1, 2, 3, 4], vec![100]]);
    let singly: Vec<_> = (5..=12).map(|image| vec![image]).collect();
    assert_eq!(batches[2..], singly);
}

#[tokio::test]
async fn without_live_images_jobs_have_the_device_for_themselves() {
    let batches = beside(Lane::High, None).await;
    let jobs = [vec![5, 6, 7, 8], vec![9, 10, 11, 12]];
    assert_eq!(batches[..2], [vec![1, 2, 3, 4], vec![100]]);
    assert_eq!(batches[2..], jobs);
}

#[tokio::test]
async fn a_batch_that_takes_as_long_with_fewer_images_is_not_cut() {
    let batches = beside(Lane::Live, Some(4)).await;
    assert_eq!(batches[2..], [vec![5, 6, 7, 8], vec![9, 10, 11, 12]]);
}

/// A backend with a faster way for single images, and those that came that way.
fn with_lone() -> (Fake, Arc<Mutex<Vec<u8>>>) {
    let lone = Arc::default();
    let fake = Fake {
        lone: Some(Arc::clone(&lone)),
        ..Fake::default()
    };
    (fake, lone)
}

/// Classifies an image that others are not waited for with.
async fn classify_flushed(instances: &Instances, image: u8, lane: Lane) -> Option<InferErrorKind> {
    let mut answer = classify_in(instances, image, lane);
    assert!(is_pending(&mut answer));
    instances.shared().flush();
    answer.await.err().map(|error| error.kind())
}

#[tokio::test]
async fn a_live_image_that_finds_the_engine_idle_is_a_lone_one() {
    let (fake, lone) = with_lone();
    let instances = start(&fake, options(2, 4, LONG));
    assert_eq!(classify_flushed(&instances, 1, Lane::Live).await, None);
    assert_eq!(classify_flushed(&instances, 2, Lane::High).await, None);
    assert_eq!(*lone.lock().unwrap(), [1]);
    assert_eq!(*fake.batches.lock().unwrap(), [[2]]);
}

#[tokio::test]
async fn a_lone_image_that_fails_is_run_as_any_other() {
    let (fake, lone) = with_lone();
    let instances = start(&fake, options(1, 4, LONG));
    let failed = classify_flushed(&instances, FAILS, Lane::Live).await;
    assert_eq!(failed, Some(InferErrorKind::ModelFailed));
    assert_eq!(*lone.lock().unwrap(), [FAILS]);
    assert_eq!(*fake.batches.lock().unwrap(), [[FAILS]]);
}

#[tokio::test]
async fn an_image_beside_others_is_no_lone_one() {
    let (fake, lone) = with_lone();
    let gate = Arc::new(Gate::default());
    let fake = Fake {
        gate: Some(Arc::clone(&gate)),
        ..fake
    };
    let instances = start(&fake, options(2, 1, LONG));
    let mut answers = classify_all(&instances, &[1]);
    wait_until(|| fake.batches.lock().unwrap().len() == 1);
    answers.push(classify_in(&instances, 2, Lane::Live));
    assert!(is_pending(&mut answers[1]));
    wait_until(|| fake.batches.lock().unwrap().len() == 2);
    gate.open();
    assert_eq!(kinds(answers).await, [None; 2]);
    assert!(lone.lock().unwrap().is_empty());
}

#[tokio::test]
async fn times_of_single_images_limit_batches_but_for_those_of_lone_ones() {
    let options = || EngineOptions {
        live: LiveOptions {
            hold: Duration::ZERO,
            ..LiveOptions::default()
        },
        ..options(1, 4, LONG)
    };
    let most = |instances: &Instances| instances.shared().lock().pace.most(Instant::now());
    let instances = start(&Fake::default(), options());
    assert_eq!(classify_flushed(&instances, 1, Lane::Live).await, None);
    assert_eq!(most(&instances), 1);
    let instances = start(&with_lone().0, options());
    assert_eq!(classify_flushed(&instances, 1, Lane::Live).await, None);
    assert_eq!(most(&instances), usize::MAX);
}
