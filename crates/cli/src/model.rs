use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use trommel_infer::{Model, Runtime};
use trommel_preprocess::Plan;

use crate::args::ModelCommand;
use crate::config::Config;
use crate::exit::{Exit, Usage};

/// A model that fits the images that its directory says to prepare.
pub(crate) struct OpenedModel {
    pub(crate) model: Model,
    pub(crate) plan: Arc<Plan>,
}

/// Opens a model directory.
pub(crate) fn open(dir: &Path, config: &Config, onnxruntime: Option<&Path>) -> Result<OpenedModel> {
    if !dir.is_dir() {
        bail!("model {}: there is no such directory", dir.display());
    }
    let plan = Plan::load(dir)?;
    let Some(shape) = plan.shape() else {
        bail!(
            "model {}: its images end up in different sizes; set [preprocess] crop or resize in trommel.toml",
            dir.display()
        );
    };
    let runtime = Runtime::load(onnxruntime)?;
    let options = config.infer.model_options()?;
    let model = Model::open(&runtime, dir, plan.normalization(), shape, &options)?;
    Ok(OpenedModel {
        model,
        plan: Arc::new(plan),
    })
}

/// `trommel model`.
pub(crate) fn run(command: ModelCommand, onnxruntime: Option<&Path>) -> Result<Exit> {
    let ModelCommand::Inspect { dir, json } = command;
    let opened = open(&dir, &Config::default(), onnxruntime).context(Usage)?;
    let info = opened.model.inspect();
    if json {
        let value = serde_json::json!({ "model": info, "preprocess": *opened.plan });
        writeln!(io::stdout(), "{value:#}")?;
    } else {
        writeln!(io::stdout(), "{info}")?;
        writeln!(io::stdout(), "preprocess  {}", opened.plan)?;
    }
    Ok(Exit::Success)
}
