//! Counts over rows with true labels, and the resulting metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::{Result, bail};
use serde::Serialize;
use trommel_sink::ResultRow;

use crate::lines::counted;

use super::thresholds::{AtThreshold, ByScore, percent};
use super::truth::Truth;

/// Counts over the rows with a true label.
#[derive(Default)]
pub(super) struct Tally {
    images: u64,
    failed: u64,
    unlabelled: u64,
    /// The uri of the first row without a true label.
    left_out: Option<String>,
    /// True labels, and labels among the classes of rows.
    truths: BTreeSet<String>,
    given: BTreeSet<String>,
    by_score: ByScore,
    /// The same by predicted label.
    classes: BTreeMap<String, ByScore>,
    top1: u64,
    top5: u64,
    /// By score of the predicted label, in tenths.
    bins: [Bin; 10],
    /// Rows by (true label, predicted label).
    confusion: BTreeMap<(String, String), u64>,
}

/// Rows whose best scores are similar.
#[derive(Debug, Clone, Copy, Default)]
struct Bin {
    images: u64,
    right: u64,
    /// Sum of the scores.
    score: f64,
}

/// The quality of the predictions.
#[derive(Debug, Serialize)]
pub(super) struct Evaluation {
    /// Rows with a true label.
    images: u64,
    /// Rows without a true label.
    unlabelled: u64,
    /// Rows that failed; they count as wrong.
    failed: u64,
    pub(super) accuracy: f64,
    top5_accuracy: f64,
    /// Expected calibration error (Guo et al., 2017, with ten bins): the mean difference between
    /// the score of the predicted label and the share of correct ones, 0 to 1. `null` without
    /// scores from 0 to 1.
    calibration_error: Option<f64>,
    calibration: Vec<CalibrationBin>,
    /// Precision and recall by threshold; empty without scores from 0 to 1.
    thresholds: Vec<AtThreshold>,
    /// The threshold that reaches the requested precision.
    #[serde(skip_serializing_if = "Option::is_none")]
    reaching: Option<Reaching>,
    /// True labels that are not among any row's classes.
    never_given: Vec<String>,
    classes: Vec<ClassScore>,
    confusion: Vec<Confused>,
}

/// The lowest thresholds that reach a precision.
#[derive(Debug, Serialize)]
struct Reaching {
    precision: f64,
    /// For all classes; `null` if no threshold reaches it.
    all: Option<AtThreshold>,
    /// For each class.
    classes: BTreeMap<String, Option<AtThreshold>>,
}

/// Images whose predicted labels have scores in one tenth.
#[derive(Debug, Serialize)]
struct CalibrationBin {
    /// Lower end of the tenth.
    from: f64,
    images: u64,
    mean_score: f64,
    accuracy: f64,
}

#[derive(Debug, Serialize)]
struct ClassScore {
    label: String,
    /// Images of this class.
    images: u64,
    /// Share of the images predicted as this class that belong to it. `null` without such images.
    precision: Option<f64>,
    /// Share of the images of this class that are predicted as it. `null` without such images.
    recall: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Confused {
    label: String,
    predicted: String,
    images: u64,
}

impl Tally {
    /// Counts a row with its true label.
    pub(super) fn add(&mut self, truth: &str, row: &ResultRow) {
        self.images += 1;
        note(&mut self.truths, truth);
        for label in row
            .top
            .iter()
            .map(|top| &*top.label)
            .chain(row.label.as_deref())
        {
            note(&mut self.given, label);
        }
        let Some(predicted) = &row.label else {
            self.failed += 1;
            *self
                .confusion
                .entry((truth.to_owned(), "(failed)".to_owned()))
                .or_default() += 1;
            return;
        };
        let is_right = u64::from(predicted == truth);
        self.top1 += is_right;
        if let Some(score) = row.score.filter(|score| (0.0..=1.0).contains(score)) {
            let bin = &mut self.bins[((10.0 * score) as usize).min(9)];
            bin.images += 1;
            bin.right += is_right;
            bin.score += f64::from(score);
            self.by_score.add(score, is_right > 0);
            if !self.classes.contains_key(predicted) {
                self.classes.insert(predicted.clone(), ByScore::default());
            }
            let class = self.classes.get_mut(predicted);
            class.expect("it is there").add(score, is_right > 0);
        }
        self.top5 += u64::from(row.top.iter().take(5).any(|label| &*label.label == truth));
        *self
            .confusion
            .entry((truth.to_owned(), predicted.clone()))
            .or_default() += 1;
    }

