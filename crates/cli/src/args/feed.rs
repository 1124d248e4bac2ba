//! Arguments of `feed`.

use std::num::NonZeroU32;

use clap::Args;
use trommel_types::FrameRate;

use super::{BrokerArgs, TelemetryArgs};

/// What follows the flags in the help.
const FEED_HELP: &str = "\
Examples:
  trommel feed rtsp://camera/stream --as cam1 --fps 5
  trommel feed /dev/video0 --as desk
  trommel feed clip.mp4 --as cam1 --loop

ffmpeg decodes the frames; install it, or set video.ffmpeg to its path. A camera or stream that ends is
reopened, with growing pauses. `trommel serve --nats URL --live cam1` classifies the frames.";

#[derive(Debug, Args)]
#[command(after_help = FEED_HELP)]
pub(crate) struct FeedArgs {
    /// Video file, device such as /dev/video0, or url such as rtsp://camera/stream
    #[arg(value_name = "INPUT")]
    pub(crate) input: String,

    /// Name of the source: letters, digits, - and _. Frames are published on trommel.live.NAME
    #[arg(long = "as", value_name = "NAME", value_parser = source_name)]
    pub(crate) name: String,

    /// Frames to publish each second. Default: all
    #[arg(long, value_name = "RATE")]
    pub(crate) fps: Option<FrameRate>,

    /// Hardware decoder of ffmpeg, such as cuda, vaapi or videotoolbox. Default: the CPU
    #[arg(long, value_name = "NAME")]
    pub(crate) hwaccel: Option<String>,

    /// Scale frames down to at most this width, to keep messages small
    #[arg(long, value_name = "PIXELS")]
    pub(crate) max_width: Option<NonZeroU32>,

    /// Quality of the JPEGs, from 2 (best) to 31
    #[arg(long, value_name = "Q", default_value_t = 2, value_parser = clap::value_parser!(u8).range(2..=31))]
    pub(crate) quality: u8,

    /// Restart a file at its end
    #[arg(long = "loop")]
    pub(crate) loops: bool,

    #[command(flatten)]
    pub(crate) broker: BrokerArgs,

    #[command(flatten)]
    pub(crate) telemetry: TelemetryArgs,
}

fn source_name(text: &str) -> Result<String, String> {
    match trommel_worker::is_source_name(text) {
        true => Ok(text.to_owned()),
        false => Err("expected 1 to 64 letters, digits, - and _".to_owned()),
    }
}
