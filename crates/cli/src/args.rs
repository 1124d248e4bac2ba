use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

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
    /// Look at a model
    #[command(subcommand)]
    Model(ModelCommand),
    /// Score results against labels: accuracy, precision, recall, confusion
    Evaluate(EvaluateArgs),
    /// Print the effective configuration, secrets redacted
    Config(Box<ConfigArgs>),
}

#[derive(Debug, Args)]
#[command(after_help = CLASSIFY_HELP)]
pub(crate) struct ClassifyArgs {
    /// Images: files, folders, globs, manifests (.txt .csv .jsonl .parquet), .tar shards, or - for
    /// a list on standard input
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<String>,

    /// Model directory (model.onnx, config.json, preprocessor_config.json). Default: the only
    /// directory in ./models
    #[arg(short, long, value_name = "DIR", env = "TROMMEL_MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Where rows go: x.parquet, x.jsonl, x.csv, or a folder of parts. Default: JSON Lines on
    /// standard output
    #[arg(short, long, value_name = "DEST")]
    pub(crate) output: Option<String>,

    /// Format of the parts in a folder
    #[arg(long, value_enum, default_value_t = PartFormat::Parquet)]
    pub(crate) format: PartFormat,

    /// Replace results of another job
    #[arg(long)]
    pub(crate) overwrite: bool,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

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

/// Flags that stand above the configuration file; each is named as its setting there.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Tuning")]
pub(crate) struct TuningArgs {
    /// Where the model runs: cpu, cuda:N, tensorrt:N
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,

    /// Threads that decode and resize
    #[arg(long, value_name = "N")]
    pub(crate) preprocess_threads: Option<NonZeroUsize>,

    /// Copies of the model that run side by side
    #[arg(long, value_name = "N")]
    pub(crate) instances: Option<NonZeroUsize>,

    /// Threads inside each copy
    #[arg(long, value_name = "N")]
    pub(crate) intra_threads: Option<NonZeroUsize>,

    /// Images in a full batch
    #[arg(long, value_name = "N")]
    pub(crate) max_batch: Option<NonZeroUsize>,

    /// Classes in a row's `top`
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<NonZeroU32>,

    /// Add the model's raw output to each row
    #[arg(long)]
    pub(crate) logits: bool,
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

    /// Exit with 3 when accuracy is below this
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) min_accuracy: Option<f64>,

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
