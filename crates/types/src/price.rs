//! What the user pays for, and what a job costs at these prices.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A price that a user pays, such as `infer=2.10/h`.
///
/// As text, and so in messages: `WHAT=AMOUNT/UNIT`. For a role (`ingest`, `preprocess`, `infer`, `sink`,
/// `serve`), the `broker` or a `machine` the unit is `h` (for each process, broker or machine) or `core-h`
/// (for each thread that works). For requests (`s3-get`, `s3-put`) it is how many of them the amount
/// pays for, such as `1000`. For bytes (`read`, `write`) it is `gb`, 10⁹ bytes. For tokens
/// (`input-tokens`, `output-tokens`) it is `M`, a million of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Price {
    what: Paid,
    amount: f64,
    unit: Unit,
}

macro_rules! paid {
    ($($name:ident = $word:literal, $kind:ident;)*) => {
        /// What a price is for.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        enum Paid {
            $($name,)*
        }

        impl Paid {
            const ALL: &'static [Self] = &[$(Self::$name),*];

            fn word(self) -> &'static str {
                match self {
                    $(Self::$name => $word,)*
                }
            }

            fn kind(self) -> Kind {
                match self {
                    $(Self::$name => Kind::$kind,)*
                }
            }
        }
    };
}

paid! {
    Ingest = "ingest", Time;
    Preprocess = "preprocess", Time;
    Infer = "infer", Time;
    Sink = "sink", Time;
    Serve = "serve", Time;
    Broker = "broker", Time;
    Machine = "machine", Time;
    S3Get = "s3-get", Requests;
    S3Put = "s3-put", Requests;
    Read = "read", Bytes;
    Write = "write", Bytes;
    InputTokens = "input-tokens", Tokens;
    OutputTokens = "output-tokens", Tokens;
}

/// The unit of a price.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Time,
    Requests,
    Bytes,
    Tokens,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Unit {
    Hour,
    CoreHour,
    /// This many requests.
    Requests(f64),
    Gigabyte,
    Million,
}

/// Resources held at one time: by a role of a fleet, or by this process.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Held {
    /// Processes, brokers or machines.
    pub processes: f64,
    /// Working threads in all of them.
    pub cores: f64,
}

/// The resources used by a job.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// Hours that it takes.
    pub hours: f64,
    /// Resources of the role ingest.
    pub ingest: Held,
    /// Of the role preprocess.
    pub preprocess: Held,
    /// Of the role infer.
    pub infer: Held,
    /// Of the role sink.
    pub sink: Held,
    /// Of the role serve.
    pub serve: Held,
    /// Of the broker.
    pub broker: Held,
    /// Whole machines.
    pub machine: Held,
    /// Requests that read from S3.
    pub gets: f64,
    /// Requests that write to S3.
    pub puts: f64,
    /// Bytes read from the source.
    pub read: f64,
    /// Bytes written to the output.
    pub written: f64,
    /// Input tokens.
    pub input_tokens: f64,
    /// Output tokens.
    pub output_tokens: f64,
}

impl Usage {
    /// The quantity that a price is multiplied by.
    fn of(&self, price: &Price) -> f64 {
        let held = match price.what {
            Paid::Ingest => self.ingest,
            Paid::Preprocess => self.preprocess,
            Paid::Infer => self.infer,
            Paid::Sink => self.sink,
            Paid::Serve => self.serve,
            Paid::Broker => self.broker,
            Paid::Machine => self.machine,
            Paid::S3Get
            | Paid::S3Put
            | Paid::Read
            | Paid::Write
            | Paid::InputTokens
            | Paid::OutputTokens => Held::default(),
        };
        match (price.unit, price.what) {
            (Unit::Hour, _) => self.hours * held.processes,
            (Unit::CoreHour, _) => self.hours * held.cores,
            (Unit::Requests(number), Paid::S3Get) => self.gets / number,
            (Unit::Requests(number), _) => self.puts / number,
            (Unit::Gigabyte, Paid::Read) => self.read / 1e9,
            (Unit::Gigabyte, _) => self.written / 1e9,
            (Unit::Million, Paid::InputTokens) => self.input_tokens / 1e6,
            (Unit::Million, _) => self.output_tokens / 1e6,
        }
    }
}

impl Price {
    /// The cost by this price.
    pub fn cost(&self, usage: &Usage) -> f64 {
        self.amount * usage.of(self)
    }

    /// What it is for.
    pub fn what(&self) -> &'static str {
        self.what.word()
    }
}

/// The total cost by all prices.
pub fn cost(prices: &[Price], usage: &Usage) -> f64 {
    prices.iter().map(|price| price.cost(usage)).sum()
}

/// The problem with a list of prices, if any: a duplicate entry.
pub fn problem_of_prices(prices: &[Price]) -> Option<String> {
    let twice = prices.iter().enumerate().find(|(number, price)| {
        let before = &prices[..*number];
        before.iter().any(|other| other.what == price.what)
    });
    twice.map(|(_, price)| format!("{} has two prices; give it one", price.what()))
}

