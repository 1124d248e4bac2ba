use std::io::{self, Read};
use std::sync::{Mutex, PoisonError};

use trommel_storage::StorageError;

use crate::SourceOptions;
use crate::lines::Lines;
use crate::listing::{Listing, Stop, Visitor};
use crate::manifest::{Entries, Manifest};
use crate::stored::Stored;

/// One uri per line, or separated by zero bytes; empty lines are skipped.
pub(super) struct LineManifest {
    manifest: Manifest,
    /// A reader to use once in place of the manifest's file.
    once: Option<Mutex<Option<Reader>>>,
}

type Reader = Box<dyn Read + Send>;

impl LineManifest {
    /// # Errors
    /// If the file cannot be read, or one of its first lines is invalid.
    pub(super) fn open(stored: &Stored, options: &SourceOptions) -> Result<Self, StorageError> {
        let manifest = Self {
            manifest: Manifest::new(stored, Entries::Lines),
            once: None,
        };
        manifest.manifest.probe(&manifest, options)?;
        Ok(manifest)
    }

    /// Lists standard input, once.
    pub(super) fn standard_input() -> Self {
        Self::once(Box::new(io::stdin()))
    }

    /// Lists the entries of a reader, once.
    pub(super) fn once(reader: Reader) -> Self {
        Self {
            manifest: Manifest::standard_input(),
            once: Some(Mutex::new(Some(reader))),
        }
    }

    fn reader(&self) -> Result<Reader, StorageError> {
        let Some(once) = &self.once else {
            return self.manifest.open();
        };
        let reader = once.lock().unwrap_or_else(PoisonError::into_inner).take();
        reader.ok_or_else(|| self.manifest.invalid("it can be listed only once"))
    }
}

impl Listing for LineManifest {
    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        let mut lines = Lines::of_names(self.reader()?, options.max_record_bytes);
        loop {
            // If a program writes one name per minute, it gets one row per minute.
            if self.once.is_some() && lines.may_wait() {
                visitor.waiting()?;
            }
            match lines.next() {
                Ok(None) => return Ok(()),
                Ok(Some(line)) => {
                    let line = line.to_vec();
                    let number = lines.number();
                    self.manifest
                        .take(number, &line, Vec::new(), options, visitor)?;
                }
                Err(error) => return Err(self.manifest.unread(lines.number(), error).into()),
            }
        }
    }
}
