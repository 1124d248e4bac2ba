//! The report on where a model's time goes.

use std::fmt;

use serde::Serialize;
use trommel_infer::{BatchRate, NodeTime, Profile};

use crate::lines::counted;

/// Number of nodes shown to people; JSON has all.
const SLOWEST: usize = 10;

/// The report of `trommel profile`.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) model: String,
    pub(crate) version: String,
    pub(crate) device: String,
    pub(crate) intra_threads: usize,
    #[serde(flatten)]
    pub(crate) profile: Profile,
    /// Share of the nodes' time spent moving tensors between devices, 0 to 1.
    pub(crate) copy_share: f64,
    pub(crate) operators: Vec<OperatorTime>,
    /// By batch size, one instance.
    pub(crate) throughput: Vec<BatchRate>,
}

/// All nodes of one operator.
#[derive(Serialize)]
pub(crate) struct OperatorTime {
    pub(crate) operator: String,
    pub(crate) nodes: usize,
    /// Per batch.
    pub(crate) milliseconds: f64,
}

/// Totals, largest first.
pub(crate) fn by_operator(nodes: &[NodeTime]) -> Vec<OperatorTime> {
    let mut operators: Vec<OperatorTime> = Vec::new();
    for node in nodes {
        let of_node = |other: &&mut OperatorTime| other.operator == node.operator;
        match operators.iter_mut().find(of_node) {
            Some(operator) => {
                operator.nodes += 1;
                operator.milliseconds += node.milliseconds;
            }
            None => operators.push(OperatorTime {
                operator: node.operator.clone(),
                nodes: 1,
                milliseconds: node.milliseconds,
            }),
        }
    }
    operators.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
    operators
}

impl Report {
    /// The slowest nodes, slowest first.
    pub(crate) fn slowest(&self) -> Vec<&NodeTime> {
        let mut nodes: Vec<_> = self.profile.nodes.iter().collect();
        nodes.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
        nodes.truncate(SLOWEST);
        nodes
    }

    /// What was run, and how.
    pub(crate) fn title(&self) -> String {
        let Self {
            model,
            version,
            device,
            intra_threads,
            profile,
            ..
        } = self;
        format!(
            "{model} ({version}) on {device}, {}, batch {}, mean of {}",
            counted(*intra_threads, "thread"),
            profile.batch,
            counted(profile.runs, "run")
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.profile.in_nodes();
        let percent = |part: f64| 100.0 * part / all.max(f64::MIN_POSITIVE);
        let (time, batch) = (self.profile.milliseconds, self.profile.batch);
        writeln!(f, "{}", self.title())?;
        writeln!(
            f,
            "{time:.2} ms per batch, {:.2} ms per image, {:.1} % of it in {}; copies between devices {:.1} %",
            time / batch as f64,
            100.0 * all / time,
            counted(self.profile.nodes.len(), "node"),
            100.0 * self.copy_share
        )?;
        writeln!(f, "\n{:>9}  {:>5}  slowest nodes", "ms", "%")?;
        for node in self.slowest() {
            let NodeTime {
                name,
                operator,
                milliseconds,
                ..
            } = node;
            let share = percent(*milliseconds);
            writeln!(f, "{milliseconds:>9.3}  {share:>5.1}  {operator}  {name}")?;
        }
        writeln!(f, "\n{:>9}  {:>5}  {:>5}  by operator", "ms", "%", "nodes")?;
        for operator in &self.operators {
            let OperatorTime {
                operator,
                nodes,
                milliseconds,
            } = operator;
            let share = percent(*milliseconds);
            writeln!(
                f,
                "{milliseconds:>9.3}  {share:>5.1}  {nodes:>5}  {operator}"
            )?;
        }
        writeln!(
            f,
            "\n{:>9}  {:>10}  {:>11}  one instance, by batch",
            "images/s", "ms/batch", "ms/image"
        )?;
        for rate in &self.throughput {
            let BatchRate {
                batch,
                milliseconds,
                images_per_second,
            } = rate;
            let image = milliseconds / *batch as f64;
            writeln!(
                f,
                "{images_per_second:>9.1}  {milliseconds:>10.3}  {image:>11.3}  {batch}"
            )?;
        }
        Ok(())
    }
}
