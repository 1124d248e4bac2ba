//! The frames of a video, by times that are the same in every listing.
//!
//! The times follow from the frame rate that was requested and from where the last frame ends, which the
//! packets at the end of the file tell: nothing is decoded, and little of the file is read.

use std::io::{BufRead, BufReader};
use std::time::Duration;

use trommel_storage::StorageError;
use trommel_types::{Content, FrameRate};

use crate::ffmpeg::{Ended, Ffmpeg, Input, Running};
use crate::listing::{Listing, Stop, Visitor};
use crate::loopback::Loopback;
use crate::stored::Stored;
use crate::{Found, SourceOptions};

/// The end of the file that is looked at first, in seconds before it.
const TAIL: &str = "-5";
/// Longest time without any progress.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest video in microseconds: what claims to be longer is damaged.
const LONGEST: u64 = 30 * 86_400 * 1_000_000;
/// What a damaged video may end before its header says, in microseconds, without being cut off.
const SLACK: u64 = 1_000_000;

/// A video that is listed by its frames.
pub(super) struct Video {
    stored: Stored,
    ffmpeg: Ffmpeg,
}

impl Video {
    /// # Errors
    /// When there is no `ffmpeg` to read it.
    pub(super) fn open(stored: &Stored, options: &SourceOptions) -> Result<Self, StorageError> {
        let ffmpeg = Ffmpeg::find(&options.video).map_err(|reason| {
            StorageError::invalid_source(format!("source {stored}: videos need ffmpeg: {reason}"))
        })?;
        Ok(Self {
            stored: stored.clone(),
            ffmpeg,
        })
    }

    /// How many frames are taken. A video that cannot be read, or is cut off, has one more than can be
    /// decoded: its row says what is wrong.
    fn frames(&self, rate: FrameRate) -> Result<u64, StorageError> {
        let (input, loopback) = input(&self.stored)?;
        let mut packets = self.packets(&input, &["-sseof", TAIL])?;
        if packets.end.is_none() {
            packets = self.packets(&input, &[])?;
        }
        if let Some(error) = loopback.and_then(|served| served.failure()) {
            return Err(error);
        }
        let Some(end) = packets.end.filter(|end| *end <= LONGEST) else {
            return Ok(1);
        };
        let frames = rate.frames_before(end).max(1);
        let claimed = packets.ended.said.duration.unwrap_or(0);
        let is_cut_off = packets.ended.said.error.is_some()
            && claimed > end.saturating_add(SLACK)
            && rate.micros(frames) < claimed;
        Ok(frames + u64::from(is_cut_off))
    }

    /// Where the packets of the video end, without decoding them.
    fn packets(&self, input: &Input, seek: &[&str]) -> Result<Packets, StorageError> {
        let mut command = self.ffmpeg.reading(input, seek);
        command.args(["-map", "0:v:0", "-c", "copy", "-copyts", "-start_at_zero"]);
        command.args(["-f", "framecrc", "pipe:1"]);
        let failed = |reason: String| {
            StorageError::unavailable(format!("failed to read {}: {reason}", self.stored))
        };
        let (running, output) = Running::start(command, PATIENCE).map_err(failed)?;
        let (mut times, mut line) = (Times::default(), String::new());
        let mut output = BufReader::new(output);
        while output.read_line(&mut line).is_ok_and(|read| read > 0) {
            running.watch().moved();
            times.read(&line);
            line.clear();
        }
        let ended = running.end();
        if ended.was_stuck {
            return Err(StorageError::timed_out(&self.stored, PATIENCE));
        }
        if ended.was_killed() {
            return Err(failed(ended.reason()));
        }
        Ok(Packets {
            end: times.end(),
            ended,
        })
    }
}

/// What `ffmpeg` reads of a stored video. An object is served for as long as the second value lives.
///
/// # Errors
/// When the system gives no port for it.
pub(super) fn input(stored: &Stored) -> Result<(Input, Option<Loopback>), StorageError> {
    let failed = |error| StorageError::read(stored, error);
    Ok(match stored {
        Stored::File(path) => {
            let path = std::path::absolute(path).map_err(failed)?;
            (Input::File(path), None)
        }
        Stored::Object(_) => {
            let served = Loopback::serve(stored).map_err(failed)?;
            (Input::Url(served.url()), Some(served))
        }
    })
}

