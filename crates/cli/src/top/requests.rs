//! Latency of requests, over all workers.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Row, Table};
use trommel_worker::{Presence, RequestWork};

use super::stages::Look;

/// Requests by entrance.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entrance {
    name: String,
    /// Answers per second between the polls.
    rate: f64,
    /// Percentiles 50, 95 and 99 of the latency between the polls, or since the start if there were
    /// no requests between them.
    took: [Option<Duration>; 3],
    shed: u64,
    expired: u64,
}

/// The entrances of all workers that answer requests.
pub(super) fn entrances(before: &Look, now: &Look) -> Vec<Entrance> {
    let earlier: HashMap<&str, &Presence> = before
        .workers
        .iter()
        .map(|worker| (worker.id.as_str(), worker))
        .collect();
    let mut all: BTreeMap<&str, (f64, RequestWork, RequestWork)> = BTreeMap::new();
    for worker in &now.workers {
        let past = earlier.get(worker.id.as_str());
        for work in &worker.requests {
            let (rate, between, total) = all.entry(&work.entrance).or_default();
            total.add(work);
            let Some(past) = past else { continue };
            let mut begun = past.requests.iter();
            let begin = begun.find(|begin| begin.entrance == work.entrance);
            let new = begin.map_or_else(|| work.clone(), |begin| work.since(begin));
            let seconds = (worker.seen_at - past.seen_at) as f64 / 1e6;
            if seconds > 0.0 {
                *rate += new.count() as f64 / seconds;
                between.add(&new);
            }
        }
    }
    let entrance = |(name, (rate, between, total)): (&str, (f64, RequestWork, RequestWork))| {
        let of = if between.count() > 0 {
            &between
        } else {
            &total
        };
        Entrance {
            name: name.to_owned(),
            rate,
            took: [0.5, 0.95, 0.99].map(|share| of.within(share)),
            shed: total.shed,
            expired: total.expired,
        }
    };
    all.into_iter().map(entrance).collect()
}

/// One line for each.
pub(super) fn draw(entrances: &[Entrance], frame: &mut Frame<'_>, area: Rect) {
    let right = |text: String| Line::raw(text).right_aligned();
    let millis = |took: Option<Duration>| {
        took.map_or_else(String::new, |took| {
            format!("{:.1} ms", took.as_secs_f64() * 1e3)
        })
    };
    let rows = entrances.iter().map(|entrance| {
        let [p50, p95, p99] = entrance.took.map(millis);
        Row::new([
            Line::raw(entrance.name.as_str()),
            right(format!("{:.1}", entrance.rate)),
            right(p50),
            right(p95),
            right(p99),
            right(entrance.shed.to_string()),
            right(entrance.expired.to_string()),
        ])
    });
    let widths = [11, 10, 11, 11, 11, 8, 8].map(Constraint::Length);
    let titles = [
        "requests",
        "answers/s",
        "p50",
        "p95",
        "p99",
        "shed",
        "expired",
    ];
    let titles = titles
        .iter()
        .enumerate()
        .map(|(column, title)| match column {
            0 => Line::raw(*title),
            _ => right((*title).to_owned()),
        });
    let table = Table::new(rows, widths)
        .header(Row::new(titles).style(Style::new().add_modifier(Modifier::DIM)))
        .block(Block::bordered().title(" requests "));
    frame.render_widget(table, area);
}

#[cfg(test)]
mod tests {
    use super::*;
    use trommel_worker::Role;

    fn look(at: i64, answered: &[(usize, u64)], shed: u64) -> Look {
        let mut counts = vec![0; 40];
        for (bucket, count) in answered {
            counts[*bucket] = *count;
        }
        let worker = Presence {
            id: "a".to_owned(),
            roles: vec![Role::Serve],
            models: BTreeMap::new(),
            seen_at: at * 1_000_000,
            work: Vec::new(),
            times: BTreeMap::new(),
            put_off: Vec::new(),
            requests: vec![RequestWork {
                entrance: "http".to_owned(),
                shed,
                expired: 2,
                answered: counts,
            }],
        };
        Look {
            workers: vec![worker],
            jobs: Vec::new(),
        }
    }

    #[test]
    fn percentiles_are_those_between_the_looks_and_else_of_all() {
        let (before, now) = (look(0, &[(1, 100)], 1), look(2, &[(1, 100), (30, 20)], 4));
        let [http] = &entrances(&before, &now)[..] else {
            panic!("there is one entrance");
        };
        assert_eq!((http.rate, http.shed, http.expired), (10.0, 4, 2));
        assert!(http.took[0].expect("there are answers") > Duration::from_millis(10));
        let quiet = &entrances(&now, &look(4, &[(1, 100), (30, 20)], 4))[0];
        assert_eq!(quiet.rate, 0.0);
        assert!(quiet.took[0].expect("of all") < Duration::from_millis(1));
        assert!(quiet.took[2].expect("of all") > Duration::from_millis(10));
    }
}
