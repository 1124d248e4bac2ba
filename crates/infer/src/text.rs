//! Embeds texts with a model's text tower.

use std::borrow::Cow;
use std::thread::available_parallelism;

use ort::session::builder::GraphOptimizationLevel;
use ort::session::{Session, SessionInputValue};
use ort::value::Tensor;
use tokenizers::normalizers::{Lowercase, Sequence};
use tokenizers::{Tokenizer, TruncationParams};
use trommel_types::{LabelSet, Shape};

use crate::error::reason;
use crate::graph::Graph;
use crate::head::{length, normalize};
use crate::tensor_info::{Dim, Element, TensorInfo};
use crate::towers::{
    COMPARED, Filler, IMAGE_OUTPUTS, PaddingSide, Scaling, TEXT_OUTPUTS, TOKENS, TextFiles,
};
use crate::{InferError, InferErrorKind, Runtime};

/// Texts per batch.
const BATCH: usize = 32;
/// Texts used to determine how they are compared with images: of different lengths and meanings.
const PROBES: [&str; 6] = [
    "a",
    "a photo of a cat",
    "an aerial view of a harbour at night with many ships",
    "blue",
    "seven red balloons",
    "handwriting on old paper",
];

/// A text tower on the CPU. Deterministic: the same text always gives the same embedding, whatever
/// else is in the batch.
pub(crate) struct TextTower {
    session: Session,
    tokenizer: Tokenizer,
    /// The number of the padding token.
    filling: Filling,
    /// The files, as named in errors.
    files: TextFiles,
    inputs: Vec<TextInput>,
    output: String,
    /// Fixed number of texts in the graph, if it has one.
    fixed_batch: Option<usize>,
    /// Fixed number of tokens per text, if it has one.
    fixed_length: Option<usize>,
}

/// An input of the tower.
struct TextInput {
    name: String,
    kind: InputKind,
    /// Whether it takes 32-bit integers instead of 64-bit ones.
    is_narrow: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum InputKind {
    Tokens,
    Mask,
    Positions,
    /// All zeros: which of two texts a token belongs to.
    Kinds,
}

/// A tokenized text, and whether it was truncated.
struct Tokens {
    ids: Vec<u32>,
    is_cut: bool,
}

impl TextTower {
    /// Opens the tower.
    ///
    /// # Errors
    /// If a file is malformed, or the graph is not a text tower.
    pub(crate) fn open(runtime: &Runtime, files: &TextFiles) -> Result<Self, InferError> {
        let graph = match files.is_shared {
            true => Graph::part(&files.file, &[TEXT_OUTPUTS[0]])?,
            false => Graph::file(&files.file),
        };
        let at = files.file.display();
        let session = session(runtime, &graph)?;
        let inputs: Vec<_> = session.inputs().iter().map(TensorInfo::of).collect();
        let outputs: Vec<_> = session.outputs().iter().map(TensorInfo::of).collect();
        let refuse = |why: String| {
            let message = format_args!("{at} is not a text tower: {why}");
            InferError::new(InferErrorKind::ModelConfig, message)
        };
        let taken = inputs
            .iter()
            .map(TextInput::of)
            .collect::<Result<Vec<_>, _>>();
        let taken = taken.map_err(&refuse)?;
        let tokens = inputs.iter().find(|input| input.name == TOKENS);
        let tokens = tokens.ok_or_else(|| refuse(format!("it has no input {TOKENS}")))?;
        let [batch, length] = &*tokens.shape else {
            return Err(refuse(format!(
                "its input {tokens} does not have 2 dimensions"
            )));
        };
        let fixed = |dim: &Dim| dim.fixed().and_then(|dim| usize::try_from(dim).ok());
        let (fixed_batch, fixed_length) = (fixed(batch), fixed(length));
        let flat: Vec<_> = outputs
            .iter()
            .filter(|output| output.shape.len() == 2)
            .collect();
        let preferred = TEXT_OUTPUTS
            .iter()
            .find_map(|name| flat.iter().find(|output| output.name == *name));
        let output = match (preferred, &*flat) {
            (Some(output), _) => output.name.clone(),
            (None, [output]) => output.name.clone(),
            _ => {
                return Err(refuse(format!(
                    "it has no output {}",
                    TEXT_OUTPUTS.join(" or ")
                )));
            }
        };
        let (tokenizer, filling) = tokenizer(files)?;
        Ok(Self {
            session,
            tokenizer,
            filling,
            files: files.clone(),
            inputs: taken,
            output,
            fixed_batch,
            fixed_length,
        })
    }

