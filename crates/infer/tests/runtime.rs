//! Loading ONNX Runtime, which a process can do once: so this is one test, in one order.

use std::fs;
use std::path::Path;

use trommel_infer::{InferErrorKind, Runtime};

#[test]
fn a_named_library_is_loaded_or_refused_and_never_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.so");
    fs::write(&text, "no library").unwrap();
    for (path, words) in [
        (folder.path().join("missing.so"), "there is no such file"),
        (folder.path().to_owned(), "there is no such file"),
        (text, "text.so"),
    ] {
        let error = Runtime::load(Some(&path)).unwrap_err();
        assert_eq!(error.kind(), InferErrorKind::Runtime);
        let message = error.to_string();
        assert!(
            message.contains(words) && message.contains("--onnxruntime"),
            "{message}"
        );
        assert!(message.contains("`make setup`"), "{message}");
    }

    // N1: a library that lies in the current directory is not loaded; this one would not load.
    let name = "libonnxruntime.so";
    for planted in ["", "lib", ".tools/onnxruntime"] {
        let planted = folder.path().join(planted);
        fs::create_dir_all(&planted).unwrap();
        fs::write(planted.join(name), "no library").unwrap();
    }
    std::env::set_current_dir(folder.path()).unwrap();
    let runtime = Runtime::load(None).unwrap_or_else(|error| panic!("{error}"));
    assert!(runtime.path().is_file());
    let again = Runtime::load(Some(runtime.path())).unwrap();
    assert_eq!(again.path(), runtime.path());
    let parent = runtime.path().parent().unwrap();
    assert_eq!(Runtime::load(Some(parent)).unwrap().path(), runtime.path());

    let error = Runtime::load(Some(Path::new("/another/libonnxruntime.so"))).unwrap_err();
    assert!(error.to_string().contains("loaded already"), "{error}");
}
