//! A dry run's sink: rows are counted and measured, but not stored.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use trommel_preprocess::Budget;
use trommel_sink::{Committed, Format, JobRecord, Ledger, ResultSink, Summary};
use trommel_storage::StorageError;
use trommel_types::{Classification, Column, Scalar};

/// Number of blocks of a sample: the scatter of their means gives the uncertainty of the overall
/// mean.
const BLOCKS: usize = 8;
/// Student's t for a two-sided interval of 95 % with seven degrees of freedom.
const STUDENT_T: f64 = 2.365;
/// Least rows per block; the mean of fewer says nothing about the scatter.
const LEAST_ROWS: usize = 4;

/// The result of a dry run's sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// Images of the sample.
    pub images: u64,
    /// Mean seconds between rows.
    pub seconds_each: f64,
    /// Half of the 95 % interval of that time, from the means of eight blocks of rows (batch means;
    /// Law, *Simulation Modeling and Analysis*, 5th edition, section 9.5.3). Absent if the sample
    /// is too small.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plus_or_minus: Option<f64>,
    /// Mean encoded bytes per image.
    pub image_bytes: f64,
    /// Mean bytes per row in the output, without the fixed parts of a file.
    pub row_bytes: f64,
    /// Share of the images that came from S3, 0 to 1.
    pub from_s3: f64,
    /// Tokens per image, if servers count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<TrialTokens>,
}

/// Mean tokens per image of the sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TrialTokens {
    /// Input tokens, as counted by the server.
    pub read: f64,
    /// Output tokens.
    pub written: f64,
    /// Input tokens of the image itself, by the formula of the model's family. Absent if no family
    /// is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<f64>,
}

/// Where the result of a trial is left when its sink is finished.
pub type TrialOutcome = Arc<Mutex<Option<Trial>>>;

/// Rows that are measured and discarded.
pub struct TrialSink {
    job: JobRecord,
    ledger: Ledger,
    format: Format,
    rows: Vec<Arc<Classification>>,
    outcome: TrialOutcome,
    /// The size of sent images, if known.
    budget: Option<Budget>,
    /// The columns of tokens, if rows have them.
    tokens: Option<[usize; 2]>,
}

impl TrialSink {
    /// For rows of a job in this format. Rows are kept until the end, so a trial should have a few
    /// hundred images. The last columns of the job are `answers`, those of its model.
    pub fn new(job: JobRecord, format: Format, answers: &[Column], outcome: TrialOutcome) -> Self {
        let first = job.columns.len().saturating_sub(answers.len());
        let place = |name: &str| {
            let place = answers.iter().position(|column| column.name == name);
            place.map(|place| first + place)
        };
        let tokens = place("prompt_tokens").zip(place("completion_tokens"));
        Self {
            budget: None,
            tokens: tokens.map(<[usize; 2]>::from),
            job,
            ledger: Ledger::default(),
            format,
            rows: Vec::new(),
            outcome,
        }
    }

    /// Counts the tokens of images of this size by the formula of their model's family.
    #[must_use]
    pub fn with_budget(self, budget: Option<Budget>) -> Self {
        Self { budget, ..self }
    }

    /// The result so far; `None` with fewer than two rows.
    pub fn trial(&self) -> Option<Trial> {
        let mut times: Vec<_> = self.rows.iter().map(|row| row.finished_at).collect();
        times.sort_unstable();
        let (seconds_each, plus_or_minus) = seconds_each(&times)?;
        let count = self.rows.len() as f64;
        let bytes: u64 = self.rows.iter().filter_map(|row| row.bytes).sum();
        let from_s3 = self
            .rows
            .iter()
            .filter(|row| row.image.uri.starts_with("s3://"));
        Some(Trial {
            images: self.rows.len() as u64,
            seconds_each,
            plus_or_minus,
            image_bytes: bytes as f64 / count,
            row_bytes: self.row_bytes(),
            from_s3: from_s3.count() as f64 / count,
            tokens: self.tokens(),
        })
    }

    /// The tokens of all rows, including those without requests, divided by their number.
    fn tokens(&self) -> Option<TrialTokens> {
        let count = self.rows.len() as f64;
        let places = self.tokens?;
        let of = |row: &Classification, place: usize| match row.image.columns.get(place) {
            Some(Scalar::Int(tokens)) => Some(*tokens as f64),
            _ => None,
        };
        let [read, written] = places.map(|place| {
            let tokens = self.rows.iter().filter_map(|row| of(row, place));
            tokens.sum::<f64>() / count
        });
        let asked = self.rows.iter().filter(|row| of(row, places[0]).is_some());
        let image = asked.map(|row| {
            let size = row.original?;
            let tokens = self.budget.as_ref()?.tokens(size.width, size.height)?;
            Some(f64::from(tokens))
        });
        let image: Option<f64> = image.sum();
        let image = image.filter(|_| self.budget.is_some());
        Some(TrialTokens {
            read,
            written,
            image: image.map(|image| image / count),
        })
    }

    /// The difference of two parts, to exclude the fixed parts of a file.
    fn row_bytes(&self) -> f64 {
        let mut rows = self.rows.clone();
        rows.sort_by_key(|row| row.image.index);
        let half = rows.len() / 2;
        let bytes = |rows: &[Arc<Classification>]| self.format.part_bytes(&self.job, rows);
        match (bytes(&rows), bytes(&rows[..half])) {
            (Ok(all), Ok(part)) => all.saturating_sub(part) as f64 / (rows.len() - half) as f64,
            // A real part would fail in the same way, and report it.
            _ => 0.0,
        }
    }
}

