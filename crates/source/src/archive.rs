//! Tar and zip archives and WebDataset shards.

use trommel_storage::StorageError;
use trommel_types::{Column, ColumnKind, Scalar};

use crate::listing::{Listing, Stop, Visitor};
use crate::member::{At, Member, SIBLING_LIMIT, SIBLINGS, sibling_text};
use crate::options::name_others;
use crate::packed::{Archived, archived};
use crate::stored::Stored;
use crate::zip_member::ZipMember;
use crate::{Found, SourceOptions};
use crate::{tar_members, zip_members};

/// Members examined to learn which siblings there are.
const LOOKED_AT: usize = 1000;
/// Most members per sample, to bound the names and siblings in memory: names such as
/// `frame.0001.jpg` make a whole archive look like one sample.
const SAMPLE_MEMBERS: usize = 64;

/// A tar archive, compressed or not, or a zip archive. Adjacent members whose names are equal up to
/// the first dot of the base name are one WebDataset sample: its `.json`, `.cls` and `.txt` become
/// columns of its image. If a sample has more than 64 members, each image only gets the siblings
/// before it.
///
/// Names that are not UTF-8 are percent-encoded. Links and sparse members have no content of their
/// own: such an image is listed and fails as empty; an encrypted one is listed and fails.
pub(super) struct Archive {
    stored: Stored,
    format: Archived,
    columns: Vec<Column>,
}

impl Archive {
    /// # Errors
    /// If the file cannot be read, is not a supported archive, or has no images.
    pub(super) fn open(stored: &Stored, options: &SourceOptions) -> Result<Self, StorageError> {
        let format = archived(stored)?;
        let mut found = [false; SIBLINGS.len()];
        let mut images = 0;
        let mut looked_at = 0;
        let ended = for_each_member(stored, format, &mut |member| {
            if let Some(sibling) = member.sibling() {
                found[sibling] = true;
            }
            images += usize::from(options.takes_member(&member.name));
            looked_at += 1;
            // After the first members, only a first image is still needed.
            if looked_at >= LOOKED_AT && images > 0 {
                return Err(Stop::Unwanted);
            }
            Ok(())
        });
        if let Err(Stop::Failed(error)) = ended {
            return Err(error);
        }
        if images == 0 {
            return Err(StorageError::invalid_source(format!(
                "source {stored} contains no images (judged by suffix); {}",
                name_others()
            )));
        }
        let present = SIBLINGS.iter().zip(found).filter(|(_, found)| *found);
        let columns = present
            .map(|(name, _)| Column {
                name: (*name).to_owned(),
                kind: ColumnKind::String,
            })
            .collect();
        Ok(Self {
            stored: stored.clone(),
            format,
            columns,
        })
    }
}

impl Listing for Archive {
    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        let container = Container {
            uri: self.stored.uri(),
            etag: self.stored.version(),
            columns: &self.columns,
        };
        let mut sample = Sample::default();
        let (mut warned, mut warned_of_size) = (false, false);
        for_each_member(&self.stored, self.format, &mut |mut member| {
            if member.key() != sample.key {
                let next = Sample {
                    key: member.key().to_owned(),
                    ..Sample::default()
                };
                std::mem::replace(&mut sample, next).hand_on(&container, visitor)?;
            }
            sample.members += 1;
            if sample.members == SAMPLE_MEMBERS + 1 && !warned_of_size {
                tracing::warn!(
                    archive = container.uri,
                    sample = sample.key,
                    "more than 64 members in a row have the same name before their first dot, which is no sample; their .json, .cls and .txt are given only to images behind them"
                );
                warned_of_size = true;
            }
            if options.takes_member(&member.name) {
                sample.images.push(member);
                if sample.members > SAMPLE_MEMBERS {
                    sample.hand_on_images(&container, visitor)?;
                }
            } else if let Some(sibling) = member.sibling() {
                let unknown = !self
                    .columns
                    .iter()
                    .any(|column| column.name == SIBLINGS[sibling]);
                if (unknown || member.text.is_none()) && !warned {
                    tracing::warn!(
                        archive = container.uri,
                        member = member.name,
                        "left out a member that is too long, or first of its kind far into the archive"
                    );
                    warned = true;
                }
                sample.siblings[sibling] = member.text.take();
            } else {
                visitor.skipped()?;
            }
            Ok(())
        })?;
        sample.hand_on(&container, visitor)
    }
}

