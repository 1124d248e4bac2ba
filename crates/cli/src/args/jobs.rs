//! Arguments of the commands that talk to workers: `submit`, `jobs` and `top`.

use std::time::Duration;

use clap::{Args, Subcommand};
use trommel_types::Cascade;

use super::foresight::amount;
use super::{BrokerArgs, PartFormat, PriceArgs, RowArgs, SourceArgs, share};

#[derive(Debug, Args)]
pub(crate) struct SubmitArgs {
    /// Images, as the workers see them: any source of `trommel classify` except standard input; or
    /// nats://SUBJECT, on which a store publishes notifications of new objects
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<String>,

    /// Names of models in the workers' repository; each model gets its own rows. A cascade has two,
    /// the small one first
    #[arg(
        short,
        long,
        required = true,
        value_delimiter = ',',
        value_name = "NAMES"
    )]
    pub(crate) model: Vec<String>,

    /// With two models: the share of images, below 1, whose label must agree with the second
    /// model's. A random sample classified by both models decides how certain the first one must be
    #[arg(long, value_name = "SHARE", conflicts_with_all = ["dry_run", "skip_existing"])]
    pub(crate) agree: Option<f64>,

    /// Approximate number of images in that sample
    #[arg(long, value_name = "N", default_value_t = Cascade::SAMPLE, requires = "agree")]
    pub(crate) agree_sample: u64,

    /// Where rows go, as the workers see it (a relative path is taken from where they run): a folder,
    /// s3://bucket/prefix/, or postgres://user@host/database?table=name
    #[arg(short, long, value_name = "DEST")]
    pub(crate) output: String,

    /// Name of the job; submitting the same name again refers to the same job. Default: a new name
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<String>,

    /// Priority: high, normal or low
    #[arg(long, default_value_t, value_name = "LANE")]
    pub(crate) lane: trommel_types::Lane,

    /// Format of the parts in a folder
    #[arg(long, value_enum, default_value_t = PartFormat::Parquet)]
    pub(crate) format: PartFormat,

    /// Add rows to existing results, for images whose uri and etag have no row yet
    #[arg(long, conflicts_with_all = ["overwrite", "dry_run"])]
    pub(crate) skip_existing: bool,

    /// Replace results of another job
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Count the images, classify the first 512 without storing anything, and estimate time (with
    /// its uncertainty) and cost of the whole job on the running workers
    #[arg(long, conflicts_with_all = ["wait", "fail_on_error"])]
    pub(crate) dry_run: bool,

    /// Wait for the end, with a progress bar; exit codes are those of classify
    #[arg(long)]
    pub(crate) wait: bool,

    /// Exit with 3 if any image failed, not only if all did
    #[arg(long, requires = "wait")]
    pub(crate) fail_on_error: bool,

    /// End the job once more than this share of all images must fail
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) max_failure_rate: Option<f64>,

    /// End the job after this time, such as 2h
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) max_runtime: Option<Duration>,

    /// End the job at this cost at the prices of --price. All running workers are charged to the
    /// job, each as a machine
    #[arg(long, value_name = "AMOUNT", value_parser = amount)]
    pub(crate) max_cost: Option<f64>,
    /// Discard images that waited longer than this since they were queued, such as 30s; their rows
    /// fail as `expired`. Default: none
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) image_deadline: Option<Duration>,

    /// Only errors on standard error
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// Print the job's summary as JSON
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
    /// List jobs, the newest first
    List {
        /// Number of jobs to show; 0 shows all
        #[arg(long, value_name = "N", default_value_t = 50)]
        limit: usize,
        /// Leave out jobs that have ended
        #[arg(long)]
        running: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the state of a job: images, rows, failures, queues
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
    /// Explain why a job makes no progress: where its images are, since when, and their last errors
    Why {
        /// The job
        id: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// List the dead letters of a job
    Dead {
        /// The job
        id: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Classify the images of failed rows again; the new rows replace the failed ones
    Retry {
        /// A complete or failed job
        id: String,
        /// Only rows with these kinds of failures: fetch, decode, infer, or an error_kind, such as
        /// timeout
        #[arg(long, value_name = "KINDS", value_delimiter = ',')]
        kind: Vec<String>,
        /// Wait for the end, with a progress bar
        #[arg(long)]
        wait: bool,
        /// Exit with 3 if any of the new rows failed
        #[arg(long, requires = "wait")]
        fail_on_error: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Cancel a job; committed rows stay
    Cancel {
        /// The job
        id: String,
    },
    /// List the models that jobs can use
    Models {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Interval between updates
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = humantime::parse_duration)]
    pub(crate) interval: Duration,

    /// Measure for five seconds, print the result and exit
    #[arg(long)]
    pub(crate) once: bool,

    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
}
