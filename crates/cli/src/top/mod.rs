//! `trommel top`: jobs and stages in a terminal.

mod requests;
mod screen;
mod stages;

use std::collections::VecDeque;
use std::io::{IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use trommel_worker::{Client, JobState};

use self::screen::View;
use self::stages::Look;
use crate::args::TopArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::jobs::{list, with_client};

/// Number of jobs shown; more do not fit on a screen.
const JOBS: usize = 40;
/// Interval over which rates are measured. Workers report every two seconds.
const WINDOW: Duration = Duration::from_secs(5);
/// Longest wait for a key before the next poll is considered.
const KEY_WAIT: Duration = Duration::from_millis(100);

/// Runs the command.
pub(crate) fn run(args: &TopArgs, config: &Config) -> Result<Exit> {
    with_client(config, async |client| {
        let first = look(&client).await.context(Usage)?;
        if args.once {
            tokio::time::sleep(args.interval.max(WINDOW)).await;
            let text = printed(&view(&first, look(&client).await?))?;
            stdout().write_all(text.as_bytes())?;
            return Ok(Exit::Success);
        }
        if !stdout().is_terminal() {
            bail!("standard output is not a terminal; use --once to print one view");
        }
        let mut terminal = ratatui::try_init().context("failed to take over the terminal")?;
        let ended = watch(&mut terminal, &client, first, args.interval).await;
        ratatui::restore();
        ended.map(|()| Exit::Success)
    })
}

async fn look(client: &Client) -> Result<Look> {
    let mut jobs = list(client, JOBS, false).await?;
    for job in &mut jobs {
        if job.state == JobState::Running {
            // Including queue lengths, which lists omit.
            *job = client.status(&job.id).await?;
        }
    }
    Ok(Look {
        workers: client.workers().await?,
        jobs,
    })
}

fn view(before: &Look, now: Look) -> View {
    let stages = stages::stages(before, &now);
    View {
        advice: stages::advice(&stages, &now.jobs),
        stages,
        requests: requests::entrances(before, &now),
        jobs: now.jobs,
    }
}

/// Polls until a key quits.
async fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    client: &Client,
    first: Look,
    interval: Duration,
) -> Result<()> {
    let mut looks = VecDeque::from([(Instant::now(), first)]);
    loop {
        let now = look(client).await?;
        // The oldest poll within the window.
        while looks.get(1).is_some_and(|(at, _)| at.elapsed() >= WINDOW) {
            looks.pop_front();
        }
        let workers = now.workers.clone();
        let view = view(&looks[0].1, now);
        let jobs = Vec::new(); // only workers are compared
        looks.push_back((Instant::now(), Look { workers, jobs }));
        let next = Instant::now() + interval;
        while Instant::now() < next {
            terminal.draw(|frame| view.draw(frame))?;
            let key = tokio::task::spawn_blocking(|| -> Result<bool> {
                Ok(event::poll(KEY_WAIT)? && quits(&event::read()?))
            });
            if key.await.context("failed to read keys")?? {
                return Ok(());
            }
        }
    }
}

fn quits(event: &Event) -> bool {
    let Event::Key(KeyEvent {
        code, modifiers, ..
    }) = event
    else {
        return false;
    };
    match code {
        KeyCode::Char('q') | KeyCode::Esc => true,
        KeyCode::Char('c') => modifiers.contains(KeyModifiers::CONTROL),
        _ => false,
    }
}

/// Everything as text, in its natural size.
fn printed(view: &View) -> Result<String> {
    let (width, height) = view.size();
    let mut terminal = Terminal::new(TestBackend::new(width, height))?;
    terminal.draw(|frame| view.draw(frame))?;
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(usize::from(width));
    let lines = rows.map(|row| {
        let line: String = row.iter().map(|cell| cell.symbol()).collect();
        line.trim_end().to_owned() + "\n"
    });
    Ok(lines.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(id: &str) -> trommel_worker::JobStatus {
        let status = serde_json::json!({
            "id": id, "state": "running", "source": "", "output": "", "lane": "normal",
            "submitted_at": 0, "listed": 9, "total": 9, "stages": [], "eta_seconds": 70.0,
            "models": [{"name": "m", "version": "1", "committed": 3, "ok": 3, "failed": 0,
                        "failures": {}, "pending": 0, "rate": 1.0}],
        });
        serde_json::from_value(status).expect("it is a status")
    }

    fn view() -> View {
        View {
            jobs: vec![
                job("0199b3c2-7a41-7c11-9d3e-5f1f5b1c2a77"),
                job(&"x".repeat(64)),
            ],
            stages: Vec::new(),
            requests: Vec::new(),
            advice: vec!["word ".repeat(40)],
        }
    }

    /// N34: ids were truncated, and 25 lines were empty.
    #[test]
    fn what_is_printed_shows_ids_whole_and_has_no_empty_lines() {
        let view = view();
        let text = printed(&view).expect("it is drawn");
        for job in &view.jobs {
            assert!(text.contains(&job.id), "{text}");
        }
        for word in ["time left", "33 %", "70 seconds"] {
            assert!(text.contains(word), "{word}:\n{text}");
        }
        assert_eq!(text.matches("word").count(), 40, "{text}");
        let empty = |line: &str| line.trim_matches([' ', '│']).is_empty();
        assert!(!text.lines().any(empty), "{text}");
    }

    #[test]
    fn a_narrow_screen_leaves_out_columns_before_it_cuts_an_id() {
        let mut view = view();
        view.jobs.pop();
        let mut terminal = Terminal::new(TestBackend::new(60, 24)).expect("it is a terminal");
        terminal
            .draw(|frame| view.draw(frame))
            .expect("it is drawn");
        let text = terminal.backend().to_string();
        assert!(text.contains(&view.jobs[0].id), "{text}");
        assert!(
            text.contains("running") && !text.contains("time left"),
            "{text}"
        );
    }
}
