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

    /// Compare with the results of another run over the same images: how many labels are equal,
    /// and how far scores have moved. Tells what quantisation or another device has cost
    #[arg(long, value_name = "RESULTS", group = "truth")]
    pub(crate) against: Option<String>,

    /// Name the lowest thresholds, for all classes and for each, whose predictions are right at
    /// least this often
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

    /// Folder that relative paths of images begin in. Default: the current one, else the results'
    /// own or the nearest above it that has the first image
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

    /// Folder to make, with a folder for each label and the images in them
    #[arg(long, value_name = "DIR")]
    pub(crate) by_label: Option<PathBuf>,

    /// Copy the images (the default)
    #[arg(long, conflicts_with = "link")]
    pub(crate) copy: bool,

    /// Make symbolic links to the images, which have to be files of this machine
    #[arg(long)]
    pub(crate) link: bool,

    /// Write a list of images that a person should look at, the least sure ones first: tasks of Label
    /// Studio, a folder of FiftyOne, or a table
    #[arg(long, value_enum, value_name = "TOOL", requires = "output")]
    pub(crate) to: Option<LabellingTool>,

    /// The list: a new file, or a new folder for FiftyOne
    #[arg(short, long, value_name = "FILE", requires = "to")]
    pub(crate) output: Option<PathBuf>,

    /// At most so many images: those whose best class is least ahead of the next one
    #[arg(long, value_name = "N", requires = "to")]
    pub(crate) least_sure: Option<NonZeroUsize>,

    /// At most so many images of each label
    #[arg(long, value_name = "N", requires = "to")]
    pub(crate) per_class: Option<NonZeroUsize>,

    /// Only images that have another label in these results
    #[arg(long, value_name = "RESULTS", requires = "to")]
    pub(crate) disagree: Option<String>,

    /// Of the unsure images choose such that differ from each other, by their embeddings
    #[arg(long, requires = "to")]
    pub(crate) diverse: bool,

    /// Only images of this label; may be repeated
    #[arg(long, value_name = "LABEL")]
    pub(crate) label: Vec<String>,

    /// Only images whose label has at least this score
    #[arg(long, value_name = "SCORE", value_parser = score)]
    pub(crate) min_score: Option<f32>,

    /// Only images whose label has at most this score: the unsure ones
    #[arg(long, value_name = "SCORE", value_parser = score)]
    pub(crate) max_score: Option<f32>,

    /// Folder that relative paths of images begin in. Default: the current one, else the results'
    /// own or the nearest above it that has the first image
    #[arg(long, value_name = "DIR")]
    pub(crate) root: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}
