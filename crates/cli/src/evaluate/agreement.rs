//! How far two runs over the same images agree, such as a model and its quantised copy, two
//! devices, or two versions.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use anyhow::{Result, bail};
use serde::Serialize;
use trommel_sink::ResultRow;

use super::truth::uri_key;
use crate::lines::counted;
use crate::results::Results;

/// Shown in place of the label of an image that could not be classified.
const FAILED: &str = "(failed)";
/// Changes shown to people; JSON has them all.
const SHOWN: usize = 10;

/// Agreement with the results of another run. Images are matched by uri.
#[derive(Debug, Serialize)]
pub(super) struct Agreement {
    /// Images with a row in both, and a label in at least one of them.
    images: u64,
    /// Share of these with the same label in both.
    pub(super) agreement: f64,
    /// Mean change of the score of the other run's label, over images with a label in both.
    mean_score_change: Option<f64>,
    /// The largest such change.
    worst_score_change: Option<ScoreChange>,
    /// Images that failed here only; they count as different.
    failed_here: u64,
    /// Images that failed in the other run only; they count as different.
    failed_there: u64,
    /// Images that failed in both; they are left out.
    failed_in_both: u64,
    /// Rows whose image has no row in the other run.
    only_here: u64,
    /// Images of the other run that have no row here.
    only_there: u64,
    /// By the other run's label.
    classes: Vec<ClassAgreement>,
    /// Which labels became which, the most frequent first.
    changed: Vec<Changed>,
}

/// The change in score of one image's label.
#[derive(Debug, Clone, Serialize)]
struct ScoreChange {
    uri: String,
    label: String,
    /// Score in the other run.
    from: f32,
    /// Score here; an upper bound if the label is no longer among the best.
    to: f32,
}

#[derive(Debug, Serialize)]
struct ClassAgreement {
    label: String,
    /// Images with this label in the other run.
    images: u64,
    /// Share of them with this label here.
    agreement: f64,
    mean_score_change: Option<f64>,
    worst_score_change: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Changed {
    from: String,
    to: String,
    images: u64,
}

/// The relevant fields of a row of the other run.
struct Other {
    label: Option<(String, f32)>,
    is_met: bool,
}

/// Compares results with those of another run.
///
/// # Errors
/// If one of them cannot be read, or they have no images in common.
pub(super) fn compare(results: &Results, against: &Results) -> Result<Agreement> {
    let mut others = HashMap::new();
    for row in against.rows()? {
        let row = row?;
        let label = row.label.zip(row.score);
        let is_met = false;
        others.insert(uri_key(&row.uri).to_owned(), Other { label, is_met });
    }
    let mut tally = Tally::default();
    for row in results.rows()? {
        let row = row?;
        match others.get_mut(uri_key(&row.uri)) {
            Some(other) => {
                other.is_met = true;
                tally.add(&row, other.label.as_ref());
            }
            None => tally.only_here += 1,
        }
    }
    let only_there = others.values().filter(|other| !other.is_met).count() as u64;
    if tally.images == 0 {
        bail!(
            "{} and {} have no classified image in common; images are distinguished by their uri",
            results,
            against
        );
    }
    Ok(tally.finish(only_there))
}

#[derive(Default)]
struct Tally {
    images: u64,
    failed_here: u64,
    failed_there: u64,
    failed_in_both: u64,
    only_here: u64,
    worst: Option<ScoreChange>,
    /// By the other run's label.
    classes: BTreeMap<String, Class>,
    /// Images by (label in the other run, label here).
    labels: BTreeMap<(String, String), u64>,
}

#[derive(Default)]
struct Class {
    scored: u64,
    change: f64,
    worst: f64,
}

impl ScoreChange {
    /// `None` if a score is NaN.
    fn of(row: &ResultRow, label: &str, from: f32) -> Option<Self> {
        let same = row.top.iter().find(|top| &*top.label == label);
        let to = same.or(row.top.last()).map(|top| top.score);
        // A class that is not among the best has at most the last one's score.
        let to = to.or(row.score)?;
        (from.is_finite() && to.is_finite()).then(|| Self {
            uri: row.uri.clone(),
            label: label.to_owned(),
            from,
            to,
        })
    }

