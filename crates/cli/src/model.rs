use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use trommel_infer::{
    Capacity, Engine, LiveOptions, Model, Prompt, Runtime, Wanted, cascade_columns, cascade_name,
    cascade_version,
};
use trommel_preprocess::{Budget, Plan, Resize};
use trommel_types::{Column, RowOptions};
use trommel_worker::{TunedProfile, start_engine};

use crate::args::ModelCommand;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::hub::{self, Dtype, HubName};
use crate::verify;

/// A model whose expected images match the preprocessing in its directory.
pub(crate) struct OpenedModel {
    pub(crate) model: Model,
    pub(crate) plan: Arc<Plan>,
}

/// The contents of a model directory.
pub(crate) enum Opened {
    /// A local model.
    Model(Box<OpenedModel>),
    /// A prompt for servers, and how images are sent.
    Prompt(Prompt, Arc<Plan>),
    /// A small and a large model, with the required share of equal labels.
    Cascade(Box<Opened>, Box<Opened>, f64),
}

/// An engine with its preprocessing.
pub(crate) struct Started {
    pub(crate) engine: Engine,
    pub(crate) plan: Arc<Plan>,
    /// For a cascade: the preprocessing of the large model.
    pub(crate) also: Option<Arc<Plan>>,
}

/// How to send requests to servers.
pub(crate) struct Asked {
    /// The size of sent images.
    pub(crate) budget: Option<Budget>,
    /// Most tokens of an answer.
    pub(crate) max_tokens: u32,
}

impl Opened {
    /// The name of the folder; for a cascade, of both.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Model(opened) => opened.model.name().to_string(),
            Self::Prompt(prompt, _) => prompt.name().to_string(),
            Self::Cascade(small, large, _) => cascade_name(&small.name(), &large.name()),
        }
    }

    /// The first digits of its content hash.
    pub(crate) fn version(&self) -> String {
        match self {
            Self::Model(opened) => opened.model.version().to_string(),
            Self::Prompt(prompt, _) => prompt.version().to_string(),
            Self::Cascade(small, large, agree) => {
                cascade_version(&small.version(), &large.version(), *agree)
            }
        }
    }

    /// Its labels; empty for a prompt without choices.
    pub(crate) fn labels(&self) -> &[Arc<str>] {
        match self {
            Self::Model(opened) => opened.model.labels(),
            Self::Prompt(prompt, _) => prompt.labels(),
            Self::Cascade(_, large, _) => large.labels(),
        }
    }

    /// The additional columns of its rows.
    pub(crate) fn columns(&self) -> Vec<Column> {
        match self {
            Self::Model(_) => Vec::new(),
            Self::Prompt(..) => Prompt::columns(),
            Self::Cascade(_, large, _) => {
                let own = cascade_columns().into_iter();
                own.chain(large.columns()).collect()
            }
        }
    }

    /// The prompt's requests, if it is one.
    pub(crate) fn asked(&self) -> Option<Asked> {
        match self {
            Self::Model(_) => None,
            Self::Prompt(prompt, plan) => Some(Asked {
                budget: match plan.resize {
                    Resize::Budget(budget) => Some(budget),
                    _ => None,
                },
                max_tokens: prompt.max_tokens(),
            }),
            Self::Cascade(_, large, _) => large.asked(),
        }
    }

    /// Starts it. If no batch size is configured, it is measured first.
    pub(crate) fn start(self, config: &Config) -> Result<Started> {
        let alone = |engine, plan| Started {
            engine,
            plan,
            also: None,
        };
        Ok(match self {
            Self::Model(opened) => {
                let live = LiveOptions::default();
                alone(
                    start_engine(opened.model, &config.infer, live)?,
                    opened.plan,
                )
            }
            Self::Prompt(prompt, plan) => {
                tracing::info!(prompt = %prompt.name(), "images: {plan}; {}", token_examples(&plan));
                alone(Engine::ask(prompt)?, plan)
            }
            Self::Cascade(small, large, agree) => {
                let (small, large) = (small.start(config)?, large.start(config)?);
                Started {
                    engine: Engine::cascade(small.engine, large.engine, agree)?,
                    plan: small.plan,
                    also: Some(large.plan),
                }
            }
        })
    }
}

/// Opens the directory of a model or a prompt.
pub(crate) fn open_any(
    dir: &Path,
    config: &Config,
    rows: &RowOptions,
    onnxruntime: Option<&Path>,
) -> Result<Opened> {
    if !Prompt::is_in(dir) {
        let opened = open(dir, config, rows, onnxruntime)?;
        return Ok(Opened::Model(Box::new(opened)));
    }
    let prompt = Prompt::open(dir)?;
    prompt.check(&Wanted::from(rows))?;
    let plan = Plan::load(dir, rows.reference)?;
    Ok(Opened::Prompt(prompt, Arc::new(plan)))
}

