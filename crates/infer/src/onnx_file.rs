use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek};
use std::path::{Component, Path};

use sha2::{Digest, Sha256};

use crate::{InferError, InferErrorKind};

/// What a model's file says about itself, and what it weighs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OnnxFile {
    /// Version of the file format.
    pub(crate) ir_version: u64,
    /// Domain and version of every operator set; the standard one has the domain `ai.onnx`.
    pub(crate) opsets: Vec<(String, u64)>,
    /// The program that wrote the file, with its version.
    pub(crate) producer: String,
    /// Names of the files beside it that hold weights, sorted.
    pub(crate) external: BTreeSet<String>,
    /// Weights by element type, in ONNX's numbering.
    weights: Vec<(u64, u64)>,
    /// Bytes of the file and of those beside it.
    pub(crate) bytes: u64,
    /// SHA-256 in hex. Of a model in one file it is what `sha256sum` prints.
    pub(crate) hash: String,
}

impl OnnxFile {
    /// Reads the file at `path` and its external data, in bounded memory.
    ///
    /// # Errors
    /// When a file is missing, or the first one is no ONNX model.
    pub(crate) fn read(path: &Path) -> Result<Self, InferError> {
        let unreadable = |path: &Path, error: io::Error| {
            InferError::new(
                InferErrorKind::ModelMissing,
                format_args!("cannot read {}: {error}", path.display()),
            )
        };
        let file = File::open(path).map_err(|error| unreadable(path, error))?;
        let mut reader = BufReader::with_capacity(64 << 10, file);
        check_beginning(
            path,
            reader.fill_buf().map_err(|error| unreadable(path, error))?,
        )?;
        let mut onnx = Self::parse(&mut reader).map_err(|error| match error.kind() {
            ErrorKind::InvalidData | ErrorKind::UnexpectedEof => InferError::new(
                InferErrorKind::NotClassifier,
                format_args!("{} is no complete ONNX model: {error}", path.display()),
            ),
            _ => unreadable(path, error),
        })?;

        let mut hash = Sha256::new();
        onnx.bytes = digest(path, &mut hash).map_err(|error| unreadable(path, error))?;
        let folder = path.parent().unwrap_or(Path::new(""));
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
            let beside = folder.join(name);
            hash.update(name.as_bytes());
            onnx.bytes += digest(&beside, &mut hash).map_err(|error| unreadable(&beside, error))?;
        }
        onnx.hash = hex(&hash.finalize());
        Ok(onnx)
    }

    /// Number of weights.
    pub(crate) fn parameters(&self) -> u64 {
        self.weights.iter().map(|(_, count)| count).sum()
    }

    /// The element type that most weights have, and by that the precision of the model.
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

    fn parse(reader: &mut (impl BufRead + Seek)) -> io::Result<Self> {
        let mut onnx = Self::default();
        let mut wire = Wire {
            reader,
            position: 0,
        };
        let end = u64::MAX; // the file's
        let (mut name, mut version, mut has_graph) = (String::new(), String::new(), false);
        while let Some(field) = wire.next_field(end)? {
            match field {
                Field {
                    number: 1,
                    value: Value::Varint(value),
                } => onnx.ir_version = value,
                Field {
                    number: 2,
                    value: Value::Bytes(length),
                } => name = wire.text(length)?,
                Field {
                    number: 3,
                    value: Value::Bytes(length),
                } => version = wire.text(length)?,
                Field {
                    number: 8,
                    value: Value::Bytes(length),
                } => {
                    onnx.opsets.push(opset(&mut wire, length)?);
                }
                Field {
                    number: 7,
                    value: Value::Bytes(length),
                } => {
                    has_graph = true;
                    onnx.graph(&mut wire, length)?;
                }
                field => wire.skip(&field.value)?,
            }
        }
        if !has_graph {
            return Err(io::Error::new(ErrorKind::InvalidData, "it holds no graph"));
        }
        onnx.producer = [name, version].join(" ").trim().to_owned();
        Ok(onnx)
    }

    fn graph(&mut self, wire: &mut Wire<'_, impl BufRead + Seek>, length: u64) -> io::Result<()> {
        let end = wire.end(length)?;
        while let Some(field) = wire.next_field(end)? {
            match field {
                Field {
                    number: 5,
                    value: Value::Bytes(length),
                } => self.weight(wire, length)?,
                field => wire.skip(&field.value)?,
            }
        }
        Ok(())
    }

    fn weight(&mut self, wire: &mut Wire<'_, impl BufRead + Seek>, length: u64) -> io::Result<()> {
        let end = wire.end(length)?;
        let (mut element, mut count) = (0, 1u64);
        while let Some(field) = wire.next_field(end)? {
            match field {
                Field {
                    number: 1,
                    value: Value::Varint(size),
                } => count = count.saturating_mul(size),
                Field {
                    number: 1,
                    value: Value::Bytes(length),
                } => {
                    let end = wire.end(length)?;
                    while wire.position < end {
                        count = count.saturating_mul(wire.varint()?);
                    }
                }
                Field {
                    number: 2,
                    value: Value::Varint(value),
                } => element = value,
                Field {
                    number: 13,
                    value: Value::Bytes(length),
                } => {
                    if let (key, value) = entry(wire, length)?
                        && key == "location"
                    {
                        self.external.insert(value);
                    }
                }
                field => wire.skip(&field.value)?,
            }
        }
        match self.weights.iter_mut().find(|(known, _)| *known == element) {
            Some((_, total)) => *total = total.saturating_add(count),
            None => self.weights.push((element, count)),
        }
        Ok(())
    }
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

