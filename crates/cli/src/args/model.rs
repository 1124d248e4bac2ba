//! Arguments of the commands that look at a model: `model` and `profile`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use trommel_types::Reference;

use crate::hub::{Dtype, HubName, ModelName};

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Inputs, outputs, labels and preprocessing of a model directory
    Inspect {
        /// Model directory, or hf:ORGANISATION/NAME
        model: ModelName,
        /// Precision of a model of the hub, as for classify
        #[arg(long, value_enum, value_name = "DTYPE")]
        dtype: Option<Dtype>,
        /// Whose processor is followed, as for classify
        #[arg(long, value_name = "NAME")]
        reference: Option<Reference>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Compare tensors with those of your own Transformers
    Verify(VerifyArgs),
    /// Fetch a model of the Hugging Face Hub, and print the folder that it is in
    Fetch {
        /// hf:ORGANISATION/NAME or hf:ORGANISATION/NAME@REVISION
        model: HubName,
        /// Precision of its weights. Default: fp32, or the only file that there is
        #[arg(long, value_enum, value_name = "DTYPE")]
        dtype: Option<Dtype>,
        /// Copy it into this new folder, such as one of a worker's repository
        #[arg(short, long, value_name = "DIR")]
        output: Option<PathBuf>,
        /// Nothing on standard error but errors
        #[arg(short, long)]
        quiet: bool,
    },
}

#[derive(Debug, Args)]
#[command(after_help = VERIFY_HELP)]
pub(crate) struct VerifyArgs {
    /// Model directory, or hf:ORGANISATION/NAME
    pub(crate) model: ModelName,

    /// Images: files, and folders with all below them
    #[arg(required = true)]
    pub(crate) images: Vec<PathBuf>,

    /// Precision of a model of the hub, as for classify
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub(crate) dtype: Option<Dtype>,

    /// Whose processor is followed, as for classify
    #[arg(long, value_name = "NAME")]
    pub(crate) reference: Option<Reference>,

    /// Folder for tensors, program and verdict
    #[arg(short, long, value_name = "DIR", default_value = "trommel-verify")]
    pub(crate) output: PathBuf,

    /// Images that are compared at most
    #[arg(long, value_name = "N", default_value = "64")]
    pub(crate) limit: NonZeroUsize,

    /// The Python that has your Transformers
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub(crate) python: PathBuf,
}

const VERIFY_HELP: &str = "\
Writes Trommel's tensors and a program in Python, runs it, and prints what it found: whether the
AutoImageProcessor of your own Transformers gives the same tensors.

Exit codes: 0 all are equal, 3 some differ, 1 and 2 they could not be compared.";

#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// Model directory, or hf:ORGANISATION/NAME
    #[arg(short, long, value_name = "MODEL", env = "TROMMEL_MODEL")]
    pub(crate) model: ModelName,

    /// Precision of a model of the hub, as for classify
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub(crate) dtype: Option<Dtype>,

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
