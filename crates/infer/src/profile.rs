//! Measures a model's time: by node with ONNX Runtime's profiler, and by batch.

use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::backend::Backend;
use crate::error::reason;
use crate::{InferError, Model};

/// Operators by which ONNX Runtime moves tensors between devices.
const COPIES: [&str; 2] = ["MemcpyFromHost", "MemcpyToHost"];
/// Least number of timed runs.
const MIN_RUNS: usize = 5;

/// The time of a batch by node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Profile {
    /// Images in a batch.
    pub batch: usize,
    /// Number of batches run.
    pub runs: usize,
    /// Mean milliseconds per batch, including the profiler's overhead.
    pub milliseconds: f64,
    /// The executed nodes, in order: the graph after ONNX Runtime's optimisations.
    pub nodes: Vec<NodeTime>,
}

/// One node of the graph.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeTime {
    /// Its name in the graph.
    pub name: String,
    /// Its operator, such as `Conv`.
    pub operator: String,
    /// The execution provider that ran it, such as `CPUExecutionProvider`.
    pub provider: String,
    /// Mean milliseconds per batch. On a GPU, the time to launch the node's work, which overlaps
    /// with that of the next nodes.
    pub milliseconds: f64,
}

/// Throughput at one batch size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct BatchRate {
    /// Images in a batch.
    pub batch: usize,
    /// Median milliseconds per batch, from the packed tensor to scores.
    pub milliseconds: f64,
    /// Images per second.
    pub images_per_second: f64,
}

impl Model {
    /// Runs batches of black images under ONNX Runtime's profiler. A model with a fixed batch runs
    /// that one.
    ///
    /// # Errors
    /// If a session cannot be opened, the model cannot run the batch, or the profiler's file cannot
    /// be written or read.
    pub fn profile(&self, batch: usize, runs: usize) -> Result<Profile, InferError> {
        let failed = |error: &dyn std::fmt::Display| {
            self.classifier()
                .failed(&format!("its profile is lost: {}", reason(error)))
        };
        let folder = tempfile::tempdir().map_err(|error| failed(&error))?;
        let batch = self.classifier().computed(batch);
        let prefix = folder.path().join("run");
        let mut backend = self
            .classifier()
            .measured_backend(0, batch, Some(&prefix))?;
        // The first run allocates memory, and is not counted.
        for _ in 0..=runs {
            backend.blank(batch)?;
        }
        let file = backend.end_profiling()?;
        let text = fs::read_to_string(file).map_err(|error| failed(&error))?;
        parse(&text, batch, runs).map_err(|error| failed(&error))
    }

    /// Measures the throughput of one instance, over `time` and at least five runs. A model with a
    /// fixed batch runs that one.
    ///
    /// # Errors
    /// If a session cannot be opened, or the model cannot run the batch.
    pub fn rate(&self, batch: usize, time: Duration) -> Result<BatchRate, InferError> {
        let batch = self.classifier().computed(batch);
        let mut backend = self.backend(0, batch, None)?;
        backend.blank(batch)?;
        let (start, mut took) = (Instant::now(), Vec::new());
        while took.len() < MIN_RUNS || start.elapsed() < time {
            let run = Instant::now();
            backend.blank(batch)?;
            took.push(run.elapsed());
        }
        took.sort_unstable();
        let seconds = took[took.len() / 2].as_secs_f64();
        Ok(BatchRate {
            batch,
            milliseconds: 1e3 * seconds,
            images_per_second: batch as f64 / seconds,
        })
    }
}

impl Profile {
    /// The share of the nodes' time spent on moving tensors between devices, 0 to 1.
    pub fn copy_share(&self) -> f64 {
        let copies = self.nodes.iter().filter(|node| node.is_copy());
        // An empty sum is -0.
        let copies = copies.fold(0.0, |sum, node| sum + node.milliseconds);
        copies / self.in_nodes().max(f64::MIN_POSITIVE)
    }

    /// Milliseconds of a batch spent in nodes.
    pub fn in_nodes(&self) -> f64 {
        self.nodes.iter().map(|node| node.milliseconds).sum()
    }
}

impl NodeTime {
    fn is_copy(&self) -> bool {
        COPIES.contains(&self.operator.as_str())
    }
}

