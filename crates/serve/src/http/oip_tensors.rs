//! Tensors of the Open Inference Protocol: images in, labels out, as JSON or in binary.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use trommel_types::Scores;

use super::oip::timeout;
use crate::refused::Refused;

/// The input: encoded images.
pub(super) const INPUT: &str = "image";
/// The alternative input: urls of images.
const URLS: &str = "url";

/// The outputs: name, type, number of dimensions. Those with two dimensions have the best classes
/// of each image, padded to the same number.
pub(super) const OUTPUTS: [(&str, &str, usize); 7] = [
    ("label", "BYTES", 1),
    ("score", "FP32", 1),
    ("class", "INT32", 1),
    ("top_labels", "BYTES", 2),
    ("top_scores", "FP32", 2),
    ("top_classes", "INT32", 2),
    ("row", "BYTES", 1),
];
/// The default outputs.
const BY_DEFAULT: [&str; 3] = ["label", "score", "class"];

/// Fields of clients that have no effect here.
const WITHOUT_MEANING: [&str; 4] = ["priority", "sequence_id", "sequence_start", "sequence_end"];

/// A request for labels.
#[derive(Debug)]
pub(super) struct InferRequest {
    pub(super) id: Option<String>,
    /// Encoded images, or their urls.
    pub(super) images: Vec<Bytes>,
    pub(super) are_urls: bool,
    /// Row parameters: names and values.
    pub(super) params: Vec<(String, String)>,
    pub(super) timeout: Option<Duration>,
    /// Names of outputs, and whether each is binary.
    wanted: Vec<(&'static str, bool)>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireRequest {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    parameters: Map<String, Value>,
    inputs: Vec<WireInput>,
    #[serde(default)]
    outputs: Vec<WireOutput>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireInput {
    name: String,
    shape: Vec<u64>,
    datatype: String,
    #[serde(default)]
    parameters: Map<String, Value>,
    #[serde(default)]
    data: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireOutput {
    name: String,
    #[serde(default)]
    parameters: Map<String, Value>,
}

impl InferRequest {
    /// Reads a body whose first `json_length` bytes are JSON, or all of it if that is absent. It
    /// may have `most` images.
    ///
    /// # Errors
    /// Names what is malformed or unknown.
    pub(super) fn read(
        body: &Bytes,
        json_length: Option<usize>,
        most: usize,
    ) -> Result<Self, Refused> {
        let length = json_length.unwrap_or(body.len());
        if length > body.len() {
            return Err(Refused::malformed(format!(
                "inference-header-content-length is {length}, but the body holds {} bytes",
                body.len()
            )));
        }
        let binary = body.slice(length..);
        let wire: WireRequest = serde_json::from_slice(&body[..length]).map_err(|error| {
            Refused::malformed(format!("the request's JSON cannot be read: {error}"))
        })?;
        let [input] = wire.inputs.as_slice() else {
            return Err(Refused::malformed(format!(
                "there are {} inputs; give one, {INPUT:?}",
                wire.inputs.len()
            )));
        };
        let images = input.images(&binary, most)?;
        let (mut params, mut time, mut all_binary) = (Vec::new(), None, false);
        for (name, value) in &wire.parameters {
            match name.as_str() {
                "timeout" => time = Some(timeout(value)?),
                "binary_data_output" => all_binary = flag(name, value)?,
                name if WITHOUT_MEANING.contains(&name) => {}
                _ => params.push((name.clone(), text(value))),
            }
        }
        Ok(Self {
            id: wire.id.filter(|id| !id.is_empty()),
            images,
            are_urls: input.name == URLS,
            params,
            timeout: time,
            wanted: wanted(&wire.outputs, all_binary)?,
        })
    }
}

impl WireInput {
    fn images(&self, binary: &Bytes, most: usize) -> Result<Vec<Bytes>, Refused> {
        if ![INPUT, URLS].contains(&self.name.as_str()) || self.datatype != "BYTES" {
            return Err(Refused::malformed(format!(
                "input {:?} of type {} is unknown; give {INPUT:?} or {URLS:?} of type BYTES",
                self.name, self.datatype
            )));
        }
        if let Some(name) = self
            .parameters
            .keys()
            .find(|name| *name != "binary_data_size")
        {
            return Err(Refused::malformed(format!(
                "{INPUT} has the parameter {name:?}, which is not known here"
            )));
        }
        let count = match *self.shape.as_slice() {
            [count] | [count, 1] => count,
            _ => 0,
        };
        if count == 0 {
            return Err(Refused::malformed(format!(
                "the shape of {INPUT} is {:?}; give [N] or [N, 1], with N images",
                self.shape
            )));
        }
        if count > most as u64 {
            return Err(Refused::too_large(format!(
                "the request holds {count} images, more than serve.max-files = {most}"
            )));
        }
        let images = match (self.parameters.get("binary_data_size"), &self.data) {
            (Some(size), None) => elements(binary, size)?,
            (None, Some(data)) if binary.is_empty() => {
                let mut images = Vec::new();
                decode(data, 2, self.name == URLS, &mut images)?;
                images
            }
            _ => {
                return Err(Refused::malformed(format!(
                    "{INPUT} needs either data or binary_data_size, and bytes only with the latter"
                )));
            }
        };
        match images.len() as u64 == count {
            true => Ok(images),
            false => Err(Refused::malformed(format!(
                "{INPUT} holds {} images, but its shape says {count}",
                images.len()
            ))),
        }
    }
}

/// The elements of a binary tensor: each preceded by its length in four little-endian bytes.
fn elements(binary: &Bytes, size: &Value) -> Result<Vec<Bytes>, Refused> {
    if size.as_u64() != Some(binary.len() as u64) {
        return Err(Refused::malformed(format!(
            "binary_data_size is {size}, but {} bytes follow the JSON",
            binary.len()
        )));
    }
    let broken = || Refused::malformed("the binary tensor ends within an element");
    let (mut rest, mut images) = (binary.clone(), Vec::new());
    while !rest.is_empty() {
        let (length, _) = rest.split_first_chunk::<4>().ok_or_else(broken)?;
        let length = u32::from_le_bytes(*length) as usize;
        let end = length.checked_add(4).filter(|end| *end <= rest.len());
        let image = rest.split_to(end.ok_or_else(broken)?);
        images.push(image.slice(4..));
    }
    Ok(images)
}

/// Base64 images or urls, in lists up to this depth.
fn decode(
    data: &Value,
    depth: usize,
    are_urls: bool,
    images: &mut Vec<Bytes>,
) -> Result<(), Refused> {
    match data {
        Value::Array(elements) if depth > 0 => elements
            .iter()
            .try_for_each(|element| decode(element, depth - 1, are_urls, images)),
        Value::String(url) if depth < 2 && are_urls => {
            images.push(url.clone().into());
            Ok(())
        }
        Value::String(text) if depth < 2 => {
            let bytes = STANDARD.decode(text).map_err(|error| {
                Refused::malformed(format!("an image in data is no base64: {error}"))
            })?;
            images.push(bytes.into());
            Ok(())
        }
        _ => Err(Refused::malformed(
            "data is to be a list of urls, or of images in base64; send others with the binary extension",
        )),
    }
}

fn wanted(outputs: &[WireOutput], all_binary: bool) -> Result<Vec<(&'static str, bool)>, Refused> {
    if outputs.is_empty() {
        return Ok(BY_DEFAULT.map(|name| (name, all_binary)).to_vec());
    }
    let mut wanted = Vec::new();
    for output in outputs {
        let known = OUTPUTS.iter().find(|(name, ..)| *name == output.name);
        let (name, ..) = known.ok_or_else(|| {
            let names = OUTPUTS.map(|(name, ..)| name).join(", ");
            Refused::malformed(format!(
                "there is no output {:?}; there are {names}",
                output.name
            ))
        })?;
        let mut binary = all_binary;
        for (parameter, value) in &output.parameters {
            match (parameter.as_str(), value.as_u64()) {
                ("binary_data", _) => binary = flag(parameter, value)?,
                ("classification", Some(0)) => {}
                _ => {
                    return Err(Refused::malformed(format!(
                        "output {name} has the parameter {parameter} = {value}, which is not known here; set top_k in the request's parameters for more classes"
                    )));
                }
            }
        }
        wanted.push((*name, binary));
    }
    Ok(wanted)
}

fn flag(name: &str, value: &Value) -> Result<bool, Refused> {
    let wrong = || Refused::malformed(format!("{name} is {value}; give true or false"));
    value.as_bool().ok_or_else(wrong)
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// An output tensor.
#[derive(Debug)]
pub(super) struct Output {
    name: &'static str,
    shape: Vec<usize>,
    values: Values,
    is_binary: bool,
}

#[derive(Debug)]
enum Values {
    Texts(Vec<String>),
    Floats(Vec<f32>),
    Ints(Vec<i32>),
}

/// The outputs requested; `rows` are the images' scores and rows.
pub(super) fn outputs(request: &InferRequest, rows: &[(&Scores, &str)]) -> Vec<Output> {
    let widest = rows.iter().map(|(scores, _)| scores.top.len()).max();
    let wanted = request.wanted.iter();
    wanted
        .map(|&(name, is_binary)| {
            let width = match name.starts_with("top_") {
                true => widest.unwrap_or(0),
                false => 1,
            };
            let tops = || {
                let of_row = |(scores, _): &(&Scores, &str)| {
                    let top = scores.top.iter().take(width).cloned().map(Some);
                    let padding = width - scores.top.len().min(width);
                    let padded = top.chain(std::iter::repeat_n(None, padding));
                    padded.collect::<Vec<_>>()
                };
                rows.iter().flat_map(of_row)
            };
            let values = match name {
                "label" | "top_labels" => Values::Texts(
                    tops()
                        .map(|top| top.map_or_else(String::new, |top| top.label.to_string()))
                        .collect(),
                ),
                "score" | "top_scores" => {
                    Values::Floats(tops().map(|top| top.map_or(0.0, |top| top.score)).collect())
                }
                "class" | "top_classes" => {
                    let class = |class: u32| i32::try_from(class).unwrap_or(i32::MAX);
                    Values::Ints(
                        tops()
                            .map(|top| top.map_or(-1, |top| class(top.class)))
                            .collect(),
                    )
                }
                _ => Values::Texts(rows.iter().map(|(_, row)| (*row).to_owned()).collect()),
            };
            let mut shape = vec![rows.len()];
            if name.starts_with("top_") {
                shape.push(width);
            }
            Output {
                name,
                shape,
                values,
                is_binary,
            }
        })
        .collect()
}

impl Output {
    /// The tensor in the response's JSON; if it is to be binary, its bytes are appended to
    /// `binary`.
    pub(super) fn describe(self, binary: &mut Vec<u8>) -> Value {
        let datatype = match self.values {
            Values::Texts(_) => "BYTES",
            Values::Floats(_) => "FP32",
            Values::Ints(_) => "INT32",
        };
        let mut described = json!({
            "name": self.name, "datatype": datatype, "shape": self.shape,
        });
        if !self.is_binary {
            described["data"] = match self.values {
                Values::Texts(texts) => texts.into(),
                Values::Floats(floats) => floats.into(),
                Values::Ints(ints) => ints.into(),
            };
            return described;
        }
        let before = binary.len();
        match self.values {
            Values::Texts(texts) => {
                for text in texts {
                    let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
                    binary.extend(length.to_le_bytes());
                    binary.extend(text.as_bytes());
                }
            }
            Values::Floats(floats) => binary.extend(floats.iter().flat_map(|v| v.to_le_bytes())),
            Values::Ints(ints) => binary.extend(ints.iter().flat_map(|v| v.to_le_bytes())),
        }
        described["parameters"] = json!({ "binary_data_size": binary.len() - before });
        described
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &Value, binary: &[u8]) -> Result<InferRequest, Refused> {
        let text = json.to_string();
        let body = [text.as_bytes(), binary].concat();
        InferRequest::read(&body.into(), Some(text.len()), 4)
    }

    fn input(shape: &Value, rest: &Value) -> Value {
        let mut input = json!({ "name": "image", "datatype": "BYTES", "shape": shape });
        for (name, value) in rest.as_object().unwrap() {
            input[name] = value.clone();
        }
        json!({ "inputs": [input] })
    }

    #[test]
    fn images_come_as_base64_or_in_binary() {
        let data = json!({ "data": ["QUI=", "Qw=="] });
        let request = read(&input(&json!([2]), &data), b"").unwrap();
        assert_eq!(request.images, ["AB", "C"]);
        let nested = json!({ "data": [["QUI="], ["Qw=="]] });
        let request = read(&input(&json!([2, 1]), &nested), b"").unwrap();
        assert_eq!(request.images, ["AB", "C"]);
        let size = json!({ "parameters": { "binary_data_size": 11 } });
        let request = read(&input(&json!([2]), &size), b"\x02\0\0\0AB\x01\0\0\0C").unwrap();
        assert_eq!(request.images, ["AB", "C"]);
    }

    #[test]
    fn what_is_malformed_is_named() {
        let size = |size| json!({ "parameters": { "binary_data_size": size } });
        let data = |data: Value| json!({ "data": data });
        let one = json!([1]);
        let with = |name: &str, value: Value| {
            let mut request = input(&one, &data(json!(["QUI="])));
            request[name] = value;
            request
        };
        let odd = json!({ "data": ["QUI="], "parameters": { "odd": 1 } });
        let cases: [(Value, &[u8], &str); 19] = [
            (json!({ "inputs": [] }), b"", "0 inputs"),
            (json!({}), b"", "inputs"),
            (json!({ "inputs": [], "odd": 1 }), b"", "odd"),
            (input(&one, &odd), b"", "odd"),
            (json!([]), b"", "cannot be read"),
            (input(&json!([0]), &data(json!([]))), b"", "shape"),
            (input(&json!([1, 2]), &data(json!([]))), b"", "shape"),
            (input(&json!([-1]), &data(json!([]))), b"", "cannot be read"),
            (input(&json!([5]), &data(json!([]))), b"", "max-files"),
            (
                input(&json!([2]), &data(json!(["QUI="]))),
                b"",
                "shape says 2",
            ),
            (input(&one, &data(json!("QUI="))), b"", "list"),
            (input(&one, &data(json!([1]))), b"", "base64"),
            (input(&one, &data(json!(["?"]))), b"", "base64"),
            (input(&one, &json!({})), b"", "data"),
            (input(&one, &size(4)), b"\x01\0\0", "3 bytes follow"),
            (
                input(&one, &size(5)),
                b"\xff\xff\xff\xffC",
                "within an element",
            ),
            (input(&one, &size(3)), b"\x01\0\0", "within an element"),
            (with("outputs", json!([{ "name": "odd" }])), b"", "\"odd\""),
            (
                with("parameters", json!({ "timeout": "x" })),
                b"",
                "timeout",
            ),
        ];
        for (request, binary, words) in cases {
            let refused = read(&request, binary).unwrap_err();
            assert!(refused.message.contains(words), "{}", refused.message);
        }
        let beyond = InferRequest::read(&Bytes::from_static(b"{}"), Some(3), 4).unwrap_err();
        assert!(beyond.message.contains("holds 2 bytes"));
    }
}
