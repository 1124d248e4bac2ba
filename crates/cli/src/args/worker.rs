//! Arguments of `trommel worker`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{BrokerArgs, S3Args, TelemetryArgs, TuningArgs};

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

    /// Model repository: a folder or s3://bucket/prefix that contains NAME/ or NAME/VERSION/
    #[arg(
        long,
        value_name = "DIR",
        default_value = "models",
        env = "TROMMEL_MODEL_REPOSITORY"
    )]
    pub(crate) model_repository: String,

    /// Folder for copies of models from a bucket. Default: trommel/models in the user's cache
    /// folder
    #[arg(long, value_name = "DIR", env = "TROMMEL_MODEL_CACHE")]
    pub(crate) model_cache: Option<PathBuf>,

    /// How tensors travel from preprocess to infer: through the broker, or in memory if one process
    /// runs both roles
    #[arg(long, value_enum, default_value_t = HopArg::Jetstream)]
    pub(crate) tensor_hop: HopArg,

    /// Models to answer requests for, as `trommel serve` does. A process with the role serve, or
    /// with preprocess and infer, answers requests; one with infer also runs models for processes
    /// that only have the role serve. Requests take precedence over jobs
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(crate) serve: Vec<String>,

    /// Address to serve HTTP requests on. Default: 127.0.0.1:8080, only for this machine
    #[arg(long, value_name = "ADDRESS", requires = "serve")]
    pub(crate) serve_listen: Option<SocketAddr>,

    #[command(flatten)]
    pub(crate) access: AccessArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    #[command(flatten)]
    pub(crate) s3: S3Args,

    #[command(flatten)]
    pub(crate) broker: BrokerArgs,

    #[command(flatten)]
    pub(crate) telemetry: TelemetryArgs,
}

/// Where a worker may read and write for submitted jobs.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessArgs {
    /// Location that jobs may read images from, including everything below it: /data/photos,
    /// s3://bucket/prefix/, https://host/ or nats://SUBJECT; may be repeated. Default: everything
    /// on S3 that the credentials can read, and nothing else
    #[arg(long, value_name = "PLACE")]
    pub(crate) allow_source: Vec<String>,

    /// Location that jobs may write rows to: /data/results, s3://bucket/prefix/ or
    /// postgres://host:port/database; may be repeated. Default: everything on S3 that the
    /// credentials can write, and nothing else
    #[arg(long, value_name = "PLACE")]
    pub(crate) allow_output: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RoleArg {
    Ingest,
    Preprocess,
    Infer,
    Sink,
    Serve,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum HopArg {
    Jetstream,
    Local,
}
