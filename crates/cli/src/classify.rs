use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use trommel_infer::Wanted;
use trommel_sink::{Format, JobRecord, Opened, Output, ResultSink, Retry, Reuse, Summary};
use trommel_source::{Source, open_source};
use trommel_types::{
    ErrorKind, JobModel, JobOptions, JobRequest, JobSpec, RowOptions, problem_of_token_prices,
};
use trommel_worker::{EmbeddedJob, Ended, Images, Progress, Readiness, WorkerError};

use crate::args::{ClassifyArgs, SourceArgs};
use crate::config::Config;
use crate::exit::{Exit, Usage, warn_in_red};
use crate::forecast::{self, Limits, Spending, problem_of_costs};
use crate::model::{Opened as OpenedFolder, Started};
use crate::progress_bar::{Bar, LogWriter};
use crate::summary::{self, Report, Run};
use crate::telemetry::Telemetry;
use crate::{cascade, model, shutdown};

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
    let destination = destination(&args, &config).context(Usage)?;
    let options = config.source_options(&args.source.job_options());
    let source = open_source(&args.sources, &options).context(Usage)?;
    let dirs = model_dirs(&args).context(Usage)?;
    let rows = args.rows.options(config.preprocess.reference);
    let rows = rows.context(Usage)?;
    if let [dir] = dirs.as_slice() {
        model::take_profile(&mut config, dir);
    }
    let opened = open_models(&args, &dirs, &config, &rows, onnxruntime).context(Usage)?;
    let mut record = record(&args, rows.clone(), source.as_ref(), &opened)?;
    record.retry = retry(&args, destination.as_ref()).context(Usage)?;
    let to = args.output.as_deref().unwrap_or_default();
    let to_s3 = to.starts_with("s3://");
    if args.dry_run {
        let whole = Whole {
            source,
            destination: destination.as_ref(),
            to_s3,
            started,
        };
        let job = (record, rows);
        return dry_run(&args, config, &runtime, whole, opened, job, &stop);
    }

    let mut sink = None;
    if let Some(destination) = &destination {
        let opened = open_output(&args, destination, &record, source.as_ref());
        match runtime.block_on(opened).context(Usage)? {
            Opened::Ready(ready) => sink = Some(ready),
            Opened::Complete(summary) => {
                return Report::complete(*summary, destination).show(&args);
            }
        }
    }
    let images = match &mut sink {
        Some(sink) if sink.job().adds() => {
            Images::New(runtime.block_on(sink.existing()).context(Usage)?)
        }
        Some(sink) if args.retry_failed.is_some() => {
            Images::Failed(runtime.block_on(sink.failed_images()).context(Usage)?)
        }
        _ => Images::Missing,
    };
    let Started { engine, plan, also } = opened.start(&config).context(Usage)?;
    let job = EmbeddedJob {
        source,
        plan,
        also,
        engine: Arc::new(engine),
        record: sink.as_ref().map_or(record, |sink| sink.job().clone()),
        rows,
        rule: None,
        config,
        max_failure_rate: args.max_failure_rate,
    };

    let progress = Arc::new(Progress::default());
    let spending = Spending::new(&args.prices.prices, &job.config, to_s3);
    let mut run = Run::of(&job, &progress, started, spending);
    let cache = job.config.infer.cache.as_deref();
    run.forecast = cache.and_then(|cache| forecast::recall(cache, &job.record.spec_hash));
    let limits = Limits::new(args.max_runtime, args.max_cost);
    let readiness = Readiness::default();
    readiness.begin();
    telemetry.health.has(readiness);
    let watch = async { limits.watch(started, &run.spending, &progress, &stop) };
    let watched = runtime.block_on(watch);
    let ended = match (&destination, sink) {
        (Some(destination), Some(sink)) if job.engine.stages().is_some() => {
            let work = (sink, images);
            let ended = cascade::run(&runtime, &args, destination, job, work, &progress, stop);
            ended.map(|(ended, sink, known)| {
                run.cascade = known;
                (ended, Some(sink))
            })
        }
        (_, sink) => runtime.block_on(work(job, (sink, images), &progress, &args, stop)),
    };
    drop(watched);
    let reported = report(ended, &args, destination.as_ref(), &run, &limits);
    let reported = runtime.block_on(reported);
    // A listing may still be blocked on standard input; it has no state to keep.
    runtime.shutdown_background();
    reported
}

