//! Arguments of the commands that look ahead: `plan`, and what others say of costs.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use trommel_types::Price;

use crate::hub::ModelName;
use crate::plan::{Service, seconds_argument};

use super::{RowArgs, S3Args, TuningArgs};

/// What things cost the user.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Costs")]
pub(crate) struct PriceArgs {
    /// What you pay, such as infer=2.10/h,preprocess=0.04/core-h,s3-get=0.0004/1000. Of roles, broker
    /// and machine for an h or a core-h; of s3-get and s3-put for a number of requests; of read and
    /// write for a gb; of input-tokens and output-tokens for M, a million, in dry runs of a prompt
    #[arg(long = "price", value_name = "PRICES", value_delimiter = ',')]
    pub(crate) prices: Vec<Price>,
}

#[derive(Debug, Args)]
#[command(after_help = BENCH_HELP)]
pub(crate) struct BenchArgs {
    /// Images like yours: what classify takes, but standard input
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<String>,

    /// Model directory, or hf:ORGANISATION/NAME; with --against the name that requests have for it
    #[arg(short, long, value_name = "MODEL", env = "TROMMEL_MODEL")]
    pub(crate) model: Option<String>,

    /// Images that are taken, chosen evenly by a hash of their names
    #[arg(long, value_name = "N", default_value = "512")]
    pub(crate) images: NonZeroUsize,

    /// Sizes of batches that are measured
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32"
    )]
    pub(crate) batches: Vec<NonZeroUsize>,

    /// NATS server through which tensors are sent too, by streams that are removed afterwards
    #[arg(long, value_name = "URL", conflicts_with = "against")]
    pub(crate) nats: Option<String>,

    /// Server that is asked instead: http://HOST:PORT, or nats://HOST:PORT
    #[arg(long, value_name = "URL")]
    pub(crate) against: Option<String>,

    /// Requests a second, one load after the other, such as 20,50,100
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = rate, requires = "against")]
    pub(crate) rates: Vec<f64>,

    /// How requests come
    #[arg(long, value_enum, default_value_t = ArrivalArg::Poisson, requires = "against")]
    pub(crate) arrivals: ArrivalArg,

    /// For how long each load is measured
    #[arg(
        long,
        value_name = "TIME",
        default_value = "20s",
        value_parser = humantime::parse_duration,
        requires = "against"
    )]
    pub(crate) duration: Duration,

    /// For how long requests come before it counts
    #[arg(
        long,
        value_name = "TIME",
        default_value = "2s",
        value_parser = humantime::parse_duration,
        requires = "against"
    )]
    pub(crate) warm_up: Duration,

    /// Time within which an answer is of use
    #[arg(
        long,
        value_name = "TIME",
        default_value = "120ms",
        value_parser = humantime::parse_duration,
        requires = "against"
    )]
    pub(crate) deadline: Duration,

    /// Of the times at which requests come: another course of the same kind
    #[arg(long, value_name = "N", default_value_t = 0, requires = "against")]
    pub(crate) seed: u64,

    /// Write the measures as JSON, for trommel plan --from
    #[arg(short, long, value_name = "FILE.json")]
    pub(crate) output: Option<PathBuf>,

    /// Write them as one page with plots
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
Each stage runs alone with as many threads as in the pipeline, then all of them. The limit is the rate of
the slowest part; parts that share the processor take turns.

Requests are sent when they are due, whatever became of the ones before, and count from then on, so that a
server that falls behind shows it. A token is taken from TROMMEL_SERVE_TOKEN.";

#[derive(Debug, Args)]
#[command(after_help = TUNE_HELP)]
pub(crate) struct TuneArgs {
    /// Images like yours: what classify takes, but standard input
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) sources: Vec<String>,

    /// Model directory, or hf:ORGANISATION/NAME
    #[arg(short, long, value_name = "MODEL", env = "TROMMEL_MODEL")]
    pub(crate) model: ModelName,

    /// Images that settings are compared with at the end, chosen evenly by a hash of their names; a ninth
    /// of them at first
    #[arg(long, value_name = "N", default_value = "512")]
    pub(crate) images: NonZeroUsize,

    /// Time within which 95 % of requests are to be answered, such as 120ms, at the rate of --rate
    #[arg(long, value_name = "TIME", value_parser = time, requires = "rate")]
    pub(crate) p95: Option<Duration>,

    /// Requests a second at which --p95 has to hold
    #[arg(long, value_name = "N", value_parser = rate, requires = "p95")]
    pub(crate) rate: Option<f64>,

    /// For how long requests come at the end; a ninth of it at first
    #[arg(
        long,
        value_name = "TIME",
        default_value = "9s",
        value_parser = time,
        requires = "p95"
    )]
    pub(crate) duration: Duration,

    /// Of the times at which requests come: another course of the same kind
    #[arg(long, value_name = "N", default_value_t = 0, requires = "p95")]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) prices: PriceArgs,

    /// Search, and keep nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Write what was tried as one page with a plot
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
Batch, sessions and their threads, threads that prepare, images held and the wait for a batch are searched by
successive halving; what is configured or given as a flag stays. With --price the aim is the least cost, else
the most throughput. What is no faster than the defaults beyond the noise is not taken.

