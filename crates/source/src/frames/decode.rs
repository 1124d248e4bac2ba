//! Decodes a stretch: starts `ffmpeg`, repeatedly until it meets a key frame, and reads BMP files
//! from it.

use std::io::{self, Read};
use std::process::ChildStdout;
use std::time::Instant;

use bytes::Bytes;
use trommel_storage::StorageErrorKind;

use super::decoding::{Decoding, End};
use super::stretch::Stretch;
use super::{Cause, Missed};
use crate::ffmpeg::{Ended, Ffmpeg, Input, Running, Watch};
use crate::stored::Stored;
use crate::stores::Stores;
use crate::video::input;
use crate::{FetchLimits, Fetched};

/// How far before a stretch decoding starts, in seconds, tried in turn until a key frame precedes
/// its first frame: seeking is imprecise in some containers. Finally from the beginning.
const EARLIER: [u64; 3] = [0, 15, 90];
/// Tolerance for a frame that is displayed at a time, in microseconds: most containers round times.
const EARLY: u64 = 500;
/// Size of a BMP header, and the position of the file size in it.
const HEAD: usize = 14;

impl Decoding {
    /// Decodes the stretch.
    pub(super) fn run(&self, ffmpeg: &Ffmpeg, stores: &Stores, limits: FetchLimits) -> End {
        match self.decode(ffmpeg, stores, limits) {
            Ok(end) => end,
            Err(cause) => End::Rest(Missed::Failed(cause)),
        }
    }

    fn decode(&self, ffmpeg: &Ffmpeg, stores: &Stores, limits: FetchLimits) -> Result<End, Cause> {
        let stored = Stored::at(stores, &self.frame.video).map_err(|error| Cause::of(&error))?;
        let check = || match stored.version() == self.frame.etag || self.frame.etag.is_none() {
            true => Ok(()),
            false => Err(Cause::new(StorageErrorKind::Changed, "it was changed")),
        };
        check()?;
        let (input, loopback) = input(&stored).map_err(|error| Cause::of(&error))?;
        let start = self.frame.rate.micros(self.stretch.first);
        let mut starts = EARLIER.iter().filter_map(|seconds| {
            let start = start.checked_sub(seconds * 1_000_000)?;
            (start > 0).then_some(start)
        });
        loop {
            let from = starts.next();
            let ended = self.decode_from(ffmpeg, &input, from, limits, &check)?;
            if let Some(error) = loopback.as_ref().and_then(|served| served.failure()) {
                return Err(Cause::of(&error));
            }
            let ended = match ended {
                Pass::Late if from.is_some() => continue,
                Pass::Late => {
                    return Err(Cause::new(StorageErrorKind::NotAFile, "it has no frame"));
                }
                Pass::Stopped => return Ok(End::Rest(Missed::Alone)),
                Pass::Complete => return Ok(End::Complete),
                Pass::Ended(ended) => ended,
            };
            check()?;
            return self.short(&ended, limits);
        }
    }

    /// Why a stretch has too few frames.
    fn short(&self, ended: &Ended, limits: FetchLimits) -> Result<End, Cause> {
        if ended.was_stuck {
            let seconds = limits.time.as_secs_f64();
            let reason =
                format!("ffmpeg gave nothing for {seconds} seconds (preprocess.fetch-timeout)");
            return Err(Cause::new(StorageErrorKind::TimedOut, reason));
        }
        if ended.was_killed() {
            return Err(Cause::new(StorageErrorKind::Unreadable, ended.reason()));
        }
        // After an error there may be frames that can be decoded from a later key frame.
        if !ended.succeeded() {
            return match self.stretch.count {
                1 => Err(Cause::new(StorageErrorKind::NotAFile, ended.reason())),
                _ => Ok(End::Rest(Missed::Alone)),
            };
        }
        let last = ended.said.last_frame().unwrap_or(0).max(0) as f64 / 1e6;
        let mut reason = format!("the video ends before; its last frame is shown at {last:.3} s");
        if let Some(error) = &ended.said.error {
            reason = format!("{reason}; ffmpeg reports: {error}");
        }
        Err(Cause::new(StorageErrorKind::NotAFile, reason))
    }

