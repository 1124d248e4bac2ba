//! The results as one self-contained HTML page with plots.

use anyhow::{Context, Result};
use minijinja::{AutoEscape, Environment};

use super::measures::Measures;
use super::{Found, ServerLoad};
use crate::plot::{Curve, bars, curves};

const TEMPLATE: &str = include_str!("page.html");

/// Renders the page.
///
/// # Errors
/// If the template fails, which a test rules out.
pub(super) fn render(found: &Found) -> Result<String> {
    let (title, plots) = match found {
        Found::Stages(measures) => (measures.model.name.clone(), of_stages(measures)),
        Found::Server(server) => {
            let title = format!("{} at {}", server.model, server.against);
            (title, of_server(server))
        }
    };
    fill("trommel bench", &title, &plots, &found.to_string())
}

/// A page with plots above a table.
///
/// # Errors
/// If the template fails, which a test rules out.
pub(crate) fn fill(command: &str, title: &str, plots: &[String], table: &str) -> Result<String> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    let context = minijinja::context! { command, title, plots => plots.to_vec(), table };
    environment
        .render_str(TEMPLATE, context)
        .context("failed to fill the page of plots")
}

fn of_stages(measures: &Measures) -> Vec<String> {
    let stages = measures.stages.iter();
    let mut rows: Vec<_> = stages
        .map(|stage| (stage.stage.clone(), stage.images_per_second))
        .collect();
    let hops = measures.hops.iter();
    rows.extend(hops.map(|hop| (format!("hop, {}", hop.hop), hop.images_per_second)));
    rows.extend(measures.compute.iter().map(|time| {
        let name = format!("model, batch {}", time.batch);
        (name, time.images_per_second)
    }));
    rows.push(("pipeline".to_owned(), measures.pipeline.images_per_second));
    let latency = measures.stages.iter().map(|stage| {
        let name = format!("{}, p95", stage.stage);
        (name, stage.milliseconds.p95)
    });
    let batches = Curve {
        name: "ms per batch".to_owned(),
        points: measures
            .compute
            .iter()
            .map(|time| (time.batch as f64, time.milliseconds))
            .collect(),
        scattered: false,
    };
    vec![
        bars(
            "Images per second; the dashed line is the limit of the stages",
            "/s",
            &rows,
            Some(measures.pipeline.limit),
        ),
        bars(
            "Time per image by stage",
            "ms",
            &latency.collect::<Vec<_>>(),
            None,
        ),
        curves("Time per batch by size", ("images", "ms"), &[batches], None),
    ]
}

fn of_server(server: &ServerLoad) -> Vec<String> {
    let curve = |name: &str, of: fn(&super::Load) -> f64| Curve {
        name: name.to_owned(),
        points: server
            .loads
            .iter()
            .map(|load| (load.rate, of(load)))
            .collect(),
        scattered: false,
    };
    let times = [
        curve("p50", |load| load.milliseconds.p50),
        curve("p90", |load| load.milliseconds.p90),
        curve("p95", |load| load.milliseconds.p95),
        curve("p99", |load| load.milliseconds.p99),
        curve("p99.9", |load| load.milliseconds.p999),
    ];
    let deadline = server.loads.first().map(|load| load.deadline_milliseconds);
    let rates = [
        curve("asked", |load| load.rate),
        curve("goodput", |load| load.goodput),
        curve("refused", |load| load.refused as f64 / load.seconds),
    ];
    // Share of requests above a percentile, as a power of ten.
    let nines = |percent: f64| -(1.0 - percent / 100.0).log10();
    let by_percentile: Vec<_> = server
        .loads
        .iter()
        .map(|load| Curve {
            name: format!("{}/s", load.rate),
            points: load
                .percentiles
                .iter()
                .map(|(percent, millis)| (nines(*percent), *millis))
                .collect(),
            scattered: false,
        })
        .collect();
    vec![
        curves(
            "Latency by rate; the dashed line is the deadline",
            ("requests/s", "ms"),
            &times,
            deadline,
        ),
        curves(
            "Answers within the deadline",
            ("requests/s", "1/s"),
            &rates,
            None,
        ),
        curves(
            "Latency by percentile: 1 is p90, 2 is p99, 3 is p99.9",
            ("nines", "ms"),
            &by_percentile,
            None,
        ),
    ]
}