/// What the members of an archive have in common.
struct Container<'a> {
    uri: String,
    etag: Option<String>,
    columns: &'a [Column],
}

/// The adjacent members with one key.
#[derive(Default)]
struct Sample {
    key: String,
    members: usize,
    images: Vec<Member>,
    siblings: [Option<String>; SIBLINGS.len()],
}

impl Sample {
    fn hand_on(mut self, container: &Container<'_>, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        self.hand_on_images(container, visitor)
    }

    /// Passes on the images so far, with the siblings so far.
    fn hand_on_images(
        &mut self,
        container: &Container<'_>,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        for image in std::mem::take(&mut self.images) {
            let columns = container.columns.iter().map(|column| {
                let sibling = SIBLINGS.iter().position(|name| *name == column.name);
                let text = sibling.and_then(|sibling| self.siblings[sibling].clone());
                text.map_or(Scalar::Null, Scalar::String)
            });
            visitor.found(Found {
                uri: format!("{}#{}", container.uri, image.name),
                content: image.content(&container.uri),
                etag: container.etag.clone(),
                size: Some(image.length),
                columns: columns.collect(),
            })?;
        }
        Ok(())
    }
}

/// Walks over the members of an archive; only the content of siblings is read.
fn for_each_member(
    stored: &Stored,
    format: Archived,
    each: &mut dyn FnMut(Member) -> Result<(), Stop>,
) -> Result<(), Stop> {
    match format {
        Archived::Tar => tar_members::for_each_member(stored, None, each),
        Archived::Packed(packing) => tar_members::for_each_member(stored, Some(packing), each),
        Archived::Zip => zip_members::for_each_entry(stored, &mut |entry| {
            let mut member = Member {
                name: entry.name.clone(),
                length: entry.size,
                at: At::Zip(entry),
                text: None,
            };
            if member.sibling().is_some() && member.length <= SIBLING_LIMIT {
                member.text = zip_text(stored, &member)?;
            }
            each(member)
        }),
    }
}

/// The content of a sibling in a zip; `None` if it cannot be unpacked.
fn zip_text(stored: &Stored, member: &Member) -> Result<Option<String>, StorageError> {
    let (uri, content) = (&member.name, member.content(""));
    let Ok(Some(packed)) = ZipMember::of(uri, &content, SIBLING_LIMIT) else {
        return Ok(None);
    };
    let (offset, length) = packed.first_range();
    let mut bytes = stored.read_at(offset, length as usize)?.to_vec();
    let Ok(rest) = packed.rest(uri, &bytes) else {
        return Ok(None);
    };
    if let Some((offset, length)) = rest {
        bytes.extend_from_slice(&stored.read_at(offset, length as usize)?);
    }
    Ok(packed
        .unpack(uri, &bytes)
        .ok()
        .map(|bytes| sibling_text(&bytes)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use tar::{Builder, Header};

    use super::*;

    /// Stops at the first image.
    #[derive(Default)]
    struct First {
        passed: usize,
    }

    impl Visitor for First {
        fn found(&mut self, _: Found) -> Result<(), Stop> {
            Err(Stop::Unwanted)
        }

        fn skipped(&mut self) -> Result<(), Stop> {
            self.passed += 1;
            Ok(())
        }
    }

    /// R31: archives with endless names must not fill memory.
    #[test]
    fn images_are_handed_on_before_the_names_change() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("frames.tar");
        let mut archive = Builder::new(File::create(&path).unwrap());
        for number in 0..1000 {
            for suffix in ["jpg", "bin"] {
                let mut header = Header::new_ustar();
                header.set_size(0);
                let name = format!("frame.{number:04}.{suffix}");
                archive.append_data(&mut header, name, &b""[..]).unwrap();
            }
        }
        archive.into_inner().unwrap();
        let options = SourceOptions::default();
        let archive = Archive::open(&(*path).into(), &options).unwrap();
        let mut first = First::default();
        let stopped = archive.list(&options, &mut first);
        assert!(matches!(stopped, Err(Stop::Unwanted)));
        assert_eq!(first.passed, SAMPLE_MEMBERS / 2);
    }
}
