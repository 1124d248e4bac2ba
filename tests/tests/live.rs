//! Live sources: frames over the broker, the newest first, and `trommel feed`.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use futures::StreamExt;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::runtime::Runtime;
use trommel_queue::test_server::NatsServer;
use trommel_tests::{Cluster, Folder, Serving, Trommel, digits, eventually, rows, stderr};

/// Longest wait for what has to come.
const END: Duration = Duration::from_secs(120);

/// A process that is killed at the end of its test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// `trommel serve` that classifies live sources.
fn serve(nats: &NatsServer, sources: &[&str], env: &[(&str, &str)]) -> Serving {
    let url = nats.url();
    let mut args = vec!["--nats", &url];
    for source in sources {
        args.extend(["--live", source]);
    }
    Serving::start(&args, env)
}

/// A client of the broker.
struct Watcher {
    runtime: Runtime,
    client: async_nats::Client,
    results: async_nats::Subscriber,
}

impl Watcher {
    /// Follows the results of all sources.
    fn new(nats: &NatsServer) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let (client, results) = runtime.block_on(async {
            let client = async_nats::connect(nats.url()).await.unwrap();
            let results = client.subscribe("trommel.live.results.*").await.unwrap();
            client.flush().await.unwrap();
            (client, results)
        });
        Self {
            runtime,
            client,
            results,
        }
    }

    fn publish(&self, source: &str, payload: &[u8]) {
        self.runtime.block_on(async {
            let subject = format!("trommel.live.{source}");
            let payload = payload.to_vec().into();
            self.client.publish(subject, payload).await.unwrap();
            self.client.flush().await.unwrap();
        });
    }

    /// The next result: its source, its row, and its frame's number, if it has one.
    fn next(&mut self) -> (String, Value, Option<u64>) {
        let message = self.runtime.block_on(async {
            let next = tokio::time::timeout(END, self.results.next()).await;
            next.expect("a result comes").unwrap()
        });
        let source = message.subject.rsplit('.').next().unwrap().to_owned();
        let number = message
            .headers
            .as_ref()
            .and_then(|headers| headers.get("Trommel-Frame"));
        let number = number.map(|number| number.as_str().parse().unwrap());
        (
            source,
            serde_json::from_slice(&message.payload).unwrap(),
            number,
        )
    }
}

/// Makes a video of so many seconds and 25 frames a second.
fn make_video(path: &Path, seconds: u32) {
    let picture = format!("testsrc2=size=160x120:rate=25:duration={seconds}");
    let run = Command::new("ffmpeg")
        .args([
            "-v", "error", "-nostdin", "-y", "-f", "lavfi", "-i", &picture,
        ])
        .args(["-c:v", "libx264", "-g", "25", "-pix_fmt", "yuv420p"])
        .arg(path)
        .output()
        .expect("ffmpeg is on PATH: make setup");
    assert!(
        run.status.success(),
        "{}",
        String::from_utf8_lossy(&run.stderr)
    );
}

/// Each frame gets the row that a request for it would get; one that is no image gets a row that says so,
/// and its source continues.
#[test]
fn frames_have_rows_and_a_camera_that_sends_text_has_failed_ones() {
    let nats = NatsServer::start();
    let mut serving = serve(&nats, &["*"], &[]);
    let mut watcher = Watcher::new(&nats);
    let image = fs::read(&digits()[0]).unwrap();
    let expected = serving.classify(&image, &[]).json();
    for round in 0..3 {
        watcher.publish("cam-1", &image);
        let (source, row, _) = watcher.next();
        assert_eq!(source, "cam-1", "round {round}");
        assert_eq!(row["label"], expected["label"], "{row}");
        assert_eq!(row["top"], expected["top"]);
        assert_eq!(row["status"], "ok");
        let uri = row["uri"].as_str().unwrap();
        assert!(uri.starts_with("nats://trommel.live.cam-1#"), "{uri}");

        watcher.publish("cam-2", b"a camera that sends text");
        let (source, row, _) = watcher.next();
        assert_eq!(
            (source.as_str(), &row["status"]),
            ("cam-2", &Value::from("failed")),
            "{row}"
        );
        assert_eq!(row["error_kind"], "unknown_format");
    }
    let age = |outcome: &str| {
        let labels = format!("outcome=\"{outcome}\"");
        serving.metric("trommel_live_frame_age_seconds_count", &[&labels])
    };
    assert_eq!((age("ok"), age("failed")), (3.0, 3.0));
    assert_eq!(serving.metric("trommel_live_sources", &[]), 2.0);
    serving.assert_works(&image);
    serving.signal(Signal::TERM);
    assert_eq!(serving.wait(), Some(0));
}

