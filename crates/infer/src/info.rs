use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::{Activation, Devices, Layout, TensorInfo};

/// Everything about a model. Displays as lines for people.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelInfo {
    /// The name of its folder.
    pub name: String,
    /// The first 12 digits of `sha256`.
    pub version: String,
    /// SHA-256 of the file, followed by the external data, if any, in hex.
    pub sha256: String,
    /// The ONNX file.
    pub file: PathBuf,
    /// Files next to it that contain weights.
    pub external_data: Vec<String>,
    /// Size of all these files.
    pub bytes: u64,
    /// Number of weights.
    pub parameters: u64,
    /// The type of most weights, such as `f32` or `i8`; `none` without weights.
    pub precision: String,
    /// Version of the file format.
    pub ir_version: u64,
    /// Versions of the operator sets by domain.
    pub opsets: BTreeMap<String, u64>,
    /// The program that exported it.
    pub producer: String,
    /// Its inputs.
    pub inputs: Vec<TensorInfo>,
    /// Its outputs.
    pub outputs: Vec<TensorInfo>,
    /// The order of values in its input.
    pub layout: Layout,
    /// The fixed number of images per batch, if it has one.
    pub fixed_batch: Option<usize>,
    /// The output with the classes; empty for a model without classes.
    pub classes_output: String,
    /// The output with embeddings, if any.
    pub embedding_output: Option<String>,
    /// The file of the text tower, if any.
    pub text_tower: Option<PathBuf>,
    /// How that output becomes scores.
    pub activation: Activation,
    /// The reason, for people.
    pub activation_from: String,
    /// The threshold of each class, if any has one.
    pub thresholds: Option<Vec<f32>>,
    /// Number of classes.
    pub labels: usize,
    /// Where their names come from, for people.
    pub labels_from: String,
    /// The first few names.
    pub first_labels: Vec<String>,
    /// Its device.
    #[serde(rename = "device")]
    pub devices: Devices,
    /// The library that runs it.
    pub onnxruntime: PathBuf,
}

impl fmt::Display for ModelInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = if self.labels > self.first_labels.len() {
            ", …"
        } else {
            ""
        };
        let opsets: Vec<_> = self
            .opsets
            .iter()
            .map(|(domain, version)| format!("{domain} {version}"))
            .collect();
        writeln!(f, "model       {} (version {})", self.name, self.version)?;
        writeln!(
            f,
            "file        {}, {}",
            self.file.display(),
            Bytes(self.bytes)
        )?;
        for name in &self.external_data {
            writeln!(f, "weights in  {name}")?;
        }
        writeln!(f, "sha256      {}", self.sha256)?;
        writeln!(
            f,
            "parameters  {}, mostly {}",
            self.parameters, self.precision
        )?;
        writeln!(
            f,
            "format      ONNX IR {}, operators {}, written by {}",
            self.ir_version,
            opsets.join(", "),
            if self.producer.is_empty() {
                "an unnamed program"
            } else {
                &self.producer
            }
        )?;
        for input in &self.inputs {
            writeln!(f, "input       {input} ({})", self.layout)?;
        }
        for output in &self.outputs {
            let used = if output.name == self.classes_output {
                "classes"
            } else if Some(&output.name) == self.embedding_output.as_ref() {
                "embeddings"
            } else {
                "not used"
            };
            writeln!(f, "output      {output} ({used})")?;
        }
        match self.fixed_batch {
            Some(batch) => writeln!(f, "batch       always {batch}, padded when there are fewer")?,
            None => writeln!(f, "batch       any")?,
        }
        if let Some(tower) = &self.text_tower {
            writeln!(f, "texts       {}", tower.display())?;
        }
        if self.labels == 0 {
            writeln!(
                f,
                "labels      none: rows hold embeddings, or labels that a job names"
            )?;
            writeln!(f, "device      {}", self.devices)?;
            return write!(f, "runtime     {}", self.onnxruntime.display());
        }
        writeln!(
            f,
            "scores      {}: {}",
            self.activation, self.activation_from
        )?;
        if let Some(thresholds) = &self.thresholds {
            let least = thresholds.iter().copied().fold(f32::INFINITY, f32::min);
            let most = thresholds.iter().copied().fold(0.0, f32::max);
            writeln!(f, "thresholds  {least} to {most}")?;
        }
        writeln!(
            f,
            "labels      {} ({}{more}), from {}",
            self.labels,
            self.first_labels.join(", "),
            self.labels_from
        )?;
        writeln!(f, "device      {}", self.devices)?;
        write!(f, "runtime     {}", self.onnxruntime.display())
    }
}

/// A size in a suitable unit.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..1_000 => write!(f, "{} B", self.0),
            1_000..1_000_000 => write!(f, "{:.1} KB", bytes / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} MB", bytes / 1e6),
            _ => write!(f, "{:.1} GB", bytes / 1e9),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_the_unit_people_use() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1_500, "1.5 KB"),
            (10_200_000, "10.2 MB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