/// What the packets of a video tell.
struct Packets {
    /// Where the last one ends, in microseconds after the beginning.
    end: Option<u64>,
    ended: Ended,
}

/// Reads the times of packets as the muxer `framecrc` writes them: stream, decoding time, presentation
/// time, duration, size, checksum, flags.
#[derive(Default)]
struct Times {
    /// Seconds of a unit, as a fraction.
    unit: Option<(i128, i128)>,
    /// Where the last packet begins and ends, in units.
    last: Option<(i128, i128)>,
}

/// Flags of packets that hold no frame to show: corrupt or to be discarded.
const NOT_SHOWN: u32 = 2 | 4;

impl Times {
    fn read(&mut self, line: &str) {
        if let Some(unit) = line.strip_prefix("#tb 0: ") {
            let unit = unit.trim().split_once('/');
            self.unit = unit.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
            return;
        }
        if line.starts_with('#') {
            return;
        }
        let fields: Vec<_> = line.split(',').map(str::trim).collect();
        let [_, decoded, shown, duration, ..] = fields[..] else {
            return;
        };
        let flags = fields.iter().find_map(|field| field.strip_prefix("F=0x"));
        let flags = flags.and_then(|flags| u32::from_str_radix(flags, 16).ok());
        if flags.is_some_and(|flags| flags & NOT_SHOWN != 0) {
            return;
        }
        let Some(start) = shown.parse().or_else(|_| decoded.parse::<i128>()).ok() else {
            return;
        };
        let end = start + duration.parse::<i128>().unwrap_or(0).max(0);
        self.last = Some(match self.last {
            Some((begun, ended)) => (start.max(begun), end.max(ended)),
            None => (start, end),
        });
    }

    /// In microseconds. A last packet without a duration still shows its frame.
    fn end(&self) -> Option<u64> {
        let ((a, b), (start, end)) = (self.unit?, self.last?);
        let micros = |time: i128| time.checked_mul(a)?.checked_mul(1_000_000)?.checked_div(b);
        // A frame counts as shown half a millisecond early, as in decoding, so the last one ends early too.
        let end = (micros(end)? - 500).max(micros(start)? + 1);
        u64::try_from(end.max(1)).ok()
    }
}

impl Listing for Video {
    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        visitor.waiting()?;
        let rate = options.fps.unwrap_or(FrameRate::ONE);
        let (uri, etag) = (self.stored.uri(), self.stored.version());
        for number in 0..self.frames(rate)? {
            visitor.found(Found {
                uri: format!("{uri}#t={}", rate.seconds(number)),
                content: Content::Frame {
                    video: uri.clone(),
                    rate,
                    number,
                },
                etag: etag.clone(),
                size: None,
                columns: Vec::new(),
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(lines: &[&str]) -> Option<u64> {
        let mut times = Times::default();
        lines.iter().for_each(|line| times.read(line));
        times.end()
    }

    #[test]
    fn the_last_packet_that_is_shown_ends_the_video() {
        let end_of = |packet: &str| {
            let head = "#software: Lavf";
            end(&[
                head,
                "#tb 0: 1/12800",
                "0, 151040, 153088, 512, 6266, 0xedd23cbe",
                packet,
            ])
        };
        let whole = Some(12_000_000 - 500);
        assert_eq!(
            end_of("0, 152064, 152064, 512, 9, 0x3ef60db4, F=0x0"),
            whole
        );
        assert_eq!(
            end_of("0, 153600, 153600, 512, 9, 0x3ef60db4, F=0x2"),
            whole,
            "corrupt"
        );
        assert_eq!(
            end_of("0, 153600, 153600, 512, 9, 0x3ef60db4, F=0x5"),
            whole,
            "discarded"
        );
        assert_eq!(
            end_of("0, 153600, 153600, 0, 9, 0x3ef60db4"),
            Some(12_000_001)
        );
        assert_eq!(
            end_of("0, 153600, NOPTS, 512, 9, 0x3ef60db4"),
            Some(12_040_000 - 500)
        );
        assert_eq!(end(&["#tb 0: 1/25"]), None);
    }
}
