use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressStyle};
use tokio::runtime::Builder;
use trommel_queue::Broker;
use trommel_types::{JobOptions, JobRequest};
use trommel_worker::{Client, JobReasons, JobState, JobStatus, WorkerError};

use crate::args::{JobsCommand, PartFormat, SubmitArgs};
use crate::config::Config;
use crate::exit::{Exit, Usage};

/// Time between two looks at a job.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Longest time without an answer while a job is watched.
const PATIENCE: Duration = Duration::from_secs(30);

/// `trommel submit`.
pub(crate) fn submit(args: SubmitArgs, config: &Config) -> Result<Exit> {
    let request = request(&args);
    let problems = request.problems();
    if !problems.is_empty() {
        return Err(anyhow::anyhow!("{}", problems.join("; ")).context(Usage));
    }
    with_client(config, async |client| {
        let reply = client.submit(&request).await.context(Usage)?;
        if args.dry_run {
            return dry_run(&client, &reply.id, &args).await;
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
            JobsCommand::List { json } => {
                let jobs = client.list().await?;
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
            JobsCommand::Cancel { id } => {
                client.cancel(&id).await?;
                writeln!(io::stderr(), "cancelled job {id}; what is committed stays")?;
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
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .context("failed to start the async runtime")?;
    runtime.block_on(async {
        let broker = Broker::connect(&config.broker, "trommel client")
            .await
            .context(Usage)?;
        work(Client::new(broker, &config.broker.prefix)).await
    })
}

fn request(args: &SubmitArgs) -> JobRequest {
    JobRequest {
        id: args
            .id
            .clone()
            .unwrap_or_else(|| uuid::Uuid::now_v7().to_string()),
        sources: args.sources.clone(),
        images: Vec::new(),
        models: args.model.clone(),
        output: args.output.clone(),
        lane: args.lane,
        options: JobOptions {
            format: Some(
                match args.format {
                    PartFormat::Parquet => "parquet",
                    PartFormat::Jsonl => "jsonl",
                    PartFormat::Csv => "csv",
                }
                .to_owned(),
            ),
            suffixes: args.source.suffixes.clone(),
            min_size: args.source.min_size,
            max_size: args.source.max_size,
            sample: args.source.sample,
            sample_seed: args.source.sample_seed,
            uri_column: args.source.uri_column.clone(),
            image_column: args.source.image_column.clone(),
            max_failure_rate: args.max_failure_rate,
            max_runtime_seconds: args.max_runtime.map(|limit| limit.as_secs()),
            overwrite: args.overwrite,
            dry_run: args.dry_run,
        },
    }
}

/// Waits for the end of a job, with a progress bar on a terminal.
async fn watch(client: &Client, id: &str, quiet: bool) -> Result<JobStatus> {
    let bar = (!quiet && io::stderr().is_terminal()).then(ProgressBar::no_length);
    let mut last_answer = Instant::now();
    loop {
        let status = match client.status(id).await {
            Ok(status) => status,
            // Workers and brokers may be restarted while a job goes on.
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
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn redraw(bar: &ProgressBar, status: &JobStatus) {
    let template = match status.total {
        Some(_) => "{bar:30.cyan/blue} {human_pos}/{human_len} images  {msg}",
        None => "{spinner} {human_pos} images  {msg}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("━╸─"));
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
fn ended(status: &JobStatus, fail_on_error: bool) -> Result<Exit> {
    let reason = || {
        status
            .reason
            .clone()
            .unwrap_or_else(|| "no reason is known".to_owned())
    };
    match status.state {
        JobState::Complete
            if fail_on_error && status.models.iter().any(|model| model.failed > 0) =>
        {
            Ok(Exit::Failed)
        }
        JobState::Complete => Ok(Exit::Success),
        JobState::Cancelled => bail!("job {} was cancelled; what is committed stays", status.id),
        JobState::Failed if reason().contains("max-failure-rate") => {
            writeln!(
                io::stderr(),
                "trommel: job {} failed: {}",
                status.id,
                reason()
            )?;
            Ok(Exit::Hopeless)
        }
        _ => bail!("job {} failed: {}", status.id, reason()),
    }
}

fn print_json(value: &impl serde::Serialize) -> Result<()> {
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
            "{:<36}  {:<9}  {:>12}  {total:>12}  {failed:>8}  {}",
            job.id,
            job.state.as_str(),
            HumanCount(committed).to_string(),
            job.source
        )?;
    }
    Ok(())
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
        .map_or_else(String::new, |reason| format!(": {reason}"));
    writeln!(out, "state   {}{reason}", job.state.as_str())?;
    writeln!(out, "source  {}", job.source)?;
    writeln!(out, "output  {}", job.output)?;
    match job.total {
        Some(total) => writeln!(out, "images  {}", HumanCount(total))?,
        None => writeln!(out, "images  {} listed so far", HumanCount(job.listed))?,
    }
    for model in &job.models {
        writeln!(
            out,
            "model   {} ({}): {} rows committed, {} ok, {} failed, {:.0}/s",
            model.name,
            model.version,
            HumanCount(model.committed),
            HumanCount(model.ok),
            HumanCount(model.failed),
            model.rate
        )?;
        show_failures(&mut out, &model.failures)?;
    }
    for stage in &job.stages {
        let whose = if stage.of_all_jobs {
            " (all jobs of the lane)"
        } else {
            ""
        };
        writeln!(
            out,
            "{:<10}  {} waiting, {} in flight{whose}",
            stage.stage,
            HumanCount(stage.waiting),
            HumanCount(stage.in_flight)
        )?;
    }
    if let Some(eta) = job.eta_seconds {
        let eta = Duration::from_secs_f64(eta.min(1e9));
        writeln!(out, "ETA     {}", HumanDuration(eta))?;
    }
    Ok(())
}

/// Follows a dry run and tells what the whole job would take.
async fn dry_run(client: &Client, id: &str, args: &SubmitArgs) -> Result<Exit> {
    let mut waited: BTreeMap<String, u64> = BTreeMap::new();
    let status = loop {
        let status = client.status(id).await?;
        for stage in &status.stages {
            *waited.entry(stage.stage.clone()).or_default() += stage.waiting;
        }
        if status.state.is_final() {
            break status;
        }
        tokio::time::sleep(LOOK_EVERY / 4).await;
    };
    if status.state != JobState::Complete {
        return ended(&status, false);
    }
    let counted = status.counted.unwrap_or(trommel_worker::Counted {
        images: status.listed,
        is_all: true,
    });
    let rate = status
        .models
        .iter()
        .map(|model| model.rate)
        .fold(f64::INFINITY, f64::min);
    let seconds = (rate > 0.0 && rate.is_finite()).then(|| counted.images as f64 / rate);
    let bottleneck = waited
        .iter()
        .max_by_key(|(_, waiting)| **waiting)
        .filter(|(_, waiting)| **waiting > 0)
        .map(|(stage, _)| stage.clone());
    if args.json {
        print_json(&serde_json::json!({
            "images": counted.images,
            "all_counted": counted.is_all,
            "sample": status.models,
            "images_per_second": rate.is_finite().then_some(rate),
            "eta_seconds": seconds,
            "bottleneck": bottleneck,
        }))?;
        return Ok(Exit::Success);
    }
    let mut out = io::stdout().lock();
    let more = if counted.is_all { "" } else { " or more" };
    writeln!(out, "images      {}{more}", HumanCount(counted.images))?;
    for model in &status.models {
        writeln!(
            out,
            "sample      {}: {} ok, {} failed",
            model.name,
            HumanCount(model.ok),
            HumanCount(model.failed)
        )?;
        show_failures(&mut out, &model.failures)?;
    }
    if let Some(seconds) = seconds {
        let eta = HumanDuration(Duration::from_secs_f64(seconds.min(1e9)));
        writeln!(
            out,
            "rate        {rate:.0}/s with the workers that are there"
        )?;
        writeln!(out, "time        {eta}{more}")?;
    }
    match bottleneck {
        Some(stage) => writeln!(out, "bottleneck  {stage}: most images waited for it")?,
        None => writeln!(
            out,
            "bottleneck  none seen: the sample is small, or no stage had to wait"
        )?,
    }
    Ok(Exit::Success)
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
            "{:<10}  {} workers, {} waiting, {} in flight, {} of them not for the first time",
            stage.stage,
            stage.workers,
            HumanCount(stage.waiting),
            HumanCount(stage.in_flight),
            HumanCount(stage.redelivered)
        )?;
        for image in &stage.oldest {
            let since = HumanDuration(Duration::from_secs_f64(image.seconds));
            writeln!(out, "            {} {} for {since}", image.index, image.uri)?;
        }
    }
    for said in &reasons.said {
        writeln!(
            out,
            "said by {} of {} (attempt {}): {}",
            said.stage, said.uri, said.attempt, said.error
        )?;
    }
    Ok(())
}

fn show_failures(
    out: &mut impl Write,
    failures: &BTreeMap<String, trommel_storage::FailureSummary>,
) -> Result<()> {
    for (kind, failure) in failures {
        writeln!(out, "  {:>8} {kind}  {}", failure.count, failure.error)?;
    }
    Ok(())
}