/// Who begins to look sees the newest frame of each source, and none of those before it.
#[test]
fn only_the_newest_frame_of_a_source_waits() {
    let nats = NatsServer::start();
    // Makes the stream, and ends.
    let mut first = serve(&nats, &["*"], &[]);
    first.signal(Signal::TERM);
    assert_eq!(first.wait(), Some(0));
    let mut watcher = Watcher::new(&nats);
    let images: Vec<_> = digits()
        .iter()
        .take(40)
        .map(|path| fs::read(path).unwrap())
        .collect();
    for image in &images {
        watcher.publish("a", image);
        watcher.publish("b", image);
    }
    let serving = serve(&nats, &["*"], &[]);
    let mut sequences = Vec::new();
    for _ in 0..2 {
        let (source, row, _) = watcher.next();
        let expected = serving.classify(images.last().unwrap(), &[]).json();
        assert_eq!(row["top"], expected["top"], "{source}");
        let sequence = row["uri"]
            .as_str()
            .unwrap()
            .rsplit('#')
            .next()
            .unwrap()
            .to_owned();
        sequences.push(sequence.parse::<u64>().unwrap());
    }
    sequences.sort_unstable();
    assert_eq!(sequences, [79, 80]);
    // Of sources that are not named, nothing is classified.
    drop(serving);
    let other = serve(&nats, &["c"], &[("TROMMEL_LIVE__MAX_SOURCES", "1")]);
    watcher.publish("a", &images[0]);
    watcher.publish("c", &images[1]);
    assert_eq!(watcher.next().0, "c");
    drop(other);
}

/// Frames that a source sends faster than it may are dropped, and counted by reason.
#[test]
fn dropped_frames_are_counted_by_reason() {
    let nats = NatsServer::start();
    let serving = serve(
        &nats,
        &["*"],
        &[
            ("TROMMEL_LIVE__STRIDE", "10"),
            ("TROMMEL_SERVE__MAX_BODY", "100000"),
        ],
    );
    let mut watcher = Watcher::new(&nats);
    let image = fs::read(&digits()[0]).unwrap();
    // What the broker replaces is known from the first frame on that was read.
    watcher.publish("a", &image);
    assert_eq!(watcher.next().0, "a");
    for _ in 0..100 {
        watcher.publish("a", &image);
    }
    watcher.publish("large", &vec![0; 200_000]);
    let dropped = |reason: &str| {
        let labels = format!("reason=\"{reason}\"");
        serving.metric("trommel_live_frames_dropped_total", &[&labels])
    };
    eventually("all frames are accounted for", || {
        let read = dropped("stride") + dropped("superseded") + dropped("replaced");
        let done = serving.metric("trommel_live_frame_age_seconds_count", &["outcome=\"ok\""]);
        (read + done == 101.0 && dropped("too_large") == 1.0).then_some(())
    });
    let done = serving.metric("trommel_live_frame_age_seconds_count", &["outcome=\"ok\""]);
    assert!((1.0..=11.0).contains(&done), "{done}");
}

