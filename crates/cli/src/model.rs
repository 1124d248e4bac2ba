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

/// A model that fits the images that its directory says to prepare.
pub(crate) struct OpenedModel {
    pub(crate) model: Model,
    pub(crate) plan: Arc<Plan>,
}

/// What a model directory holds.
pub(crate) enum Opened {
    /// A model that is run here.
    Model(Box<OpenedModel>),
    /// A question to servers, and how images are sent.
    Prompt(Prompt, Arc<Plan>),
    /// A small model and a large one, which have to agree on this share of images.
    Cascade(Box<Opened>, Box<Opened>, f64),
}

/// An engine, and how images are prepared for it.
pub(crate) struct Started {
    pub(crate) engine: Engine,
    pub(crate) plan: Arc<Plan>,
    /// Of a cascade: the same for its large model.
    pub(crate) also: Option<Arc<Plan>>,
}

/// How servers are asked about images.
pub(crate) struct Asked {
    /// How large images are sent.
    pub(crate) budget: Option<Budget>,
    /// Tokens of an answer at most.
    pub(crate) max_tokens: u32,
}

impl Opened {
    /// The name of the folder; of a cascade, of both.
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

    /// Its labels; none of a prompt that any answer will do for.
    pub(crate) fn labels(&self) -> &[Arc<str>] {
        match self {
            Self::Model(opened) => opened.model.labels(),
            Self::Prompt(prompt, _) => prompt.labels(),
            Self::Cascade(_, large, _) => large.labels(),
        }
    }

    /// The columns that its rows have besides.
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

    /// How servers are asked, if they are.
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

    /// Starts it. A size of batches that is not configured is measured first.
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

/// Opens a directory of a model, or of a prompt.
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

/// What images of common sizes cost in tokens, before and after they are scaled to their budget.
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

/// Fills in the settings that `trommel tune` has found for the model in a directory, where none are
/// configured. Opening the directory reports what is wrong with it.
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

/// The same for rows that may be others.
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
    // What rows ask for does not matter here: a model without classes is inspected too.
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
