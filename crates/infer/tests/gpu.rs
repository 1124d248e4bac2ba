//! Models on a GPU, held against the formula of `models/README.md`. Without a GPU these tests fail:
//!
//! `ORT_DYLIB_PATH=… cargo test -p trommel-infer --features gpu-tests --test gpu`

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{MODELS, assert_best, best, classify_all, folder, image, logits, open_with, options};
use trommel_infer::{Device, Devices, Engine, ModelOptions};

/// Two instances warm up side by side and take batches of all sizes, so that recordings made by one
/// while the other works, and one size's recording played for another, would be seen.
async fn every_size_of_batch_gives_the_scores_of_the_formula(devices: impl Into<Devices>) {
    let model = ModelOptions {
        devices: devices.into(),
        max_batch: 6,
        ..ModelOptions::default()
    };
    for (name, received, tolerance) in MODELS {
        let opened = open_with(&folder(name), &model);
        let opened = opened.unwrap_or_else(|error| panic!("{name}: {error}"));
        let engine = Engine::start(opened, options(2, 6)).unwrap();
        for count in [1, 2, 3, 6, 4, 1, 50] {
            let images: Vec<_> = (0..count).map(image).collect();
            let answers = classify_all(&engine, images.clone(), &best(2, false)).await;
            for (answer, image) in answers.iter().zip(&images) {
                assert_best(answer, logits(image, received), 2, tolerance);
            }
        }
    }
}

#[tokio::test]
async fn cuda() {
    every_size_of_batch_gives_the_scores_of_the_formula(Device::Cuda(0)).await;
}

#[tokio::test]
async fn tensorrt() {
    every_size_of_batch_gives_the_scores_of_the_formula(Device::TensorRt(0)).await;
}
