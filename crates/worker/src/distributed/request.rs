//! A job's request in terms of the sink crate.

use std::collections::BTreeMap;

use trommel_sink::{Format, JobRecord, Output, Retry};
use trommel_types::{Column, JobModel, JobRequest, JobSpec, Mode, RowOptions};

use crate::distributed::record::Job;
use crate::{WorkerConfig, WorkerError};

/// The output for the rows of one of the job's models: the output itself for a single model, a
/// cascade or a table, else a folder in it with the model's name.
///
/// # Errors
/// If rows cannot be written there.
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
    let (output, s3, postgres) = (&request.output, &config.s3, &config.postgres);
    Ok(
        match request.models.len() > 1 && request.cascade.is_none() {
            true => Output::parse_for(model, output, format, s3, postgres)?,
            false => Output::parse(output, format, s3, postgres)?,
        },
    )
}

/// The job as named by its rows and its output.
pub(crate) fn record_of(job: &Job, model: &JobModel) -> JobRecord {
    record(&job.spec, model, job.submitted_at)
}

/// A job with everything that affects its rows, as named by the output of one of its models.
pub(crate) fn record(spec: &JobSpec, model: &JobModel, created_at: i64) -> JobRecord {
    let rows = &spec.request.rows;
    let retry = spec.request.options.retry.as_ref();
    let base = spec.base.as_ref();
    JobRecord {
        // Added or replaced rows belong to the job that was there first.
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

/// The columns of the source followed by those of the model. A source column with the name of one
/// of these gets the prefix `source_`.
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

/// Options that affect rows and have no field in a record, shown to people as differences.
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
        // For thousands of labels, a hash.
        let hash = xxhash_rust::xxh3::xxh3_64(set.names.join("\n").as_bytes());
        let labels = format!("{} ({hash:016x})", set.names.len());
        options.insert("labels".to_owned(), labels);
        options.insert("templates".to_owned(), set.templates().join(" | "));
    }
    options
}
