//! Frames of videos: their times, their pixels, and what becomes of videos that are damaged.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use bytes::Bytes;
use common::{open, server, wait};
use futures::{StreamExt, TryStreamExt};
use tempfile::TempDir;
use trommel_source::{FetchLimits, Found, Source, SourceOptions, VideoConfig, open_source};
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::ImageRef;

const LIMIT: u64 = 64 << 20;
/// Frames per second of the test's videos.
const NATIVE: usize = 25;

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

/// A folder with a video of so many seconds, a key frame every two, whose sound is longer than its picture.
struct Clips {
    folder: TempDir,
}

impl Clips {
    fn new(seconds: u32) -> Self {
        let clips = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let picture = format!("testsrc2=size=96x64:rate={NATIVE}:duration={seconds}");
        let sound = format!("sine=duration={seconds}.7");
        let mp4 = clips.text("a.mp4");
        ffmpeg(&[
            "-f",
            "lavfi",
            "-i",
            &picture,
            "-f",
            "lavfi",
            "-i",
            &sound,
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
            &mp4,
        ]);
        clips
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// The video in another container, by its suffix.
    fn remux(&self, name: &str) {
        ffmpeg(&["-i", &self.text("a.mp4"), "-c", "copy", &self.text(name)]);
    }

    /// Every frame of a video, as `ffmpeg` writes it from the beginning.
    fn all_frames(&self, name: &str) -> Vec<Vec<u8>> {
        let out = self.path("frames");
        fs::create_dir_all(&out).unwrap();
        let pattern = out.join("%05d.bmp");
        ffmpeg(&["-i", &self.text(name), "-an", pattern.to_str().unwrap()]);
        let mut paths: Vec<_> = fs::read_dir(&out)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        paths.sort();
        let frames = paths.iter().map(|path| fs::read(path).unwrap()).collect();
        fs::remove_dir_all(&out).unwrap();
        frames
    }

    fn open(&self, name: &str, fps: &str) -> Arc<dyn Source> {
        let options = SourceOptions {
            fps: Some(fps.parse().unwrap()),
            ..SourceOptions::default()
        };
        open_source(&[self.text(name)], &options).unwrap()
    }
}

fn image(found: &Found) -> ImageRef {
    ImageRef {
        etag: found.etag.clone(),
        ..common::image(&found.uri, found.content.clone())
    }
}

fn list(source: &Arc<dyn Source>) -> Vec<Found> {
    wait(source.list().try_collect()).unwrap()
}

fn fetch(source: &Arc<dyn Source>, found: &Found) -> Result<Bytes, StorageError> {
    wait(source.fetch(&image(found), LIMIT))
}

/// Fetches all, so many at once.
fn fetch_all(
    source: &Arc<dyn Source>,
    found: &[Found],
    at_once: usize,
) -> Vec<Result<Bytes, StorageError>> {
    let fetches = found.iter().map(|found| {
        let (source, image) = (Arc::clone(source), image(found));
        async move { source.fetch(&image, LIMIT).await }
    });
    wait(futures::stream::iter(fetches).buffered(at_once).collect())
}

fn times(found: &[Found]) -> Vec<&str> {
    let time = |found: &Found| found.uri.rfind("#t=").map(|at| at + 3).unwrap();
    found
        .iter()
        .map(|found| &found.uri[time(found)..])
        .collect()
}

/// The frame on display at each time is the one that plain decoding gives, in every container, in any
/// order, and however many are requested at once.
#[test]
fn frames_are_those_of_a_plain_decoding() {
    let clips = Clips::new(9);
    for name in ["a.mkv", "a.ts", "a.mov"] {
        clips.remux(name);
    }
    let picture = format!("testsrc2=size=96x64:rate={NATIVE}:duration=9");
    ffmpeg(&[
        "-f",
        "lavfi",
        "-i",
        &picture,
        "-c:v",
        "mpeg4",
        &clips.text("a.avi"),
    ]);
    ffmpeg(&[
        "-i",
        &clips.text("a.mp4"),
        "-c:v",
        "libvpx",
        "-an",
        "-b:v",
        "500k",
        &clips.text("a.webm"),
    ]);
    for name in ["a.mp4", "a.mkv", "a.ts", "a.mov", "a.avi", "a.webm"] {
        let expected = clips.all_frames(name);
        let source = clips.open(name, "5");
        let found = list(&source);
        assert_eq!(found.len(), 45, "{name}");
        assert_eq!(times(&found)[..3], ["0.000", "0.200", "0.400"]);
        let mut shuffled = found.clone();
        shuffled.reverse();
        for (order, at_once) in [(&found, 16), (&shuffled, 3), (&found, 1)] {
            for (found, fetched) in order.iter().zip(fetch_all(&source, order, at_once)) {
                let seconds: f64 = times(std::slice::from_ref(found))[0].parse().unwrap();
                let number = (seconds * NATIVE as f64).round() as usize;
                let fetched = fetched.unwrap_or_else(|error| panic!("{name}: {error}"));
                assert!(fetched == expected[number], "{}: frame {number}", found.uri);
            }
        }
    }
}

/// Every frame of a video at its own rate, at one that does not divide it, and at a slow one.
#[test]
fn every_rate_gives_the_frames_on_display() {
    let clips = Clips::new(4);
    let expected = clips.all_frames("a.mp4");
    for (rate, count) in [
        ("25", 100),
        ("3", 12),
        ("29.97", 120),
        ("0.4", 2),
        ("100", 400),
    ] {
        let source = clips.open("a.mp4", rate);
        let found = list(&source);
        assert_eq!(found.len(), count, "{rate}");
        let rate: f64 = rate.parse().unwrap();
        for (number, fetched) in fetch_all(&source, &found, 8).into_iter().enumerate() {
            let on_display = (number as f64 / rate * NATIVE as f64 + 1e-6) as usize;
            assert!(fetched.unwrap() == expected[on_display], "{rate}: {number}");
        }
    }
}

/// Listings repeat themselves, and a frame rate is part of what a job is.
#[test]
fn listings_repeat_themselves() {
    let clips = Clips::new(3);
    let source = clips.open("a.mp4", "2");
    let (first, again) = (list(&source), list(&clips.open("a.mp4", "2")));
    assert_eq!(first, again);
    assert_eq!(
        times(&first),
        ["0.000", "0.500", "1.000", "1.500", "2.000", "2.500"]
    );
    assert!(
        source.describe().ends_with(" --fps 2"),
        "{}",
        source.describe()
    );
    let by_default = open_source(&[clips.text("a.mp4")], &SourceOptions::default()).unwrap();
    assert_eq!(times(&list(&by_default)), ["0.000", "1.000", "2.000"]);

    clips.remux("b.mp4");
    let both = clips.open("*.mp4", "1");
    assert_eq!(list(&both).len(), 6);
    let folder = open_source(&[clips.text("")], &SourceOptions::default());
    let refusal = folder.err().unwrap().to_string();
    assert!(refusal.contains("name them, as in"), "{refusal}");
}

/// What is cut off or damaged has rows that say so, and everything else its frames.
#[test]
fn damaged_videos_fail_where_they_are_damaged() {
    let clips = Clips::new(12);
    clips.remux("a.mkv");
    let expected = clips.all_frames("a.mp4");
    for name in ["a.mkv", "a.mp4"] {
        let whole = fs::read(clips.path(name)).unwrap();
        let cut = format!("cut-{name}");
        fs::write(clips.path(&cut), &whole[..whole.len() / 2]).unwrap();
        let source = clips.open(&cut, "1");
        let found = list(&source);
        assert!((4..10).contains(&found.len()), "{name}: {}", found.len());
        let fetched = fetch_all(&source, &found, 4);
        for (number, fetched) in fetched[..fetched.len() - 2].iter().enumerate() {
            assert!(
                *fetched.as_ref().unwrap() == expected[number * NATIVE],
                "{name}: {number}"
            );
        }
        let last = fetched.last().unwrap().as_ref().unwrap_err();
        assert_eq!(last.kind(), StorageErrorKind::NotAFile, "{last}");
        assert!(last.to_string().starts_with("failed to decode "), "{last}");

        let bad = format!("bad-{name}");
        let (mut damaged, middle) = (whole.clone(), whole.len() / 2);
        damaged[middle..middle + 4000]
            .iter_mut()
            .for_each(|byte| *byte ^= 0xa5);
        fs::write(clips.path(&bad), damaged).unwrap();
        let source = clips.open(&bad, "1");
        let found = list(&source);
        assert!((12..=13).contains(&found.len()), "{name}: {}", found.len());
        let fetched = fetch_all(&source, &found, 4);
        let failed = fetched.iter().filter(|fetched| fetched.is_err()).count();
        assert!(
            (1..=4).contains(&failed),
            "{name}: {failed} of {}",
            fetched.len()
        );
        for (number, fetched) in fetched.iter().enumerate() {
            let Ok(fetched) = fetched else { continue };
            assert!(*fetched == expected[number * NATIVE], "{name}: {number}");
        }
        // The same frames fail in the same words when they are requested alone.
        for (found, fetched) in found.iter().zip(&fetched) {
            let alone = fetch(&source, found);
            assert_eq!(alone.is_ok(), fetched.is_ok(), "{}", found.uri);
        }
    }
}

/// What is no video at all has one row, which says so.
#[test]
fn what_is_no_video_fails_once() {
    let clips = Clips::new(1);
    let whole = fs::read(clips.path("a.mp4")).unwrap();
    fs::write(clips.path("text.mp4"), "a camera that sends text").unwrap();
    fs::write(clips.path("empty.mp4"), "").unwrap();
    fs::write(clips.path("head.mp4"), &whole[..200]).unwrap();
    // A list of other files is not followed.
    let list_of_files = format!(
        "#EXTM3U\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n",
        clips.text("a.mp4")
    );
    fs::write(clips.path("list.mp4"), list_of_files).unwrap();
    ffmpeg(&[
        "-i",
        &clips.text("a.mp4"),
        "-vn",
        "-c",
        "copy",
        &clips.text("sound.mp4"),
    ]);
    for name in ["text.mp4", "empty.mp4", "head.mp4", "list.mp4", "sound.mp4"] {
        let source = clips.open(name, "1");
        let found = list(&source);
        assert_eq!(found.len(), 1, "{name}");
        let error = fetch(&source, &found[0]).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::NotAFile, "{error}");
        assert!(error.to_string().contains("ffmpeg reports"), "{error}");
    }
}

