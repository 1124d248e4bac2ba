//! Trials of settings: the whole pipeline on a sample, and requests at a rate.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use indicatif::ProgressBar;
use serde::Serialize;
use tokio::runtime::Runtime;
use trommel_infer::{Engine, EngineOptions, InferError, InferErrorKind};
use trommel_source::open_source;
use trommel_types::{JobOptions, Price, RowOptions, cost};
use trommel_worker::{Answers, LiveModel, LiveRequest, NotAnswered, Tuned, engine_options};

use super::search::Measure;
use crate::bench::{Answer, Schedule, Target, drive, pipeline};
use crate::config::Config;
use crate::forecast::Spending;
use crate::lines::counted;
use crate::model::{self, OpenedModel};

/// Fewest images of a trial, however small its share of the budget.
const LEAST_IMAGES: u64 = 32;
/// Fewest batches of a session in a trial: the rate is that of whole batches in its middle.
const LEAST_BATCHES: u64 = 4;

/// The objective of a search.
#[derive(Debug, Clone)]
pub(super) struct Objective {
    /// The user's prices; without any, the objective is throughput.
    pub(super) prices: Vec<Price>,
    pub(super) requests: Option<Requests>,
}

/// The load of requests and its latency target.
#[derive(Debug, Clone, Copy)]
pub(super) struct Requests {
    pub(super) p95: Duration,
    pub(super) rate: f64,
    /// Duration of a measurement.
    pub(super) time: Duration,
    pub(super) seed: u64,
}

/// The result of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Tried {
    pub(super) settings: Tuned,
    /// Share of the budget, 0 to 1.
    pub(super) share: f64,
    pub(super) images_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) p95_milliseconds: Option<f64>,
    /// At the user's prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cost_of_a_million: Option<f64>,
    /// Whether all requests were answered and the latency target was met; true where it was not measured.
    pub(super) keeps: bool,
}

/// How requests were answered.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Answered {
    p95_milliseconds: f64,
    keeps: bool,
}

/// Runs trials.
pub(super) struct Trials<'a> {
    pub(super) runtime: &'a Runtime,
    pub(super) config: Config,
    pub(super) dir: PathBuf,
    pub(super) rows: RowOptions,
    pub(super) onnxruntime: Option<PathBuf>,
    pub(super) sources: Vec<String>,
    /// Images of a full-length trial.
    pub(super) images: usize,
    /// The images that requests send.
    pub(super) encoded: Arc<[Bytes]>,
    pub(super) objective: Objective,
    pub(super) tried: Vec<Tried>,
    pub(super) answered: Vec<(Tuned, Answered)>,
    /// Shows the current trial on a terminal.
    pub(super) bar: ProgressBar,
}

impl Measure for Trials<'_> {
    fn measure(&mut self, settings: &Tuned, share: f64) -> Result<Option<f64>> {
        self.bar.set_message(format!(
            "trial {}: batch {}, {} with {} each, {}",
            self.tried.len() + 1,
            settings.max_batch,
            counted(settings.instances.get(), "session"),
            counted(settings.intra_threads.get(), "thread"),
            counted(settings.preprocess_threads.get(), "preprocess thread")
        ));
        self.bar.tick();
        let Some(tried) = if_it_fits(settings, self.run(settings, share))? else {
            return Ok(None);
        };
        tracing::info!(?tried, "tried");
        self.tried.push(tried);
        Ok(Some(match tried.cost_of_a_million {
            Some(cost) => 1.0 / cost.max(f64::MIN_POSITIVE),
            None => tried.images_per_second,
        }))
    }

    fn keeps(&mut self, settings: &Tuned) -> Result<bool> {
        let Some(requests) = self.objective.requests else {
            return Ok(true);
        };
        if let Some((_, answered)) = self.answered.iter().find(|(of, _)| of == settings) {
            return Ok(answered.keeps);
        }
        self.bar.set_message("requests");
        let answered = if_it_fits(settings, self.answer(settings, requests))?;
        let answered = answered.unwrap_or_default();
        tracing::info!(?settings, ?answered, "answered requests");
        self.answered.push((*settings, answered));
        let same = self
            .tried
            .iter_mut()
            .filter(|tried| tried.settings == *settings);
        same.for_each(|tried| answered.fill_in(tried));
        Ok(answered.keeps)
    }
}

impl Answered {
    fn fill_in(&self, tried: &mut Tried) {
        tried.p95_milliseconds = Some(self.p95_milliseconds);
        tried.keeps = self.keeps;
    }
}

