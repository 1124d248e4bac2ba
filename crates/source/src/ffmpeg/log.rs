//! Interprets the log of `ffmpeg`.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;

use super::CONTAINERS;

/// Longest examined line, in bytes.
const LONGEST_LINE: usize = 4096;
/// Remembered times of decoded frames.
const REMEMBERED_TIMES: usize = 4096;

/// The contents of a process's log.
#[derive(Debug, Default, Clone)]
pub(crate) struct Said {
    /// The first line of an error, without its prefix.
    pub(crate) error: Option<String>,
    /// Whether the container itself is damaged: skipped parts are missing among the frames.
    pub(crate) is_damaged: bool,
    /// The container's stated duration, in microseconds.
    pub(crate) duration: Option<u64>,
    /// Times of the first decoded frame and of the latest ones, in the units of the filter
    /// `metadata`.
    pub(crate) first_frame: Option<i64>,
    times: VecDeque<i64>,
}

impl Said {
    fn read(&mut self, line: &str) {
        if let Some(time) = frame_time(line) {
            self.first_frame.get_or_insert(time);
            self.times.push_back(time);
            if self.times.len() > REMEMBERED_TIMES {
                self.times.pop_front();
            }
        }
        for level in ["[error] ", "[fatal] ", "[panic] "] {
            if let Some((context, error)) = line.split_once(level) {
                self.is_damaged |= is_of_container(context);
                self.error.get_or_insert_with(|| error.trim().to_owned());
                return;
            }
        }
        if let Some((_, rest)) = line.split_once("[info]   Duration: ") {
            self.duration = rest.split(',').next().and_then(micros);
        }
    }

    /// Time of the last decoded frame.
    pub(crate) fn last_frame(&self) -> Option<i64> {
        self.times.back().copied()
    }

    /// Whether frames before this time are missing: the container is damaged, and the last frame is
    /// much earlier.
    pub(crate) fn lacks_frames_at(&self, time: i64) -> bool {
        if !self.is_damaged {
            return false;
        }
        let before = self
            .times
            .iter()
            .take_while(|shown| **shown <= time)
            .count();
        let intervals = self
            .times
            .range(..before)
            .zip(self.times.range(..before).skip(1));
        let interval = intervals
            .map(|(one, next)| next - one)
            .filter(|interval| *interval > 0)
            .min();
        match (
            before.checked_sub(1).and_then(|last| self.times.get(last)),
            interval,
        ) {
            (Some(last), Some(interval)) => time - last > 3 * interval,
            _ => true,
        }
    }
}

/// Time of a frame in a line of the filter `metadata`: `frame:0    pts:-500    pts_time:-0.0005`.
/// It may follow the torn start of another thread's line.
fn frame_time(line: &str) -> Option<i64> {
    let (_, frame) = line.split_once("frame:")?;
    let (time, _) = frame.split_once(" pts_time:")?;
    let (_, time) = time.split_once(" pts:")?;
    time.trim().parse().ok()
}

/// Whether a log line is about the container, in older and newer versions. A line whose start was
/// torn off by another thread may be.
fn is_of_container(context: &str) -> bool {
    if context.trim().is_empty() {
        return true;
    }
    let name = context
        .trim_start_matches('[')
        .split(" @ ")
        .next()
        .unwrap_or("");
    name.starts_with("in#")
        || CONTAINERS
            .split(',')
            .any(|one| name.split(',').any(|part| part == one))
}

/// The microseconds of a time such as `00:00:12.60`.
fn micros(text: &str) -> Option<u64> {
    let mut parts = text.trim().splitn(3, ':');
    let mut next = || parts.next()?.parse::<f64>().ok();
    let (hours, minutes, seconds) = (next()?, next()?, next()?);
    Some(((hours * 3600.0 + minutes * 60.0 + seconds) * 1e6) as u64)
}

/// The log of a process, as far as it was read.
pub(super) struct Log {
    stream: UnixStream,
    line: Vec<u8>,
    pub(super) said: Said,
}

impl Log {
    pub(super) fn of(stream: UnixStream) -> Self {
        Self {
            stream,
            line: Vec::new(),
            said: Said::default(),
        }
    }

    /// Reads available lines; returns whether there were any, and `None` at the end.
    pub(super) fn drain(&mut self) -> Option<bool> {
        let mut buffer = [0; 4096];
        let mut came = false;
        loop {
            let read = match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Some(came),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return None,
            };
            came = true;
            for byte in &buffer[..read] {
                match byte {
                    b'\n' => {
                        self.said.read(&String::from_utf8_lossy(&self.line));
                        self.line.clear();
                    }
                    byte if self.line.len() < LONGEST_LINE => self.line.push(*byte),
                    _ => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_tells_times_and_the_first_error() {
        let mut said = Said::default();
        for line in [
            "[info]   Duration: 00:01:02.50, start: 0.000000, bitrate: 346 kb/s",
            "frame:0    pts:-500    pts_time:-0.0005",
            "a=1",
            "frame:49   pts:5959500 pts_time:5.9595",
            "[in#0/matroska,webm @ 0x56] [error] File ended prematurely",
            "[fatal] Error opening input files: Invalid data found when processing input",
        ] {
            said.read(line);
        }
        assert_eq!(said.duration, Some(62_500_000));
        assert_eq!(
            (said.first_frame, said.last_frame()),
            (Some(-500), Some(5_959_500))
        );
        assert_eq!(said.error.as_deref(), Some("File ended prematurely"));
    }

    /// Matroska skips damaged parts: the preceding frame would replace all lost ones.
    #[test]
    fn frames_that_a_damaged_container_has_lost_are_missed() {
        let mut said = Said::default();
        for time in [0, 40_000, 80_000, 2_000_000, 2_040_000] {
            said.read(&format!("frame:0    pts:{time} pts_time:0"));
        }
        assert!(!said.lacks_frames_at(1_000_000), "slow, but whole");
        said.read("[h264 @ 0x7f] [error] co located POCs unavailable");
        assert!(!said.lacks_frames_at(1_000_000));
        for line in [
            "[in#0/matroska,webm @ 0x1] [error] x",
            "[matroska,webm @ 0x1] [error] x",
            "[error] x",
            "[matroska,webm @ 0x1] [error] frame:9 pts:2080000 pts_time:2.08",
        ] {
            let mut said = said.clone();
            said.read(line);
            assert!(said.lacks_frames_at(1_000_000), "{line}");
            assert!(
                !said.lacks_frames_at(100_000) && !said.lacks_frames_at(2_050_000),
                "{line}"
            );
        }
    }
}