fn opset(wire: &mut Wire<'_, impl BufRead + Seek>, length: u64) -> io::Result<(String, u64)> {
    let end = wire.end(length)?;
    let (mut domain, mut version) = (String::new(), 0);
    while let Some(field) = wire.next_field(end)? {
        match field {
            Field {
                number: 1,
                value: Value::Bytes(length),
            } => domain = wire.text(length)?,
            Field {
                number: 2,
                value: Value::Varint(value),
            } => version = value,
            field => wire.skip(&field.value)?,
        }
    }
    if domain.is_empty() {
        domain = "ai.onnx".to_owned();
    }
    Ok((domain, version))
}

fn entry(wire: &mut Wire<'_, impl BufRead + Seek>, length: u64) -> io::Result<(String, String)> {
    let end = wire.end(length)?;
    let (mut key, mut value) = (String::new(), String::new());
    while let Some(field) = wire.next_field(end)? {
        match field {
            Field {
                number: 1,
                value: Value::Bytes(length),
            } => key = wire.text(length)?,
            Field {
                number: 2,
                value: Value::Bytes(length),
            } => value = wire.text(length)?,
            field => wire.skip(&field.value)?,
        }
    }
    Ok((key, value))
}

/// The Protocol Buffers wire format, read without keeping what is passed over: the few fields that
/// are wanted stand between megabytes of weights.
struct Wire<'r, R> {
    reader: &'r mut R,
    position: u64,
}

struct Field {
    number: u64,
    value: Value,
}

enum Value {
    Varint(u64),
    /// The number of bytes that follow.
    Bytes(u64),
    Fixed(u64),
}

