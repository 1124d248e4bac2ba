//! Models with what stands around them put into their graphs, as a GPU runs them, here on the
//! processor: all but the names of memory and the options of the device is the same code.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{
    MODELS, as_it_is, assert_best, assert_close, best, classify_all, folder, image, logits,
    normalised, open_with, options,
};
use trommel_infer::{
    Capacity, Device, Engine, InferError, InferErrorKind, ModelOptions, Precision, Wanted,
};
use trommel_types::Scores;

fn fused(max_k: u32) -> ModelOptions {
    ModelOptions {
        fused: Some(true),
        capacity: Capacity {
            max_k: max_k.try_into().unwrap(),
            ..Capacity::default()
        },
        ..ModelOptions::default()
    }
}

fn engine(name: &str, model: &ModelOptions) -> Engine {
    let model = open_with(&folder(name), model).unwrap_or_else(|error| panic!("{name}: {error}"));
    Engine::start(model, options(1, 4)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[tokio::test]
async fn pixels_go_in_and_the_best_classes_come_out() {
    let model = fused(2);
    for (name, received, tolerance) in MODELS {
        let engine = engine(name, &model);
        // Sizes of batch that are padded and that are not.
        for count in [1, 3, 4, 10] {
            let images: Vec<_> = (0..count).map(image).collect();
            let answers = classify_all(&engine, images.clone(), &best(2, false)).await;
            for (answer, image) in answers.iter().zip(&images) {
                // A score moves by less than half of what its logit does.
                assert_best(answer, logits(image, received), 2, tolerance / 2.0);
            }
        }
    }
}

#[tokio::test]
async fn batches_are_padded_to_few_sizes() {
    let engine = engine("nchw_f32", &fused(1));
    let images: Vec<_> = (0..3).map(image).collect();
    for answer in classify_all(&engine, images.clone(), &best(1, false)).await {
        answer.unwrap();
    }
    let stats = engine.stats();
    assert_eq!((stats.batches, stats.images, stats.padded), (1, 3, 1));
}

#[tokio::test]
async fn logits_come_back_where_they_are_asked_for() {
    let wanted = best(3, true);
    let model = ModelOptions {
        capacity: Capacity::from(&*wanted),
        ..fused(3)
    };
    let engine = engine("nchw_f32", &model);
    let images: Vec<_> = (0..5).map(image).collect();
    let answers = classify_all(&engine, images.clone(), &wanted).await;
    for (answer, image) in answers.iter().zip(&images) {
        let found = answer.as_ref().unwrap().logits.as_deref().unwrap();
        assert_close(found, &logits(image, normalised), 1e-4);
    }
}

#[tokio::test]
async fn a_poison_image_fails_alone_also_among_padding() {
    for name in ["poison", "poison_fixed4"] {
        let engine = engine(name, &fused(1));
        let mut images: Vec<_> = (0..5).map(image).collect();
        images[1][7] = 255;
        let answers = classify_all(&engine, images.clone(), &best(1, false)).await;
        for (number, answer) in answers.iter().enumerate() {
            match (number, answer) {
                (1, answer) => {
                    let error = answer.as_ref().unwrap_err();
                    assert_eq!(error.kind(), InferErrorKind::ModelFailed);
                }
                _ => assert_best(answer, logits(&images[number], as_it_is), 1, 1e-3),
            }
        }
        // What the poison left in the tensors is not run again.
        let after = classify_all(&engine, images[..1].to_vec(), &best(1, false)).await;
        assert_best(&after[0], logits(&images[0], as_it_is), 1, 1e-3);
    }
}

#[tokio::test]
async fn an_answer_that_is_no_number_is_an_error_of_its_image() {
    let engine = engine("not_finite", &fused(1));
    let mut images: Vec<_> = (0..4).map(image).collect();
    images[2][0] = 255;
    let answers = classify_all(&engine, images.clone(), &best(1, false)).await;
    for (number, answer) in answers.iter().enumerate() {
        assert_eq!(answer.is_err(), number == 2, "{answer:?}");
    }
    let error = answers[2].as_ref().unwrap_err();
    assert!(
        error.to_string().contains("which is not a score"),
        "{error}"
    );
}

#[tokio::test]
async fn several_instances_on_cores_of_their_own_give_the_same_answers() {
    let model = ModelOptions {
        pin_threads: true,
        intra_threads: 2,
        ..fused(2)
    };
    let model = open_with(&folder("nchw_f32"), &model).unwrap();
    let engine = Engine::start(model, options(2, 3)).unwrap();
    let images: Vec<_> = (0..60).map(image).collect();
    let answers = classify_all(&engine, images.clone(), &best(2, false)).await;
    for (answer, image) in answers.iter().zip(&images) {
        assert_best(answer, logits(image, normalised), 2, 1e-5);
    }
}

#[test]
fn what_only_a_gpu_can_do_is_refused_elsewhere() {
    let precision = ModelOptions {
        precision: Precision::Fp16,
        ..fused(1)
    };
    let unfused = ModelOptions {
        devices: Device::Cuda(0).into(),
        fused: Some(false),
        ..fused(1)
    };
    for (options, words) in [
        (precision, "tensorrt alone"),
        (unfused, "unset infer.fused"),
    ] {
        let error = open_with(&folder("nchw_f32"), &options).unwrap_err();
        assert_eq!(error.kind(), InferErrorKind::Settings);
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[tokio::test]
async fn embeddings_come_beside_the_classes_that_the_device_chose() {
    let wanted = Arc::new(Wanted {
        top_k: 2.try_into().unwrap(),
        embedding: true,
        ..Wanted::default()
    });
    let options = ModelOptions {
        capacity: Capacity::from(&*wanted),
        ..fused(2)
    };
    let plain = ModelOptions {
        fused: Some(false),
        ..options.clone()
    };
    let [fused, plain] = [options, plain].map(|options| engine("optimum", &options));
    let images: Vec<_> = (0..3).map(image).collect();
    let found = classify_all(&fused, images.clone(), &wanted).await;
    let expected = classify_all(&plain, images.clone(), &wanted).await;
    for ((found, expected), image) in found.iter().zip(&expected).zip(&images) {
        let embedding = |answer: &Result<Scores, InferError>| {
            answer.as_ref().unwrap().embedding.clone().unwrap()
        };
        assert_close(&embedding(found), &embedding(expected), 1e-5);
        assert_best(found, logits(image, normalised), 2, 1e-4);
    }
}

#[tokio::test]
async fn rows_larger_than_the_engine_was_opened_for_are_refused() {
    let wanted = |top_k| Wanted::clone(&best(top_k, false));
    let thresholds = Wanted {
        threshold: Some(0.5),
        ..wanted(1)
    };
    let embedding = Wanted {
        embedding: true,
        ..wanted(1)
    };
    let chosen = engine("optimum", &fused(2));
    let all = ModelOptions {
        capacity: Capacity {
            logits: true,
            ..Capacity::default()
        },
        ..fused(1)
    };
    let all = engine("optimum", &all);
    for (rows, by_chosen, by_all) in [
        (&wanted(1), true, true),
        (&wanted(2), true, true),
        (&wanted(3), false, true),
        (&best(1, true), false, true),
        (&thresholds, false, true),
        (&embedding, false, false),
    ] {
        assert_eq!(chosen.covers(rows), by_chosen, "{rows:?}");
        assert_eq!(all.covers(rows), by_all, "{rows:?}");
        assert!(engine("optimum", &ModelOptions::default()).covers(rows));
    }
    let one = classify_all(&chosen, [image(1)], &best(1, false)).await;
    assert_best(&one[0], logits(&image(1), normalised), 1, 1e-4);
    let refused = classify_all(&chosen, [image(1)], &Arc::new(thresholds)).await;
    let error = refused[0].as_ref().unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::Settings);
}

#[test]
fn a_lone_image_has_no_threads_of_its_own() {
    let model = open_with(&folder("nchw_f32"), &fused(1)).unwrap();
    let mut options = options(1, 4);
    options.live.lone_threads = 2;
    let error = Engine::start(model, options).unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::Settings);
    assert!(error.to_string().contains("serve.lone-threads"), "{error}");
}
