use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressStyle};
use trommel_queue::Broker;
use trommel_sink::Format;
use trommel_types::{Cascade, ErrorKind, JobOptions, JobRequest};
use trommel_worker::{
    Client, DeadLetter, JobReasons, JobState, JobStatus, ListRequest, ModelStatus, ReasonKind,
    RetryRequest, WorkerError,
};

use crate::args::{JobsCommand, SubmitArgs};
use crate::cascade;
use crate::config::Config;
use crate::exit::{Exit, Usage, warn_in_red};
use crate::forecast::{self, Compared, DryRun};
use crate::lines::{counted, with_head};
use crate::progress_bar::images;
use crate::standstill::Standstill;

/// Time between two polls of a job.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Longest time without an answer while a job is watched.
const PATIENCE: Duration = Duration::from_secs(30);

/// `trommel submit`.
pub(crate) fn submit(args: SubmitArgs, config: &Config) -> Result<Exit> {
    let mut request = request(&args, config)?;
    let (key, cache) = (
        forecast::key_of_request(&request),
        config.infer.cache.as_deref(),
    );
    if !args.dry_run {
        request.options.forecast = cache.and_then(|cache| forecast::recall(cache, &key));
    }
    let problems = request.problems();
    if !problems.is_empty() {
        return Err(anyhow::anyhow!("{}", problems.join("; ")).context(Usage));
    }
    with_client(config, async |client| {
        let reply = client.submit(&request).await.context(Usage)?;
        if args.dry_run {
            let said = forecast::follow(&client, &reply.id, &args, config).await?;
            if let (Some(cache), DryRun::Said(forecast)) = (cache, &said) {
                forecast::keep(cache, &key, forecast);
            }
            return Ok(said.exit());
        }
        if !args.quiet {
            let before = if reply.submitted_before {
                " (submitted before)"
            } else {
                ""
            };
            writeln!(io::stderr(), "submitted job {}{before}", reply.id)?;
        }
        if !args.wait {
            writeln!(io::stdout(), "{}", reply.id)?;
            return Ok(Exit::Success);
        }
        let status = watch(&client, &reply.id, args.quiet).await?;
        show_one(&status, args.json)?;
        ended(&status, args.fail_on_error)
    })
}

/// `trommel jobs`.
pub(crate) fn run(command: JobsCommand, config: &Config) -> Result<Exit> {
    with_client(config, async |client| {
        match command {
            JobsCommand::List {
                limit,
                running,
                json,
            } => {
                let jobs = list(&client, limit, running).await?;
                if json {
                    print_json(&jobs)?;
                } else {
                    show_list(&jobs)?;
                }
            }
            JobsCommand::Show { id, json } => show_one(&client.status(&id).await?, json)?,
            JobsCommand::Why { id, json } => show_why(&client.why(&id).await?, json)?,
            JobsCommand::Watch { id, json } => {
                let status = watch(&client, &id, false).await?;
                show_one(&status, json)?;
                return ended(&status, false);
            }
            JobsCommand::Dead { id, json } => {
                let letters = client.dead(&id).await?;
                if json {
                    print_json(&letters)?;
                } else {
                    show_dead(&letters)?;
                }
            }
            JobsCommand::Retry {
                id,
                kind,
                wait,
                fail_on_error,
                json,
            } => {
                // Before the workers are asked: the number makes repeating the request safe.
                ErrorKind::named(&kind).map_err(|reason| anyhow::anyhow!(reason).context(Usage))?;
                let before = client.status(&id).await.context(Usage)?;
                let request = RetryRequest {
                    id,
                    kinds: kind,
                    number: Some(before.retries + 1),
                };
                let reply = client.retry(&request).await.context(Usage)?;
                if wait {
                    let status = watch(&client, &reply.id, json).await?;
                    show_one(&status, json)?;
                    return ended(&status, fail_on_error);
                }
                if json {
                    print_json(&reply)?;
                } else {
                    writeln!(
                        io::stderr(),
                        "retrying {} of job {}",
                        counted(reply.rows, "failed row"),
                        request.id
                    )?;
                    writeln!(io::stdout(), "{}", reply.id)?;
                }
            }
            JobsCommand::Cancel { id } => {
                client.cancel(&id).await?;
                writeln!(io::stderr(), "cancelled job {id}; committed rows stay")?;
            }
            JobsCommand::Models { json } => {
                let models = client.models().await?;
                if json {
                    print_json(&models)?;
                } else {
                    for model in models {
                        writeln!(io::stdout(), "{}  {}", model.version, model.name)?;
                    }
                }
            }
        }
        Ok(Exit::Success)
    })
}

