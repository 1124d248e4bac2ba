use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use tokio::runtime::Builder;
use tokio_util::sync::CancellationToken;
use trommel_infer::Engine;
use trommel_storage::{
    Existing, Format, JobRecord, Opened, Output, ResultSink, Reuse, Source, SourceOptions,
    open_source,
};
use trommel_worker::{EmbeddedJob, Ended, Progress, Readiness, WorkerError, engine_options};

use crate::args::{ClassifyArgs, PartFormat, SourceArgs};
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::progress_bar::{Bar, LogWriter};
use crate::summary::{self, Report, Run};
use crate::telemetry::Telemetry;
use crate::{model, shutdown};

/// `trommel classify`: everything is opened and checked first, then all roles run in this process.
pub(crate) fn run(
    args: ClassifyArgs,
    config: Config,
    onnxruntime: Option<&Path>,
    telemetry: &Telemetry,
) -> Result<Exit> {
    let started = Instant::now();
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("failed to start the async runtime")?;
    // Before anything is opened, so that no signal finds a job without its handler.
    let stop = runtime.block_on(async {
        telemetry.health.watch();
        shutdown::on_signal()
    })?;
    let destination = destination(&args, &config).context(Usage)?;
    let options = args.source.options(&config);
    let source = open_source(&args.sources, &options).context(Usage)?;
    let dir = model_dir(args.model.as_deref()).context(Usage)?;
    let opened = model::open(&dir, &config, onnxruntime).context(Usage)?;
    let record = record(&config, source.as_ref(), &opened.model);

    let reuse = match (args.overwrite, args.skip_existing) {
        (true, _) => Reuse::Overwrite,
        (false, true) => Reuse::Extend,
        (false, false) => Reuse::Resume,
    };
    let sink = match &destination {
        None => None,
        Some(destination) => {
            match destination
                .open_alone(record.clone(), reuse)
                .context(Usage)?
            {
                Opened::Ready(sink) => Some(sink),
                Opened::Complete(summary) => {
                    return Report::complete(*summary, destination).show(&args);
                }
            }
        }
    };
    let (sink, existing) = match sink {
        Some(mut sink) if args.skip_existing => {
            let existing = sink.existing().context(Usage)?;
            (Some(sink), Some(existing))
        }
        sink => (sink, None),
    };
    let batches = engine_options(&opened.model, &config.infer).context(Usage)?;
    let engine = Arc::new(Engine::start(opened.model, batches).context(Usage)?);
    let job = EmbeddedJob {
        source,
        plan: opened.plan,
        engine: Arc::clone(&engine),
        record: sink.as_ref().map_or(record, |sink| sink.job().clone()),
        config,
        max_failure_rate: args.max_failure_rate,
    };

    let progress = Arc::new(Progress::default());
    let run = Run {
        source: Arc::clone(&job.source),
        engine,
        progress: Arc::clone(&progress),
        started,
        preprocess_threads: job.config.preprocess.threads(),
    };
    // Standard input can be listed only once, so its images cannot be counted ahead.
    let countable = !args.sources.iter().any(|spec| spec == "-");
    let counted = if countable {
        Some(open_source(&args.sources, &options)?)
    } else {
        None
    };
    let readiness = Readiness::default();
    readiness.begin();
    telemetry.health.has(readiness);
    let ended = runtime.block_on(work(job, (sink, existing), &progress, counted, &args, stop));
    // A listing may still be blocked on standard input; it holds nothing that has to be kept.
    runtime.shutdown_background();
    report(ended, &args, destination.as_ref(), &run)
}

/// Runs the job with its bar, until `stop` fires. Returns the sink for the last word on the job.
async fn work(
    job: EmbeddedJob,
    (sink, existing): (Option<Box<dyn ResultSink>>, Option<Existing>),
    progress: &Arc<Progress>,
    counted: Option<Arc<dyn Source>>,
    args: &ClassifyArgs,
    stop: CancellationToken,
) -> Result<(Ended, Option<Box<dyn ResultSink>>)> {
    let _bar = Bar::show(progress, counted, args.quiet);
    let progress = Arc::clone(progress);
    Ok(match sink {
        Some(sink) => {
            let (ended, sink) = job.into_output(sink, existing, progress, stop).await?;
            (ended, Some(sink))
        }
        None => (job.into_stream(io::stdout(), progress, stop).await?, None),
    })
}

