//! Decides by their keys which objects of a bucket are images.

use std::ffi::OsStr;

use trommel_storage::{StorageError, StorageErrorKind, s3::Object};
use trommel_types::Content;

use crate::listing::{Listing, Stop, Visitor, probe};
use crate::options::is_clutter;
use crate::pattern::Pattern;
use crate::{Found, SourceOptions};

/// All keys with a prefix, or those of them that match a pattern.
pub(super) struct Keys {
    /// Their common prefix.
    pub(super) prefix: String,
    matching: Option<Matching>,
}

/// A pattern of keys.
struct Matching {
    /// The part of a key before the pattern.
    folder: String,
    pattern: Pattern,
}

impl Keys {
    /// All keys with this prefix.
    fn below(prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
            matching: None,
        }
    }

    /// Treats the key as a pattern, and the part before its first wildcard as the prefix.
    fn matching(spec: &str, key: &str) -> Result<Self, StorageError> {
        let (folder, pattern) = Pattern::parse(key)
            .map_err(|reason| StorageError::invalid_source(format!("source {spec}: {reason}")))?;
        let folder = folder.to_string_lossy().into_owned();
        Ok(Self {
            prefix: Pattern::before(key).to_owned(),
            matching: Some(Matching { folder, pattern }),
        })
    }

    /// Whether an object is selected by its key; `None` if the pattern does not match it.
    fn takes(&self, key: &str, options: &SourceOptions) -> Option<bool> {
        let Some(Matching { folder, pattern }) = &self.matching else {
            // A key given in full is selected whatever its suffix.
            let is_named = key == self.prefix;
            let start = self.prefix.rfind('/').map_or(0, |slash| slash + 1);
            let below = key.get(start..).unwrap_or(key);
            return Some(is_named || options.takes_member(below));
        };
        let below = key.strip_prefix(folder.as_str())?;
        let is_hidden = is_clutter(below) && !pattern.names_hidden();
        let by_suffix = options.suffixes.is_some() || !pattern.names_suffix();
        let taken = !by_suffix || options.takes_suffix(OsStr::new(key));
        pattern.matches(below).then_some(taken && !is_hidden)
    }

    /// Passes on an object, whose uri is `uri` of its key, if it is an image.
    pub(super) fn hand_on(
        &self,
        object: Object,
        uri: impl FnOnce(String) -> String,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        // Consoles create an empty object to represent a folder.
        if object.key.ends_with('/') && object.size == 0 {
            return Ok(());
        }
        match self.takes(&object.key, options) {
            None => return Ok(()),
            Some(false) => return visitor.skipped(),
            Some(true) => {}
        }
        visitor.found(Found {
            uri: uri(object.key),
            content: Content::Whole,
            etag: object.etag,
            size: Some(object.size),
            columns: Vec::new(),
        })
    }
}

/// The listing for the key in a spec: the keys with this prefix, if there are `any`, else those
/// that match it as a pattern.
///
/// # Errors
/// If no key has the prefix or matches.
pub(super) fn open<L: Listing + 'static>(
    spec: &str,
    key: &str,
    any: bool,
    options: &SourceOptions,
    listing: impl FnOnce(Keys) -> L,
) -> Result<Box<dyn Listing>, StorageError> {
    if any {
        return Ok(Box::new(listing(Keys::below(key))));
    }
    let is_pattern = Pattern::is_pattern(spec);
    if is_pattern {
        let listing = listing(Keys::matching(spec, key)?);
        if probe(&listing, options, 1)? > 0 {
            return Ok(Box::new(listing));
        }
    }
    Err(StorageError::invalid_source(format!(
        "source {spec}: no key in the bucket has this prefix{}; check its spelling",
        match is_pattern {
            true => " or matches as an image",
            false => "",
        }
    )))
}

/// The uris of all objects that match a pattern, regardless of suffix.
///
/// # Errors
/// If nothing is found, or the listing fails.
pub(super) fn matches<L: Listing>(
    spec: &str,
    key: &str,
    listing: impl FnOnce(Keys) -> L,
) -> Result<Vec<String>, StorageError> {
    let all = SourceOptions {
        suffixes: Some(vec!["*".to_owned()]),
        ..SourceOptions::default()
    };
    let mut uris = Uris(Vec::new());
    let listing = listing(Keys::matching(spec, key)?);
    if let Err(Stop::Failed(error)) = listing.list(&all, &mut uris) {
        return Err(error);
    }
    match uris.0.is_empty() {
        false => Ok(uris.0),
        true => Err(StorageError::invalid_source(format!(
            "source {spec}: no key in the bucket matches; check its spelling"
        ))),
    }
}

/// Ends the listing: the last listed image no longer exists.
pub(super) fn moved(last_uri: &str, prefix: &str) -> Stop {
    Stop::Failed(StorageError::new(
        StorageErrorKind::SourceChanged,
        format!("{last_uri} was listed last but is not in {prefix}"),
    ))
}

/// Collects the uris of all objects.
struct Uris(Vec<String>);

impl Visitor for Uris {
    fn found(&mut self, found: Found) -> Result<(), Stop> {
        self.0.push(found.uri);
        Ok(())
    }

    fn skipped(&mut self) -> Result<(), Stop> {
        Ok(())
    }
}
