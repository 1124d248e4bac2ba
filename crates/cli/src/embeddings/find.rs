//! `trommel find`: the images most similar to a text or another image.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use trommel_infer::{Engine, EngineOptions, LiveOptions, Runtime, Texts, Wanted, normalize};
use trommel_preprocess::{Limits, Plan, Preparer};
use trommel_types::{Classification, Lane, Reference, RowOptions, TopLabel};

use super::derived::{self, check_model};
use super::embedding;
use super::near::dot;
use crate::args::FindArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::model;
use crate::results::Results;

/// Runs the command. Writes rows of the most similar images, best first; the label is the query and
/// the score is the cosine of the embeddings.
///
/// # Errors
/// If query, model and results do not match, or no image has an embedding.
pub(crate) fn run(args: &FindArgs, config: &Config, onnxruntime: Option<&Path>) -> Result<Exit> {
    let results = Results::open_embedded(&args.results, config)?;
    let dir = args.model.folder(args.dtype, true).context(Usage)?;
    let version = trommel_infer::version(&dir).context(Usage)?;
    let mut query = match Path::new(&args.query).is_file() {
        true => of_image(Path::new(&args.query), &dir, config, onnxruntime),
        false => of_text(&args.query, &dir, onnxruntime),
    }
    .context(Usage)?;
    normalize(&mut query);
    let stored = results.stored()?;
    let mut best = Best::new(args.top.get());
    let mut first = None;
    for row in results.stored()? {
        let row = row?;
        if let Some(found) = embedding(&row).context(Usage)? {
            check_model(&row, &dir.display().to_string(), &version).context(Usage)?;
            if found.len() != query.len() {
                let error = anyhow::anyhow!(
                    "the embedding of {} has {} values, and that of the query {}",
                    row.image.uri,
                    found.len(),
                    query.len()
                );
                return Err(error.context(Usage));
            }
            let cosine = dot(found, &query) / trommel_infer::length(found).max(f32::MIN_POSITIVE);
            best.offer(cosine, &row);
        }
        first.get_or_insert(row);
    }
    let first = first
        .with_context(|| format!("{results} holds no rows"))
        .context(Usage)?;
    let options = [("query", args.query.clone()), ("top", args.top.to_string())];
    let record = derived::record(&results, &stored, &first, options);
    drop(stored);
    let label: Arc<str> = args.query.as_str().into();
    let rows = best.sorted().into_iter().map(|(score, row)| {
        let label = TopLabel {
            label: Arc::clone(&label),
            class: 0,
            score,
        };
        (row, label)
    });
    let written = derived::write_labelled(&args.derived, record, config, rows)?;
    written.tell("found", &args.derived)?;
    Ok(Exit::Success)
}

fn of_text(text: &str, dir: &Path, onnxruntime: Option<&Path>) -> Result<Vec<f32>> {
    let shape = Plan::load(dir, Reference::Auto)?.fixed_shape()?;
    let texts = Texts::open(&Runtime::load(onnxruntime)?, dir, shape, None)?;
    Ok(texts.embed(&[text.to_owned()])?)
}

fn of_image(
    path: &Path,
    dir: &Path,
    config: &Config,
    onnxruntime: Option<&Path>,
) -> Result<Vec<f32>> {
    let rows = RowOptions {
        embedding: true,
        ..RowOptions::default()
    };
    let opened = model::open(dir, config, &rows, onnxruntime)?;
    let options = EngineOptions {
        instances: 1,
        max_batch: 1,
        max_wait: config.infer.max_wait(),
        run_timeout: EngineOptions::RUN_TIMEOUT,
        live: LiveOptions::default(),
    };
    let engine = Engine::start(opened.model, options)?;
    let bytes =
        std::fs::read(path).with_context(|| format!("failed to read {}", path.display()))?;
    let mut preparer = Preparer::new(opened.plan, Limits::default());
    let prepared = preparer.prepare(&bytes);
    let prepared = prepared.map_err(|error| anyhow::anyhow!("{} {error}", path.display()))?;
    let wanted = Arc::new(Wanted::from(&rows));
    let runtime = crate::runtime::on_this_thread()?;
    let scores = runtime.block_on(engine.classify(prepared.pixels, Lane::Normal, &wanted))?;
    match scores.embedding {
        Some(embedding) => Ok(embedding),
        None => bail!("the model gave {} no embedding", path.display()),
    }
}

/// The rows with the highest cosines so far.
struct Best {
    most: usize,
    rows: Vec<(f32, Classification)>,
    /// The score that further rows must exceed, once there are enough.
    least: f32,
}

impl Best {
    fn new(most: usize) -> Self {
        Self {
            most,
            rows: Vec::new(),
            least: f32::NEG_INFINITY,
        }
    }

    fn offer(&mut self, cosine: f32, row: &Classification) {
        if cosine.is_nan() || cosine <= self.least {
            return;
        }
        self.rows.push((cosine, row.clone()));
        if self.rows.len() >= 2 * self.most {
            self.cut();
            self.least = self
                .rows
                .last()
                .map_or(f32::NEG_INFINITY, |(cosine, _)| *cosine);
        }
    }

    /// Ties are broken by the order of arrival.
    fn cut(&mut self) {
        self.rows.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        self.rows.truncate(self.most);
    }

    fn sorted(mut self) -> Vec<(f32, Classification)> {
        self.cut();
        self.rows
    }
}