pub(crate) fn with_client(
    config: &Config,
    work: impl AsyncFnOnce(Client) -> Result<Exit>,
) -> Result<Exit> {
    let runtime = crate::runtime::on_this_thread()?;
    runtime.block_on(async {
        let broker = Broker::connect(&config.broker, "trommel client")
            .await
            .context(Usage)?;
        work(Client::new(broker, &config.broker.prefix)).await
    })
}

fn request(args: &SubmitArgs, config: &Config) -> Result<JobRequest> {
    let rows = args.rows.options(config.preprocess.reference);
    Ok(JobRequest {
        id: args
            .id
            .clone()
            .unwrap_or_else(|| uuid::Uuid::now_v7().to_string()),
        sources: args.sources.clone(),
        models: args.model.clone(),
        output: args.output.clone(),
        lane: args.lane,
        cascade: args.agree.map(|agree| Cascade {
            agree,
            sample: args.agree_sample,
        }),
        rows: rows.context(Usage)?,
        options: JobOptions {
            format: Some(Format::from(args.format).to_string()),
            max_failure_rate: args.max_failure_rate,
            max_runtime_seconds: args.max_runtime.map(|limit| limit.as_secs()),
            prices: args.prices.prices.clone(),
            max_cost: args.max_cost,
            image_deadline_ms: args
                .image_deadline
                .map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
            overwrite: args.overwrite,
            skip_existing: args.skip_existing,
            dry_run: args.dry_run,
            ..args.source.job_options()
        },
    })
}

/// Jobs, newest first, page by page; all of them for a limit of 0.
pub(crate) async fn list(client: &Client, limit: usize, running: bool) -> Result<Vec<JobStatus>> {
    let mut jobs = Vec::new();
    let mut page = ListRequest {
        running,
        ..ListRequest::default()
    };
    loop {
        page.limit = (limit > 0).then(|| limit - jobs.len());
        let answer = client.list(&page).await?;
        jobs.extend(answer.jobs);
        match answer.next {
            Some(next) if limit == 0 || jobs.len() < limit => page.after = Some(next),
            _ => return Ok(jobs),
        }
    }
}

