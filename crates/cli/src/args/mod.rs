//! The command line, in one file per group of commands.

mod classify;
mod embeddings;
mod feed;
mod foresight;
mod jobs;
mod mistakes;
mod model;
mod results;
mod serve;
mod setup;
mod shared;
mod worker;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use self::shared::{log_filter, share};

pub(crate) use self::classify::ClassifyArgs;
pub(crate) use self::embeddings::{DedupArgs, DerivedArgs, FindArgs, FitArgs, RelabelArgs};
pub(crate) use self::feed::FeedArgs;
pub(crate) use self::foresight::{ArrivalArg, BenchArgs, PlanArgs, PlanHop, PriceArgs, TuneArgs};
pub(crate) use self::jobs::{JobsArgs, JobsCommand, SubmitArgs, TopArgs};
pub(crate) use self::mistakes::parse;
pub(crate) use self::model::{ModelCommand, ProfileArgs, VerifyArgs};
pub(crate) use self::results::{EvaluateArgs, ExportArgs, LabellingTool, ReportArgs};
pub(crate) use self::serve::ServeArgs;
pub(crate) use self::setup::{CompletionsArgs, DemoArgs, ManArgs};
pub(crate) use self::shared::{
    BrokerArgs, PartFormat, RowArgs, S3Args, SourceArgs, TelemetryArgs, TuningArgs,
};
pub(crate) use self::worker::{AccessArgs, HopArg, RoleArg, WorkerArgs};

/// Warnings, except from libraries whose failures also appear in our errors.
const DEFAULT_LOG: &str = "warn,ort=off,aws_config=off";

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

    /// ONNX Runtime's shared library. Default: ORT_DYLIB_PATH, else next to the binary or in its
    /// package, else from the Python environment it is installed in, else where `make setup` puts
    /// it, else the system's
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) onnxruntime: Option<PathBuf>,

    /// Filter of the log lines on standard error, such as `info` or `trommel_worker=debug`
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        env = "TROMMEL_LOG",
        default_value = DEFAULT_LOG,
        value_parser = log_filter
    )]
    pub(crate) log: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Classify a few sample digits, and write a table and a report
    Demo(DemoArgs),
    /// Classify images on this machine
    Classify(Box<ClassifyArgs>),
    /// Run roles of the pipeline as a process, over NATS JetStream
    Worker(Box<WorkerArgs>),
    /// Classify single images on request, over HTTP and NATS
    Serve(Box<ServeArgs>),
    /// Publish the frames of a camera, a stream or a video file as a live source
    Feed(Box<FeedArgs>),
    /// Submit a job to the workers
    Submit(Box<SubmitArgs>),
    /// List, inspect, retry and cancel jobs
    Jobs(JobsArgs),
    /// Watch jobs and stages: rates, the bottleneck and what to change
    Top(TopArgs),
    /// Inspect, verify or fetch a model
    #[command(subcommand)]
    Model(ModelCommand),
    /// Where a model's time goes: by node, by operator, by size of batch
    Profile(ProfileArgs),
    /// Measure each stage alone, the whole pipeline, and a server under load
    Bench(Box<BenchArgs>),
    /// Find the fastest settings for a model on this machine; classify, serve and workers then use
    /// them
    Tune(Box<TuneArgs>),
    /// Plan capacity for a rate and a latency: batch, wait, sessions, cores, broker, cost
    Plan(Box<PlanArgs>),
    /// Evaluate results against labels, or against another run's results
    Evaluate(EvaluateArgs),
    /// Write results as one HTML page with pictures: classes, scores, failures
    Report(Box<ReportArgs>),
    /// Copy or link images into a folder for each label, or list the images that a person should
    /// review
    Export(Box<ExportArgs>),
    /// Assign new labels from stored embeddings or scores, without reading images
    Relabel(Box<RelabelArgs>),
    /// Train a classifier for relabel from labelled examples, on stored embeddings
    Fit(Box<FitArgs>),
    /// Find the images most similar to a text or an image, by stored embeddings
    Find(Box<FindArgs>),
    /// Find near-duplicate images, by stored embeddings
    Dedup(Box<DedupArgs>),
    /// Print the effective configuration, secrets redacted
    Config(Box<ConfigArgs>),
    /// Print the user permissions for nats-server's configuration
    NatsPermissions(NatsPermissionsArgs),
    /// Print a shell completion script for bash, zsh, fish and others
    Completions(CompletionsArgs),
    /// Write the manual pages
    #[command(hide = true)]
    Man(ManArgs),
}

#[derive(Debug, Args)]
pub(crate) struct NatsPermissionsArgs {
    /// Prefix of the names of streams and subjects. Default: broker.prefix
    #[arg(long, value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,

    /// Stream of events that jobs may follow as nats://SUBJECT; may be repeated
    #[arg(long, value_name = "STREAM", value_parser = stream_name)]
    pub(crate) feed: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(flatten)]
    pub(crate) tuning: TuningArgs,
}

fn stream_name(text: &str) -> Result<String, String> {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    match !text.is_empty() && text.bytes().all(valid) {
        true => Ok(text.to_owned()),
        false => Err("expected the name of a stream: ASCII letters, digits, - and _".to_owned()),
    }
}
