//! The results as tables for people.

use std::fmt;

use super::load::Load;
use super::measures::Measures;
use super::{Found, ServerLoad};
use crate::lines::counted;

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stages(measures) => show_stages(f, measures),
            Self::Server(server) => show_server(f, server),
        }
    }
}

/// Share of the CPUs taken by other programs above which a warning is printed.
const DISTURBED: f64 = 0.15;
/// An efficiency above this is no noise.
const IMPOSSIBLE: f64 = 1.1;

fn show_stages(f: &mut fmt::Formatter<'_>, measures: &Measures) -> fmt::Result {
    let Measures {
        machine,
        model,
        sample,
        stages,
        compute,
        hops,
        pipeline,
        ..
    } = measures;
    writeln!(
        f,
        "{} ({}) on {}: {} with {} each; {}, {}",
        model.name,
        model.version,
        model.device,
        counted(model.instances, "session"),
        counted(model.intra_threads, "thread"),
        machine.name,
        counted(machine.cores, "core")
    )?;
    writeln!(
        f,
        "{} of {:.0} bytes on average, {} failed",
        counted(sample.images, "image"),
        sample.image_bytes,
        sample.failed
    )?;
    writeln!(
        f,
        "\n{:<10} {:>9} {:>5} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "stage", "images/s", "at", "mean ms", "p50", "p90", "p95", "p99", "p99.9"
    )?;
    let hops = hops.iter().map(|hop| {
        let name = format!("hop, {}", hop.hop);
        (name, hop.images_per_second, 1, hop.milliseconds)
    });
    let stages = stages.iter().map(|stage| {
        let (rate, at) = (stage.images_per_second, stage.side_by_side);
        (stage.stage.clone(), rate, at, stage.milliseconds)
    });
    for (name, rate, at, times) in stages.chain(hops) {
        writeln!(
            f,
            "{name:<10} {rate:>9.0} {at:>5} {:>9.3} {:>9.3} {:>9.3} {:>9.3} {:>9.3} {:>9.3}",
            times.mean, times.p50, times.p90, times.p95, times.p99, times.p999
        )?;
    }
    writeln!(
        f,
        "\n{:<10} {:>9} {:>10} {:>12}",
        "model", "images/s", "ms/batch", "ms/image"
    )?;
    for time in compute {
        writeln!(
            f,
            "batch {:<4} {:>9.1} {:>10.3} {:>12.3}",
            time.batch,
            time.images_per_second,
            time.milliseconds,
            time.milliseconds / time.batch as f64
        )?;
    }
    writeln!(
        f,
        "\npipeline   {:.1} images/s in batches of {}; the slowest stage allows {:.1} ({}), {}",
        pipeline.images_per_second,
        model.max_batch,
        pipeline.limit,
        pipeline.bottleneck,
        efficiency(pipeline.efficiency)
    )?;
    if machine.others > DISTURBED {
        writeln!(
            f,
            "other processes used {:.0} % of the CPUs; measure again on an idle machine",
            100.0 * machine.others
        )?;
    }
    Ok(())
}

/// The efficiency, unless the stages were measured at a worse moment than the pipeline.
fn efficiency(share: f64) -> String {
    match share <= IMPOSSIBLE {
        true => format!("efficiency {:.0} %", 100.0 * share),
        false => "which the pipeline exceeded: the machine was disturbed while the stages were measured; measure again".to_owned(),
    }
}

fn show_server(f: &mut fmt::Formatter<'_>, server: &ServerLoad) -> fmt::Result {
    let ServerLoad {
        against,
        model,
        arrivals,
        loads,
    } = server;
    writeln!(f, "{model} at {against}, {arrivals} arrivals, open loop")?;
    writeln!(
        f,
        "\n{:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9}",
        "rate/s",
        "ok",
        "refused",
        "failed",
        "p50 ms",
        "p90",
        "p95",
        "±",
        "p99",
        "p99.9",
        "goodput/s"
    )?;
    for load in loads {
        let Load {
            rate,
            ok,
            refused,
            failed,
            milliseconds: times,
            p95_uncertainty,
            goodput,
            ..
        } = load;
        let uncertainty = match p95_uncertainty {
            Some(uncertainty) => format!("{uncertainty:.1}"),
            None => "-".to_owned(),
        };
        writeln!(
            f,
            "{rate:>8.1} {ok:>8} {refused:>8} {failed:>8} {:>8.1} {:>8.1} {:>8.1} {uncertainty:>8} {:>8.1} {:>8.1} {goodput:>9.1}",
            times.p50, times.p90, times.p95, times.p99, times.p999
        )?;
    }
    for load in loads {
        for (why, count) in &load.failures {
            writeln!(f, "{:>8.1} {count} failed: {why}", load.rate)?;
        }
    }
    let deadline = loads.first().map_or(0.0, |load| load.deadline_milliseconds);
    writeln!(
        f,
        "\n±: of p95, with 95 % confidence; a longer --duration narrows it\n\
         goodput: rows within {deadline:.0} ms of when their request was due"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_efficiency_that_cannot_be_is_not_printed() {
        assert_eq!(efficiency(0.934), "efficiency 93 %");
        assert_eq!(efficiency(1.04), "efficiency 104 %");
        assert!(efficiency(3.43).ends_with("measure again"));
    }
}