#[test]
fn a_video_that_changed_and_frames_that_are_too_large_are_refused() {
    let clips = Clips::new(2);
    let source = clips.open("a.mp4", "1");
    let found = list(&source);
    let limits = FetchLimits {
        bytes: 1000,
        time: std::time::Duration::from_secs(60),
    };
    let refused = wait(source.fetch_within(&image(&found[0]), limits)).unwrap_err();
    assert_eq!(refused.kind(), StorageErrorKind::TooLarge, "{refused}");

    let other = Clips::new(3);
    fs::copy(other.path("a.mp4"), clips.path("a.mp4")).unwrap();
    // Asked of another process, which has decoded nothing of it before.
    let refused = fetch(&clips.open("a.mp4", "1"), &found[1]).unwrap_err();
    assert_eq!(refused.kind(), StorageErrorKind::Changed, "{refused}");
}

#[test]
fn without_ffmpeg_the_error_names_it() {
    let clips = Clips::new(1);
    let with = |ffmpeg: &Path| SourceOptions {
        video: VideoConfig {
            ffmpeg: Some(ffmpeg.to_owned()),
            ..VideoConfig::default()
        },
        ..SourceOptions::default()
    };
    let opened = open_source(&[clips.text("a.mp4")], &with(Path::new("/nowhere/ffmpeg")));
    let error = opened.err().unwrap();
    assert_eq!(error.kind(), StorageErrorKind::InvalidSource);
    assert!(
        error.to_string().contains("video.ffmpeg = /nowhere/ffmpeg"),
        "{error}"
    );

    // A worker without it tries again, as another may have it.
    let found = list(&clips.open("a.mp4", "1"));
    let fetcher = trommel_source::fetcher(&with(Path::new("/nowhere/ffmpeg")));
    let error = fetch(&fetcher, &found[0]).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unreadable, "{error}");
}