/// The problem with prices where tokens are not counted: a price of tokens.
pub fn problem_of_token_prices(prices: &[Price]) -> Option<String> {
    let price = prices
        .iter()
        .find(|price| price.what.kind() == Kind::Tokens)?;
    Some(format!(
        "{} counts in dry runs of a prompt alone: leave it out, or set price-in and price-out in [prompt] for the summary",
        price.what()
    ))
}

impl FromStr for Price {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            let known: Vec<_> = Paid::ALL.iter().map(|paid| paid.word()).collect();
            format!(
                "{text:?} is no price: give WHAT=AMOUNT/UNIT, such as infer=2.10/h, \
                 preprocess=0.04/core-h, s3-get=0.0004/1000, write=0.02/gb or input-tokens=0.15/M; \
                 WHAT is one of {}",
                known.join(", ")
            )
        };
        let (what, rest) = text.trim().split_once('=').ok_or_else(wrong)?;
        let (amount, unit) = rest.split_once('/').ok_or_else(wrong)?;
        let known = Paid::ALL.iter().find(|paid| paid.word() == what.trim());
        let what = *known.ok_or_else(wrong)?;
        let amount: f64 = amount.trim().parse().map_err(|_| wrong())?;
        if !(amount >= 0.0 && amount.is_finite()) {
            return Err(wrong());
        }
        let unit = match (what.kind(), unit.trim()) {
            (Kind::Time, "h") => Unit::Hour,
            (Kind::Time, "core-h") => Unit::CoreHour,
            (Kind::Bytes, "gb") => Unit::Gigabyte,
            (Kind::Tokens, "M") => Unit::Million,
            (Kind::Requests, number) => match number.parse::<u64>() {
                Ok(number) if number > 0 => Unit::Requests(number as f64),
                _ => return Err(wrong()),
            },
            _ => return Err(wrong()),
        };
        Ok(Self { what, amount, unit })
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}/", self.what(), self.amount)?;
        match self.unit {
            Unit::Hour => f.write_str("h"),
            Unit::CoreHour => f.write_str("core-h"),
            Unit::Requests(number) => write!(f, "{number}"),
            Unit::Gigabyte => f.write_str("gb"),
            Unit::Million => f.write_str("M"),
        }
    }
}

impl TryFrom<String> for Price {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Price> for String {
    fn from(price: Price) -> Self {
        price.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prices(texts: &[&str]) -> Vec<Price> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn a_job_costs_what_its_prices_come_to() {
        let usage = Usage {
            hours: 10.0,
            infer: Held {
                processes: 2.0,
                cores: 8.0,
            },
            preprocess: Held {
                processes: 3.0,
                cores: 48.0,
            },
            gets: 1_000_000.0,
            read: 50e9,
            input_tokens: 8e6,
            output_tokens: 0.5e6,
            ..Usage::default()
        };
        let prices = prices(&[
            "infer=2.10/h",
            "preprocess=0.04/core-h",
            "s3-get=0.0004/1000",
            "read=0.01/gb",
            "sink=1/h",
            "input-tokens=0.15/M",
            "output-tokens=0.6/M",
        ]);
        let parts: Vec<_> = prices.iter().map(|price| price.cost(&usage)).collect();
        let expected = [42.0, 19.2, 0.4, 0.5, 0.0, 1.2, 0.3];
        for (part, expected) in parts.iter().zip(expected) {
            assert!((part - expected).abs() < 1e-9, "{parts:?}");
        }
        assert!((cost(&prices, &usage) - 63.6).abs() < 1e-9);
    }

    #[test]
    fn a_price_is_written_as_it_is_read() {
        for text in [
            "infer=2.1/h",
            "preprocess=0.04/core-h",
            "s3-put=0.005/1000",
            "write=0.02/gb",
            "output-tokens=0.6/M",
        ] {
            let price: Price = text.parse().unwrap();
            assert_eq!(price.to_string(), text);
            let json = serde_json::to_string(&price).unwrap();
            assert_eq!(serde_json::from_str::<Price>(&json).unwrap(), price);
        }
    }

    #[test]
    fn what_is_no_price_is_refused_with_an_example() {
        for text in [
            "",
            "infer",
            "infer=2.10",
            "infer=2.10/day",
            "infer=-1/h",
            "infer=NaN/h",
            "gpu=1/h",
            "s3-get=1/0",
            "s3-get=1/h",
            "read=1/1000",
            "input-tokens=1/1000",
            "infer=1/M",
        ] {
            let error = text.parse::<Price>().unwrap_err();
            assert!(error.contains("preprocess=0.04/core-h"), "{error}");
        }
        let twice = prices(&["infer=1/h", "sink=1/h", "infer=2/core-h"]);
        let problem = problem_of_prices(&twice).unwrap();
        assert!(problem.starts_with("infer has two prices"), "{problem}");
        assert_eq!(problem_of_prices(&twice[..2]), None);
        assert_eq!(problem_of_token_prices(&twice), None);
        let tokens = prices(&["infer=1/h", "output-tokens=1/M"]);
        let problem = problem_of_token_prices(&tokens).unwrap();
        assert!(problem.starts_with("output-tokens"), "{problem}");
    }
}
