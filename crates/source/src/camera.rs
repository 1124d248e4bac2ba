//! Frames of a camera, a stream or a file in real time, as JPEG files.

use std::io::{BufRead, BufReader, Read};
use std::num::NonZeroU32;
use std::process::ChildStdout;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use trommel_types::FrameRate;

use crate::ffmpeg::{Ffmpeg, Killer, Running, Watch};

/// Longest time without a frame.
const PATIENCE: Duration = Duration::from_secs(60);
/// Largest frame in bytes.
const MOST_BYTES: usize = 256 << 20;

/// Options of a camera.
#[derive(Debug, Clone)]
pub struct CameraConfig {
    /// A file, a device such as `/dev/video0`, or a url that `ffmpeg` supports.
    pub input: String,
    /// Frames per second; all if `None`.
    pub fps: Option<FrameRate>,
    /// The hardware decoder of `ffmpeg`; the CPU if `None`.
    pub hwaccel: Option<String>,
    /// Largest width of frames in pixels.
    pub max_width: Option<NonZeroU32>,
    /// Quality of the JPEGs, from 2 (best) to 31.
    pub quality: u8,
    /// Whether a file restarts at its end.
    pub loops: bool,
}

impl CameraConfig {
    /// Whether the input is a file, whose end is not an error.
    pub fn is_file(&self) -> bool {
        !self.is_url() && !self.is_device()
    }

    fn is_url(&self) -> bool {
        self.input.contains("://")
    }

    fn is_device(&self) -> bool {
        self.input.starts_with("/dev/")
    }

    /// The arguments of `ffmpeg`.
    fn args(&self) -> Vec<String> {
        let mut args: Vec<String> = Vec::new();
        let mut add = |words: &[&str]| args.extend(words.iter().map(|word| (*word).to_owned()));
        if let Some(device) = &self.hwaccel {
            add(&["-hwaccel", device]);
        }
        if self.input.starts_with("rtsp://") || self.input.starts_with("rtsps://") {
            // Complete frames matter more than the delay after a lost packet.
            add(&["-rtsp_transport", "tcp"]);
        }
        let name = match self.is_file() {
            true => {
                if self.loops {
                    add(&["-stream_loop", "-1"]);
                }
                // At playback speed.
                add(&["-re"]);
                format!("file:{}", self.input)
            }
            false => self.input.clone(),
        };
        if self.is_device() {
            add(&["-f", "v4l2"]);
        }
        add(&["-i", &name, "-map", "0:v:0"]);
        let mut filters = Vec::new();
        if let Some(rate) = self.fps {
            filters.push(format!("fps={}/1000", rate.per_thousand_seconds()));
        }
        if let Some(width) = self.max_width {
            filters.push(format!("scale='min({width},iw)':-2"));
        }
        if !filters.is_empty() {
            add(&["-vf", &filters.join(",")]);
        }
        add(&["-c:v", "mjpeg", "-q:v", &self.quality.to_string()]);
        // Each frame has a header with its length, and is flushed at once.
        add(&["-f", "mpjpeg", "-flush_packets", "1", "pipe:1"]);
        args
    }
}

/// An open camera, stream or file.
pub struct Camera {
    running: Option<Running>,
    output: BufReader<ChildStdout>,
    watch: Arc<Watch>,
}

impl Camera {
    /// Opens it.
    ///
    /// # Errors
    /// If `ffmpeg` cannot be started.
    pub fn open(ffmpeg: &Ffmpeg, config: &CameraConfig) -> Result<Self, String> {
        let mut command = ffmpeg.command();
        command.args(config.args());
        let (running, output) = Running::start(command, PATIENCE)?;
        Ok(Self {
            watch: Arc::clone(running.watch()),
            running: Some(running),
            output: BufReader::new(output),
        })
    }

    /// A handle to end it from another thread; `None` once it has ended.
    pub fn killer(&self) -> Option<Killer> {
        self.running.as_ref().map(Running::killer)
    }

    /// Waits for the next frame, a JPEG file; `None` at the end of the input. Blocking.
    ///
    /// # Errors
    /// The reason, as reported by `ffmpeg`.
    pub fn next_frame(&mut self) -> Result<Option<Bytes>, String> {
        if let Some(length) = self.next_length() {
            let mut frame = vec![0; length];
            if self.output.read_exact(&mut frame).is_ok() {
                self.watch.moved();
                return Ok(Some(frame.into()));
            }
        }
        let Some(running) = self.running.take() else {
            return Ok(None);
        };
        let ended = running.end();
        if ended.was_stuck {
            return Err(format!("no frame came for {} seconds", PATIENCE.as_secs()));
        }
        match ended.succeeded() {
            true => Ok(None),
            false => Err(ended.reason()),
        }
    }

    /// Reads the header of a frame; returns its length.
    fn next_length(&mut self) -> Option<usize> {
        let (mut line, mut length) = (String::new(), None);
        loop {
            line.clear();
            let read = (&mut self.output).take(1024).read_line(&mut line);
            if !matches!(read, Ok(1..)) {
                return None;
            }
            match line.trim_end().split_once(':') {
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value
                        .trim()
                        .parse()
                        .ok()
                        .filter(|length| *length <= MOST_BYTES);
                }
                None if line.trim_end().is_empty() && length.is_some() => return length,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(input: &str) -> CameraConfig {
        CameraConfig {
            input: input.to_owned(),
            fps: Some("5".parse().unwrap()),
            hwaccel: None,
            max_width: None,
            quality: 2,
            loops: true,
        }
    }

    #[test]
    fn each_kind_of_input_has_its_own_arguments() {
        let args = |config: &CameraConfig| config.args().join(" ");
        let file = config("clip.mp4");
        assert!(file.is_file());
        assert!(
            args(&file)
                .starts_with("-stream_loop -1 -re -i file:clip.mp4 -map 0:v:0 -vf fps=5000/1000 ")
        );
        let stream = config("rtsp://camera/1");
        assert!(!stream.is_file());
        assert!(args(&stream).starts_with("-rtsp_transport tcp -i rtsp://camera/1 "));
        let device = CameraConfig {
            hwaccel: Some("cuda".to_owned()),
            max_width: NonZeroU32::new(640),
            ..config("/dev/video0")
        };
        assert!(args(&device).starts_with(
            "-hwaccel cuda -f v4l2 -i /dev/video0 -map 0:v:0 -vf fps=5000/1000,scale='min(640,iw)':-2 "
        ));
    }
}
