use std::fmt::{self, Write};
use std::num::NonZeroUsize;

use ort::value::TensorElementType;
use serde::{Serialize, Serializer};
use trommel_types::Shape;

use crate::tensor_info::{Dim, Element, TensorInfo};
use crate::towers::IMAGE_OUTPUTS;
use crate::{InferError, InferErrorKind};

/// A model's input of images and output of classes, and their types.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) input: String,
    pub(crate) input_type: InputType,
    pub(crate) layout: Layout,
    /// The fixed batch size, or `None` if it is variable.
    pub(crate) fixed_batch: Option<NonZeroUsize>,
    /// Empty for a model without classes.
    pub(crate) output: String,
    pub(crate) output_type: OutputType,
}

/// The output with embeddings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Embedding {
    pub(crate) output: String,
    pub(crate) output_type: OutputType,
    /// Values per image, if the model specifies them.
    width: Option<usize>,
    /// Whether the output has a vector per token, the first of which describes the image.
    pub(crate) has_tokens: bool,
}

/// The order of a batch's values in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// One plane per channel.
    Nchw,
    /// Interleaved channels.
    Nhwc,
}

/// The type of an image's input values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InputType {
    F32,
    F16,
    U8,
}

/// The type of an output's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputType {
    F32,
    F16,
}

impl InputType {
    /// ONNX Runtime's name for the type of an input.
    pub(crate) fn element(self) -> TensorElementType {
        match self {
            Self::F32 => TensorElementType::Float32,
            Self::F16 => TensorElementType::Float16,
            Self::U8 => TensorElementType::Uint8,
        }
    }
}

impl OutputType {
    fn of(output: &TensorInfo) -> Option<Self> {
        match output.element {
            Element::F32 => Some(Self::F32),
            Element::F16 => Some(Self::F16),
            _ => None,
        }
    }

    /// ONNX Runtime's name for the type of an output.
    pub(crate) fn element(self) -> TensorElementType {
        match self {
            Self::F32 => TensorElementType::Float32,
            Self::F16 => TensorElementType::Float16,
        }
    }
}

impl Embedding {
    /// Values per image.
    ///
    /// # Errors
    /// If the model does not specify it.
    pub(crate) fn width(&self) -> ort::Result<usize> {
        self.width.ok_or_else(|| {
            ort::Error::new(format!(
                "output {} does not say how many values it has: export the model with a fixed \
                 number, or set infer.fused = false",
                self.output
            ))
        })
    }

    fn of(output: &TensorInfo, output_type: OutputType) -> Self {
        let width = output.shape.last().and_then(Dim::fixed);
        Self {
            output: output.name.clone(),
            output_type,
            width: width.and_then(|width| width.try_into().ok()),
            has_tokens: output.shape.len() == 3,
        }
    }

    /// Finds the embeddings among the outputs of a model without classes: the specified one, else
    /// one with a usual name of image towers, else the only one of two dimensions; else, for a
    /// model with a class token, the only one of three.
    ///
    /// # Errors
    /// As [`Embedding::find`].
    pub(crate) fn find_alone(
        outputs: &[TensorInfo],
        named: Option<&str>,
        has_class_token: bool,
    ) -> Result<Self, InferError> {
        let of = |output: &TensorInfo| Some(Self::of(output, OutputType::of(output)?));
        let is_named = |name: &str| {
            let mut outputs = outputs.iter();
            outputs.find(|output| output.name == name && output.shape.len() == 2)
        };
        let tokens = |output: &&TensorInfo| output.shape.len() == 3 && has_class_token;
        if let Some(named) = named {
            let mut outputs = outputs.iter().filter(|output| output.name == named);
            if let Some(found) = outputs.find(tokens).and_then(of) {
                return Ok(found);
            }
        } else if let Some(found) = IMAGE_OUTPUTS.into_iter().find_map(is_named).and_then(of) {
            return Ok(found);
        } else if outputs.iter().all(|output| output.shape.len() != 2) {
            let mut outputs = outputs.iter().filter(tokens);
            if let (Some(output), None) = (outputs.next(), outputs.next())
                && let Some(found) = of(output)
            {
                return Ok(found);
            }
        }
        Self::find(outputs, "", named)
    }

