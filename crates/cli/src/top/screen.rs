//! The screen of `trommel top`.

use indicatif::{HumanCount, HumanDuration};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Row, Table};
use trommel_worker::{JobState, JobStatus, ModelStatus};

use super::requests::{self, Entrance};
use super::stages::Stage;

/// Ended jobs shown below the running ones.
const ENDED: usize = 3;
/// Width of a bar in cells.
const BAR: usize = 20;
/// Width of the table of stages.
const LEAST_WIDTH: u16 = 80;

/// The contents of the screen.
pub(super) struct View {
    pub(super) jobs: Vec<JobStatus>,
    pub(super) stages: Vec<Stage>,
    /// Shown if there are any.
    pub(super) requests: Vec<Entrance>,
    pub(super) advice: Vec<String>,
}

impl View {
    /// The shown jobs: running ones, then the last ended ones.
    fn shown(&self) -> Vec<&JobStatus> {
        let goes_on = |job: &&JobStatus| matches!(job.state, JobState::Running | JobState::Queued);
        let (running, ended): (Vec<_>, Vec<_>) = self.jobs.iter().partition(goes_on);
        running
            .into_iter()
            .chain(ended.into_iter().take(ENDED))
            .collect()
    }

    /// Height of stages, requests, jobs and advice at this width, including borders.
    fn heights(&self, width: u16) -> [u16; 4] {
        let jobs = self.shown().len().max(1);
        let advice = self.advice(width.saturating_sub(2)).len();
        let requests = match self.requests.len() {
            0 => 0,
            entrances => entrances as u16 + 3,
        };
        let [stages, jobs, advice] =
            [self.stages.len() + 1, jobs + 1, advice].map(|lines| lines as u16 + 2);
        [stages, requests, jobs, advice]
    }

    /// Width and height of everything.
    pub(super) fn size(&self) -> (u16, u16) {
        let shown = self.shown();
        let width = LEAST_WIDTH.max(2 + jobs_width(&shown, &COLUMNS));
        (width, self.heights(width).iter().sum())
    }

    /// Draws the screen, with the line about keys if there is room.
    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let jobs = self.shown();
        let [stages, requests, job_lines, advice] = self.heights(frame.area().width);
        let [stages, request_area, job_area, advice, keys] = Layout::vertical([
            Constraint::Length(stages),
            Constraint::Length(requests),
            Constraint::Length(job_lines),
            Constraint::Length(advice),
            Constraint::Min(0),
        ])
        .areas(frame.area());
        self.draw_stages(frame, stages);
        if !self.requests.is_empty() {
            requests::draw(&self.requests, frame, request_area);
        }
        draw_jobs(&jobs, frame, job_area);
        let lines = self.advice(advice.width.saturating_sub(2));
        let block = Block::bordered().title(" what to change ");
        frame.render_widget(Paragraph::new(lines).block(block), advice);
        frame.render_widget(Line::styled(" q quits", Modifier::DIM), keys);
    }

    /// The advice wrapped to this width.
    fn advice(&self, width: u16) -> Vec<Line<'_>> {
        let mut lines = Vec::new();
        for advice in &self.advice {
            let mut line = Line::default();
            for word in advice.split_whitespace() {
                let word = Span::raw(word);
                if line.width() > 0 && line.width() + 1 + word.width() > usize::from(width) {
                    lines.push(std::mem::take(&mut line));
                } else if line.width() > 0 {
                    line.push_span(" ");
                }
                line.push_span(word);
            }
            lines.push(line);
        }
        lines
    }

    fn draw_stages(&self, frame: &mut Frame<'_>, area: Rect) {
        let busiest = self
            .stages
            .iter()
            .filter_map(|stage| stage.busy)
            .fold(0.0, f64::max);
        let rows = self.stages.iter().map(|stage| {
            let is_busiest = stage.busy.is_some_and(|busy| busy > 0.0 && busy >= busiest);
            let color = if is_busiest {
                Color::Yellow
            } else {
                Color::Reset
            };
            let busy = stage.busy.map_or_else(Line::default, |busy| {
                let filled = (busy * BAR as f64).round() as usize;
                Line::from(vec![
                    Span::styled("█".repeat(filled), Style::new().fg(color)),
                    Span::styled("░".repeat(BAR - filled), Modifier::DIM),
                    Span::raw(format!(" {:3.0} %", 100.0 * busy)),
                ])
            });
            Row::new([
                Line::raw(stage.role.as_str()),
                right(stage.workers),
                right(stage.threads),
                right(format!("{:.0}", stage.rate)),
                busy,
                right(HumanCount(stage.waiting)),
            ])
        });
        let widths = [11, 8, 8, 10, BAR as u16 + 6, 10].map(Constraint::Length);
        let header = [
            "stage",
            " workers",
            " threads",
            "  images/s",
            "busy",
            "   waiting",
        ];
        let table = Table::new(rows, widths)
            .header(Row::new(header).style(Modifier::DIM))
            .block(Block::bordered().title(" stages "));
        frame.render_widget(table, area);
    }
}

