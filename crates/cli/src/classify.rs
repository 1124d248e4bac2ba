use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use trommel_sink::{Format, JobRecord, Opened, Output, Reuse, Summary};
use trommel_source::{Source, open_source};
use trommel_types::{JobOptions, problem_of_token_prices};
use trommel_worker::{
    EmbeddedJob, EmbeddedModel, Ended, Images, Progress, Readiness, Sinks, WorkerError,
};

use crate::args::{ClassifyArgs, SourceArgs};
use crate::config::Config;
use crate::exit::{Exit, Usage, warn_in_red};
use crate::forecast::{self, Limits, Spending, problem_of_costs};
use crate::job_models::{self, ModelRows};
use crate::progress_bar::{Bar, LogWriter};
use crate::summary::{self, ModelReport, Report, Run};
use crate::telemetry::Telemetry;
use crate::{cascade, shutdown};

/// Size of a dry run's sample.
const DRY_RUN_IMAGES: u64 = 512;

/// `trommel classify`: opens and checks everything, then runs all roles in this process.
pub(crate) fn run(
    args: ClassifyArgs,
    mut config: Config,
    onnxruntime: Option<&Path>,
    telemetry: &Telemetry,
) -> Result<Exit> {
    let started = Instant::now();
    let runtime = crate::runtime::on_threads(2)?;
    // Before anything is opened, so that no signal arrives without a handler.
    let stop = runtime.block_on(async {
        telemetry.health.watch();
        shutdown::on_signal()
    })?;
    if let Some(problem) = problem_of_costs(&args.prices.prices, args.max_cost, args.dry_run) {
        return Err(anyhow::anyhow!(problem).context(Usage));
    }
    let output = job_models::output(&args, &config, None).context(Usage)?;
    let options = config.source_options(&args.source.job_options());
    let source = open_source(&args.sources, &options).context(Usage)?;
    let models = job_models::open(&args, &mut config, source.as_ref(), onnxruntime);
    let models = models.context(Usage)?;
    let to_s3 = args
        .output
        .as_ref()
        .is_some_and(|to| to.starts_with("s3://"));
    if args.dry_run {
        let whole = Whole {
            source,
            output: output.as_ref(),
            to_s3,
            started,
        };
        return dry_run(&args, config, &runtime, whole, models, &stop);
    }

    let outputs = open_outputs(&args, models, source.as_ref());
    let mut outputs = runtime.block_on(outputs).context(Usage)?;
    if outputs.models.is_empty() {
        return Report::complete(outputs.complete).show(&args);
    }
    let images = match outputs.sinks.as_mut_slice() {
        [sink] if sink.job().adds() => {
            Images::New(runtime.block_on(sink.existing()).context(Usage)?)
        }
        [sink] if args.retry_failed.is_some() => {
            Images::Failed(runtime.block_on(sink.failed_images()).context(Usage)?)
        }
        _ => Images::Missing,
    };
    let Outputs {
        models,
        sinks,
        complete,
    } = outputs;
    let places = models.iter().map(|model| model.output.clone()).collect();
    let job = EmbeddedJob {
        source,
        models: start(models, &config)?,
        rows: args
            .rows
            .options(config.preprocess.reference)
            .context(Usage)?,
        rule: None,
        config,
        max_failure_rate: args.max_failure_rate,
    };

    let progress = Arc::new(Progress::default());
    let spending = Spending::new(&args.prices.prices, &job.config, to_s3);
    let mut run = Run::of(&job, &progress, started, spending);
    let cache = job.config.infer.cache.as_deref();
    run.forecast = cache.and_then(|cache| forecast::recall(cache, &key(&job.models)));
    let limits = Limits::new(args.max_runtime, args.max_cost);
    let readiness = Readiness::default();
    readiness.begin();
    telemetry.health.has(readiness);
    let watch = async { limits.watch(started, &run.spending, &progress, &stop) };
    let watched = runtime.block_on(watch);
    let ended = match &output {
        Some(output) if args.agree.is_some() => {
            let work = (sinks, images);
            let ended = cascade::run(&runtime, &args, output, job, work, &progress, stop);
            ended.map(|(ended, sinks, known)| {
                run.cascade = known;
                (ended, sinks)
            })
        }
        _ => runtime.block_on(work(job, (sinks, images), &progress, &args, stop)),
    };
    drop(watched);
    let rows = (complete, places);
    let reported = report(ended, &args, output.as_ref(), rows, &run, &limits);
    let reported = runtime.block_on(reported);
    // A listing may still be blocked on standard input; it has no state to keep.
    runtime.shutdown_background();
    reported
}

