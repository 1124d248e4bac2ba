//! `trommel export --to`: images for a person to review, in the formats of labelling programs.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use trommel_infer::normalize;
use trommel_types::{Classification, Outcome};

use crate::args::{ExportArgs, LabellingTool};
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::lines::counted;
use crate::originals::Originals;
use crate::paths::check_output;
use crate::results::Results;

/// Size of the pool for diverse images, relative to the number wanted.
const POOL: usize = 4;

/// A candidate for review.
struct Candidate {
    index: u64,
    uri: String,
    label: String,
    score: f32,
    /// The difference from the score of the next class: small if the model is uncertain.
    margin: f32,
    /// The label in the other results.
    other: Option<String>,
    /// Of length 1, for diverse images.
    embedding: Option<Vec<f32>>,
    model: String,
}

/// Runs the command.
///
/// # Errors
/// If no row is chosen, if diverse images are wanted but the results have no embeddings, or if the
/// file already exists.
pub(crate) fn run(args: &ExportArgs, tool: LabellingTool, config: &Config) -> Result<Exit> {
    let Some(output) = &args.output else {
        return Err(anyhow::anyhow!("give the file for the list with --output").context(Usage));
    };
    if output.exists() {
        let error = anyhow::anyhow!("{} already exists; give another --output", output.display());
        return Err(error.context(Usage));
    }
    if tool != LabellingTool::Fiftyone {
        check_output(output)?;
    }
    let results = match args.diverse {
        true => Results::open_embedded(&args.results, config)?,
        false => Results::open(&args.results, config)?,
    };
    let others = match &args.disagree {
        Some(other) => Some(labels(&Results::open(other, config)?)?),
        None => None,
    };
    let mut pool = Pool::new(args);
    for row in results.stored()? {
        if let Some(candidate) = candidate(row?, args, others.as_ref()).context(Usage)? {
            pool.add(candidate);
        }
    }
    let chosen = pool.chosen();
    if chosen.is_empty() {
        bail!("no row of {results} matches");
    }
    let originals = Originals::of(&results, args.root.as_deref(), config).context(Usage)?;
    let written = match tool {
        LabellingTool::Csv => write_csv(output, &chosen),
        LabellingTool::LabelStudio => write_label_studio(output, &chosen, &originals),
        LabellingTool::Fiftyone => write_fiftyone(output, &chosen, &originals),
    };
    written.with_context(|| format!("failed to write {}", output.display()))?;
    let message = format!(
        "trommel: {} to review: {}\n",
        counted(chosen.len(), "image"),
        output.display()
    );
    std::io::stderr().write_all(message.as_bytes())?;
    Ok(Exit::Success)
}

/// The label of each image by its uri.
fn labels(results: &Results) -> Result<HashMap<String, String>> {
    let mut labels = HashMap::new();
    for row in results.rows()? {
        let row = row?;
        if let Some(label) = row.label {
            labels.insert(row.uri, label);
        }
    }
    Ok(labels)
}

/// The candidate for a row, if it can be chosen at all.
fn candidate(
    row: Classification,
    args: &ExportArgs,
    others: Option<&HashMap<String, String>>,
) -> Result<Option<Candidate>> {
    let Outcome::Ok(scores) = row.outcome else {
        return Ok(None);
    };
    let Some(best) = scores.top.first() else {
        bail!(
            "{} has no label in these results: relabel them first",
            row.image.uri
        );
    };
    let label = best.label.to_string();
    let other = others.and_then(|others| others.get(&row.image.uri).cloned());
    let is_chosen = (args.label.is_empty() || args.label.contains(&label))
        && args.min_score.is_none_or(|least| best.score >= least)
        && args.max_score.is_none_or(|most| best.score <= most)
        // Images missing from the other results say nothing about agreement.
        && (others.is_none() || other.as_ref().is_some_and(|other| *other != label));
    if !is_chosen {
        return Ok(None);
    }
    let mut embedding = scores.embedding.filter(|_| args.diverse);
    if args.diverse && embedding.is_none() {
        bail!(
            "{} has no embedding, which --diverse needs; classify with --embedding",
            row.image.uri
        );
    }
    embedding
        .iter_mut()
        .for_each(|embedding| normalize(embedding));
    Ok(Some(Candidate {
        index: row.image.index,
        uri: row.image.uri,
        score: best.score,
        margin: best.score - scores.top.get(1).map_or(0.0, |second| second.score),
        label,
        other,
        embedding,
        model: format!("{} {}", row.model, row.model_version),
    }))
}

/// The least certain images so far, bounded by how many can be chosen.
struct Pool {
    by_label: BTreeMap<String, Vec<Candidate>>,
    /// For each label, and in all.
    per_class: usize,
    least_sure: usize,
    /// How many more are kept than chosen.
    spare: usize,
    is_diverse: bool,
}

impl Pool {
    fn new(args: &ExportArgs) -> Self {
        let most = |number: Option<std::num::NonZeroUsize>| number.map_or(usize::MAX, Into::into);
        Self {
            by_label: BTreeMap::new(),
            per_class: most(args.per_class),
            least_sure: most(args.least_sure),
            spare: if args.diverse { POOL } else { 1 },
            is_diverse: args.diverse,
        }
    }