/// Tokens of images of common sizes, before and after scaling to the budget.
pub(crate) fn token_examples(plan: &Plan) -> String {
    let Resize::Budget(budget) = plan.resize else {
        return String::new();
    };
    let Some(family) = budget.family else {
        return "the number of tokens is unknown without family in [prompt]".to_owned();
    };
    let of = |(width, height): (u32, u32)| {
        let whole = family.tokens(width, height);
        let sent = budget.tokens(width, height).unwrap_or(whole);
        format!("{width}×{height}: {whole} → {sent}")
    };
    let sizes = [(480, 320), (1920, 1080), (4032, 3024)].map(of);
    format!("tokens of an image by {family}: {}", sizes.join(", "))
}

/// Applies the settings that `trommel tune` found for the model in a directory, unless others are
/// configured. Opening the directory reports its problems.
pub(crate) fn take_profile(config: &mut Config, dir: &Path) {
    if !TunedProfile::is_any(&config.infer) || Prompt::is_in(dir) {
        return;
    }
    let profile = trommel_infer::version(dir)
        .ok()
        .and_then(|version| TunedProfile::recall(&config.infer, &version));
    if let Some(profile) = profile {
        profile.settings.fill_in(config);
    }
}

/// Opens a model directory.
pub(crate) fn open(
    dir: &Path,
    config: &Config,
    rows: &RowOptions,
    onnxruntime: Option<&Path>,
) -> Result<OpenedModel> {
    let opened = load(dir, config, rows, onnxruntime)?;
    opened.model.check(&Wanted::from(rows))?;
    Ok(opened)
}

/// The same for rows that may differ.
pub(crate) fn load(
    dir: &Path,
    config: &Config,
    rows: &RowOptions,
    onnxruntime: Option<&Path>,
) -> Result<OpenedModel> {
    if Prompt::is_in(dir) {
        bail!(
            "{} is a prompt, whose model runs on a server; use it with trommel classify or in a job",
            dir.display()
        );
    }
    let plan = Plan::load(dir, rows.reference)?;
    let shape = plan
        .fixed_shape()
        .with_context(|| format!("model {}", dir.display()))?;
    let runtime = Runtime::load(onnxruntime)?;
    let options = config
        .infer
        .model_options(Capacity::from(&Wanted::from(rows)))?;
    let model = Model::open(&runtime, dir, plan.normalization(), shape, &options)?;
    Ok(OpenedModel {
        model,
        plan: Arc::new(plan),
    })
}

/// `trommel model fetch`.
fn fetch(
    name: &HubName,
    dtype: Option<Dtype>,
    output: Option<PathBuf>,
    quiet: bool,
) -> Result<Exit> {
    if let Some(output) = output.as_deref().filter(|output| output.exists()) {
        bail!(
            "{} already exists; give a new folder with --output",
            output.display()
        );
    }
    let mut folder = hub::fetch(name, dtype, quiet)?;
    if let Some(output) = output {
        hub::copy(&folder, &output)?;
        folder = output;
    }
    writeln!(io::stdout(), "{}", folder.display())?;
    Ok(Exit::Success)
}

/// `trommel model`.
pub(crate) fn run(
    command: ModelCommand,
    config: &Config,
    onnxruntime: Option<&Path>,
) -> Result<Exit> {
    let (model, dtype, reference, json) = match command {
        ModelCommand::Inspect {
            model,
            dtype,
            reference,
            json,
        } => (model, dtype, reference, json),
        ModelCommand::Verify(args) => return verify::run(&args, config),
        ModelCommand::Fetch {
            model,
            dtype,
            output,
            quiet,
        } => return fetch(&model, dtype, output, quiet),
    };
    let dir = model.folder(dtype, json).context(Usage)?;
    let rows = RowOptions {
        reference: reference.unwrap_or(config.preprocess.reference),
        ..RowOptions::default()
    };
    let config = Config::default();
    // Row options do not matter here: a model without classes can be inspected too.
    let opened = match Prompt::is_in(&dir) {
        true => open_any(&dir, &config, &rows, onnxruntime),
        false => {
            load(&dir, &config, &rows, onnxruntime).map(|opened| Opened::Model(Box::new(opened)))
        }
    };
    let opened = match opened.context(Usage)? {
        Opened::Model(opened) => opened,
        Opened::Prompt(prompt, plan) => {
            if json {
                let value = serde_json::json!({ "prompt": prompt.describe(), "preprocess": *plan });
                writeln!(io::stdout(), "{value:#}")?;
            } else {
                writeln!(
                    io::stdout(),
                    "{prompt}\nimages      {plan}\n            {}",
                    token_examples(&plan)
                )?;
            }
            return Ok(Exit::Success);
        }
        Opened::Cascade(..) => bail!("a cascade is not a folder; inspect its models one by one"),
    };
    let info = opened.model.inspect();
    if json {
        let value = serde_json::json!({ "model": info, "preprocess": *opened.plan });
        writeln!(io::stdout(), "{value:#}")?;
    } else {
        writeln!(io::stdout(), "{info}")?;
        let plan = &opened.plan;
        writeln!(io::stdout(), "preprocess  {plan}, from {}", plan.read_from)?;
        writeln!(
            io::stdout(),
            "reference   {:?}: {}",
            plan.arithmetic,
            plan.arithmetic_reason
        )?;
    }
    Ok(Exit::Success)
}
