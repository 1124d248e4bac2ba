use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::HumanCount;
use serde::Serialize;
use trommel_infer::{Engine, EngineStats, PromptStats};
use trommel_sink::{FailureSummary, Output, Summary};
use trommel_source::Source;
use trommel_types::Forecast;
use trommel_worker::{EmbeddedJob, Percentiles, Progress, Task, TimeCounts};

use crate::forecast::{Compared, Spending, money};

use crate::cascade::CascadeReport;
use crate::lines::{counted, with_head};

/// Information about this run of a job, during and after it.
pub(crate) struct Run {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) started: Instant,
    /// The job and its run, as recorded in rows.
    pub(crate) job_id: String,
    pub(crate) run: String,
    /// Whether its rows are added to others.
    pub(crate) adds: bool,
    pub(crate) preprocess_threads: usize,
    /// Most images read in parallel.
    pub(crate) reads: usize,
    pub(crate) spending: Spending,
    /// The forecast of a dry run of the job.
    pub(crate) forecast: Option<Forecast>,
    /// For a cascade: its thresholds and statistics.
    pub(crate) cascade: Option<CascadeReport>,
}

/// The bottleneck of a run so far.
pub(crate) fn busiest(run: &Run) -> &'static str {
    bottleneck(&stages(run, &run.engine.stats(), run.started.elapsed()))
}

impl Run {
    /// The run of a job that began at `started`.
    pub(crate) fn of(
        job: &EmbeddedJob,
        progress: &Arc<Progress>,
        started: Instant,
        spending: Spending,
    ) -> Self {
        Self {
            source: Arc::clone(&job.source),
            engine: Arc::clone(&job.engine),
            progress: Arc::clone(progress),
            started,
            job_id: job.record.job_id.clone(),
            run: job.record.run.clone(),
            adds: job.record.adds(),
            preprocess_threads: job.config.preprocess.threads(),
            reads: job.config.preprocess.in_flight(),
            spending,
            forecast: None,
            cascade: None,
        }
    }

    /// What is committed so far, for a user who interrupted the run.
    pub(crate) fn committed_words(&self, destination: Option<&Output>) -> String {
        match destination {
            None => format!("{} written", counted(self.progress.committed(), "row")),
            Some(destination) => format!(
                "{} committed to {}; run the same command again to resume",
                counted(self.progress.resumed() + self.progress.committed(), "row"),
                destination
            ),
        }
    }

    /// The summary of a run with rows on a stream.
    pub(crate) fn summary(&self) -> Summary {
        let model = &self.engine;
        Summary {
            job_id: self.job_id.clone(),
            source: self.source.describe(),
            model: model.name().to_string(),
            model_version: model.version().to_string(),
            images: self.progress.finished(),
            ok: self.progress.ok(),
            failed: self.progress.failed(),
            failures: self.failures().collect(),
            run: self.run.clone(),
            parts: Vec::new(),
            whole: None,
        }
    }

    fn failures(&self) -> impl Iterator<Item = (String, FailureSummary)> {
        self.progress.failures().into_iter().map(|(kind, failure)| {
            let (count, example, error) = (failure.count, failure.example, failure.error);
            (
                kind.to_string(),
                FailureSummary {
                    count,
                    example,
                    error,
                },
            )
        })
    }
}

/// The report at the end of a job; displays as lines for people.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    pub(crate) summary: Summary,
    pub(crate) output: Option<String>,
    /// Retried rows, and their outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    retried: Option<Retried>,
    /// Added rows, and their outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    added: Option<Retried>,
    /// About this run; absent if the job was already complete.
    run: Option<RunReport>,
}

/// Rows of this run among existing ones.
#[derive(Debug, Serialize)]
struct Retried {
    rows: u64,
    ok: u64,
    failed: u64,
}

