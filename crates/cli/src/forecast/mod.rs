//! Forecasts of a job: its time with an interval, bytes and cost; and how the job compared.

mod kept;
mod limits;
mod submitted;
mod tokens;
mod trial_run;

use std::fmt;
use std::io::{self, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{HumanBytes, HumanCount, HumanDuration};
use serde::Serialize;
use trommel_types::{Forecast, Price, Usage, cost};
use trommel_worker::Trial;

use crate::summary::{Run, print_failures};

pub(crate) use self::kept::{keep, key_of_request, recall};
pub(crate) use self::limits::{Limits, Spending, problem_of_costs};
pub(crate) use self::submitted::{DryRun, follow};
use self::tokens::ExpectedTokens;
pub(crate) use self::trial_run::{Terms, dry_run};

/// The inputs of a forecast.
pub(crate) struct Basis<'a> {
    /// Images of the whole job, and whether all were counted.
    pub(crate) images: u64,
    pub(crate) all_counted: bool,
    /// Seconds before the first image is worked on.
    pub(crate) startup: f64,
    pub(crate) trial: Trial,
    /// Most tokens of an answer, if servers are asked and it is known.
    pub(crate) most_written: Option<u32>,
    /// Resources held per hour while the job runs.
    pub(crate) held: Usage,
    pub(crate) prices: &'a [Price],
    /// Rows of a part, if parts go to S3.
    pub(crate) s3_part_rows: Option<usize>,
    pub(crate) bottleneck: Option<String>,
}

/// A forecast as it is shown.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Expected {
    images: u64,
    all_counted: bool,
    images_per_second: f64,
    startup_seconds: f64,
    /// The expected time; named before there was an interval.
    eta_seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    low_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    high_seconds: Option<f64>,
    bottleneck: Option<String>,
    bytes_read: f64,
    bytes_written: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<ExpectedTokens>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<ExpectedCost>,
}

/// Its cost at the user's prices.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct ExpectedCost {
    total: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    low: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    high: Option<f64>,
    a_million_images: f64,
    /// By item.
    parts: Vec<(&'static str, f64)>,
}

impl Basis<'_> {
    pub(crate) fn expected(&self) -> Expected {
        let Trial {
            seconds_each,
            plus_or_minus,
            image_bytes,
            row_bytes,
            ..
        } = self.trial;
        let images = self.images as f64;
        let seconds = |each: f64| self.startup + images * each.max(0.0);
        let around = |sign: f64| Some(seconds(seconds_each + sign * plus_or_minus?));
        let (low, high) = (around(-1.0), around(1.0));
        let expected = seconds(seconds_each);
        let total = |seconds: f64| cost(self.prices, &self.usage(seconds));
        let priced = (!self.prices.is_empty()).then(|| ExpectedCost {
            total: total(expected),
            low: low.map(total),
            high: high.map(total),
            a_million_images: total(expected) / images.max(1.0) * 1e6,
            parts: self
                .prices
                .iter()
                .map(|price| (price.what(), price.cost(&self.usage(expected))))
                .collect(),
        });
        Expected {
            images: self.images,
            all_counted: self.all_counted,
            images_per_second: 1.0 / seconds_each,
            startup_seconds: self.startup,
            eta_seconds: expected,
            low_seconds: low,
            high_seconds: high,
            bottleneck: self.bottleneck.clone(),
            bytes_read: images * image_bytes,
            bytes_written: images * row_bytes,
            tokens: self
                .trial
                .tokens
                .map(|tokens| ExpectedTokens::new(tokens, self.most_written, images)),
            cost: priced,
        }
    }

    fn usage(&self, seconds: f64) -> Usage {
        let images = self.images as f64;
        let parts = self
            .s3_part_rows
            .map(|rows| (images / rows.max(1) as f64).ceil());
        Usage {
            hours: seconds / 3600.0,
            gets: images * self.trial.from_s3,
            puts: parts.unwrap_or(0.0),
            read: images * self.trial.image_bytes,
            written: images * self.trial.row_bytes,
            input_tokens: images * self.trial.tokens.map_or(0.0, |tokens| tokens.read),
            output_tokens: images * self.trial.tokens.map_or(0.0, |tokens| tokens.written),
            ..self.held
        }
    }
}