/// Waits for the end of a job, with a progress bar on a terminal.
async fn watch(client: &Client, id: &str, quiet: bool) -> Result<JobStatus> {
    let bar = (!quiet && io::stderr().is_terminal()).then(ProgressBar::no_length);
    let (mut last_answer, mut standstill) = (Instant::now(), Standstill::new());
    loop {
        let status = match client.status(id).await {
            Ok(status) => status,
            // Workers and brokers may be restarted while a job runs.
            Err(WorkerError::NobodyAnswers) if last_answer.elapsed() < PATIENCE => {
                tokio::time::sleep(LOOK_EVERY).await;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        last_answer = Instant::now();
        if let Some(bar) = &bar {
            redraw(bar, &status);
        }
        if status.state.is_final() {
            if let Some(bar) = &bar {
                bar.finish_and_clear();
            }
            return Ok(status);
        }
        if !quiet {
            for finding in standstill.explain(client, &status).await? {
                match &bar {
                    Some(bar) => bar.println(finding),
                    None => writeln!(io::stderr(), "{finding}")?,
                }
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn redraw(bar: &ProgressBar, status: &JobStatus) {
    let template = match status.total {
        Some(_) => "{bar:30.cyan/blue} {human_pos}/{images}  {msg}",
        None => "{spinner} {images}  {msg}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("━╸─").with_key("images", images));
    }
    let models = status.models.len().max(1) as u64;
    let done: u64 = status
        .models
        .iter()
        .map(|model| model.ok + model.failed)
        .sum();
    let failed: u64 = status.models.iter().map(|model| model.failed).sum();
    bar.set_position(done / models);
    if let Some(total) = status.total {
        bar.set_length(total);
    }
    let rate = status
        .models
        .iter()
        .map(|model| model.rate)
        .fold(0.0, f64::max);
    let mut message = format!("{rate:.0}/s");
    if let Some(eta) = status.eta_seconds {
        let eta = Duration::from_secs_f64(eta.min(1e9));
        message.push_str(&format!("  ETA {}", HumanDuration(eta)));
    }
    if failed > 0 {
        message.push_str(&format!("  {failed} failed"));
    }
    if status.state == JobState::Queued {
        message.push_str("  queued: waiting for an ingest worker");
    }
    bar.set_message(message);
    bar.tick();
}

/// The exit code for a job that has ended.
pub(crate) fn ended(status: &JobStatus, fail_on_error: bool) -> Result<Exit> {
    let text = match &status.reason {
        Some(reason) => reason.text.as_str(),
        None => "unknown reason",
    };
    let kind = status.reason.as_ref().map(|reason| reason.kind);
    // Failures of a retry say nothing about the other rows of the job.
    let has_none = |model: &ModelStatus| model.ok == 0 && status.retry.is_none();
    let fails = |model: &ModelStatus| model.failed > 0 && (fail_on_error || has_none(model));
    match status.state {
        JobState::Complete if status.models.iter().any(fails) => {
            if status.models.iter().any(has_none) {
                warn_in_red("all images failed, so the exit code is 3")?;
            }
            Ok(Exit::Failed)
        }
        JobState::Complete => Ok(Exit::Success),
        JobState::Cancelled => bail!("job {} was cancelled; committed rows stay", status.id),
        JobState::Failed if kind == Some(ReasonKind::TooManyFailures) => {
            writeln!(io::stderr(), "trommel: job {} failed: {text}", status.id)?;
            Ok(Exit::Hopeless)
        }
        _ => bail!("job {} failed: {text}", status.id),
    }
}

pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).context("failed to write the answer")?;
    writeln!(io::stdout(), "{text}")?;
    Ok(())
}

fn show_list(jobs: &[JobStatus]) -> Result<()> {
    let mut out = io::stdout().lock();
    if jobs.is_empty() {
        writeln!(io::stderr(), "no jobs")?;
        return Ok(());
    }
    writeln!(
        out,
        "{:<36}  {:<9}  {:>12}  {:>12}  {:>8}  source",
        "job", "state", "committed", "images", "failed"
    )?;
    for job in jobs {
        let committed = job
            .models
            .iter()
            .map(|model| model.committed)
            .min()
            .unwrap_or(0);
        let failed: u64 = job.models.iter().map(|model| model.failed).sum();
        let total = match job.total {
            Some(total) => HumanCount(total).to_string(),
            None => format!("{}+", HumanCount(job.listed)),
        };
        writeln!(
            out,
            "{:<36}  {:<9}  {:>12}  {total:>12}  {failed:>8}  {}{}",
            job.id,
            job.state.as_str(),
            HumanCount(committed).to_string(),
            kind_of(job),
            job.source
        )?;
    }
    Ok(())
}

/// The kind of job, if it is a dry run or a retry.
fn kind_of(job: &JobStatus) -> String {
    match &job.retry {
        Some(retry) => format!("(retry {} of {}) ", retry.number, retry.job),
        None if job.dry_run => "(dry run) ".to_owned(),
        None => String::new(),
    }
}

fn show_one(job: &JobStatus, json: bool) -> Result<()> {
    if json {
        return print_json(job);
    }
    let mut out = io::stdout().lock();
    writeln!(out, "job     {}", job.id)?;
    let reason = job
        .reason
        .as_ref()
        .map_or_else(String::new, |reason| format!(": {}", reason.text));
    writeln!(out, "state   {}{reason}", job.state.as_str())?;
    if let Some(retry) = &job.retry {
        let kinds: Vec<_> = retry.kinds.iter().map(|kind| kind.as_str()).collect();
        let kinds = match kinds.is_empty() {
            true => "all failed rows".to_owned(),
            false => format!("rows failed as {}", kinds.join(", ")),
        };
        writeln!(
            out,
            "retry   {} of job {}: {kinds}",
            retry.number, retry.job
        )?;
    }
    if let Some(retry) = &job.retried_by {
        writeln!(out, "retried by {retry}")?;
    }
    writeln!(out, "source  {}", job.source)?;
    writeln!(out, "output  {}", job.output)?;
    match job.total {
        Some(total) => writeln!(out, "images  {}", HumanCount(total))?,
        None => writeln!(out, "images  {} listed so far", HumanCount(job.listed))?,
    }
    for model in &job.models {
        writeln!(
            out,
            "model   {} ({}): {} committed, {} ok, {} failed, {:.0}/s",
            model.name,
            model.version,
            counted(model.committed, "row"),
            HumanCount(model.ok),
            HumanCount(model.failed),
            model.rate
        )?;
        show_failures(&mut out, &model.failures)?;
    }
    if let Some(cascade) = &job.cascade {
        write!(out, "{}", cascade::OfJob(cascade))?;
    }
    for stage in &job.stages {
        writeln!(
            out,
            "{:<10}  {} waiting or in flight",
            stage.stage,
            HumanCount(stage.waiting)
        )?;
    }
    if let Some(eta) = job.eta_seconds {
        let eta = Duration::from_secs_f64(eta.min(1e9));
        writeln!(out, "ETA     {}", HumanDuration(eta))?;
    }
    for (stage, times) in &job.times {
        let count = HumanCount(times.count);
        let three = crate::summary::three(times);
        writeln!(
            out,
            "{stage:<7} {three} ms (p50 / p95 / p99 of {count} reported by the workers that are running)"
        )?;
    }
    match compared(job) {
        Some(compared) => writeln!(out, "{compared}")?,
        None => {
            if let Some(cost) = job.cost {
                writeln!(out, "cost    {}", forecast::money(cost))?;
            }
        }
    }
    Ok(())
}

/// The forecast of a complete job, and its actual time.
fn compared(job: &JobStatus) -> Option<Compared> {
    let is_complete = job.state == JobState::Complete;
    let said = job
        .forecast
        .filter(|said| is_complete && Some(said.images) == job.total)?;
    let took = u64::try_from(job.finished_at? - job.started_at?).ok()?;
    Some(Compared::new(said, Duration::from_micros(took), job.cost))
}

fn show_dead(letters: &[DeadLetter]) -> Result<()> {
    let mut out = io::stdout().lock();
    if letters.is_empty() {
        writeln!(io::stderr(), "no dead letters")?;
    }
    for letter in letters {
        let index = letter
            .index
            .map_or_else(String::new, |index| index.to_string());
        let uri = letter.uri.as_deref().unwrap_or("(no image)");
        writeln!(
            out,
            "{:<10}  {index:>8}  {uri}: {}",
            letter.stage, letter.reason
        )?;
    }
    Ok(())
}

fn show_why(reasons: &JobReasons, json: bool) -> Result<()> {
    if json {
        return print_json(reasons);
    }
    let mut out = io::stdout().lock();
    writeln!(out, "job {} is {}", reasons.id, reasons.state.as_str())?;
    for finding in &reasons.findings {
        writeln!(out, "  - {finding}")?;
    }
    for stage in &reasons.stages {
        writeln!(
            out,
            "{:<10}  {}, {} waiting or in flight",
            stage.stage,
            counted(stage.workers, "worker"),
            HumanCount(stage.waiting)
        )?;
        for image in &stage.oldest {
            let since = HumanDuration(Duration::from_secs_f64(image.seconds));
            writeln!(out, "            {} {} for {since}", image.index, image.uri)?;
        }
    }
    for report in &reasons.put_off {
        let head = format!("{} deferred ", report.stage);
        let text = format!(
            "{} (attempt {}): {}",
            report.uri, report.attempt, report.error
        );
        writeln!(out, "{}", with_head(&head, &text))?;
    }
    Ok(())
}

pub(crate) fn show_failures(
    out: &mut impl Write,
    failures: &BTreeMap<String, trommel_sink::FailureSummary>,
) -> Result<()> {
    for (kind, failure) in failures {
        let head = format!("  {:>8} {kind}  ", failure.count);
        writeln!(out, "{}", with_head(&head, &failure.error))?;
    }
    Ok(())
}