#[derive(Debug, Serialize)]
struct RunReport {
    images: u64,
    resumed: u64,
    skipped: u64,
    retried: u64,
    seconds: f64,
    images_per_second: f64,
    stages: Vec<Stage>,
    bottleneck: &'static str,
    engine: EngineStats,
    /// At the user's prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
    /// Compared with the forecast for all images.
    #[serde(skip_serializing_if = "Option::is_none")]
    forecast: Option<Compared>,
    /// The requests of a prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<PromptStats>,
    /// The thresholds and statistics of a cascade.
    #[serde(skip_serializing_if = "Option::is_none")]
    cascade: Option<CascadeReport>,
}

/// Times by stage.
#[derive(Debug, Serialize)]
struct Stage {
    name: &'static str,
    /// Seconds summed over its threads.
    thread_seconds: f64,
    /// Share of the time of all stages, 0 to 1.
    share: f64,
    /// Most in parallel.
    threads: usize,
    /// Busy share of these threads, 0 to 1.
    busy: f64,
    /// Per image, from arrival to departure; for commit, per part.
    #[serde(skip_serializing_if = "Option::is_none")]
    milliseconds: Option<Percentiles>,
}

impl Report {
    /// The report of a job that an earlier run finished.
    pub(crate) fn complete(summary: Summary, destination: &Output) -> Self {
        Self {
            summary,
            output: Some(destination.to_string()),
            retried: None,
            added: None,
            run: None,
        }
    }

    /// The report of a job that this run finished.
    pub(crate) fn of_run(summary: Summary, destination: Option<&Output>, run: &Run) -> Self {
        let wall = run.started.elapsed();
        let progress = &run.progress;
        // Rows of this run's own sample were committed before the rest began, but not before the
        // run.
        let sampled = run.cascade.as_ref().map_or(0, CascadeReport::sampled);
        let sampled = sampled.min(progress.resumed());
        let images = progress.ok() + progress.failed() + sampled;
        let engine = run.engine.stats();
        let stages = stages(run, &engine, wall);
        let cost = run.spending.cost(wall, progress);
        // The forecast is for all images in one run.
        let forecast = run.forecast.filter(|said| said.images == images);
        let run_report = RunReport {
            images,
            resumed: progress.resumed() - sampled,
            skipped: run.source.skipped(),
            retried: progress.retried(),
            seconds: wall.as_secs_f64(),
            images_per_second: images as f64 / wall.as_secs_f64(),
            bottleneck: bottleneck(&stages),
            stages,
            engine,
            cost,
            forecast: forecast.map(|said| Compared::new(said, wall, cost)),
            prompt: run.engine.prompt_stats(),
            cascade: run.cascade.clone(),
        };
        let among = summary.whole.as_ref().map(|_| Retried {
            rows: summary.images,
            ok: summary.ok,
            failed: summary.failed,
        });
        let summary = match summary.whole {
            Some(whole) => *whole,
            None => summary,
        };
        let (added, retried) = match run.adds {
            true => (among, None),
            false => (None, among),
        };
        Self {
            summary,
            output: destination.map(ToString::to_string),
            retried,
            added,
            run: Some(run_report),
        }
    }
}

fn stages(run: &Run, engine: &EngineStats, wall: Duration) -> Vec<Stage> {
    let prepare = run.preprocess_threads;
    let rows = [
        ("fetch", run.progress.time(Task::Fetch), run.reads),
        ("decode", run.progress.time(Task::Decode), prepare),
        ("resize", run.progress.time(Task::Resize), prepare),
        ("infer", engine.compute, engine.instances),
        ("commit", run.progress.time(Task::Commit), 1),
    ];
    let times = run.progress.times();
    let total: Duration = rows.iter().map(|(_, time, _)| *time).sum();
    rows.map(|(name, time, threads)| Stage {
        name,
        thread_seconds: time.as_secs_f64(),
        share: time.as_secs_f64() / total.as_secs_f64().max(1e-9),
        threads,
        busy: time.as_secs_f64() / (wall.as_secs_f64() * threads.max(1) as f64).max(1e-9),
        milliseconds: times.get(name).and_then(TimeCounts::percentiles),
    })
    .into()
}

