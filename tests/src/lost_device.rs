//! ONNX Runtime with a device that is lost: the real library, wrapped by `fixtures/lost_device.c`.

use std::path::PathBuf;
use std::process::Command;

use crate::{Folder, root};

/// A library to load instead of ONNX Runtime.
pub struct LostDevice {
    library: PathBuf,
    _folder: Folder,
}

impl LostDevice {
    /// Compiles it; needs a C compiler.
    #[allow(clippy::new_without_default, reason = "it starts a compiler")]
    pub fn new() -> Self {
        let folder = Folder::new();
        let library = folder.path("liblost.so");
        let source = root().join("tests/fixtures/lost_device.c");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
            .args([&library, &source])
            .arg("-ldl")
            .status();
        assert!(
            compiled.unwrap().success(),
            "{} does not compile",
            source.display()
        );
        Self {
            library,
            _folder: folder,
        }
    }

    /// Variables with which a process loses its device after this many runs of the model.
    pub fn after(&self, runs: usize) -> [(&'static str, String); 3] {
        let real = root().join(".tools/onnxruntime/libonnxruntime.so");
        [
            ("ORT_DYLIB_PATH", self.library.display().to_string()),
            ("LOST_DEVICE_OF", real.display().to_string()),
            ("LOST_DEVICE_AFTER", runs.to_string()),
        ]
    }
}