/// `trommel feed` publishes a video as it would be seen, and reports what is wrong with other files.
#[test]
fn a_video_is_fed_and_classified() {
    let (nats, folder) = (NatsServer::start(), Folder::new());
    let serving = serve(&nats, &["cam1"], &[]);
    let mut watcher = Watcher::new(&nats);
    let clip = folder.path("clip.mp4");
    make_video(&clip, 2);
    let feed = |input: &Path| {
        Trommel::new(["feed"]).arg(input).args([
            "--as",
            "cam1",
            "--fps",
            "10",
            "--nats",
            &nats.url(),
        ])
    };
    let mut process = Process(feed(&clip).spawn());
    let (mut numbers, mut ended) = (Vec::new(), None);
    while ended.is_none() || numbers.is_empty() {
        let (source, row, number) = watcher.next();
        assert_eq!(
            (source.as_str(), &row["status"]),
            ("cam1", &Value::from("ok")),
            "{row}"
        );
        numbers.push(number.unwrap());
        // The newest frame always has a result.
        if number == Some(19) {
            ended = Some(process.0.wait().unwrap());
        }
    }
    assert!(ended.unwrap().success());
    assert!(numbers.is_sorted() && numbers.len() <= 20, "{numbers:?}");
    drop(serving);

    fs::write(folder.path("text.mp4"), "a camera that sends text").unwrap();
    let run = feed(&folder.path("text.mp4")).run();
    assert_eq!(run.status.code(), Some(1));
    assert!(
        stderr(&run).contains("failed to read") && stderr(&run).contains("ffmpeg reports"),
        "{}",
        stderr(&run)
    );
    let run = feed(&clip)
        .env("TROMMEL_VIDEO__FFMPEG", "/nowhere/ffmpeg")
        .run();
    assert_eq!(run.status.code(), Some(2));
    assert!(
        stderr(&run).contains("video.ffmpeg = /nowhere/ffmpeg is not an executable"),
        "{}",
        stderr(&run)
    );
}

/// A stream that ends is opened again; a signal ends it at once, and no ffmpeg stays.
#[test]
fn a_stream_that_ends_is_opened_again() {
    let (nats, folder) = (NatsServer::start(), Folder::new());
    let log = folder.path("feed.log");
    let input = "tcp://127.0.0.1:9?timeout=1000000";
    let feed = Trommel::new(["feed", input, "--as", "cam1", "--nats", &nats.url()]);
    let mut feed = Process(feed.spawn_logging(&log));
    let said = || fs::read_to_string(&log).unwrap_or_default();
    eventually("retrying in", || {
        let again = |line: &&str| line.contains("retrying in");
        (said().lines().filter(again).count() >= 2).then_some(())
    });
    assert!(said().contains("retrying in 2 s"), "{}", said());
    kill_process(Pid::from_child(&feed.0), Signal::TERM).unwrap();
    assert_eq!(feed.0.wait().unwrap().code(), Some(0), "{}", said());
}

/// Frames become rows of a standing job, at its own pace.
#[test]
fn frames_are_rows_of_a_standing_job() {
    let mut cluster = Cluster::new();
    let folder = Folder::new();
    cluster.start(
        "ingest,preprocess,infer,sink",
        &["--allow-source", "nats://trommel.live.*"],
    );
    cluster.await_ready();
    let image = fs::read(&digits()[0]).unwrap();
    let serving = Serving::start(&["--nats", &cluster.nats.url(), "--live", "*"], &[]);
    let output = folder.path("rows");
    let submitted = cluster
        .submit(
            "nats://trommel.live.cam1",
            &format!("{}/", output.to_str().unwrap()),
        )
        .args(["--id", "cam1"])
        .run();
    cluster.assert_code(&submitted, 0);
    let mut watcher = Watcher::new(&cluster.nats);
    for sent in 1..=3 {
        let payload: &[u8] = if sent == 2 { b"text" } else { &image };
        watcher.publish("cam1", payload);
        assert_eq!(watcher.next().0, "cam1");
        cluster.eventually("its row is committed", || {
            let (_, committed) = cluster.progress("cam1");
            (committed >= sent).then_some(())
        });
    }
    let cancelled = cluster.command(["jobs", "cancel", "cam1"]).run();
    cluster.assert_code(&cancelled, 0);
    let expected = serving.classify(&image, &[]).json();
    let found = rows(&output);
    let statuses: Vec<_> = found.iter().map(|row| row.status.as_str()).collect();
    assert_eq!(statuses, ["ok", "failed", "ok"]);
    assert_eq!(found[0].label.as_deref(), expected["label"].as_str());
    assert!(
        found[0].uri.starts_with("nats://trommel.live.cam1#"),
        "{}",
        found[0].uri
    );
}