/// The same threads decode and resize.
const PREPARING: [&str; 2] = ["decode", "resize"];

/// Busy share of this stage's threads, 0 to 1.
fn load(stages: &[Stage], stage: &Stage) -> f64 {
    let same = |other: &&Stage| {
        other.name == stage.name
            || [other, stage]
                .iter()
                .all(|one| PREPARING.contains(&one.name))
    };
    stages.iter().filter(same).map(|stage| stage.busy).sum()
}

/// Below this load no stage is the bottleneck: startup or listing took the time.
const IDLE: f64 = 0.25;

/// The bottleneck: among the stages with the busiest threads, the longest.
fn bottleneck(stages: &[Stage]) -> &'static str {
    let busiest = stages.iter().max_by(|a, b| {
        let loads = load(stages, a).total_cmp(&load(stages, b));
        loads.then(a.busy.total_cmp(&b.busy))
    });
    busiest
        .filter(|stage| load(stages, stage) >= IDLE)
        .map_or("none", |stage| stage.name)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary {
            images,
            ok,
            failed,
            failures,
            ..
        } = &self.summary;
        write!(f, "{}: {} ok", counted(*images, "image"), HumanCount(*ok))?;
        if *failed > 0 {
            write!(f, ", {} failed", HumanCount(*failed))?;
        }
        let Some(run) = &self.run else {
            return writeln!(f, "; already complete{}", self.where_rows_are());
        };
        writeln!(
            f,
            " in {:.1} s, {} images/s{}",
            run.seconds,
            HumanCount(run.images_per_second.round() as u64),
            self.where_rows_are()
        )?;
        if let Some(Retried { rows, ok, failed }) = self.retried {
            let rows = counted(rows, "failed row");
            let (ok, failed) = (HumanCount(ok), HumanCount(failed));
            writeln!(f, "  {rows} retried: {ok} ok, {failed} failed")?;
        }
        if let Some(Retried { rows, ok, failed }) = self.added {
            let (rows, ok, failed) = (HumanCount(rows), HumanCount(ok), HumanCount(failed));
            writeln!(
                f,
                "  {rows} of them new or changed: {ok} ok, {failed} failed"
            )?;
        }
        if run.resumed > 0 {
            writeln!(
                f,
                "  {} committed before this run",
                counted(run.resumed, "row")
            )?;
        }
        if let Some(compared) = &run.forecast {
            writeln!(f, "  {compared}")?;
        } else if let Some(cost) = run.cost {
            writeln!(f, "  cost {} at the prices given", money(cost))?;
        }
        if run.skipped > 0 {
            let skipped = counted(run.skipped, "other file");
            let build = trommel_source::NOT_IN_THIS_BUILD;
            let build = build.map_or(String::new(), |build| format!("; {build}"));
            writeln!(f, "  {skipped} skipped by suffix or size{build}")?;
        }
        for (kind, failure) in failures {
            write_failure(f, kind, failure)?;
        }
        write_stages(f, &run.stages)?;
        writeln!(f, "  bottleneck: {}", run.bottleneck)?;
        if let Some(cascade) = &run.cascade {
            write!(f, "{cascade}")?;
        }
        if let Some(prompt) = &run.prompt {
            return write_prompt(f, prompt);
        }
        let EngineStats {
            max_batch,
            fill,
            gaps,
            compute,
            ..
        } = run.engine;
        if fill == 0.0 {
            return Ok(()); // no image reached the model
        }
        let gaps = gaps.as_secs_f64() / compute.as_secs_f64().max(1e-9);
        writeln!(
            f,
            "  model: batches of up to {max_batch}, {:.0} % full; gaps between batches: {:.1} % of its time",
            100.0 * fill,
            100.0 * gaps
        )
    }
}

impl Report {
    fn where_rows_are(&self) -> String {
        self.output
            .as_ref()
            .map_or_else(String::new, |output| format!(" → {output}"))
    }
}