    /// The embeddings of texts, `f32[texts, width]`, as output by the tower. Too long texts are
    /// truncated, as in Transformers.
    ///
    /// If the tower fails, or its output is malformed.
    pub(crate) fn embed(&mut self, texts: &[String]) -> Result<Vec<f32>, InferError> {
        let tokens = self.tokens(texts)?;
        self.run(&tokens)
    }

    /// The embeddings of the labels of a set, `f32[labels, width]`, each of length 1: the average
    /// over all sentences of a label.
    ///
    /// # Errors
    /// Names a label that is too long, or has no embedding.
    pub(crate) fn label_embeddings(&mut self, set: &LabelSet) -> Result<Vec<f32>, InferError> {
        let mut sums: Vec<f32> = Vec::new();
        for template in set.templates() {
            let sentences = set
                .names
                .iter()
                .map(|label| LabelSet::sentence(template, label));
            let sentences: Vec<String> = sentences.collect();
            let tokens = self.tokens(&sentences)?;
            if let Some(place) = tokens.iter().position(|tokens| tokens.is_cut) {
                return Err(InferError::new(
                    InferErrorKind::Settings,
                    format_args!(
                        "label {:?} in {template:?} is longer than the {} tokens that the model reads; shorten it",
                        set.names[place], self.files.max_length
                    ),
                ));
            }
            let mut vectors = self.run(&tokens)?;
            let width = vectors.len() / set.names.len();
            for (vector, label) in vectors.chunks_exact_mut(width).zip(&set.names) {
                self.check(vector, label)?;
                normalize(vector);
            }
            match sums.is_empty() {
                true => sums = vectors,
                false => sums
                    .iter_mut()
                    .zip(vectors)
                    .for_each(|(sum, value)| *sum += value),
            }
        }
        let width = sums.len() / set.names.len();
        for (vector, label) in sums.chunks_exact_mut(width).zip(&set.names) {
            self.check(vector, label)?;
            normalize(vector);
        }
        Ok(sums)
    }

    /// Refuses an embedding of length 0.
    fn check(&self, vector: &[f32], label: &str) -> Result<(), InferError> {
        let length = length(vector);
        match length.is_finite() && length > 0.0 {
            true => Ok(()),
            false => Err(self.failed(&format!(
                "it gave {label:?} an embedding of length {length}"
            ))),
        }
    }

    fn tokens(&self, texts: &[String]) -> Result<Vec<Tokens>, InferError> {
        let tokens = |text: &String| {
            let encoding = self.tokenizer.encode(text.as_str(), true);
            let encoding = encoding.map_err(|error| {
                let message = format_args!("{}: {error}", self.files.tokenizer.display());
                InferError::new(InferErrorKind::ModelConfig, message)
            })?;
            Ok(Tokens {
                ids: encoding.get_ids().to_vec(),
                is_cut: !encoding.get_overflowing().is_empty(),
            })
        };
        texts.iter().map(tokens).collect()
    }

    /// Batches of texts of similar length.
    fn run(&mut self, texts: &[Tokens]) -> Result<Vec<f32>, InferError> {
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|place| texts[*place].ids.len());
        let (mut all, mut width) = (Vec::new(), 0);
        for places in order.chunks(self.fixed_batch.unwrap_or(BATCH)) {
            let batch: Vec<&Tokens> = places.iter().map(|place| &texts[*place]).collect();
            let vectors = self.run_batch(&batch)?;
            if all.is_empty() {
                width = vectors.len() / batch.len();
                all.resize(texts.len() * width, 0.0);
            }
            if vectors.len() != batch.len() * width || width == 0 {
                return Err(self.failed("its embeddings are of different lengths"));
            }
            for (place, vector) in places.iter().zip(vectors.chunks_exact(width)) {
                all[place * width..][..width].copy_from_slice(vector);
            }
        }
        Ok(all)
    }