/// Opens the model, or both models of a cascade.
fn open_models(
    args: &ClassifyArgs,
    dirs: &[PathBuf],
    config: &Config,
    rows: &RowOptions,
    onnxruntime: Option<&Path>,
) -> Result<OpenedFolder> {
    let open = |dir: &PathBuf| model::open_any(dir, config, rows, onnxruntime);
    let ([small, large], Some(agree)) = (dirs, args.agree) else {
        return open(&dirs[0]);
    };
    let (small, large) = (open(small)?, open(large)?);
    cascade::check(args, &Wanted::from(rows), [&small, &large])?;
    Ok(OpenedFolder::Cascade(
        Box::new(small),
        Box::new(large),
        agree,
    ))
}

/// Which existing rows the job replaces, or whether it adds rows to them.
fn retry(args: &ClassifyArgs, destination: Option<&Output>) -> Result<Option<Retry>> {
    let Some(kinds) = &args.retry_failed else {
        return Ok(args.skip_existing.then(|| Retry {
            adds: true,
            ..Retry::default()
        }));
    };
    if destination.is_none() {
        bail!(
            "--retry-failed needs stored results; give a file, a folder or a table with --output"
        );
    }
    Ok(Some(Retry {
        kinds: ErrorKind::named(kinds).map_err(anyhow::Error::msg)?,
        ..Retry::default()
    }))
}

/// Opens the output. Complete results must cover every image that the source lists now.
async fn open_output(
    args: &ClassifyArgs,
    destination: &Output,
    record: &JobRecord,
    source: &dyn Source,
) -> Result<Opened> {
    let reuse = match args.overwrite {
        true => Reuse::Overwrite,
        false => Reuse::Resume,
    };
    let opened = destination.open_alone(record.clone(), reuse).await?;
    if let Opened::Complete(summary) = &opened
        && is_countable(args)
    {
        no_more_than(summary.images, source.count().await?, destination)?;
    }
    Ok(opened)
}

/// The job that a dry run estimates.
struct Whole<'a> {
    source: Arc<dyn Source>,
    destination: Option<&'a Output>,
    to_s3: bool,
    started: Instant,
}

