//! `ffmpeg` as a child process: finding, running and ending it.

mod log;
mod running;

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

pub use self::running::Killer;
pub(crate) use self::running::{Ended, Running, Watch};

/// The default program.
const PROGRAM: &str = "ffmpeg";
/// Variables passed to it; no others, as they may contain credentials.
const KEPT_VARIABLES: [&str; 5] = ["PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG"];
/// Containers that it may open. These exclude playlists, which lead to other files.
const CONTAINERS: &str =
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,asf,flv,ogg";

/// How videos are decoded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct VideoConfig {
    /// The program that decodes videos, version 4.4 or later. Default: `ffmpeg` on `PATH`.
    pub ffmpeg: Option<PathBuf>,
    /// Decoders running at once in one process, each on one thread. Default: 4.
    pub max_decoders: NonZeroUsize,
}

impl Default for VideoConfig {
    fn default() -> Self {
        Self {
            ffmpeg: None,
            max_decoders: NonZeroUsize::new(4).expect("4 is not 0"),
        }
    }
}

/// The `ffmpeg` of this machine.
#[derive(Debug, Clone)]
pub struct Ffmpeg(PathBuf);

impl Ffmpeg {
    /// Finds it.
    ///
    /// # Errors
    /// If it is not at the configured path, or not on `PATH`; names the remedy.
    pub fn find(config: &VideoConfig) -> Result<Self, String> {
        if let Some(path) = &config.ffmpeg {
            return match is_program(path) {
                true => Ok(Self(path.clone())),
                false => Err(format!(
                    "video.ffmpeg = {} is not an executable; give the path of ffmpeg, or leave the setting out to have it found on PATH",
                    path.display()
                )),
            };
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&path)
            .map(|folder| folder.join(PROGRAM))
            .find(|path| is_program(path));
        found.map(Self).ok_or_else(|| {
            "ffmpeg is not on PATH; install it (apt-get install ffmpeg), or name it with video.ffmpeg".to_owned()
        })
    }

    /// A command that runs it, with log lines that include their level.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.0);
        command.args(["-nostdin", "-hide_banner", "-nostats", "-v", "level+info"]);
        command.env("AV_LOG_FORCE_NOCOLOR", "1");
        command
    }

    /// A command that reads a video from this machine, or from a url of this process. It opens
    /// nothing else, whatever the video says.
    pub(super) fn reading(&self, input: &Input, before: &[&str]) -> Command {
        let mut command = self.command();
        command.env_clear().env("AV_LOG_FORCE_NOCOLOR", "1");
        for name in KEPT_VARIABLES {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        let (protocols, name) = match input {
            Input::File(path) => {
                let mut name = OsString::from("file:");
                name.push(path);
                ("file", name)
            }
            Input::Url(url) => ("http,tcp", url.into()),
        };
        command
            .args(["-protocol_whitelist", protocols])
            .args(["-format_whitelist", CONTAINERS])
            .args(before)
            .arg("-i")
            .arg(name);
        command
    }
}

fn is_program(path: &Path) -> bool {
    let metadata = path.metadata();
    metadata.is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// The input of `ffmpeg`.
pub(super) enum Input {
    /// A file, by its absolute path.
    File(PathBuf),
    /// A url of this process.
    Url(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let config = VideoConfig {
            ffmpeg: Some("/nowhere/ffmpeg".into()),
            ..VideoConfig::default()
        };
        let error = Ffmpeg::find(&config).unwrap_err();
        assert!(error.contains("video.ffmpeg = /nowhere/ffmpeg"), "{error}");
    }
}
