use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use bytes::Bytes;
use metrics::{counter, describe_counter};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use trommel_queue::{Broker, LiveSent, QueueErrorKind};
use trommel_source::{Camera, CameraConfig, Ffmpeg, Killer};

use crate::args::FeedArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::progress_bar::LogWriter;
use crate::shutdown;
use crate::telemetry::Telemetry;

/// Waits before a camera is reopened, which double from the first to the second until a frame
/// arrives.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// How often a pausing thread checks whether to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Longest wait for the broker at the end.
const FLUSH: Duration = Duration::from_secs(2);
const FRAMES: &str = "trommel_feed_frames_total";

/// `trommel feed`: publishes frames until the file ends or a stop. If frames arrive faster than the
/// broker accepts them, only the newest is published.
pub(crate) fn run(args: &FeedArgs, config: &Config, telemetry: &Telemetry) -> Result<Exit> {
    let ffmpeg = Ffmpeg::find(&config.video);
    let ffmpeg = ffmpeg
        .map_err(|reason| anyhow!("ffmpeg is needed to decode frames: {reason}").context(Usage))?;
    let camera = CameraConfig {
        input: args.input.clone(),
        fps: args.fps,
        hwaccel: args.hwaccel.clone(),
        max_width: args.max_width,
        quality: args.quality,
        loops: args.loops,
    };
    describe_counter!(
        FRAMES,
        "Frames of a live source, by what became of them here"
    );
    for outcome in ["published", "superseded", "too_large"] {
        counter!(FRAMES, "outcome" => outcome).increment(0);
    }
    let runtime = crate::runtime::on_threads(2)?;
    runtime.block_on(async {
        let stop = shutdown::on_signal()?;
        telemetry.health.watch();
        let broker = Broker::connect(&config.broker, "trommel feed")
            .await
            .context(Usage)?;
        broker.ensure_live_stream().await.context(Usage)?;
        let subject = broker.live_subject(&args.name);
        say(&format!("publishing frames of {} on {subject}", args.input));
        let (sender, frames) = watch::channel(None);
        let reader = Reader {
            ffmpeg,
            camera,
            sender,
            killer: Arc::default(),
            stop: stop.clone(),
        };
        let killer = Arc::clone(&reader.killer);
        let reader = tokio::task::spawn_blocking(move || reader.run());
        let counts = publish(&broker, &args.name, frames, &stop).await;
        stop.cancel();
        if let Some(killer) = lock(&killer).take() {
            killer.kill();
        }
        let ended = reader.await.context("the thread that reads frames ended")?;
        drop(timeout(FLUSH, broker.flush()).await);
        let counts = counts?;
        say(&format!(
            "frames: {} published, {} superseded, {} too large for a message",
            counts.published, counts.superseded, counts.too_large
        ));
        ended.map(|()| Exit::Success)
    })
}

/// A frame, and its time.
#[derive(Clone)]
struct Frame {
    number: u64,
    /// In milliseconds since the Unix epoch.
    taken: u64,
    bytes: Bytes,
}

/// Reads frames on its own thread.
struct Reader {
    ffmpeg: Ffmpeg,
    camera: CameraConfig,
    /// Holds only the newest frame.
    sender: watch::Sender<Option<Frame>>,
    killer: Arc<Mutex<Option<Killer>>>,
    stop: CancellationToken,
}

impl Reader {
    /// Reads until a stop, or the end of a file. Other inputs are reopened when they end.
    fn run(self) -> Result<()> {
        let (mut number, mut pause) = (0, PAUSES[0]);
        while !self.stop.is_cancelled() {
            let before = number;
            let ended = self.read(&mut number);
            if self.stop.is_cancelled() {
                break;
            }
            let input = &self.camera.input;
            if self.camera.is_file() {
                return ended.map_err(|reason| anyhow!("failed to read {input}: {reason}"));
            }
            if number > before {
                pause = PAUSES[0];
            }
            let reason = ended.err().unwrap_or_else(|| "it ended".to_owned());
            let seconds = pause.as_secs();
            tracing::warn!("{input} has no frames: {reason}; retrying in {seconds} s");
            self.wait(pause);
            pause = PAUSES[1].min(2 * pause);
        }
        Ok(())
    }

    fn read(&self, number: &mut u64) -> Result<(), String> {
        let mut camera = Camera::open(&self.ffmpeg, &self.camera)?;
        *lock(&self.killer) = camera.killer();
        while !self.stop.is_cancelled() {
            let Some(bytes) = camera.next_frame()? else {
                break;
            };
            let taken = SystemTime::now().duration_since(UNIX_EPOCH);
            let frame = Frame {
                number: *number,
                taken: taken.map_or(0, |taken| {
                    u64::try_from(taken.as_millis()).unwrap_or(u64::MAX)
                }),
                bytes,
            };
            *number += 1;
            self.sender.send_replace(Some(frame));
        }
        Ok(())
    }

    fn wait(&self, pause: Duration) {
        let until = std::time::Instant::now() + pause;
        while !self.stop.is_cancelled() && std::time::Instant::now() < until {
            thread::sleep(LOOK_EVERY);
        }
    }
}

/// Counts of frames.
#[derive(Default)]
struct Counts {
    published: u64,
    superseded: u64,
    too_large: u64,
}

/// Publishes the newest frame when there is one, until a stop or the last frame.
async fn publish(
    broker: &Broker,
    source: &str,
    mut frames: watch::Receiver<Option<Frame>>,
    stop: &CancellationToken,
) -> Result<Counts> {
    let (mut counts, mut expected) = (Counts::default(), 0);
    loop {
        let changed = stop.run_until_cancelled(frames.changed()).await;
        if !matches!(changed, Some(Ok(()))) {
            return Ok(counts);
        }
        let Some(frame) = frames.borrow_and_update().clone() else {
            continue;
        };
        let missed = frame.number - expected;
        expected = frame.number + 1;
        counts.superseded += missed;
        counter!(FRAMES, "outcome" => "superseded").increment(missed);
        let (length, sent) = (
            frame.bytes.len(),
            LiveSent {
                number: frame.number,
                taken: frame.taken,
            },
        );
        match broker.publish_live(source, sent, frame.bytes).await {
            Ok(()) => {}
            Err(error) if error.kind() == QueueErrorKind::TooLarge => {
                if counts.too_large == 0 {
                    tracing::warn!(bytes = length, %error, "a frame was too large and dropped; give --max-width, or another --quality");
                }
                counts.too_large += 1;
                counter!(FRAMES, "outcome" => "too_large").increment(1);
                continue;
            }
            Err(error) => return Err(error).context("failed to publish a frame"),
        }
        counts.published += 1;
        counter!(FRAMES, "outcome" => "published").increment(1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn say(what: &str) {
    // Standard error is closed, so this cannot be reported.
    drop(writeln!(LogWriter, "trommel: {what}"));
}