/// Classifies a sample without storing rows, and estimates the whole job.
fn dry_run(
    args: &ClassifyArgs,
    config: Config,
    runtime: &Runtime,
    whole: Whole<'_>,
    opened: OpenedFolder,
    (record, rows): (JobRecord, RowOptions),
    stop: &CancellationToken,
) -> Result<Exit> {
    if args.sources.iter().any(|spec| spec == "-") {
        let error = anyhow::anyhow!(
            "--dry-run lists the images twice, so it cannot read standard input; give the list as a file"
        );
        return Err(error.context(Usage));
    }
    if let (None, Some(problem)) = (opened.asked(), problem_of_token_prices(&args.prices.prices)) {
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
    let asked = opened.asked();
    let Started { engine, plan, also } = opened.start(&config).context(Usage)?;
    let (cache, key) = (config.infer.cache.clone(), record.spec_hash.clone());
    let job = EmbeddedJob {
        source,
        plan,
        also,
        engine: Arc::new(engine),
        record,
        rows,
        rule: None,
        config,
        max_failure_rate: None,
    };
    let terms = forecast::Terms {
        source: whole.source.as_ref(),
        open: &open,
        prices: &args.prices.prices,
        format: whole.destination.map_or(Format::Jsonl, Output::format),
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

/// Runs the job with its progress bar, until `stop` fires. Returns the sink, so that the job can be
/// finished.
async fn work(
    job: EmbeddedJob,
    (sink, images): (Option<Box<dyn ResultSink>>, Images),
    progress: &Arc<Progress>,
    args: &ClassifyArgs,
    stop: CancellationToken,
) -> Result<(Ended, Option<Box<dyn ResultSink>>)> {
    let counted = is_countable(args).then(|| Arc::clone(&job.source));
    let _bar = Bar::show(progress, counted, args.quiet);
    let progress = Arc::clone(progress);
    Ok(match sink {
        Some(sink) => {
            let (ended, sink) = job.into_output(sink, images, progress, stop).await?;
            (ended, Some(sink))
        }
        None => (job.into_stream(io::stdout(), progress, stop).await?, None),
    })
}

async fn report(
    ended: Result<(Ended, Option<Box<dyn ResultSink>>)>,
    args: &ClassifyArgs,
    destination: Option<&Output>,
    run: &Run,
    limits: &Limits,
) -> Result<Exit> {
    let (ended, sink) = match ended {
        Ok(ended) => ended,
        Err(error) => {
            // The failures so far matter most when the job could not finish.
            if let Some(WorkerError::TooManyFailures { .. }) = error.downcast_ref() {
                summary::print_failures(run, &mut LogWriter)?;
            }
            return Err(error.context(run.committed_words(destination)));
        }
    };
    if let (Ended::Stopped, Some(reason)) = (ended, limits.passed()) {
        bail!("{reason}; {}", run.committed_words(destination));
    }
    if ended == Ended::Stopped {
        bail!(
            "stopped before the end; {}",
            run.committed_words(destination)
        );
    }
    // Leaves the job unfinished: the same command may find images later.
    if run.progress.total() == Some(0) && !run.adds {
        bail!("the source holds no images; nothing was classified");
    }
    let finished = match sink {
        Some(sink) => sink.finish().await?,
        None => run.summary(),
    };
    Report::of_run(finished, destination, run).show(args)
}

fn destination(args: &ClassifyArgs, config: &Config) -> Result<Option<Output>> {
    let named = args.output.as_deref().filter(|output| *output != "-");
    Ok(named
        .map(|output| Output::parse(output, args.format.into(), &config.s3, &config.postgres))
        .transpose()?)
}

/// The folders of the given models, or of the only one in ./models. Two are a cascade.
fn model_dirs(args: &ClassifyArgs) -> Result<Vec<PathBuf>> {
    match (args.model.as_slice(), args.agree) {
        ([], Some(_)) | ([_], Some(_)) | ([_, _, _, ..], _) => bail!(
            "--agree needs two models; give the small one and the large one, each with --model"
        ),
        ([_, _], None) => bail!(
            "two models form a cascade; give the share of images whose labels must agree with --agree, such as 0.99"
        ),
        ([], None) => Ok(vec![only_model_dir(args)?]),
        (models, _) => {
            let dirs = models.iter();
            dirs.map(|model| model.folder(args.dtype, args.quiet))
                .collect()
        }
    }
}

/// The only model folder in ./models.
fn only_model_dir(args: &ClassifyArgs) -> Result<PathBuf> {
    if args.dtype.is_some() {
        bail!("--dtype chooses a file of a model of the hub; give the model with --model hf:…");
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
        [] => bail!(
            "no model given and none in ./models; give its directory, or hf:ORGANISATION/NAME, with --model"
        ),
        several => {
            let names: Vec<_> = several
                .iter()
                .map(|dir| dir.display().to_string())
                .collect();
            bail!(
                "there are several models; choose one with --model ({})",
                names.join(", ")
            )
        }
    }
}

/// The job as one value, as its output records it.
fn record(
    args: &ClassifyArgs,
    rows: RowOptions,
    source: &dyn Source,
    opened: &OpenedFolder,
) -> Result<JobRecord> {
    let model = JobModel {
        name: opened.name(),
        version: opened.version(),
    };
    let mut answers = BTreeMap::from([(model.name.clone(), opened.columns())]);
    answers.retain(|_, columns| !columns.is_empty());
    let columns = rows.columns(source.columns());
    let columns = columns.map_err(|why| anyhow::anyhow!(why).context(Usage))?;
    let spec = JobSpec {
        request: JobRequest {
            id: uuid::Uuid::now_v7().to_string(),
            rows,
            options: args.source.job_options(),
            ..JobRequest::default()
        },
        run: JobRecord::new_run(),
        source: source.describe(),
        columns,
        models: vec![model.clone()],
        answers,
        ..JobSpec::default()
    };
    Ok(trommel_worker::job_record(&spec, &model))
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
            if self.output.is_some() {
                writeln!(io::stdout(), "{text}")?;
            } else {
                writeln!(io::stderr(), "{text}")?;
            }
        } else if !args.quiet {
            write!(io::stderr(), "{self}")?;
        }
        let Summary {
            images, ok, failed, ..
        } = &self.summary;
        let all_failed = *ok == 0 && *failed > 0;
        if all_failed && !args.json {
            let all = match images {
                1 => "the only image".to_owned(),
                images => format!("all {images} images"),
            };
            warn_in_red(&format!("{all} failed, so the exit code is 3"))?;
        } else if *failed > 0 && !args.fail_on_error && !args.json && !args.quiet {
            writeln!(
                io::stderr(),
                "  with --fail-on-error the exit code would be 3"
            )?;
        }
        let is_failure = all_failed || (args.fail_on_error && *failed > 0);
        Ok(match is_failure {
            true => Exit::Failed,
            false => Exit::Success,
        })
    }
}
