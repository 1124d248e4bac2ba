//! `trommel relabel`: new classes for images with stored embeddings.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use trommel_infer::{Activation, Head, Labeller, Runtime, Texts, Wanted};
use trommel_preprocess::Plan;
use trommel_types::{Classification, ErrorKind, Failure, LabelSet, Outcome, Reference};

use super::by_column::ByColumn;
use super::derived::{self, Rows, check_model};
use super::head_file::HeadFile;
use super::{embedding, other_width, stored_scores};
use crate::args::RelabelArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::paths::check_input;
use crate::results::Results;

/// Rows multiplied at once: their embeddings fit into a core's cache.
const BLOCK: usize = 256;

/// Classes for embeddings, and the model that the embeddings must come from.
struct Classes {
    head: Head,
    /// The model as named in errors, and its version; `None` if a head does not record it.
    model: Option<(String, String)>,
    /// A description of these classes, for people.
    options: Vec<(&'static str, String)>,
}

/// Runs the command.
///
/// # Errors
/// Of usage, before any row is written, if labels, head, model and results do not match.
pub(crate) fn run(args: &RelabelArgs, config: &Config, onnxruntime: Option<&Path>) -> Result<Exit> {
    if args.head.is_none() && args.labels.labels.is_none() {
        return stored_scores::run(args, config, onnxruntime);
    }
    let results = Results::open_embedded(&args.results, config)?;
    let mut stored = results.stored()?;
    let Some(first) = stored.next().transpose().context(Usage)? else {
        return Err(anyhow::anyhow!("{results} holds no rows").context(Usage));
    };
    results.check_numbers(args.derived.place().is_some())?;
    let cache = config.infer.cache.as_deref();
    let classes = classes(args, cache, onnxruntime).context(Usage)?;
    if let Some((name, version)) = &classes.model {
        check_model(&first, name, version).context(Usage)?;
    }
    embedding(&first).context(Usage)?;
    let wanted = Wanted {
        top_k: args.top_k.unwrap_or(Wanted::default().top_k),
        threshold: args.threshold,
        thresholds: args.thresholds.iter().cloned().collect(),
        ..Wanted::default()
    };
    let options = [("top-k".to_owned(), wanted.top_k.to_string())];
    let classes_options = classes.options.iter();
    let classes_options = classes_options.map(|(name, value)| ((*name).to_owned(), value.clone()));
    let options = options
        .into_iter()
        .chain(args.threshold_options())
        .chain(classes_options);
    let record = derived::record(&results, &stored, &first, options);
    let head = Arc::new(classes.head);
    let labeller = Labeller::new(Arc::clone(&head), &wanted).context(Usage)?;
    let job = record.job_id.clone();
    drop(stored);
    let model = classes.model;
    let columns = results.columns(&record)?;
    let by_column = columns.map(|columns| ByColumn {
        columns,
        head,
        wanted,
        model: model.clone(),
    });
    let written = derived::write(&args.derived, record, config, by_column, |committed| {
        let rows = results.stored()?;
        let left = rows.filter(move |row| {
            row.as_ref()
                .map_or(true, |row| !committed.contains(row.image.index))
        });
        let relabelled = Relabelled {
            rows: Box::new(left),
            labeller,
            model,
            job: job.into(),
            ready: Vec::new().into_iter(),
            vectors: Vec::new(),
        };
        Ok(Box::new(relabelled) as Rows)
    })?;
    written.tell("relabelled", &args.derived)?;
    Ok(Exit::Success)
}

fn classes(
    args: &RelabelArgs,
    cache: Option<&Path>,
    onnxruntime: Option<&Path>,
) -> Result<Classes> {
    let named = |dir: &Path| -> Result<(String, String)> {
        Ok((
            dir.display().to_string(),
            trommel_infer::version(dir)?.to_string(),
        ))
    };
    let model = match &args.model {
        Some(model) => Some(model.folder(args.dtype, true)?),
        None => None,
    };
    let Some(path) = &args.head else {
        let Some(set) = args.labels.read()? else {
            bail!("give labels with --labels, or a head with --head");
        };
        let dir = model.context("give the model that made the embeddings with --model; its text tower embeds the labels")?;
        let shape = Plan::load(&dir, Reference::Auto)?.fixed_shape()?;
        let texts = Texts::open(&Runtime::load(onnxruntime)?, &dir, shape, cache)?;
        let hash = digest(set.names.join("\n").as_bytes());
        let options = vec![
            ("labels", format!("{} ({hash})", set.names.len())),
            ("templates", set.templates().join(" | ")),
        ];
        return Ok(Classes {
            head: texts.head(&set)?,
            model: Some(named(&dir)?),
            options,
        });
    };
    check_input(
        path,
        "head",
        "give the file that trommel fit wrote, or an ONNX graph",
    )?;
    let hash = std::fs::read(path).with_context(|| format!("failed to read {}", path.display()))?;
    let mut options = vec![("head", digest(&hash))];
    if path.extension().is_some_and(|suffix| suffix == "onnx") {
        let set: LabelSet = args.labels.read()?.with_context(|| {
            format!(
                "give the classes of {} with --labels, one per line",
                path.display()
            )
        })?;
        options.push(("labels", digest(set.names.join("\n").as_bytes())));
        let labels = set
            .names
            .iter()
            .map(|label| Arc::from(label.as_str()))
            .collect();
        let runtime = Runtime::load(onnxruntime)?;
        let head = Head::of_linear(&runtime, path, labels, false, Activation::Softmax)?;
        let model = model.as_deref().map(named).transpose()?;
        return Ok(Classes {
            head,
            model,
            options,
        });
    }
    if args.labels.labels.is_some() {
        bail!(
            "{} names its own classes; leave --labels out",
            path.display()
        );
    }
    let file = HeadFile::read(path)?;
    let head = file
        .head()
        .with_context(|| format!("{} is damaged", path.display()))?;
    Ok(Classes {
        head,
        model: Some((format!("the head {}", path.display()), file.model_version)),
        options,
    })
}

fn digest(bytes: &[u8]) -> String {
    let digits = Sha256::digest(bytes);
    digits
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Rows with new classes.
struct Relabelled {
    rows: Box<dyn Iterator<Item = Result<Classification, trommel_storage::StorageError>>>,
    labeller: Labeller,
    model: Option<(String, String)>,
    job: Arc<str>,
    ready: std::vec::IntoIter<Classification>,
    /// The embeddings of a block, concatenated.
    vectors: Vec<f32>,
}

impl Relabelled {
    /// The next block; empty at the end.
    fn block(&mut self) -> Result<Vec<Classification>> {
        let mut block = Vec::with_capacity(BLOCK);
        self.vectors.clear();
        for row in self.rows.by_ref().take(BLOCK) {
            let mut row = row?;
            if let Some((name, version)) = &self.model {
                check_model(&row, name, version)?;
            }
            let width = self.labeller.head().width();
            if let Some(embedding) = embedding(&row)? {
                if embedding.len() != width {
                    return Err(other_width(&row.image.uri, embedding.len(), width));
                }
                self.vectors.extend_from_slice(embedding);
            }
            row.image.job = Arc::clone(&self.job);
            block.push(row);
        }
        let mut labelled = self.labeller.label(&self.vectors).into_iter();
        for row in &mut block {
            if let Outcome::Failed(_) = row.outcome {
                continue;
            }
            let Some(scores) = labelled.next() else {
                bail!("fewer answers than embeddings");
            };
            row.outcome = match scores {
                Ok(scores) => Outcome::Ok(scores),
                Err(error) => Outcome::Failed(Failure {
                    kind: ErrorKind::ModelFailed,
                    error: error.to_string(),
                }),
            };
        }
        Ok(block)
    }
}

impl Iterator for Relabelled {
    type Item = Result<Classification>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(row) = self.ready.next() {
            return Some(Ok(row));
        }
        match self.block() {
            Ok(block) => {
                self.ready = block.into_iter();
                self.ready.next().map(Ok)
            }
            Err(error) => Some(Err(error)),
        }
    }
}
