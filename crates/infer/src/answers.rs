//! Turns the output of a model into an answer for each image.

use std::sync::Arc;

use ort::value::{DynTensor, PrimitiveTensorElementType};
use trommel_types::{EmbeddingType, Scores};

use crate::backend::Image;
use crate::classifier::Classifier;
use crate::error::reason;
use crate::head::normalize;
use crate::scores::Scorer;
use crate::signature::OutputType;
use crate::tensor_info::Float;
use crate::{Head, InferError};

/// Scores the rows of the logits; those after `images` are padding.
pub(crate) fn scores(
    model: &Classifier,
    output: &DynTensor,
    images: &[Image],
    computed: usize,
    scorer: &mut Scorer,
) -> Result<Vec<Result<Scores, InferError>>, InferError> {
    match model.signature.output_type {
        OutputType::F32 => scores_of::<f32>(model, output, images, computed, scorer),
        OutputType::F16 => scores_of::<half::f16>(model, output, images, computed, scorer),
    }
}

fn scores_of<F: Float + PrimitiveTensorElementType>(
    model: &Classifier,
    output: &DynTensor,
    images: &[Image],
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
        .zip(images)
        .map(|(logits, image)| match image.wanted.head {
            // Its job has other labels.
            Some(_) => Ok(Scores::default()),
            None => scorer.score(logits, &image.wanted),
        })
        .collect())
}

/// Answers without classes, which [`embeddings`] adds.
pub(crate) fn without_classes(images: &[Image]) -> Vec<Result<Scores, InferError>> {
    images.iter().map(|_| Ok(Scores::default())).collect()
}

/// Adds each requested embedding, and the classes of labels from its job, to the scores of an
/// image. Padding comes last, and is ignored here.
pub(crate) fn embeddings(
    model: &Classifier,
    output: &DynTensor,
    images: &[Image],
    computed: usize,
    scorer: &mut Scorer,
    outcomes: &mut [Result<Scores, InferError>],
) -> Result<(), InferError> {
    let (vectors, width) = match model.embedding.as_ref() {
        Ok(found) if found.output_type == OutputType::F32 => {
            vectors::<f32>(model, output, computed, found.has_tokens)
        }
        Ok(found) => vectors::<half::f16>(model, output, computed, found.has_tokens),
        Err(_) => return Ok(()),
    }?;
    let vectors: Vec<&[f32]> = vectors.chunks_exact(width).take(images.len()).collect();
    let heads = images.iter().map(|image| image.wanted.head.as_ref());
    let logits = logits(model, &vectors, &heads.collect::<Vec<_>>())?;
    let all = outcomes.iter_mut().zip(images).zip(vectors).zip(logits);
    for (((outcome, image), vector), logits) in all {
        let (Ok(scores), wanted) = (&mut *outcome, &image.wanted) else {
            continue;
        };
        if let Some(logits) = logits {
            match scorer.score(&logits, wanted) {
                Ok(of_labels) => *scores = of_labels,
                Err(error) => {
                    *outcome = Err(error);
                    continue;
                }
            }
        }
        if wanted.embedding {
            match kept(vector, wanted.normalize, wanted.embedding_type) {
                Ok(vector) => scores.embedding = Some(vector),
                Err(why) => *outcome = Err(model.failed(&why)),
            }
        }
    }
    Ok(())
}

/// The logits of images whose job has its own labels: one product for neighbouring images of the
/// same job.
fn logits(
    model: &Classifier,
    vectors: &[&[f32]],
    heads: &[Option<&Arc<Head>>],
) -> Result<Vec<Option<Vec<f32>>>, InferError> {
    let same = |a: &Option<&Arc<Head>>, b: &Option<&Arc<Head>>| match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (None, None) => true,
        _ => false,
    };
    let (mut all, mut place) = (Vec::with_capacity(heads.len()), 0);
    for group in heads.chunk_by(same) {
        let own = &vectors[place..place + group.len()];
        place += group.len();
        let Some(Some(head)) = group.first() else {
            all.extend(group.iter().map(|_| None));
            continue;
        };
        if own.iter().any(|vector| vector.len() != head.width()) {
            return Err(model.failed("its embeddings are not as wide as those of its labels"));
        }
        let mut logits = Vec::new();
        head.logits(&own.concat(), &mut logits);
        let rows = logits.chunks_exact(head.labels().len());
        all.extend(rows.map(|row| Some(row.to_vec())));
    }
    Ok(all)
}

/// An embedding as stored in its row.
fn kept(vector: &[f32], scaled: bool, kept: EmbeddingType) -> Result<Vec<f32>, String> {
    let mut vector = vector.to_vec();
    if scaled {
        normalize(&mut vector);
    }
    if kept == EmbeddingType::Float16 {
        // The same in all formats: text formats have no half precision.
        for value in &mut vector {
            *value = half::f16::from_f32(*value).to_f32();
        }
    }
    match vector.iter().find(|value| !value.is_finite()) {
        None => Ok(vector),
        Some(value) => Err(format!(
            "its embedding of this image holds {value} as {kept}"
        )),
    }
}

/// The embeddings of the computed images, including padding, concatenated, and their length.
fn vectors<F: Float + PrimitiveTensorElementType>(
    model: &Classifier,
    output: &DynTensor,
    computed: usize,
    has_tokens: bool,
) -> Result<(Vec<f32>, usize), InferError> {
    let (shape, values) = output
        .try_extract_tensor::<F>()
        .map_err(|error| model.failed(&reason(&error)))?;
    let (rows, width, whole) = match (**shape).to_vec()[..] {
        [rows, width] if !has_tokens => (rows, width, width),
        [rows, tokens, width] if has_tokens => (rows, width, tokens * width),
        _ => return Err(model.failed(&format!("its embeddings are {shape}"))),
    };
    if rows != computed as i64 || width < 1 || whole < width {
        return Err(model.failed(&format!("its embeddings are {shape} for {computed} images")));
    }
    let (width, whole) = (width as usize, whole as usize);
    let vectors = values.chunks_exact(whole);
    let vectors = vectors.flat_map(|vector| vector[..width].iter().map(|value| value.widen()));
    Ok((vectors.collect(), width))
}
