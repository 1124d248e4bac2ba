//! The models of `trommel classify`, each with the output of its rows.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail};
use trommel_infer::Wanted;
use trommel_sink::{JobRecord, Output, Retry};
use trommel_source::Source;
use trommel_types::{ErrorKind, JobModel, JobRequest, JobSpec};
use trommel_worker::EmbeddedModel;

use crate::args::ClassifyArgs;
use crate::cascade;
use crate::config::Config;
use crate::model::{self, Opened, Started};

/// A model of the job, and where its rows go.
pub(crate) struct ModelRows {
    pub(crate) opened: Opened,
    /// The job as recorded in its rows.
    pub(crate) record: JobRecord,
    /// None for standard output.
    pub(crate) output: Option<Output>,
}

impl ModelRows {
    /// Starts the model. If no batch size is configured, it is measured first.
    pub(crate) fn start(self, config: &Config) -> Result<EmbeddedModel> {
        let Started { engine, plan, also } = self.opened.start(config)?;
        Ok(EmbeddedModel {
            plan,
            also,
            engine: Arc::new(engine),
            record: self.record,
        })
    }
}

/// Opens the models of the arguments. Those of a cascade count as one, as they give one row.
pub(crate) fn open(
    args: &ClassifyArgs,
    config: &mut Config,
    source: &dyn Source,
    onnxruntime: Option<&Path>,
) -> Result<Vec<ModelRows>> {
    let dirs = model_dirs(args)?;
    let rows = args.rows.options(config.preprocess.reference)?;
    if let [dir] = dirs.as_slice() {
        model::take_profile(config, dir);
    }
    let opened = dirs
        .iter()
        .map(|dir| model::open_any(dir, config, &rows, onnxruntime));
    let mut opened = opened.collect::<Result<Vec<_>>>()?;
    if let Some(agree) = args.agree
        && let (Some(large), Some(small)) = (opened.pop(), opened.pop())
    {
        cascade::check(args, &Wanted::from(&rows), [&small, &large])?;
        opened.push(Opened::Cascade(Box::new(small), Box::new(large), agree));
    }
    let is_one = opened.len() == 1;
    if !is_one {
        check_several(args, config, &opened)?;
    }
    let (id, run) = (uuid::Uuid::now_v7().to_string(), JobRecord::new_run());
    let job = JobSpec {
        request: JobRequest {
            id,
            rows: rows.clone(),
            options: args.source.job_options(),
            ..JobRequest::default()
        },
        run,
        source: source.describe(),
        columns: rows.columns(source.columns()).map_err(anyhow::Error::msg)?,
        ..JobSpec::default()
    };
    let retry = retry(args)?;
    let each = opened.into_iter().map(|opened| {
        let mut record = record(job.clone(), &opened);
        record.retry = retry.clone();
        let name = (!is_one).then_some(record.model.as_str());
        let output = output(args, config, name)?;
        Ok(ModelRows {
            opened,
            record,
            output,
        })
    });
    each.collect()
}

/// Where the rows of a model go, or those of all models if none is named.
pub(crate) fn output(
    args: &ClassifyArgs,
    config: &Config,
    model: Option<&str>,
) -> Result<Option<Output>> {
    let Some(named) = args.output.as_deref().filter(|output| *output != "-") else {
        return Ok(None);
    };
    let (format, s3, postgres) = (args.format.into(), &config.s3, &config.postgres);
    Ok(Some(match model {
        Some(model) => Output::parse_for(model, named, format, s3, postgres)?,
        None => Output::parse(named, format, s3, postgres)?,
    }))
}

/// Refuses what works for one model only.
fn check_several(args: &ClassifyArgs, config: &Config, opened: &[Opened]) -> Result<()> {
    let mut names = BTreeSet::new();
    for name in opened.iter().map(Opened::name) {
        if let Some(name) = names.replace(name) {
            bail!(
                "two models are called {name}, which would mix their rows; rename the folder of one of them"
            );
        }
    }
    let flag = match (args.skip_existing, &args.retry_failed) {
        (true, _) => "--skip-existing",
        (_, Some(_)) => "--retry-failed",
        _ => return Ok(()),
    };
    let mut each = Vec::new();
    for name in opened.iter().map(Opened::name) {
        each.extend(output(args, config, Some(&name))?.map(|output| output.to_string()));
    }
    bail!(
        "{flag} works for one model at a time; repeat the command for each, with its own --output ({})",
        each.join(", ")
    )
}

/// Which existing rows the job replaces, or whether it adds rows to them.
fn retry(args: &ClassifyArgs) -> Result<Option<Retry>> {
    let Some(kinds) = &args.retry_failed else {
        return Ok(args.skip_existing.then(|| Retry {
            adds: true,
            ..Retry::default()
        }));
    };
    if args.output.as_deref().is_none_or(|output| output == "-") {
        bail!(
            "--retry-failed needs stored results; give a file, a folder or a table with --output"
        );
    }
    Ok(Some(Retry {
        kinds: ErrorKind::named(kinds).map_err(anyhow::Error::msg)?,
        ..Retry::default()
    }))
}

/// The folders of the given models, or of the only one in ./models.
fn model_dirs(args: &ClassifyArgs) -> Result<Vec<PathBuf>> {
    if args.agree.is_some() && args.model.len() != 2 {
        bail!("--agree needs two models; give the small one and the large one, each with --model");
    }
    if args.model.is_empty() {
        return Ok(vec![only_model_dir(args)?]);
    }
    let models = args.model.iter();
    models
        .map(|model| model.folder(args.dtype, args.quiet))
        .collect()
}

/// The only model folder in ./models.
fn only_model_dir(args: &ClassifyArgs) -> Result<PathBuf> {
    if args.dtype.is_some() {
        bail!("--dtype chooses a file of a model of the hub; give the model with --model hf:…");
    }
    let has_model =
        |dir: &PathBuf| dir.join("model.onnx").exists() || dir.join("onnx/model.onnx").exists();
    let mut found: Vec<PathBuf> = Path::new("models")
        .read_dir()
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(has_model)
        .collect();
    found.sort();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => bail!(
            "no model given and none in ./models; give its directory, or hf:ORGANISATION/NAME, with --model"
        ),
        several => {
            let names: Vec<_> = several
                .iter()
                .map(|dir| dir.display().to_string())
                .collect();
            bail!(
                "there are several models; choose one with --model ({})",
                names.join(", ")
            )
        }
    }
}

/// The job as the rows of one of its models record it: they are the same without the others.
fn record(job: JobSpec, opened: &Opened) -> JobRecord {
    let model = JobModel {
        name: opened.name(),
        version: opened.version(),
    };
    let mut answers = BTreeMap::from([(model.name.clone(), opened.columns())]);
    answers.retain(|_, columns| !columns.is_empty());
    let spec = JobSpec {
        models: vec![model.clone()],
        answers,
        ..job
    };
    trommel_worker::job_record(&spec, &model)
}
