//! Arguments of the commands that look at a model: `model` and `profile`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use trommel_types::Reference;

use crate::hub::{Dtype, HubName, ModelName};

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Show inputs, outputs, labels and preprocessing of a model
    Inspect {
        /// Model directory, or hf:ORGANISATION/NAME
        model: ModelName,
        /// Precision of a model of the hub, as for classify
        #[arg(long, value_enum, value_name = "DTYPE")]
        dtype: Option<Dtype>,
        /// Reference processor, as for classify
        #[arg(long, value_name = "NAME")]
        reference: Option<Reference>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Compare tensors with those of your own installation of Transformers
    Verify(VerifyArgs),
    /// Fetch a model from the Hugging Face Hub, and print its folder
    Fetch {
        /// hf:ORGANISATION/NAME or hf:ORGANISATION/NAME@REVISION
        model: HubName,
        /// Precision of the weights. Default: fp32, or the only precision available
        #[arg(long, value_enum, value_name = "DTYPE")]
        dtype: Option<Dtype>,
        /// Copy the model into this new folder, such as one in a worker's repository
        #[arg(short, long, value_name = "DIR")]
        output: Option<PathBuf>,
        /// Only errors on standard error
        #[arg(short, long)]
        quiet: bool,
    },
}

#[derive(Debug, Args)]
#[command(after_help = VERIFY_HELP)]
pub(crate) struct VerifyArgs {
    /// Model directory, or hf:ORGANISATION/NAME
    pub(crate) model: ModelName,

    /// Images: files, and folders with their subfolders
    #[arg(required = true)]
    pub(crate) images: Vec<PathBuf>,

    /// Precision of a model of the hub, as for classify
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub(crate) dtype: Option<Dtype>,

    /// Reference processor, as for classify
    #[arg(long, value_name = "NAME")]
    pub(crate) reference: Option<Reference>,

    /// Folder for tensors, program and verdict
    #[arg(short, long, value_name = "DIR", default_value = "trommel-verify")]
    pub(crate) output: PathBuf,

    /// Number of images to compare, at most
    #[arg(long, value_name = "N", default_value = "64")]
    pub(crate) limit: NonZeroUsize,

    /// Python interpreter with Transformers installed
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub(crate) python: PathBuf,
}

const VERIFY_HELP: &str = "\
Writes Trommel's tensors and a Python program that compares them with those of the AutoImageProcessor of your own
installation of Transformers, runs the program, and prints the result.

Exit codes: 0 all tensors are equal, 3 some differ, 1 and 2 they could not be compared.";

#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// Model directory, or hf:ORGANISATION/NAME
    #[arg(short, long, value_name = "MODEL", env = "TROMMEL_MODEL")]
    pub(crate) model: ModelName,

    /// Precision of a model of the hub, as for classify
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub(crate) dtype: Option<Dtype>,

    /// Batch size to profile. Default: infer.max-batch, or the fastest one
    #[arg(long, value_name = "N")]
    pub(crate) batch: Option<NonZeroUsize>,

    /// Number of batches to profile
    #[arg(long, value_name = "N", default_value = "20")]
    pub(crate) runs: NonZeroUsize,

    /// Batch sizes to measure the throughput of
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

    /// Write the profile as a picture to this file
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) picture: Option<PathBuf>,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}
