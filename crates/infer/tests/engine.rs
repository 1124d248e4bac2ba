//! Answers of real sessions, held against the formula of `models/README.md`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{
    MODELS, SHAPE, all, as_it_is, assert_close, classify_all, engine, folder, image, logits,
    normalised, open, open_with, options,
};
use trommel_infer::{
    Capacity, Engine, EngineOptions, InferErrorKind, LiveOptions, ModelOptions, Wanted,
};
use trommel_types::{Lane, Scores};

fn raw(answer: &Result<Scores, trommel_infer::InferError>) -> &[f32] {
    answer.as_ref().unwrap().logits.as_deref().unwrap()
}

#[tokio::test]
async fn every_layout_and_type_gives_the_logits_of_the_formula() {
    for (name, received, tolerance) in MODELS {
        let engine = engine(name);
        let answers = classify_all(&engine, (0..10).map(image), &all()).await;
        for (number, answer) in answers.iter().enumerate() {
            assert_close(raw(answer), &logits(&image(number), received), tolerance);
        }
    }
}

#[tokio::test]
async fn the_top_is_in_order_with_labels_and_adds_up() {
    let scores = engine("nchw_f32")
        .classify(image(3), Lane::Normal, &all())
        .await
        .unwrap();
    let logits = scores.logits.unwrap();
    let powers: Vec<f32> = logits.iter().map(|logit| logit.exp()).collect();
    assert_eq!(scores.top.len(), 3);
    for top in &scores.top {
        assert_eq!(&*top.label, ["red", "green", "blue"][top.class as usize]);
        let expected = powers[top.class as usize] / powers.iter().sum::<f32>();
        assert!(
            (top.score - expected).abs() < 1e-5,
            "{top:?}, not {expected}"
        );
    }
    assert!(scores.top.is_sorted_by(|a, b| a.score >= b.score));
    assert!((scores.top.iter().map(|top| top.score).sum::<f32>() - 1.0).abs() < 1e-5);
}

#[tokio::test]
async fn a_lone_image_has_the_same_logits_with_more_threads() {
    for (name, ..) in MODELS {
        let live = LiveOptions {
            lone_threads: 2,
            ..LiveOptions::default()
        };
        let options = EngineOptions {
            live,
            ..options(2, 4)
        };
        let engine = Engine::start(open(name).unwrap(), options).unwrap();
        for number in 0..4 {
            let lone = engine.classify(image(number), Lane::Live, &all());
            let (lone, ()) = tokio::join!(lone, async { engine.flush_lane(Lane::Live) });
            let others = classify_all(&engine, [image(number)], &all()).await;
            assert_close(raw(&lone), raw(&others[0]), 1e-6);
        }
    }
}

#[tokio::test]
async fn embeddings_come_beside_the_classes_on_request() {
    let wanted = Arc::new(Wanted {
        embedding: true,
        ..Wanted::default()
    });
    let engine = engine("optimum");
    let answers = classify_all(&engine, (0..6).map(image), &wanted).await;
    for (number, answer) in answers.into_iter().enumerate() {
        // The mean of each channel.
        let pixels = image(number);
        let expected = [0, 1, 2].map(|channel| {
            let values = pixels.iter().skip(channel).step_by(3);
            let sum: f32 = values.map(|pixel| normalised(*pixel, channel)).sum();
            sum / (pixels.len() / 3) as f32
        });
        assert_close(&answer.unwrap().embedding.unwrap(), &expected, 1e-4);
    }

    let ask = ModelOptions {
        capacity: Capacity::from(&*wanted),
        ..ModelOptions::default()
    };
    let error = open_with(&folder("nchw_f32"), &ask).unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::ModelConfig);
    assert_eq!(open("nchw_f32").unwrap().check(&wanted), Err(error.clone()));
    assert!(
        error.to_string().contains("export the model with one"),
        "{error}"
    );
}

#[tokio::test]
async fn one_batch_serves_rows_of_all_kinds() {
    let engine = engine("optimum");
    let kind = |number: usize| match number % 4 {
        0 => Wanted::default(),
        1 => Wanted {
            embedding: true,
            ..Wanted::default()
        },
        2 => Wanted {
            top_k: 1.try_into().unwrap(),
            logits: true,
            ..Wanted::default()
        },
        _ => Wanted {
            threshold: Some(1.0),
            thresholds: [("green".to_owned(), 0.0)].into(),
            ..Wanted::default()
        },
    };
    let calls: Vec<_> = (0..4)
        .map(|number| engine.classify(image(number), Lane::Normal, &Arc::new(kind(number))))
        .map(tokio::spawn)
        .collect();
    let mut rows = Vec::new();
    for call in calls {
        rows.push(call.await.unwrap().unwrap());
    }
    assert_eq!(engine.stats().batches, 1);
    let classes: Vec<_> = rows.iter().map(|row| row.top.len()).collect();
    assert_eq!(classes, [3, 3, 1, 1]);
    assert_eq!(&*rows[3].top[0].label, "green");
    let of = |has: fn(&Scores) -> bool| -> Vec<_> { rows.iter().map(has).collect() };
    assert_eq!(
        of(|row| row.embedding.is_some()),
        [false, true, false, false]
    );
    assert_eq!(of(|row| row.logits.is_some()), [false, false, true, false]);
}

