use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::HumanCount;
use serde::Serialize;
use trommel_infer::{Engine, EngineStats};
use trommel_storage::{FailureSummary, Output, Source, Summary};
use trommel_worker::{Progress, Task};

/// What is known of this run of a job while it lasts and after.
pub(crate) struct Run {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) started: Instant,
    pub(crate) preprocess_threads: usize,
}

impl Run {
    /// What a user who was interrupted wants to know.
    pub(crate) fn committed_words(&self, destination: Option<&Output>) -> String {
        match destination {
            None => format!("{} rows written", self.progress.committed()),
            Some(destination) => format!(
                "{} rows are committed to {}; the same command goes on from there",
                self.progress.resumed() + self.progress.committed(),
                destination
            ),
        }
    }

    /// The summary of a run whose rows went to a stream.
    pub(crate) fn summary(&self) -> Summary {
        let model = self.engine.model();
        Summary {
            job_id: String::new(),
            source: self.source.describe(),
            model: model.name().to_string(),
            model_version: model.version().to_string(),
            images: self.progress.finished(),
            ok: self.progress.ok(),
            failed: self.progress.failed(),
            failures: self.failures().collect(),
            parts: Vec::new(),
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

/// What is told at the end of a job; displays as lines for people.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    pub(crate) summary: Summary,
    pub(crate) output: Option<String>,
    /// About this run; absent when the job was complete before.
    run: Option<RunReport>,
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
}

/// Where the time went.
#[derive(Debug, Serialize)]
struct Stage {
    name: &'static str,
    /// Seconds summed over the threads that did it.
    thread_seconds: f64,
    /// Of the time of all stages, 0 to 1.
    share: f64,
    /// Of the time of the threads that could do it, 0 to 1.
    busy: f64,
}

impl Report {
    /// Of a job that an earlier run has finished.
    pub(crate) fn complete(summary: Summary, destination: &Output) -> Self {
        Self {
            summary,
            output: Some(destination.to_string()),
            run: None,
        }
    }

    /// Of a job that this run has finished.
    pub(crate) fn of_run(summary: Summary, destination: Option<&Output>, run: &Run) -> Self {
        let wall = run.started.elapsed();
        let progress = &run.progress;
        let images = progress.ok() + progress.failed();
        let engine = run.engine.stats();
        let stages = stages(run, &engine, wall);
        let busiest = stages
            .iter()
            .max_by(|a, b| a.thread_seconds.total_cmp(&b.thread_seconds));
        let run_report = RunReport {
            images,
            resumed: progress.resumed(),
            skipped: run.source.skipped(),
            retried: progress.retried(),
            seconds: wall.as_secs_f64(),
            images_per_second: images as f64 / wall.as_secs_f64(),
            bottleneck: busiest.map_or("none", |stage| stage.name),
            stages,
            engine,
        };
        Self {
            summary,
            output: destination.map(ToString::to_string),
            run: Some(run_report),
        }
    }
}

fn stages(run: &Run, engine: &EngineStats, wall: Duration) -> Vec<Stage> {
    let prepare = run.preprocess_threads;
    let rows = [
        ("fetch", run.progress.time(Task::Fetch), prepare),
        ("decode", run.progress.time(Task::Decode), prepare),
        ("resize", run.progress.time(Task::Resize), prepare),
        ("infer", engine.compute, engine.instances),
        ("commit", run.progress.time(Task::Commit), 1),
    ];
    let total: Duration = rows.iter().map(|(_, time, _)| *time).sum();
    rows.map(|(name, time, threads)| Stage {
        name,
        thread_seconds: time.as_secs_f64(),
        share: time.as_secs_f64() / total.as_secs_f64().max(1e-9),
        busy: time.as_secs_f64() / (wall.as_secs_f64() * threads.max(1) as f64).max(1e-9),
    })
    .into()
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
        write!(f, "{} images: {} ok", HumanCount(*images), HumanCount(*ok))?;
        if *failed > 0 {
            write!(f, ", {} failed", HumanCount(*failed))?;
        }
        let Some(run) = &self.run else {
            return writeln!(f, "; complete already{}", self.where_rows_are());
        };
        writeln!(
            f,
            " in {:.1} s, {:.0} images/s{}",
            run.seconds,
            run.images_per_second,
            self.where_rows_are()
        )?;
        if run.resumed > 0 {
            writeln!(
                f,
                "  {} rows were committed before",
                HumanCount(run.resumed)
            )?;
        }
        if run.skipped > 0 {
            let skipped = HumanCount(run.skipped);
            writeln!(
                f,
                "  {skipped} other files were passed over by suffix or size"
            )?;
        }
        for (kind, failure) in failures {
            write_failure(f, kind, failure)?;
        }
        write!(f, "  time:")?;
        for stage in &run.stages {
            write!(f, "  {} {:.0} %", stage.name, 100.0 * stage.share)?;
        }
        writeln!(f, "  (most: {})", run.bottleneck)?;
        let EngineStats {
            max_batch,
            fill,
            gaps,
            compute,
            ..
        } = run.engine;
        let gaps = gaps.as_secs_f64() / compute.as_secs_f64().max(1e-9);
        writeln!(
            f,
            "  model: batches of {max_batch} {:.0} % full, {:.1} % of its time between them",
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

fn write_failure(f: &mut impl fmt::Write, kind: &str, failure: &FailureSummary) -> fmt::Result {
    let FailureSummary {
        count,
        example,
        error,
    } = failure;
    // Most messages name the object themselves.
    let separator = if error.contains(example.as_str()) {
        String::new()
    } else {
        format!("{example}: ")
    };
    writeln!(
        f,
        "  {:>7} {kind:<17} {separator}{error}",
        HumanCount(*count).to_string()
    )
}

/// Prints the failures so far, of a run that ends early because of them.
pub(crate) fn print_failures(run: &Run, out: &mut impl Write) -> Result<()> {
    let mut text = String::new();
    for (kind, failure) in run.failures() {
        write_failure(&mut text, &kind, &failure)?;
    }
    Ok(out.write_all(text.as_bytes())?)
}
