use std::fmt;

use half::f16;
use ort::value::{Outlet, TensorElementType, ValueType};
use serde::{Serialize, Serializer};

/// An input or output of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorInfo {
    /// Its name in the model.
    pub name: String,
    /// The type of its values.
    #[serde(rename = "type")]
    pub element: Element,
    /// Its dimensions, outermost first.
    pub shape: Vec<Dim>,
}

/// The type of a tensor's values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Element {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// Unsigned byte.
    U8,
    /// Any other, by ONNX Runtime's name for it, or the name of a value that is not a tensor.
    Other(String),
}

/// One dimension of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Dim {
    /// A fixed length.
    Fixed(u64),
    /// A variable length; the name may be empty.
    Dynamic(String),
}

impl TensorInfo {
    pub(crate) fn of(outlet: &Outlet) -> Self {
        let (element, shape) = match outlet.dtype() {
            ValueType::Tensor {
                ty,
                shape,
                dimension_symbols,
            } => (
                Element::of(*ty),
                shape
                    .iter()
                    .enumerate()
                    .map(|(axis, &length)| match u64::try_from(length) {
                        Ok(length) => Dim::Fixed(length),
                        Err(_) => {
                            Dim::Dynamic(dimension_symbols.get(axis).cloned().unwrap_or_default())
                        }
                    })
                    .collect(),
            ),
            ValueType::Sequence(_) => (Element::Other("sequence".to_owned()), Vec::new()),
            ValueType::Map { .. } => (Element::Other("map".to_owned()), Vec::new()),
            ValueType::Optional(_) => (Element::Other("optional".to_owned()), Vec::new()),
        };
        Self {
            name: outlet.name().to_owned(),
            element,
            shape,
        }
    }
}

impl Element {
    fn of(element: TensorElementType) -> Self {
        match element {
            TensorElementType::Float32 => Self::F32,
            TensorElementType::Float16 => Self::F16,
            TensorElementType::Uint8 => Self::U8,
            other => Self::Other(other.to_string()),
        }
    }
}

impl Dim {
    /// Its length, if fixed.
    pub fn fixed(&self) -> Option<u64> {
        match self {
            Self::Fixed(length) => Some(*length),
            Self::Dynamic(_) => None,
        }
    }
}

impl fmt::Display for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}[", self.name, self.element)?;
        for (axis, dim) in self.shape.iter().enumerate() {
            write!(f, "{}{dim}", if axis == 0 { "" } else { ", " })?;
        }
        f.write_str("]")
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::U8 => "u8",
            Self::Other(name) => name,
        })
    }
}

impl Serialize for Element {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(length) => write!(f, "{length}"),
            Self::Dynamic(name) if name.is_empty() => f.write_str("?"),
            Self::Dynamic(name) => f.write_str(name),
        }
    }
}

/// Floats that a model may put out.
pub(crate) trait Float: Copy {
    fn widen(self) -> f32;
}

impl Float for f32 {
    fn widen(self) -> f32 {
        self
    }
}

impl Float for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
}