impl<R: BufRead + Seek> Wire<'_, R> {
    fn next_field(&mut self, end: u64) -> io::Result<Option<Field>> {
        if self.position >= end || self.reader.fill_buf()?.is_empty() {
            if self.position > end || (end != u64::MAX && self.position < end) {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    "it ends too early",
                ));
            }
            return Ok(None);
        }
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => Value::Fixed(8),
            2 => Value::Bytes(self.varint()?),
            5 => Value::Fixed(4),
            _ => {
                return Err(io::Error::new(
                    ErrorKind::InvalidData,
                    "it is in another format",
                ));
            }
        };
        Ok(Some(Field {
            number: tag >> 3,
            value,
        }))
    }

    fn skip(&mut self, value: &Value) -> io::Result<()> {
        let (Value::Bytes(length) | Value::Fixed(length)) = *value else {
            return Ok(());
        };
        let position = self.end(length)?;
        // A seek may go past the end of the file unnoticed; reading the last byte may not.
        if let Some(ahead) = length.checked_sub(1) {
            let ahead = i64::try_from(ahead).map_err(|_| too_long())?;
            self.reader.seek_relative(ahead)?;
            self.reader.read_exact(&mut [0])?;
        }
        self.position = position;
        Ok(())
    }

    fn varint(&mut self) -> io::Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let mut byte = [0];
            self.reader.read_exact(&mut byte)?;
            self.position += 1;
            value |= u64::from(byte[0] & 0x7f) << shift;
            if byte[0] & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(io::Error::new(
            ErrorKind::InvalidData,
            "it is in another format",
        ))
    }

    fn text(&mut self, length: u64) -> io::Result<String> {
        if length > 4096 {
            return Err(too_long());
        }
        let mut bytes = vec![0; length as usize];
        self.reader.read_exact(&mut bytes)?;
        self.position += length;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn end(&self, length: u64) -> io::Result<u64> {
        self.position.checked_add(length).ok_or_else(too_long)
    }
}

fn too_long() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "a field is longer than it can be")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Cursor;

    use super::*;

    fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
        let mut field = vec![number << 3 | 2, content.len() as u8];
        field.extend(content);
        field
    }

    fn model() -> Vec<u8> {
        let location = [bytes(1, b"location"), bytes(2, b"weights.bin")].concat();
        let offset = [bytes(1, b"offset"), bytes(2, b"0")].concat();
        let tensor = [
            vec![1 << 3, 3, 1 << 3, 4], // dims, one by one
            vec![2 << 3, 1],
            bytes(13, &location),
            bytes(13, &offset),
        ]
        .concat();
        let packed = [bytes(1, &[2, 2]), vec![2 << 3, 10], bytes(9, &[0; 8])].concat();
        let graph = [bytes(1, b"a node"), bytes(5, &tensor), bytes(5, &packed)].concat();
        let opset = [vec![2 << 3, 17]].concat();
        [
            vec![1 << 3, 8],
            bytes(2, b"pytorch"),
            bytes(3, b"2.9"),
            bytes(8, &opset),
            bytes(7, &graph),
        ]
        .concat()
    }

    fn parse(bytes: &[u8]) -> io::Result<OnnxFile> {
        OnnxFile::parse(&mut Cursor::new(bytes))
    }

    #[test]
    fn what_a_model_says_about_itself() {
        let onnx = parse(&model()).unwrap();
        assert_eq!(onnx.ir_version, 8);
        assert_eq!(onnx.producer, "pytorch 2.9");
        assert_eq!(onnx.opsets, [("ai.onnx".to_owned(), 17)]);
        assert_eq!(onnx.external, BTreeSet::from(["weights.bin".to_owned()]));
        assert_eq!(onnx.parameters(), 16);
        assert_eq!(onnx.precision(), "f32");
    }

    #[test]
    fn a_cut_model_is_an_error_wherever_it_is_cut() {
        let model = model();
        for length in 0..model.len() {
            assert!(
                parse(&model[..length]).is_err(),
                "cut at {length} of {}",
                model.len()
            );
        }
    }

    #[test]
    fn the_hash_covers_external_data() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        fs::write(&path, model()).unwrap();
        let missing = OnnxFile::read(&path).unwrap_err();
        assert!(missing.to_string().contains("weights.bin"), "{missing}");

        fs::write(folder.path().join("weights.bin"), "one").unwrap();
        let one = OnnxFile::read(&path).unwrap();
        assert_eq!(one.bytes, model().len() as u64 + 3);
        fs::write(folder.path().join("weights.bin"), "two").unwrap();
        assert_ne!(OnnxFile::read(&path).unwrap().hash, one.hash);
    }

    #[test]
    fn what_is_no_model_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        for (content, words) in [
            ("", "is empty"),
            ("version https://git-lfs.github.com/spec/v1", "git lfs pull"),
            ("just some text", "is no complete ONNX model"),
        ] {
            fs::write(&path, content).unwrap();
            let error = OnnxFile::read(&path).unwrap_err();
            assert_eq!(error.kind(), InferErrorKind::NotClassifier);
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
