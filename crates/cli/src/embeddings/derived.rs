//! Writes rows derived from other rows.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;

use anyhow::{Context, Result, bail};
use roaring::RoaringTreemap;
use tokio::runtime::Runtime;
use trommel_sink::{Format, JobRecord, JsonLines, Opened, Output, ResultSink, Reuse, Summary};
use trommel_types::{Classification, Outcome, Scores, TopLabel};

use super::by_column::ByColumn;
use crate::args::DerivedArgs;
use crate::config::Config;
use crate::exit::Usage;
use crate::lines::counted;
use crate::results::Results;

/// The record's option that names the job of the input rows.
pub(super) const ROWS_OF: &str = "rows of job";

/// Rows in a part.
const PART: usize = 1 << 16;

/// A row, or the error that ends them.
pub(crate) type Rows = Box<dyn Iterator<Item = Result<Classification>>>;

/// The result of writing.
pub(crate) struct Written {
    pub(crate) rows: u64,
    pub(crate) failed: u64,
    /// Whether there was nothing left to do.
    pub(crate) was_complete: bool,
}

/// Writes the rows that `make` returns for uncommitted indices, or works by column if the results
/// and the output support it. The same command resumes an interrupted run; each row is written
/// once.
///
/// # Errors
/// If the output cannot be opened or written, or `make` fails; committed rows stay.
pub(crate) fn write(
    args: &DerivedArgs,
    record: JobRecord,
    config: &Config,
    by_column: Option<ByColumn>,
    make: impl FnOnce(Arc<RoaringTreemap>) -> Result<Rows> + Send,
) -> Result<Written> {
    let Some(named) = args.place() else {
        return to_stream(&record, make(Arc::default())?);
    };
    let output =
        Output::parse(named, args.format.into(), &config.s3, &config.postgres).context(Usage)?;
    let reuse = match args.overwrite {
        true => Reuse::Overwrite,
        false => Reuse::Resume,
    };
    let runtime = crate::runtime::on_threads(1)?;
    let opened = runtime.block_on(output.open_alone(record, reuse));
    let mut sink = match opened.context(Usage)? {
        Opened::Ready(sink) => sink,
        Opened::Complete(summary) => return Ok(Written::of(&summary, true)),
    };
    match by_column.filter(|_| sink.takes_encoded()) {
        Some(by_column) => by_column.commit(&mut *sink, &runtime)?,
        None => commit_rows(&mut *sink, &runtime, make)?,
    }
    let summary = runtime.block_on(sink.finish())?;
    Ok(Written::of(&summary, false))
}

/// Writes these images as rows 0, 1, … with their label, class and score.
///
/// # Errors
/// As [`write()`].
pub(crate) fn write_labelled(
    args: &DerivedArgs,
    record: JobRecord,
    config: &Config,
    images: impl IntoIterator<Item = (Classification, TopLabel)>,
) -> Result<Written> {
    let labelled = |(index, (mut row, label)): (u64, (Classification, TopLabel))| {
        row.image.index = index;
        row.outcome = Outcome::Ok(Scores {
            top: vec![label],
            logits: None,
            embedding: None,
        });
        row
    };
    let rows: Vec<_> = (0..).zip(images).map(labelled).collect();
    write(args, record, config, None, move |committed| {
        let rows = rows.into_iter();
        let left = rows.filter(move |row| !committed.contains(row.image.index));
        Ok(Box::new(left.map(Ok)))
    })
}

