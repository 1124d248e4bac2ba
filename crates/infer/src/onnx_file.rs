use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek};
use std::path::{Component, Path};

use bytes::Buf;
use prost::Message;
use sha2::{Digest, Sha256};

use crate::ending::{self, Ending, FunctionProto, NodeProto, ValueInfoProto};
use crate::{InferError, InferErrorKind};

/// The description and size of a model's file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OnnxFile {
    /// Version of the file format.
    pub(crate) ir_version: u64,
    /// Domain and version of every operator set; the standard one has the domain `ai.onnx`.
    pub(crate) opsets: Vec<(String, u64)>,
    /// The program that wrote the file, with its version.
    pub(crate) producer: String,
    /// Names of the files next to it that contain weights, sorted.
    pub(crate) external: BTreeSet<String>,
    /// Names of the inputs, without weights.
    pub(crate) inputs: Vec<String>,
    /// The outputs that already are scores, with their activation.
    endings: Vec<(String, Ending)>,
    /// Number of weights by element type, in ONNX's numbering.
    weights: Vec<(u64, u64)>,
    /// Total bytes of the file and those next to it.
    pub(crate) bytes: u64,
    /// SHA-256 in hex. For a model in one file it equals the output of `sha256sum`.
    pub(crate) hash: String,
}

impl OnnxFile {
    /// Reads the file at `path` without its weights, size and hash, in bounded memory.
    ///
    /// # Errors
    /// If it is missing, or is not an ONNX model with weights in its folder.
    pub(crate) fn describe(path: &Path) -> Result<Self, InferError> {
        let mut file = File::open(path).map_err(|error| unreadable(path, error))?;
        let (length, beginning) = beginning(&mut file).map_err(|error| unreadable(path, error))?;
        check_beginning(path, &beginning)?;
        let onnx = Self::parse(file, length).map_err(|error| match error.kind() {
            ErrorKind::InvalidData | ErrorKind::UnexpectedEof => InferError::new(
                InferErrorKind::NotClassifier,
                format_args!("{} is not a complete ONNX model: {error}", path.display()),
            ),
            _ => unreadable(path, error),
        })?;
        for name in &onnx.external {
            if !Path::new(name)
                .components()
                .all(|part| matches!(part, Component::Normal(_)))
            {
                return Err(InferError::new(
                    InferErrorKind::NotClassifier,
                    format_args!(
                        "{} keeps weights in {name:?}, which is outside the model's folder",
                        path.display()
                    ),
                ));
            }
        }
        Ok(onnx)
    }

    /// Reads the file at `path` twice, and its external data, in bounded memory.
    ///
    /// # Errors
    /// As [`OnnxFile::describe`], or if a file of external data is missing.
    pub(crate) fn read(path: &Path) -> Result<Self, InferError> {
        let mut onnx = Self::describe(path)?;
        let mut hash = Sha256::new();
        onnx.bytes = digest(path, &mut hash).map_err(|error| unreadable(path, error))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        for name in &onnx.external {
            let beside = folder.join(name);
            hash.update(name.as_bytes());
            onnx.bytes += digest(&beside, &mut hash).map_err(|error| unreadable(&beside, error))?;
        }
        onnx.hash = hex(&hash.finalize());
        Ok(onnx)
    }

    /// The activation at the end of an output, if there is one.
    pub(crate) fn ending(&self, output: &str) -> Option<&Ending> {
        let mut endings = self.endings.iter();
        endings.find_map(|(name, ending)| (name == output).then_some(ending))
    }

    /// Number of weights.
    pub(crate) fn parameters(&self) -> u64 {
        self.weights.iter().map(|(_, count)| count).sum()
    }

    /// The element type of most weights, and so the precision of the model.
    pub(crate) fn precision(&self) -> &'static str {
        let most = self.weights.iter().max_by_key(|(_, count)| *count);
        match most.map(|(element, _)| element) {
            None => "none",
            Some(1) => "f32",
            Some(2) => "u8",
            Some(3) => "i8",
            Some(10) => "f16",
            Some(11) => "f64",
            Some(16) => "bf16",
            Some(21 | 22) => "int4",
            Some(_) => "other",
        }
    }

    fn parse(file: impl Read + Seek, length: u64) -> io::Result<Self> {
        let mut content = Content::new(file, length);
        let decoded = ModelProto::decode(&mut content);
        if let Some(error) = content.failure {
            return Err(error);
        }
        let model = decoded.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        let Some(graph) = model.graph else {
            return Err(io::Error::new(ErrorKind::InvalidData, "it holds no graph"));
        };
        let opsets = model.opset_import.into_iter();
        let mut onnx = Self {
            ir_version: number(model.ir_version),
            opsets: opsets.map(OperatorSetIdProto::named).collect(),
            producer: [model.producer_name, model.producer_version].join(" "),
            ..Self::default()
        };
        onnx.producer = onnx.producer.trim().to_owned();
        onnx.endings = ending::find(&graph.output, &graph.node, &model.functions);
        let weights: HashSet<&str> = graph.initializer.iter().map(|it| &*it.name).collect();
        let inputs = graph.input.into_iter().map(|input| input.name);
        onnx.inputs = inputs.filter(|name| !weights.contains(&**name)).collect();
        for tensor in graph.initializer {
            onnx.add(tensor);
        }
        Ok(onnx)
    }

    fn add(&mut self, tensor: TensorProto) {
        let sizes = tensor.dims.into_iter().map(number);
        let count = sizes.fold(1, u64::saturating_mul);
        let element = number(tensor.data_type.into());
        match self.weights.iter_mut().find(|(known, _)| *known == element) {
            Some((_, total)) => *total = total.saturating_add(count),
            None => self.weights.push((element, count)),
        }
        let entries = tensor.external_data.into_iter();
        let locations = entries.filter(|entry| entry.key == "location");
        self.external.extend(locations.map(|entry| entry.value));
    }
}

