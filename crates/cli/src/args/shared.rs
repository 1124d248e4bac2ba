//! Arguments shared by several commands.

use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::builder::UnknownArgumentValueParser;
use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use trommel_sink::Format;
use trommel_types::{EmbeddingType, FrameRate, LabelSet, Mode, Reference, RowOptions};

use crate::paths::check_input;

#[derive(Debug, Args)]
#[command(next_help_heading = "Selection")]
pub(crate) struct SourceArgs {
    /// Classify a sample of N images, chosen evenly by a hash of their names
    #[arg(long, value_name = "N")]
    pub(crate) sample: Option<u64>,

    /// Seed of the sample
    #[arg(long, value_name = "SEED", default_value_t = 0, requires = "sample")]
    pub(crate) sample_seed: u64,

    /// Suffixes of the files to read from folders and archives, such as jpg,png. Default: those of
    /// all supported formats
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) suffixes: Option<Vec<String>>,

    /// Skip files smaller than this many bytes
    #[arg(long, value_name = "BYTES")]
    pub(crate) min_size: Option<u64>,

    /// Skip files larger than this many bytes
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_size: Option<u64>,

    /// Column of uris in a manifest. Default: uri, path, image or another common name
    #[arg(long, value_name = "NAME")]
    pub(crate) uri_column: Option<String>,

    /// Base of relative paths in lists: a folder, s3://bucket/prefix or https://host/path. Default:
    /// the folder of the list; for standard input, the current one
    #[arg(long, value_name = "PLACE")]
    pub(crate) base: Option<String>,

    /// Column of encoded images in a Parquet file. Default: the only binary column
    #[arg(long, value_name = "NAME")]
    pub(crate) image_column: Option<String>,

    /// Frames to classify per second of a video. Default: 1
    #[arg(long, value_name = "RATE")]
    pub(crate) fps: Option<FrameRate>,
}

/// Connection to S3; credentials are found as by all AWS tools.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "S3")]
pub(crate) struct S3Args {
    /// Address of a store other than AWS, such as http://127.0.0.1:9000
    #[arg(long, value_name = "URL")]
    pub(crate) s3_endpoint: Option<String>,

    /// Send unsigned requests, for public buckets
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
    /// Address to serve /metrics, /healthz and /readyz on, such as 0.0.0.0:9464. Default: none
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,

    /// OpenTelemetry collector to send traces to, such as http://localhost:4317. Default: none
    #[arg(long, value_name = "URL")]
    pub(crate) otlp_endpoint: Option<String>,
}

/// Flags that override the configuration file; each is named like its setting.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Tuning")]
pub(crate) struct TuningArgs {
    /// Device of the model: cpu, cuda:N or tensorrt:N; several of one kind are separated by commas
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,

    /// Memory for images, tensors and rows in flight, not counting models
    #[arg(long, value_name = "MIB")]
    pub(crate) memory_budget: Option<NonZeroUsize>,

    /// Threads for decoding and resizing
    #[arg(long, value_name = "N")]
    pub(crate) preprocess_threads: Option<NonZeroUsize>,

    /// Copies of the model to run in parallel on each device
    #[arg(long, value_name = "N")]
    pub(crate) instances: Option<NonZeroUsize>,

    /// Threads of each copy
    #[arg(long, value_name = "N")]
    pub(crate) intra_threads: Option<NonZeroUsize>,

    /// Images in a full batch. Default: the fastest size, measured once per model and machine
    #[arg(long, value_name = "N")]
    pub(crate) max_batch: Option<NonZeroUsize>,

    /// Ignore the settings that trommel tune has saved for the model
    #[arg(long)]
    pub(crate) no_profile: bool,

    #[command(flatten)]
    pub(crate) elsewhere: OtherNames,
}

/// Names of these flags in other programs: refused, with the right name. Suggestions by spelling
/// would be misleading.
#[derive(Debug, Default, Args)]
pub(crate) struct OtherNames {
    #[arg(long, hide = true, value_parser = UnknownArgumentValueParser::suggest_arg("--max-batch"))]
    batch_size: Option<String>,

    #[arg(long, hide = true, value_parser = UnknownArgumentValueParser::suggest(THREADS))]
    threads: Option<String>,
}

const THREADS: &str = "'--preprocess-threads' is for decoding and resizing, '--instances' and \
                       '--intra-threads' are for the model";

/// What each row holds; part of the job.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Rows")]
pub(crate) struct RowArgs {
    /// Number of classes in a row's `top`
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<NonZeroU32>,

    /// Add the model's raw output to each row
    #[arg(long)]
    pub(crate) logits: bool,

