//! `trommel profile`: where a model spends its time.

use std::io::{self, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use trommel_infer::BatchRate;
use trommel_types::RowOptions;
use trommel_worker::engine_options;

use crate::args::ProfileArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::profile_report::{Report, by_operator};
use crate::{model, profile_picture};

/// Duration of the measurement of each batch size.
const MEASURED: Duration = Duration::from_millis(1500);

/// Runs the command.
pub(crate) fn run(
    args: &ProfileArgs,
    config: &Config,
    onnxruntime: Option<&std::path::Path>,
) -> Result<Exit> {
    let dir = args.model.folder(args.dtype, true).context(Usage)?;
    let opened = model::open(&dir, config, &RowOptions::default(), onnxruntime).context(Usage)?;
    let model = opened.model;
    let batch = match args.batch {
        Some(batch) => batch.get(),
        None => engine_options(&model, &config.infer)?.max_batch,
    };
    let profile = model.profile(batch, args.runs.get())?;
    let mut throughput = Vec::new();
    for batch in &args.batches {
        let rate = model.rate(batch.get(), MEASURED)?;
        // A model with a fixed batch has only one size.
        if throughput
            .iter()
            .all(|other: &BatchRate| other.batch != rate.batch)
        {
            throughput.push(rate);
        }
    }
    let report = Report {
        model: model.name().to_string(),
        version: model.version().to_string(),
        device: model.devices().to_string(),
        intra_threads: config.infer.intra_threads(),
        copy_share: profile.copy_share(),
        operators: by_operator(&profile.nodes),
        profile,
        throughput,
    };
    if let Some(path) = &args.picture {
        let picture = profile_picture::draw(&report).to_string();
        std::fs::write(path, picture)
            .with_context(|| format!("failed to write picture {}", path.display()))?;
    }
    if args.json {
        let text = serde_json::to_string_pretty(&report).context("failed to write JSON")?;
        writeln!(io::stdout(), "{text}")?;
    } else {
        write!(io::stdout(), "{report}")?;
    }
    Ok(Exit::Success)
}
