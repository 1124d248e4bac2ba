//! `trommel top`: jobs and stages in a terminal.

mod screen;
mod stages;

use std::collections::VecDeque;
use std::io::{IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use trommel_worker::Client;

use self::screen::View;
use self::stages::Look;
use crate::args::TopArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::jobs::with_client;

/// Columns and rows of what is printed once.
const PRINTED: (u16, u16) = (100, 40);
/// Time over which rates are told. Workers say every two seconds what they have done.
const WINDOW: Duration = Duration::from_secs(5);
/// Longest wait for a key before the next look is thought of.
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
            bail!("standard output is no terminal; --once prints what there is to see");
        }
        let mut terminal = ratatui::try_init().context("failed to take over the terminal")?;
        let ended = watch(&mut terminal, &client, first, args.interval).await;
        ratatui::restore();
        ended.map(|()| Exit::Success)
    })
}

async fn look(client: &Client) -> Result<Look> {
    Ok(Look {
        workers: client.workers().await?,
        jobs: client.list().await?,
    })
}

fn view(before: &Look, now: Look) -> View {
    let stages = stages::stages(before, &now);
    View {
        advice: stages::advice(&stages, &now.jobs),
        stages,
        jobs: now.jobs,
    }
}

/// Looks again and again until a key says to quit.
async fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    client: &Client,
    first: Look,
    interval: Duration,
) -> Result<()> {
    let mut looks = VecDeque::from([(Instant::now(), first)]);
    loop {
        let now = look(client).await?;
        // The oldest look that the window still begins with.
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

/// The screen as text.
fn printed(view: &View) -> Result<String> {
    let backend = TestBackend::new(PRINTED.0, PRINTED.1);
    let mut terminal = Terminal::new(backend)?;
    terminal.draw(|frame| view.draw(frame))?;
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(usize::from(PRINTED.0));
    let lines = rows.map(|row| {
        let line: String = row.iter().map(|cell| cell.symbol()).collect();
        line.trim_end().to_owned() + "\n"
    });
    Ok(lines
        .filter(|line| line != "\n" && !line.contains("q quits"))
        .collect())
}
