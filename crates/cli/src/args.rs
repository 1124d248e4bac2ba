use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Bulk image classification: one row for each of your images.
#[derive(Debug, Parser)]
#[command(
    name = "trommel",
    version,
    propagate_version = true,
    max_term_width = 100
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Configuration file. Default: trommel.toml in the current directory, if there is one
    #[arg(long, global = true, value_name = "FILE", env = "TROMMEL_CONFIG")]
    pub(crate) config: Option<PathBuf>,

    /// ONNX Runtime's shared library. Default: ORT_DYLIB_PATH, else beside the binary, else where
    /// `make setup` puts it
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) onnxruntime: Option<PathBuf>,

    /// What is logged to standard error, such as `info` or `trommel_worker=debug`
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        env = "TROMMEL_LOG",
        default_value = "warn,ort=off"
    )]
    pub(crate) log: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Classify images on this machine
    Classify(Box<ClassifyArgs>),
    /// Hold roles of the pipeline, over NATS JetStream
    Worker(Box<WorkerArgs>),
    /// Submit a job to the workers
    Submit(Box<SubmitArgs>),
    /// Look at jobs and end them
    Jobs(JobsArgs),
    /// Watch jobs and stages: rates, the bottleneck, and which knob to turn
    Top(TopArgs),
    /// Look at a model
    #[command(subcommand)]
    Model(ModelCommand),
    /// Where a model's time goes: by node, by operator, by size of batch
    Profile(ProfileArgs),
    /// Score results against labels, or against another run's results
    Evaluate(EvaluateArgs),
    /// Results as one page with pictures: what is in each class, what failed, what is unsure
    Report(Box<ReportArgs>),
    /// Print the effective configuration, secrets redacted
    Config(Box<ConfigArgs>),
}

#[derive(Debug, Args)]
#[command(after_help = CLASSIFY_HELP)]
pub(crate) struct ClassifyArgs {
    /// Images: files, folders, globs, manifests (.txt .csv .jsonl .parquet), .tar shards,
    /// s3://bucket/prefix, or - for a list on standard input
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<String>,

    /// Model directory (model.onnx, config.json, preprocessor_config.json). Default: the only
    /// directory in ./models
    #[arg(short, long, value_name = "DIR", env = "TROMMEL_MODEL")]
    pub(crate) model: Option<PathBuf>,

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

    /// Replace results of another job
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Exit with 3 when a row is failed
    #[arg(long)]
    pub(crate) fail_on_error: bool,

    /// Stop, with exit code 4, once more than this share of images is sure to fail
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) max_failure_rate: Option<f64>,

    /// Nothing on standard error but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// The summary as JSON on standard output; on standard error when rows go to standard output
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

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

Exit codes: 0 all rows written, 1 any other error, 2 usage or configuration, 3 failed rows
(--fail-on-error), 4 too many failures (--max-failure-rate).";

#[derive(Debug, Args)]
#[command(next_help_heading = "Selection")]
pub(crate) struct SourceArgs {
    /// Take N images, chosen evenly by a hash of their names
    #[arg(long, value_name = "N")]
    pub(crate) sample: Option<u64>,

    /// Another choice of the same size
    #[arg(long, value_name = "SEED", default_value_t = 0, requires = "sample")]
    pub(crate) sample_seed: u64,

