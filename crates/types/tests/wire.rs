//! What is promised of the wire: maps by field name, tolerance of unknown fields, refusal of newer
//! versions, and that the encoded messages of every released version still decode.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};
use trommel_types::{
    Classification, Content, DecodeError, ErrorKind, Failure, FrameRate, ImageRef, ImageSize, Lane,
    LiveAnswer, LiveOutcome, LiveTensor, Message, Outcome, Packing, PreparedImage, RefusalReason,
    RowOptions, Scalar, Scores, Shape, TopLabel, WarmModel,
};

fn image() -> ImageRef {
    ImageRef {
        job: "job-1".into(),
        index: 41,
        lane: Lane::Normal,
        uri: "shards/a.tar#cat.jpg".to_owned(),
        content: Content::Range {
            archive: "shards/a.tar".to_owned(),
            offset: 512,
            length: 60_000,
        },
        etag: Some("1700000000-60000".to_owned()),
        size: Some(60_000),
        columns: vec![
            Scalar::Null,
            Scalar::Bool(true),
            Scalar::Int(-3),
            Scalar::Float(0.5),
            Scalar::String("camera 2".to_owned()),
        ],
    }
}

fn prepared() -> PreparedImage {
    PreparedImage {
        image: image(),
        model: "digits".into(),
        model_version: "".into(),
        pixels: (0..12).collect::<Vec<u8>>().into(),
        shape: Shape {
            height: 2,
            width: 2,
            channels: 3,
        },
        bytes: 60_000,
        original: ImageSize {
            width: 500,
            height: 375,
        },
        attempts: 1,
        due_at: None,
    }
}

fn classification(outcome: Outcome) -> Classification {
    Classification {
        image: image(),
        model: "digits".into(),
        model_version: "0123456789ab".into(),
        bytes: Some(60_000),
        original: Some(ImageSize {
            width: 500,
            height: 375,
        }),
        outcome,
        attempts: 2,
        finished_at: 1_795_000_000_000_000,
    }
}

fn ok() -> Classification {
    classification(Outcome::Ok(Scores {
        top: vec![TopLabel {
            label: "7".into(),
            class: 7,
            score: 0.875,
        }],
        logits: Some(vec![0.5, -1.0]),
        embedding: None,
    }))
}

fn failed() -> Classification {
    classification(Outcome::Failed(Failure {
        kind: ErrorKind::Truncated,
        error: "the file ends before the image does".to_owned(),
    }))
}

fn live_tensor() -> LiveTensor {
    LiveTensor {
        request: "mine".into(),
        model: "digits".into(),
        model_version: "0123456789ab".into(),
        rows: RowOptions {
            threshold: Some(0.5),
            ..RowOptions::default()
        },
        pixels: prepared().pixels,
        shape: prepared().shape,
        deadline_ms: Some(100),
        coming: 1,
    }
}

fn live_answers() -> [LiveAnswer; 3] {
    let Outcome::Ok(scores) = ok().outcome else {
        panic!("it has scores")
    };
    let Outcome::Failed(failure) = failed().outcome else {
        panic!("it has none")
    };
    [
        LiveAnswer {
            outcome: LiveOutcome::Ok(scores),
        },
        LiveAnswer {
            outcome: LiveOutcome::Failed(failure),
        },
        LiveAnswer::refused(RefusalReason::Full, "as many wait as it answers in time"),
    ]
}

fn warm_model() -> WarmModel {
    WarmModel {
        model: "digits".into(),
        model_version: "0123456789ab".into(),
        labels: vec!["0".into(), "1".into()],
    }
}

/// Compares with the stored message of release 0.1. `TROMMEL_WRITE_GOLDEN=1` stores it again, which
/// is right only for a message that no release has written yet.
fn assert_golden<T: Message + PartialEq + std::fmt::Debug>(name: &str, message: &T) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/0.1")
        .join(name);
    if std::env::var_os("TROMMEL_WRITE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, message.encode()).unwrap();
    }
    let stored = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!(
        &T::decode(&stored).unwrap(),
        message,
        "{name} no longer decodes to the same value"
    );
}

/// A member of a zip archive, and one of a tar archive that is compressed.
fn packed() -> [ImageRef; 2] {
    let in_zip = Content::ZipMember {
        archive: "shards/a.zip".to_owned(),
        offset: 512,
        name_length: 7,
        length: 50_000,
        size: 60_000,
        method: 8,
        checksum: 0xdead_beef,
        encrypted: false,
    };
    let unpacked = Content::Unpacked {
        archive: "shards/a.tar.zst".to_owned(),
        packing: Packing::Zstd,
        offset: 512,
        length: 60_000,
    };
    [in_zip, unpacked].map(|content| ImageRef { content, ..image() })
}