    /// Finds the embeddings among a model's outputs: the specified one, or else the only one of two
    /// dimensions besides the classes.
    ///
    /// # Errors
    /// What was expected, with a list of all outputs.
    pub(crate) fn find(
        outputs: &[TensorInfo],
        classes: &str,
        named: Option<&str>,
    ) -> Result<Self, InferError> {
        let is_fit = |output: &&TensorInfo| {
            output.shape.len() == 2 && OutputType::of(output).is_some() && output.name != classes
        };
        let mut fitting = outputs
            .iter()
            .filter(is_fit)
            .filter(|output| named.is_none_or(|named| output.name == named));
        if let (Some(output), None) = (fitting.next(), fitting.next())
            && let Some(output_type) = OutputType::of(output)
        {
            return Ok(Self::of(output, output_type));
        }
        let what = named.map_or_else(
            || "there is not exactly one such output besides the classes".to_owned(),
            |named| format!("output {named} is not like that"),
        );
        let mut message = format!(
            "expected an output of embeddings, f32 or f16[N, values]; {what}; export the model with \
             one, or name it with embedding = \"…\" in the section [model] of its trommel.toml; found"
        );
        list(&mut message, "output", outputs);
        message.pop();
        Err(InferError::new(InferErrorKind::ModelConfig, message))
    }
}

const EXPECTED: &str = "expected an image classifier, with one input of images, f32, f16 or \
                        u8[N, 3, height, width] or [N, height, width, 3], and an output of \
                        classes, f32 or f16[N, classes]";

/// Why a model cannot be used.
struct Misfit {
    kind: InferErrorKind,
    why: String,
}

impl Misfit {
    fn no_classifier(why: String) -> Self {
        let kind = InferErrorKind::NotClassifier;
        Self { kind, why }
    }

    fn configuration(why: String) -> Self {
        let kind = InferErrorKind::ModelConfig;
        Self { kind, why }
    }
}

impl Signature {
    /// Finds the images and the classes, if there should be any, among a model's inputs and
    /// outputs.
    ///
    /// # Errors
    /// What was expected and what does not fit, with a list of all inputs and outputs.
    pub(crate) fn find(
        inputs: &[TensorInfo],
        outputs: &[TensorInfo],
        shape: Shape,
        classes: usize,
    ) -> Result<Self, InferError> {
        let found = Self::look(inputs, outputs, shape, classes);
        found.map_err(|Misfit { kind, why }| {
            let mut message = format!("{EXPECTED}; {why}; found");
            list(&mut message, "input", inputs);
            list(&mut message, "output", outputs);
            message.pop();
            InferError::new(kind, message)
        })
    }

    fn look(
        inputs: &[TensorInfo],
        outputs: &[TensorInfo],
        shape: Shape,
        classes: usize,
    ) -> Result<Self, Misfit> {
        let [input] = inputs else {
            let count = inputs.len();
            return Err(Misfit::no_classifier(format!(
                "this model has {count} inputs"
            )));
        };
        let refuse = |why: String| Misfit::no_classifier(format!("input {} {why}", input.name));
        let input_type = match &input.element {
            Element::F32 => InputType::F32,
            Element::F16 => InputType::F16,
            Element::U8 => InputType::U8,
            other => return Err(refuse(format!("is {other}"))),
        };
        let [batch, axes @ ..] = &*input.shape else {
            return Err(refuse("has no dimensions".to_owned()));
        };
        let [first, second, third] = axes else {
            let dimensions = input.shape.len();
            return Err(refuse(format!("has {dimensions} dimensions, not 4")));
        };
        let layout = Layout::guess(first, third).map_err(|why| refuse(why.to_owned()))?;
        let (height, width) = match layout {
            Layout::Nchw => (second, third),
            Layout::Nhwc => (first, second),
        };
        for (side, has, gets) in [("high", height, shape.height), ("wide", width, shape.width)] {
            if let Some(has) = has.fixed().filter(|&has| has != u64::from(gets)) {
                return Err(Misfit::configuration(format!(
                    "input {} takes images that are {has} {side}, but the preprocessing \
                     configuration makes them {gets} {side}",
                    input.name
                )));
            }
        }
        if shape.channels != 3 {
            return Err(Misfit::configuration(format!(
                "the preprocessing configuration makes images with {} channels, \
                 not 3",
                shape.channels
            )));
        }
        let (output, output_type) = match classes {
            0 => (String::new(), OutputType::F32),
            _ => Self::classes(outputs, classes)?,
        };
        let batch = batch.fixed().map(usize::try_from);
        let fixed_batch = batch.map(|batch| {
            let batch = batch.ok().and_then(NonZeroUsize::new);
            batch.ok_or_else(|| refuse("has no room for an image".to_owned()))
        });
        Ok(Self {
            input: input.name.clone(),
            input_type,
            layout,
            fixed_batch: fixed_batch.transpose()?,
            output,
            output_type,
        })
    }