    fn run_batch(&mut self, texts: &[&Tokens]) -> Result<Vec<f32>, InferError> {
        let longest = texts.iter().map(|text| text.ids.len()).max().unwrap_or(0);
        let length = match self.files.fills_up {
            true => self.files.max_length,
            false => longest.max(1),
        };
        let length = self.fixed_length.unwrap_or(length);
        if longest > length {
            return Err(self.failed(&format!(
                "it reads at most {length} tokens per text, but one has {longest}"
            )));
        }
        let rows = self.fixed_batch.unwrap_or(texts.len());
        let inputs = self.inputs.iter().map(|input| {
            let value = input.value(texts, rows, length, self.filling)?;
            Ok((Cow::Owned(input.name.clone()), value))
        });
        let inputs = inputs.collect::<ort::Result<Vec<_>>>();
        let output = self.output.clone();
        let vectors = inputs.and_then(|inputs| {
            let outputs = self.session.run(inputs)?;
            floats(&outputs[&*output])
        });
        let mut vectors = vectors.map_err(|error| self.failed(&reason(&error)))?;
        if vectors.len() % rows != 0 {
            return Err(self.failed("its embeddings do not fit the number of texts"));
        }
        vectors.truncate(vectors.len() / rows * texts.len());
        Ok(vectors)
    }

    fn failed(&self, why: &str) -> InferError {
        let at = self.files.file.display();
        InferError::new(
            InferErrorKind::ModelFailed,
            format_args!("{at} failed: {why}"),
        )
    }

    /// How the model compares images with texts: given by its files, or measured on a graph with
    /// both towers and a few texts.
    ///
    /// # Errors
    /// If neither is available.
    pub(crate) fn scaling(
        &mut self,
        runtime: &Runtime,
        shape: Shape,
    ) -> Result<Scaling, InferError> {
        if let Some(scaling) = self.files.scaling {
            return Ok(scaling);
        }
        let Some(both) = self.files.both.clone() else {
            return Err(InferError::new(
                InferErrorKind::ModelConfig,
                format_args!(
                    "no file of {} says how far apart its scores are: set logit-scale (and logit-bias, if it has one) in the section [text] of trommel.toml, or add model.onnx with both towers",
                    self.files
                        .file
                        .parent()
                        .unwrap_or(&self.files.file)
                        .display()
                ),
            ));
        };
        let failed = |why: &str| {
            InferError::new(
                InferErrorKind::ModelConfig,
                format_args!(
                    "{}: how it compares images with texts cannot be measured: {why}; set logit-scale in the section [text] of trommel.toml",
                    both.display()
                ),
            )
        };
        let mut session = session(runtime, &Graph::file(&both))?;
        let points = self
            .compare(&mut session, shape)
            .map_err(|why| failed(&why))?;
        fit_line(&points).ok_or_else(|| failed("its outputs are no line over the cosines"))
    }

    /// Cosines of images and texts, and the model's outputs for them.
    fn compare(&self, session: &mut Session, shape: Shape) -> Result<Vec<(f64, f64)>, String> {
        let texts = PROBES.map(str::to_owned);
        let tokens = self.tokens(&texts).map_err(|error| error.to_string())?;
        let tokens: Vec<&Tokens> = tokens.iter().collect();
        let longest = tokens.iter().map(|text| text.ids.len()).max().unwrap_or(1);
        let length = match self.files.fills_up {
            true => self.files.max_length,
            false => longest,
        };
        let rows = texts.len();
        let mut inputs: Vec<(Cow<'_, str>, SessionInputValue<'_>)> = Vec::new();
        let described: Vec<_> = session.inputs().iter().map(TensorInfo::of).collect();
        for input in &described {
            let failed = |error: ort::Error| reason(&error);
            let value: SessionInputValue<'_> = match TextInput::of(input) {
                Ok(text) => text
                    .value(&tokens, rows, length, self.filling)
                    .map_err(failed)?,
                Err(_) if input.shape.len() == 4 => {
                    let (height, width) = (shape.height as usize, shape.width as usize);
                    let image = 3 * height * width;
                    // Stripes of different widths, so that the images differ.
                    let values = (0..rows).flat_map(|row| {
                        (0..image).map(move |place| ((place / (row + 1)) % 5) as f32 / 2.5 - 1.0)
                    });
                    let values: Vec<f32> = values.collect();
                    let shape = [rows, 3, height, width];
                    match input.element {
                        Element::F32 => Tensor::from_array((shape, values)).map_err(failed)?.into(),
                        Element::F16 => {
                            let values: Vec<half::f16> =
                                values.into_iter().map(half::f16::from_f32).collect();
                            Tensor::from_array((shape, values)).map_err(failed)?.into()
                        }
                        _ => return Err(format!("input {input} is not understood")),
                    }
                }
                Err(why) => return Err(why),
            };
            inputs.push((Cow::Owned(input.name.clone()), value));
        }
        let outputs = session.run(inputs).map_err(|error| reason(&error))?;
        let output = |name: &str| {
            let output = outputs
                .get(name)
                .ok_or_else(|| format!("it has no output {name}"))?;
            floats(output).map_err(|error| reason(&error))
        };
        let (images, words, logits) = (
            output(IMAGE_OUTPUTS[0])?,
            output(TEXT_OUTPUTS[0])?,
            output(COMPARED)?,
        );
        let width = words.len() / rows;
        if width == 0 || images.len() != rows * width || logits.len() != rows * rows {
            return Err("its outputs do not fit together".to_owned());
        }
        let mut points = Vec::with_capacity(rows * rows);
        for (image, logits) in images.chunks_exact(width).zip(logits.chunks_exact(rows)) {
            for (text, logit) in words.chunks_exact(width).zip(logits) {
                let product: f64 = image
                    .iter()
                    .zip(text)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum();
                let cosine = product
                    / (f64::from(crate::head::length(image))
                        * f64::from(crate::head::length(text)));
                points.push((cosine, f64::from(*logit)));
            }
        }
        Ok(points)
    }
}

