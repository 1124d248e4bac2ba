//! Arguments of the commands that plan and estimate: `plan`, `bench`, `tune`, and prices.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use trommel_types::Price;

use crate::hub::ModelName;
use crate::plan::{Service, seconds_argument};

use super::{RowArgs, S3Args, TuningArgs};

/// The user's prices.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Costs")]
pub(crate) struct PriceArgs {
    /// Your prices, such as infer=2.10/h,preprocess=0.04/core-h,s3-get=0.0004/1000. Roles, broker
    /// and machine cost per h or core-h, s3-get and s3-put per number of requests, read and write
    /// per gb, and in dry runs of a prompt input-tokens and output-tokens per M, a million
    #[arg(long = "price", value_name = "PRICES", value_delimiter = ',')]
    pub(crate) prices: Vec<Price>,
}

#[derive(Debug, Args)]
#[command(after_help = BENCH_HELP)]
pub(crate) struct BenchArgs {
    /// Sample images: any source of classify except standard input
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<String>,

    /// Model directory, or hf:ORGANISATION/NAME; with --against the name that requests use
    #[arg(short, long, value_name = "MODEL", env = "TROMMEL_MODEL")]
    pub(crate) model: Option<String>,

    /// Number of images to use, sampled evenly by a hash of their names
    #[arg(long, value_name = "N", default_value = "512")]
    pub(crate) images: NonZeroUsize,

    /// Batch sizes to measure
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32"
    )]
    pub(crate) batches: Vec<NonZeroUsize>,

    /// NATS server to also send tensors through; its streams are removed afterwards
    #[arg(long, value_name = "URL", conflicts_with = "against")]
    pub(crate) nats: Option<String>,

    /// Server to send requests to instead: http://HOST:PORT, or nats://HOST:PORT
    #[arg(long, value_name = "URL")]
    pub(crate) against: Option<String>,

    /// Requests per second, one load after another, such as 20,50,100
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = rate, requires = "against")]
    pub(crate) rates: Vec<f64>,

    /// Distribution of arrivals
    #[arg(long, value_enum, default_value_t = ArrivalArg::Poisson, requires = "against")]
    pub(crate) arrivals: ArrivalArg,

    /// Duration of the measurement of each load
    #[arg(
        long,
        value_name = "TIME",
        default_value = "20s",
        value_parser = humantime::parse_duration,
        requires = "against"
    )]
    pub(crate) duration: Duration,

    /// Duration of the warm-up before each measurement
    #[arg(
        long,
        value_name = "TIME",
        default_value = "2s",
        value_parser = humantime::parse_duration,
        requires = "against"
    )]
    pub(crate) warm_up: Duration,

    /// Latency within which an answer counts as good
    #[arg(
        long,
        value_name = "TIME",
        default_value = "120ms",
        value_parser = humantime::parse_duration,
        requires = "against"
    )]
    pub(crate) deadline: Duration,

    /// Seed of the arrival times
    #[arg(long, value_name = "N", default_value_t = 0, requires = "against")]
    pub(crate) seed: u64,

    /// Write the measurements as JSON, for trommel plan --from
    #[arg(short, long, value_name = "FILE.json")]
    pub(crate) output: Option<PathBuf>,

    /// Write the measurements as an HTML page with plots
    #[arg(long, value_name = "FILE.html")]
    pub(crate) page: Option<PathBuf>,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) rows: RowArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}

const BENCH_HELP: &str = "\
Each stage runs alone, with as many threads as in the pipeline, and then the whole pipeline runs. The limit is
the rate of the slowest stage; stages that share the CPU are counted one after the other.

Requests follow an open loop: each is sent when it is due, whether or not earlier ones were answered, and its
latency counts from then. The token is read from TROMMEL_SERVE_TOKEN.";

#[derive(Debug, Args)]
#[command(after_help = TUNE_HELP)]
pub(crate) struct TuneArgs {
    /// Sample images: any source of classify except standard input
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<String>,

    /// Model directory, or hf:ORGANISATION/NAME
    #[arg(short, long, value_name = "MODEL", env = "TROMMEL_MODEL")]
    pub(crate) model: ModelName,

    /// Number of images in a trial of the comparison with the defaults, sampled evenly by a hash of
    /// their names; trials of the search use half of them
    #[arg(long, value_name = "N", default_value = "512")]
    pub(crate) images: NonZeroUsize,

    /// Latency target of 95 % of requests at the rate of --rate, such as 120ms
    #[arg(long, value_name = "TIME", value_parser = time, requires = "rate")]
    pub(crate) p95: Option<Duration>,

    /// Requests per second at which --p95 has to hold
    #[arg(long, value_name = "N", value_parser = rate, requires = "p95")]
    pub(crate) rate: Option<f64>,

