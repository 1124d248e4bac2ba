//! What a job's request means to the storage crate.

use trommel_storage::{Format, JobRecord, Output, SourceOptions};
use trommel_types::JobRequest;

use crate::distributed::record::{Job, JobModel};
use crate::{WorkerConfig, WorkerError};

/// Which images the request chooses.
pub(crate) fn source_options(request: &JobRequest, config: &WorkerConfig) -> SourceOptions {
    let options = &request.options;
    SourceOptions {
        suffixes: options.suffixes.clone(),
        min_size: options.min_size,
        max_size: options.max_size,
        sample: options.sample,
        sample_seed: options.sample_seed,
        uri_column: options.uri_column.clone(),
        image_column: options.image_column.clone(),
        s3: config.s3.clone(),
    }
}

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
        None | Some("parquet") => Format::Parquet,
        Some("jsonl") => Format::Jsonl,
        Some("csv") => Format::Csv,
        Some(other) => {
            return Err(WorkerError::Settings(format!(
                "format {other:?} is none of parquet, jsonl and csv"
            )));
        }
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
pub(crate) fn record_of(job: &Job, model: &JobModel, config: &WorkerConfig) -> JobRecord {
    JobRecord {
        job_id: job.request.id.clone(),
        source: job.source.clone(),
        model: model.name.clone(),
        model_version: model.version.clone(),
        options: config.row_options(),
        format: Format::Parquet,
        columns: job.columns.clone(),
        logits: config.infer.logits,
        embedding: config.infer.embedding,
        created_at: job.submitted_at,
    }
}
