//! How busy each stage of a run was, and which one is the bottleneck.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use trommel_worker::{Percentiles, Task, TimeCounts};

use super::Run;

/// Times by stage.
#[derive(Debug, Serialize)]
pub(super) struct Stage {
    name: &'static str,
    /// Seconds summed over its threads.
    thread_seconds: f64,
    /// Share of the time of all stages, 0 to 1.
    share: f64,
    /// Most in parallel.
    threads: usize,
    /// Busy share of these threads, 0 to 1.
    busy: f64,
    /// Per image, from arrival to departure; for commit, per part.
    #[serde(skip_serializing_if = "Option::is_none")]
    milliseconds: Option<Percentiles>,
}

/// The bottleneck of a run so far.
pub(crate) fn busiest(run: &Run) -> &'static str {
    bottleneck(&stages(run, run.started.elapsed()))
}

/// The stages of a run so far.
pub(super) fn stages(run: &Run, wall: Duration) -> Vec<Stage> {
    let prepare = run.preprocess_threads;
    let engines = run.engines.iter().map(|engine| engine.stats());
    let (compute, instances) = engines.fold((Duration::ZERO, 0), |(time, count), engine| {
        (time + engine.compute, count + engine.instances)
    });
    let rows = [
        ("fetch", run.progress.time(Task::Fetch), run.reads),
        ("decode", run.progress.time(Task::Decode), prepare),
        ("resize", run.progress.time(Task::Resize), prepare),
        ("infer", compute, instances),
        ("commit", run.progress.time(Task::Commit), 1),
    ];
    let times = run.progress.times();
    let total: Duration = rows.iter().map(|(_, time, _)| *time).sum();
    rows.map(|(name, time, threads)| Stage {
        name,
        thread_seconds: time.as_secs_f64(),
        share: time.as_secs_f64() / total.as_secs_f64().max(1e-9),
        threads,
        busy: time.as_secs_f64() / (wall.as_secs_f64() * threads.max(1) as f64).max(1e-9),
        milliseconds: times.get(name).and_then(TimeCounts::percentiles),
    })
    .into()
}

/// The same threads decode and resize.
const PREPARING: [&str; 2] = ["decode", "resize"];

/// Busy share of this stage's threads, 0 to 1.
fn load(stages: &[Stage], stage: &Stage) -> f64 {
    let same = |other: &&Stage| {
        other.name == stage.name
            || [other, stage]
                .iter()
                .all(|one| PREPARING.contains(&one.name))
    };
    stages.iter().filter(same).map(|stage| stage.busy).sum()
}

/// Below this load no stage is the bottleneck: startup or listing took the time.
const IDLE: f64 = 0.25;

/// The bottleneck: among the stages with the busiest threads, the longest.
pub(super) fn bottleneck(stages: &[Stage]) -> &'static str {
    let busiest = stages.iter().max_by(|a, b| {
        let loads = load(stages, a).total_cmp(&load(stages, b));
        loads.then(a.busy.total_cmp(&b.busy))
    });
    busiest
        .filter(|stage| load(stages, stage) >= IDLE)
        .map_or("none", |stage| stage.name)
}

/// One line per stage: how busy its threads were, and percentiles of its times, if any.
pub(super) fn write_stages(f: &mut impl fmt::Write, stages: &[Stage]) -> fmt::Result {
    writeln!(f, "  stage    busy     p50 ms    p95 ms    p99 ms")?;
    for Stage {
        name,
        busy,
        milliseconds,
        ..
    } in stages
    {
        write!(f, "  {name:<7} {:>3.0} %", 100.0 * busy)?;
        if let Some(Percentiles { p50, p95, p99, .. }) = milliseconds {
            write!(f, "  {p50:>9.2} {p95:>9.2} {p99:>9.2}")?;
        }
        writeln!(f)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &'static str, thread_seconds: f64, threads: usize) -> Stage {
        Stage {
            name,
            thread_seconds,
            share: 0.0,
            threads,
            busy: thread_seconds / threads as f64 / 10.0,
            milliseconds: None,
        }
    }

    /// N40: many concurrent reads add up to more thread-seconds than the stage that they wait for.
    #[test]
    fn the_bottleneck_is_what_is_busiest_not_what_adds_up_to_most() {
        let stages = [
            stage("fetch", 30.0, 32),
            stage("decode", 8.0, 4),
            stage("resize", 4.0, 4),
            stage("infer", 19.0, 2),
            stage("commit", 1.0, 1),
        ];
        assert_eq!(bottleneck(&stages), "infer");
    }

    #[test]
    fn a_run_that_is_over_at_once_has_no_bottleneck() {
        let stages = [stage("fetch", 0.1, 8), stage("commit", 0.4, 1)];
        assert_eq!(bottleneck(&stages), "none");
    }

    #[test]
    fn decoding_and_resizing_share_their_threads() {
        let stages = [
            stage("fetch", 1.0, 8),
            stage("decode", 20.0, 4),
            stage("resize", 19.0, 4),
            stage("infer", 12.0, 2),
        ];
        assert_eq!(bottleneck(&stages), "decode");
        assert!(load(&stages, &stages[1]) > 0.97);
    }
}
