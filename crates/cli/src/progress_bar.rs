use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use trommel_source::Source;
use trommel_worker::Progress;

use crate::lines::counted;

/// The bar on the screen, so that log lines are written above it.
static ON_SCREEN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// A progress bar with count, rate, ETA and failures, redrawn ten times a second until it is
/// dropped.
pub(crate) struct Bar {
    redrawn: tokio::task::JoinHandle<()>,
    counting: Option<tokio::task::JoinHandle<()>>,
}

impl Bar {
    /// Shows a bar on standard error, unless that is not a terminal or `quiet` is set.
    ///
    /// The job lists its source only as fast as it works. For an ETA from the start, `source` is listed
    /// a second time, if it can be. An image is done when all `models` have its row.
    pub(crate) fn show(
        progress: &Arc<Progress>,
        source: Option<Arc<dyn Source>>,
        models: usize,
        quiet: bool,
    ) -> Option<Self> {
        if quiet || !io::stderr().is_terminal() {
            return None;
        }
        let bar = ProgressBar::no_length();
        *ON_SCREEN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
        let counted = Arc::new(OnceLock::new());
        let counting = source.map(|source| tokio::spawn(count(source, Arc::clone(&counted))));
        let progress = Arc::clone(progress);
        let redrawn = tokio::spawn(async move {
            loop {
                redraw(&bar, &progress, counted.get().copied(), models as u64);
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        Some(Self { redrawn, counting })
    }
}

/// Counts the images of a source. The job reports errors of the source.
async fn count(source: Arc<dyn Source>, counted: Arc<OnceLock<u64>>) {
    if let Ok(images) = source.count().await {
        counted.get_or_init(|| images);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.redrawn.abort();
        if let Some(counting) = &self.counting {
            counting.abort();
        }
        if let Some(bar) = ON_SCREEN
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            bar.finish_and_clear();
        }
    }
}

fn redraw(bar: &ProgressBar, progress: &Progress, counted: Option<u64>, models: u64) {
    let done = (progress.ok() + progress.failed()) / models;
    let resumed = progress.resumed() / models;
    let known = progress.total().or(counted);
    let style = match known {
        Some(_) => "{bar:20.cyan/blue} {human_pos}/{images}  {per_sec}  ETA {eta}{wide_msg}",
        None => "{spinner} {images}  {per_sec}  {wide_msg}",
    };
    if let Ok(style) = ProgressStyle::with_template(style) {
        let style = style.progress_chars("━╸─").with_key("per_sec", per_second);
        bar.set_style(style.with_key("images", images));
    }
    if let Some(total) = known {
        // The rate is that of this run, so the bar's length excludes resumed images.
        bar.set_length(total.saturating_sub(resumed));
    }
    bar.set_position(done);
    let mut message = String::new();
    if known.is_none() {
        message = format!("{} found, listing", HumanCount(progress.listed()));
    }
    if progress.failed() > 0 {
        message.push_str(&format!("  {} failed", HumanCount(progress.failed())));
    }
    if resumed > 0 {
        message.push_str(&format!("  {} done before", HumanCount(resumed)));
    }
    bar.set_message(message);
    bar.tick();
}

/// The total, or without one the position, as a count of images.
pub(crate) fn images(state: &indicatif::ProgressState, out: &mut dyn std::fmt::Write) {
    let images = counted(state.len().unwrap_or(state.pos()), "image");
    out.write_str(&images)
        .expect("a string takes all that is written");
}

fn per_second(state: &indicatif::ProgressState, out: &mut dyn std::fmt::Write) {
    let rate = HumanCount(state.per_sec().round() as u64);
    write!(out, "{rate}/s").expect("a string takes all that is written");
}

/// Writes lines to standard error, above the bar if one is shown.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let bar = ON_SCREEN
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        match bar {
            Some(bar) => bar.suspend(|| io::stderr().write_all(line))?,
            None => io::stderr().write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
