//! Arguments of `trommel classify`.

use std::time::Duration;

use clap::Args;

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
    /// the Hugging Face Hub. Default: the only directory in ./models. A cascade has two, the small one first
    #[arg(short, long, value_name = "MODEL", env = "TROMMEL_MODEL")]
    pub(crate) model: Vec<ModelName>,

    /// With two models: the share of images, below 1, whose label has to be the second model's. The first one
    /// decides what it is sure enough of by a random sample that both are asked about
    #[arg(
        long,
        value_name = "SHARE",
        requires = "output",
        conflicts_with = "retry_failed"
    )]
    pub(crate) agree: Option<f64>,

    /// Images of that sample, about
    #[arg(long, value_name = "N", default_value = "1500", requires = "agree")]
    pub(crate) agree_sample: u64,

    /// Precision of a model of the hub. Default: fp32, or the only file that there is
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub(crate) dtype: Option<Dtype>,

    /// Where rows go: x.parquet, x.jsonl, x.csv, a folder of parts, s3://bucket/prefix/, or
    /// postgres://user@host/database?table=name. Default: JSON Lines on standard output
    #[arg(short, long, value_name = "DEST")]
    pub(crate) output: Option<String>,

    /// Format of the parts in a folder
    #[arg(long, value_enum, default_value_t = PartFormat::Parquet)]
    pub(crate) format: PartFormat,

    /// Add rows to the results that are there, for images whose uri and etag have none yet
    #[arg(long, requires = "output", conflicts_with = "overwrite")]
    pub(crate) skip_existing: bool,

    /// Classify the images of failed rows again, of results that are finished; with kinds, only rows
    /// that failed in these ways. Kinds: fetch, decode, infer, or those that rows name
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

    /// Exit with 3 when an image failed, not only when all did
    #[arg(long)]
    pub(crate) fail_on_error: bool,

    /// Stop, with exit code 4, once more than this share of images is sure to fail
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) max_failure_rate: Option<f64>,

    /// Count the images, classify 512 of them, store nothing, and say how long all would take, how sure
    /// that is, how many bytes that reads and writes, and what it costs at your prices
    #[arg(long, conflicts_with_all = ["skip_existing", "retry_failed", "fail_on_error"])]
    pub(crate) dry_run: bool,

    /// Stop after this time, such as 2h; what is committed stays, and the same command goes on from there
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) max_runtime: Option<Duration>,

    /// Stop at this cost at the prices of --price, likewise
    #[arg(long, value_name = "AMOUNT", value_parser = amount)]
    pub(crate) max_cost: Option<f64>,

    /// Nothing on standard error but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// The summary as JSON on standard output; on standard error when rows go to standard output
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
Every image ends in exactly one row; an image that cannot be read or classified gets a row with
status `failed`, a kind and a message. The same command again resumes a job that was interrupted.

Exit codes: 0 all rows written, 1 any other error, 2 usage or configuration, 3 all images failed, or
one with --fail-on-error, 4 too many failures (--max-failure-rate).";