/// One line per stage: how busy its threads were, and percentiles of its times, if any.
fn write_stages(f: &mut impl fmt::Write, stages: &[Stage]) -> fmt::Result {
    writeln!(f, "  stage    busy     p50 ms    p95 ms    p99 ms")?;
    for Stage {
        name,
        busy,
        milliseconds,
        ..
    } in stages
    {
        write!(f, "  {name:<7} {:>3.0} %", 100.0 * busy)?;
        if let Some(Percentiles { p50, p95, p99, .. }) = milliseconds {
            write!(f, "  {p50:>9.2} {p95:>9.2} {p99:>9.2}")?;
        }
        writeln!(f)?;
    }
    Ok(())
}

/// The usual percentiles, in milliseconds.
pub(crate) fn three(times: &Percentiles) -> String {
    let Percentiles { p50, p95, p99, .. } = times;
    format!("{p50:.2} / {p95:.2} / {p99:.2}")
}

/// The requests to servers in this run.
fn write_prompt(f: &mut impl fmt::Write, stats: &PromptStats) -> fmt::Result {
    let PromptStats {
        requests,
        busy,
        failed,
        timed_out,
        unreachable,
        peak,
        servers,
        ..
    } = *stats;
    writeln!(
        f,
        "  prompt: {} tokens read ({} known to the server), {} written{}",
        HumanCount(stats.prompt_tokens),
        HumanCount(stats.cached_tokens),
        HumanCount(stats.completion_tokens),
        stats.price.map_or_else(String::new, |price| format!(
            "; price {price:.4} by price-in and price-out"
        ))
    )?;
    writeln!(
        f,
        "  servers: {servers}, at most {peak} of {} requests at once; {busy} busy, {failed} failed, {timed_out} timed out, {unreachable} unreachable",
        HumanCount(requests)
    )
}

fn write_failure(f: &mut impl fmt::Write, kind: &str, failure: &FailureSummary) -> fmt::Result {
    let FailureSummary {
        count,
        example,
        error,
    } = failure;
    // Most messages already name the object.
    let separator = if error.contains(example.as_str()) {
        String::new()
    } else {
        format!("{example}: ")
    };
    let head = format!("  {:>7} {kind:<17} ", HumanCount(*count).to_string());
    writeln!(f, "{}", with_head(&head, &format!("{separator}{error}")))
}

/// Prints the failures so far, if they end the run early.
pub(crate) fn print_failures(run: &Run, out: &mut impl Write) -> Result<()> {
    let mut text = String::new();
    for (kind, failure) in run.failures() {
        write_failure(&mut text, &kind, &failure)?;
    }
    Ok(out.write_all(text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &'static str, thread_seconds: f64, threads: usize) -> Stage {
        Stage {
            name,
            thread_seconds,
            share: 0.0,
            threads,
            busy: thread_seconds / threads as f64 / 10.0,
            milliseconds: None,
        }
    }

    /// N40: many concurrent reads add up to more thread-seconds than the stage that they wait for.
    #[test]
    fn the_bottleneck_is_what_is_busiest_not_what_adds_up_to_most() {
        let stages = [
            stage("fetch", 30.0, 32),
            stage("decode", 8.0, 4),
            stage("resize", 4.0, 4),
            stage("infer", 19.0, 2),
            stage("commit", 1.0, 1),
        ];
        assert_eq!(bottleneck(&stages), "infer");
    }

    #[test]
    fn a_run_that_is_over_at_once_has_no_bottleneck() {
        let stages = [stage("fetch", 0.1, 8), stage("commit", 0.4, 1)];
        assert_eq!(bottleneck(&stages), "none");
    }

    #[test]
    fn decoding_and_resizing_share_their_threads() {
        let stages = [
            stage("fetch", 1.0, 8),
            stage("decode", 20.0, 4),
            stage("resize", 19.0, 4),
            stage("infer", 12.0, 2),
        ];
        assert_eq!(bottleneck(&stages), "decode");
        assert!(load(&stages, &stages[1]) > 0.97);
    }
}
