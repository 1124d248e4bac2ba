//! `trommel fit`: learns a linear classifier over embeddings from labelled examples.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use trommel_infer::{Activation, Head, normalize};
use trommel_types::Scalar;

use super::embedding;
use super::head_file::HeadFile;
use super::logistic::{self, Examples};
use super::near::Random;
use crate::args::FitArgs;
use crate::config::Config;
use crate::evaluate::Truth;
use crate::exit::{Exit, Usage};
use crate::paths::check_output;
use crate::results::Results;

/// Candidates for the inverse regularisation strength. The accuracy on held-out examples decides.
const TRIED: [f64; 5] = [0.01, 0.1, 1.0, 10.0, 100.0];

/// Runs the command.
///
/// # Errors
/// If there are too few examples, or the results have no embeddings or those of several models.
pub(crate) fn run(args: &FitArgs, config: &Config) -> Result<Exit> {
    check_output(&args.output)?;
    let truth = Truth::named(args.labels.as_deref(), args.labels_from.as_deref()).context(Usage)?;
    let results = Results::open_embedded(&args.results, config)?;
    let labelled = Labelled::read(&results, &truth, args.normalize).context(Usage)?;
    let folds = args.folds.get();
    labelled.check(folds).context(Usage)?;
    let parts = labelled.parts(folds);
    let tried = TRIED.map(|c| (c, labelled.validated(&parts, folds, c)));
    // Among equals, the one with the strongest regularisation.
    let by_mean = |(_, a): &(f64, Vec<f64>), (_, b): &(f64, Vec<f64>)| mean(b).total_cmp(&mean(a));
    let mut ordered = tried.clone();
    ordered.sort_by(by_mean);
    let (c, accuracies) = ordered[0].clone();
    let weights = logistic::fit(&labelled.examples(), c);
    let (weights, bias) = weights.scaled(1.0 / labelled.scale);
    let labels = labelled
        .labels
        .iter()
        .map(|label| Arc::from(label.as_str()))
        .collect();
    let head = Head::new(
        labels,
        labelled.width,
        weights,
        bias,
        args.normalize,
        Activation::Softmax,
    )?;
    HeadFile::new(&head, &labelled.model, &labelled.model_version).write(&args.output)?;
    let fitted = Fitted {
        head: args.output.display().to_string(),
        examples: labelled.classes.len(),
        labels: labelled.labels.len(),
        folds,
        c,
        accuracy: mean(&accuracies),
        deviation: deviation(&accuracies),
        tried: tried.map(|(c, accuracies)| (c, mean(&accuracies))).to_vec(),
    };
    match args.json {
        true => writeln!(io::stdout(), "{}", serde_json::to_string_pretty(&fitted)?)?,
        false => writeln!(io::stdout(), "{fitted}")?,
    }
    Ok(Exit::Success)
}

/// The classifier, and its accuracy.
#[derive(Debug, Serialize)]
struct Fitted {
    head: String,
    examples: usize,
    labels: usize,
    folds: usize,
    /// Inverse regularisation strength.
    c: f64,
    /// Mean over the folds, each predicted by a classifier trained on the others.
    accuracy: f64,
    deviation: f64,
    /// All candidates, with their accuracy.
    tried: Vec<(f64, f64)>,
}

impl fmt::Display for Fitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "examples    {} of {} labels", self.examples, self.labels)?;
        writeln!(
            f,
            "accuracy    {:.4} ± {:.4}, on held-out examples ({} folds)",
            self.accuracy, self.deviation, self.folds
        )?;
        for (c, accuracy) in &self.tried {
            let chosen = if *c == self.c { ", chosen" } else { "" };
            writeln!(f, "  C = {c:<6}  {accuracy:.4}{chosen}")?;
        }
        write!(f, "head        {}", self.head)
    }
}

/// Embeddings with labels.
struct Labelled {
    width: usize,
    /// `f32[n, width]`, divided by `scale` so that the mean square is 1.
    vectors: Vec<f32>,
    scale: f32,
    /// The label of each, as a position in `labels`.
    classes: Vec<usize>,
    labels: Vec<String>,
    model: String,
    model_version: String,
}

