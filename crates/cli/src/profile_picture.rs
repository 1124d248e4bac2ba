//! The picture of a profile: a strip with every node in the order of execution, and bars for the
//! slowest.

use svg::Document;
use svg::node::element::{Group, Rectangle, Text, Title};

use crate::lines::counted;
use crate::profile_report::Report;

const WIDTH: f64 = 1000.0;
const MARGIN: f64 = 20.0;
const STRIP: f64 = 60.0;
const ROW: f64 = 22.0;
/// Start of the bars, after their labels.
const BARS: f64 = 420.0;
/// Colours of the operators, slowest first; all others share the last one.
const COLOURS: [&str; 9] = [
    "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#6b46c1", "#8b5e34", "#d53f8c", "#b7791f",
    "#718096",
];

/// Draws a report.
pub(crate) fn draw(report: &Report) -> Document {
    let all = report.profile.in_nodes().max(f64::MIN_POSITIVE);
    let colour = |operator: &str| {
        let place = report
            .operators
            .iter()
            .position(|other| other.operator == operator);
        COLOURS[place.unwrap_or(COLOURS.len()).min(COLOURS.len() - 1)]
    };
    let share = |milliseconds: f64| {
        let percent = 100.0 * milliseconds / all;
        format!("{milliseconds:.3} ms, {percent:.1} %")
    };

    let mut strip = Group::new();
    let mut x = MARGIN;
    for node in &report.profile.nodes {
        let width = node.milliseconds / all * (WIDTH - 2.0 * MARGIN);
        let what = format!(
            "{} {}: {}",
            node.operator,
            node.name,
            share(node.milliseconds)
        );
        let bar = bar((x, 70.0), (width, STRIP), colour(&node.operator));
        strip = strip.add(bar.add(Title::new(what)));
        x += width;
    }
    let mut picture = Document::new()
        .add(text((MARGIN, 30.0), &report.title()).set("font-weight", "bold"))
        .add(text((MARGIN, 56.0), "all nodes in the order of execution"))
        .add(strip);

    let operators = report.operators.iter().map(|operator| {
        let label = format!(
            "{} ({})",
            operator.operator,
            counted(operator.nodes, "node")
        );
        (label, operator.milliseconds, colour(&operator.operator))
    });
    let slowest = report.slowest().into_iter().map(|node| {
        let label = format!("{} {}", node.operator, node.name);
        (label, node.milliseconds, colour(&node.operator))
    });
    let mut y = 70.0 + STRIP + 2.0 * ROW;
    for (heading, rows) in [
        ("by operator", operators.collect::<Vec<_>>()),
        ("slowest nodes", slowest.collect()),
    ] {
        picture = picture.add(text((MARGIN, y), heading).set("font-weight", "bold"));
        let longest = rows
            .iter()
            .map(|row| row.1)
            .fold(f64::MIN_POSITIVE, f64::max);
        for (label, milliseconds, colour) in rows {
            y += ROW;
            let width = milliseconds / longest * (WIDTH - MARGIN - BARS - 150.0);
            picture = picture
                .add(text((MARGIN, y), &shortened(&label)))
                .add(bar((BARS, y - 13.0), (width, 16.0), colour))
                .add(text((BARS + width + 8.0, y), &share(milliseconds)));
        }
        y += 2.0 * ROW;
    }
    picture
        .set("viewBox", (0, 0, WIDTH, y))
        .set("font-family", "sans-serif")
        .set("font-size", 13)
}

fn bar((x, y): (f64, f64), (width, height): (f64, f64), colour: &str) -> Rectangle {
    Rectangle::new()
        .set("x", x)
        .set("y", y)
        .set("width", width)
        .set("height", height)
        .set("fill", colour)
}

fn text((x, y): (f64, f64), words: &str) -> Text {
    Text::new(words).set("x", x).set("y", y)
}

/// The end of a long name is more useful than its beginning.
fn shortened(label: &str) -> String {
    const FITS: usize = 54;
    let length = label.chars().count();
    if length <= FITS {
        return label.to_owned();
    }
    let end: String = label.chars().skip(length - FITS).collect();
    format!("…{end}")
}
