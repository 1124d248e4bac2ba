//! `trommel bench`: the speed of each stage, of the whole pipeline, and of a server under load.

mod hops;
mod load;
mod measures;
mod page;
mod show;
mod spread;
mod stages;
mod target;
mod whole;

use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use serde::Serialize;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use trommel_infer::Engine;
use trommel_sink::{Format, Summary};
use trommel_source::{FetchLimits, Source, open_source};
use trommel_types::{JobModel, JobOptions, JobRequest, JobSpec};
use trommel_worker::{
    EmbeddedJob, EmbeddedModel, Images, Progress, TrialOutcome, TrialSink, engine_options,
    machine_name,
};

use crate::args::BenchArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::hub::ModelName;
use crate::model::{self, OpenedModel};

use self::measures::{Machine, MeasuredModel, Sample, VERSION};
use self::whole::Parts;

pub(crate) use self::load::{Answer, Load, Schedule, Target, drive};
pub(crate) use self::measures::{Measures, Spread};
pub(crate) use self::page::fill;
pub(crate) use self::stages::fetch;

/// The result: measurements of stages, or of a server.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Found {
    Stages(Box<Measures>),
    Server(ServerLoad),
}

/// A server under load.
#[derive(Debug, Serialize)]
pub(crate) struct ServerLoad {
    pub(crate) against: String,
    pub(crate) model: String,
    pub(crate) arrivals: &'static str,
    pub(crate) loads: Vec<Load>,
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs, config: Config, onnxruntime: Option<&Path>) -> Result<Exit> {
    refuse_standard_input("bench", &args.sources)?;
    let runtime = crate::runtime::on_threads(2)?;
    let options = config.source_options(&JobOptions {
        sample: Some(args.images.get() as u64),
        ..JobOptions::default()
    });
    let source = open_source(&args.sources, &options).context(Usage)?;
    let found = match &args.against {
        Some(address) => Found::Server(server(&runtime, args, &config, source.as_ref(), address)?),
        None => Found::Stages(Box::new(all_stages(
            &runtime,
            args,
            config,
            source,
            onnxruntime,
        )?)),
    };
    let text = serde_json::to_string_pretty(&found).context("failed to write JSON")?;
    if let Some(path) = &args.output {
        write(path, text.as_bytes())?;
    }
    if let Some(path) = &args.page {
        write(path, page::render(&found)?.as_bytes())?;
    }
    let mut out = io::stdout().lock();
    match args.json {
        true => writeln!(out, "{text}")?,
        false => write!(out, "{found}")?,
    }
    Ok(Exit::Success)
}

pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).with_context(|| format!("failed to write {}", path.display()))
}

pub(crate) fn fetch_limits(config: &Config) -> FetchLimits {
    FetchLimits {
        bytes: config.preprocess.limits().max_bytes,
        time: config.preprocess.fetch_timeout,
    }
}

