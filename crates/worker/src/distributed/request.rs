//! What a job's request means to the storage crate.

use std::collections::BTreeMap;

use trommel_sink::{Format, JobRecord, Output, Retry};
use trommel_types::{Column, JobModel, JobRequest, JobSpec, Mode, RowOptions};

use crate::distributed::record::Job;
use crate::{WorkerConfig, WorkerError};

/// Where the rows of one of the job's models go: the output itself for a job of one model or a
/// table, else a folder of the model's name in it.
///
/// # Errors
/// When rows cannot go there.
pub(crate) fn output_of(
    request: &JobRequest,
    model: &str,
    config: &WorkerConfig,
) -> Result<Output, WorkerError> {
    let format = match request.options.format.as_deref() {
        None => Format::Parquet,
        Some(name) => name
            .parse::<Format>()
            .map_err(|error| WorkerError::Request(format!("the job {error}")))?,
    };
    let mut output = request.output.clone();
    let parse = |output: &str| Output::parse(output, format, &config.s3, &config.postgres);
    // A table has the model in its key.
    if let Output::Table(table) = parse(&output)? {
        return Ok(Output::Table(table));
    }
    if request.models.len() > 1 {
        let folder = output.trim_end_matches('/');
        output = format!("{folder}/{}/", model.replace('/', "@"));
    }
    Ok(parse(&output)?)
}

/// The job as its rows and its output name it.
pub(crate) fn record_of(job: &Job, model: &JobModel) -> JobRecord {
    record(&job.spec, model, job.submitted_at)
}

/// A job of which everything that shapes its rows is known, as the output of one of its models names it.
pub(crate) fn record(spec: &JobSpec, model: &JobModel, created_at: i64) -> JobRecord {
    let rows = &spec.request.rows;
    let retry = spec.request.options.retry.as_ref();
    let base = spec.base.as_ref();
    JobRecord {
        // Rows that are added or replaced are those of the job that was there first.
        job_id: base.map_or(spec.id(), |base| &base.job).to_owned(),
        run: spec.run.clone(),
        spec_hash: spec.hash(),
        source: spec.source.clone(),
        model: model.name.clone(),
        model_version: model.version.clone(),
        options: row_options(rows),
        format: Format::Parquet,
        columns: columns(spec, model),
        logits: rows.logits,
        embedding: rows.embedding,
        embedding_type: rows.embedding_type,
        escape_formulas: rows.escape_formulas,
        retry: base.map(|base| Retry {
            number: base.number,
            of_run: base.run.clone(),
            kinds: retry.map_or_else(Vec::new, |retry| retry.kinds.clone()),
            adds: retry.is_none(),
            ..Retry::default()
        }),
        created_at,
    }
}

/// The columns of the source and, behind them, those that the model answers. A column of the source by
/// such a name is called by it with `source_` before it.
fn columns(spec: &JobSpec, model: &JobModel) -> Vec<Column> {
    let mut columns = spec.columns.clone();
    let Some(answers) = spec.answers.get(&model.name) else {
        return columns;
    };
    for column in &mut columns {
        if answers.iter().any(|answer| answer.name == column.name) {
            column.name.insert_str(0, "source_");
        }
    }
    columns.extend(answers.iter().cloned());
    columns
}

/// What shapes rows besides what a record has fields for, for people who are shown what differs.
fn row_options(rows: &RowOptions) -> BTreeMap<String, String> {
    let mut options = BTreeMap::from([("top-k".to_owned(), rows.top_k.to_string())]);
    if rows.mode == Mode::Fast {
        options.insert("mode".to_owned(), "fast".to_owned());
    }
    if !rows.reference.is_auto() {
        options.insert("reference".to_owned(), rows.reference.to_string());
    }
    if let Some(threshold) = rows.threshold {
        options.insert("threshold".to_owned(), threshold.to_string());
    }
    for (label, threshold) in &rows.thresholds {
        options.insert(format!("threshold of {label}"), threshold.to_string());
    }
    if rows.normalize {
        options.insert("normalize".to_owned(), "true".to_owned());
    }
    if let Some(set) = &rows.labels {
        // Of thousands a hash says enough.
        let hash = xxhash_rust::xxh3::xxh3_64(set.names.join("\n").as_bytes());
        let labels = format!("{} ({hash:016x})", set.names.len());
        options.insert("labels".to_owned(), labels);
        options.insert("templates".to_owned(), set.templates().join(" | "));
    }
    options
}