    fn add(&mut self, candidate: Candidate) {
        let most = self
            .per_class
            .min(self.least_sure)
            .saturating_mul(self.spare);
        let own = self.by_label.entry(candidate.label.clone()).or_default();
        own.push(candidate);
        if own.len() >= most.saturating_mul(2) {
            own.sort_by(by_margin);
            own.truncate(most);
        }
    }

    /// At most this many per label and in all, the least certain first.
    fn chosen(self) -> Vec<Candidate> {
        let (per_class, all) = (self.per_class, self.least_sure);
        let mut chosen = Vec::new();
        for mut own in self.by_label.into_values() {
            own.sort_by(by_margin);
            own.truncate(per_class.saturating_mul(self.spare));
            chosen.extend(if self.is_diverse {
                different(own, per_class)
            } else {
                own
            });
        }
        chosen.sort_by(by_margin);
        if self.is_diverse && chosen.len() > all {
            chosen.truncate(all.saturating_mul(self.spare));
            chosen = different(chosen, all);
            chosen.sort_by(by_margin);
        }
        chosen.truncate(all);
        chosen
    }
}

fn by_margin(a: &Candidate, b: &Candidate) -> Ordering {
    a.margin.total_cmp(&b.margin).then(a.index.cmp(&b.index))
}

/// At most this many: the least certain image, and then always the one farthest from all chosen
/// ones (Gonzalez: "Clustering to Minimize the Maximum Intercluster Distance", 1985).
fn different(mut left: Vec<Candidate>, most: usize) -> Vec<Candidate> {
    if left.len() <= most {
        return left;
    }
    let mut chosen: Vec<Candidate> = Vec::with_capacity(most);
    let mut nearest = vec![f32::NEG_INFINITY; left.len()];
    let mut next = 0;
    while chosen.len() < most {
        let own = left.swap_remove(next);
        nearest.swap_remove(next);
        for (other, cosine) in left.iter().zip(&mut nearest) {
            let product = own
                .embedding
                .iter()
                .flatten()
                .zip(other.embedding.iter().flatten());
            *cosine = cosine.max(product.map(|(a, b)| a * b).sum());
        }
        chosen.push(own);
        let places = nearest.iter().enumerate();
        next = match places.min_by(|(_, a), (_, b)| a.total_cmp(b)) {
            Some((place, _)) => place,
            None => break,
        };
    }
    chosen
}

fn write_csv(output: &Path, chosen: &[Candidate]) -> Result<()> {
    let mut csv = csv::Writer::from_path(output)?;
    csv.write_record(["uri", "label", "score", "margin", "other_label", "index"])?;
    for image in chosen {
        let other = image.other.as_deref().unwrap_or_default();
        let (score, margin) = (image.score.to_string(), image.margin.to_string());
        csv.write_record([
            &image.uri,
            &image.label,
            &score,
            &margin,
            other,
            &image.index.to_string(),
        ])?;
    }
    Ok(csv.flush()?)
}

/// Where another program finds an image.
fn address(image: &Candidate, originals: &Originals) -> String {
    originals
        .link(&image.uri)
        .unwrap_or_else(|| image.uri.clone())
}

/// Tasks with predictions (<https://labelstud.io/guide/predictions>).
fn write_label_studio(output: &Path, chosen: &[Candidate], originals: &Originals) -> Result<()> {
    let task = |image: &Candidate| {
        json!({
            "data": {
                "image": address(image, originals),
                "uri": image.uri,
                "margin": image.margin,
                "other_label": image.other,
            },
            "predictions": [{
                "model_version": image.model,
                "score": image.score,
                "result": [{
                    "from_name": "label",
                    "to_name": "image",
                    "type": "choices",
                    "value": {"choices": [image.label]},
                }],
            }],
        })
    };
    let tasks: Vec<Value> = chosen.iter().map(task).collect();
    Ok(std::fs::write(output, serde_json::to_vec_pretty(&tasks)?)?)
}

/// A folder of the type FiftyOneImageClassificationDataset, whose images stay where they are
/// (<https://docs.voxel51.com/user_guide/import_datasets.html>).
fn write_fiftyone(output: &Path, chosen: &[Candidate], originals: &Originals) -> Result<()> {
    let mut classes: Vec<&str> = chosen.iter().map(|image| &*image.label).collect();
    classes.sort_unstable();
    classes.dedup();
    let (mut data, mut labels) = (Map::new(), Map::new());
    for image in chosen {
        let id = format!("{:09}", image.index);
        let file = originals.file(&image.uri);
        let place = file.map_or_else(|| image.uri.clone(), |file| file.display().to_string());
        data.insert(id.clone(), place.into());
        let attributes = json!({"margin": image.margin, "other_label": image.other});
        labels.insert(
            id,
            json!({"label": image.label, "confidence": image.score, "attributes": attributes}),
        );
    }
    std::fs::create_dir_all(output)?;
    let labels = json!({"classes": classes, "labels": labels});
    std::fs::write(
        output.join("labels.json"),
        serde_json::to_vec_pretty(&labels)?,
    )?;
    Ok(std::fs::write(
        output.join("data.json"),
        serde_json::to_vec_pretty(&data)?,
    )?)
}
