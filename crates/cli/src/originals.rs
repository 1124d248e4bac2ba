//! Finds the images of rows.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use trommel_source::{Source, fetcher};
use trommel_storage::uri::{file_url, remote_scheme, to_path};
use trommel_types::{Content, ImageRef, JobOptions, Lane};

use crate::config::Config;
use crate::results::Results;

/// Rows checked to find the base of relative paths.
const LOOKED_AT: usize = 20;

/// Reads the images of results.
pub(crate) struct Originals {
    /// The base of relative paths.
    root: PathBuf,
    source: Arc<dyn Source>,
}

impl Originals {
    /// Finds the base of relative paths: `named`, else the first of the current folder, the folder
    /// of the results and its parents that contains one of the first images.
    ///
    /// # Errors
    /// If the results cannot be read, or `named` is not a folder.
    pub(crate) fn of(results: &Results, named: Option<&Path>, config: &Config) -> Result<Self> {
        let options = config.source_options(&JobOptions::default());
        let root = match named {
            Some(root) if root.is_dir() => root.to_owned(),
            Some(root) => bail!("--root {} does not exist", root.display()),
            None => found_root(results)?,
        };
        Ok(Self {
            root: std::path::absolute(&root)
                .with_context(|| format!("{} has no absolute path", root.display()))?,
            source: fetcher(&options),
        })
    }

    /// The file of an image, as an absolute path; `None` if it is remote or in an archive.
    pub(crate) fn file(&self, uri: &str) -> Option<PathBuf> {
        let path = self.root.join(local(uri)?);
        // A file's own name may contain the separator of archive members.
        (path.is_file() || !uri.contains('#')).then_some(path)
    }

    /// A link that works from any page.
    pub(crate) fn link(&self, uri: &str) -> Option<String> {
        match remote_scheme(uri) {
            Some("http" | "https") => Some(uri.to_owned()),
            _ => self.file(uri).map(|path| file_url(&path)),
        }
    }

    /// The encoded bytes of an image, at most `limit` of them.
    ///
    /// # Errors
    /// Why the bytes cannot be read, as a sentence.
    pub(crate) async fn read(&self, uri: &str, limit: u64) -> Result<Bytes, String> {
        let file = self.file(uri);
        if file.is_none() && uri.contains('#') {
            return Err("it is inside an archive, a table or a video".to_owned());
        }
        let image = ImageRef {
            job: "results".into(),
            index: 0,
            lane: Lane::Normal,
            uri: file.map_or_else(|| uri.to_owned(), |path| file_url(&path)),
            content: Content::Whole,
            etag: None,
            size: None,
            columns: Vec::new(),
        };
        let bytes = self.source.fetch(&image, limit).await;
        bytes.map_err(|error| error.to_string())
    }
}

/// The local path of an image, or of its archive.
fn local(uri: &str) -> Option<PathBuf> {
    remote_scheme(uri).is_none().then(|| to_path(uri))
}

fn found_root(results: &Results) -> Result<PathBuf> {
    let mut relative = Vec::new();
    for row in results.rows()?.take(LOOKED_AT) {
        let uri = row?.uri;
        let path = local(&uri).filter(|path| path.is_relative());
        relative.extend(path);
    }
    let results = results.local().map(std::path::absolute).transpose();
    let results = results.context("the results have no absolute path")?;
    let above = results.iter().flat_map(|path| path.ancestors().skip(1));
    let mut places = std::iter::once(Path::new(".")).chain(above);
    let has_one = |place: &&Path| relative.iter().any(|path| place.join(path).exists());
    let found = places.find(has_one);
    Ok(found.unwrap_or(Path::new(".")).to_owned())
}
