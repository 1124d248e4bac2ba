//! Gathers the data of a report in one pass over the rows, with bounded memory.

use std::collections::BTreeMap;

use trommel_sink::ResultRow;

/// Bars of the histogram of scores.
pub(super) const SCORE_BARS: usize = 20;
/// Examples kept per kind of failure.
const FAILURE_EXAMPLES: usize = 5;
/// Uncertain images kept: those whose two best classes are closest.
const UNSURE: usize = 24;

/// A summary of the rows.
pub(super) struct Gathered {
    /// Images kept per class, with the highest and with the lowest scores.
    per_class: usize,
    pub(super) rows: u64,
    pub(super) failed: u64,
    pub(super) classes: BTreeMap<String, Class>,
    pub(super) scores: [u64; SCORE_BARS],
    /// By the difference of their two best scores, smallest first.
    pub(super) unsure: Best,
    pub(super) failures: BTreeMap<String, Failures>,
    /// Number of rows by the second in which they finished.
    pub(super) seconds: BTreeMap<i64, u64>,
}

/// Images of one label.
pub(super) struct Class {
    pub(super) images: u64,
    pub(super) score_sum: f64,
    pub(super) most_sure: Best,
    pub(super) least_sure: Best,
}

/// Failures of one kind.
#[derive(Default)]
pub(super) struct Failures {
    pub(super) images: u64,
    /// Uri and error message.
    pub(super) examples: Vec<(String, String)>,
}

/// An image in the report.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shown {
    pub(super) uri: String,
    pub(super) score: f32,
    /// The second-best class and its score.
    pub(super) second: Option<(String, f32)>,
    pub(super) label: String,
}

/// The images with the smallest keys, up to a limit.
pub(super) struct Best {
    kept: usize,
    images: Vec<(f32, Shown)>,
}

impl Best {
    fn new(kept: usize) -> Self {
        Self {
            kept,
            images: Vec::new(),
        }
    }

    fn offer(&mut self, key: f32, image: impl FnOnce() -> Shown) {
        let is_full = self.images.len() >= self.kept;
        if key.is_nan() || (is_full && self.images.last().is_none_or(|last| last.0 <= key)) {
            return;
        }
        let place = self.images.partition_point(|kept| kept.0 <= key);
        self.images.insert(place, (key, image()));
        self.images.truncate(self.kept);
    }

    /// The images, smallest key first.
    pub(super) fn images(&self) -> impl Iterator<Item = &Shown> {
        self.images.iter().map(|(_, image)| image)
    }
}

impl Gathered {
    pub(super) fn new(per_class: usize) -> Self {
        Self {
            per_class,
            rows: 0,
            failed: 0,
            classes: BTreeMap::new(),
            scores: [0; SCORE_BARS],
            unsure: Best::new(UNSURE),
            failures: BTreeMap::new(),
            seconds: BTreeMap::new(),
        }
    }

    pub(super) fn add(&mut self, row: &ResultRow) {
        self.rows += 1;
        if let Some(finished) = row.finished_at {
            *self.seconds.entry(finished / 1_000_000).or_default() += 1;
        }
        match (&row.label, row.score) {
            (Some(label), Some(score)) => self.add_label(row, label, score),
            _ => self.add_failure(row),
        }
    }

    fn add_failure(&mut self, row: &ResultRow) {
        self.failed += 1;
        let kind = row.error_kind.clone().unwrap_or_default();
        let failures = self.failures.entry(kind).or_default();
        failures.images += 1;
        if failures.examples.len() < FAILURE_EXAMPLES {
            let said = row.error.clone().unwrap_or_default();
            failures.examples.push((row.uri.clone(), said));
        }
    }

    fn add_label(&mut self, row: &ResultRow, label: &str, score: f32) {
        let bar = (score.clamp(0.0, 1.0) * SCORE_BARS as f32) as usize;
        self.scores[bar.min(SCORE_BARS - 1)] += 1;
        let second = row.top.get(1);
        let shown = || Shown {
            uri: row.uri.clone(),
            score,
            second: second.map(|second| (second.label.to_string(), second.score)),
            label: label.to_owned(),
        };
        if let Some(second) = second {
            self.unsure.offer(score - second.score, shown);
        }
        if !self.classes.contains_key(label) {
            let class = Class {
                images: 0,
                score_sum: 0.0,
                most_sure: Best::new(self.per_class),
                least_sure: Best::new(self.per_class),
            };
            self.classes.insert(label.to_owned(), class);
        }
        let class = self.classes.get_mut(label).expect("it was just inserted");
        class.images += 1;
        class.score_sum += f64::from(score);
        class.most_sure.offer(-score, shown);
        class.least_sure.offer(score, shown);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trommel_types::TopLabel;

    fn row(index: u64, label: &str, score: f32) -> ResultRow {
        let top = |label: &str, score| TopLabel {
            label: label.into(),
            class: 0,
            score,
        };
        ResultRow {
            index,
            uri: format!("{index}.jpg"),
            etag: None,
            status: "ok".to_owned(),
            error_kind: None,
            error: None,
            label: Some(label.to_owned()),
            score: Some(score),
            finished_at: Some(1_000_000 * (index as i64 / 10)),
            top: vec![top(label, score), top("other", 1.0 - score)],
            columns: BTreeMap::new(),
        }
    }

    #[test]
    fn the_most_and_the_least_sure_of_a_class_are_kept_in_order() {
        let mut gathered = Gathered::new(2);
        for (index, score) in [0.7, 0.9, 0.55, 0.99, 0.6, f32::NAN]
            .into_iter()
            .enumerate()
        {
            gathered.add(&row(index as u64, "cat", score));
        }
        let class = &gathered.classes["cat"];
        let scores = |best: &Best| best.images().map(|image| image.score).collect::<Vec<_>>();
        assert_eq!(scores(&class.most_sure), [0.99, 0.9]);
        assert_eq!(scores(&class.least_sure), [0.55, 0.6]);
        assert_eq!(class.images, 6);
        let first = gathered.unsure.images().next().expect("there are images");
        assert_eq!(first.uri, "2.jpg", "its two best classes are closest");
        assert_eq!(gathered.scores[19], 1);
        assert_eq!(gathered.scores.iter().sum::<u64>(), 6);
    }

    #[test]
    fn failures_are_counted_by_kind_with_a_few_examples() {
        let mut gathered = Gathered::new(2);
        for index in 0..9 {
            gathered.add(&ResultRow {
                status: "failed".to_owned(),
                error_kind: Some("corrupt".to_owned()),
                error: Some("it is".to_owned()),
                label: None,
                score: None,
                ..row(index, "", 0.0)
            });
        }
        assert_eq!((gathered.rows, gathered.failed), (9, 9));
        let failures = &gathered.failures["corrupt"];
        assert_eq!((failures.images, failures.examples.len()), (9, 5));
    }
}