impl Expected {
    /// The part that is saved.
    pub(crate) fn forecast(&self) -> Forecast {
        Forecast {
            images: self.images,
            seconds: self.eta_seconds,
            low_seconds: self.low_seconds,
            high_seconds: self.high_seconds,
            cost: self.cost.as_ref().map(|cost| cost.total),
        }
    }
}

impl Expected {
    /// Prints the forecast of a dry run in this process.
    pub(crate) fn show(&self, run: &Run, json: bool) -> Result<()> {
        let (ok, failed) = (run.progress.ok(), run.progress.failed());
        let mut out = io::stdout().lock();
        if json {
            let value = serde_json::json!({ "sample": {"ok": ok, "failed": failed} });
            let mut all = serde_json::to_value(self).context("failed to write the answer")?;
            if let (Some(all), Some(more)) = (all.as_object_mut(), value.as_object()) {
                all.extend(more.clone());
            }
            writeln!(out, "{all:#}")?;
            return Ok(());
        }
        writeln!(
            out,
            "images      {}",
            counted(self.images, self.all_counted)
        )?;
        let rows = match run.engines.len() {
            1 => "",
            _ => " rows",
        };
        let (ok, failed) = (HumanCount(ok), HumanCount(failed));
        writeln!(out, "sample      {ok}{rows} ok, {failed} failed")?;
        print_failures(run, &mut out)?;
        write!(out, "{self}")?;
        Ok(())
    }
}

/// A labelled line.
macro_rules! line {
    ($f:expr, $name:expr, $($words:tt)*) => {
        writeln!($f, "{:<11} {}", $name, format_args!($($words)*))
    };
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = if self.all_counted { "" } else { " or more" };
        line!(f, "rate", "{:.0}/s", self.images_per_second)?;
        let around = match self.low_seconds.zip(self.high_seconds) {
            Some((low, high)) => format!(", {} to {} at 95 % confidence", time(low), time(high)),
            None => ", no interval: the sample was too small".to_owned(),
        };
        line!(f, "time", "{}{more}{around}", time(self.eta_seconds))?;
        match &self.bottleneck {
            Some(stage) => line!(f, "bottleneck", "{stage}")?,
            None => line!(
                f,
                "bottleneck",
                "not found: the sample is small, or no stage had to wait"
            )?,
        }
        let bytes = |bytes: f64| HumanBytes(bytes as u64);
        line!(f, "read", "{}{more}", bytes(self.bytes_read))?;
        line!(f, "written", "{}{more}", bytes(self.bytes_written))?;
        if let Some(tokens) = &self.tokens {
            line!(f, "tokens", "{tokens}")?;
        }
        let Some(cost) = &self.cost else {
            return Ok(());
        };
        let around = match cost.low.zip(cost.high) {
            Some((low, high)) => format!(", {} to {}", money(low), money(high)),
            None => String::new(),
        };
        line!(
            f,
            "cost",
            "{}{more}{around}; {} per million images",
            money(cost.total),
            money(cost.a_million_images)
        )?;
        for (what, part) in &cost.parts {
            line!(f, "", "{what} {}", money(*part))?;
        }
        Ok(())
    }
}

/// A forecast and the actual figures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Compared {
    said: Forecast,
    seconds: f64,
    /// Error of the forecast: actual over forecast time, less 1.
    off: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
}

impl Compared {
    pub(crate) fn new(said: Forecast, took: Duration, cost: Option<f64>) -> Self {
        let seconds = took.as_secs_f64();
        Self {
            said,
            seconds,
            off: seconds / said.seconds.max(f64::MIN_POSITIVE) - 1.0,
            cost,
        }
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            said,
            seconds,
            off,
            cost,
        } = self;
        let around = match said.low_seconds.zip(said.high_seconds) {
            Some((low, high)) => format!(" ({} to {})", time(low), time(high)),
            None => String::new(),
        };
        write!(
            f,
            "forecast {}{around}, took {} ({:+.0} %)",
            time(said.seconds),
            time(*seconds),
            100.0 * off
        )?;
        match said.cost.zip(*cost) {
            Some((said, came)) => write!(f, "; forecast {}, cost {}", money(said), money(came)),
            None => Ok(()),
        }
    }
}

