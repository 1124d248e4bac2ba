//! Extracts half of a graph: only what some of its outputs need.
//!
//! The file is parsed field by field and copied, so that only fields with names have to be
//! understood (<https://protobuf.dev/programming-guides/encoding/>, onnx.proto).

use std::collections::{HashMap, HashSet};

/// Fields of `ModelProto`, `GraphProto`, `NodeProto` and others.
const MODEL_GRAPH: u64 = 7;
const GRAPH_NODE: u64 = 1;
const GRAPH_INITIALIZER: u64 = 5;
const GRAPH_INPUT: u64 = 11;
const GRAPH_OUTPUT: u64 = 12;
const GRAPH_VALUE_INFO: u64 = 13;
const NODE_INPUT: u64 = 1;
const NODE_OUTPUT: u64 = 2;
const NODE_ATTRIBUTE: u64 = 5;
const ATTRIBUTE_GRAPH: u64 = 6;
const ATTRIBUTE_GRAPHS: u64 = 11;
const TENSOR_NAME: u64 = 8;
const VALUE_NAME: u64 = 1;

/// Most nested graphs.
const DEPTH: usize = 16;

/// A model file with only what the outputs with these names need.
///
/// # Errors
/// If it is not a complete ONNX model, or lacks one of the outputs.
pub(crate) fn part(model: &[u8], outputs: &[&str]) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(model.len());
    for field in fields(model) {
        let field = field?;
        match (field.number, field.content) {
            (MODEL_GRAPH, Some(graph)) => {
                put(&mut out, MODEL_GRAPH, &part_of_graph(graph, outputs)?)
            }
            _ => out.extend_from_slice(field.whole),
        }
    }
    Ok(out)
}

fn part_of_graph(graph: &[u8], outputs: &[&str]) -> Result<Vec<u8>, String> {
    let mut nodes = Vec::new();
    let mut producers = HashMap::new();
    for field in fields(graph) {
        let field = field?;
        if let (GRAPH_NODE, Some(content)) = (field.number, field.content) {
            let node = Node::read(content, DEPTH)?;
            for output in &node.outputs {
                producers.insert(*output, nodes.len());
            }
            nodes.push(node);
        }
    }
    let mut needed: HashSet<&str> = HashSet::new();
    let mut kept = vec![false; nodes.len()];
    let mut open: Vec<&str> = outputs.to_vec();
    while let Some(name) = open.pop() {
        if !needed.insert(name) {
            continue;
        }
        if let Some(place) = producers.get(name)
            && !std::mem::replace(&mut kept[*place], true)
        {
            open.extend(nodes[*place].inputs.iter().copied());
            needed.extend(nodes[*place].outputs.iter().copied());
        }
    }
    let (mut out, mut place, mut found) = (Vec::with_capacity(graph.len()), 0, 0);
    for field in fields(graph) {
        let field = field?;
        let is_kept = match (field.number, field.content) {
            (GRAPH_NODE, Some(_)) => {
                place += 1;
                kept[place - 1]
            }
            (GRAPH_INITIALIZER, Some(tensor)) => needed.contains(text(tensor, TENSOR_NAME)?),
            (GRAPH_INPUT | GRAPH_VALUE_INFO, Some(value)) => {
                needed.contains(text(value, VALUE_NAME)?)
            }
            (GRAPH_OUTPUT, Some(value)) => {
                let is_kept = outputs.contains(&text(value, VALUE_NAME)?);
                found += usize::from(is_kept);
                is_kept
            }
            _ => true,
        };
        if is_kept {
            out.extend_from_slice(field.whole);
        }
    }
    match found == outputs.len() {
        true => Ok(out),
        false => Err(format!(
            "it lacks one of the outputs {}",
            outputs.join(", ")
        )),
    }
}

/// The names that a node uses and produces, including those used by graphs inside it.
#[derive(Default)]
struct Node<'a> {
    inputs: Vec<&'a str>,
    outputs: Vec<&'a str>,
}

impl<'a> Node<'a> {
    fn read(content: &'a [u8], depth: usize) -> Result<Self, String> {
        let mut node = Self::default();
        for field in fields(content) {
            let field = field?;
            match (field.number, field.content) {
                (NODE_INPUT, Some(name)) => node.inputs.push(utf8(name)?),
                (NODE_OUTPUT, Some(name)) => node.outputs.push(utf8(name)?),
                (NODE_ATTRIBUTE, Some(attribute)) => node.read_attribute(attribute, depth)?,
                _ => {}
            }
        }
        Ok(node)
    }

