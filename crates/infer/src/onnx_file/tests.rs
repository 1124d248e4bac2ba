use std::fs;
use std::io::Cursor;

use super::*;

fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2, content.len() as u8];
    field.extend(content);
    field
}

fn model() -> Vec<u8> {
    let location = [bytes(1, b"location"), bytes(2, b"weights.bin")].concat();
    let offset = [bytes(1, b"offset"), bytes(2, b"0")].concat();
    let tensor = [
        vec![1 << 3, 3, 1 << 3, 4], // dims, one by one
        vec![2 << 3, 1],
        bytes(13, &location),
        bytes(13, &offset),
    ]
    .concat();
    let packed = [bytes(1, &[2, 2]), vec![2 << 3, 10], bytes(9, &[0; 8])].concat();
    let graph = [
        bytes(1, &bytes(4, b"Relu")),
        bytes(5, &tensor),
        bytes(5, &packed),
    ]
    .concat();
    let opset = [vec![2 << 3, 17]].concat();
    [
        vec![1 << 3, 8],
        bytes(2, b"pytorch"),
        bytes(3, b"2.9"),
        bytes(8, &opset),
        bytes(7, &graph),
    ]
    .concat()
}

fn parse(bytes: &[u8]) -> io::Result<OnnxFile> {
    OnnxFile::parse(Cursor::new(bytes), bytes.len() as u64)
}

#[test]
fn what_a_model_says_about_itself() {
    let onnx = parse(&model()).unwrap();
    assert_eq!(onnx.ir_version, 8);
    assert_eq!(onnx.producer, "pytorch 2.9");
    assert_eq!(onnx.opsets, [("ai.onnx".to_owned(), 17)]);
    assert_eq!(onnx.external, BTreeSet::from(["weights.bin".to_owned()]));
    assert_eq!(onnx.parameters(), 16);
    assert_eq!(onnx.precision(), "f32");
}

#[test]
fn a_cut_model_is_an_error_wherever_it_is_cut() {
    let model = model();
    for length in 0..model.len() {
        assert!(
            parse(&model[..length]).is_err(),
            "cut at {length} of {}",
            model.len()
        );
    }
}

#[test]
fn a_file_that_ends_before_its_length_is_an_error() {
    let model = model();
    for length in 0..model.len() {
        let cut = Cursor::new(&model[..length]);
        let error = OnnxFile::parse(cut, model.len() as u64).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "cut at {length}");
    }
}

#[test]
fn any_changed_byte_is_read_or_refused() {
    let model = model();
    for place in 0..model.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut changed = model.clone();
            changed[place] = value;
            drop(parse(&changed)); // without a panic
        }
    }
}

/// The bytes of weights are sought over, and a graph beyond the budget is refused.
#[test]
fn what_is_decoded_is_bounded() {
    let mut content = Content::new(Cursor::new(vec![1_u8; 1 << 20]), 1 << 20);
    content.advance(1 << 19);
    assert_eq!(content.budget, Content::<Cursor<Vec<u8>>>::BUDGET);
    content.budget = 10;
    content.advance(11);
    assert!(content.failure.is_some());
    assert!(content.remaining() <= 16 && content.chunk().iter().all(|byte| *byte == 0));
}

#[test]
fn the_hash_covers_external_data() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    fs::write(&path, model()).unwrap();
    let missing = OnnxFile::read(&path).unwrap_err();
    assert!(missing.to_string().contains("weights.bin"), "{missing}");

    fs::write(folder.path().join("weights.bin"), "one").unwrap();
    let one = OnnxFile::read(&path).unwrap();
    assert_eq!(one.bytes, model().len() as u64 + 3);
    fs::write(folder.path().join("weights.bin"), "two").unwrap();
    assert_ne!(OnnxFile::read(&path).unwrap().hash, one.hash);
}

#[test]
fn what_is_no_model_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (content, words) in [
        ("", "is empty"),
        ("version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ("just some text", "is not a complete ONNX model"),
    ] {
        fs::write(&path, content).unwrap();
        let error = OnnxFile::read(&path).unwrap_err();
        assert_eq!(error.kind(), InferErrorKind::NotClassifier);
        assert!(error.to_string().contains(words), "{error}");
    }
}
