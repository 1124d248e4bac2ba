//! The fields of JSON objects, in order, and their common types.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use trommel_types::{Column, ColumnKind, Scalar};

use crate::union::wider;

/// The fields of one object, in order.
pub(super) struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Fields<'a> {
    /// The fields of an object with a single field.
    pub(super) fn one(name: &str, value: &'a RawValue) -> Self {
        Self(vec![(name.to_owned(), value)])
    }

    /// The value of a field; the last one if the object repeats its name.
    pub(super) fn get(&self, name: &str) -> Option<&'a RawValue> {
        let field = self.0.iter().rfind(|(known, _)| known == name);
        field.map(|(_, value)| *value)
    }
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut fields = Vec::new();
        while let Some(field) = map.next_entry()? {
            fields.push(field);
        }
        Ok(Fields(fields))
    }
}

/// The fields of many objects, in order of first appearance.
#[derive(Default)]
pub(super) struct FieldTypes {
    fields: Vec<FieldType>,
    objects: u64,
}

struct FieldType {
    name: String,
    /// `None` while all values are null.
    kind: Option<ColumnKind>,
    /// Number of objects in which it is text.
    texts: u64,
}

impl FieldTypes {
    pub(super) fn observe(&mut self, object: &Fields<'_>) {
        self.objects += 1;
        for (name, value) in &object.0 {
            let known = self.fields.iter().position(|field| field.name == *name);
            let place = known.unwrap_or_else(|| {
                self.fields.push(FieldType {
                    name: name.clone(),
                    kind: None,
                    texts: 0,
                });
                self.fields.len() - 1
            });
            let field = &mut self.fields[place];
            field.texts += u64::from(value.get().starts_with('"'));
            field.kind = match (field.kind, kind_of(value)) {
                (None, kind) | (kind, None) => kind,
                (Some(first), Some(second)) => Some(wider(first, second)),
            };
        }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().map(|field| field.name.as_str())
    }

    /// The fields as columns; a field that is always null is text.
    pub(super) fn columns(&self) -> impl Iterator<Item = Column> {
        self.fields.iter().map(|field| Column {
            name: field.name.clone(),
            kind: field.kind.unwrap_or(ColumnKind::String),
        })
    }

    /// Whether every object has text in a field.
    pub(super) fn is_always_text(&self, name: &str) -> bool {
        let field = self.fields.iter().find(|field| field.name == name);
        field.is_some_and(|field| field.texts == self.objects)
    }
}

/// A value that is text.
pub(super) fn text(value: &RawValue) -> Option<String> {
    serde_json::from_str(value.get()).ok()
}

/// A value in the type of its column. Other values become JSON text in a text column.
pub(super) fn scalar(value: &RawValue, kind: ColumnKind) -> Result<Scalar, serde_json::Error> {
    let json = value.get();
    if json == "null" {
        return Ok(Scalar::Null);
    }
    Ok(match kind {
        ColumnKind::String if json.starts_with('"') => Scalar::String(serde_json::from_str(json)?),
        ColumnKind::String => Scalar::String(json.to_owned()),
        ColumnKind::Int => Scalar::Int(serde_json::from_str(json)?),
        ColumnKind::Float => Scalar::Float(serde_json::from_str(json)?),
        ColumnKind::Bool => Scalar::Bool(serde_json::from_str(json)?),
    })
}

/// The narrowest type of a value. A number that fits neither integers nor floats is text.
fn kind_of(value: &RawValue) -> Option<ColumnKind> {
    let json = value.get();
    let is_finite = |json: &str| json.parse().is_ok_and(f64::is_finite);
    Some(match json.as_bytes().first() {
        Some(b'n') => return None,
        Some(b't' | b'f') => ColumnKind::Bool,
        Some(b'"' | b'[' | b'{') => ColumnKind::String,
        _ if json.parse::<i64>().is_ok() => ColumnKind::Int,
        _ if json.contains(['.', 'e', 'E']) && is_finite(json) => ColumnKind::Float,
        _ => ColumnKind::String,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: [&str; 2] = [
        r#"{"uri":"a","z":1,"x":1,"mixed":true,"empty":null,"list":[1, "b"],"id":18446744073709551615}"#,
        r#"{"uri":"b\n","z":-2,"x":0.5,"mixed":"yes","late":false,"huge":1e999,"z":3}"#,
    ];

    #[test]
    fn types_widen_and_columns_keep_their_order() {
        let mut types = FieldTypes::default();
        for line in LINES {
            types.observe(&serde_json::from_str(line).unwrap());
        }
        use ColumnKind::{Bool, Float, Int, String};
        let columns: Vec<_> = types
            .columns()
            .map(|column| (column.name, column.kind))
            .collect();
        let expected = [
            ("uri", String),
            ("z", Int),
            ("x", Float),
            ("mixed", String),
            ("empty", String),
            ("list", String),
            ("id", String),
            ("late", Bool),
            ("huge", String),
        ];
        assert_eq!(
            columns,
            expected.map(|(name, kind)| (name.to_owned(), kind))
        );
        assert!(types.is_always_text("uri") && !types.is_always_text("mixed"));
    }

    #[test]
    fn values_are_exact() {
        let objects = LINES.map(|line| serde_json::from_str::<Fields<'_>>(line).unwrap());
        let value =
            |object: usize, name, kind| scalar(objects[object].get(name).unwrap(), kind).unwrap();
        let string = |text: &str| Scalar::String(text.to_owned());
        assert_eq!(value(0, "list", ColumnKind::String), string(r#"[1, "b"]"#));
        assert_eq!(
            value(0, "id", ColumnKind::String),
            string("18446744073709551615")
        );
        assert_eq!(value(0, "x", ColumnKind::Float), Scalar::Float(1.0));
        assert_eq!(value(0, "mixed", ColumnKind::String), string("true"));
        assert_eq!(value(0, "empty", ColumnKind::String), Scalar::Null);
        assert_eq!(value(1, "uri", ColumnKind::String), string("b\n"));
        assert_eq!(
            value(1, "z", ColumnKind::Int),
            Scalar::Int(3),
            "the last one counts"
        );
    }
}