/// An entry of ONNX Runtime's profile, in the format of Chrome's trace events.
#[derive(Debug, Deserialize)]
struct Event {
    #[serde(default)]
    cat: String,
    #[serde(default)]
    name: String,
    /// Microseconds since the profile began.
    #[serde(default)]
    ts: u64,
    /// Microseconds.
    #[serde(default)]
    dur: u64,
    #[serde(default)]
    args: HashMap<String, serde_json::Value>,
}

impl Event {
    fn arg(&self, name: &str) -> &str {
        self.args
            .get(name)
            .and_then(serde_json::Value::as_str)
            .unwrap_or("")
    }
}

/// Reads the last `runs` runs of a profile.
fn parse(text: &str, batch: usize, runs: usize) -> Result<Profile, String> {
    let events: Vec<Event> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let is_run = |event: &&Event| event.cat == "Session" && event.name == "model_run";
    let mut all_runs: Vec<_> = events.iter().filter(is_run).collect();
    all_runs.sort_by_key(|run| run.ts);
    let counted = all_runs.len().checked_sub(runs).filter(|_| runs > 0);
    let counted = counted.ok_or_else(|| format!("it has {} runs", all_runs.len()))?;
    let counted = &all_runs[counted..];

    // A node is identified by its position in the graph; names need not be unique.
    let mut nodes: Vec<(u64, NodeTime)> = Vec::new();
    let mut places = HashMap::new();
    let per_run = |microseconds: u64| microseconds as f64 / 1e3 / runs as f64;
    for event in events.iter().filter(|event| event.cat == "Node") {
        let Some(name) = event.name.strip_suffix("_kernel_time") else {
            continue;
        };
        let run = counted.partition_point(|run| run.ts <= event.ts);
        let is_counted = run > 0 && event.ts <= counted[run - 1].ts + counted[run - 1].dur;
        if !is_counted {
            continue;
        }
        let place = *places
            .entry((name, event.arg("node_index")))
            .or_insert_with(|| {
                let node = NodeTime {
                    name: name.to_owned(),
                    operator: event.arg("op_name").to_owned(),
                    provider: event.arg("provider").to_owned(),
                    milliseconds: 0.0,
                };
                nodes.push((event.ts, node));
                nodes.len() - 1
            });
        nodes[place].1.milliseconds += per_run(event.dur);
    }
    nodes.sort_by_key(|(first, _)| *first);
    Ok(Profile {
        batch,
        runs,
        milliseconds: per_run(counted.iter().map(|run| run.dur).sum()),
        nodes: nodes.into_iter().map(|(_, node)| node).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, operator: &str, index: u64, ts: u64, dur: u64) -> serde_json::Value {
        serde_json::json!({
            "cat": "Node", "name": format!("{name}_kernel_time"), "ts": ts, "dur": dur, "ph": "X",
            "args": {
                "op_name": operator, "provider": "CPUExecutionProvider",
                "node_index": index.to_string(),
            },
        })
    }

    fn run(ts: u64, dur: u64) -> serde_json::Value {
        serde_json::json!({"cat": "Session", "name": "model_run", "ts": ts, "dur": dur, "args": {}})
    }

    #[test]
    fn the_runs_asked_for_are_counted_and_the_first_is_not() {
        let events = serde_json::json!([
            {"cat": "Session", "name": "session_initialization", "ts": 1, "dur": 50, "args": {}},
            node("conv", "Conv", 0, 110, 900),
            run(100, 1000),
            node("copy", "MemcpyToHost", 1, 2050, 100),
            node("conv", "Conv", 0, 2010, 30),
            run(2000, 200),
            node("conv", "Conv", 0, 3010, 50),
            node("copy", "MemcpyToHost", 1, 3070, 120),
            run(3000, 300),
        ]);
        let profile = parse(&events.to_string(), 4, 2).unwrap();
        assert_eq!((profile.batch, profile.runs), (4, 2));
        assert!((profile.milliseconds - 0.25).abs() < 1e-9, "{profile:?}");
        let names: Vec<_> = profile.nodes.iter().map(|node| &*node.name).collect();
        assert_eq!(names, ["conv", "copy"]);
        assert!((profile.nodes[0].milliseconds - 0.04).abs() < 1e-9);
        assert!((profile.in_nodes() - 0.15).abs() < 1e-9);
        assert!((profile.copy_share() - 0.11 / 0.15).abs() < 1e-9);
    }

    #[test]
    fn a_profile_without_the_runs_is_refused() {
        assert!(parse("[]", 1, 1).is_err());
        assert!(parse("not JSON", 1, 1).is_err());
    }
}
