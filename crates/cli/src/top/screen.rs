//! What `trommel top` shows.

use indicatif::{HumanCount, HumanDuration};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Row, Table};
use trommel_worker::{JobState, JobStatus};

use super::stages::Stage;

/// Ended jobs that are shown below the running ones.
const ENDED: usize = 3;
/// Cells of a bar.
const BAR: usize = 20;

/// All that is on the screen.
pub(super) struct View {
    pub(super) jobs: Vec<JobStatus>,
    pub(super) stages: Vec<Stage>,
    pub(super) advice: Vec<String>,
}

impl View {
    /// The jobs that are shown: those that go on, then the latest that have ended.
    fn shown(&self) -> Vec<&JobStatus> {
        let goes_on = |job: &&JobStatus| matches!(job.state, JobState::Running | JobState::Queued);
        let (running, ended): (Vec<_>, Vec<_>) = self.jobs.iter().partition(goes_on);
        running
            .into_iter()
            .chain(ended.into_iter().take(ENDED))
            .collect()
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let jobs = self.shown();
        let [stages, job_area, advice, keys] = Layout::vertical([
            Constraint::Length(2 + 1 + self.stages.len() as u16),
            Constraint::Length(2 + 1 + jobs.len().max(1) as u16),
            Constraint::Min(2 + self.advice.len() as u16),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        self.draw_stages(frame, stages);
        draw_jobs(&jobs, frame, job_area);
        let lines: Vec<_> = self
            .advice
            .iter()
            .map(|line| Line::raw(line.as_str()))
            .collect();
        frame.render_widget(
            Paragraph::new(lines).block(Block::bordered().title(" what to turn ")),
            advice,
        );
        frame.render_widget(Line::styled(" q quits", Modifier::DIM), keys);
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

fn draw_jobs(jobs: &[&JobStatus], frame: &mut Frame<'_>, area: Rect) {
    let rows = jobs.iter().map(|job| {
        let committed: u64 = job.models.iter().map(|model| model.committed).sum();
        let failed: u64 = job.models.iter().map(|model| model.failed).sum();
        let rate: f64 = job.models.iter().map(|model| model.rate).sum();
        let total = job
            .total
            .map(|total| total * job.models.len().max(1) as u64);
        let share = total.filter(|total| *total > 0);
        let done = share.map_or_else(String::new, |total| {
            format!("{:3.0} %", 100.0 * committed as f64 / total as f64)
        });
        let eta = job.eta_seconds.map_or_else(String::new, |seconds| {
            let left = std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default();
            HumanDuration(left).to_string()
        });
        Row::new([
            Line::raw(job.id.as_str()),
            Line::raw(job.state.as_str()),
            right(HumanCount(committed)),
            right(done),
            right(HumanCount(failed)),
            right(format!("{rate:.0}")),
            right(eta),
        ])
    });
    let widths = [
        Constraint::Min(12),
        Constraint::Length(10),
        Constraint::Length(14),
        Constraint::Length(6),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Length(12),
    ];
    let header = [
        "job",
        "state",
        "          rows",
        "  done",
        "   failed",
        "   rows/s",
        "   time left",
    ];
    let table = Table::new(rows, widths)
        .header(Row::new(header).style(Modifier::DIM))
        .block(Block::bordered().title(" jobs "));
    frame.render_widget(table, area);
}

fn right<'a>(value: impl ToString) -> Line<'a> {
    Line::raw(value.to_string()).right_aligned()
}
