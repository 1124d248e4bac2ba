//! Plots as SVG: bars, and lines on two axes.

use svg::Document;
use svg::node::element::{Circle, Group, Line, Polyline, Rectangle, Text, Title};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 90.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 46.0;
const ROW: f64 = 26.0;
const COLOURS: [&str; 6] = [
    "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#6b46c1", "#718096",
];

/// One bar per name, with a line at `limit`, if given.
pub(crate) fn bars(title: &str, unit: &str, rows: &[(String, f64)], limit: Option<f64>) -> String {
    let longest = rows
        .iter()
        .map(|row| row.1)
        .chain(limit)
        .fold(f64::MIN_POSITIVE, f64::max);
    let width = |value: f64| value / longest * (WIDTH - LEFT - RIGHT);
    let height = TOP + ROW * rows.len() as f64 + 10.0;
    let mut all = Group::new().add(text(10.0, 24.0, title).set("font-weight", "bold"));
    for (number, (name, value)) in rows.iter().enumerate() {
        let y = TOP + ROW * number as f64;
        let bar = Rectangle::new()
            .set("x", LEFT)
            .set("y", y)
            .set("width", width(*value))
            .set("height", ROW - 8.0)
            .set("fill", COLOURS[number % COLOURS.len()]);
        let label = format!("{} {unit}", short(*value));
        all = all.add(text(10.0, y + 14.0, name)).add(bar).add(text(
            LEFT + width(*value) + 6.0,
            y + 14.0,
            &label,
        ));
    }
    if let Some(limit) = limit {
        let x = LEFT + width(limit);
        all = all.add(line((x, TOP - 6.0), (x, height - 8.0)).set("stroke-dasharray", "5 3"));
    }
    document(all, height)
}

/// A curve of a plot: its name, and its points by increasing x.
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// Whether to draw only the points.
    pub(crate) scattered: bool,
}

/// Curves, with a line at the height of `limit`, if given.
pub(crate) fn curves(
    title: &str,
    (x_name, y_name): (&str, &str),
    all: &[Curve],
    limit: Option<f64>,
) -> String {
    let points = || all.iter().flat_map(|curve| &curve.points);
    let most = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(f64::MIN_POSITIVE, f64::max);
    let (wide, high) = (
        most(|point| point.0),
        limit.unwrap_or(0.0).max(most(|point| point.1)),
    );
    let x = |value: f64| LEFT / 2.0 + value / wide * (WIDTH - LEFT / 2.0 - 190.0);
    let y = |value: f64| HEIGHT - BOTTOM - value / high * (HEIGHT - TOP - BOTTOM);
    let mut group = Group::new()
        .add(text(10.0, 24.0, title).set("font-weight", "bold"))
        .add(line((x(0.0), y(0.0)), (x(wide), y(0.0))))
        .add(line((x(0.0), y(0.0)), (x(0.0), y(high))))
        .add(text(x(wide) - 60.0, HEIGHT - 10.0, x_name))
        .add(text(10.0, TOP - 4.0, y_name));
    for part in 0..=4 {
        let share = f64::from(part) / 4.0;
        group = group
            .add(text(
                x(share * wide) - 8.0,
                y(0.0) + 18.0,
                &short(share * wide),
            ))
            .add(text(10.0, y(share * high) + 4.0, &short(share * high)));
    }
    if let Some(limit) = limit {
        let limit = line((x(0.0), y(limit)), (x(wide), y(limit)));
        group = group.add(limit.set("stroke-dasharray", "5 3"));
    }
    for (number, curve) in all.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let drawn: Vec<_> = curve
            .points
            .iter()
            .map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1)))
            .collect();
        if !curve.scattered {
            let drawn = Polyline::new()
                .set("points", drawn.join(" "))
                .set("fill", "none")
                .set("stroke", colour)
                .set("stroke-width", 2);
            group = group.add(drawn);
        }
        for point in &curve.points {
            let said = format!("{}: {} at {}", curve.name, short(point.1), short(point.0));
            let dot = Circle::new()
                .set("cx", x(point.0))
                .set("cy", y(point.1))
                .set("r", 3.5)
                .set("fill", colour);
            group = group.add(dot.add(Title::new(said)));
        }
        let row = TOP + 18.0 * number as f64;
        let name = text(WIDTH - 170.0, row + 4.0, &curve.name).set("fill", colour);
        group = group.add(name);
    }
    document(group, HEIGHT)
}

fn document(all: Group, height: f64) -> String {
    Document::new()
        .set("viewBox", (0, 0, WIDTH, height))
        .set("font-family", "sans-serif")
        .set("font-size", 13)
        .add(all)
        .to_string()
}

fn line((x1, y1): (f64, f64), (x2, y2): (f64, f64)) -> Line {
    Line::new()
        .set("x1", x1)
        .set("y1", y1)
        .set("x2", x2)
        .set("y2", y2)
        .set("stroke", "#4a5568")
}

fn text(x: f64, y: f64, words: &str) -> Text {
    Text::new(words).set("x", x).set("y", y)
}

/// A number with digits appropriate to its size.
fn short(value: f64) -> String {
    match value {
        value if value >= 100.0 || value == 0.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}
