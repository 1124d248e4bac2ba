//! Cached embeddings of labels, one file per tower and set of labels.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::towers::Scaling;

/// Magic bytes of a file; they are followed by the SHA-256 of the rest, scale and bias, and the
/// embeddings, all numbers as little-endian `f32`.
const BEGINNING: &[u8] = b"trommel labels 1\n";
const HASH: usize = 32;

/// The embeddings of labels.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LabelEmbeddings {
    /// How to compare images with them.
    pub(crate) scaling: Scaling,
    /// `f32[labels, width]`, each of length 1.
    pub(crate) vectors: Vec<f32>,
}

/// The location of a set's embeddings in the cache.
pub(crate) struct KeptLabels(PathBuf);

impl KeptLabels {
    /// In this cache, under a key of everything that the embeddings depend on.
    pub(crate) fn new(cache: &Path, key: &str) -> Self {
        Self(cache.join("labels").join(format!("{key}.bin")))
    }

    /// The embeddings of `labels` labels, if cached. A damaged file is ignored with a warning.
    pub(crate) fn recall(&self, labels: usize) -> Option<LabelEmbeddings> {
        let Self(path) = self;
        let read = match fs::read(path) {
            Ok(bytes) => parse(&bytes, labels),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => Err(format!("cannot be read: {error}")),
        };
        match read {
            Ok(found) => {
                tracing::info!(labels, file = %path.display(), "taking the embeddings of labels from the cache");
                Some(found)
            }
            Err(why) => {
                tracing::warn!(
                    "{} {why}; the embeddings of the labels are computed again",
                    path.display()
                );
                None
            }
        }
    }

    /// Saves them, if the folder can be written.
    pub(crate) fn keep(&self, embeddings: &LabelEmbeddings) {
        let Self(path) = self;
        if let Err(error) = self.write(embeddings) {
            tracing::info!(%error, file = %path.display(), "the embeddings of labels will be computed again");
        }
    }

    /// Writes the file atomically.
    fn write(&self, embeddings: &LabelEmbeddings) -> io::Result<()> {
        let Self(path) = self;
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        let mut new = tempfile::NamedTempFile::new_in(folder)?;
        new.write_all(&encode(embeddings))?;
        new.persist(path)?;
        Ok(())
    }
}

fn encode(embeddings: &LabelEmbeddings) -> Vec<u8> {
    let Scaling { scale, bias } = embeddings.scaling;
    let numbers = [scale, bias];
    let numbers = numbers.iter().chain(&embeddings.vectors);
    let numbers: Vec<u8> = numbers.flat_map(|number| number.to_le_bytes()).collect();
    [BEGINNING, &Sha256::digest(&numbers), &numbers].concat()
}

fn parse(bytes: &[u8], labels: usize) -> Result<LabelEmbeddings, String> {
    let content = bytes.strip_prefix(BEGINNING);
    let (hash, numbers) = content
        .and_then(|content| content.split_at_checked(HASH))
        .ok_or("does not hold embeddings of labels")?;
    if *Sha256::digest(numbers) != *hash {
        return Err("is damaged: its content is not that of its hash".to_owned());
    }
    let numbers = numbers.chunks_exact(size_of::<f32>());
    let numbers: Vec<f32> = numbers
        .filter_map(|number| number.try_into().ok().map(f32::from_le_bytes))
        .collect();
    match &*numbers {
        [scale, bias, vectors @ ..] if !vectors.is_empty() && vectors.len() % labels == 0 => {
            Ok(LabelEmbeddings {
                scaling: Scaling {
                    scale: *scale,
                    bias: *bias,
                },
                vectors: vectors.to_vec(),
            })
        }
        _ => Err(format!("does not hold the embeddings of {labels} labels")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_found_again_and_damage_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let kept = KeptLabels::new(folder.path(), "abc");
        assert_eq!(kept.recall(2), None);
        let embeddings = LabelEmbeddings {
            scaling: Scaling {
                scale: 20.0,
                bias: -3.5,
            },
            vectors: vec![1.0, 0.0, 0.0, 0.6, 0.8, 0.0],
        };
        kept.keep(&embeddings);
        assert_eq!(kept.recall(2), Some(embeddings.clone()));
        assert_eq!(kept.recall(4), None);

        let whole = encode(&embeddings);
        for length in 0..whole.len() {
            assert!(parse(&whole[..length], 2).is_err(), "{length}");
        }
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 1;
            assert!(parse(&damaged, 2).is_err(), "{place}");
        }
        let files = folder.path().join("labels").read_dir().unwrap();
        assert_eq!(files.count(), 1, "nothing else is left");
    }
}
