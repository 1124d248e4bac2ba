use std::fmt::Write;

/// Encodes any name as one token for subjects, durable names and keys.
///
/// ASCII letters, digits, `-` and `_` stay; every other byte becomes `=XX` in hexadecimal, and the
/// empty name becomes `=`. Different names give different tokens.
pub fn subject_token(name: &str) -> String {
    if name.is_empty() {
        return "=".to_owned();
    }
    let mut token = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_' {
            token.push(char::from(byte));
        } else {
            write!(token, "={byte:02X}").expect("writing into a string does not fail");
        }
    }
    token
}

/// Whether some subject matches both patterns.
pub(super) fn overlap(one: &str, other: &str) -> bool {
    let (mut one, mut other) = (one.split('.'), other.split('.'));
    loop {
        match (one.next(), other.next()) {
            (Some(">"), Some(_)) | (Some(_), Some(">")) | (None, None) => return true,
            (Some(a), Some(b)) if a == b || a == "*" || b == "*" => {}
            _ => return false,
        }
    }
}

/// Whether `wide` matches every subject that `narrow` matches.
pub(super) fn covers(wide: &str, narrow: &str) -> bool {
    let (mut wide, mut narrow) = (wide.split('.'), narrow.split('.'));
    loop {
        match (wide.next(), narrow.next()) {
            (Some(">"), Some(_)) | (None, None) => return true,
            (Some("*"), Some(token)) if token != ">" => {}
            (Some(a), Some(b)) if a == b => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn names_become_tokens_and_stay_apart() {
        assert_eq!(subject_token("resnet-50_v2"), "resnet-50_v2");
        assert_eq!(subject_token("a.b c"), "a=2Eb=20c");
        let names = [
            "", "=", "a.b", "a=2Eb", "a b", "a/b", "a*", "a>", "ä", "a\n", "A.B",
        ];
        let mut seen = HashMap::new();
        for name in names {
            let token = subject_token(name);
            assert!(!token.is_empty() && token.is_ascii(), "{name:?}");
            assert!(!token.contains(['.', '*', '>', ' ', '/', '\n']), "{token}");
            assert_eq!(seen.insert(token, name), None, "{name:?}");
        }
    }

    #[test]
    fn patterns_overlap_and_cover() {
        let table = [
            ("trommel.>", "trommel.api.>", true, true),
            ("trommel.>", ">", true, false),
            ("trommel.>", "*.created", true, false),
            ("trommel.>", "*", false, false),
            ("trommel.>", "trommel", false, false),
            ("trommel.>", "events.>", false, false),
            ("events.*", "events.>", true, false),
            ("events.*", "events.a", true, true),
            ("events.a", "events.*", true, false),
            ("a.*.c", "*.b.*", true, false),
            ("a.b", "a.b.c", false, false),
            (">", "a.*", true, true),
        ];
        for (wide, narrow, overlaps, covered) in table {
            assert_eq!(overlap(wide, narrow), overlaps, "{wide} {narrow}");
            assert_eq!(overlap(narrow, wide), overlaps, "{narrow} {wide}");
            assert_eq!(covers(wide, narrow), covered, "{wide} {narrow}");
        }
    }
}