classify, serve and workers take the settings for the model on such a machine by themselves.

Exit codes: 0 done, also where the defaults stay, 3 nothing that was tried keeps --p95, 2 usage.";

#[derive(Debug, Args)]
#[command(after_help = PLAN_HELP)]
pub(crate) struct PlanArgs {
    /// Images a second that are to be classified
    #[arg(long, value_name = "N", value_parser = rate)]
    pub(crate) rate: Option<f64>,

    /// Time within which 95 % of requests are to be answered, such as 120ms. Without it the plan is
    /// that of a job, which only has a rate
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) p95: Option<Duration>,

    /// What trommel bench has measured
    #[arg(long, value_name = "FILE.json", required_unless_present = "service")]
    pub(crate) from: Option<PathBuf>,

    /// Time of a batch by its size, such as b1=18,b2=20,b4=24,b8=32; in milliseconds, or with a unit
    #[arg(long, value_name = "TIMES")]
    pub(crate) service: Option<Service>,

    /// Time that an image takes in addition, whatever the load, such as 10ms
    #[arg(long, value_name = "TIME", value_parser = seconds_argument, default_value = "0ms")]
    pub(crate) other: f64,

    /// Time that a core takes to decode and resize an image. Default: as measured
    #[arg(long, value_name = "TIME", value_parser = seconds_argument)]
    pub(crate) prepare: Option<f64>,

    /// Bytes of a tensor. Default: as measured
    #[arg(long, value_name = "BYTES")]
    pub(crate) tensor_bytes: Option<NonZeroUsize>,

    /// Encoded bytes of an image. Default: as measured
    #[arg(long, value_name = "BYTES")]
    pub(crate) image_bytes: Option<NonZeroUsize>,

    /// Tensors a second that one stream of the broker carries. Default: as measured
    #[arg(long, value_name = "N", value_parser = rate)]
    pub(crate) broker: Option<f64>,

    /// Way of tensors from preprocess to infer
    #[arg(long, value_enum, default_value_t = PlanHop::Jetstream)]
    pub(crate) hop: PlanHop,

    /// Streams for tensors, each on a broker of its own. Default: as many as are needed
    #[arg(long, value_name = "N")]
    pub(crate) streams: Option<NonZeroUsize>,

    /// Sessions of the model. Default: as many as are needed
    #[arg(long, value_name = "N")]
    pub(crate) instances: Option<NonZeroUsize>,

    /// Sessions that one process of the role infer holds. Default: as measured, else 1
    #[arg(long, value_name = "N")]
    pub(crate) instances_each: Option<NonZeroUsize>,

    /// Cores that decode and resize. Default: as many as are needed
    #[arg(long, value_name = "N")]
    pub(crate) cores: Option<NonZeroUsize>,

    /// Images in a full batch. Default: what serves best
    #[arg(long, value_name = "N")]
    pub(crate) max_batch: Option<NonZeroUsize>,

    /// Longest time that a batch waits to fill. Default: what serves best
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) max_wait: Option<Duration>,

    /// How requests come
    #[arg(long, value_enum, default_value_t = ArrivalArg::Poisson)]
    pub(crate) arrivals: ArrivalArg,

    /// Of the simulation: another course of the same kind
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) prices: PriceArgs,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const PLAN_HELP: &str = "\
Nothing is run: a discrete-event model of the pipeline is simulated with the times that you give or that
trommel bench has measured. The same arguments give the same plan.

Exit codes: 0 there is a plan, 3 nothing that was tried keeps the time or the rate, 2 usage.";

/// How tensors get from preprocess to infer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlanHop {
    /// Through the broker, so that both roles scale apart
    Jetstream,
    /// Both roles in one process
    Local,
}

/// How requests come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArrivalArg {
    /// At random, independently of each other
    Poisson,
    /// At equal distances
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
