mod stages;

use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use indicatif::HumanCount;
use serde::Serialize;
use trommel_infer::{Engine, EngineStats, PromptStats};
use trommel_sink::{FailureSummary, JobRecord, Output, Summary};
use trommel_source::Source;
use trommel_types::Forecast;
use trommel_worker::{EmbeddedJob, Percentiles, Progress};

use crate::forecast::{Compared, Spending, money};

use crate::cascade::CascadeReport;
use crate::lines::{counted, with_head};

pub(crate) use self::stages::busiest;
use self::stages::{Stage, bottleneck, stages, write_stages};

/// Information about this run of a job, during and after it.
pub(crate) struct Run {
    pub(crate) source: Arc<dyn Source>,
    /// Of each model.
    pub(crate) engines: Vec<Arc<Engine>>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) started: Instant,
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

impl Run {
    /// The run of a job that began at `started`.
    pub(crate) fn of(
        job: &EmbeddedJob,
        progress: &Arc<Progress>,
        started: Instant,
        spending: Spending,
    ) -> Self {
        let engines = job.models.iter().map(|model| Arc::clone(&model.engine));
        let mut records = job.models.iter().map(|model| &model.record);
        Self {
            source: Arc::clone(&job.source),
            engines: engines.collect(),
            progress: Arc::clone(progress),
            started,
            adds: records.any(JobRecord::adds),
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
    rows: Rows,
    /// About this run; absent if the job was already complete.
    run: Option<RunReport>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Rows {
    One(Box<ModelReport>),
    Several { models: Vec<ModelReport> },
}

/// The rows of a model.
#[derive(Debug, Serialize)]
pub(crate) struct ModelReport {
    #[serde(flatten)]
    summary: Summary,
    output: Option<String>,
    /// Retried rows, and their outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    retried: Option<Retried>,
    /// Added rows, and their outcomes.
    #[serde(skip_serializing_if = "Option::is_none")]
    added: Option<Retried>,
    /// Absent if its rows were already complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    engine: Option<EngineStats>,
    /// The requests of a prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<PromptStats>,
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
    /// At the user's prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
    /// Compared with the forecast for all images.
    #[serde(skip_serializing_if = "Option::is_none")]
    forecast: Option<Compared>,
    /// The thresholds and statistics of a cascade.
    #[serde(skip_serializing_if = "Option::is_none")]
    cascade: Option<CascadeReport>,
}

impl ModelReport {
    /// Rows that an earlier run finished.
    pub(crate) fn complete(summary: Summary, output: &Output) -> Self {
        Self {
            summary,
            output: Some(output.to_string()),
            retried: None,
            added: None,
            engine: None,
            prompt: None,
        }
    }

    /// Rows that this run finished.
    pub(crate) fn of_run(
        summary: Summary,
        output: Option<&Output>,
        engine: &Engine,
        adds: bool,
    ) -> Self {
        let among = summary.whole.as_ref().map(|_| Retried {
            rows: summary.images,
            ok: summary.ok,
            failed: summary.failed,
        });
        let (added, retried) = match adds {
            true => (among, None),
            false => (None, among),
        };
        Self {
            summary: match summary.whole {
                Some(whole) => *whole,
                None => summary,
            },
            output: output.map(ToString::to_string),
            retried,
            added,
            engine: Some(engine.stats()),
            prompt: engine.prompt_stats(),
        }
    }
}

impl Report {
    /// The report of a job that an earlier run finished.
    pub(crate) fn complete(models: Vec<ModelReport>) -> Self {
        Self {
            rows: Rows::of(models),
            run: None,
        }
    }

    /// The report of a job that this run finished.
    pub(crate) fn of_run(models: Vec<ModelReport>, run: &Run) -> Self {
        let wall = run.started.elapsed();
        let progress = &run.progress;
        // Rows of this run's own sample were committed before the rest began, but not before the
        // run.
        let sampled = run.cascade.as_ref().map_or(0, CascadeReport::sampled);
        let sampled = sampled.min(progress.resumed());
        let rows = progress.ok() + progress.failed() + sampled;
        let images = rows.div_ceil(run.engines.len().max(1) as u64);
        let stages = stages(run, wall);
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
            cost,
            forecast: forecast.map(|said| Compared::new(said, wall, cost)),
            cascade: run.cascade.clone(),
        };
        Self {
            rows: Rows::of(models),
            run: Some(run_report),
        }
    }

    /// The rows of each model.
    pub(crate) fn summaries(&self) -> impl Iterator<Item = &Summary> {
        self.rows.models().iter().map(|model| &model.summary)
    }
}

impl Rows {
    fn of(mut models: Vec<ModelReport>) -> Self {
        match models.pop() {
            Some(model) if models.is_empty() => Self::One(Box::new(model)),
            last => {
                models.extend(last);
                models.sort_by(|a, b| a.summary.model.cmp(&b.summary.model));
                Self::Several { models }
            }
        }
    }

    fn models(&self) -> &[ModelReport] {
        match self {
            Self::One(model) => std::slice::from_ref(model),
            Self::Several { models } => models,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (models, run) = (self.rows.models(), self.run.as_ref());
        let time = run.map_or_else(
            || "; already complete".to_owned(),
            |run| {
                let rate = HumanCount(run.images_per_second.round() as u64);
                format!(" in {:.1} s, {rate} images/s", run.seconds)
            },
        );
        match models {
            [model] => {
                write!(f, "{}: ", counted(model.summary.images, "image"))?;
                model.write_counts(f, &time)?;
            }
            several => {
                let images = several.iter().map(|model| model.summary.images).max();
                let (images, count) = (images.unwrap_or_default(), several.len());
                writeln!(f, "{} by {count} models{time}", counted(images, "image"))?;
            }
        }
        let Some(run) = run else {
            return self.write_models(f);
        };
        if let [
            ModelReport {
                retried: Some(retried),
                ..
            },
        ] = models
        {
            let Retried { rows, ok, failed } = *retried;
            let rows = counted(rows, "failed row");
            let (ok, failed) = (HumanCount(ok), HumanCount(failed));
            writeln!(f, "  {rows} retried: {ok} ok, {failed} failed")?;
        }
        if let [
            ModelReport {
                added: Some(added), ..
            },
        ] = models
        {
            let Retried { rows, ok, failed } = *added;
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
        self.write_models(f)?;
        write_stages(f, &run.stages)?;
        writeln!(f, "  bottleneck: {}", run.bottleneck)?;
        if let Some(cascade) = &run.cascade {
            write!(f, "{cascade}")?;
        }
        for model in models {
            let name = match models.len() {
                1 => "model",
                _ => model.summary.model.as_str(),
            };
            model.write_work(f, name)?;
        }
        Ok(())
    }
}

impl Report {
    /// The failures of each model, and its outcomes if there are several.
    fn write_models(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let models = self.rows.models();
        for model in models {
            if models.len() > 1 {
                let is_done = self.run.is_some() && model.engine.is_none();
                write!(f, "  {}: ", model.summary.model)?;
                model.write_counts(f, if is_done { "; already complete" } else { "" })?;
            }
            for (kind, failure) in &model.summary.failures {
                write_failure(f, kind, failure)?;
            }
        }
        Ok(())
    }
}

impl ModelReport {
    /// The outcomes of its images, and where their rows are.
    fn write_counts(&self, f: &mut fmt::Formatter<'_>, behind: &str) -> fmt::Result {
        let Summary { ok, failed, .. } = &self.summary;
        write!(f, "{} ok", HumanCount(*ok))?;
        if *failed > 0 {
            write!(f, ", {} failed", HumanCount(*failed))?;
        }
        let output = self.output.as_ref();
        let output = output.map_or_else(String::new, |output| format!(" → {output}"));
        writeln!(f, "{behind}{output}")
    }

    /// Its batches, or its requests if it is a prompt.
    fn write_work(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        if let Some(prompt) = &self.prompt {
            return write_prompt(f, prompt);
        }
        let Some(EngineStats {
            max_batch,
            fill,
            gaps,
            compute,
            ..
        }) = self.engine.filter(|engine| engine.fill > 0.0)
        else {
            return Ok(()); // no image reached the model
        };
        let gaps = gaps.as_secs_f64() / compute.as_secs_f64().max(1e-9);
        writeln!(
            f,
            "  {name}: batches of up to {max_batch}, {:.0} % full; gaps between batches: {:.1} % of its time",
            100.0 * fill,
            100.0 * gaps
        )
    }
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
