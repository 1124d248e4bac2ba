//! Arguments of the commands that talk to workers: `submit`, `jobs` and `top`.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::foresight::amount;
use super::{BrokerArgs, PartFormat, PriceArgs, RowArgs, SourceArgs, share};

#[derive(Debug, Args)]
pub(crate) struct SubmitArgs {
    /// Images, as the workers see them: what `trommel classify` takes, but standard input; or
    /// nats://SUBJECT, on which a store publishes notifications of new objects
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<String>,

    /// Models by their names in the workers' repository; each gets rows of its own
    #[arg(
        short,
        long,
        required = true,
        value_delimiter = ',',
        value_name = "NAMES"
    )]
    pub(crate) model: Vec<String>,

    /// Where rows go, as the workers see it (a relative path is taken from where they run): a folder,
    /// s3://bucket/prefix/, or postgres://user@host/database?table=name
    #[arg(short, long, value_name = "DEST")]
    pub(crate) output: String,

    /// Name of the job; the same name again is the same job. Default: a new one
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<String>,

    /// How urgent it is: high, normal or low
    #[arg(long, default_value_t, value_name = "LANE")]
    pub(crate) lane: trommel_types::Lane,

    /// Format of the parts in a folder
    #[arg(long, value_enum, default_value_t = PartFormat::Parquet)]
    pub(crate) format: PartFormat,

    /// Add rows to the results that are there, for images whose uri and etag have none yet
    #[arg(long, conflicts_with_all = ["overwrite", "dry_run"])]
    pub(crate) skip_existing: bool,

    /// Replace results of another job
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Count the images, classify the first 512, store nothing, and say how long all would take with the
    /// workers that are there, how sure that is, and what it costs at your prices
    #[arg(long, conflicts_with_all = ["wait", "fail_on_error"])]
    pub(crate) dry_run: bool,

    /// Wait for the end, with a progress bar; the exit code tells it, as that of classify
    #[arg(long)]
    pub(crate) wait: bool,

    /// Exit with 3 when an image failed, not only when all did
    #[arg(long, requires = "wait")]
    pub(crate) fail_on_error: bool,

    /// End the job once more than this share of images is sure to fail
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) max_failure_rate: Option<f64>,

    /// End the job after this time, such as 2h
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) max_runtime: Option<Duration>,

    /// End the job at this cost at the prices of --price. All workers that are alive count as the job's,
    /// each as a machine
    #[arg(long, value_name = "AMOUNT", value_parser = amount)]
    pub(crate) max_cost: Option<f64>,
    /// Time from the queueing of an image after which it is not worked on any more, such as 30s: its row
    /// fails as `expired`. Default: none
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) image_deadline: Option<Duration>,

    /// Nothing on standard error but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// The job's end as JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) prices: PriceArgs,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    #[command(flatten)]
    pub(crate) rows: RowArgs,

    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
}

#[derive(Debug, Args)]
pub(crate) struct JobsArgs {
    #[command(subcommand)]
    pub(crate) command: JobsCommand,

    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JobsCommand {
    /// Jobs, the newest first
    List {
        /// Jobs that are shown at most; 0 shows all
        #[arg(long, value_name = "N", default_value_t = 50)]
        limit: usize,
        /// Leave out jobs that have ended
        #[arg(long)]
        running: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// How a job stands: images, rows, failures, what waits where
    Show {
        /// The job
        id: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Wait for the end of a job, with a progress bar
    Watch {
        /// The job
        id: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Why a job does not move: which images are where, since when, what was last said of them
    Why {
        /// The job
        id: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// What of a job could not be worked on, as its workers put it aside
    Dead {
        /// The job
        id: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Classify the images of failed rows again; the new rows take the place of the old ones
    Retry {
        /// A job that is complete or failed
        id: String,
        /// Only rows that failed in these ways: fetch, decode, infer, or a kind that rows name, such
        /// as timeout
        #[arg(long, value_name = "KINDS", value_delimiter = ',')]
        kind: Vec<String>,
        /// Wait for the end, with a progress bar
        #[arg(long)]
        wait: bool,
        /// Exit with 3 when one of the new rows is failed
        #[arg(long, requires = "wait")]
        fail_on_error: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// End a job; what is committed stays
    Cancel {
        /// The job
        id: String,
    },
    /// The models that jobs may name
    Models {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Time between two looks
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = humantime::parse_duration)]
    pub(crate) interval: Duration,

    /// Look for five seconds, print what was seen, and end
    #[arg(long)]
    pub(crate) once: bool,

    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
}
