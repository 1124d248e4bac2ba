//! Which size of batch is the fastest: measured once for a model on a machine, and remembered.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use trommel_infer::{Device, EngineOptions, InferError, Model};

use crate::InferConfig;

/// What is remembered.
#[derive(Debug, Serialize, Deserialize)]
struct Measured {
    max_batch: usize,
}

/// How a model is to be run by an engine: as configured, with the fastest size of batch where none
/// is. Blocks while it is measured.
///
/// # Errors
/// As [`Model::best_batch`]. A cache that cannot be read or written is none: the size is measured
/// again.
pub fn engine_options(model: &Model, config: &InferConfig) -> Result<EngineOptions, InferError> {
    let max_batch = match config.max_batch {
        Some(max_batch) => max_batch.get(),
        None => fastest(model, config)?,
    };
    Ok(EngineOptions {
        instances: config.instances(),
        max_batch,
        max_wait: config.max_wait,
    })
}

fn fastest(model: &Model, config: &InferConfig) -> Result<usize, InferError> {
    let file = config
        .cache
        .as_ref()
        .map(|cache| cache.join("batches").join(name(model, config)));
    if let Some(Measured { max_batch }) = file.as_deref().and_then(recall) {
        return Ok(max_batch);
    }
    let max_batch = model.best_batch(config.instances())?;
    tracing::info!(model = %model.name(), max_batch, "measured the fastest size of batch");
    if let Some(file) = &file
        && let Err(error) = remember(file, &Measured { max_batch })
    {
        tracing::info!(%error, file = %file.display(), "it will be measured again");
    }
    Ok(max_batch)
}

/// The name of the file for a model on this machine: everything that the speed depends on.
fn name(model: &Model, config: &InferConfig) -> String {
    let (instances, threads) = (config.instances(), config.intra_threads());
    let (version, devices) = (model.version(), model.devices());
    let place = if model.is_fused() { "fused " } else { "" };
    let machine = gpu_name(model).unwrap_or_else(processor);
    let precision = config.precision;
    let name = format!("{version} {devices} {precision:?} {place}{instances}x{threads} {machine}");
    let allowed = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name: String = name.chars().map(allowed).collect();
    format!("{name}.json")
}

/// The GPU as its driver calls it, of a model that runs on one.
fn gpu_name(model: &Model) -> Option<String> {
    match model.devices().first() {
        Device::Cpu => None,
        Device::Cuda(number) | Device::TensorRt(number) => trommel_infer::gpu_name(number),
    }
}

/// The processor as Linux calls it.
fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| Some(line.split_once(':')?.1.trim()));
    name.unwrap_or("processor").to_owned()
}

fn recall(file: &Path) -> Option<Measured> {
    let measured: Measured = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    (measured.max_batch > 0).then_some(measured)
}

/// Writes the file as a whole or not at all.
fn remember(file: &Path, measured: &Measured) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut new = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer(&mut new, measured)?;
    new.persist(file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_remembered_and_damage_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("batches/any.json");
        assert!(recall(&file).is_none());
        remember(&file, &Measured { max_batch: 4 }).unwrap();
        remember(&file, &Measured { max_batch: 2 }).unwrap();
        assert_eq!(recall(&file).unwrap().max_batch, 2);
        for text in ["", "{\"max_batch\":0}", "{\"max_batch\":"] {
            fs::write(&file, text).unwrap();
            assert!(recall(&file).is_none(), "{text}");
        }
    }
}
