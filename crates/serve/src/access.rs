use std::fmt;
use std::path::Path;

use subtle::ConstantTimeEq;

use crate::ServeError;
use crate::refused::Refused;

/// The token that requests must send as `Authorization: Bearer TOKEN`.
#[derive(Clone)]
pub struct Token(Box<[u8]>);

impl Token {
    /// The content of a file, trimmed.
    ///
    /// # Errors
    /// If it cannot be read, or is empty.
    pub fn read(path: &Path) -> Result<Self, ServeError> {
        let failed = |reason: String| ServeError::Token {
            path: path.to_owned(),
            reason,
        };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        Self::new(&text).ok_or_else(|| failed("it is empty; write the token into it".to_owned()))
    }

    /// This text, trimmed; `None` if it is empty.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.as_bytes().into()))
    }

    /// Refuses a request without the token, in constant time.
    pub(crate) fn check(&self, authorization: Option<&[u8]>) -> Result<(), Refused> {
        let brought = authorization.and_then(|value| {
            let (scheme, token) = value.split_at_checked("Bearer ".len())?;
            scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
        });
        match brought {
            Some(token) if bool::from(token.ct_eq(&self.0)) => Ok(()),
            _ => Err(Refused::unauthorized()),
        }
    }
}

/// Without the token.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_opens() {
        let token = Token::new(" s3cret\n").unwrap();
        assert!(token.check(Some(b"Bearer s3cret")).is_ok());
        assert!(token.check(Some(b"bearer s3cret")).is_ok());
        for wrong in [
            None,
            Some(&b""[..]),
            Some(b"s3cret"),
            Some(b"Bearer "),
            Some(b"Bearer s3cre"),
            Some(b"Bearer s3cret2"),
            Some(b"Basic s3cret"),
        ] {
            assert!(token.check(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(format!("{token:?}"), "Token(***)");
    }

    #[test]
    fn an_empty_file_is_no_token() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        assert!(Token::read(&file).is_err());
        std::fs::write(&file, " \n").unwrap();
        let error = Token::read(&file).unwrap_err().to_string();
        assert!(error.contains("empty") && error.contains("token-file"));
        std::fs::write(&file, "abc\n").unwrap();
        let token = Token::read(&file).unwrap();
        assert!(token.check(Some(b"Bearer abc")).is_ok());
    }
}
