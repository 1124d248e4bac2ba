use serde::{Deserialize, Serialize};

/// A pass-through column: a column of the source's manifest that reappears in the result rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    /// The name as the manifest spells it.
    pub name: String,
    /// The one type of all its values, besides null.
    pub kind: ColumnKind,
}

/// The name of the column of perceptual hashes.
pub const PHASH: &str = "phash";

impl Column {
    /// The perceptual hashes of images, as 16 hexadecimal digits: many JSON readers lose digits of
    /// 64-bit numbers.
    pub fn phash() -> Self {
        Self {
            name: PHASH.to_owned(),
            kind: ColumnKind::String,
        }
    }
}

/// The types a pass-through column may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnKind {
    /// UTF-8 text. Values of any other type (lists, maps) travel as their JSON text.
    String,
    /// A signed 64-bit integer.
    Int,
    /// A 64-bit float.
    Float,
    /// True or false.
    Bool,
}

/// One value of a pass-through column.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Scalar {
    /// No value.
    Null,
    /// True or false.
    Bool(bool),
    /// A signed integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// Text.
    String(String),
}