    /// Decodes the stretch from a key frame before `from`, or from the beginning.
    fn decode_from(
        &self,
        ffmpeg: &Ffmpeg,
        input: &Input,
        from: Option<u64>,
        limits: FetchLimits,
        check: &dyn Fn() -> Result<(), Cause>,
    ) -> Result<Pass, Cause> {
        let Stretch { first, count } = self.stretch;
        let start = self.frame.rate.micros(first);
        let seconds = |micros: u64| format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000);
        let seek = from.map(seconds);
        let mut before = vec!["-v", "level+warning", "-xerror", "-threads", "1"];
        before.extend(["-copyts", "-start_at_zero"]);
        if let Some(seek) = &seek {
            before.extend(["-noaccurate_seek", "-ss", seek]);
        }
        let mut command = ffmpeg.reading(input, &before);
        let rate = format!("{}/1000", self.frame.rate.per_thousand_seconds());
        // `fps` repeats or drops frames to give the one displayed at each time. The times bypass
        // the log, where messages of other threads would tear or hide their lines.
        let filters = format!(
            "settb=1/1000000,setpts=PTS-{EARLY},metadata=add:key=a:value=1,metadata=print:direct=1:file=pipe\\\\:2,fps=fps={rate}:start_time={}:round=up,setpts=N/({rate})/TB",
            seconds(start)
        );
        command.args([
            "-map",
            "0:v:0",
            "-vf",
            &filters,
            "-frames:v",
            &count.to_string(),
        ]);
        command.args([
            "-c:v",
            "bmp",
            "-pix_fmt",
            "bgr24",
            "-f",
            "image2pipe",
            "pipe:1",
        ]);
        let failed = |reason| Cause::new(StorageErrorKind::Unreadable, reason);
        let (running, mut output) = Running::start(command, limits.time).map_err(failed)?;
        for number in first..first + count {
            if !self.may_go_on(&running) {
                return Ok(Pass::Stopped);
            }
            let began = Instant::now();
            let bytes = read_bmp(&mut output, running.watch(), limits.bytes)?;
            if number == first && is_late(&running, start, from.is_some(), bytes.is_some()) {
                return Ok(Pass::Late);
            }
            let Some(bytes) = bytes else {
                return Ok(Pass::Ended(running.end()));
            };
            check()?;
            let time = i64::try_from(self.frame.rate.micros(number)).unwrap_or(i64::MAX);
            if running.ask(|said| said.lacks_frames_at(time)) {
                let error = running.said().error.unwrap_or_default();
                return match count {
                    1 => Err(Cause::new(
                        StorageErrorKind::NotAFile,
                        format!("frames are lost there; ffmpeg reports: {error}"),
                    )),
                    _ => Ok(Pass::Stopped),
                };
            }
            let took = began.elapsed();
            self.hand_on(Fetched { bytes, took });
        }
        Ok(Pass::Complete)
    }
}

/// Whether decoding started after the first wanted frame, so that an earlier frame may be the
/// displayed one. Before a video's first frame, that frame is displayed.
fn is_late(running: &Running, start: u64, has_sought: bool, has_frame: bool) -> bool {
    if !has_sought {
        return false;
    }
    match running.ask(|said| said.first_frame) {
        Some(first) => i128::from(first) > i128::from(start),
        None => !has_frame,
    }
}

/// The result of one run of `ffmpeg`.
enum Pass {
    /// All frames arrived.
    Complete,
    /// No key frame before the first frame.
    Late,
    /// The receiver is gone.
    Stopped,
    /// Frames are missing.
    Ended(Ended),
}

/// Reads one BMP file from a pipe with a sequence of them; `None` at its end.
fn read_bmp(output: &mut ChildStdout, watch: &Watch, limit: u64) -> Result<Option<Bytes>, Cause> {
    let mut bytes = vec![0; HEAD];
    if !filled(output, watch, &mut bytes) {
        return Ok(None);
    }
    let size = match bytes[..6] {
        [b'B', b'M', a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
        _ => {
            return Err(Cause::new(
                StorageErrorKind::Unreadable,
                "ffmpeg gave no BMP file",
            ));
        }
    };
    if u64::from(size) > limit {
        let reason =
            format!("a frame holds {size} bytes, more than preprocess.max-bytes = {limit} allows");
        return Err(Cause::new(StorageErrorKind::TooLarge, reason));
    }
    bytes.resize((size as usize).max(HEAD), 0);
    let is_whole = filled(output, watch, &mut bytes[HEAD..]);
    Ok(is_whole.then(|| bytes.into()))
}

/// Fills a buffer; returns whether it was filled before the end of the pipe.
fn filled(output: &mut ChildStdout, watch: &Watch, buffer: &mut [u8]) -> bool {
    let mut at = 0;
    while at < buffer.len() {
        match output.read(&mut buffer[at..]) {
            Ok(0) => return false,
            Ok(read) => at += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
        watch.moved();
    }
    true
}