/// Names of the files next to a model's file that contain weights, sorted. Blocks while it reads
/// the graph.
///
/// # Errors
/// If it is missing, or is not an ONNX model with weights in its folder.
pub fn external_data(model: &Path) -> Result<Vec<String>, InferError> {
    Ok(OnnxFile::describe(model)?.external.into_iter().collect())
}

/// The relevant fields of ONNX's messages; others, such as the bytes of weights, are skipped
/// unread.
#[derive(Clone, PartialEq, prost::Message)]
struct ModelProto {
    #[prost(int64, tag = "1")]
    ir_version: i64,
    #[prost(string, tag = "2")]
    producer_name: String,
    #[prost(string, tag = "3")]
    producer_version: String,
    #[prost(message, optional, tag = "7")]
    graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "8")]
    opset_import: Vec<OperatorSetIdProto>,
    #[prost(message, repeated, tag = "25")]
    functions: Vec<FunctionProto>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct OperatorSetIdProto {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(int64, tag = "2")]
    version: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    node: Vec<NodeProto>,
    #[prost(message, repeated, tag = "5")]
    initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    output: Vec<ValueInfoProto>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TensorProto {
    #[prost(int64, repeated, tag = "1")]
    dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    data_type: i32,
    #[prost(string, tag = "8")]
    name: String,
    #[prost(message, repeated, tag = "13")]
    external_data: Vec<StringStringEntryProto>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct StringStringEntryProto {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

impl OperatorSetIdProto {
    fn named(self) -> (String, u64) {
        let domain = match self.domain.is_empty() {
            true => "ai.onnx".to_owned(),
            false => self.domain,
        };
        (domain, number(self.version))
    }
}

/// Negative numbers mean nothing in these fields.
fn number(value: i64) -> u64 {
    value.try_into().unwrap_or(0)
}

/// A file being decoded: large unneeded fields are skipped.
struct Content<R> {
    reader: BufReader<R>,
    remaining: usize,
    /// Remaining bytes that may be read.
    budget: usize,
    /// Why the file cannot be read further. Zeros decoded after it are not used.
    failure: Option<io::Error>,
}

impl<R: Read + Seek> Content<R> {
    const BUFFER: usize = 64 << 10;
    /// Far more than any model except its weights; decoding takes little more memory.
    const BUDGET: usize = 256 << 20;
    /// Enough for any number to end in.
    const ZEROS: &'static [u8] = &[0; 16];

    fn new(file: R, length: u64) -> Self {
        let mut content = Self {
            reader: BufReader::with_capacity(Self::BUFFER, file),
            remaining: usize::try_from(length).unwrap_or(usize::MAX),
            budget: Self::BUDGET,
            failure: None,
        };
        let filled = content.fill();
        content.note(filled);
        content
    }

    fn go_on(&mut self, count: usize) -> io::Result<()> {
        if count > self.reader.buffer().len() {
            // Seeking past the end of the file may go unnoticed; reading the last byte does not.
            let ahead = i64::try_from(count - 1).map_err(io::Error::other)?;
            self.reader.seek_relative(ahead)?;
            self.reader.read_exact(&mut [0])?;
        } else {
            self.reader.consume(count);
            let left = self.budget.checked_sub(count);
            let too_long = || io::Error::new(ErrorKind::InvalidData, "its graph is too large");
            self.budget = left.ok_or_else(too_long)?;
        }
        self.fill()
    }

    fn fill(&mut self) -> io::Result<()> {
        if self.remaining > 0 && self.reader.fill_buf()?.is_empty() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    fn note(&mut self, outcome: io::Result<()>) {
        if let Err(error) = outcome {
            self.failure = Some(error);
            self.remaining = self.remaining.min(Self::ZEROS.len());
        }
    }
}

impl<R: Read + Seek> Buf for Content<R> {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        let bytes = match self.failure {
            None => self.reader.buffer(),
            Some(_) => Self::ZEROS,
        };
        &bytes[..bytes.len().min(self.remaining)]
    }

    fn advance(&mut self, count: usize) {
        self.remaining = self.remaining.saturating_sub(count);
        if self.failure.is_none() {
            let outcome = self.go_on(count);
            self.note(outcome);
        }
    }
}

fn unreadable(path: &Path, error: io::Error) -> InferError {
    InferError::new(
        InferErrorKind::ModelMissing,
        format_args!("cannot read {}: {error}", path.display()),
    )
}

/// The length and the first bytes of a file, which is then read from its start again.
fn beginning(file: &mut File) -> io::Result<(u64, Vec<u8>)> {
    let mut bytes = Vec::new();
    Read::by_ref(file).take(64).read_to_end(&mut bytes)?;
    file.rewind()?;
    Ok((file.metadata()?.len(), bytes))
}

fn check_beginning(path: &Path, beginning: &[u8]) -> Result<(), InferError> {
    let problem = if beginning.is_empty() {
        "is empty"
    } else if beginning.starts_with(b"version https://git-lfs") {
        "is a Git LFS pointer, not the model; fetch the model with `git lfs pull`"
    } else {
        return Ok(());
    };
    Err(InferError::new(
        InferErrorKind::NotClassifier,
        format_args!("{} {problem}", path.display()),
    ))
}

/// Bytes in hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest(path: &Path, hash: &mut Sha256) -> io::Result<u64> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 256 << 10];
    let mut total = 0;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(total),
            Ok(length) => {
                hash.update(&buffer[..length]);
                total += length as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
