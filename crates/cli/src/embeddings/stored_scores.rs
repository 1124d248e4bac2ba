//! `trommel relabel` by thresholds alone: labels from the scores in the rows.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use trommel_infer::Wanted;
use trommel_types::{Classification, Outcome, Reference, RowOptions, TopLabel};

use super::derived::{self, ROWS_OF, Rows, check_model};
use crate::args::RelabelArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::model;
use crate::results::Results;

/// Decides the label of each row again.
///
/// # Errors
/// Of usage, before any row is written, if the model differs, or a row lacks scores that are needed
/// to decide its label.
pub(super) fn run(args: &RelabelArgs, config: &Config, onnxruntime: Option<&Path>) -> Result<Exit> {
    let results = Results::open(&args.results, config)?;
    let mut stored = results.stored()?;
    let Some(first) = stored.next().transpose().context(Usage)? else {
        return Err(anyhow!("{results} holds no rows").context(Usage));
    };
    let rule = Arc::new(Rule::new(args, stored.options.as_ref(), onnxruntime).context(Usage)?);
    for row in results.stored()? {
        rule.label(row.context(Usage)?).context(Usage)?;
    }
    let top_k = ("top-k".to_owned(), rule.top_k.to_string());
    let record = derived::record(
        &results,
        &stored,
        &first,
        args.threshold_options().chain([top_k]),
    );
    drop(stored);
    let job: Arc<str> = record.job_id.as_str().into();
    let written = derived::write(&args.derived, record, config, None, |committed| {
        let left = results.stored()?.filter(move |row| {
            row.as_ref()
                .map_or(true, |row| !committed.contains(row.image.index))
        });
        let labelled = left.map(move |row| {
            let mut row = rule.label(row?)?;
            row.image.job = Arc::clone(&job);
            Ok(row)
        });
        Ok(Box::new(labelled) as Rows)
    })?;
    written.tell("relabelled", &args.derived)?;
    Ok(Exit::Success)
}

/// How to derive a label from stored scores.
struct Rule {
    /// The model's name and version.
    model: (String, String),
    labels: Arc<[Arc<str>]>,
    /// Most classes that a row could hold; `None` if unknown.
    stored_k: Option<usize>,
    /// Most classes that a row should hold.
    top_k: usize,
    /// By class, the score below which it may have been left out of the row; `None` if unknown.
    left_out_below: Option<Arc<[f32]>>,
    /// By class, the score that it has to reach.
    thresholds: Arc<[f32]>,
}

impl Rule {
    fn new(
        args: &RelabelArgs,
        options: Option<&BTreeMap<String, String>>,
        onnxruntime: Option<&Path>,
    ) -> Result<Self> {
        let dir = args.model.as_ref().context(
            "thresholds need the model that made the rows: give its folder with --model; it names the classes, and is not run",
        )?;
        let dir = dir.folder(args.dtype, true)?;
        let rows = RowOptions {
            reference: Reference::Auto,
            ..RowOptions::default()
        };
        let model = model::load(&dir, &Config::default(), &rows, onnxruntime)?.model;
        let info = model.inspect();
        let labels = Arc::clone(model.labels());
        let resolve = |wanted: Wanted| {
            let thresholds = wanted.class_thresholds(&labels, info.thresholds.as_deref());
            let thresholds = thresholds.map_err(|why| anyhow!("model {}: {why}", dir.display()))?;
            anyhow::Ok(thresholds.unwrap_or_else(|| labels.iter().map(|_| 0.0).collect()))
        };
        let thresholds = resolve(Wanted {
            threshold: args.threshold,
            thresholds: args.thresholds.iter().cloned().collect(),
            ..Wanted::default()
        })?;
        let was = options.map(wanted_before).transpose()?;
        let stored_k = was.as_ref().map(|was| was.top_k.get() as usize);
        let left_out_below = was.map(resolve).transpose()?;
        let most = stored_k.unwrap_or(labels.len());
        let top_k = args.top_k.map_or(most, |top_k| top_k.get() as usize);
        if top_k > most {
            bail!("--top-k {top_k}: the rows hold {most} classes at most; classify again for more");
        }
        Ok(Self {
            model: (dir.display().to_string(), model.version().to_string()),
            labels,
            stored_k,
            top_k,
            left_out_below,
            thresholds,
        })
    }

