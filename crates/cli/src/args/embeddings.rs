//! Arguments of the commands that work with stored embeddings: `relabel`, `fit`, `find` and `dedup`.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

use clap::Args;

use super::shared::{LabelArgs, label_score, score};
use super::{PartFormat, S3Args};
use crate::hub::{Dtype, ModelName};

/// The output of derived rows.
#[derive(Debug, Args)]
pub(crate) struct DerivedArgs {
    /// Where rows go: x.parquet, x.jsonl, x.csv, a folder of parts, s3://bucket/prefix/, or
    /// postgres://user@host/database?table=name. Default: JSON Lines on standard output
    #[arg(short, long, value_name = "DEST")]
    pub(crate) output: Option<String>,

    /// Format of the parts in a folder
    #[arg(long, value_enum, default_value_t = PartFormat::Parquet)]
    pub(crate) format: PartFormat,

    /// Replace results of another job
    #[arg(long, requires = "output")]
    pub(crate) overwrite: bool,
}

impl DerivedArgs {
    /// The output, unless it is standard output.
    pub(crate) fn place(&self) -> Option<&str> {
        self.output.as_deref().filter(|output| *output != "-")
    }
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("classes").required(true).multiple(true).args(["labels", "head", "threshold", "thresholds"]))]
pub(crate) struct RelabelArgs {
    /// Results with embeddings, or for thresholds alone with scores: a file, a folder of parts,
    /// s3://bucket/prefix, or postgres://user@host/database?table=name
    #[arg(value_name = "RESULTS")]
    pub(crate) results: String,

    /// The model that made the rows, with its text tower for --labels: a directory, or
    /// hf:ORGANISATION/NAME
    #[arg(short, long, value_name = "MODEL", env = "TROMMEL_MODEL")]
    pub(crate) model: Option<ModelName>,

    /// Precision of a model of the hub, as for classify
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub(crate) dtype: Option<Dtype>,

    #[command(flatten)]
    pub(crate) labels: LabelArgs,

    /// Linear classifier instead of texts: a file of trommel fit, or an ONNX graph from embeddings
    /// to classes, named by --labels
    #[arg(long, value_name = "FILE")]
    pub(crate) head: Option<PathBuf>,

    /// Number of classes in a row's `top`
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<NonZeroU32>,

    /// Leave out classes below this score, unless none reaches it: then keep the best one. Without
    /// --labels and --head, applies to the scores in the rows
    #[arg(long, value_name = "SCORE", value_parser = score)]
    pub(crate) threshold: Option<f32>,

    /// The same for one class; may be repeated
    #[arg(long = "threshold-of", value_name = "LABEL=SCORE", value_parser = label_score)]
    pub(crate) thresholds: Vec<(String, f32)>,

    #[command(flatten)]
    pub(crate) derived: DerivedArgs,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}

impl RelabelArgs {
    /// The thresholds as options of the job's record, named as in a classified job.
    pub(crate) fn threshold_options(&self) -> impl Iterator<Item = (String, String)> {
        let general = self.threshold.map(|score| ("threshold".to_owned(), score));
        let of_labels = self.thresholds.iter();
        let of_labels = of_labels.map(|(label, score)| (format!("threshold of {label}"), *score));
        let all = general.into_iter().chain(of_labels);
        all.map(|(name, score)| (name, score.to_string()))
    }
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("truth").required(true))]
pub(crate) struct FitArgs {
    /// Results with embeddings: a file, a folder of parts, s3://bucket/prefix, or
    /// postgres://user@host/database?table=name
    #[arg(value_name = "RESULTS")]
    pub(crate) results: String,

    /// CSV or JSON Lines file with columns uri and label
    #[arg(long, value_name = "FILE", group = "truth")]
    pub(crate) labels: Option<PathBuf>,

    /// Take the label from the name of each image's folder, or from a column of the results
    #[arg(long, value_name = "folders|column:NAME", group = "truth")]
    pub(crate) labels_from: Option<String>,

    /// File for the weights, for relabel --head
    #[arg(short, long, value_name = "FILE", default_value = "head.json")]
    pub(crate) output: PathBuf,

    /// Folds of the cross-validation
    #[arg(long, value_name = "N", default_value = "5")]
    pub(crate) folds: NonZeroUsize,

    /// Scale embeddings to length 1 first
    #[arg(long)]
    pub(crate) normalize: bool,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}

#[derive(Debug, Args)]
pub(crate) struct FindArgs {
    /// Results with embeddings: a file, a folder of parts, s3://bucket/prefix, or
    /// postgres://user@host/database?table=name
    #[arg(value_name = "RESULTS")]
    pub(crate) results: String,

    /// Query: a text, or the path of an image
    #[arg(value_name = "TEXT|IMAGE")]
    pub(crate) query: String,

    /// The model that made the embeddings: a directory, or hf:ORGANISATION/NAME
    #[arg(short, long, value_name = "MODEL", env = "TROMMEL_MODEL")]
    pub(crate) model: ModelName,

    /// Precision of a model of the hub, as for classify
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub(crate) dtype: Option<Dtype>,

    /// Number of images to find
    #[arg(long, value_name = "N", default_value = "50")]
    pub(crate) top: NonZeroUsize,

    #[command(flatten)]
    pub(crate) derived: DerivedArgs,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}

#[derive(Debug, Args)]
pub(crate) struct DedupArgs {
    /// Results with embeddings or perceptual hashes: a file, a folder of parts, s3://bucket/prefix, or
    /// postgres://user@host/database?table=name
    #[arg(value_name = "RESULTS")]
    pub(crate) results: String,

    /// Cosine similarity from which two images count as duplicates
    #[arg(long, value_name = "COSINE", default_value = "0.95", value_parser = score)]
    pub(crate) threshold: f32,

    /// Minimum share of such pairs to find
    #[arg(long, value_name = "SHARE", default_value = "0.99", value_parser = score)]
    pub(crate) recall: f32,

    /// Compare perceptual hashes, and count images as duplicates whose hashes differ in at most this
    /// many of 64 bits (0 to 12). Default where there are no embeddings: 4
    #[arg(
        long,
        value_name = "BITS",
        value_parser = clap::value_parser!(u32).range(..=12),
        conflicts_with_all = ["threshold", "recall"]
    )]
    pub(crate) distance: Option<u32>,

    #[command(flatten)]
    pub(crate) derived: DerivedArgs,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}