impl TextInput {
    fn of(input: &TensorInfo) -> Result<Self, String> {
        let kind = match &*input.name {
            TOKENS => InputKind::Tokens,
            "attention_mask" => InputKind::Mask,
            "position_ids" => InputKind::Positions,
            "token_type_ids" => InputKind::Kinds,
            _ => return Err(format!("its input {input} is not understood")),
        };
        let is_narrow = match &input.element {
            Element::Other(name) if name == "i64" => false,
            Element::Other(name) if name == "i32" => true,
            _ => return Err(format!("its input {input} does not take integers")),
        };
        Ok(Self {
            name: input.name.clone(),
            kind,
            is_narrow,
        })
    }
}

impl TextInput {
    /// The values of this input for texts padded to `length` tokens, followed by empty rows.
    fn value(
        &self,
        texts: &[&Tokens],
        rows: usize,
        length: usize,
        filling: Filling,
    ) -> ort::Result<SessionInputValue<'static>> {
        let values = (0..rows).flat_map(|row| {
            let ids = texts.get(row).map_or(&[][..], |text| &text.ids);
            (0..length).map(move |place| (filling.at(place, ids, length), place))
        });
        let values = values.map(|(id, place)| match self.kind {
            InputKind::Tokens => i64::from(id.unwrap_or(filling.token)),
            InputKind::Mask => i64::from(id.is_some()),
            InputKind::Positions => place as i64,
            InputKind::Kinds => 0,
        });
        let shape = [rows, length];
        Ok(match self.is_narrow {
            true => {
                let values: Vec<i32> = values.map(|value| value as i32).collect();
                Tensor::from_array((shape, values))?.into()
            }
            false => Tensor::from_array((shape, values.collect::<Vec<i64>>()))?.into(),
        })
    }
}

/// How texts are padded.
#[derive(Debug, Clone, Copy)]
struct Filling {
    token: u32,
    side: PaddingSide,
}

impl Filling {
    /// The token of a text at a position of `length`; `None` for padding.
    fn at(&self, place: usize, ids: &[u32], length: usize) -> Option<u32> {
        let before = match self.side {
            PaddingSide::Left => length.saturating_sub(ids.len()),
            PaddingSide::Right => 0,
        };
        ids.get(place.checked_sub(before)?).copied()
    }
}