/// A column of the jobs table.
struct Column {
    title: &'static str,
    width: u16,
    cell: fn(&JobStatus) -> String,
}

/// The columns after the job's id, most important first: a narrow screen omits the last ones and
/// shows ids completely.
const COLUMNS: [Column; 6] = [
    Column {
        title: "state",
        width: 9,
        cell: |job| job.state.as_str().to_owned(),
    },
    Column {
        title: "rows",
        width: 11,
        cell: |job| HumanCount(sum(job, |model| model.committed)).to_string(),
    },
    Column {
        title: "failed",
        width: 7,
        cell: |job| HumanCount(sum(job, |model| model.failed)).to_string(),
    },
    Column {
        title: "done",
        width: 5,
        cell: done,
    },
    Column {
        title: "rows/s",
        width: 7,
        cell: |job| {
            let rates = job.models.iter().map(|model| model.rate);
            // Without rates, the sum would be -0, which is shown with its sign.
            HumanCount((rates.sum::<f64>() + 0.0).round() as u64).to_string()
        },
    },
    Column {
        title: "time left",
        width: 10,
        cell: |job| {
            job.eta_seconds.map_or_else(String::new, |seconds| {
                let left = std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default();
                HumanDuration(left).to_string()
            })
        },
    },
];

fn sum(job: &JobStatus, of: fn(&ModelStatus) -> u64) -> u64 {
    job.models.iter().map(of).sum()
}

fn done(job: &JobStatus) -> String {
    let total = job
        .total
        .map(|total| total * job.models.len().max(1) as u64);
    let share = total.filter(|total| *total > 0);
    share.map_or_else(String::new, |total| {
        let committed = sum(job, |model| model.committed);
        format!("{:.0} %", 100.0 * committed as f64 / total as f64)
    })
}

/// Width of the longest id.
fn id_width(jobs: &[&JobStatus]) -> u16 {
    let ids = jobs.iter().map(|job| job.id.chars().count());
    ids.max().unwrap_or(0).max("job".len()) as u16
}

/// Width of the ids and these columns, with spaces.
fn jobs_width(jobs: &[&JobStatus], columns: &[Column]) -> u16 {
    let columns = columns.iter().map(|column| 1 + column.width);
    id_width(jobs) + columns.sum::<u16>()
}

fn draw_jobs(jobs: &[&JobStatus], frame: &mut Frame<'_>, area: Rect) {
    let room = area.width.saturating_sub(2);
    let mut columns = &COLUMNS[..];
    while let [rest @ .., _] = columns
        && jobs_width(jobs, columns) > room
    {
        columns = rest;
    }
    // The state is left-aligned text; numbers are right-aligned.
    let line = |column: &Column, text: String| match column.title {
        "state" => Line::raw(text),
        _ => right(text),
    };
    let rows = jobs.iter().map(|job| {
        let cells = columns
            .iter()
            .map(|column| line(column, (column.cell)(job)));
        Row::new(std::iter::once(Line::raw(job.id.as_str())).chain(cells))
    });
    let titles = columns
        .iter()
        .map(|column| line(column, column.title.to_owned()));
    let header = Row::new(std::iter::once(Line::raw("job")).chain(titles));
    let widths = columns
        .iter()
        .map(|column| Constraint::Length(column.width));
    let widths = std::iter::once(Constraint::Min(id_width(jobs))).chain(widths);
    let table = Table::new(rows, widths)
        .header(header.style(Modifier::DIM))
        .block(Block::bordered().title(" jobs "));
    frame.render_widget(table, area);
}

fn right<'a>(value: impl ToString) -> Line<'a> {
    Line::raw(value.to_string()).right_aligned()
}
