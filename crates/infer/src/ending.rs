//! Detects from a graph's last operators whether its output already is scores.

use std::collections::HashMap;
use std::fmt;

/// The operator that turns an output into scores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ending {
    /// Its type, such as `Softmax`.
    pub(crate) operator: String,
    /// The node's name; may be empty.
    pub(crate) node: String,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.node {
            "" => write!(f, "{}", self.operator),
            node => write!(f, "{} (node {node})", self.operator),
        }
    }
}

/// Operators that do not change values, except their type, position or precision.
const PASSING: [&str; 11] = [
    "Cast",
    "CastLike",
    "DequantizeLinear",
    "Dropout",
    "Flatten",
    "Identity",
    "QuantizeLinear",
    "Reshape",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
];

/// Most nested function calls that are followed.
const DEPTH: usize = 16;

/// The outputs that end in Softmax or Sigmoid.
pub(crate) fn find(
    outputs: &[ValueInfoProto],
    nodes: &[NodeProto],
    functions: &[FunctionProto],
) -> Vec<(String, Ending)> {
    let graph = Body::new(nodes, functions, &[]);
    let endings = outputs
        .iter()
        .filter_map(|output| match graph.trace(&output.name, DEPTH) {
            Traced::Scores(ending) => Some((output.name.clone(), ending)),
            _ => None,
        });
    endings.collect()
}

/// The nodes of a graph or of a function.
struct Body<'a> {
    /// By each of their outputs.
    producers: HashMap<&'a str, &'a NodeProto>,
    functions: &'a [FunctionProto],
    inputs: &'a [String],
}

/// The origin of a value.
enum Traced {
    Scores(Ending),
    /// An input of the function, by position.
    Input(usize),
    Other,
}

impl<'a> Body<'a> {
    fn new(nodes: &'a [NodeProto], functions: &'a [FunctionProto], inputs: &'a [String]) -> Self {
        let by_output = |node: &'a NodeProto| {
            let outputs = node.output.iter();
            outputs.map(move |output| (output.as_str(), node))
        };
        Self {
            producers: nodes.iter().flat_map(by_output).collect(),
            functions,
            inputs,
        }
    }

    fn trace(&self, value: &str, depth: usize) -> Traced {
        let mut value = value;
        // No more steps than nodes, to terminate in cyclic graphs too.
        for _ in 0..=self.producers.len() {
            let Some(node) = self.producers.get(value) else {
                let place = self.inputs.iter().position(|input| input == value);
                return place.map_or(Traced::Other, Traced::Input);
            };
            let first = node.input.first().map_or("", String::as_str);
            match &*node.op_type {
                operator if PASSING.contains(&operator) => value = first,
                "Softmax" | "QLinearSoftmax" if node.number("axis") != Some(0) => {
                    return node.ending("Softmax");
                }
                "Sigmoid" | "QLinearSigmoid" => return node.ending("Sigmoid"),
                "Div" if self.is_softmax(node) => return node.ending("Softmax"),
                _ => match self.call(node, value, depth) {
                    Traced::Input(place) => match node.input.get(place) {
                        Some(input) => value = input,
                        None => return Traced::Other,
                    },
                    traced => return traced,
                },
            }
        }
        Traced::Other
    }

    /// The origin of an output of a node that calls a function of the model.
    fn call(&self, node: &NodeProto, value: &str, depth: usize) -> Traced {
        let mut functions = self.functions.iter();
        let called = functions
            .find(|function| function.name == node.op_type && function.domain == node.domain);
        let (Some(function), Some(depth)) = (called, depth.checked_sub(1)) else {
            return Traced::Other;
        };
        let place = node.output.iter().position(|output| output == value);
        let Some(output) = place.and_then(|place| function.output.get(place)) else {
            return Traced::Other;
        };
        Body::new(&function.node, self.functions, &function.input).trace(output, depth)
    }

    /// Whether a division is the last step of a decomposed softmax: `exp(x) ÷ sum(exp(x))`.
    fn is_softmax(&self, division: &NodeProto) -> bool {
        let [numerator, denominator] = &*division.input else {
            return false;
        };
        let is = |value: &str, operator: &str| {
            let node = self.producers.get(value);
            node.filter(|node| node.op_type == operator).copied()
        };
        let sum = is(denominator, "ReduceSum");
        is(numerator, "Exp").is_some()
            && sum.is_some_and(|sum| sum.input.first() == Some(numerator))
    }
}