/// The tokenizer of the files, which truncates long texts, and how texts are padded.
fn tokenizer(files: &TextFiles) -> Result<(Tokenizer, Filling), InferError> {
    let failed = |why: &dyn std::fmt::Display| {
        let message = format_args!("{}: {why}", files.tokenizer.display());
        InferError::new(InferErrorKind::ModelConfig, message)
    };
    let mut tokenizer = Tokenizer::from_file(&files.tokenizer).map_err(|error| failed(&error))?;
    let own = tokenizer.get_padding().map(|padding| padding.pad_id);
    let filler = match &files.filler {
        Some(Filler::Number(number)) => Some(*number),
        Some(Filler::Text(text)) => {
            let number = tokenizer.token_to_id(text);
            Some(number.ok_or_else(|| {
                failed(&format_args!(
                    "it has no token {text:?}, which is to fill up texts"
                ))
            })?)
        }
        None => own,
    };
    let filler = filler.ok_or_else(|| {
        failed(&"no file names the token that fills up texts; set filler in the section [text] of trommel.toml")
    })?;
    tokenizer.with_padding(None);
    let cut = TruncationParams {
        max_length: files.max_length,
        ..TruncationParams::default()
    };
    tokenizer
        .with_truncation(Some(cut))
        .map_err(|error| failed(&error))?;
    if files.lowers {
        let own = tokenizer.get_normalizer().cloned();
        let all = [Some(Lowercase.into()), own].into_iter().flatten();
        tokenizer
            .with_normalizer(Some(Sequence::new(all.collect())))
            .map_err(|error| failed(&error))?;
    }
    let side = files.padding_side;
    let filling = Filling {
        token: filler,
        side,
    };
    Ok((tokenizer, filling))
}

fn session(runtime: &Runtime, graph: &Graph) -> Result<Session, InferError> {
    let open = || {
        let threads = available_parallelism().map_or(1, Into::into);
        let builder = Session::builder(runtime.environment())?
            .with_optimization_level(GraphOptimizationLevel::All)?
            .with_intra_threads(threads)?
            .with_intra_op_spinning(false)?;
        graph.commit(builder)
    };
    open().map_err(|error| {
        InferError::new(
            InferErrorKind::ModelConfig,
            format_args!(
                "ONNX Runtime cannot open {}: {}",
                graph.path().display(),
                reason(&error)
            ),
        )
    })
}

/// The values of an output, in single precision.
fn floats(output: &ort::value::DynValue) -> ort::Result<Vec<f32>> {
    if let Ok((_, values)) = output.try_extract_tensor::<f32>() {
        return Ok(values.to_vec());
    }
    let (_, values) = output.try_extract_tensor::<half::f16>()?;
    Ok(values.iter().map(|value| value.to_f32()).collect())
}

/// The line through points, if they are on one.
fn fit_line(points: &[(f64, f64)]) -> Option<Scaling> {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let product: f64 = points
        .iter()
        .map(|point| (point.0 - x) * (point.1 - y))
        .sum();
    let scale = product / spread;
    let bias = y - scale * x;
    let furthest = points
        .iter()
        .map(|point| (point.1 - scale * point.0 - bias).abs());
    let furthest = furthest.fold(0.0, f64::max);
    // The error of single precision.
    let is_line = scale.is_finite() && scale > 0.0 && furthest <= 1e-3 * (1.0 + scale + bias.abs());
    // A bias within the error of the line.
    let bias = match bias.abs() < 1e-3 * (1.0 + scale) {
        true => 0.0,
        false => bias,
    };
    is_line.then_some(Scaling {
        scale: scale as f32,
        bias: bias as f32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_filled_up_on_the_side_of_its_tokenizer() {
        let places = |side| {
            let filling = Filling { token: 0, side };
            [0, 1, 2, 3].map(|place| filling.at(place, &[7, 8], 4))
        };
        assert_eq!(places(PaddingSide::Right), [Some(7), Some(8), None, None]);
        assert_eq!(places(PaddingSide::Left), [None, None, Some(7), Some(8)]);
    }

    #[test]
    fn a_line_is_found_and_nothing_else() {
        let line = |x: f64| (x, 117.3 * x - 12.9);
        let points: Vec<_> = [0.1, 0.12, 0.3, -0.05].map(line).to_vec();
        let Scaling { scale, bias } = fit_line(&points).unwrap();
        assert!((scale - 117.3).abs() < 1e-3 && (bias + 12.9).abs() < 1e-3);
        let curve: Vec<_> = [0.1, 0.2, 0.5, 0.9].map(|x| (x, 100.0 * x * x)).to_vec();
        assert_eq!(fit_line(&curve), None);
        assert_eq!(fit_line(&[(0.5, 1.0), (0.5, 1.0)]), None);
    }
}