    /// The name and type of the output with the classes.
    fn classes(outputs: &[TensorInfo], classes: usize) -> Result<(String, OutputType), Misfit> {
        let output = Self::classes_output(outputs, classes).map_err(Misfit::no_classifier)?;
        let name = &output.name;
        let output_type = OutputType::of(output)
            .ok_or_else(|| Misfit::no_classifier(format!("output {name} is {}", output.element)))?;
        match output.shape[1].fixed() {
            Some(has) if has != classes as u64 => Err(Misfit::configuration(format!(
                "output {name} has {has} classes, but the model's configuration names \
                 {classes}"
            ))),
            _ => Ok((name.clone(), output_type)),
        }
    }

    /// The output with the classes: the only one of two dimensions, or among several the one called
    /// `logits`, or the only one with as many columns as there are labels.
    fn classes_output(outputs: &[TensorInfo], classes: usize) -> Result<&TensorInfo, String> {
        let flat: Vec<_> = outputs
            .iter()
            .filter(|output| output.shape.len() == 2)
            .collect();
        if let [output] = &*flat {
            return Ok(output);
        }
        if let Some(output) = flat.iter().find(|output| output.name == "logits") {
            return Ok(output);
        }
        let mut fitting = flat
            .iter()
            .filter(|output| output.shape[1].fixed() == Some(classes as u64));
        match (fitting.next(), fitting.next()) {
            (Some(output), None) => Ok(output),
            _ if flat.is_empty() => Err("no output has 2 dimensions".to_owned()),
            _ => Err(format!(
                "{} outputs have 2 dimensions, none is called logits, and not exactly one has as \
                 many columns as there are labels ({classes})",
                flat.len()
            )),
        }
    }
}

impl Layout {
    /// Determines the layout by which axis has 3 values. If neither is fixed, as in models of
    /// Hugging Face Optimum, it is NCHW unless the last axis is called channels.
    fn guess(first: &Dim, last: &Dim) -> Result<Self, &'static str> {
        match (first, last) {
            (Dim::Fixed(3), _) => Ok(Self::Nchw),
            (_, Dim::Fixed(3)) => Ok(Self::Nhwc),
            (Dim::Fixed(1), _) | (_, Dim::Fixed(1)) => Err(
                "takes grayscale images, which are not supported: export the model with 3 input \
                 channels, for example by summing them before its first layer",
            ),
            (Dim::Dynamic(_), Dim::Dynamic(name)) if name.contains("channel") => Ok(Self::Nhwc),
            (Dim::Dynamic(_), _) => Ok(Self::Nchw),
            _ => Err("has 3 channels on neither axis 1 nor axis 3"),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nchw => "NCHW",
            Self::Nhwc => "NHWC",
        })
    }
}

impl Serialize for Layout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn list(message: &mut String, kind: &str, tensors: &[TensorInfo]) {
    for tensor in tensors {
        write!(message, " {kind} {tensor},").expect("a String takes any text");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        height: 224,
        width: 192,
        channels: 3,
    };

    /// `name type dim…`; a dimension that is not a number is a symbol.
    fn tensor(text: &str) -> TensorInfo {
        let mut words = text.split(' ');
        let name = words.next().unwrap().to_owned();
        let element = match words.next().unwrap() {
            "f32" => Element::F32,
            "f16" => Element::F16,
            "u8" => Element::U8,
            other => Element::Other(other.to_owned()),
        };
        let dim = |word: &str| {
            word.parse()
                .map_or_else(|_| Dim::Dynamic(word.to_owned()), Dim::Fixed)
        };
        TensorInfo {
            name,
            element,
            shape: words.map(dim).collect(),
        }
    }

    fn find(inputs: &[&str], outputs: &[&str]) -> Result<Signature, InferError> {
        let inputs: Vec<_> = inputs.iter().map(|text| tensor(text)).collect();
        let outputs: Vec<_> = outputs.iter().map(|text| tensor(text)).collect();
        Signature::find(&inputs, &outputs, SHAPE, 10)
    }