/// The relevant fields of ONNX's messages.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    output: Vec<String>,
    #[prost(string, tag = "3")]
    name: String,
    #[prost(string, tag = "4")]
    op_type: String,
    #[prost(message, repeated, tag = "5")]
    attribute: Vec<AttributeProto>,
    #[prost(string, tag = "7")]
    domain: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct AttributeProto {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int64, tag = "3")]
    i: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct FunctionProto {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, repeated, tag = "4")]
    input: Vec<String>,
    #[prost(string, repeated, tag = "5")]
    output: Vec<String>,
    #[prost(message, repeated, tag = "7")]
    node: Vec<NodeProto>,
    #[prost(string, tag = "10")]
    domain: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ValueInfoProto {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
}

impl NodeProto {
    /// An integer attribute, if present.
    fn number(&self, name: &str) -> Option<i64> {
        let mut attributes = self.attribute.iter();
        attributes.find_map(|attribute| (attribute.name == name).then_some(attribute.i))
    }

    fn ending(&self, operator: &str) -> Traced {
        Traced::Scores(Ending {
            operator: operator.to_owned(),
            node: self.name.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes as lines of `output = Operator input…`, the last one first.
    fn nodes(lines: &[&str]) -> Vec<NodeProto> {
        let node = |line: &&str| {
            let (output, call) = line.split_once(" = ").unwrap();
            let mut words = call.split(' ').map(str::to_owned);
            NodeProto {
                output: vec![output.to_owned()],
                op_type: words.next().unwrap(),
                input: words.collect(),
                ..NodeProto::default()
            }
        };
        lines.iter().map(node).collect()
    }

    fn ending(lines: &[&str], functions: &[FunctionProto]) -> Option<String> {
        let output = ValueInfoProto {
            name: "y".to_owned(),
        };
        let mut found = find(&[output], &nodes(lines), functions).into_iter();
        found.next().map(|(_, ending)| ending.operator)
    }

    #[test]
    fn the_last_operator_that_changes_values_decides() {
        for (lines, expected) in [
            (&["x = Gemm p w", "y = Softmax x"][..], Some("Softmax")),
            (&["x = Gemm p w", "y = Sigmoid x"], Some("Sigmoid")),
            (&["x = Gemm p w"], None),
            (&["y = Gemm p w"], None),
            (&["a = Softmax p", "y = MatMul a v"], None),
            (
                &["a = Softmax p", "b = Cast a", "y = Reshape b s"],
                Some("Softmax"),
            ),
            (
                &[
                    "a = Softmax p",
                    "q = QuantizeLinear a s",
                    "y = DequantizeLinear q s",
                ],
                Some("Softmax"),
            ),
            (
                &["a = Transpose p", "b = Softmax a", "y = Transpose b"],
                Some("Softmax"),
            ),
            (&["y = QLinearSigmoid p s"], Some("Sigmoid")),
            (
                &["e = Exp p", "s = ReduceSum e axes", "y = Div e s"],
                Some("Softmax"),
            ),
            (&["e = Exp p", "s = ReduceSum p axes", "y = Div e s"], None),
            (&["y = LogSoftmax p"], None), // whose softmax is the same as that of its input
            (&["y = Identity z", "z = Identity y"], None),
        ] {
            assert_eq!(ending(lines, &[]).as_deref(), expected, "{lines:?}");
        }
    }

    #[test]
    fn a_softmax_over_the_batch_is_none_over_classes() {
        let mut nodes = nodes(&["y = Softmax x"]);
        let output = ValueInfoProto {
            name: "y".to_owned(),
        };
        for (axis, expected) in [(-1, 1), (1, 1), (3, 1), (0, 0)] {
            nodes[0].attribute = vec![AttributeProto {
                name: "axis".to_owned(),
                i: axis,
            }];
            assert_eq!(
                find(std::slice::from_ref(&output), &nodes, &[]).len(),
                expected,
                "{axis}"
            );
        }
    }

    /// As written by the exporter of PyTorch 2.5 and later.
    #[test]
    fn functions_of_the_model_are_looked_into() {
        let function = |name: &str, lines: &[&str]| FunctionProto {
            name: name.to_owned(),
            input: vec!["a".to_owned(), "b".to_owned()],
            output: vec!["r".to_owned()],
            node: nodes(lines),
            ..FunctionProto::default()
        };
        let functions = [
            function("soften", &["r = Softmax b"]),
            function("outer", &["r = soften b a"]),
            function("second", &["r = Identity b"]),
            function("itself", &["r = itself a b"]),
        ];
        for (lines, expected) in [
            (&["y = soften p q"][..], Some("Softmax")),
            (&["y = outer p q"], Some("Softmax")),
            (&["s = Sigmoid p", "y = second q s"], Some("Sigmoid")),
            (&["s = Sigmoid p", "y = second s q"], None),
            (&["y = itself p q"], None),
        ] {
            assert_eq!(ending(lines, &functions).as_deref(), expected, "{lines:?}");
        }
    }
}
