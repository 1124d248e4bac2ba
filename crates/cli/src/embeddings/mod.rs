//! Commands that work with stored embeddings, without images or devices.

mod by_column;
mod dedup;
mod derived;
mod find;
mod fit;
mod hamming;
mod head_file;
mod logistic;
mod near;
mod relabel;
mod stored_scores;

pub(crate) use self::dedup::run as dedup;
pub(crate) use self::find::run as find;
pub(crate) use self::fit::run as fit;
pub(crate) use self::relabel::run as relabel;

use anyhow::{Error, Result, anyhow};
use trommel_types::{Classification, Outcome};

/// The embedding of a row, if its image was classified.
///
/// # Errors
/// If the row was classified but has no embedding.
fn embedding(row: &Classification) -> Result<Option<&[f32]>> {
    match &row.outcome {
        Outcome::Failed(_) => Ok(None),
        Outcome::Ok(scores) => match &scores.embedding {
            Some(embedding) => Ok(Some(embedding)),
            None => Err(no_embedding(&row.image.uri)),
        },
    }
}

fn no_embedding(uri: &str) -> Error {
    anyhow!("{uri} has no embedding in these results: classify with --embedding")
}

fn other_width(uri: &str, found: usize, width: usize) -> Error {
    anyhow!("the embedding of {uri} has {found} values, and the classes are for {width}")
}