    fn read_attribute(&mut self, attribute: &'a [u8], depth: usize) -> Result<(), String> {
        let Some(depth) = depth.checked_sub(1) else {
            return Err("its graphs are nested too deeply".to_owned());
        };
        for field in fields(attribute) {
            let field = field?;
            let (ATTRIBUTE_GRAPH | ATTRIBUTE_GRAPHS, Some(graph)) = (field.number, field.content)
            else {
                continue;
            };
            for field in fields(graph) {
                let field = field?;
                match (field.number, field.content) {
                    (GRAPH_NODE, Some(node)) => {
                        self.inputs.extend(Self::read(node, depth)?.inputs);
                    }
                    // The outputs of such a graph may be values of the surrounding one.
                    (GRAPH_OUTPUT, Some(value)) => self.inputs.push(text(value, VALUE_NAME)?),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// A field of a message.
struct Field<'a> {
    number: u64,
    /// With its number.
    whole: &'a [u8],
    /// Its contents, if it is bytes.
    content: Option<&'a [u8]>,
}

const BROKEN: &str = "not a complete ONNX model";

/// The fields of a message, in order.
fn fields(message: &[u8]) -> impl Iterator<Item = Result<Field<'_>, String>> {
    let mut rest = message;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let field = next(&mut rest);
        if field.is_none() {
            rest = &[];
        }
        Some(field.ok_or_else(|| BROKEN.to_owned()))
    })
}

fn next<'a>(rest: &mut &'a [u8]) -> Option<Field<'a>> {
    let start = *rest;
    let key = varint(rest)?;
    let mut content = None;
    match key & 7 {
        0 => {
            varint(rest)?;
        }
        1 => *rest = rest.get(8..)?,
        2 => {
            let length = usize::try_from(varint(rest)?).ok()?;
            let (bytes, later) = rest.split_at_checked(length)?;
            content = Some(bytes);
            *rest = later;
        }
        5 => *rest = rest.get(4..)?,
        _ => return None,
    }
    Some(Field {
        number: key >> 3,
        whole: &start[..start.len() - rest.len()],
        content,
    })
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, later) = rest.split_first()?;
        *rest = later;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Appends a field of bytes.
fn put(out: &mut Vec<u8>, number: u64, content: &[u8]) {
    for mut value in [number << 3 | 2, content.len() as u64] {
        while value >= 0x80 {
            out.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        out.push(value as u8);
    }
    out.extend_from_slice(content);
}

/// The text in a field of a message; empty if absent.
fn text(message: &[u8], number: u64) -> Result<&str, String> {
    for field in fields(message) {
        let field = field?;
        if let (true, Some(content)) = (field.number == number, field.content) {
            return utf8(content);
        }
    }
    Ok("")
}

fn utf8(bytes: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(bytes).map_err(|_| BROKEN.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(fields: &[(u64, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, content) in fields {
            put(&mut out, *number, content);
        }
        out
    }

    fn node(inputs: &[&str], outputs: &[&str], inner: Option<&[u8]>) -> Vec<u8> {
        let mut out = Vec::new();
        let names = |out: &mut Vec<u8>, number, names: &[&str]| {
            names
                .iter()
                .for_each(|name| put(out, number, name.as_bytes()));
        };
        names(&mut out, NODE_INPUT, inputs);
        names(&mut out, NODE_OUTPUT, outputs);
        if let Some(graph) = inner {
            put(
                &mut out,
                NODE_ATTRIBUTE,
                &message(&[(ATTRIBUTE_GRAPH, graph)]),
            );
        }
        out
    }

    fn named(number: u64, name: &str) -> Vec<u8> {
        message(&[(number, name.as_bytes())])
    }

    /// Names in the graph's fields with this number.
    fn names(model: &[u8], number: u64, name: u64) -> Vec<String> {
        let graph = fields(model)
            .find_map(|field| field.unwrap().content)
            .unwrap();
        let fields = fields(graph).map(Result::unwrap);
        let chosen = fields.filter(|field| field.number == number);
        chosen
            .map(|field| text(field.content.unwrap(), name).unwrap().to_owned())
            .collect()
    }

    #[test]
    fn only_what_an_output_needs_is_kept() {
        let inner = message(&[(GRAPH_NODE, &node(&["captured", "x"], &["y"], None))]);
        let graph = message(&[
            (GRAPH_NODE, &node(&["pixels", "w"], &["image"], None)),
            (GRAPH_NODE, &node(&["ids", "t"], &["text"], None)),
            (GRAPH_NODE, &node(&["outer"], &["captured"], None)),
            (GRAPH_NODE, &node(&["image"], &["out"], Some(&inner))),
            (GRAPH_INITIALIZER, &named(TENSOR_NAME, "w")),
            (GRAPH_INITIALIZER, &named(TENSOR_NAME, "t")),
            (GRAPH_INITIALIZER, &named(TENSOR_NAME, "outer")),
            (GRAPH_INPUT, &named(VALUE_NAME, "pixels")),
            (GRAPH_INPUT, &named(VALUE_NAME, "ids")),
            (GRAPH_OUTPUT, &named(VALUE_NAME, "out")),
            (GRAPH_OUTPUT, &named(VALUE_NAME, "text")),
        ]);
        let model = message(&[(MODEL_GRAPH, &graph)]);
        let image = part(&model, &["out"]).unwrap();
        assert_eq!(
            names(&image, GRAPH_NODE, NODE_OUTPUT),
            ["image", "captured", "out"]
        );
        assert_eq!(
            names(&image, GRAPH_INITIALIZER, TENSOR_NAME),
            ["w", "outer"]
        );
        assert_eq!(names(&image, GRAPH_INPUT, VALUE_NAME), ["pixels"]);
        assert_eq!(names(&image, GRAPH_OUTPUT, VALUE_NAME), ["out"]);
        let words = part(&model, &["text"]).unwrap();
        assert_eq!(names(&words, GRAPH_INPUT, VALUE_NAME), ["ids"]);
        assert!(part(&model, &["other"]).unwrap_err().contains("other"));
        assert_eq!(
            part(&model[..model.len() - 1], &["out"]).unwrap_err(),
            BROKEN
        );
    }
}
