use std::fmt::Write;

/// Writes any name as one token that a subject, a durable name and a key may hold.
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
}