/// `make` runs on its own thread, one part ahead.
fn commit_rows(
    sink: &mut dyn ResultSink,
    runtime: &Runtime,
    make: impl FnOnce(Arc<RoaringTreemap>) -> Result<Rows> + Send,
) -> Result<()> {
    let committed = Arc::new(sink.committed().clone());
    let (parts, taken) = sync_channel::<Vec<Arc<Classification>>>(1);
    thread::scope(|scope| {
        let made = scope.spawn(move || -> Result<()> {
            let mut part = Vec::with_capacity(PART);
            let mut rows = make(committed)?;
            while let Some(row) = rows.next().transpose()? {
                part.push(Arc::new(row));
                if part.len() == PART && parts.send(std::mem::take(&mut part)).is_err() {
                    return Ok(()); // the other side says why
                }
            }
            if !part.is_empty() {
                drop(parts.send(part));
            }
            Ok(())
        });
        let mut written = Ok(());
        for part in taken {
            written = runtime.block_on(sink.commit(part)).map(drop);
            if written.is_err() {
                break; // which ends the other side too
            }
        }
        let made = made
            .join()
            .unwrap_or_else(|_| bail!("the rows could not be made"));
        written?;
        made
    })
}

/// The rows as JSON Lines on standard output.
fn to_stream(record: &JobRecord, mut rows: Rows) -> Result<Written> {
    let mut out = io::BufWriter::new(io::stdout());
    let mut written = Written {
        rows: 0,
        failed: 0,
        was_complete: false,
    };
    while let Some(row) = rows.next().transpose()? {
        written.rows += 1;
        written.failed += u64::from(matches!(row.outcome, Outcome::Failed(_)));
        JsonLines::write_rows(&mut out, record, &[Arc::new(row)])?;
    }
    out.flush()?;
    Ok(written)
}

impl Written {
    fn of(summary: &Summary, was_complete: bool) -> Self {
        Self {
            rows: summary.images,
            failed: summary.failed,
            was_complete,
        }
    }

    /// Reports the result on standard error.
    pub(crate) fn tell(&self, what: &str, args: &DerivedArgs) -> Result<()> {
        let to = args.output.as_deref().unwrap_or("standard output");
        let mut message = format!(
            "trommel: {} {what}, {} failed: {to}",
            counted(self.rows, "row"),
            self.failed
        );
        if self.was_complete {
            message.push_str(" (finished before)");
        }
        writeln!(io::stderr(), "{message}")?;
        Ok(())
    }
}

/// The job of rows derived from `results`, whose first row is given.
pub(crate) fn record(
    results: &Results,
    stored: &trommel_sink::StoredRows,
    first: &Classification,
    options: impl IntoIterator<Item = (impl Into<String>, String)>,
) -> JobRecord {
    let options = options.into_iter();
    let mut options: std::collections::BTreeMap<_, _> =
        options.map(|(name, value)| (name.into(), value)).collect();
    options.insert(ROWS_OF.to_owned(), first.image.job.to_string());
    let mut record = JobRecord {
        job_id: uuid::Uuid::now_v7().to_string(),
        run: JobRecord::new_run(),
        spec_hash: String::new(),
        source: results.to_string(),
        model: first.model.to_string(),
        model_version: first.model_version.to_string(),
        options,
        format: Format::Parquet,
        columns: stored.columns.clone(),
        logits: false,
        embedding: false,
        embedding_type: trommel_types::EmbeddingType::Float32,
        escape_formulas: stored.escape_formulas,
        retry: None,
        created_at: jiff::Timestamp::now().as_microsecond(),
    };
    record.spec_hash = record.hash();
    record
}

/// Refuses rows of another model.
pub(crate) fn check_model(row: &Classification, name: &str, version: &str) -> Result<()> {
    match *row.model_version == *version {
        true => Ok(()),
        false => Err(other_model(
            &row.image.uri,
            (&row.model, &row.model_version),
            (name, version),
        )),
    }
}

/// Why the embedding of an image from one model is refused; `wanted` is the other model. Each has a
/// name and a version.
pub(crate) fn other_model(uri: &str, made: (&str, &str), wanted: (&str, &str)) -> anyhow::Error {
    let ((model, its_version), (name, version)) = (made, wanted);
    anyhow::anyhow!(
        "{uri} has an embedding of the model {model} (version {its_version}), and {name} is version {version}: give the model that made the embeddings with --model, or classify again"
    )
}
