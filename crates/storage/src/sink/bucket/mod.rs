//! Rows as parts in an S3 bucket.

mod bucket_sink;
mod claims;
mod records;
mod takeover;

use std::fmt;
use std::path::PathBuf;

use bytes::Bytes;

pub use bucket_sink::BucketSink;
pub use claims::{Claim, Claims};

use crate::background;
use crate::s3::{Location, Object, S3};
use crate::sink::Format;
use crate::{S3Config, StorageError, StorageErrorKind};

/// A prefix of an S3 bucket that parts go to.
#[derive(Clone)]
pub struct BucketDestination {
    prefix: Location,
    format: Format,
    s3: S3,
}

impl fmt::Debug for BucketDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix.uri())
    }
}

impl fmt::Display for BucketDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix.uri())
    }
}

impl BucketDestination {
    /// Reads `s3://bucket/prefix/`; `None` for what is in no bucket. Parts are written in
    /// `part_format`, unless another one follows, as in `s3://bucket/prefix/?format=jsonl`.
    ///
    /// # Errors
    /// [`InvalidDestination`](StorageErrorKind::InvalidDestination) for a single object: only a
    /// file system can put the parts together at the end.
    pub fn parse(
        text: &str,
        part_format: Format,
        config: &S3Config,
    ) -> Result<Option<Self>, StorageError> {
        let invalid = |reason: &str| {
            let message = format!("output {text}: {reason}");
            StorageError::new(StorageErrorKind::InvalidDestination, message)
        };
        if !text.starts_with("s3://") {
            return Ok(None);
        }
        let (text, format) = match text.rsplit_once("?format=") {
            None => (text, part_format),
            Some((text, name)) => {
                let format = Format::of_path(format!("x.{name}").as_ref())
                    .ok_or_else(|| invalid("has an unknown format; use parquet, jsonl or csv"))?;
                (text, format)
            }
        };
        let place = Location::parse(text).ok_or_else(|| invalid("expected s3://bucket/prefix/"))?;
        if !place.key.is_empty() && !place.key.ends_with('/') {
            return Err(invalid(
                "an output in s3 is a folder of parts; end its name with /",
            ));
        }
        Ok(Some(Self {
            prefix: place,
            format,
            s3: S3::new(config),
        }))
    }

    pub(super) fn object(&self, name: &str) -> Location {
        self.prefix.with_key(format!("{}{name}", self.prefix.key))
    }

    /// The name that messages give an object.
    pub(super) fn shown(&self, name: &str) -> PathBuf {
        self.object(name).uri().into()
    }

    pub(super) fn read(&self, name: &str) -> Result<Option<Bytes>, StorageError> {
        match background::wait(self.s3.get(&self.object(name), None, u64::MAX)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == StorageErrorKind::NotFound => {
                // A missing bucket is another matter.
                background::wait(self.s3.list(&self.object(name), None, None))?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    pub(super) fn write(
        &self,
        name: &str,
        content: Bytes,
        only_if_absent: bool,
    ) -> Result<(), StorageError> {
        background::wait(self.s3.put(&self.object(name), content, only_if_absent))
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), StorageError> {
        background::wait(self.s3.remove(&self.object(name)))
    }

    /// The objects under the prefix, by their names behind it.
    pub(super) fn objects(&self) -> Result<Vec<Object>, StorageError> {
        background::wait(async {
            let (mut objects, mut token) = (Vec::new(), None);
            loop {
                let page = self.s3.list(&self.prefix, None, token).await?;
                objects.extend(page.objects.into_iter().map(|object| Object {
                    key: object.key[self.prefix.key.len()..].to_owned(),
                    ..object
                }));
                token = page.next;
                if token.is_none() {
                    return Ok(objects);
                }
            }
        })
    }

    /// Whether the store refuses to write an object that is there, when it is asked to. Some accept
    /// the question and ignore it.
    pub(super) fn honours_preconditions(&self) -> Result<bool, StorageError> {
        // Names of their own, so that two probes at once do not take each other for an answer.
        let name = format!("_probe-{:016x}", rand::random::<u64>());
        let probe = || self.write(&name, Bytes::from_static(b"probe"), true);
        let again = match probe() {
            Ok(()) => probe(),
            // Its answer was lost and the client asked again: nobody else knows the name.
            first => first,
        };
        self.remove(&name)?;
        match again {
            Ok(()) => Ok(false),
            Err(error) if error.kind() == StorageErrorKind::LostRace => Ok(true),
            Err(error) => Err(error),
        }
    }
}