    /// Counts a row without a true label.
    pub(super) fn leave_out(&mut self, row: &ResultRow) {
        self.unlabelled += 1;
        self.left_out.get_or_insert_with(|| row.uri.clone());
    }

    /// Refuses true labels that are unrelated to the rows.
    ///
    /// # Errors
    /// If no row has a true label, or no true label is a class of the model.
    pub(super) fn check(&self, truth: &Truth) -> Result<()> {
        if self.images == 0 {
            let uri = self.left_out.as_deref().unwrap_or_default();
            bail!(
                "none of the {} rows has a true label: {}",
                self.unlabelled,
                match &self.left_out {
                    Some(_) => truth.why_none(uri),
                    None => "there are no rows".to_owned(),
                }
            );
        }
        if self.truths.is_disjoint(&self.given) && !self.given.is_empty() {
            bail!(
                "none of the true labels from {truth} ({}) is among the classes of the rows ({})",
                some(&self.truths),
                some(&self.given)
            );
        }
        Ok(())
    }

    /// Computes the metrics, with the thresholds that reach `precision`.
    pub(super) fn finish(self, precision: Option<f64>) -> Evaluation {
        let share = |hits: u64, of: u64| hits as f64 / of as f64;
        let mut labels: Vec<&String> = self.confusion.keys().map(|(truth, _)| truth).collect();
        labels.dedup();
        let count = |wanted: &dyn Fn(&str, &str) -> bool| -> u64 {
            let cells = self.confusion.iter();
            cells
                .filter(|((truth, given), _)| wanted(truth, given))
                .map(|(_, count)| count)
                .sum()
        };
        let classes = labels
            .iter()
            .map(|label| {
                let hits = count(&|truth, given| truth == *label && given == *label);
                let images = count(&|truth, _| truth == *label);
                let given = count(&|_, given| given == *label);
                ClassScore {
                    label: (*label).clone(),
                    images,
                    precision: (given > 0).then(|| share(hits, given)),
                    recall: (images > 0).then(|| share(hits, images)),
                }
            })
            .collect();
        let filled = self
            .bins
            .iter()
            .enumerate()
            .filter(|(_, bin)| bin.images > 0);
        let calibration: Vec<_> = filled
            .map(|(tenth, bin)| CalibrationBin {
                from: tenth as f64 / 10.0,
                images: bin.images,
                mean_score: bin.score / bin.images as f64,
                accuracy: share(bin.right, bin.images),
            })
            .collect();
        let scored: u64 = calibration.iter().map(|bin| bin.images).sum();
        let off = calibration
            .iter()
            .map(|bin| share(bin.images, scored) * (bin.mean_score - bin.accuracy).abs());
        let right_of = |label: &str| self.truths_of(label);
        let reaching = precision.map(|precision| Reaching {
            precision,
            all: self.by_score.reaching(precision, self.images),
            classes: self
                .classes
                .iter()
                .map(|(label, by_score)| {
                    (label.clone(), by_score.reaching(precision, right_of(label)))
                })
                .collect(),
        });
        Evaluation {
            thresholds: self.by_score.reported(self.images),
            reaching,
            never_given: self.truths.difference(&self.given).cloned().collect(),
            calibration_error: (scored > 0).then(|| off.sum()),
            calibration,
            images: self.images,
            unlabelled: self.unlabelled,
            failed: self.failed,
            accuracy: share(self.top1, self.images),
            top5_accuracy: share(self.top5, self.images),
            classes,
            confusion: self
                .confusion
                .into_iter()
                .map(|((label, predicted), images)| Confused {
                    label,
                    predicted,
                    images,
                })
                .collect(),
        }
    }
}

impl Tally {
    /// Images of a class.
    fn truths_of(&self, label: &str) -> u64 {
        let cells = self.confusion.iter();
        let cells = cells.filter(|((truth, _), _)| truth == label);
        cells.map(|(_, count)| count).sum()
    }
}

/// Inserts a label into a set that usually has it already.
fn note(labels: &mut BTreeSet<String>, label: &str) {
    if !labels.contains(label) {
        labels.insert(label.to_owned());
    }
}

/// The first few labels.
fn some(labels: &BTreeSet<String>) -> String {
    let first: Vec<_> = labels.iter().take(5).map(String::as_str).collect();
    let more = if labels.len() > first.len() {
        ", …"
    } else {
        ""
    };
    format!("{}{more}", first.join(", "))
}

/// Confusions shown to people; JSON has them all.
const SHOWN: usize = 10;

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "accuracy        {:.2} % of {}",
            100.0 * self.accuracy,
            counted(self.images, "image")
        )?;
        writeln!(f, "top-5 accuracy  {:.2} %", 100.0 * self.top5_accuracy)?;
        if let Some(error) = self.calibration_error {
            writeln!(f, "calibration     {:.2} % expected error", 100.0 * error)?;
        }
        if self.failed > 0 {
            writeln!(
                f,
                "failed          {}, counted as wrong",
                counted(self.failed, "image")
            )?;
        }
        if self.unlabelled > 0 {
            let rows = counted(self.unlabelled, "row");
            writeln!(f, "unlabelled      {rows}, not counted")?;
        }
        if !self.never_given.is_empty() {
            let labels = self.never_given.join(", ");
            writeln!(
                f,
                "never predicted {labels}: no row has these among its classes"
            )?;
        }
        let width = self
            .classes
            .iter()
            .map(|class| class.label.chars().count())
            .max()
            .unwrap_or(0);
        let width = width.max("class".len());
        writeln!(f, "\n{:width$}  images  precision  recall", "class")?;
        for class in &self.classes {
            let ClassScore {
                label,
                images,
                precision,
                recall,
            } = class;
            let (precision, recall) = (percent(*precision), percent(*recall));
            writeln!(
                f,
                "{label:width$}  {images:>6}  {precision:>9}  {recall:>6}"
            )?;
        }
        let mut wrong: Vec<_> = self
            .confusion
            .iter()
            .filter(|cell| cell.label != cell.predicted)
            .collect();
        wrong.sort_by_key(|cell| std::cmp::Reverse(cell.images));
        if !wrong.is_empty() {
            writeln!(f, "\nmost confused")?;
        }
        for cell in wrong.iter().take(SHOWN) {
            writeln!(
                f,
                "{:>6} × {} classified as {}",
                cell.images, cell.label, cell.predicted
            )?;
        }
        if !self.thresholds.is_empty() {
            writeln!(f, "\nthreshold  images  precision   recall")?;
        }
        for at in &self.thresholds {
            writeln!(f, "{at}")?;
        }
        match &self.reaching {
            Some(reaching) => reaching.fmt(f),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Reaching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.classes.keys().map(|label| label.chars().count());
        let width = width.max().unwrap_or(0).max("all classes".len());
        let wanted = format!("for {:.1} %", 100.0 * self.precision);
        writeln!(
            f,
            "\n{wanted:width$}  threshold  images  precision   recall"
        )?;
        let classes = self.classes.iter().map(|(label, at)| (label.as_str(), at));
        for (label, at) in [("all classes", &self.all)].into_iter().chain(classes) {
            match at {
                Some(at) => writeln!(f, "{label:width$}  {at}")?,
                None => writeln!(f, "{label:width$}  no threshold reaches it")?,
            }
        }
        Ok(())
    }
}
