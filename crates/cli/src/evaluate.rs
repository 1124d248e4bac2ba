//! `trommel evaluate`: results against labels, or against another run's.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use trommel_storage::{ResultRow, read_rows};

use crate::agreement::compare;
use crate::args::EvaluateArgs;
use crate::exit::{Exit, Usage};

/// Runs the command.
pub(crate) fn run(args: &EvaluateArgs) -> Result<Exit> {
    if let Some(against) = &args.against {
        let agreement = compare(&args.results, against)?;
        print(&agreement, args.json)?;
        return Ok(verdict(agreement.agreement, args.min_agreement));
    }
    let evaluation = score(args)?;
    print(&evaluation, args.json)?;
    Ok(verdict(evaluation.accuracy, args.min_accuracy))
}

fn print(what: &(impl Serialize + fmt::Display), json: bool) -> Result<()> {
    if json {
        let text = serde_json::to_string_pretty(what).context("failed to write JSON")?;
        writeln!(io::stdout(), "{text}")?;
    } else {
        write!(io::stdout(), "{what}")?;
    }
    Ok(())
}

/// Whether a share is as high as it was to be.
fn verdict(share: f64, least: Option<f64>) -> Exit {
    if least.is_some_and(|least| share < least) {
        Exit::Failed
    } else {
        Exit::Success
    }
}

fn score(args: &EvaluateArgs) -> Result<Evaluation> {
    let truth = Truth::from(args).context(Usage)?;
    let mut tally = Tally::default();
    for row in read_rows(&args.results).context(Usage)? {
        let row = row?;
        match truth.of(&row) {
            Some(label) => tally.add(&label, &row),
            None => tally.unlabelled += 1,
        }
    }
    if tally.images == 0 {
        bail!(
            "none of the {} rows has a true label; see --labels and --labels-from",
            tally.unlabelled
        );
    }
    Ok(tally.finish())
}

/// Where true labels come from.
enum Truth {
    /// The folder that an image is in.
    Folders,
    /// A pass-through column.
    Column(String),
    /// By uri.
    File(HashMap<String, String>),
}

impl Truth {
    fn from(args: &EvaluateArgs) -> Result<Self> {
        if let Some(path) = &args.labels {
            return Ok(Self::File(read_labels(path)?));
        }
        match args.labels_from.as_deref() {
            Some("folders") => Ok(Self::Folders),
            Some(text) => match text.strip_prefix("column:") {
                Some(name) => Ok(Self::Column(name.to_owned())),
                None => bail!("--labels-from {text}: expected folders or column:NAME"),
            },
            None => bail!("name the true labels with --labels or --labels-from"),
        }
    }

    fn of(&self, row: &ResultRow) -> Option<String> {
        match self {
            Self::File(labels) => labels.get(&row.uri).cloned(),
            Self::Column(name) => row.columns.get(name).cloned(),
            Self::Folders => {
                let member = row.uri.rsplit('#').next()?;
                let folder = Path::new(member).parent()?.file_name()?;
                Some(folder.to_string_lossy().into_owned())
            }
        }
    }
}

/// Reads columns `uri` and `label` of a CSV or JSON Lines file.
fn read_labels(path: &Path) -> Result<HashMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Labelled {
        uri: String,
        label: serde_json::Value,
    }
    let failed = || format!("failed to read labels {}", path.display());
    let pair = |labelled: Labelled| match labelled.label {
        serde_json::Value::String(label) => (labelled.uri, label),
        other => (labelled.uri, other.to_string()),
    };
    if path.extension().is_some_and(|suffix| suffix == "csv") {
        let rows = csv::Reader::from_path(path)
            .with_context(failed)?
            .into_deserialize();
        let rows = rows.map(|row| row.map(|(uri, label): (String, String)| (uri, label)));
        return rows.collect::<Result<_, _>>().with_context(failed);
    }
    let text = std::fs::read_to_string(path).with_context(failed)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| Ok(pair(serde_json::from_str(line)?)))
        .collect::<Result<_>>()
        .with_context(failed)
}

/// Counts over the rows with a true label.
#[derive(Default)]
struct Tally {
    images: u64,
    failed: u64,
    unlabelled: u64,
    top1: u64,
    top5: u64,
    /// By the score of the predicted label, in tenths.
    bins: [Bin; 10],
    /// Rows by (true label, predicted label).
    confusion: BTreeMap<(String, String), u64>,
}

/// Rows whose best scores are alike.
#[derive(Debug, Clone, Copy, Default)]
struct Bin {
    images: u64,
    right: u64,
    /// Sum of the scores.
    score: f64,
}

/// What the predictions are worth.
#[derive(Debug, Serialize)]
struct Evaluation {
    /// Rows with a true label.
    images: u64,
    /// Rows without a true label.
    unlabelled: u64,
    /// Rows that failed; they count as wrong.
    failed: u64,
    accuracy: f64,
    top5_accuracy: f64,
    /// Expected calibration error (Guo et al., 2017, with ten bins): by how much the score of the
    /// predicted label and the share of right ones differ, on average, 0 to 1. `null` without scores
    /// from 0 to 1.
    calibration_error: Option<f64>,
    calibration: Vec<CalibrationBin>,
    classes: Vec<ClassScore>,
    confusion: Vec<Confused>,
}

/// Images whose predicted labels have scores in one tenth of 0 to 1.
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
    /// Images that truly are of this class.
    images: u64,
    /// Of the images given this label, the share that have it. `null` when none was given it.
    precision: Option<f64>,
    /// Of the images that have this label, the share given it. `null` when none has it.
    recall: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Confused {
    label: String,
    predicted: String,
    images: u64,
}

impl Tally {
    fn add(&mut self, truth: &str, row: &ResultRow) {
        self.images += 1;
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
        }
        self.top5 += u64::from(row.top.iter().take(5).any(|label| &*label.label == truth));
        *self
            .confusion
            .entry((truth.to_owned(), predicted.clone()))
            .or_default() += 1;
    }

    fn finish(self) -> Evaluation {
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
        Evaluation {
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

/// Confusions shown to people; JSON has them all.
const SHOWN: usize = 10;

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "accuracy        {:.2} % of {} images",
            100.0 * self.accuracy,
            self.images
        )?;
        writeln!(f, "top-5 accuracy  {:.2} %", 100.0 * self.top5_accuracy)?;
        if let Some(error) = self.calibration_error {
            writeln!(f, "calibration     {:.2} % off", 100.0 * error)?;
        }
        if self.failed > 0 {
            writeln!(
                f,
                "failed          {} images, counted as wrong",
                self.failed
            )?;
        }
        if self.unlabelled > 0 {
            writeln!(f, "unlabelled      {} rows, left out", self.unlabelled)?;
        }
        let width = self
            .classes
            .iter()
            .map(|class| class.label.chars().count())
            .max()
            .unwrap_or(0);
        let width = width.max("class".len());
        writeln!(f, "\n{:width$}  images  precision  recall", "class")?;
        let percent = |share: Option<f64>| {
            share.map_or_else(|| "–".to_owned(), |share| format!("{:.1} %", 100.0 * share))
        };
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
                "{:>6} × {} taken for {}",
                cell.images, cell.label, cell.predicted
            )?;
        }
        Ok(())
    }
}
