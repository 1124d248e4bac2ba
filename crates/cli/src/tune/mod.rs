//! `trommel tune`: finds the fastest settings for a model on this machine by trials.

mod search;
mod show;
mod space;
mod surface;
mod trials;

use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use serde::Serialize;
use trommel_types::{problem_of_prices, problem_of_token_prices};
use trommel_worker::{Tuned, TunedProfile, engine_options, machine_name};

use crate::args::TuneArgs;
use crate::bench::{refuse_standard_input, write};
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::model::{self, OpenedModel};

use self::search::{Choice, Measure, choose, search};
use self::space::Space;
use self::trials::{Objective, Requests, Trials, Tried, encoded};

/// Most images that requests cycle through.
const ENCODED: usize = 512;

/// The result of the command.
#[derive(Debug, Serialize)]
struct Found {
    model: String,
    model_version: String,
    device: String,
    machine: String,
    objective: String,
    default: Tuned,
    best: Tuned,
    choice: Choice,
    /// Where the profile was saved, if it was.
    profile: Option<PathBuf>,
    /// Number of settings in a full grid.
    grid: usize,
    /// Trials, each weighted by its share of all images.
    spent: f64,
    tried: Vec<Tried>,
}

impl Found {
    /// The mean of the full-length trials of these settings.
    fn mean_of(&self, settings: &Tuned) -> Option<Tried> {
        let is_whole = |tried: &&Tried| tried.settings == *settings && tried.share >= 1.0;
        let whole: Vec<&Tried> = self.tried.iter().filter(is_whole).collect();
        let first = **whole.first()?;
        let mean = |of: fn(&Tried) -> f64| {
            let sum: f64 = whole.iter().map(|tried| of(tried)).sum();
            sum / whole.len() as f64
        };
        Some(Tried {
            images_per_second: mean(|tried| tried.images_per_second),
            p95_milliseconds: first
                .p95_milliseconds
                .map(|_| mean(|tried| tried.p95_milliseconds.unwrap_or_default())),
            cost_of_a_million: first
                .cost_of_a_million
                .map(|_| mean(|tried| tried.cost_of_a_million.unwrap_or_default())),
            ..first
        })
    }
}

/// Runs the command.
pub(crate) fn run(args: &TuneArgs, config: Config, onnxruntime: Option<&Path>) -> Result<Exit> {
    let uncounted = || problem_of_token_prices(&args.prices.prices);
    if let Some(problem) = problem_of_prices(&args.prices.prices).or_else(uncounted) {
        return Err(anyhow::anyhow!("--price: {problem}").context(Usage));
    }
    refuse_standard_input("tune", &args.sources)?;
    let runtime = crate::runtime::on_threads(2)?;
    let dir = args.model.folder(None, true).context(Usage)?;
    let rows = args
        .rows
        .options(config.preprocess.reference)
        .context(Usage)?;
    let (objective, words) = objective(args);
    let opened = model::open(&dir, &config, &rows, onnxruntime).context(Usage)?;
    let (space, mut found) = begin(&opened, &config, &objective, words)?;
    drop(opened);
    let images = match args.p95 {
        Some(_) => {
            let count = args.images.get().min(ENCODED) as u64;
            encoded(&runtime, &config, &args.sources, count).context(Usage)?
        }
        None => [].into(),
    };
    let mut trials = Trials {
        runtime: &runtime,
        config,
        dir,
        rows,
        onnxruntime: onnxruntime.map(Path::to_owned),
        sources: args.sources.clone(),
        images: args.images.get(),
        encoded: images,
        objective,
        tried: Vec::new(),
        answered: Vec::new(),
        bar: ProgressBar::new_spinner(),
    };
    find(&space, &mut trials, &mut found)?;
    trials.bar.finish_and_clear();
    // Report the settings even if they cannot be written.
    let kept = match args.dry_run {
        true => Ok(None),
        false => keep(&trials.config, &found),
    };
    found.profile = kept.as_ref().ok().cloned().flatten();
    report(args, &found)?;
    kept?;
    Ok(match found.choice {
        Choice::Nothing => Exit::Failed,
        _ => Exit::Success,
    })
}

