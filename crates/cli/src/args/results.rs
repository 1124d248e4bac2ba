//! Arguments of the commands that read results: `evaluate`, `report` and `export`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::shared::score;
use super::{S3Args, share};

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("truth").required(true))]
pub(crate) struct EvaluateArgs {
    /// Results: a file, a folder of parts, s3://bucket/prefix, or
    /// postgres://user@host/database?table=name
    pub(crate) results: String,

    /// CSV or JSON Lines file with columns uri and label
    #[arg(long, value_name = "FILE", group = "truth")]
    pub(crate) labels: Option<PathBuf>,

    /// Take the true label from the name of each image's folder, or from a column of the results
    #[arg(long, value_name = "folders|column:NAME", group = "truth")]
    pub(crate) labels_from: Option<String>,

    /// Compare with the results of another run over the same images, such as one with a quantised
    /// model: how many labels are equal, and how far scores differ
    #[arg(long, value_name = "RESULTS", group = "truth")]
    pub(crate) against: Option<String>,

    /// Find the lowest thresholds, for all classes and for each, that reach this precision
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "against")]
    pub(crate) precision: Option<f64>,

    /// Exit with 3 when accuracy is below this
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "against")]
    pub(crate) min_accuracy: Option<f64>,

    /// Exit with 3 when the share of equal labels is below this
    #[arg(long, value_name = "SHARE", value_parser = share, requires = "against")]
    pub(crate) min_agreement: Option<f64>,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Results: a file, a folder of parts, s3://bucket/prefix, or
    /// postgres://user@host/database?table=name
    #[arg(value_name = "RESULTS")]
    pub(crate) results: String,

    /// HTML file to write
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub(crate) output: PathBuf,

    /// Number of classes to show pictures of, the largest ones
    #[arg(long, value_name = "NUMBER", default_value_t = 30)]
    pub(crate) classes: u16,

    /// Pictures per class with the highest scores, and as many with the lowest
    #[arg(long, value_name = "NUMBER", default_value_t = 8)]
    pub(crate) per_class: u16,

    /// Output of `trommel classify --json`, for the timing of the stages
    #[arg(long, value_name = "FILE")]
    pub(crate) summary: Option<PathBuf>,

    /// Folder that relative paths of images start from. Default: the first of the current folder,
    /// the folder of the results and its parents that has the first image
    #[arg(long, value_name = "DIR")]
    pub(crate) root: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}

/// Programs that people label with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LabellingTool {
    LabelStudio,
    Fiftyone,
    Csv,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["by_label", "to"]))]
pub(crate) struct ExportArgs {
    /// Results: a file, a folder of parts, s3://bucket/prefix, or
    /// postgres://user@host/database?table=name
    #[arg(value_name = "RESULTS")]
    pub(crate) results: String,

    /// New folder, with a folder of images for each label
    #[arg(long, value_name = "DIR")]
    pub(crate) by_label: Option<PathBuf>,

    /// Copy the images (the default)
    #[arg(long, conflicts_with = "link")]
    pub(crate) copy: bool,

    /// Make symbolic links to the images, which must be local files
    #[arg(long)]
    pub(crate) link: bool,

    /// Write a list of images for a person to review, the least certain first: Label Studio tasks,
    /// a FiftyOne folder, or a table
    #[arg(long, value_enum, value_name = "TOOL", requires = "output")]
    pub(crate) to: Option<LabellingTool>,

    /// New file for the list; for FiftyOne, a new folder
    #[arg(short, long, value_name = "FILE", requires = "to")]
    pub(crate) output: Option<PathBuf>,

    /// At most N images: those with the smallest margin between the two best classes
    #[arg(long, value_name = "N", requires = "to")]
    pub(crate) least_sure: Option<NonZeroUsize>,

    /// At most N images per label
    #[arg(long, value_name = "N", requires = "to")]
    pub(crate) per_class: Option<NonZeroUsize>,

    /// Only images with a different label in these results
    #[arg(long, value_name = "RESULTS", requires = "to")]
    pub(crate) disagree: Option<String>,

    /// Choose uncertain images that differ from each other, by their embeddings
    #[arg(long, requires = "to")]
    pub(crate) diverse: bool,

    /// Only images of this label; may be repeated
    #[arg(long, value_name = "LABEL")]
    pub(crate) label: Vec<String>,

    /// Only images whose label has at least this score
    #[arg(long, value_name = "SCORE", value_parser = score)]
    pub(crate) min_score: Option<f32>,

    /// Only images whose label has at most this score
    #[arg(long, value_name = "SCORE", value_parser = score)]
    pub(crate) max_score: Option<f32>,

    /// Folder that relative paths of images start from. Default: the first of the current folder,
    /// the folder of the results and its parents that has the first image
    #[arg(long, value_name = "DIR")]
    pub(crate) root: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}