/// The times of steady work: without the first fifth, while queues fill, and the last tenth, while
/// they drain. The rows of a batch complete together, so the range begins and ends with the last row
/// of a batch: half a batch too much is half of a short sample.
fn steady(times: &[i64]) -> &[i64] {
    let (first, behind) = (times.len() / 5, times.len() - times.len() / 10);
    let gap = |row: &usize| {
        times
            .get(row + 1)
            .map_or(i64::MAX, |next| next - times[*row])
    };
    let reach = times.len() / 4;
    let ends = |rows: Range<usize>| {
        let largest = rows.clone().map(|row| gap(&row)).max().unwrap_or_default();
        rows.filter(move |row| gap(row) >= largest / 4)
    };
    let from = ends(first..behind.min(first + reach + 1)).next();
    let to = ends(first.max(behind.saturating_sub(reach + 1))..behind).next_back();
    match (from, to) {
        (Some(from), Some(to)) if from < to => &times[from..=to],
        _ => &times[first..behind],
    }
}

/// The mean time between rows with these completion times in microseconds, in rising order, and
/// half of its interval.
fn seconds_each(times: &[i64]) -> Option<(f64, Option<f64>)> {
    let steady = steady(times);
    let seconds = |from: usize, to: usize| (steady[to] - steady[from]) as f64 / 1e6;
    let last = steady.len().checked_sub(1).filter(|last| *last > 0)?;
    let mean = seconds(0, last) / last as f64;
    if mean <= 0.0 {
        return None;
    }
    let rows = last / BLOCKS;
    if rows < LEAST_ROWS {
        return Some((mean, None));
    }
    let block = |number: usize| seconds(number * rows, (number + 1) * rows) / rows as f64;
    let means: Vec<_> = (0..BLOCKS).map(block).collect();
    let centre = means.iter().sum::<f64>() / BLOCKS as f64;
    let squares: f64 = means.iter().map(|mean| (mean - centre).powi(2)).sum();
    let deviation = (squares / (BLOCKS - 1) as f64).sqrt();
    Some((mean, Some(STUDENT_T * deviation / (BLOCKS as f64).sqrt())))
}

#[async_trait]
impl ResultSink for TrialSink {
    fn job(&self) -> &JobRecord {
        &self.job
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    async fn commit(&mut self, rows: Vec<Arc<Classification>>) -> Result<Committed, StorageError> {
        let committed = self.ledger.committed();
        let new = rows
            .iter()
            .filter(|row| !committed.contains(row.image.index));
        self.rows.extend(new.cloned());
        self.ledger.count(rows)
    }

    async fn finish(self: Box<Self>) -> Result<Summary, StorageError> {
        let trial = self.trial();
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = trial;
        Ok(self.summary())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_row_is_that_of_steady_work() {
        // A slow start, then one row every 2 ms, then a slow end.
        let mut times: Vec<i64> = (0..100).map(|row| row * 50_000).collect();
        times.extend((1..=350).map(|row| 4_950_000 + row * 2_000));
        let last = times[times.len() - 1];
        times.extend((1..=50).map(|row| last + row * 90_000));
        let (each, interval) = seconds_each(&times).unwrap();
        assert!((each - 0.002).abs() < 1e-9, "{each}");
        assert!(interval.unwrap() < 1e-9, "{interval:?}");
    }

    #[test]
    fn the_interval_is_that_of_the_means_of_blocks() {
        // Rows of 1 ms and of 3 ms, alternating in groups of forty.
        let steps = (0..320).map(|row| if row / 40 % 2 == 0 { 1_000 } else { 3_000 });
        let mut at = 0;
        let steady: Vec<i64> = std::iter::once(0)
            .chain(steps.map(|step| {
                at += step;
                at
            }))
            .collect();
        // The parts cut off at the start and the end.
        let before = (1..=92).rev().map(|row| -row * 2_000);
        let behind = (1..=45).map(|row| at + row * 2_000);
        let times: Vec<_> = before.chain(steady).chain(behind).collect();
        let (each, interval) = seconds_each(&times).unwrap();
        assert!((each - 0.002).abs() < 5e-5, "{each}");
        // Eight means of 1 and 3 ms deviate by 1.069 ms.
        let expected = 2.365 * 0.001_069 / 8_f64.sqrt();
        assert!(
            (interval.unwrap() / expected - 1.0).abs() < 0.1,
            "{interval:?}"
        );
    }

    /// Rows of two sessions that end their batches together: `tune` took such a sample for a rate without end.
    #[test]
    fn the_time_of_a_row_is_that_of_whole_batches() {
        for (rounds, together) in [(4, 32), (5, 32), (9, 16), (30, 2), (200, 1)] {
            let row = |row: i64| row / together * 40_000 + row % together * 10;
            let times: Vec<_> = (0..rounds * together).map(row).collect();
            let (each, _) = seconds_each(&times).unwrap();
            let expected = 0.04 / together as f64;
            assert!(
                (each / expected - 1.0).abs() < 0.02,
                "{rounds} of {together}: {each}"
            );
        }
    }

    #[test]
    fn few_rows_have_no_interval_and_one_has_no_rate() {
        assert_eq!(seconds_each(&[]), None);
        assert_eq!(seconds_each(&[7]), None);
        assert_eq!(seconds_each(&[7, 7, 7]), None);
        assert_eq!(seconds_each(&[0, 1_000_000]), Some((1.0, None)));
    }
}
