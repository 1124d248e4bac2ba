//! Processes that die, or whose binary is replaced, while they work.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use trommel_storage::testsuite::{Reply, WebServer};
use trommel_tests::{
    Folder, Trommel, assert_code, assert_each_index_once, binary, digits, digits_model, rows,
};

/// Where the records of runs are in a cache, and how many there are.
fn records(cache: &Path) -> usize {
    let records = fs::read_dir(cache.join("trommel/tried")).into_iter();
    records.flatten().count()
}

/// R46: each resume of an embedded run tried the image again that had killed it.
#[test]
fn an_image_at_which_the_process_dies_again_and_again_ends_as_a_failed_row() {
    const IMAGES: usize = 300;
    const DEADLY: usize = 150;
    let folder = Folder::new();
    let contents: Vec<Vec<u8>> = digits()
        .iter()
        .map(|file| fs::read(file).unwrap())
        .collect();
    let victim = Arc::new(AtomicI32::new(0));
    let server = {
        let victim = Arc::clone(&victim);
        WebServer::start(move |asked| {
            let number: usize = asked.target[1..].trim_end_matches(".png").parse().unwrap();
            if number == DEADLY {
                // What a faulty decoder would do to its process. The last run never decodes it.
                let victim = Pid::from_raw(victim.load(Ordering::SeqCst)).unwrap();
                kill_process(victim, Signal::KILL).unwrap();
                return Reply::Reset;
            }
            Reply::object(asked, &contents[number % contents.len()], "\"1\"")
        })
    };
    let list: String = (0..IMAGES)
        .map(|number| server.url(&format!("/{number}.png")) + "\n")
        .collect();
    fs::write(folder.path("urls.txt"), list).unwrap();
    let (output, cache) = (folder.path("rows/"), folder.path("cache"));
    let mut deaths = 0;
    let ended = loop {
        let mut run = Trommel::classify(&folder.path("urls.txt"), &output)
            .args(["--quiet"])
            .env("XDG_CACHE_HOME", cache.to_str().unwrap())
            .env("TROMMEL_HTTP__ALLOW_PRIVATE", "true")
            .env("TROMMEL_RETRY__MAX_ATTEMPTS", "2")
            .env("TROMMEL_RETRY__MAX_DELIVERIES", "3")
            .spawn();
        victim.store(run.id().cast_signed(), Ordering::SeqCst);
        let ended = run.wait().unwrap();
        if ended.code().is_some() {
            break ended;
        }
        deaths += 1;
        assert_eq!(records(&cache), 1);
        assert!(deaths <= 3, "it is tried forever");
    };
    assert!(ended.success(), "{ended}");
    assert_eq!(deaths, 3);
    let found = rows(&output);
    assert_each_index_once(&found, IMAGES);
    let failed: Vec<_> = found.iter().filter(|row| row.status == "failed").collect();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(failed[0].index, DEADLY as u64);
    assert_eq!(failed[0].error_kind.as_deref(), Some("poisoned"));
    assert_eq!(records(&cache), 0, "what is over is forgotten");
}

/// R43: the binary started itself again to set a variable, and failed if it had been replaced meanwhile.
#[test]
fn a_binary_that_is_replaced_while_it_starts_works_on() {
    let folder = Folder::with_digits(3);
    let copy = folder.path("trommel");
    fs::copy(binary(), &copy).unwrap();
    let held = fs::File::open(&copy).unwrap();
    fs::remove_file(&copy).unwrap();
    // What is there by that name is no program: starting it again would fail.
    fs::write(&copy, "replaced").unwrap();
    let running = PathBuf::from(format!(
        "/proc/{}/fd/{}",
        std::process::id(),
        held.as_raw_fd()
    ));
    let output = folder.path("rows.jsonl");
    let mut run = Trommel::of(&running, ["classify"])
        .arg(folder.images())
        .arg("--model")
        .arg(digits_model())
        .arg("--output")
        .arg(&output);
    // It is not next to the libraries of the build.
    if let Some(library) = library() {
        run = run.env("ORT_DYLIB_PATH", library.to_str().unwrap());
    }
    assert_code(&run.run(), 0);
    assert_each_index_once(&rows(&output), 3);
}

/// ONNX Runtime of the binary's own tree.
fn library() -> Option<PathBuf> {
    if std::env::var_os("ORT_DYLIB_PATH").is_some() {
        return None;
    }
    let path = trommel_tests::root().join(".tools/onnxruntime/libonnxruntime.so");
    path.exists().then_some(path)
}