/// Starts the models, one after the other.
fn start(models: Vec<ModelRows>, config: &Config) -> Result<Vec<EmbeddedModel>> {
    let started = models.into_iter().map(|model| model.start(config));
    started.collect::<Result<_>>().context(Usage)
}

/// The name under which the forecast of a job is kept.
fn key(models: &[EmbeddedModel]) -> String {
    let hashes = models.iter().map(|model| model.record.spec_hash.as_str());
    hashes.collect::<Vec<_>>().join("-")
}

/// What is left to do, and the rows that are complete.
#[derive(Default)]
struct Outputs {
    models: Vec<ModelRows>,
    /// One for each of the models; none for standard output.
    sinks: Sinks,
    complete: Vec<ModelReport>,
}

/// Opens the output of each model.
async fn open_outputs(
    args: &ClassifyArgs,
    models: Vec<ModelRows>,
    source: &dyn Source,
) -> Result<Outputs> {
    let mut outputs = Outputs::default();
    for mut model in models {
        if let Some(output) = &model.output {
            match open_output(args, output, &model.record, source).await? {
                Opened::Ready(sink) => {
                    model.record = sink.job().clone();
                    outputs.sinks.push(sink);
                }
                Opened::Complete(summary) => {
                    let report = ModelReport::complete(*summary, output);
                    outputs.complete.push(report);
                    continue;
                }
            }
        }
        outputs.models.push(model);
    }
    Ok(outputs)
}

/// Opens the output. Complete results must cover every image that the source lists now.
async fn open_output(
    args: &ClassifyArgs,
    output: &Output,
    record: &JobRecord,
    source: &dyn Source,
) -> Result<Opened> {
    let reuse = match args.overwrite {
        true => Reuse::Overwrite,
        false => Reuse::Resume,
    };
    let opened = output.open_alone(record.clone(), reuse).await?;
    if let Opened::Complete(summary) = &opened
        && is_countable(args)
    {
        no_more_than(summary.images, source.count().await?, output)?;
    }
    Ok(opened)
}

/// The job that a dry run estimates.
struct Whole<'a> {
    source: Arc<dyn Source>,
    output: Option<&'a Output>,
    to_s3: bool,
    started: Instant,
}

/// Classifies a sample without storing rows, and estimates the whole job.
fn dry_run(
    args: &ClassifyArgs,
    config: Config,
    runtime: &Runtime,
    whole: Whole<'_>,
    models: Vec<ModelRows>,
    stop: &CancellationToken,
) -> Result<Exit> {
    if args.sources.iter().any(|spec| spec == "-") {
        let error = anyhow::anyhow!(
            "--dry-run lists the images twice, so it cannot read standard input; give the list as a file"
        );
        return Err(error.context(Usage));
    }
    let asked: Vec<_> = models.iter().map(|model| model.opened.asked()).collect();
    if let Some(problem) = problem_of_token_prices(&args.prices.prices)
        && asked.iter().all(Option::is_none)
    {
        return Err(anyhow::anyhow!("--price: {problem}").context(Usage));
    }
    let sample = args.source.sample.unwrap_or(u64::MAX).min(DRY_RUN_IMAGES);
    let settings = config.clone();
    let open = |sample| {
        let options = settings.source_options(&JobOptions {
            sample: Some(sample),
            ..args.source.job_options()
        });
        Ok(open_source(&args.sources, &options)?)
    };
    let source = open(sample).context(Usage)?;
    let rows = args
        .rows
        .options(config.preprocess.reference)
        .context(Usage)?;
    let cache = config.infer.cache.clone();
    let job = EmbeddedJob {
        source,
        models: start(models, &config)?,
        rows,
        rule: None,
        config,
        max_failure_rate: None,
    };
    let key = key(&job.models);
    let terms = forecast::Terms {
        source: whole.source.as_ref(),
        open: &open,
        prices: &args.prices.prices,
        format: whole.output.map_or(Format::Jsonl, Output::format),
        to_s3: whole.to_s3,
        started: whole.started,
        asked,
    };
    let (expected, run) = forecast::dry_run(runtime, job, &terms, stop)?;
    if let Some(cache) = cache {
        forecast::keep(&cache, &key, &expected.forecast());
    }
    expected.show(&run, args.json)?;
    Ok(Exit::Success)
}

/// Whether the source can be listed a second time to count the images: standard input cannot.
fn is_countable(args: &ClassifyArgs) -> bool {
    args.retry_failed.is_none() && !args.sources.iter().any(|spec| spec == "-")
}