fn report(
    ended: Result<(Ended, Option<Box<dyn ResultSink>>)>,
    args: &ClassifyArgs,
    destination: Option<&Output>,
    run: &Run,
) -> Result<Exit> {
    let (ended, sink) = match ended {
        Ok(ended) => ended,
        Err(error) => {
            // What was done is worth knowing most when the rest could not be.
            if let Some(WorkerError::TooManyFailures { .. }) = error.downcast_ref() {
                summary::print_failures(run, &mut LogWriter)?;
            }
            return Err(error.context(run.committed_words(destination)));
        }
    };
    if ended == Ended::Stopped {
        bail!(
            "stopped before the end; {}",
            run.committed_words(destination)
        );
    }
    // Not finished then: the same command may find some later.
    if run.progress.total() == Some(0) {
        bail!("the source holds no images; nothing was classified");
    }
    let finished = match sink {
        Some(sink) => sink.finish()?,
        None => run.summary(),
    };
    Report::of_run(finished, destination, run).show(args)
}

fn destination(args: &ClassifyArgs, config: &Config) -> Result<Option<Output>> {
    let format = match args.format {
        PartFormat::Parquet => Format::Parquet,
        PartFormat::Jsonl => Format::Jsonl,
        PartFormat::Csv => Format::Csv,
    };
    let named = args.output.as_deref().filter(|output| *output != "-");
    Ok(named
        .map(|output| Output::parse(output, format, &config.s3, &config.postgres))
        .transpose()?)
}

/// The model that was named, or the only one in ./models.
fn model_dir(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(dir) = named {
        return Ok(dir.to_owned());
    }
    let has_model =
        |dir: &PathBuf| dir.join("model.onnx").exists() || dir.join("onnx/model.onnx").exists();
    let mut found: Vec<PathBuf> = Path::new("models")
        .read_dir()
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(has_model)
        .collect();
    found.sort();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => bail!("no model: name its directory with --model (there is none in ./models)"),
        several => {
            let names: Vec<_> = several
                .iter()
                .map(|dir| dir.display().to_string())
                .collect();
            bail!(
                "several models: name one with --model ({})",
                names.join(", ")
            )
        }
    }
}

fn record(config: &Config, source: &dyn Source, model: &trommel_infer::Model) -> JobRecord {
    let micros = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_micros();
    JobRecord {
        job_id: uuid::Uuid::now_v7().to_string(),
        source: source.describe(),
        model: model.name().to_string(),
        model_version: model.version().to_string(),
        options: config.row_options(),
        // The output puts its own here.
        format: Format::Jsonl,
        columns: source.columns().to_vec(),
        logits: config.infer.logits,
        embedding: config.infer.embedding,
        created_at: i64::try_from(micros).unwrap_or(i64::MAX),
    }
}

impl SourceArgs {
    fn options(&self, config: &Config) -> SourceOptions {
        SourceOptions {
            suffixes: self.suffixes.clone(),
            min_size: self.min_size,
            max_size: self.max_size,
            sample: self.sample,
            sample_seed: self.sample_seed,
            uri_column: self.uri_column.clone(),
            image_column: self.image_column.clone(),
            s3: config.s3.clone(),
        }
    }
}

impl Report {
    /// Shows the report where the flags say and gives the exit code.
    fn show(&self, args: &ClassifyArgs) -> Result<Exit> {
        if args.json {
            let text = serde_json::to_string_pretty(self).context("failed to write the summary")?;
            if self.output.is_some() {
                writeln!(io::stdout(), "{text}")?;
            } else {
                writeln!(io::stderr(), "{text}")?;
            }
        } else if !args.quiet {
            write!(io::stderr(), "{self}")?;
        }
        let failed = args.fail_on_error && self.summary.failed > 0;
        Ok(if failed { Exit::Failed } else { Exit::Success })
    }
}
