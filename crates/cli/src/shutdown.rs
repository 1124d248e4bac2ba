use std::io::Write;

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Returns a token that fires at the first SIGINT or SIGTERM. The second one ends the process at
/// once: committed rows stay, and work in flight is lost and repeated by the next run.
pub(crate) fn on_signal() -> Result<CancellationToken> {
    let mut interrupts = listen(SignalKind::interrupt())?;
    let mut terminations = listen(SignalKind::terminate())?;
    let token = CancellationToken::new();
    let stop = token.clone();
    tokio::spawn(async move {
        either(&mut interrupts, &mut terminations).await;
        say("stopping: finishing images in flight; a second signal (Ctrl-C) stops at once");
        stop.cancel();
        either(&mut interrupts, &mut terminations).await;
        say("stopped at once; run the same command again to resume");
        std::process::exit(130);
    });
    Ok(token)
}

fn listen(kind: SignalKind) -> Result<Signal> {
    signal(kind).context("failed to listen for signals")
}

async fn either(interrupts: &mut Signal, terminations: &mut Signal) {
    tokio::select! {
        _ = interrupts.recv() => {}
        _ = terminations.recv() => {}
    }
}

fn say(what: &str) {
    // Standard error is closed, so this cannot be reported.
    drop(writeln!(crate::progress_bar::LogWriter, "trommel: {what}"));
}