    /// File name suffixes to take from folders and archives, such as jpg,png. Default: those of
    /// the formats that are read
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) suffixes: Option<Vec<String>>,

    /// Skip files smaller than this many bytes
    #[arg(long, value_name = "BYTES")]
    pub(crate) min_size: Option<u64>,

    /// Skip files larger than this many bytes
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_size: Option<u64>,

    /// Column of a manifest that holds the uris. Default: uri, path, image or another usual name
    #[arg(long, value_name = "NAME")]
    pub(crate) uri_column: Option<String>,

    /// Binary column of a Parquet file that holds the images. Default: the only one
    #[arg(long, value_name = "NAME")]
    pub(crate) image_column: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Roles of this process
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        required = true,
        value_name = "ROLES"
    )]
    pub(crate) role: Vec<RoleArg>,

    /// Models: a folder or s3://bucket/prefix, with NAME/ or NAME/VERSION/ in it
    #[arg(
        long,
        value_name = "DIR",
        default_value = "models",
        env = "TROMMEL_MODEL_REPOSITORY"
    )]
    pub(crate) model_repository: String,

    /// Where models of a bucket are copied to. Default: trommel/models in the user's cache folder
    #[arg(long, value_name = "DIR", env = "TROMMEL_MODEL_CACHE")]
    pub(crate) model_cache: Option<PathBuf>,

    /// How tensors go from preprocess to infer: through the broker, or in memory where one process
    /// holds both roles
    #[arg(long, value_enum, default_value_t = HopArg::Jetstream)]
    pub(crate) tensor_hop: HopArg,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    #[command(flatten)]
    pub(crate) s3: S3Args,

    #[command(flatten)]
    pub(crate) broker: BrokerArgs,

    #[command(flatten)]
    pub(crate) telemetry: TelemetryArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RoleArg {
    Ingest,
    Preprocess,
    Infer,
    Sink,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum HopArg {
    Jetstream,
    Local,
}

/// How S3 is reached; credentials come from where all AWS tools look for them.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "S3")]
pub(crate) struct S3Args {
    /// Address of a store other than AWS, such as http://127.0.0.1:9000
    #[arg(long, value_name = "URL")]
    pub(crate) s3_endpoint: Option<String>,

    /// Send requests unsigned, as for public buckets
    #[arg(long)]
    pub(crate) s3_anonymous: bool,
}

/// Where the broker is.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Broker")]
pub(crate) struct BrokerArgs {
    /// NATS server; several are separated by commas. Default: nats://127.0.0.1:4222
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) nats: Option<String>,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Telemetry")]
pub(crate) struct TelemetryArgs {
    /// Address that answers /metrics, /healthz and /readyz, such as 0.0.0.0:9464. Default: none
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,

    /// OpenTelemetry collector that traces are sent to, such as http://localhost:4317. Default:
    /// none
    #[arg(long, value_name = "URL")]
    pub(crate) otlp_endpoint: Option<String>,
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

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Results: a file, a folder of parts, or s3://bucket/prefix
    #[arg(value_name = "RESULTS")]
    pub(crate) results: String,

    /// The page
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub(crate) output: PathBuf,

    /// Classes with a contact sheet, the largest ones
    #[arg(long, value_name = "NUMBER", default_value_t = 30)]
    pub(crate) classes: u16,

    /// Images on a contact sheet at either end: the most sure ones, the least sure ones
    #[arg(long, value_name = "NUMBER", default_value_t = 8)]
    pub(crate) per_class: u16,

    /// What `trommel classify --json` printed, for the timing of the stages
    #[arg(long, value_name = "FILE")]
    pub(crate) summary: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}

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

    /// Replace results of another job
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Count the images, classify the first 512, store nothing, and tell how long all would take
    #[arg(long, conflicts_with_all = ["wait", "fail_on_error"])]
    pub(crate) dry_run: bool,

    /// Wait for the end, with a progress bar; the exit code tells it, as that of classify
    #[arg(long)]
    pub(crate) wait: bool,

    /// Exit with 3 when a row is failed
    #[arg(long, requires = "wait")]
    pub(crate) fail_on_error: bool,

    /// End the job once more than this share of images is sure to fail
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) max_failure_rate: Option<f64>,

    /// End the job after this time, such as 2h
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) max_runtime: Option<std::time::Duration>,

    /// Nothing on standard error but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// The job's end as JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

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
    /// All jobs, the newest first
    List {
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

/// Flags that stand above the configuration file; each is named as its setting there.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Tuning")]
pub(crate) struct TuningArgs {
    /// Where the model runs: cpu, cuda:N, tensorrt:N, or several of one kind with commas between
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,

    /// Threads that decode and resize
    #[arg(long, value_name = "N")]
    pub(crate) preprocess_threads: Option<NonZeroUsize>,

    /// Copies of the model that run side by side on each device
    #[arg(long, value_name = "N")]
    pub(crate) instances: Option<NonZeroUsize>,

    /// Threads inside each copy
    #[arg(long, value_name = "N")]
    pub(crate) intra_threads: Option<NonZeroUsize>,

    /// Decode large JPEGs to a half, a quarter or an eighth of their size (see preprocess.mode)
    #[arg(long)]
    pub(crate) fast: bool,

    /// Images in a full batch. Default: the fastest number, measured once for a model and a machine
    #[arg(long, value_name = "N")]
    pub(crate) max_batch: Option<NonZeroUsize>,

    /// Classes in a row's `top`
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<NonZeroU32>,

    /// Add the model's raw output to each row
    #[arg(long)]
    pub(crate) logits: bool,

    /// Add the image's embedding to each row, of a model that gives one beside its classes
    #[arg(long)]
    pub(crate) embedding: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PartFormat {
    Parquet,
    Jsonl,
    Csv,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Inputs, outputs, labels and preprocessing of a model directory
    Inspect {
        /// Model directory
        dir: PathBuf,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// Model directory
    #[arg(short, long, value_name = "DIR", env = "TROMMEL_MODEL")]
    pub(crate) model: PathBuf,

    /// Images in the batch that is profiled. Default: infer.max-batch, or the fastest number
    #[arg(long, value_name = "N")]
    pub(crate) batch: Option<NonZeroUsize>,

    /// Batches that are profiled
    #[arg(long, value_name = "N", default_value = "20")]
    pub(crate) runs: NonZeroUsize,

    /// Sizes of batches whose throughput is measured
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32"
    )]
    pub(crate) batches: Vec<NonZeroUsize>,

    /// Where the model runs: cpu, cuda:N, tensorrt:N. Default: infer.device
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,

    /// Threads inside the model. Default: infer.intra-threads
    #[arg(long, value_name = "N")]
    pub(crate) intra_threads: Option<NonZeroUsize>,

    /// Draw it into this file
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) picture: Option<PathBuf>,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("truth").required(true))]
pub(crate) struct EvaluateArgs {
    /// A result file, or a folder of parts
    pub(crate) results: PathBuf,

    /// CSV or JSON Lines file with columns uri and label
    #[arg(long, value_name = "FILE", group = "truth")]
    pub(crate) labels: Option<PathBuf>,

    /// Take the true label from the name of each image's folder, or from a column of the results
    #[arg(long, value_name = "folders|column:NAME", group = "truth")]
    pub(crate) labels_from: Option<String>,

    /// Compare with the results of another run over the same images: how many labels are equal,
    /// and how far scores have moved. Tells what quantisation or another device has cost
    #[arg(long, value_name = "RESULTS", group = "truth")]
    pub(crate) against: Option<PathBuf>,

    /// Exit with 3 when accuracy is below this
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "against")]
    pub(crate) min_accuracy: Option<f64>,

    /// Exit with 3 when the share of equal labels is below this
    #[arg(long, value_name = "SHARE", value_parser = share, requires = "against")]
    pub(crate) min_agreement: Option<f64>,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(flatten)]
    pub(crate) tuning: TuningArgs,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("expected a share from 0 to 1, such as 0.2".to_owned()),
    }
}
