//! The result of a search as a table, and as a page with the frontier.

use std::fmt;

use anyhow::Result;

use super::Found;
use super::search::{Choice, Gain};
use super::trials::Tried;
use crate::bench::fill;
use crate::forecast::money;
use crate::plot::{Curve, curves};

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} ({}) on {}, {}: {}",
            self.model, self.model_version, self.device, self.machine, self.objective
        )?;
        writeln!(
            f,
            "{} trials, equivalent to {:.0} of full length; a full grid has {}\n",
            self.tried.len(),
            self.spent,
            self.grid
        )?;
        writeln!(
            f,
            "{:<9} {:>6} {:>9} {:>8} {:>9} {:>8} {:>9} {:>8} {:>11}",
            "",
            "batch",
            "sessions",
            "prepare",
            "in flight",
            "wait",
            "images/s",
            "p95 ms",
            "per million"
        )?;
        show(f, "defaults", self.mean_of(&self.default))?;
        if self.best != self.default {
            show(f, "found", self.mean_of(&self.best))?;
        }
        writeln!(f, "\n{}", self.verdict())?;
        match &self.profile {
            Some(path) => writeln!(
                f,
                "saved to {}; classify, serve and workers use it",
                path.display()
            ),
            None => Ok(()),
        }
    }
}

fn show(f: &mut fmt::Formatter<'_>, name: &str, tried: Option<Tried>) -> fmt::Result {
    let Some(tried) = tried else {
        return writeln!(f, "{name:<9} cannot run");
    };
    let settings = tried.settings;
    let sessions = format!("{} x {}", settings.instances, settings.intra_threads);
    let wait = humantime::format_duration(settings.max_wait).to_string();
    let p95 = tried.p95_milliseconds.map(|p95| format!("{p95:.1}"));
    writeln!(
        f,
        "{name:<9} {:>6} {sessions:>9} {:>8} {:>9} {wait:>8} {:>9.1} {:>8} {:>11}",
        settings.max_batch,
        settings.preprocess_threads,
        settings.max_in_flight,
        tried.images_per_second,
        p95.unwrap_or_else(|| "-".to_owned()),
        tried
            .cost_of_a_million
            .map_or_else(|| "-".to_owned(), money),
    )
}

impl Found {
    fn verdict(&self) -> String {
        let show = |gain: &Gain| {
            let [mean, low, high] = [gain.mean, gain.low, gain.high].map(|share| 1e2 * share);
            format!("{mean:+.1} %, from {low:+.1} to {high:+.1} % at 95 % confidence")
        };
        match &self.choice {
            Choice::DefaultsAreBest => {
                "no settings beat the defaults; the defaults are kept".to_owned()
            }
            Choice::InsideTheNoise(gain) => format!(
                "the gain is within the noise ({}); the defaults are kept",
                show(gain)
            ),
            Choice::Better(gain) => format!("{} better than the defaults", show(gain)),
            Choice::OnlyThese => {
                "the defaults miss the latency target; the settings found meet it".to_owned()
            }
            Choice::Nothing => {
                "no trial meets the latency target; raise --p95, lower --rate, or add machines"
                    .to_owned()
            }
        }
    }

    /// The page.
    ///
    /// # Errors
    /// If the template cannot be filled, which a test rules out.
    pub(super) fn page(&self) -> Result<String> {
        fill(
            "trommel tune",
            &self.model,
            &[self.frontier()],
            &self.to_string(),
        )
    }

    /// Throughput over cost for all trials, with a latency target for those whose latency was measured; the line
    /// joins those that no other trial beats in both.
    fn frontier(&self) -> String {
        let has_latency = |tried: &Tried| tried.p95_milliseconds.is_some();
        let of_requests = self.tried.iter().any(has_latency);
        let shown = self.tried.iter();
        let shown = shown.filter(|tried| has_latency(tried) || !of_requests);
        let points: Vec<_> = shown
            .map(|tried| (taken(tried), tried.images_per_second))
            .collect();
        let of = |settings| {
            let mean = self.mean_of(settings);
            mean.map(|tried| (taken(&tried), tried.images_per_second))
        };
        let scattered = |name: &str, points: Vec<(f64, f64)>| Curve {
            name: name.to_owned(),
            points,
            scattered: true,
        };
        let first = self.tried.first();
        let unit = match first.and_then(|tried| tried.cost_of_a_million) {
            Some(_) => "cost per million images",
            None if of_requests => "p95 in ms",
            None => "threads",
        };
        let all = [
            Curve {
                name: "frontier".to_owned(),
                points: pareto(points.clone()),
                scattered: false,
            },
            scattered("tried", points),
            scattered("defaults", of(&self.default).into_iter().collect()),
            scattered("found", of(&self.best).into_iter().collect()),
        ];
        curves("Throughput over cost", (unit, "1/s"), &all, None)
    }
}

/// The cost of settings: money, latency, or threads.
fn taken(tried: &Tried) -> f64 {
    let settings = tried.settings;
    let of_model = settings.instances.get() * settings.intra_threads.get();
    let threads = (of_model + settings.preprocess_threads.get()) as f64;
    let time = tried.p95_milliseconds;
    tried.cost_of_a_million.or(time).unwrap_or(threads)
}

/// The points that no other point beats at the same or a lower cost, in rising order.
fn pareto(mut points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
    let mut most = f64::NEG_INFINITY;
    points.retain(|(_, rate)| {
        let is_more = *rate > most;
        most = most.max(*rate);
        is_more
    });
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frontier_is_what_nothing_surpasses() {
        let points = vec![(3.0, 9.0), (1.0, 5.0), (2.0, 4.0), (2.0, 7.0), (4.0, 9.0)];
        assert_eq!(pareto(points), [(1.0, 5.0), (2.0, 7.0), (3.0, 9.0)]);
    }
}
