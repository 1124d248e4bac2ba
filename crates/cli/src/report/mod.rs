//! `trommel report`: results as one HTML page with pictures.

mod gather;
mod pictures;

use std::collections::{BTreeSet, HashMap};
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment};
use serde::Serialize;
use serde_json::Value;

use self::gather::{Best, Class, Gathered, SCORE_BARS, Shown};
use self::pictures::Picture;
use crate::args::ReportArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::lines::counted;
use crate::originals::Originals;
use crate::paths::{check_input, check_output};
use crate::results::Results;

const TEMPLATE: &str = include_str!("report.html");
/// Most bars of the timeline.
const TIME_BARS: usize = 120;
/// Most classes in the table; the rest is one line.
const LISTED_CLASSES: usize = 100;

/// Runs the command.
pub(crate) fn run(args: &ReportArgs, config: &Config) -> Result<Exit> {
    check_output(&args.output)?;
    let summary = args.summary.as_deref().map(read_summary).transpose()?;
    let results = Results::open(&args.results, config)?;
    let originals = Originals::of(&results, args.root.as_deref(), config).context(Usage)?;
    let mut gathered = Gathered::new(args.per_class.into());
    for row in results.rows()? {
        gathered.add(&row?);
    }
    if gathered.rows == 0 {
        bail!("{results} holds no rows, so there is nothing to report");
    }
    let page = Page::of(&gathered, args.classes.into(), &originals);
    let runtime = crate::runtime::on_all_cores()?;
    let pictures = runtime.block_on(pictures::make(page.uris(), &originals));
    let html = page.render(&results.to_string(), &pictures, summary.as_ref())?;
    write_whole(&args.output, html.as_bytes())?;
    let message = message(gathered.rows, &pictures, &args.output);
    std::io::stderr().write_all(message.as_bytes())?;
    Ok(Exit::Success)
}

/// The result, and why pictures are missing.
fn message(rows: u64, pictures: &HashMap<String, Picture>, output: &Path) -> String {
    let all = pictures.len();
    let missing = pictures
        .iter()
        .filter_map(|(uri, picture)| Some((uri, picture.as_ref().err()?)));
    // Always the same example.
    let first = missing.clone().min();
    let (drawn, output) = (all - missing.count(), output.display());
    let why = first.map_or_else(String::new, |(uri, why)| {
        format!(
            "trommel: {uri}: {why}\ntrommel: --root DIR sets the folder that relative paths start from\n"
        )
    });
    let (rows, all) = (counted(rows, "row"), counted(all, "picture"));
    format!("trommel: {rows}, {drawn} of {all}: {output}\n{why}")
}

/// Output of `trommel classify --json`.
fn read_summary(path: &Path) -> Result<Value> {
    check_input(
        path,
        "summary",
        "give a file of what trommel classify --json printed",
    )?;
    let failed = || format!("failed to read the summary {}", path.display());
    let text = std::fs::read(path).with_context(failed).context(Usage)?;
    let summary: Value = serde_json::from_slice(&text)
        .with_context(failed)
        .context(Usage)?;
    if summary["run"]["stages"].as_array().is_none() {
        bail!(
            "{} has no timing of stages; give what `trommel classify --json` printed",
            path.display()
        );
    }
    Ok(summary)
}

/// Writes a file atomically.
fn write_whole(path: &Path, content: &[u8]) -> Result<()> {
    let failed = || format!("failed to write {}", path.display());
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    // As readable as other files; by default only its owner could read it.
    let file = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder.unwrap_or(Path::new(".")));
    let mut file = file.with_context(failed)?;
    file.write_all(content).with_context(failed)?;
    file.persist(path).with_context(failed)?;
    Ok(())
}

/// The page without its pictures.
#[derive(Serialize)]
struct Page {
    rows: u64,
    ok: u64,
    failed: u64,
    classes: usize,
    listed: Vec<ListedClass>,
    /// Classes after the listed ones, and their images.
    rest: (usize, u64),
    scores: Vec<Bar>,
    times: Vec<Bar>,
    /// The times of the first and the last row, and the seconds in between.
    span: Option<(String, String, i64)>,
    failures: Vec<FailureKind>,
    sheets: Vec<Sheet>,
    unsure: Vec<Card>,
}

#[derive(Serialize)]
struct ListedClass {
    label: String,
    images: u64,
    /// Share of all labelled images, 0 to 1.
    share: f64,
    /// Relative to the largest class, 0 to 1.
    width: f64,
    mean_score: f64,
}

#[derive(Serialize)]
struct Bar {
    /// Relative to the highest bar, 0 to 1.
    height: f64,
    title: String,
}

#[derive(Serialize)]
struct FailureKind {
    kind: String,
    images: u64,
    examples: Vec<(String, String)>,
}

/// The images of a class.
#[derive(Serialize)]
struct Sheet {
    label: String,
    images: u64,
    most_sure: Vec<Card>,
    least_sure: Vec<Card>,
}

/// An image on the page.
#[derive(Serialize)]
struct Card {
    uri: String,
    /// A link for browsers, if there is one.
    link: Option<String>,
    name: String,
    label: String,
    score: f32,
    second: Option<(String, f32)>,
}