/// A video in S3 is read by ranges, through this process.
#[test]
fn videos_in_a_bucket_have_the_same_frames() {
    let clips = Clips::new(4);
    let expected = clips.all_frames("a.mp4");
    let server = server();
    let whole = fs::read(clips.path("a.mp4")).unwrap();
    for key in ["clips/a.mp4", "clips/b.mp4"] {
        server.put("bucket", key, &whole);
    }
    let source = open(&server, "s3://bucket/clips/*.mp4").unwrap();
    let found = list(&source);
    let uris: Vec<_> = found.iter().map(|found| found.uri.as_str()).collect();
    assert_eq!(
        uris[3..5],
        [
            "s3://bucket/clips/a.mp4#t=3.000",
            "s3://bucket/clips/b.mp4#t=0.000"
        ]
    );
    for (number, fetched) in fetch_all(&source, &found, 8).into_iter().enumerate() {
        assert!(
            fetched.unwrap() == expected[number % 4 * NATIVE],
            "{number}"
        );
    }
    let listed_before = Found {
        etag: Some("another version".to_owned()),
        ..found[0].clone()
    };
    let changed = fetch(&source, &listed_before).unwrap_err();
    assert_eq!(changed.kind(), StorageErrorKind::Changed, "{changed}");
}

/// A store that does not answer for a while is no damaged video.
#[test]
fn a_store_that_is_away_is_tried_again() {
    let clips = Clips::new(2);
    let server = server();
    server.put("bucket", "a.mp4", &fs::read(clips.path("a.mp4")).unwrap());
    let source = open(&server, "s3://bucket/a.mp4").unwrap();
    let found = list(&source);
    server.be_unavailable(1_000_000);
    let error = fetch(&source, &found[0]).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unreadable, "{error}");
}