/// Each stage alone, then the pipeline.
fn all_stages(
    runtime: &Runtime,
    args: &BenchArgs,
    config: Config,
    source: Arc<dyn Source>,
    onnxruntime: Option<&Path>,
) -> Result<Measures> {
    let Some(name) = &args.model else {
        return Err(anyhow::anyhow!("name the model's directory with --model").context(Usage));
    };
    let quiet = trommel_worker::Quiet::begin();
    let name: ModelName = name
        .parse()
        .map_err(|error| anyhow::anyhow!("--model: {error}").context(Usage))?;
    let dir = name.folder(None, true).context(Usage)?;
    let rows = args
        .rows
        .options(config.preprocess.reference)
        .context(Usage)?;
    let opened = model::open(&dir, &config, &rows, onnxruntime).context(Usage)?;
    let reads = config.preprocess.in_flight();
    let fetched = runtime.block_on(stages::fetch(source.as_ref(), fetch_limits(&config), reads))?;
    let threads = config.preprocess.threads();
    let limits = config.preprocess.limits();
    let prepared = stages::prepare(&fetched.images, &opened.plan, limits, rows.mode, threads)?;
    let instances = config.infer.instances();
    let sizes: Vec<_> = args.batches.iter().map(|size| size.get()).collect();
    let compute = stages::compute(&opened.model, instances, &sizes)?;
    let mut hops = vec![runtime.block_on(hops::local(&prepared.tensor))?];
    if let Some(url) = &args.nats {
        let broker = trommel_queue::BrokerConfig {
            url: url.clone(),
            ..config.broker.clone()
        };
        let hop = runtime.block_on(hops::jetstream(&broker, &prepared.tensor));
        hops.push(hop.context(Usage)?);
    }
    let machine = machine_name(&opened.model);
    let measured = MeasuredModel {
        name: opened.model.name().to_string(),
        version: opened.model.version().to_string(),
        device: opened.model.devices().to_string(),
        instances,
        intra_threads: config.infer.intra_threads(),
        max_batch: 0, // known once the engine has started
    };
    let is_gpu = opened.model.devices().first().is_gpu();
    let count = fetched.images.len();
    let bytes: usize = fetched.images.iter().map(|(_, bytes)| bytes.len()).sum();
    let sample = Sample {
        images: count,
        failed: fetched.failed + prepared.failed,
        image_bytes: bytes as f64 / count as f64,
        tensor_bytes: prepared.tensor.pixels.len(),
    };
    let cores = std::thread::available_parallelism().map_or(1, Into::into);
    let model_threads = (!is_gpu).then_some(instances * measured.intra_threads);
    let piped = pipeline(runtime, config, source, opened, rows)?;
    let [decode, resize] = prepared.stages;
    let stages = vec![fetched.stage, decode, resize];
    let parts = Parts {
        stages: &stages,
        compute: &compute,
        prepared: prepared.images_per_second,
        model_threads,
        preprocess_threads: threads,
        cores,
        max_batch: piped.max_batch,
    };
    let pipeline = parts.compare(piped.images, piped.seconds, piped.rate);
    Ok(Measures {
        version: VERSION,
        machine: Machine {
            name: machine,
            cores,
            others: quiet.others(),
        },
        model: MeasuredModel {
            max_batch: piped.max_batch,
            ..measured
        },
        sample,
        stages,
        compute,
        hops,
        pipeline,
    })
}

/// The result of the pipeline.
pub(crate) struct Piped {
    images: u64,
    seconds: f64,
    /// Images per second, without the start.
    pub(crate) rate: f64,
    max_batch: usize,
}

/// All roles in this process; rows are counted and discarded.
pub(crate) fn pipeline(
    runtime: &Runtime,
    config: Config,
    source: Arc<dyn Source>,
    opened: OpenedModel,
    rows: trommel_types::RowOptions,
) -> Result<Piped> {
    let batches = engine_options(&opened.model, &config.infer)?;
    let model = JobModel {
        name: opened.model.name().to_string(),
        version: opened.model.version().to_string(),
    };
    let spec = JobSpec {
        request: JobRequest {
            id: uuid::Uuid::now_v7().to_string(),
            rows: rows.clone(),
            ..JobRequest::default()
        },
        run: trommel_sink::JobRecord::new_run(),
        source: source.describe(),
        columns: source.columns().to_vec(),
        models: vec![model.clone()],
        ..JobSpec::default()
    };
    let record = trommel_worker::job_record(&spec, &model);
    let engine = Arc::new(Engine::start(opened.model, batches)?);
    let max_batch = engine.stats().max_batch;
    let outcome = TrialOutcome::default();
    let sink = TrialSink::new(record.clone(), Format::Parquet, &[], Arc::clone(&outcome));
    let model = EmbeddedModel {
        plan: opened.plan,
        also: None,
        engine,
        record,
    };
    let job = EmbeddedJob {
        source,
        models: vec![model],
        rows,
        rule: None,
        config,
        max_failure_rate: None,
    };
    let (progress, start) = (Arc::new(Progress::default()), Instant::now());
    let never = CancellationToken::new();
    let ended = job.into_output(
        vec![Box::new(sink)],
        Images::Missing,
        Arc::clone(&progress),
        never,
    );
    let (_, mut sinks) = runtime.block_on(ended)?;
    let seconds = start.elapsed().as_secs_f64();
    let sink = sinks.pop().context("the sample has no rows")?;
    let summary = runtime.block_on(sink.finish())?;
    let trial = *outcome.lock().unwrap_or_else(PoisonError::into_inner);
    let trial = trial.filter(|_| summary.ok > 0);
    let trial = trial.with_context(|| nothing_measured(&summary))?;
    Ok(Piped {
        images: trial.images,
        seconds,
        rate: 1.0 / trial.seconds_each,
        max_batch,
    })
}

