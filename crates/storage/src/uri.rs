//! Paths as uris: UTF-8 paths stand for themselves, others are percent-encoded `file://` URLs.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};

const SCHEME: &str = "file://";
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'#').add(b'?');

/// The uri of a path, as it appears in rows: the path itself where that is text that no uri could
/// be mistaken for, else an absolute `file://` URL.
pub fn of_path(path: &Path) -> String {
    match path.to_str() {
        Some(text) if !text.starts_with(SCHEME) && remote_scheme(text).is_none() => text.to_owned(),
        _ => {
            // Fails only for an empty path, or without a current folder.
            let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
            file_url(&absolute)
        }
    }
}

/// The `file://` URL of an absolute path, whatever it is made of.
pub fn file_url(path: &Path) -> String {
    format!("{SCHEME}{}", encoded(path.as_os_str().as_bytes()))
}

/// The path of a uri.
pub fn to_path(uri: &str) -> PathBuf {
    let Some(encoded) = uri.strip_prefix(SCHEME) else {
        return PathBuf::from(uri);
    };
    let local = encoded
        .strip_prefix("localhost/")
        .map(|_| &encoded["localhost".len()..]);
    let bytes: Vec<u8> = percent_decode_str(local.unwrap_or(encoded)).collect();
    PathBuf::from(OsString::from_vec(bytes))
}

/// Bytes as text, percent-encoded where they are not UTF-8.
pub fn of_bytes(bytes: &[u8]) -> String {
    match str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => encoded(bytes),
    }
}

fn encoded(bytes: &[u8]) -> String {
    percent_encode(bytes, ENCODED).to_string()
}

/// The scheme of a uri that no local path has, such as `s3`.
pub fn remote_scheme(uri: &str) -> Option<&str> {
    let (scheme, _) = uri.split_once("://")?;
    let is_scheme = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    (is_scheme && scheme != "file").then_some(scheme)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_survives_its_uri() {
        for bytes in [
            &b"photos/cat.jpg"[..],
            b"a b%20#?.png",
            b"/x/caf\xe9 %#.jpg",
            b"/x/\xff\xfe",
        ] {
            let path = PathBuf::from(OsString::from_vec(bytes.to_vec()));
            assert_eq!(to_path(&of_path(&path)), path, "{}", of_path(&path));
        }
    }

    #[test]
    fn paths_that_need_a_url_get_an_absolute_one() {
        for bytes in [&b"caf\xe9.jpg"[..], b"file://cat.jpg", b"s3://cat.jpg"] {
            let path = PathBuf::from(OsString::from_vec(bytes.to_vec()));
            let uri = of_path(&path);
            assert!(uri.starts_with("file:///"), "{uri}");
            assert_eq!(to_path(&uri), std::path::absolute(&path).unwrap());
        }
    }

    #[test]
    fn urls_of_this_machine_are_paths() {
        for uri in ["file:///a/b%20c.jpg", "file://localhost/a/b%20c.jpg"] {
            assert_eq!(to_path(uri), Path::new("/a/b c.jpg"));
        }
    }

    #[test]
    fn only_schemes_that_are_not_local_are_remote() {
        assert_eq!(remote_scheme("s3://bucket/key"), Some("s3"));
        assert_eq!(remote_scheme("file:///a"), None);
        assert_eq!(remote_scheme("odd name://x"), None);
        assert_eq!(remote_scheme("a/b.jpg"), None);
    }
}
