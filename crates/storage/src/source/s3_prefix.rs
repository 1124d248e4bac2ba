//! The objects under a prefix of an S3 bucket.

use std::ffi::OsStr;

use trommel_types::Content;

use crate::s3::{self, Location, Object, Page, S3};
use crate::source::listing::{Listing, Stop, Visitor};
use crate::source::{Found, SourceOptions};
use crate::{StorageError, StorageErrorKind};

/// Suffixes of lists and archives, so that such an object is not taken for an image.
const NOT_READ: [&str; 7] = ["txt", "csv", "tsv", "jsonl", "ndjson", "parquet", "tar"];

/// All objects whose keys begin with a prefix, in the order of the keys' bytes.
pub(super) struct S3Prefix {
    s3: S3,
    prefix: Location,
}

impl S3Prefix {
    /// # Errors
    /// When the bucket is not there or may not be listed, no key begins like that, or it is a list.
    pub(super) fn open(spec: &str, options: &SourceOptions) -> Result<Self, StorageError> {
        let prefix = Location::parse(spec).ok_or_else(|| {
            StorageError::invalid_source(format!("source {spec}: expected s3://bucket/prefix"))
        })?;
        let listing = Self {
            s3: S3::new(&options.s3),
            prefix,
        };
        let first = s3::wait(listing.s3.list(&listing.prefix, None, None))?;
        if first.objects.is_empty() {
            return Err(StorageError::invalid_source(format!(
                "source {spec}: no key in the bucket begins like that; check its spelling"
            )));
        }
        let suffix = spec.rsplit_once('.').map_or("", |(_, suffix)| suffix);
        if first.objects[0].key == listing.prefix.key && NOT_READ.contains(&suffix) {
            return Err(StorageError::invalid_source(format!(
                "source {spec}: lists and archives are read from files only; copy it here first"
            )));
        }
        Ok(listing)
    }

    async fn page(
        s3: S3,
        prefix: Location,
        after: Option<String>,
        page: Option<String>,
    ) -> Result<Page, StorageError> {
        s3.list(&prefix, after, page).await
    }

    fn list_behind(
        &self,
        after: Option<String>,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let page = |after, token| {
            let (s3, prefix) = (self.s3.clone(), self.prefix.clone());
            s3::start(Self::page(s3, prefix, after, token))
        };
        let mut next = Some(page(after, None));
        while let Some(pending) = next.take() {
            visitor.waiting()?;
            let Page {
                objects,
                next: token,
            } = pending.wait()?;
            // Asked for before this page is handed on, so that it is there when that is done.
            next = token.map(|token| page(None, Some(token)));
            for object in objects {
                self.hand_on(object, options, visitor)?;
            }
        }
        Ok(())
    }

    fn hand_on(
        &self,
        object: Object,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        // Consoles write an empty object to show a folder.
        if object.key.ends_with('/') && object.size == 0 {
            return Ok(());
        }
        // A key that was named in full is taken whatever it is called.
        if object.key != self.prefix.key && !options.takes_suffix(OsStr::new(&object.key)) {
            return visitor.skipped();
        }
        visitor.found(Found {
            uri: self.prefix.with_key(object.key).uri(),
            content: Content::Whole,
            etag: object.etag,
            size: Some(object.size),
            columns: Vec::new(),
        })
    }
}

impl Listing for S3Prefix {
    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        self.list_behind(None, options, visitor)
    }

    fn can_go_on(&self) -> bool {
        true
    }

    fn list_from(
        &self,
        last_uri: &str,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let last = Location::parse(last_uri).filter(|last| {
            last.bucket == self.prefix.bucket && last.key.starts_with(&self.prefix.key)
        });
        match last {
            Some(last) => self.list_behind(Some(last.key), options, visitor),
            None => Err(Stop::Failed(StorageError::new(
                StorageErrorKind::SourceChanged,
                format!(
                    "{last_uri} was listed last but is not in {}",
                    self.prefix.uri()
                ),
            ))),
        }
    }
}