/// Why a sample gives no rate.
fn nothing_measured(summary: &Summary) -> String {
    let (source, images) = (&summary.source, summary.images);
    let failure = summary.failures.values().next();
    match failure.filter(|_| summary.ok == 0) {
        Some(failure) => format!(
            "none of the {images} images of {source} that were tried could be classified; of {}: {}",
            failure.example, failure.error
        ),
        None if images == 0 => format!("{source} holds no images: name a source that does"),
        None => format!(
            "{source} gave {images} images, which is too few to measure the pipeline: name more"
        ),
    }
}

/// Refuses standard input, which can be read only once.
pub(crate) fn refuse_standard_input(command: &str, sources: &[String]) -> Result<()> {
    if sources.iter().all(|source| source != "-") {
        return Ok(());
    }
    let error = anyhow::anyhow!(
        "{command} reads its images several times, and standard input comes but once: write the list into a file and name that"
    );
    Err(error.context(Usage))
}

/// A server under load, one rate after another.
fn server(
    runtime: &Runtime,
    args: &BenchArgs,
    config: &Config,
    source: &dyn Source,
    address: &str,
) -> Result<ServerLoad> {
    let usage = |words: &str| anyhow::anyhow!("{words}").context(Usage);
    let Some(model) = args.model.clone() else {
        return Err(usage("give the model's name on the server with --model"));
    };
    if args.rates.is_empty() {
        return Err(usage(
            "give the requests per second with --rates, such as --rates 20,50,100",
        ));
    }
    runtime.block_on(async {
        let fetched = stages::fetch(source, fetch_limits(config), config.preprocess.in_flight());
        let images: Vec<Bytes> = fetched
            .await?
            .images
            .into_iter()
            .map(|(_, bytes)| bytes)
            .collect();
        let count = images.len();
        let target = target::open(address, &model, images, &config.broker)
            .await
            .context(Usage)?;
        let mut loads = Vec::new();
        for (number, rate) in args.rates.iter().enumerate() {
            let schedule = |time: Duration| Schedule {
                rate: *rate,
                constant: args.arrivals == crate::args::ArrivalArg::Constant,
                time,
                seed: args.seed.wrapping_add(number as u64),
                ends_early: false,
            };
            // Warms up connections and caches.
            if !args.warm_up.is_zero() {
                let warm = schedule(args.warm_up);
                drive(Arc::clone(&target), count, warm, args.deadline).await?;
            }
            let measured = schedule(args.duration);
            let load = drive(Arc::clone(&target), count, measured, args.deadline).await?;
            if load.ok == 0 && load.refused == 0 {
                let why = load
                    .failures
                    .keys()
                    .next()
                    .map_or("no request was due", |why| why.as_str());
                bail!("{address} answered none of {} requests: {why}", load.sent);
            }
            loads.push(load);
        }
        Ok(ServerLoad {
            against: address.to_owned(),
            model,
            arrivals: match args.arrivals {
                crate::args::ArrivalArg::Poisson => "poisson",
                crate::args::ArrivalArg::Constant => "constant",
            },
            loads,
        })
    })
}
