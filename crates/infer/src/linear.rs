//! Linear layers in ONNX files of other programs.

use std::path::Path;
use std::sync::Arc;

use ort::session::Session;
use ort::value::Tensor;

use crate::error::reason;
use crate::tensor_info::TensorInfo;
use crate::{Activation, Head, InferError, InferErrorKind, Runtime};

/// Largest supported layer in values: the inputs that reveal its weights are a square.
const WIDEST: usize = 8192;
/// Tolerated deviation from linearity, relative to the output.
const TOLERANCE: f32 = 1e-3;

impl Head {
    /// Reads a graph with one input `f32[N, width]` and an output `f32[N, classes]`, and checks
    /// that it is linear. Its weights are its outputs for the unit vectors.
    ///
    /// # Errors
    /// If the file cannot be opened, is not such a graph, or has another number of classes than
    /// labels.
    pub fn of_linear(
        runtime: &Runtime,
        path: &Path,
        labels: Arc<[Arc<str>]>,
        normalizes: bool,
        activation: Activation,
    ) -> Result<Self, InferError> {
        let refuse = |why: &dyn std::fmt::Display| {
            InferError::new(
                InferErrorKind::ModelConfig,
                format_args!("{} is not a linear head: {why}", path.display()),
            )
        };
        let failed = |error: ort::Error| refuse(&reason(&error));
        let session = Session::builder(runtime.environment())
            .and_then(|builder| Ok(builder.with_intra_threads(1)?))
            .and_then(|mut builder| builder.commit_from_file(path));
        let mut session = session.map_err(failed)?;
        let inputs: Vec<_> = session.inputs().iter().map(TensorInfo::of).collect();
        let width = match &*inputs {
            [input] if input.shape.len() == 2 => input.shape[1].fixed(),
            _ => None,
        };
        let width = width.and_then(|width| usize::try_from(width).ok());
        let width = width.filter(|width| (1..=WIDEST).contains(width)).ok_or_else(|| {
            refuse(&format_args!("it does not have a single input of 2 dimensions, the second of which is a number up to {WIDEST}"))
        })?;
        let mut run = |rows: usize, values: Vec<f32>| -> Result<Vec<f32>, InferError> {
            let input = Tensor::from_array(([rows, width], values)).map_err(failed)?;
            let outputs = session.run(ort::inputs![input]).map_err(failed)?;
            let (shape, values) = outputs[0].try_extract_tensor::<f32>().map_err(failed)?;
            match **shape {
                [found, classes] if found == rows as i64 && classes as usize == labels.len() => {
                    Ok(values.to_vec())
                }
                _ => Err(refuse(&format_args!(
                    "its first output is {shape} for {rows} embeddings and {} labels",
                    labels.len()
                ))),
            }
        };
        let bias = run(1, vec![0.0; width])?;
        let classes = bias.len();
        let mut unit = vec![0.0; width * width];
        unit.iter_mut()
            .step_by(width + 1)
            .for_each(|value| *value = 1.0);
        let columns = run(width, unit)?;
        let mut weights = vec![0.0; classes * width];
        for (place, column) in columns.chunks_exact(classes).enumerate() {
            for (class, value) in column.iter().enumerate() {
                weights[class * width + place] = value - bias[class];
            }
        }
        let head = Self::new(labels.clone(), width, weights, bias, normalizes, activation)?;
        let tried: Vec<f32> = (0..4 * width)
            .map(|place| ((place * 7919 % 1000) as f32 - 500.0) / 250.0)
            .collect();
        let given = run(4, tried.clone())?;
        let mut plain = head.clone();
        plain.normalizes = false;
        let mut expected = Vec::new();
        plain.logits(&tried, &mut expected);
        let largest = expected
            .iter()
            .fold(1.0f32, |most, value| most.max(value.abs()));
        let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= TOLERANCE * largest;
        match given.iter().zip(&expected).all(is_near) {
            true => Ok(head),
            false => Err(refuse(&"what it gives is no linear function of its input")),
        }
    }
}