    /// Add the image's embedding to each row, as float32, or as float16 with --embedding=float16.
    /// The model must have an output for it
    #[arg(
        long,
        value_name = "TYPE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "float32"
    )]
    pub(crate) embedding: Option<EmbeddingType>,

    /// Scale embeddings to length 1
    #[arg(long, requires = "embedding")]
    pub(crate) normalize: bool,

    /// Add a perceptual hash of the pixels that the model sees to each row, for `trommel dedup`
    #[arg(long)]
    pub(crate) phash: bool,

    #[command(flatten)]
    pub(crate) labels: LabelArgs,

    /// Leave out classes below this score, unless none reaches it: then keep the best one. Default:
    /// the thresholds in the model's folder
    #[arg(long, value_name = "SCORE", value_parser = score)]
    pub(crate) threshold: Option<f32>,

    /// The same for one class; may be repeated
    #[arg(long = "threshold-of", value_name = "LABEL=SCORE", value_parser = label_score)]
    pub(crate) thresholds: Vec<(String, f32)>,

    /// Decode large JPEGs at a half, a quarter or an eighth of their size
    #[arg(long)]
    pub(crate) fast: bool,

    /// Image processor that tensors must match: auto, pillow or torchvision. Default:
    /// preprocess.reference, else the one of the library that wrote the model's folder
    #[arg(long, value_name = "NAME")]
    pub(crate) reference: Option<Reference>,

    /// In CSV, prefix text that a spreadsheet would run as a formula with '
    #[arg(long)]
    pub(crate) escape_formulas: bool,
}

impl RowArgs {
    /// The row options, with the reference from the configuration as the default.
    ///
    /// # Errors
    /// If the labels cannot be read, or are invalid.
    pub(crate) fn options(&self, configured: Reference) -> Result<RowOptions> {
        let default = RowOptions::default();
        Ok(RowOptions {
            top_k: self.top_k.unwrap_or(default.top_k),
            logits: self.logits,
            embedding: self.embedding.is_some(),
            embedding_type: self.embedding.unwrap_or_default(),
            normalize: self.normalize,
            phash: self.phash,
            labels: self.labels.read()?,
            threshold: self.threshold,
            thresholds: self.thresholds.iter().cloned().collect(),
            mode: match self.fast {
                true => Mode::Fast,
                false => Mode::Exact,
            },
            reference: self.reference.unwrap_or(configured),
            escape_formulas: self.escape_formulas,
        })
    }
}

/// Your own classes, for models with a text tower.
#[derive(Debug, Default, Args)]
pub(crate) struct LabelArgs {
    /// File of labels, one per line: your own classes, for CLIP, SigLIP and other models with a
    /// text tower
    #[arg(long, value_name = "FILE")]
    pub(crate) labels: Option<PathBuf>,

    /// Sentence with {} in place of the label; the embeddings of several templates are averaged.
    /// Default: a photo of a {}
    #[arg(long = "template", value_name = "SENTENCE", requires = "labels")]
    pub(crate) templates: Vec<String>,
}

impl LabelArgs {
    /// The labels, if there are any.
    ///
    /// # Errors
    /// If the file cannot be read, or its contents cannot be labels.
    pub(crate) fn read(&self) -> Result<Option<LabelSet>> {
        let Some(file) = &self.labels else {
            return Ok(None);
        };
        check_input(file, "labels", "give a file with one label a line")?;
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("failed to read the labels in {}", file.display()))?;
        let set = LabelSet {
            names: text
                .lines()
                .map(|line| line.trim_end().to_owned())
                .collect(),
            templates: self.templates.clone(),
        };
        match set.problem() {
            None => Ok(Some(set)),
            Some(problem) => Err(anyhow::anyhow!("{}: {problem}", file.display())),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PartFormat {
    Parquet,
    Jsonl,
    Csv,
}

impl From<PartFormat> for Format {
    fn from(format: PartFormat) -> Self {
        match format {
            PartFormat::Parquet => Self::Parquet,
            PartFormat::Jsonl => Self::Jsonl,
            PartFormat::Csv => Self::Csv,
        }
    }
}

pub(super) fn score(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(score) if (0.0..=1.0).contains(&score) => Ok(score),
        _ => Err("give a number from 0 to 1".to_owned()),
    }
}

pub(super) fn label_score(text: &str) -> Result<(String, f32), String> {
    let (label, text) = text.rsplit_once('=').ok_or("give LABEL=SCORE")?;
    Ok((label.to_owned(), score(text)?))
}

/// A log filter. A single word must be a level: the parser takes any other word as a module.
pub(super) fn log_filter(text: &str) -> Result<String, String> {
    let expected = "expected off, error, warn, info, debug or trace, or MODULE=LEVEL, such as \
                    trommel_worker=debug; several with commas between";
    let unknown = text.split(',').map(str::trim).find(|directive| {
        let is_word = !directive.contains(['=', '[', ']', '{', '}', '"']);
        is_word && !directive.is_empty() && directive.parse::<LevelFilter>().is_err()
    });
    match (unknown, EnvFilter::try_new(text)) {
        (Some(unknown), _) => Err(format!("{unknown} is not a level: {expected}")),
        (None, Err(error)) => Err(format!("{error}: {expected}")),
        (None, Ok(_)) => Ok(text.to_owned()),
    }
}

pub(super) fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("expected a share from 0 to 1, such as 0.2".to_owned()),
    }
}
