//! From what a model puts out to an answer for each image.

use ort::value::{DynTensor, PrimitiveTensorElementType};
use trommel_types::Scores;

use crate::InferError;
use crate::error::reason;
use crate::model::Inner;
use crate::scores::Scorer;
use crate::signature::OutputType;
use crate::tensor_info::Float;

/// Scores the first `images` rows of the logits; the rest is padding.
pub(crate) fn scores(
    model: &Inner,
    output: &DynTensor,
    images: usize,
    computed: usize,
    scorer: &mut Scorer,
) -> Result<Vec<Result<Scores, InferError>>, InferError> {
    match model.signature.output_type {
        OutputType::F32 => scores_of::<f32>(model, output, images, computed, scorer),
        OutputType::F16 => scores_of::<half::f16>(model, output, images, computed, scorer),
    }
}

fn scores_of<F: Float + PrimitiveTensorElementType>(
    model: &Inner,
    output: &DynTensor,
    images: usize,
    computed: usize,
    scorer: &mut Scorer,
) -> Result<Vec<Result<Scores, InferError>>, InferError> {
    let (shape, values) = output
        .try_extract_tensor::<F>()
        .map_err(|error| model.failed(&reason(&error)))?;
    let classes = model.labels.len();
    if **shape != [computed as i64, classes as i64] {
        return Err(model.failed(&format!(
            "its output {} is {shape} for {computed} images of {classes} classes",
            model.signature.output
        )));
    }
    Ok(values
        .chunks_exact(classes)
        .take(images)
        .map(|logits| scorer.score(logits))
        .collect())
}

/// Adds the vector of each image to its scores. Padding comes last, and falls away here.
pub(crate) fn embeddings(
    model: &Inner,
    output: &DynTensor,
    computed: usize,
    outcomes: &mut [Result<Scores, InferError>],
) -> Result<(), InferError> {
    let vectors = match model
        .embedding
        .as_ref()
        .map(|embedding| embedding.output_type)
    {
        Some(OutputType::F32) => vectors::<f32>(model, output, computed),
        Some(OutputType::F16) => vectors::<half::f16>(model, output, computed),
        None => return Ok(()),
    }?;
    for (outcome, vector) in outcomes.iter_mut().zip(vectors) {
        if let Ok(scores) = outcome {
            scores.embedding = Some(vector);
        }
    }
    Ok(())
}

/// The vector of each image that was computed, padding included.
fn vectors<F: Float + PrimitiveTensorElementType>(
    model: &Inner,
    output: &DynTensor,
    computed: usize,
) -> Result<Vec<Vec<f32>>, InferError> {
    let (shape, values) = output
        .try_extract_tensor::<F>()
        .map_err(|error| model.failed(&reason(&error)))?;
    let [rows, width] = **shape else {
        return Err(model.failed(&format!("its embeddings are {shape}")));
    };
    if rows != computed as i64 || width < 1 {
        return Err(model.failed(&format!("its embeddings are {shape} for {computed} images")));
    }
    let vectors = values.chunks_exact(width as usize);
    Ok(vectors
        .map(|vector| vector.iter().map(|value| value.widen()).collect())
        .collect())
}