    /// The row with its new label.
    ///
    /// # Errors
    /// If it comes from another model, or does not determine its label.
    fn label(&self, mut row: Classification) -> Result<Classification> {
        let (name, version) = &self.model;
        check_model(&row, name, version)?;
        if let Outcome::Ok(scores) = &mut row.outcome {
            let top = self.decide(&scores.top).map_err(|class| {
                let label = &self.labels[class];
                anyhow!(
                    "{}: its {} stored classes do not decide its label, as {label:?} is not among them; classify again with --top-k {} --threshold 0, which stores all classes",
                    row.image.uri,
                    scores.top.len(),
                    self.labels.len()
                )
            })?;
            scores.top = top;
        }
        Ok(row)
    }

    /// The best classes that reach their thresholds, or only the best one if none does.
    ///
    /// # Errors
    /// The number of a class that is not stored and could be the label.
    fn decide(&self, stored: &[TopLabel]) -> Result<Vec<TopLabel>, usize> {
        let reaches = |top: &&TopLabel| {
            let threshold = self.thresholds.get(top.class as usize);
            threshold.is_some_and(|threshold| top.score >= *threshold)
        };
        let reached: Vec<_> = stored.iter().filter(reaches).cloned().collect();
        let best = reached.first().or(stored.first());
        for class in 0..self.labels.len() {
            if stored.iter().any(|top| top.class as usize == class) {
                continue;
            }
            let highest = self.highest(class, stored);
            let is_above = best.is_none_or(|best| highest > best.score);
            let may_reach = highest >= self.thresholds[class];
            if is_above && may_reach || reached.is_empty() && (is_above || may_reach) {
                return Err(class);
            }
        }
        let mut top = match reached.is_empty() {
            true => stored.iter().take(1).cloned().collect(),
            false => reached,
        };
        top.truncate(self.top_k);
        Ok(top)
    }

    /// The highest possible score of a class that is not stored.
    fn highest(&self, class: usize, stored: &[TopLabel]) -> f32 {
        let (Some(left_out_below), Some(stored_k), Some(last)) =
            (&self.left_out_below, self.stored_k, stored.last())
        else {
            return f32::INFINITY;
        };
        // Strictly below the threshold by which it was left out.
        let left_out = left_out_below[class].next_down();
        let is_fallback = last.score < left_out_below[last.class as usize];
        match (is_fallback, stored.len() < stored_k) {
            // No class reached its threshold, so this one was the best.
            (true, _) => left_out.min(last.score),
            (false, true) => left_out,
            (false, false) => left_out.max(last.score),
        }
    }
}

/// The row options of the original classification.
fn wanted_before(options: &BTreeMap<String, String>) -> Result<Wanted> {
    let mut wanted = Wanted::default();
    for (name, value) in options {
        let unreadable = || format!("the results say {name} = {value}, which is not understood");
        match name.as_str() {
            "labels" | "head" => bail!(
                "the rows have their own classes ({name}); give trommel relabel the same --{name} with the thresholds"
            ),
            ROWS_OF => {
                bail!("the rows were made from those of job {value}; give the results of that job")
            }
            "top-k" => wanted.top_k = value.parse().with_context(unreadable)?,
            "threshold" => wanted.threshold = Some(value.parse().with_context(unreadable)?),
            _ => {
                if let Some(label) = name.strip_prefix("threshold of ") {
                    let score = value.parse().with_context(unreadable)?;
                    wanted.thresholds.insert(label.to_owned(), score);
                }
            }
        }
    }
    Ok(wanted)
}
