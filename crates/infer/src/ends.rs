//! The two small graphs before and after a model on its device, so that images are copied as they
//! were prepared and few numbers are copied back.
//!
//! Before the model: cast, normalisation and layout of `u8[N, H, W, 3]` pixels. After it: softmax
//! and the best classes. Both are built by ONNX Runtime's model editor and run in their own
//! sessions, which also copy from and to host memory; the tensors in between stay on the device.
//! The arithmetic is that of `pack.rs` and `scores.rs`.

use std::fmt::Debug;

use ort::editor::{Graph, Model, Node, ONNX_DOMAIN, Opset};
use ort::memory::Allocator;
use ort::operator::Attribute;
use ort::value::{
    Outlet, PrimitiveTensorElementType, Shape, SymbolicDimensions, Tensor, TensorElementType,
    ValueType,
};
use trommel_types::Normalization;

use crate::pack::Line;
use crate::signature::{InputType, Layout, OutputType, Signature};

/// The first graph's input, `u8[N, H, W, 3]`.
pub(crate) const PIXELS: &str = "pixels";
/// The first graph's output, the model's input.
pub(crate) const PREPARED: &str = "prepared";
/// The last graph's input, the model's output.
pub(crate) const LOGITS: &str = "logits";
/// The last graph's other input, if rows include embeddings.
pub(crate) const VECTORS: &str = "vectors";
/// Scores of the best classes, `f32[N, k]`, best first. NaN if a logit is not finite.
pub(crate) const SCORES: &str = "scores";
/// The numbers of these classes, `i64[N, k]`.
pub(crate) const CLASSES: &str = "classes";
/// The logits, if classes are not chosen on the device.
pub(crate) const ALL_LOGITS: &str = "all_logits";
/// The embeddings.
pub(crate) const EMBEDDINGS: &str = "embeddings";

/// The version of ONNX's operator set in the graphs.
const OPSET: u32 = 17;
/// Element types by their number in ONNX, `TensorProto.DataType`.
const FLOAT: i64 = 1;
const FLOAT16: i64 = 10;

/// A node of the first graph: its inputs are the previous output and perhaps a constant.
struct Step {
    operator: &'static str,
    constant: Option<[f32; 3]>,
    attribute: Option<Attribute>,
}

impl Step {
    fn plain(operator: &'static str, attribute: Attribute) -> Self {
        Self {
            operator,
            constant: None,
            attribute: Some(attribute),
        }
    }

    /// With one value per channel.
    fn by(operator: &'static str, constant: [f32; 3]) -> Self {
        Self {
            operator,
            constant: Some(constant),
            attribute: None,
        }
    }
}

/// From pixels to the model's input.
pub(crate) fn before(signature: &Signature, normalization: &Normalization) -> ort::Result<Model> {
    let takes = signature.input_type;
    let mut steps = Vec::new();
    if takes != InputType::U8 {
        let line = [0, 1, 2].map(|channel| Line::new(normalization, channel));
        steps.push(Step::plain("Cast", Attribute::new("to", FLOAT)?));
        steps.push(Step::by("Mul", line.map(|line| line.factor)));
        steps.push(Step::by("Add", line.map(|line| line.offset)));
    }
    if takes == InputType::F16 {
        steps.push(Step::plain("Cast", Attribute::new("to", FLOAT16)?));
    }
    // Without any step, Transpose copies the pixels to the device unchanged.
    let axes = match signature.layout {
        Layout::Nchw => vec![0i64, 3, 1, 2],
        Layout::Nhwc => vec![0, 1, 2, 3],
    };
    if signature.layout == Layout::Nchw || steps.is_empty() {
        steps.push(Step::plain("Transpose", Attribute::new("perm", axes)?));
    }

    let mut graph = Graph::new()?;
    graph.set_inputs([outlet(PIXELS, TensorElementType::Uint8, 4)])?;
    graph.set_outputs([outlet(PREPARED, takes.element(), 4)])?;
    let last = steps.len() - 1;
    let mut at = PIXELS.to_owned();
    for (place, step) in steps.into_iter().enumerate() {
        let name = format!("prepare_{place}");
        let constant = format!("{name}_by");
        let mut inputs = vec![at.as_str()];
        if let Some(values) = step.constant {
            add_constant(&mut graph, &constant, values)?;
            inputs.push(&constant);
        }
        let output = match place == last {
            true => PREPARED.to_owned(),
            false => format!("{name}_output"),
        };
        let node = node(step.operator, &name, &inputs, &[&output], step.attribute)?;
        graph.add_node(node)?;
        at = output;
    }
    model(graph)
}