/// The search space, and the result as known before the search.
fn begin(
    opened: &OpenedModel,
    config: &Config,
    objective: &Objective,
    words: String,
) -> Result<(Space, Found)> {
    let model = &opened.model;
    let (device, fixed) = (model.devices().first(), model.fixed_batch());
    let cores = std::thread::available_parallelism().map_or(1, Into::into);
    let space = Space::new(config, device, cores, fixed, objective.requests.is_some());
    let batch = match fixed {
        Some(fixed) => fixed,
        None => engine_options(model, &config.infer)?.max_batch,
    };
    let default = Tuned::of(
        config,
        NonZeroUsize::new(batch).unwrap_or(NonZeroUsize::MIN),
    );
    let found = Found {
        model: model.name().to_string(),
        model_version: model.version().to_string(),
        device: model.devices().to_string(),
        machine: format!("{}, {cores} cores", machine_name(model)),
        objective: words,
        default,
        best: default,
        choice: Choice::DefaultsAreBest,
        profile: None,
        grid: space.size(),
        spent: 0.0,
        tried: Vec::new(),
    };
    Ok((space, found))
}

/// Searches, and compares the best settings with the defaults.
fn find(space: &Space, trials: &mut Trials, found: &mut Found) -> Result<()> {
    // Fails early if nothing can run, and warms the file cache for the trials that follow.
    trials.measure(&found.default, 0.0)?;
    trials.tried.clear();
    let all = space.all(found.default);
    let best = search(&all, trials)?;
    found.best = best.unwrap_or(found.default);
    found.choice = choose(&all, best, trials)?;
    found.tried = std::mem::take(&mut trials.tried);
    found.spent = found.tried.iter().map(|tried| tried.share).sum();
    Ok(())
}

fn objective(args: &TuneArgs) -> (Objective, String) {
    let requests = args.p95.zip(args.rate).map(|(p95, rate)| Requests {
        p95,
        rate,
        time: args.duration,
        seed: args.seed,
    });
    let aim = match args.prices.prices.is_empty() {
        true => "most throughput",
        false => "least cost",
    };
    let words = match &requests {
        None => aim.to_owned(),
        Some(Requests { p95, rate, .. }) => {
            let p95 = humantime::format_duration(*p95);
            format!("{aim} with p95 within {p95} at {rate}/s")
        }
    };
    let prices = args.prices.prices.clone();
    (Objective { prices, requests }, words)
}

/// Saves settings that proved better; otherwise removes the profile of an earlier search, which did not either.
fn keep(config: &Config, found: &Found) -> Result<Option<PathBuf>> {
    let Some(path) = TunedProfile::path(&config.infer, &found.model_version) else {
        return Ok(None);
    };
    if !matches!(found.choice, Choice::Better(_) | Choice::OnlyThese) {
        return match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("failed to remove {}", path.display()))
            }
            _ => Ok(None),
        };
    }
    let profile = TunedProfile {
        model: found.model.clone(),
        model_version: found.model_version.clone(),
        objective: found.objective.clone(),
        settings: found.best,
    };
    let written = profile.write(&path);
    written.with_context(|| format!("failed to write {}", path.display()))?;
    Ok(Some(path))
}

fn report(args: &TuneArgs, found: &Found) -> Result<()> {
    let mut out = io::stdout().lock();
    match args.json {
        true => {
            let text = serde_json::to_string_pretty(found).context("failed to write JSON")?;
            writeln!(out, "{text}")?;
        }
        false => write!(out, "{found}")?,
    }
    match &args.page {
        Some(path) => write(path, found.page()?.as_bytes()),
        None => Ok(()),
    }
}