impl Trials<'_> {
    fn run(&self, settings: &Tuned, share: f64) -> Result<Tried> {
        let mut config = self.config.clone();
        settings.set(&mut config);
        let images = images(settings, share * self.images as f64);
        let options = config.source_options(&JobOptions {
            sample: Some(images),
            ..JobOptions::default()
        });
        let source = open_source(&self.sources, &options)?;
        let rows = self.rows.clone();
        let opened = self.open(&config)?;
        let rate = pipeline(self.runtime, config.clone(), source, opened, rows)?.rate;
        let held = Spending::new(&self.objective.prices, &config, false).held;
        let usage = trommel_types::Usage {
            hours: 1e6 / rate / 3600.0,
            ..held
        };
        let prices = &self.objective.prices;
        let mut tried = Tried {
            settings: *settings,
            share,
            images_per_second: rate,
            p95_milliseconds: None,
            cost_of_a_million: (!prices.is_empty()).then(|| cost(prices, &usage)),
            keeps: true,
        };
        if let Some((_, answered)) = self.answered.iter().find(|(of, _)| of == settings) {
            answered.fill_in(&mut tried);
        }
        Ok(tried)
    }

    fn open(&self, config: &Config) -> Result<OpenedModel> {
        model::open(&self.dir, config, &self.rows, self.onnxruntime.as_deref())
    }

    /// Answers requests at the target rate as `trommel serve` would, without the network.
    fn answer(&self, settings: &Tuned, requests: Requests) -> Result<Answered> {
        let mut config = self.config.clone();
        settings.set(&mut config);
        let opened = self.open(&config)?;
        let options = EngineOptions {
            live: config.serve.live_options_alone(&config.infer),
            ..engine_options(&opened.model, &config.infer)?
        };
        let name = Arc::clone(opened.model.name());
        let model = LiveModel {
            name: Arc::clone(&name),
            plan: opened.plan,
            engine: Arc::new(Engine::start(opened.model, options)?).into(),
        };
        let count = self.encoded.len();
        let load = self.runtime.block_on(async {
            let answers = Answers::start(vec![model], &self.rows, &config)?;
            let target = Arc::new(Here {
                answers,
                name,
                images: Arc::clone(&self.encoded),
            });
            target.ask(0).await; // warms up threads and memory
            let schedule = Schedule {
                rate: requests.rate,
                constant: false,
                time: requests.time,
                seed: requests.seed,
                ends_early: true,
            };
            Ok::<_, anyhow::Error>(drive(target, count, schedule, requests.p95).await?)
        })?;
        let all = load.ok > 0 && load.refused == 0 && load.failed == 0;
        let p95 = load.milliseconds.p95;
        Ok(Answered {
            p95_milliseconds: p95,
            keeps: all && p95 <= 1e3 * requests.p95.as_secs_f64(),
        })
    }
}

/// Images of a trial of these settings that is to have as many as `wanted`.
fn images(settings: &Tuned, wanted: f64) -> u64 {
    let at_once = (settings.max_batch.get() * settings.instances.get()) as u64;
    (wanted.ceil() as u64)
        .max(LEAST_IMAGES)
        .max(LEAST_BATCHES * at_once)
}

/// What these settings gave; `None` if they do not run, but others may.
fn if_it_fits<T>(settings: &Tuned, result: Result<T>) -> Result<Option<T>> {
    let fits = |error: &InferError| {
        !matches!(
            error.kind(),
            InferErrorKind::Settings | InferErrorKind::OutOfMemory
        )
    };
    match result {
        Err(error) if !error.downcast_ref().is_none_or(fits) => {
            tracing::info!("skipping {settings:?}: {error:#}");
            Ok(None)
        }
        result => result.map(Some),
    }
}

/// The model of this process, called without a network.
struct Here {
    answers: Answers,
    name: Arc<str>,
    images: Arc<[Bytes]>,
}

impl Here {
    async fn row(&self, image: usize) -> Result<(), NotAnswered> {
        let gone = || NotAnswered::Settings(format!("there is no model {}", self.name));
        let model = self.answers.model(&self.name).ok_or_else(gone)?;
        let admitted = model.admit(1)?;
        let request = LiveRequest {
            id: "tune".into(),
            index: image as u64,
            uri: String::new(),
            bytes: self.images[image].clone(),
            wanted: Arc::clone(model.wanted()),
            deadline: None,
        };
        self.answers.classify(&admitted, request).await?;
        Ok(())
    }
}

#[async_trait::async_trait]
impl Target for Here {
    async fn ask(&self, image: usize) -> Answer {
        match self.row(image).await {
            Ok(()) => Answer::Ok,
            Err(NotAnswered::Full { .. } | NotAnswered::Expired) => Answer::Refused,
            Err(error) => Answer::Failed(error.to_string()),
        }
    }
}

/// Reads the images that requests send.
///
/// # Errors
/// If the source cannot be listed, or none of its images can be read.
pub(super) fn encoded(
    runtime: &Runtime,
    config: &Config,
    sources: &[String],
    images: u64,
) -> Result<Arc<[Bytes]>> {
    let options = config.source_options(&JobOptions {
        sample: Some(images),
        ..JobOptions::default()
    });
    let source = open_source(sources, &options)?;
    let limits = crate::bench::fetch_limits(config);
    let reads = config.preprocess.in_flight();
    let fetched = runtime.block_on(crate::bench::fetch(source.as_ref(), limits, reads));
    let fetched = fetched.context("failed to read the images for the requests")?;
    Ok(fetched.images.into_iter().map(|(_, bytes)| bytes).collect())
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    #[test]
    fn a_short_trial_holds_several_batches_of_each_session() {
        let settings = |batch, instances| Tuned {
            instances: NonZeroUsize::new(instances).unwrap(),
            ..Tuned::of(&Config::default(), NonZeroUsize::new(batch).unwrap())
        };
        assert_eq!(images(&settings(1, 2), 0.0), 32);
        assert_eq!(images(&settings(16, 2), 57.0), 128);
        assert_eq!(images(&settings(16, 2), 512.0), 512);
    }
}