    fn size(&self) -> f64 {
        (f64::from(self.from) - f64::from(self.to)).abs()
    }
}

impl Tally {
    fn add(&mut self, row: &ResultRow, other: Option<&(String, f32)>) {
        match (&row.label, other) {
            (None, None) => {
                self.failed_in_both += 1;
                return;
            }
            (None, Some(_)) => self.failed_here += 1,
            (Some(_), None) => self.failed_there += 1,
            (Some(_), Some((label, score))) => {
                let class = self.classes.entry(label.clone()).or_default();
                if let Some(change) = ScoreChange::of(row, label, *score) {
                    let size = change.size();
                    class.scored += 1;
                    class.change += size;
                    class.worst = class.worst.max(size);
                    if self.worst.as_ref().is_none_or(|worst| size > worst.size()) {
                        self.worst = Some(change);
                    }
                }
            }
        }
        self.images += 1;
        let from = other.map_or(FAILED, |(label, _)| label).to_owned();
        let to = row.label.as_deref().unwrap_or(FAILED).to_owned();
        *self.labels.entry((from, to)).or_default() += 1;
    }

    fn finish(self, only_there: u64) -> Agreement {
        let share = |part: u64, of: u64| part as f64 / of as f64;
        let mean = |change: f64, scored: u64| (scored > 0).then(|| change / scored as f64);
        let (scored, change) = self.classes.values().fold((0, 0.0), |(count, sum), class| {
            (count + class.scored, sum + class.change)
        });
        let mut images_of: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for ((from, to), images) in &self.labels {
            let (all, same) = images_of.entry(from).or_default();
            *all += images;
            *same += if from == to { *images } else { 0 };
        }
        let same = images_of.values().map(|(_, same)| same).sum();
        let classes = images_of.iter().filter(|(label, _)| **label != FAILED);
        let classes = classes.map(|(label, (images, same))| {
            let class = self.classes.get(*label);
            ClassAgreement {
                label: (*label).to_owned(),
                images: *images,
                agreement: share(*same, *images),
                mean_score_change: class.and_then(|class| mean(class.change, class.scored)),
                worst_score_change: class.map(|class| class.worst),
            }
        });
        let classes = classes.collect();
        let moved = self.labels.iter().filter(|((from, to), _)| from != to);
        let mut changed: Vec<_> = moved
            .map(|((from, to), images)| Changed {
                from: from.clone(),
                to: to.clone(),
                images: *images,
            })
            .collect();
        changed.sort_by_key(|changed| std::cmp::Reverse(changed.images));
        Agreement {
            images: self.images,
            agreement: share(same, self.images),
            mean_score_change: mean(change, scored),
            worst_score_change: self.worst,
            failed_here: self.failed_here,
            failed_there: self.failed_there,
            failed_in_both: self.failed_in_both,
            only_here: self.only_here,
            only_there,
            classes,
            changed,
        }
    }
}

impl fmt::Display for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let change = |change: Option<f64>| {
            change.map_or_else(|| "–".to_owned(), |change| format!("{change:.4}"))
        };
        let (share, images) = (100.0 * self.agreement, counted(self.images, "image"));
        writeln!(f, "agreement           {share:.2} % of {images}")?;
        writeln!(f, "mean score change   {}", change(self.mean_score_change))?;
        if let Some(worst) = &self.worst_score_change {
            let ScoreChange {
                uri,
                label,
                from,
                to,
            } = worst;
            let size = worst.size();
            writeln!(
                f,
                "worst score change  {size:.4}, {label} from {from:.4} to {to:.4} in {uri}"
            )?;
        }
        let (here, there, both) = (self.failed_here, self.failed_there, self.failed_in_both);
        if here + there + both > 0 {
            writeln!(
                f,
                "failed              {here} only here, {there} only there, counted as different; {both} in both, not counted"
            )?;
        }
        let (here, there) = (self.only_here, self.only_there);
        if here + there > 0 {
            writeln!(
                f,
                "not counted         {here} rows only here, {there} only there"
            )?;
        }
        let width = self.classes.iter().map(|class| class.label.chars().count());
        let width = width.max().unwrap_or(0).max("class".len());
        writeln!(
            f,
            "\n{:width$}  images  agreement  mean change  worst change",
            "class"
        )?;
        for class in &self.classes {
            let (mean, worst) = (change(class.mean_score_change), class.worst_score_change);
            writeln!(
                f,
                "{:width$}  {:>6}  {:>7.1} %  {mean:>11}  {:>12}",
                class.label,
                class.images,
                100.0 * class.agreement,
                change(worst)
            )?;
        }
        if !self.changed.is_empty() {
            writeln!(f, "\nmost changed")?;
        }
        for Changed { from, to, images } in self.changed.iter().take(SHOWN) {
            writeln!(f, "{images:>6} × {from} became {to}")?;
        }
        Ok(())
    }
}
