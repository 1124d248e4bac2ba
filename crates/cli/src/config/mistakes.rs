//! Errors in settings: the name where it was set, its value, and what it must be.

use std::net::SocketAddr;

use figment::error::{Actual, Error, Kind};

use super::ENV_PREFIX;

/// A configuration error in one sentence.
pub(super) fn said(error: &Error) -> String {
    let setting = named(error);
    match &error.kind {
        Kind::InvalidType(actual, expected) | Kind::InvalidValue(actual, expected) => {
            let (is, must) = (shown(actual), wanted(expected));
            format!("{setting} must be {must}, but is {is}")
        }
        Kind::UnknownVariant(found, known) => {
            format!(
                "{setting} must be one of {}, but is {found:?}",
                known.join(", ")
            )
        }
        Kind::UnknownField(_, known) => {
            format!("{setting}: unknown setting; known are {}", known.join(", "))
        }
        Kind::Message(text) if *text == not_an_address() => {
            format!("{setting} must be an IP address and a port, such as 127.0.0.1:9464")
        }
        kind => format!("{setting}: {kind}").trim_end().to_owned(),
    }
}

/// A setting, named as where it was set: `TROMMEL_SINK__PART_ROWS`, or `trommel.toml:
/// sink.part-rows`.
fn named(error: &Error) -> String {
    let setting = error.path.join(".");
    let Some(metadata) = &error.metadata else {
        return setting;
    };
    if metadata.name.contains("environment variable") {
        let name = setting.replace('.', "__").replace('-', "_");
        return format!("{ENV_PREFIX}{}", name.to_uppercase());
    }
    match metadata
        .source
        .as_ref()
        .and_then(|source| source.file_path())
    {
        Some(file) if setting.is_empty() => file.display().to_string(),
        Some(file) => format!("{}: {setting}", file.display()),
        None => setting,
    }
}

/// The valid values of a setting, from its type.
fn wanted(expected: &str) -> &str {
    match expected {
        "a duration" => "a time with its unit, such as 30s or 5m",
        "a boolean" => "true or false",
        "a string" => "a string in quotes",
        "a sequence" => "a list in brackets",
        "f32" | "f64" => "a number",
        nonzero if nonzero.starts_with("a nonzero ") => "a whole number of at least 1",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number of at least 0",
        other => other,
    }
}

fn shown(actual: &Actual) -> String {
    match actual {
        Actual::Bool(value) => value.to_string(),
        Actual::Unsigned(value) => value.to_string(),
        Actual::Signed(value) => value.to_string(),
        Actual::Float(value) => value.to_string(),
        Actual::Str(text) => format!("{text:?}"),
        Actual::Seq => "a list".to_owned(),
        Actual::Map => "a table".to_owned(),
        other => other.to_string(),
    }
}

/// The standard library's message for an invalid address.
fn not_an_address() -> String {
    let refused = "".parse::<SocketAddr>();
    refused.map_or_else(|error| error.to_string(), |address| address.to_string())
}

#[cfg(test)]
mod tests {
    use figment::Figment;
    use figment::providers::{Format, Serialized, Toml};

    use super::*;
    use crate::config::Config;

    #[track_caller]
    fn assert_says(text: &str, words: &str) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("own.toml");
        std::fs::write(&file, text).unwrap();
        let figment = Figment::from(Serialized::defaults(Config::default()));
        let read = figment.merge(Toml::file_exact(&file)).extract::<Config>();
        let said = said(&read.unwrap_err());
        assert!(
            said.contains("own.toml: ") && said.contains(words),
            "{said}"
        );
    }

    #[test]
    fn a_wrong_setting_is_answered_with_its_name_and_the_remedy() {
        for (text, words) in [
            (
                "[sink]\npart-rows = 0",
                "own.toml: sink.part-rows must be a whole number of at least 1, but is 0",
            ),
            ("memory-budget = -3", "at least 1, but is -3"),
            (
                "[sink]\npart-rows = \"many\"",
                "at least 1, but is \"many\"",
            ),
            ("[sink]\npart_rows = 5", "sink.part_rows: unknown setting"),
            ("[sunk]\na = 5", "known are memory-budget, broker"),
            (
                "[preprocess]\nfetch-timeout = 10",
                "must be a time with its unit, such as 30s or 5m, but is 10",
            ),
            (
                "[preprocess]\nreference = \"pil\"",
                "must be one of auto, pillow, torchvision, but is \"pil\"",
            ),
            ("[serve]\nlisten = \"here\"", "must be an IP address"),
            ("[s3]\nanonymous = 1", "must be true or false, but is 1"),
        ] {
            assert_says(text, words);
        }
    }

    #[test]
    fn a_file_that_is_no_toml_is_named_first() {
        assert_says("[sink", "line 1, column 6");
    }
}
