//! A plan as text.

use std::fmt;

use super::fleet::{JobPlan, Line, Scale};
use super::requests::RequestPlan;
use super::{CostOfPlan, Plan};
use crate::forecast::money;
use crate::lines::counted;

/// A labelled line.
macro_rules! line {
    ($f:expr, $name:expr, $($words:tt)*) => {
        writeln!($f, "{:<11} {}", $name, format_args!($($words)*))
    };
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(requests) = &self.requests {
            show_requests(f, requests)?;
        }
        if let Some(job) = &self.job {
            show_job(f, job)?;
        }
        if let Some(CostOfPlan {
            an_hour,
            a_million_images,
        }) = self.cost
        {
            line!(
                f,
                "cost",
                "{} per hour, {} per million images",
                money(an_hour),
                money(a_million_images)
            )?;
        }
        if let Some(requests) = &self.requests {
            show_settings(f, requests)?;
        }
        if let Some(scale) = self.scale.as_ref().filter(|_| self.job.is_some()) {
            show_scale(f, scale)?;
        }
        for missing in &self.missing {
            writeln!(f, "unknown: {missing}")?;
        }
        Ok(())
    }
}

fn show_requests(f: &mut fmt::Formatter<'_>, plan: &RequestPlan) -> fmt::Result {
    let RequestPlan {
        rate,
        max_batch,
        mean_batch,
        busy,
        milliseconds,
        fleet,
        ..
    } = plan;
    line!(
        f,
        "rate",
        "{rate:.0}/s, 95 % within {:.0} ms",
        plan.p95_wanted_milliseconds
    )?;
    line!(
        f,
        "batch",
        "{max_batch} at most, {mean_batch:.1} on average"
    )?;
    line!(f, "wait", "{} ms at most", plan.max_wait_milliseconds)?;
    let busy = 100.0 * busy;
    let processes = match fleet.infer == fleet.instances {
        true => String::new(),
        false => format!(" in {} processes", fleet.infer),
    };
    line!(
        f,
        "sessions",
        "{}{processes}, {busy:.0} % busy",
        fleet.instances
    )?;
    if let Some(cores) = plan.cores_busy {
        line!(
            f,
            "preprocess",
            "{}, {:.0} % busy",
            counted(fleet.cores, "core"),
            100.0 * cores
        )?;
    }
    line!(
        f,
        "answers",
        "p50 {:.0} ms, p95 {:.0} ms, p99 {:.0} ms",
        milliseconds.p50,
        milliseconds.p95,
        milliseconds.p99
    )?;
    line!(
        f,
        "in flight",
        "{:.1} on average, {} at most ({:.1}/s in full batches × {:.0} ms)",
        plan.in_flight,
        plan.in_flight_cap,
        plan.capacity,
        plan.p95_wanted_milliseconds
    )?;
    line!(f, "holds to", "{:.0}/s", plan.holds_up_to)
}

/// The settings of `trommel serve` for the plan.
fn show_settings(f: &mut fmt::Formatter<'_>, plan: &RequestPlan) -> fmt::Result {
    let processes = plan.fleet.infer.max(1);
    let each = plan.fleet.instances.div_ceil(processes);
    let of = match processes {
        1 => String::new(),
        processes => format!(" of each of {processes} processes"),
    };
    let micros = (1e3 * plan.max_wait_milliseconds).round() as u64;
    let wait = humantime::format_duration(std::time::Duration::from_micros(micros));
    writeln!(
        f,
        "settings{of}: infer.max-batch = {}, infer.instances = {each}, serve.max-wait = \"{wait}\", serve.slo = \"{:.0}ms\", serve.queue = {}",
        plan.max_batch,
        plan.p95_wanted_milliseconds,
        plan.in_flight_cap.div_ceil(processes)
    )
}

fn show_job(f: &mut fmt::Formatter<'_>, plan: &JobPlan) -> fmt::Result {
    let percent = |busy: f64| format!("{:.0} % busy", 100.0 * busy);
    line!(
        f,
        "rate",
        "{:.0}/s; the bottleneck is {}",
        plan.images_per_second,
        plan.bottleneck
    )?;
    if let Some(busy) = plan.cores_busy {
        line!(
            f,
            "preprocess",
            "{}, {}",
            counted(plan.fleet.cores, "core"),
            percent(busy)
        )?;
    }
    line!(
        f,
        "infer",
        "{} in {}, batches of {}, {}",
        counted(plan.fleet.instances, "session"),
        counted(plan.fleet.infer, "process"),
        plan.max_batch,
        percent(plan.infer_busy)
    )?;
    if let Some(busy) = plan.streams_busy {
        line!(
            f,
            "broker",
            "{} streams for tensors, {}",
            plan.fleet.streams,
            percent(busy)
        )?;
    }
    line!(f, "in flight", "{:.0} images", plan.in_flight)?;
    if let Some(bytes) = plan.read_bytes_per_second {
        line!(f, "source", "{}", bytes_a_second(bytes))?;
    }
    if let Some(bytes) = plan.broker_bytes_per_second {
        line!(
            f,
            "tensors",
            "{}, to and from the broker",
            bytes_a_second(bytes)
        )?;
    }
    Ok(())
}

fn show_scale(f: &mut fmt::Formatter<'_>, scale: &Scale) -> fmt::Result {
    writeln!(
        f,
        "\n{:>7} {:>8} {:>14} {:>12} {:>9} {:>14}",
        "cores", "devices", "local hop, 1/s", "1 stream, 1/s", "streams", "tensors"
    )?;
    for line in scale.by_cores.iter().chain(&scale.by_devices) {
        let Line {
            cores,
            devices,
            local,
            one_stream,
            streams,
            broker_bytes_per_second,
        } = line;
        let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "?".to_owned());
        writeln!(
            f,
            "{cores:>7} {devices:>8} {local:>14.0} {:>12} {:>9} {:>14}",
            or_unknown(one_stream.map(|rate| format!("{rate:.0}"))),
            or_unknown(streams.map(|streams| streams.to_string())),
            or_unknown(broker_bytes_per_second.map(bytes_a_second))
        )?;
    }
    if let Some(full) = scale.stream_is_full_at {
        writeln!(
            f,
            "One stream saturates at {full:.0} tensors/s; each further one needs its own broker. The local hop uses none."
        )?;
    }
    Ok(())
}

fn bytes_a_second(bytes: f64) -> String {
    match bytes {
        bytes if bytes >= 1e9 => format!("{:.2} GB/s", bytes / 1e9),
        bytes => format!("{:.1} MB/s", bytes / 1e6),
    }
}
