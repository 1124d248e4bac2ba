//! The parts of a fleet other than its workers.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use trommel_queue::test_server::NatsServer;
use trommel_tests::{binary, digits_model, free_address, root};

/// Three nodes that do not announce each other to clients, and the monitoring address of each.
pub(crate) fn broker() -> (Vec<NatsServer>, Vec<SocketAddr>) {
    let routes = [0; 3].map(|_| format!("nats://{}", free_address()));
    let all = routes.join(",");
    let health = [0; 3].map(|_| free_address());
    let nodes = routes.iter().zip(&health).enumerate();
    let nodes = nodes.map(|(number, (own, health))| {
        let (name, port) = (format!("node-{number}"), health.port().to_string());
        NatsServer::start_with(&[
            "-js",
            "-n",
            &name,
            "--cluster_name",
            "trommel-chaos",
            "--cluster",
            own,
            "--routes",
            &all,
            "--no_advertise=true",
            "-m",
            &port,
        ])
    });
    (nodes.collect(), health.into())
}

/// Copies a model of one folder to another.
pub(crate) fn copy_model(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for name in ["model.onnx", "config.json", "preprocessor_config.json"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

/// Models that exist but do not load.
pub(crate) fn broken_models(repository: &Path) {
    for name in ["garbage", "unknown"] {
        copy_model(&digits_model(), &repository.join(name));
    }
    fs::write(repository.join("garbage/model.onnx"), b"not a model").unwrap();
    let path = repository.join("unknown/model.onnx");
    let mut model = fs::read(&path).unwrap();
    for at in 0..model.len() - 4 {
        if &model[at..at + 4] == b"Conv" {
            model[at..at + 4].copy_from_slice(b"Cnov");
        }
    }
    fs::write(path, model).unwrap();
}

/// Installed copies of the binary, one folder a release, as a rollout leaves them.
pub(crate) struct Releases {
    folder: tempfile::TempDir,
    /// The newest one; 0 is the binary where it was built.
    pub(crate) newest: usize,
}

impl Releases {
    pub(crate) fn new() -> Self {
        // On the disk of the binary: a link takes no space.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { folder, newest: 0 }
    }

    /// Installs another release.
    pub(crate) fn install(&mut self) {
        self.newest += 1;
        let installed = self.path();
        fs::create_dir_all(installed.parent().unwrap()).unwrap();
        if fs::hard_link(binary(), &installed).is_err() {
            fs::copy(binary(), &installed).unwrap();
        }
    }

    /// The binary of the newest release.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join(format!("{}/trommel", self.newest))
    }

    /// Removes the release before the newest, which nobody runs any more.
    pub(crate) fn remove_old(&self) {
        let old = self.folder.path().join((self.newest - 1).to_string());
        if old.exists() {
            fs::remove_dir_all(old).unwrap();
        }
    }
}

/// ONNX Runtime for binaries that do not lie where they were built, as an installation names it.
pub(crate) fn onnxruntime() -> Option<PathBuf> {
    let ours = root().join(".tools/onnxruntime");
    (std::env::var_os("ORT_DYLIB_PATH").is_none() && ours.exists()).then_some(ours)
}