#[tokio::test]
async fn a_threshold_for_an_unknown_label_is_an_error_that_names_it() {
    let engine = engine("nchw_f32");
    let wanted = Arc::new(Wanted {
        thresholds: [("animal".to_owned(), 0.2)].into(),
        ..Wanted::default()
    });
    let error = engine.check(&wanted).unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::Settings);
    assert!(error.to_string().contains("\"animal\""), "{error}");
    let answer = engine.classify(image(1), Lane::Normal, &wanted).await;
    assert_eq!(answer, Err(error));
}

#[tokio::test]
async fn a_fixed_batch_is_padded_and_the_padding_never_seen() {
    for count in [1, 3, 4, 5] {
        let engine = engine("fixed4");
        let answers = classify_all(&engine, (0..count).map(image), &all()).await;
        assert_eq!(answers.len(), count);
        for (number, answer) in answers.iter().enumerate() {
            assert_close(raw(answer), &logits(&image(number), normalised), 1e-4);
        }
        let stats = engine.stats();
        assert_eq!(stats.images, count as u64);
        assert_eq!((stats.images + stats.padded) % 4, 0);
        assert_eq!(stats.max_batch, 4);
    }
    // The model's own number holds, whatever is requested.
    for asked in [1, 100] {
        let engine = Engine::start(open("fixed4").unwrap(), options(1, asked)).unwrap();
        assert_eq!(engine.stats().max_batch, 4);
    }
}

#[tokio::test]
async fn a_poison_image_fails_alone_also_among_padding() {
    for name in ["poison", "poison_fixed4"] {
        let engine = engine(name);
        for round in 0..3 {
            let mut images: Vec<_> = (0..5).map(|number| image(number + round)).collect();
            images[round][7] = 255;
            let answers = classify_all(&engine, images.clone(), &all()).await;
            for (number, answer) in answers.iter().enumerate() {
                if number == round {
                    let error = answer.as_ref().unwrap_err();
                    assert_eq!(error.kind(), InferErrorKind::ModelFailed);
                    assert!(!error.is_fatal());
                    assert!(error.to_string().contains(name), "{error}");
                } else {
                    assert_close(raw(answer), &logits(&images[number], as_it_is), 1e-2);
                }
            }
        }
        // Whoever shared a batch with it was run again.
        assert!(engine.stats().retried >= 3, "{:?}", engine.stats());
    }
}

#[tokio::test]
async fn an_answer_that_is_no_number_is_an_error_of_its_image() {
    let engine = engine("not_finite");
    let mut images: Vec<_> = (0..4).map(image).collect();
    images[2][0] = 255;
    let answers = classify_all(&engine, images, &all()).await;
    for (number, answer) in answers.iter().enumerate() {
        if number == 2 {
            let error = answer.as_ref().unwrap_err();
            assert_eq!(error.kind(), InferErrorKind::ModelFailed);
            assert!(error.to_string().contains("class 0 (red)"), "{error}");
        } else {
            assert_close(raw(answer), &logits(&image(number), as_it_is), 1e-2);
        }
    }
    assert_eq!(engine.stats().retried, 0, "the run itself did not fail");
}

#[tokio::test]
async fn several_instances_give_the_same_answers() {
    let engine = Engine::start(open("nhwc_f32").unwrap(), options(3, 4)).unwrap();
    let answers = classify_all(&engine, (0..100).map(image), &all()).await;
    for (number, answer) in answers.iter().enumerate() {
        assert_close(raw(answer), &logits(&image(number), normalised), 1e-4);
    }
    let stats = engine.stats();
    assert_eq!((stats.instances, stats.images, stats.padded), (3, 100, 0));
}

#[tokio::test]
async fn an_engine_and_another_can_share_a_model() {
    let model = open("nchw_u8").unwrap();
    let engines = [options(1, 2), options(2, 3)]
        .map(|options| Engine::start(model.clone(), options).unwrap());
    for engine in &engines {
        let answer = engine.classify(image(1), Lane::High, &all()).await;
        assert_close(raw(&answer), &logits(&image(1), as_it_is), 1e-2);
    }
}

#[tokio::test]
async fn an_accepted_image_is_answered_after_the_engine_is_gone() {
    let engine = engine("nchw_f32");
    let call = tokio::spawn(engine.classify(vec![9; SHAPE.len()], Lane::Low, &all()));
    tokio::task::yield_now().await; // the call is now in the former, its batch not full
    drop(engine);
    assert!(call.await.unwrap().is_ok());
}
