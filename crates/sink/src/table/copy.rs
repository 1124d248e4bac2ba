//! Rows in the text format of PostgreSQL's COPY
//! (<https://www.postgresql.org/docs/current/sql-copy.html>).

use std::fmt::Write;

use trommel_types::TopLabel;

use crate::JobRecord;
use crate::row::Row;
use crate::row::{COLUMNS, TextRow, Value};

/// Appends rows, one per line: fields separated by tabs, `\N` for null, the generation last.
pub(super) fn append(out: &mut Vec<u8>, job: &JobRecord, rows: &[Row]) {
    let names = job.all_names();
    let finished_at = COLUMNS.len() - 1;
    for row in rows {
        let values = TextRow {
            job,
            names: &names,
            row,
        }
        .values();
        for (position, value) in values.iter().enumerate() {
            if position > 0 {
                out.push(b'\t');
            }
            match value {
                // Text that is not RFC 3339 was no valid date to begin with.
                Value::Text(text) if position == finished_at && !text.ends_with('Z') => {
                    out.extend_from_slice(b"infinity");
                }
                value => append_field(out, value),
            }
        }
        out.extend_from_slice(format!("\t{}\n", job.generation()).as_bytes());
    }
}

fn append_field(out: &mut Vec<u8>, value: &Value<'_>) {
    match value {
        Value::Null => out.extend_from_slice(b"\\N"),
        Value::Text(text) => append_escaped(out, text),
        Value::Bool(value) => append_escaped(out, &value.to_string()),
        Value::Int(value) => append_escaped(out, &value.to_string()),
        Value::Float(value) => append_escaped(out, &value.to_string()),
        Value::Score(value) => append_escaped(out, &value.to_string()),
        Value::Top(top) => append_escaped(out, &json(top)),
        Value::Vector(values) => {
            let mut array = String::from("{");
            for (position, value) in values.iter().enumerate() {
                let comma = if position > 0 { "," } else { "" };
                write!(array, "{comma}{value}").expect("a String takes every byte");
            }
            array.push('}');
            append_escaped(out, &array);
        }
    }
}

/// The list as JSON. Like all text in PostgreSQL, JSONB has no NUL, not even escaped.
fn json(top: &[TopLabel]) -> String {
    let clean: Vec<TopLabel> = top
        .iter()
        .map(|top| TopLabel {
            label: top.label.replace('\0', "\u{FFFD}").into(),
            ..top.clone()
        })
        .collect();
    serde_json::to_string(&clean).expect("labels are text and numbers")
}

fn append_escaped(out: &mut Vec<u8>, text: &str) {
    for byte in text.bytes() {
        match byte {
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\t' => out.extend_from_slice(b"\\t"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            // PostgreSQL's text supports every character except this one.
            0 => out.extend_from_slice("\u{FFFD}".as_bytes()),
            byte => out.push(byte),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_means_something_to_copy_is_escaped() {
        let mut out = Vec::new();
        append_escaped(&mut out, "a\tb\\c\nd\re\\N\0ß");
        assert_eq!(out, "a\\tb\\\\c\\nd\\re\\\\N\u{FFFD}ß".as_bytes());
    }

    #[test]
    fn a_label_with_a_nul_is_still_json_that_postgresql_takes() {
        let top = [TopLabel {
            label: "a\0b".into(),
            class: 1,
            score: f32::NAN,
        }];
        assert_eq!(
            json(&top),
            "[{\"label\":\"a\u{FFFD}b\",\"class\":1,\"score\":null}]"
        );
    }
}