    const LOGITS: &str = "logits f32 N 10";

    #[test]
    fn layouts_are_told_by_the_axis_of_channels() {
        for (input, layout) in [
            ("x f32 N 3 224 192", Layout::Nchw),
            ("x f32 N 224 192 3", Layout::Nhwc),
            ("x f32 N 3 h 3", Layout::Nchw),
            ("x f32 batch_size num_channels height width", Layout::Nchw),
            ("x f32 batch_size height width num_channels", Layout::Nhwc),
            ("x f32 a b c d", Layout::Nchw),
            ("x f32 N h w 3", Layout::Nhwc),
        ] {
            let outcome = find(&[input], &[LOGITS]).map(|signature| signature.layout);
            match (input, outcome) {
                // A fixed width of 3 is refused for another reason: the images are 192 wide.
                ("x f32 N 3 h 3", outcome) => {
                    assert!(outcome.unwrap_err().to_string().contains("3 wide"));
                }
                (_, outcome) => assert_eq!(outcome, Ok(layout), "{input}"),
            }
        }
    }

    #[test]
    fn types_and_batches_are_read_off() {
        let signature = find(&["x u8 4 224 192 3"], &["y f16 4 10"]).unwrap();
        assert_eq!(signature.input_type, InputType::U8);
        assert_eq!(signature.output_type, OutputType::F16);
        assert_eq!(signature.fixed_batch, NonZeroUsize::new(4));
        assert_eq!(
            find(&["x f16 N 3 h w"], &["y f32 N classes"])
                .unwrap()
                .fixed_batch,
            None
        );
    }

    #[test]
    fn the_classes_are_found_among_other_outputs() {
        for (outputs, expected) in [
            (&["last_hidden_state f32 N 50 768", "y f32 N 10"][..], "y"),
            (&["pooled f32 N 10", "logits f32 N 10"], "logits"),
            (&["embedding f32 N 768", "y f32 N 10"], "y"),
        ] {
            assert_eq!(find(&["x f32 N 3 h w"], outputs).unwrap().output, expected);
        }
    }

    #[test]
    fn a_model_that_is_no_classifier_is_described() {
        let image = "x f32 N 3 224 192";
        for (inputs, outputs, words) in [
            (
                &["ids i64 N L", "mask i64 N L"][..],
                &[LOGITS][..],
                "has 2 inputs",
            ),
            (&[], &[LOGITS], "has 0 inputs"),
            (&["x f32 N 512"], &[LOGITS], "has 2 dimensions, not 4"),
            (&["x i64 N 3 224 192"], &[LOGITS], "input x is i64"),
            (&["x f32 N 1 224 192"], &[LOGITS], "grayscale"),
            (&["x f32 N 224 192 1"], &[LOGITS], "grayscale"),
            (
                &["x f32 N 4 224 192"],
                &[LOGITS],
                "neither axis 1 nor axis 3",
            ),
            (&["x f32 0 3 224 192"], &[LOGITS], "no room"),
            (
                &[image],
                &["boxes f32 N 100 4"],
                "no output has 2 dimensions",
            ),
            (
                &[image],
                &["a f32 N 7", "b f32 N 8"],
                "2 outputs have 2 dimensions",
            ),
            (&[image], &["y i64 N 10"], "output y is i64"),
        ] {
            let error = find(inputs, outputs).unwrap_err();
            assert_eq!(error.kind(), InferErrorKind::NotClassifier, "{error}");
            let message = error.to_string();
            assert!(
                message.contains(EXPECTED) && message.contains(words),
                "{message}"
            );
            for outlet in inputs.iter().chain(outputs) {
                assert!(message.contains(&tensor(outlet).to_string()), "{message}");
            }
        }
    }

    #[test]
    fn a_model_that_contradicts_its_configuration_is_told_apart() {
        for (input, output, words) in [
            ("x f32 N 3 256 192", LOGITS, "256 high"),
            ("x f32 N 224 200 3", LOGITS, "200 wide"),
            ("x f32 N 3 224 192", "logits f32 N 1000", "1000 classes"),
        ] {
            let error = find(&[input], &[output]).unwrap_err();
            assert_eq!(error.kind(), InferErrorKind::ModelConfig, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
