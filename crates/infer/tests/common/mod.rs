#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test file uses some of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use trommel_infer::{
    Engine, EngineOptions, InferError, LiveOptions, Model, ModelOptions, Runtime, Wanted,
};
use trommel_types::{Lane, Normalization, Scores, Shape};

/// The images of the test models; see `models/README.md`.
pub(crate) const SHAPE: Shape = Shape {
    height: 4,
    width: 5,
    channels: 3,
};

pub(crate) const NORMALIZATION: Normalization = Normalization {
    scale: 1.0 / 255.0,
    mean: [0.485, 0.456, 0.406],
    std: [0.229, 0.224, 0.225],
};

/// Fails the test, naming the command, where ONNX Runtime is missing.
pub(crate) fn runtime() -> Runtime {
    Runtime::load(None).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/models")
        .join(name)
}

pub(crate) fn open_with(dir: &Path, options: &ModelOptions) -> Result<Model, InferError> {
    Model::open(&runtime(), dir, NORMALIZATION, SHAPE, options)
}

pub(crate) fn open(name: &str) -> Result<Model, InferError> {
    open_with(&folder(name), &ModelOptions::default())
}

/// Rows of all that the test models give.
pub(crate) fn all() -> Arc<Wanted> {
    best(3, true)
}

pub(crate) fn best(top_k: u32, logits: bool) -> Arc<Wanted> {
    Arc::new(Wanted {
        top_k: top_k.try_into().unwrap(),
        logits,
        ..Wanted::default()
    })
}

pub(crate) fn options(instances: usize, max_batch: usize) -> EngineOptions {
    EngineOptions {
        instances,
        max_batch,
        max_wait: Duration::from_millis(20),
        run_timeout: EngineOptions::RUN_TIMEOUT,
        live: LiveOptions::default(),
    }
}

/// One instance, batches of up to 4.
pub(crate) fn engine(name: &str) -> Engine {
    let model = open(name).unwrap_or_else(|error| panic!("{error}"));
    Engine::start(model, options(1, 4)).unwrap_or_else(|error| panic!("{error}"))
}

/// Pixels that differ from place to place, channel to channel and image to image; none is 255.
pub(crate) fn image(number: usize) -> Vec<u8> {
    (0..SHAPE.len())
        .map(|i| ((i * 37 + number * 11) % 251) as u8)
        .collect()
}

/// The formula of `models/README.md`, of what `received` makes of a pixel in a channel.
pub(crate) fn logits(pixels: &[u8], received: impl Fn(u8, usize) -> f32) -> [f32; 3] {
    let places = pixels.len() / 3;
    [0, 1, 2].map(|channel| {
        let values = pixels.iter().skip(channel).step_by(3);
        let sum: f32 = values
            .enumerate()
            .map(|(place, &pixel)| received(pixel, channel) * (place + 1) as f32)
            .sum();
        sum / places as f32
    })
}

/// What a model with a floating-point input receives.
pub(crate) fn normalised(pixel: u8, channel: usize) -> f32 {
    let Normalization { scale, mean, std } = NORMALIZATION;
    (f32::from(pixel) * scale - mean[channel]) / std[channel]
}

/// What a model makes of a pixel in a channel.
pub(crate) type Received = fn(u8, usize) -> f32;

/// Models of the formula, what they receive, and how far their logits may be from it.
pub(crate) const MODELS: [(&str, Received, f32); 9] = [
    ("nchw_f32", normalised, 1e-4),
    ("nhwc_f32", normalised, 1e-4),
    // f16 keeps 11 bits; the logits are below 32.
    ("nchw_f16", normalised, 0.05),
    ("nhwc_f16", normalised, 0.05),
    ("nchw_u8", as_it_is, 1e-2),
    ("nhwc_u8", as_it_is, 1e-2),
    ("fixed4", normalised, 1e-4),
    ("external", normalised, 1e-4),
    ("optimum", normalised, 1e-4),
];

/// Classifies all at once and waits for every answer.
pub(crate) async fn classify_all(
    engine: &Engine,
    images: impl IntoIterator<Item = Vec<u8>>,
    wanted: &Arc<Wanted>,
) -> Vec<Result<Scores, InferError>> {
    let calls: Vec<_> = images
        .into_iter()
        .map(|pixels| tokio::spawn(engine.classify(pixels, Lane::Normal, wanted)))
        .collect();
    let mut answers = Vec::new();
    for call in calls {
        answers.push(call.await.unwrap());
    }
    answers
}

/// What a model with a u8 input receives.
pub(crate) fn as_it_is(pixel: u8, _channel: usize) -> f32 {
    f32::from(pixel)
}

pub(crate) fn assert_close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() <= tolerance,
            "{found} instead of {expected}"
        );
    }
}

/// Classes and scores by softmax, the best first.
fn expected_best(logits: [f32; 3], k: usize) -> (Vec<u32>, Vec<f32>) {
    let most = logits.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let powers = logits.map(|logit| (logit - most).exp());
    let sum: f32 = powers.iter().sum();
    let mut order = [0u32, 1, 2];
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    let order = &order[..k];
    let scores = order.iter().map(|class| powers[*class as usize] / sum);
    (order.to_vec(), scores.collect())
}

/// Fails unless the answer is that of the logits.
#[track_caller]
pub(crate) fn assert_best(
    answer: &Result<Scores, InferError>,
    expected: [f32; 3],
    k: usize,
    tolerance: f32,
) {
    let scores = answer.as_ref().unwrap();
    let (classes, expected) = expected_best(expected, k);
    let top = &scores.top;
    assert_eq!(top.iter().map(|top| top.class).collect::<Vec<_>>(), classes);
    let found: Vec<_> = top.iter().map(|top| top.score).collect();
    assert_close(&found, &expected, tolerance);
    for top in top {
        assert_eq!(&*top.label, ["red", "green", "blue"][top.class as usize]);
    }
    assert_eq!(scores.logits, None);
}