impl Page {
    fn of(gathered: &Gathered, sheets: usize, originals: &Originals) -> Self {
        let cards = |best: &Best| cards(best, originals);
        let mut classes: Vec<(&String, &Class)> = gathered.classes.iter().collect();
        classes.sort_by_key(|(_, class)| std::cmp::Reverse(class.images));
        let labelled = gathered.rows - gathered.failed;
        let largest = classes.first().map_or(1, |(_, class)| class.images) as f64;
        let listed = |(label, class): &(&String, &Class)| ListedClass {
            label: (*label).clone(),
            images: class.images,
            share: class.images as f64 / labelled as f64,
            width: class.images as f64 / largest,
            mean_score: class.score_sum / class.images as f64,
        };
        let rest = classes.iter().skip(LISTED_CLASSES);
        let sheet = |(label, class): &(&String, &Class)| Sheet {
            label: (*label).clone(),
            images: class.images,
            most_sure: cards(&class.most_sure),
            least_sure: cards(&class.least_sure),
        };
        let failures = gathered
            .failures
            .iter()
            .map(|(kind, failures)| FailureKind {
                kind: kind.clone(),
                images: failures.images,
                examples: failures.examples.clone(),
            });
        let mut failures: Vec<_> = failures.collect();
        failures.sort_by_key(|kind| std::cmp::Reverse(kind.images));
        Self {
            rows: gathered.rows,
            ok: labelled,
            failed: gathered.failed,
            classes: classes.len(),
            listed: classes.iter().take(LISTED_CLASSES).map(listed).collect(),
            rest: (
                rest.clone().count(),
                rest.map(|(_, class)| class.images).sum(),
            ),
            scores: score_bars(&gathered.scores),
            times: time_bars(gathered),
            span: span(gathered),
            failures,
            sheets: classes.iter().take(sheets).map(sheet).collect(),
            unsure: cards(&gathered.unsure),
        }
    }

    /// The images on the page.
    fn uris(&self) -> BTreeSet<String> {
        let sheets = self.sheets.iter();
        let of_sheets = sheets.flat_map(|sheet| sheet.most_sure.iter().chain(&sheet.least_sure));
        of_sheets
            .chain(&self.unsure)
            .map(|card| card.uri.clone())
            .collect()
    }

    fn render(
        &self,
        results: &str,
        pictures: &HashMap<String, Picture>,
        summary: Option<&Value>,
    ) -> Result<String> {
        let mut environment = Environment::new();
        // Labels and names are untrusted.
        environment.set_auto_escape_callback(|_| AutoEscape::Html);
        let view = View {
            page: self,
            results,
            drawn: found(pictures, |picture| picture.as_ref().ok()),
            missing: found(pictures, |picture| picture.as_ref().err()),
            summary,
        };
        environment.add_filter("thousands", thousands);
        environment.add_filter("percent", |share: f64| format!("{:.2} %", 100.0 * share));
        environment.add_filter("score", |score: f64| format!("{score:.3}"));
        environment
            .render_named_str("report.html", TEMPLATE, Serde(&view))
            .context("failed to write the page")
    }
}

/// The data of the template.
#[derive(Serialize)]
struct View<'a> {
    page: &'a Page,
    results: &'a str,
    drawn: HashMap<&'a str, &'a str>,
    missing: HashMap<&'a str, &'a str>,
    summary: Option<&'a Value>,
}

/// Thumbnails by uri.
fn found(
    pictures: &HashMap<String, Picture>,
    side: impl Fn(&Picture) -> Option<&String>,
) -> HashMap<&str, &str> {
    let of = |(uri, picture)| Some((String::as_str(uri), side(picture)?.as_str()));
    pictures.iter().filter_map(of).collect()
}

/// Digits in groups of three.
fn thousands(number: u64) -> String {
    indicatif::HumanCount(number).to_string()
}

fn cards(best: &Best, originals: &Originals) -> Vec<Card> {
    let card = |image: &Shown| Card {
        link: originals.link(&image.uri),
        name: image.uri.rsplit('/').next().unwrap_or_default().to_owned(),
        uri: image.uri.clone(),
        label: image.label.clone(),
        score: image.score,
        second: image.second.clone(),
    };
    best.images().map(card).collect()
}

fn score_bars(scores: &[u64; SCORE_BARS]) -> Vec<Bar> {
    let highest = scores.iter().max().copied().unwrap_or(0).max(1) as f64;
    let step = 1.0 / SCORE_BARS as f64;
    let bar = |(place, images): (usize, &u64)| Bar {
        height: *images as f64 / highest,
        title: format!(
            "score {:.2} to {:.2}: {}",
            place as f64 * step,
            (place + 1) as f64 * step,
            counted(*images, "image")
        ),
    };
    scores.iter().enumerate().map(bar).collect()
}

/// The number of rows per second over time.
fn time_bars(gathered: &Gathered) -> Vec<Bar> {
    let (Some((first, _)), Some((last, _))) = (
        gathered.seconds.first_key_value(),
        gathered.seconds.last_key_value(),
    ) else {
        return Vec::new();
    };
    let seconds = last - first + 1;
    let width = (seconds as u64).div_ceil(TIME_BARS as u64).max(1);
    let mut bars = vec![0_u64; (seconds as u64).div_ceil(width) as usize];
    for (second, rows) in &gathered.seconds {
        bars[((second - first) as u64 / width) as usize] += rows;
    }
    let highest = bars.iter().max().copied().unwrap_or(0).max(1) as f64;
    let bar = |(place, rows): (usize, &u64)| Bar {
        height: *rows as f64 / highest,
        title: format!(
            "{} s after the first row: {:.0} rows/s",
            place as u64 * width,
            *rows as f64 / width as f64
        ),
    };
    bars.iter().enumerate().map(bar).collect()
}

fn span(gathered: &Gathered) -> Option<(String, String, i64)> {
    let (first, _) = gathered.seconds.first_key_value()?;
    let (last, _) = gathered.seconds.last_key_value()?;
    let words = |second: i64| {
        Timestamp::from_second(second).map_or_else(|_| second.to_string(), |time| time.to_string())
    };
    Some((words(*first), words(*last), last - first + 1))
}