impl Labelled {
    fn read(results: &Results, truth: &Truth, scaled: bool) -> Result<Self> {
        let rows = results.stored()?;
        let names: Vec<String> = rows
            .columns
            .iter()
            .map(|column| column.name.clone())
            .collect();
        let (mut vectors, mut of, mut width) = (Vec::new(), Vec::new(), 0);
        let mut model: Option<(String, String)> = None;
        let mut example = None;
        for row in rows {
            let row = row?;
            let column = |name: &str| {
                let place = names.iter().position(|known| known == name)?;
                match row.image.columns.get(place)? {
                    Scalar::Null => None,
                    Scalar::String(text) => Some(text.clone()),
                    Scalar::Int(value) => Some(value.to_string()),
                    Scalar::Float(value) => Some(value.to_string()),
                    Scalar::Bool(value) => Some(value.to_string()),
                }
            };
            example.get_or_insert_with(|| row.image.uri.clone());
            let Some(label) = truth.of_image(&row.image.uri, column) else {
                continue;
            };
            let Some(vector) = embedding(&row)? else {
                continue; // failed
            };
            let (_, version) =
                model.get_or_insert_with(|| (row.model.to_string(), row.model_version.to_string()));
            if **version != *row.model_version || (width != 0 && width != vector.len()) {
                bail!("{results} has embeddings of several models, which one head cannot take");
            }
            width = vector.len();
            let start = vectors.len();
            vectors.extend_from_slice(vector);
            if scaled {
                normalize(&mut vectors[start..]);
            }
            of.push(label);
        }
        let Some((model, model_version)) = model else {
            bail!(
                "no row has both a label and an embedding: {}",
                truth.why_none(&example.unwrap_or_default())
            );
        };
        let numbers: BTreeMap<&String, usize> = {
            let mut distinct: Vec<&String> = of.iter().collect();
            distinct.sort();
            distinct.dedup();
            distinct.into_iter().zip(0..).collect()
        };
        let classes = of.iter().map(|label| numbers[label]).collect();
        let labels = numbers.into_keys().cloned().collect();
        let squares: f64 = vectors
            .iter()
            .map(|value: &f32| f64::from(*value).powi(2))
            .sum();
        let scale = ((squares / vectors.len() as f64).sqrt() as f32).max(f32::MIN_POSITIVE);
        vectors.iter_mut().for_each(|value| *value /= scale);
        Ok(Self {
            width,
            vectors,
            scale,
            classes,
            labels,
            model,
            model_version,
        })
    }

    /// Refuses examples that nothing can be learned from.
    fn check(&self, folds: usize) -> Result<()> {
        if folds < 2 {
            bail!("--folds is {folds}; give at least 2, so that some examples are held out");
        }
        if self.labels.len() < 2 {
            bail!(
                "all {} examples have the label {:?}; give examples of at least two labels",
                self.classes.len(),
                self.labels[0]
            );
        }
        let mut counts = vec![0; self.labels.len()];
        self.classes.iter().for_each(|class| counts[*class] += 1);
        match counts.iter().position(|count| *count < folds) {
            None => Ok(()),
            Some(class) => bail!(
                "label {:?} has {} examples, but {folds} folds need at least {folds}; give more examples, or fewer --folds",
                self.labels[class],
                counts[class]
            ),
        }
    }

    fn examples(&self) -> Examples<'_> {
        Examples {
            vectors: &self.vectors,
            width: self.width,
            classes: &self.classes,
            count: self.labels.len(),
        }
    }

    /// The fold of each example: those of each label are distributed in a fixed random order.
    fn parts(&self, folds: usize) -> Vec<usize> {
        let mut random = Random(0);
        let mut order: Vec<(u64, usize)> = (0..self.classes.len())
            .map(|place| (random.next(), place))
            .collect();
        order.sort_unstable();
        let (mut parts, mut next) = (vec![0; self.classes.len()], vec![0; self.labels.len()]);
        for (_, place) in order {
            let next = &mut next[self.classes[place]];
            parts[place] = *next % folds;
            *next += 1;
        }
        parts
    }

    /// The accuracy in each fold of a classifier trained on the others.
    fn validated(&self, parts: &[usize], folds: usize, c: f64) -> Vec<f64> {
        let accuracy = |fold: usize| {
            let (mut vectors, mut classes) = (Vec::new(), Vec::new());
            let (mut left, mut truth) = (Vec::new(), Vec::new());
            let rows = self
                .vectors
                .chunks_exact(self.width)
                .zip(&self.classes)
                .zip(parts);
            for ((vector, class), part) in rows {
                let (vectors, classes) = match *part == fold {
                    true => (&mut left, &mut truth),
                    false => (&mut vectors, &mut classes),
                };
                vectors.extend_from_slice(vector);
                classes.push(*class);
            }
            let examples = Examples {
                vectors: &vectors,
                width: self.width,
                classes: &classes,
                count: self.labels.len(),
            };
            let predicted = logistic::fit(&examples, c).predict(&left);
            let right = predicted
                .iter()
                .zip(&truth)
                .filter(|(predicted, truth)| predicted == truth);
            right.count() as f64 / truth.len() as f64
        };
        (0..folds).map(accuracy).collect()
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / values.len() as f64).sqrt()
}