/// A frame of a video.
fn frame() -> ImageRef {
    ImageRef {
        uri: "clips/a.mp4#t=12.480".to_owned(),
        content: Content::Frame {
            video: "clips/a.mp4".to_owned(),
            rate: FrameRate::try_from(12.5).unwrap(),
            number: 156,
        },
        size: None,
        ..image()
    }
}

#[test]
fn messages_of_release_0_1_still_decode() {
    assert_golden("image_ref_frame.msgpack", &frame());
    let [in_zip, unpacked] = packed();
    assert_golden("image_ref_zip_member.msgpack", &in_zip);
    assert_golden("image_ref_unpacked.msgpack", &unpacked);
    assert_golden("image_ref.msgpack", &image());
    assert_golden("prepared_image.msgpack", &prepared());
    assert_golden("classification_ok.msgpack", &ok());
    assert_golden("classification_failed.msgpack", &failed());
    assert_golden("live_tensor.msgpack", &live_tensor());
    let [ok, failed, refused] = live_answers();
    assert_golden("live_answer_ok.msgpack", &ok);
    assert_golden("live_answer_failed.msgpack", &failed);
    assert_golden("live_answer_refused.msgpack", &refused);
    assert_golden("warm_model.msgpack", &warm_model());
}

#[test]
fn messages_survive_the_wire() {
    assert_eq!(ImageRef::decode(&image().encode()).unwrap(), image());
    assert_eq!(
        PreparedImage::decode(&prepared().encode()).unwrap(),
        prepared()
    );
    assert_eq!(Classification::decode(&ok().encode()).unwrap(), ok());
    assert_eq!(
        Classification::decode(&failed().encode()).unwrap(),
        failed()
    );
    assert_eq!(
        LiveTensor::decode(&live_tensor().encode()).unwrap(),
        live_tensor()
    );
    for answer in live_answers() {
        assert_eq!(LiveAnswer::decode(&answer.encode()).unwrap(), answer);
    }
    assert_eq!(
        WarmModel::decode(&warm_model().encode()).unwrap(),
        warm_model()
    );
}

#[test]
fn another_language_may_leave_out_options_and_add_fields() {
    let written_elsewhere = json!({
        "version": 1, "job": "j", "index": 0, "uri": "a.jpg", "priority": "unknown field",
    });
    let wire = rmp_serde::to_vec_named(&written_elsewhere).unwrap();
    let image = ImageRef::decode(&wire).unwrap();
    assert_eq!(
        (image.uri.as_str(), image.content),
        ("a.jpg", Content::Whole)
    );
}

#[test]
fn a_message_is_a_map_by_field_name() {
    let map: Value = rmp_serde::from_slice(&failed().encode()).unwrap();
    assert_eq!(map["version"], 1);
    assert_eq!(map["outcome"]["failed"]["kind"], "truncated");
    assert_eq!(map["image"]["index"], 41);
}

#[test]
fn a_newer_version_is_refused_and_says_so() {
    let wire = rmp_serde::to_vec_named(&json!({"version": 2, "job": "j"})).unwrap();
    let error = ImageRef::decode(&wire).unwrap_err();
    assert!(
        matches!(error, DecodeError::TooNew { version: 2 }),
        "{error}"
    );
    assert!(error.to_string().contains("upgrade"), "{error}");
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_an_error_and_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Classification::decode(&bytes).is_err());
    }

    #[test]
    fn any_pixels_survive_the_wire(pixels in prop::collection::vec(any::<u8>(), 0..3000), index in 0..=i64::MAX as u64) {
        let mut message = prepared();
        message.pixels = pixels.into();
        message.image.index = index;
        prop_assert_eq!(PreparedImage::decode(&message.encode()).unwrap(), message);
    }
}

/// R39: two of them would be one row in stores of signed integers.
#[test]
fn an_index_that_no_signed_integer_holds_is_refused() {
    let mut image = image();
    image.index = 1 << 63;
    let error = ImageRef::decode(&image.encode()).unwrap_err().to_string();
    assert!(error.contains("2^63"), "{error}");
}

/// R32: dead letters kept the pixels of each tensor.
#[test]
fn what_remains_of_a_prepared_image_is_all_but_its_pixels() {
    let remains = PreparedImage::decode(&prepared().encode_remains()).unwrap();
    assert!(remains.pixels.is_empty());
    let whole = PreparedImage {
        pixels: prepared().pixels,
        ..remains
    };
    assert_eq!(whole, prepared());
    assert_eq!(image().encode_remains(), image().encode());
}