/// From a model's logits, if it has classes, to the `best` of them by softmax, or to all logits;
/// and the embeddings.
pub(crate) fn behind(
    logits: Option<OutputType>,
    best: Option<usize>,
    embedding: Option<OutputType>,
) -> ort::Result<Model> {
    let mut graph = Graph::new()?;
    let logits = logits.map(OutputType::element);
    let mut inputs: Vec<_> = logits
        .map(|element| outlet(LOGITS, element, 2))
        .into_iter()
        .collect();
    let mut outputs = match (logits, best) {
        (None, _) => Vec::new(),
        (Some(_), Some(_)) => vec![
            outlet(SCORES, TensorElementType::Float32, 2),
            outlet(CLASSES, TensorElementType::Int64, 2),
        ],
        (Some(element), None) => vec![outlet(ALL_LOGITS, element, 2)],
    };
    if let Some(embedding) = embedding {
        inputs.push(outlet(VECTORS, embedding.element(), 2));
        outputs.push(outlet(EMBEDDINGS, embedding.element(), 2));
        let copy = node("Identity", "copy_vectors", &[VECTORS], &[EMBEDDINGS], None)?;
        graph.add_node(copy)?;
    }
    graph.set_inputs(inputs)?;
    graph.set_outputs(outputs)?;
    match (logits, best) {
        (None, _) => {}
        (Some(_), Some(k)) => add_choice(&mut graph, k)?,
        (Some(_), None) => {
            let copy = node("Identity", "copy_logits", &[LOGITS], &[ALL_LOGITS], None)?;
            graph.add_node(copy)?;
        }
    }
    model(graph)
}

fn add_choice(graph: &mut Graph, k: usize) -> ort::Result<()> {
    let (wide, all, chosen, nothing, spoiler) = ("wide", "all", "chosen", "nothing", "spoiler");
    let (count, axes) = ("k", "axes");
    add_constant(graph, count, [k as i64])?;
    add_constant(graph, axes, [-1i64])?;
    let last_axis = || Attribute::new("axis", -1i64).map(Some);
    for (operator, inputs, outputs, attribute) in [
        (
            "Cast",
            &[LOGITS][..],
            &[wide][..],
            Some(Attribute::new("to", FLOAT)?),
        ),
        ("Softmax", &[wide], &[all], last_axis()?),
        // By the logits and not their softmax, in which small ones become equal.
        ("TopK", &[wide, count], &["best", CLASSES], last_axis()?),
        ("GatherElements", &[all, CLASSES], &[chosen], last_axis()?),
        // A logit minus itself is 0, or NaN if it is not finite; one invalidates its image's
        // scores.
        ("Sub", &[wide, wide], &[nothing], None),
        ("ReduceSum", &[nothing, axes], &[spoiler], None),
        ("Add", &[chosen, spoiler], &[SCORES], None),
    ] {
        let name = operator.to_lowercase();
        graph.add_node(node(operator, &name, inputs, outputs, attribute)?)?;
    }
    Ok(())
}

fn model(graph: Graph) -> ort::Result<Model> {
    let mut model = Model::new([Opset::new(ONNX_DOMAIN, OPSET)?])?;
    model.set_graph(graph)?;
    Ok(model)
}

/// A tensor with this number of dimensions, all of any length.
fn outlet(name: &str, ty: TensorElementType, dimensions: usize) -> Outlet {
    Outlet::new(
        name,
        ValueType::Tensor {
            ty,
            shape: Shape::new((0..dimensions).map(|_| -1)),
            dimension_symbols: SymbolicDimensions::empty(dimensions),
        },
    )
}

fn add_constant<T: PrimitiveTensorElementType + Copy + Debug, const N: usize>(
    graph: &mut Graph,
    name: &str,
    values: [T; N],
) -> ort::Result<()> {
    let mut constant = Tensor::<T>::new(&Allocator::default(), [N])?;
    let (_, place) = constant.try_extract_tensor_mut::<T>()?;
    place.copy_from_slice(&values);
    graph.add_initializer(name, constant, false)
}

fn node(
    operator: &str,
    name: &str,
    inputs: &[&str],
    outputs: &[&str],
    attribute: Option<Attribute>,
) -> ort::Result<Node> {
    Node::new(operator, ONNX_DOMAIN, name, inputs, outputs, attribute)
}