    /// Duration of a measurement of the latency; it ends early where the target is missed
    #[arg(
        long,
        value_name = "TIME",
        default_value = "9s",
        value_parser = time,
        requires = "p95"
    )]
    pub(crate) duration: Duration,

    /// Seed of the arrival times
    #[arg(long, value_name = "N", default_value_t = 0, requires = "p95")]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) prices: PriceArgs,

    /// Search, but do not save a profile
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Write all trials as an HTML page with a plot
    #[arg(long, value_name = "FILE.html")]
    pub(crate) page: Option<PathBuf>,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) rows: RowArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    #[command(flatten)]
    pub(crate) s3: S3Args,
}

const TUNE_HELP: &str = "\
Searches batch size, sessions and their threads, threads for decoding, images in flight and the wait for a
batch by successive halving. Settings from the configuration or flags stay fixed. With --price it minimises
cost, otherwise it maximises throughput. A gain within the noise of the measurement is not saved.

classify, serve and workers use the saved settings for this model on a machine of this kind.

Exit codes: 0 done, also if the defaults are kept, 2 usage, 3 no trial meets --p95.";

#[derive(Debug, Args)]
#[command(after_help = PLAN_HELP)]
pub(crate) struct PlanArgs {
    /// Images to classify per second
    #[arg(long, value_name = "N", value_parser = rate)]
    pub(crate) rate: Option<f64>,

    /// Latency target of 95 % of requests, such as 120ms. Without it the plan is for a job, which
    /// only has a rate
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) p95: Option<Duration>,

    /// Measurements of trommel bench
    #[arg(long, value_name = "FILE.json", required_unless_present = "service")]
    pub(crate) from: Option<PathBuf>,

    /// Time of a batch by its size, such as b1=18,b2=20,b4=24,b8=32; in milliseconds, or with a unit
    #[arg(long, value_name = "TIMES")]
    pub(crate) service: Option<Service>,

    /// Fixed overhead of an image, such as 10ms
    #[arg(long, value_name = "TIME", value_parser = seconds_argument, default_value = "0ms")]
    pub(crate) other: f64,

    /// Time to decode and resize an image on one core. Default: as measured
    #[arg(long, value_name = "TIME", value_parser = seconds_argument)]
    pub(crate) prepare: Option<f64>,

    /// Bytes of a tensor. Default: as measured
    #[arg(long, value_name = "BYTES")]
    pub(crate) tensor_bytes: Option<NonZeroUsize>,

    /// Encoded bytes of an image. Default: as measured
    #[arg(long, value_name = "BYTES")]
    pub(crate) image_bytes: Option<NonZeroUsize>,

    /// Tensors per second that one stream of the broker carries. Default: as measured
    #[arg(long, value_name = "N", value_parser = rate)]
    pub(crate) broker: Option<f64>,

    /// How tensors travel from preprocess to infer
    #[arg(long, value_enum, default_value_t = PlanHop::Jetstream)]
    pub(crate) hop: PlanHop,

    /// Streams for tensors, each on a broker of its own. Default: as many as are needed
    #[arg(long, value_name = "N")]
    pub(crate) streams: Option<NonZeroUsize>,

    /// Sessions of the model. Default: as many as are needed
    #[arg(long, value_name = "N")]
    pub(crate) instances: Option<NonZeroUsize>,

    /// Sessions per process of the role infer. Default: as measured, else 1
    #[arg(long, value_name = "N")]
    pub(crate) instances_each: Option<NonZeroUsize>,

    /// Cores that decode and resize. Default: as many as are needed
    #[arg(long, value_name = "N")]
    pub(crate) cores: Option<NonZeroUsize>,

    /// Images in a full batch. Default: the best value found
    #[arg(long, value_name = "N")]
    pub(crate) max_batch: Option<NonZeroUsize>,

    /// Longest time that a batch waits to fill. Default: the best value found
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) max_wait: Option<Duration>,

    /// Distribution of arrivals
    #[arg(long, value_enum, default_value_t = ArrivalArg::Poisson)]
    pub(crate) arrivals: ArrivalArg,

    /// Seed of the simulation
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) prices: PriceArgs,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const PLAN_HELP: &str = "\
Runs no model: it simulates the pipeline by discrete events, with the times that you give or that trommel bench
measured. The same arguments give the same plan.

Exit codes: 0 a plan was found, 2 usage, 3 no plan meets the latency or the rate.";

/// How tensors get from preprocess to infer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlanHop {
    /// Through the broker, so that both roles scale independently
    Jetstream,
    /// Both roles in one process
    Local,
}

/// Distribution of arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArrivalArg {
    /// Random and independent of each other
    Poisson,
    /// At equal intervals
    Constant,
}

/// An amount of money above 0.
pub(super) fn amount(text: &str) -> Result<f64, String> {
    match text.strip_prefix('$').unwrap_or(text).parse::<f64>() {
        Ok(amount) if amount > 0.0 && amount.is_finite() => Ok(amount),
        _ => Err("give an amount above 0, such as 25".to_owned()),
    }
}

/// A time above 0.
fn time(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("give a time above 0 with its unit, such as 120ms".to_owned()),
    }
}

/// A rate above 0.
pub(super) fn rate(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix("/s").unwrap_or(text);
    match number.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err("give a number a second above 0, such as 500".to_owned()),
    }
}