/// Refuses to call results complete if the source lists images that they lack.
fn no_more_than(rows: u64, listed: u64, results: &Output) -> Result<()> {
    if listed > rows {
        bail!(
            "the source lists {listed} images, but the finished results in {results} have rows for {rows}; add rows for new images with --skip-existing, or classify all again with --overwrite"
        );
    }
    Ok(())
}

/// Runs the job with its progress bar, until `stop` fires. Returns the sinks, so that the job can be
/// finished.
async fn work(
    job: EmbeddedJob,
    (sinks, images): (Sinks, Images),
    progress: &Arc<Progress>,
    args: &ClassifyArgs,
    stop: CancellationToken,
) -> Result<(Ended, Sinks)> {
    let counted = is_countable(args).then(|| Arc::clone(&job.source));
    let _bar = Bar::show(progress, counted, job.models.len(), args.quiet);
    let progress = Arc::clone(progress);
    Ok(match sinks.is_empty() {
        true => job.into_stream(io::stdout(), progress, stop).await?,
        false => job.into_output(sinks, images, progress, stop).await?,
    })
}

async fn report(
    ended: Result<(Ended, Sinks)>,
    args: &ClassifyArgs,
    output: Option<&Output>,
    (mut rows, places): (Vec<ModelReport>, Vec<Option<Output>>),
    run: &Run,
    limits: &Limits,
) -> Result<Exit> {
    let (ended, sinks) = match ended {
        Ok(ended) => ended,
        Err(error) => {
            // The failures so far matter most when the job could not finish.
            if let Some(WorkerError::TooManyFailures { .. }) = error.downcast_ref() {
                summary::print_failures(run, &mut LogWriter)?;
            }
            return Err(error.context(run.committed_words(output)));
        }
    };
    if let (Ended::Stopped, Some(reason)) = (ended, limits.passed()) {
        bail!("{reason}; {}", run.committed_words(output));
    }
    if ended == Ended::Stopped {
        bail!("stopped before the end; {}", run.committed_words(output));
    }
    // Leaves the job unfinished: the same command may find images later.
    if run.progress.total() == Some(0) && !run.adds {
        bail!("the source holds no images; nothing was classified");
    }
    for ((sink, place), engine) in sinks.into_iter().zip(places).zip(&run.engines) {
        let summary = sink.finish().await?;
        rows.push(ModelReport::of_run(
            summary,
            place.as_ref(),
            engine,
            run.adds,
        ));
    }
    Report::of_run(rows, run).show(args)
}

impl SourceArgs {
    /// The options in the form of a job request.
    pub(crate) fn job_options(&self) -> JobOptions {
        JobOptions {
            suffixes: self.suffixes.clone(),
            min_size: self.min_size,
            max_size: self.max_size,
            sample: self.sample,
            sample_seed: self.sample_seed,
            uri_column: self.uri_column.clone(),
            base: self.base.clone(),
            image_column: self.image_column.clone(),
            fps: self.fps,
            ..JobOptions::default()
        }
    }
}

impl Report {
    /// Prints the report as the flags request and returns the exit code.
    fn show(&self, args: &ClassifyArgs) -> Result<Exit> {
        if args.json {
            let text = serde_json::to_string_pretty(self).context("failed to write the summary")?;
            if args.output.as_deref().is_some_and(|output| output != "-") {
                writeln!(io::stdout(), "{text}")?;
            } else {
                writeln!(io::stderr(), "{text}")?;
            }
        } else if !args.quiet {
            write!(io::stderr(), "{self}")?;
        }
        let mut failed = 0;
        let mut all_failed = false;
        for Summary {
            images,
            ok,
            failed: some,
            ..
        } in self.summaries()
        {
            failed += some;
            if *ok > 0 || *some == 0 {
                continue;
            }
            all_failed = true;
            if !args.json {
                let all = match images {
                    1 => "the only image".to_owned(),
                    images => format!("all {images} images"),
                };
                warn_in_red(&format!("{all} failed, so the exit code is 3"))?;
            }
        }
        if failed > 0 && !all_failed && !args.fail_on_error && !args.json && !args.quiet {
            writeln!(
                io::stderr(),
                "  with --fail-on-error the exit code would be 3"
            )?;
        }
        let is_failure = all_failed || (args.fail_on_error && failed > 0);
        Ok(match is_failure {
            true => Exit::Failed,
            false => Exit::Success,
        })
    }
}