/// Seconds as people read them.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 60.0 => format!("{seconds:.1} s"),
        seconds if seconds < 5400.0 => format!("{:.1} min", seconds / 60.0),
        seconds if seconds < 172_800.0 => format!("{:.1} h", seconds / 3600.0),
        seconds => HumanDuration(Duration::from_secs_f64(seconds.min(1e12))).to_string(),
    }
}

/// An amount in the currency of the prices, which is shown as dollars.
pub(crate) fn money(amount: f64) -> String {
    match amount {
        amount if amount >= 0.995 || amount == 0.0 => format!("${amount:.2}"),
        amount => format!("${amount:.4}"),
    }
}

/// How many images, as far as they were counted.
pub(crate) fn counted(images: u64, is_all: bool) -> String {
    let more = if is_all { "" } else { " or more" };
    format!("{}{more}", HumanCount(images))
}

#[cfg(test)]
mod tests {
    use trommel_types::Held;

    use super::*;

    fn basis(prices: &[Price]) -> Basis<'_> {
        Basis {
            images: 1_000_000,
            all_counted: true,
            startup: 10.0,
            trial: Trial {
                images: 512,
                seconds_each: 0.0036,
                plus_or_minus: Some(0.0002),
                image_bytes: 60_000.0,
                row_bytes: 80.0,
                from_s3: 0.5,
                tokens: None,
            },
            most_written: None,
            held: Usage {
                infer: Held {
                    processes: 1.0,
                    cores: 4.0,
                },
                preprocess: Held {
                    processes: 1.0,
                    cores: 8.0,
                },
                ..Usage::default()
            },
            prices,
            s3_part_rows: Some(100_000),
            bottleneck: Some("infer".to_owned()),
        }
    }

    #[test]
    fn a_sample_says_hours_bytes_and_dollars_of_the_whole() {
        let texts = [
            "infer=2.10/h",
            "preprocess=0.04/core-h",
            "s3-get=0.4/1000",
            "s3-put=1/10",
        ];
        let prices: Vec<Price> = texts.map(|text| text.parse().unwrap()).into();
        let expected = basis(&prices).expected();
        assert!((expected.eta_seconds - 3610.0).abs() < 1e-6);
        assert!((expected.low_seconds.unwrap() - 3410.0).abs() < 1e-6);
        assert!((expected.high_seconds.unwrap() - 3810.0).abs() < 1e-6);
        assert_eq!((expected.bytes_read, expected.bytes_written), (60e9, 80e6));
        let cost = expected.cost.clone().unwrap();
        let hours = 3610.0 / 3600.0;
        let parts = [2.10 * hours, 0.32 * hours, 200.0, 1.0];
        for ((what, part), expected) in cost.parts.iter().zip(parts) {
            assert!((part - expected).abs() < 1e-9, "{what}: {part}");
        }
        assert!((cost.total - parts.iter().sum::<f64>()).abs() < 1e-9);
        assert!((cost.a_million_images - cost.total).abs() < 1e-9);
        let text = expected.to_string();
        for words in [
            "60.2 min, 56.8 min to 63.5 min",
            "278/s",
            "infer",
            "per million",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn without_prices_nothing_is_said_of_costs() {
        let expected = basis(&[]).expected();
        assert_eq!(expected.cost, None);
        assert!(!expected.to_string().contains('$'));
    }

    #[test]
    fn what_came_is_compared_with_what_was_said() {
        let said = Forecast {
            cost: Some(2.0),
            ..basis(&[]).expected().forecast()
        };
        let compared = Compared::new(said, Duration::from_secs(3971), Some(2.2));
        assert!((compared.off - 0.1).abs() < 1e-3, "{compared:?}");
        let text = compared.to_string();
        assert!(
            text.contains("forecast 60.2 min (56.8 min to 63.5 min), took 66.2 min (+10 %)"),
            "{text}"
        );
        assert!(text.contains("forecast $2.00, cost $2.20"), "{text}");
    }
}
