//! Videos, from the command line to the rows.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;

use trommel_sink::ResultRow;
use trommel_storage::testsuite::S3Server;
use trommel_tests::{
    Cluster, Folder, Trommel, assert_code, assert_each_index_once, digits_model, free_address,
    metric, rows, stderr,
};

/// Runs `ffmpeg`, which `make setup` puts on `PATH`.
fn ffmpeg(args: &[&str]) {
    let run = Command::new("ffmpeg")
        .args(["-v", "error", "-nostdin", "-y"])
        .args(args)
        .output()
        .expect("ffmpeg is on PATH: make setup");
    assert!(
        run.status.success(),
        "{}",
        String::from_utf8_lossy(&run.stderr)
    );
}

/// Makes a video of so many seconds and 25 frames a second, with a key frame every two.
fn make_video(path: &Path, seconds: u32) {
    let picture = format!("testsrc2=size=160x120:rate=25:duration={seconds}");
    let path = path.to_str().unwrap();
    ffmpeg(&[
        "-f",
        "lavfi",
        "-i",
        &picture,
        "-c:v",
        "libx264",
        "-g",
        "50",
        "-bf",
        "2",
        "-pix_fmt",
        "yuv420p",
        "-movflags",
        "+faststart",
        path,
    ]);
}

/// What a row says about an image, however it came.
fn said(row: &ResultRow) -> String {
    format!("{} {:?} {:?}", row.status, row.label, row.top)
}

/// The rows of a video's frames are those of the same frames as PNG files.
#[test]
fn frames_have_the_rows_of_the_same_frames_as_png_files() {
    let folder = Folder::new();
    let clip = folder.path("clip.mp4");
    make_video(&clip, 8);
    let images = folder.path("png");
    fs::create_dir(&images).unwrap();
    let every_fifth = "select='not(mod(n,5))'";
    let pattern = images.join("%04d.png");
    ffmpeg(&[
        "-i",
        clip.to_str().unwrap(),
        "-vf",
        every_fifth,
        "-fps_mode",
        "passthrough",
        pattern.to_str().unwrap(),
    ]);
    let output = folder.path("png.jsonl");
    assert_code(&Trommel::classify(&images, &output).run(), 0);
    let expected = rows(&output);
    assert_each_index_once(&expected, 40);

    let output = folder.path("video.jsonl");
    let run = Trommel::classify(&clip, &output).args(["--fps", "5"]).run();
    assert_code(&run, 0);
    let found = rows(&output);
    assert_each_index_once(&found, 40);
    for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let seconds = number as f64 / 5.0;
        let uri = format!("clip.mp4#t={seconds:.3}");
        assert!(found.uri.ends_with(&uri), "{} is not {uri}", found.uri);
        assert_eq!(said(found), said(expected), "{}", found.uri);
    }
}

/// A damaged video among others fails in its own rows only, and a run without `ffmpeg` says what it needs.
#[test]
fn damaged_videos_cost_their_own_rows() {
    let folder = Folder::new();
    fs::create_dir(folder.path("clips")).unwrap();
    make_video(&folder.path("clips/a.mp4"), 3);
    fs::copy(folder.path("clips/a.mp4"), folder.path("clips/c.mp4")).unwrap();
    fs::write(folder.path("clips/b.mp4"), "a camera that sends text").unwrap();
    let command = |output: &Path| {
        Trommel::new(["classify"])
            .arg(folder.path("clips/*.mp4"))
            .arg("--model")
            .arg(digits_model())
            .arg("--output")
            .arg(output)
    };
    let output = folder.path("rows.jsonl");
    assert_code(&command(&output).run(), 0);
    let found = rows(&output);
    assert_each_index_once(&found, 7);
    let failed: Vec<_> = found.iter().filter(|row| row.label.is_none()).collect();
    assert_eq!(failed.len(), 1);
    let (uri, error) = (&failed[0].uri, failed[0].error.as_deref().unwrap());
    assert!(uri.ends_with("clips/b.mp4#t=0.000"), "{uri}");
    assert!(
        error.contains("failed to decode") && error.contains("ffmpeg reports"),
        "{error}"
    );

    let run = command(&folder.path("none.jsonl"))
        .env("PATH", "/nowhere")
        .run();
    assert_code(&run, 2);
    let message = stderr(&run);
    assert!(
        message.contains("ffmpeg is not on PATH; install it"),
        "{message}"
    );
    assert!(!folder.path("none.jsonl").exists());
}

/// A run that is killed at any moment continues where it was, and no frame has two rows.
#[test]
fn a_run_over_videos_resumes() {
    let folder = Folder::new();
    make_video(&folder.path("clip.mp4"), 40);
    let output = folder.path("rows");
    let command = || {
        Trommel::new(["classify"])
            .arg(folder.path("clip.mp4"))
            .args(["--fps", "12.5", "--model"])
            .arg(digits_model())
            .arg("--output")
            .arg(format!("{}/", output.to_str().unwrap()))
            .env("TROMMEL_SINK__PART_ROWS", "20")
    };
    let mut running = command().spawn();
    let parts = || fs::read_dir(&output).map_or(0, Iterator::count);
    trommel_tests::eventually("a part is committed", || {
        (parts() >= 3 || running.try_wait().unwrap().is_some()).then_some(())
    });
    running.kill().unwrap();
    running.wait().unwrap();
    assert_code(&command().run(), 0);
    let found = rows(&output);
    assert_each_index_once(&found, 500);
    assert!(found.iter().all(|row| row.label.is_some()));
}

/// In a cluster, ingest only lists: two preprocess workers decode what lies in S3, and one is killed.
#[test]
fn a_cluster_decodes_videos_in_preprocess() {
    let (folder, server) = (Folder::new(), S3Server::start());
    server.create_bucket("videos");
    make_video(&folder.path("clip.mp4"), 30);
    let content = fs::read(folder.path("clip.mp4")).unwrap();
    server.put("videos", "clips/a.mp4", &content);
    server.put("videos", "clips/b.mp4", &content);
    let mut cluster = Cluster::new().s3(&server);
    cluster.start("ingest,sink", &[]);
    let telemetry = [free_address(), free_address()];
    let preprocess =
        telemetry.map(|at| cluster.start("preprocess", &["--listen", &at.to_string()]));
    cluster.await_ready();
    let output = folder.path("rows");
    let output = format!("{}/", output.to_str().unwrap());
    let id = "clips";
    let submitted = cluster
        .submit("s3://videos/clips/*.mp4", &output)
        .args(["--fps", "5", "--id", id])
        .run();
    cluster.assert_code(&submitted, 0);
    // Without infer the job cannot end before the kill.
    cluster.eventually("each decodes frames", || {
        let frames = |at| metric(at, "trommel_decode_seconds_count", &[]);
        (frames(telemetry[0]) > 0.0 && frames(telemetry[1]) > 0.0).then_some(())
    });
    cluster.kill(preprocess[0]);
    cluster.start("infer", &[]);
    let ended = cluster.eventually("the job is complete", || {
        let (state, _) = cluster.progress(id);
        (!["queued", "running"].contains(&state.as_str())).then_some(state)
    });
    assert_eq!(ended, "complete");
    let found = rows(Path::new(&output));
    assert_each_index_once(&found, 300);
    assert!(found.iter().all(|row| row.label.is_some()));
    assert!(
        found[299].uri.ends_with("clips/b.mp4#t=29.800"),
        "{}",
        found[299].uri
    );
}
