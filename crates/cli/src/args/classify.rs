//! Arguments of `trommel classify`.

use std::time::Duration;

use clap::Args;
use trommel_types::Cascade;

use crate::hub::{Dtype, ModelName};

use super::foresight::amount;
use super::{PartFormat, PriceArgs, RowArgs, S3Args, SourceArgs, TelemetryArgs, TuningArgs, share};

#[derive(Debug, Args)]
#[command(after_help = CLASSIFY_HELP)]
pub(crate) struct ClassifyArgs {
    /// Images: files, folders, globs, manifests (.txt .csv .jsonl .parquet), .tar shards,
    /// s3://bucket/prefix, or - for a list on standard input
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<String>,

    /// Model directory (model.onnx, config.json, preprocessor_config.json), or hf:ORGANISATION/NAME of
    /// the Hugging Face Hub. Default: the only directory in ./models. Several models write rows of
    /// their own, below --output; with --agree, two are a cascade, the small one first
    #[arg(short, long, value_name = "MODEL", env = "TROMMEL_MODEL")]
    pub(crate) model: Vec<ModelName>,

    /// With two models: the share of images, below 1, whose label must agree with the second
    /// model's. A random sample classified by both models decides how certain the first one must be
    #[arg(
        long,
        value_name = "SHARE",
        requires = "output",
        conflicts_with = "retry_failed"
    )]
    pub(crate) agree: Option<f64>,

    /// Approximate number of images in that sample
    #[arg(long, value_name = "N", default_value_t = Cascade::SAMPLE, requires = "agree")]
    pub(crate) agree_sample: u64,

    /// Precision of a model of the hub. Default: fp32, or the only precision available
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub(crate) dtype: Option<Dtype>,

    /// Where rows go: x.parquet, x.jsonl, x.csv, a folder of parts, s3://bucket/prefix/, or
    /// postgres://user@host/database?table=name. Default: JSON Lines on standard output
    #[arg(short, long, value_name = "DEST")]
    pub(crate) output: Option<String>,

    /// Format of the parts in a folder
    #[arg(long, value_enum, default_value_t = PartFormat::Parquet)]
    pub(crate) format: PartFormat,

    /// Add rows to existing results, for images whose uri and etag have no row yet
    #[arg(long, requires = "output", conflicts_with = "overwrite")]
    pub(crate) skip_existing: bool,

    /// Classify the images of failed rows of finished results again; with KINDS, only rows with
    /// these kinds of failures: fetch, decode, infer, or an error_kind
    #[arg(
        long,
        value_name = "KINDS",
        value_delimiter = ',',
        num_args = 0..,
        require_equals = true,
        requires = "output",
        conflicts_with_all = ["overwrite", "skip_existing"]
    )]
    pub(crate) retry_failed: Option<Vec<String>>,

    /// Replace results of another job
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Exit with 3 if any image failed, not only if all did
    #[arg(long)]
    pub(crate) fail_on_error: bool,

    /// Stop, with exit code 4, once more than this share of all images must fail
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) max_failure_rate: Option<f64>,

    /// Count the images, classify 512 of them (more if that takes less than a second or two) without
    /// storing anything, and estimate time (with its uncertainty), bytes read and written, and cost
    /// of the whole job
    #[arg(long, conflicts_with_all = ["skip_existing", "retry_failed", "fail_on_error"])]
    pub(crate) dry_run: bool,

    /// Stop after this time, such as 2h; committed rows stay, and the same command resumes
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) max_runtime: Option<Duration>,

    /// Stop at this cost at the prices of --price; the same command resumes
    #[arg(long, value_name = "AMOUNT", value_parser = amount)]
    pub(crate) max_cost: Option<f64>,

    /// Only errors on standard error
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// Print the summary as JSON on standard output, or on standard error if rows go to standard
    /// output
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) prices: PriceArgs,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    #[command(flatten)]
    pub(crate) rows: RowArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    #[command(flatten)]
    pub(crate) s3: S3Args,

    #[command(flatten)]
    pub(crate) telemetry: TelemetryArgs,
}

const CLASSIFY_HELP: &str = "\
Every image gets exactly one row; if it cannot be read or classified, the row has the status `failed`,
a kind and a message. Running the same command again resumes an interrupted job.

Exit codes: 0 all rows written, 1 any other error, 2 usage or configuration, 3 all images failed, or
any with --fail-on-error, 4 too many failures (--max-failure-rate).";
