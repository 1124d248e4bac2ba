use std::ffi::OsStr;
use std::path::Path;

use crate::S3Config;

/// Which images of a source are taken.
#[derive(Debug, Clone, Default)]
pub struct SourceOptions {
    /// File name suffixes that are taken, `*` for every file. `None` takes those of the formats
    /// read from folders, archives and patterns that name no suffix, and everything a manifest or
    /// the user names. Images in a Parquet column have no file names and are always taken.
    pub suffixes: Option<Vec<String>>,
    /// Smallest encoded size in bytes. Refused for images in a Parquet column, whose sizes are not
    /// known before they are read.
    pub min_size: Option<u64>,
    /// Largest encoded size in bytes; refused like `min_size`.
    pub max_size: Option<u64>,
    /// How many images are taken: those whose uris hash lowest, in listing order. Takes one whole
    /// listing before the first image, and memory for as many images.
    pub sample: Option<u64>,
    /// Another number chooses others.
    pub sample_seed: u64,
    /// The column of a manifest that holds uris.
    pub uri_column: Option<String>,
    /// The column of a Parquet file that holds images.
    pub image_column: Option<String>,
    /// How S3 is reached. No part of a job's identity.
    pub s3: S3Config,
}

/// Suffixes of images. One of a kind that a build does not read gets a failed row that says so.
const SUFFIXES: [&str; 14] = [
    "jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "jxl", "heic",
    "heif", "avif",
];

/// Names of columns that hold uris, the likeliest first.
const URI_COLUMNS: [&str; 10] = [
    "uri",
    "path",
    "image",
    "file",
    "filename",
    "url",
    "image_path",
    "file_name",
    "filepath",
    "image_url",
];

/// Whether files with this suffix are images of a format that is read.
pub(super) fn is_image_suffix(suffix: &str) -> bool {
    SUFFIXES
        .iter()
        .any(|known| known.eq_ignore_ascii_case(suffix))
}

impl SourceOptions {
    /// Whether a file is taken by its suffix.
    pub(super) fn takes_suffix(&self, name: &OsStr) -> bool {
        let suffix = Path::new(name).extension().and_then(OsStr::to_str);
        match (&self.suffixes, suffix) {
            (None, Some(suffix)) => is_image_suffix(suffix),
            (None, None) => false,
            (Some(given), suffix) => given.iter().any(|taken| {
                let taken = taken.trim();
                taken == "*"
                    || suffix.is_some_and(|suffix| {
                        taken.trim_start_matches('.').eq_ignore_ascii_case(suffix)
                    })
            }),
        }
    }

    /// Whether an object is taken by its key and size.
    pub fn takes(&self, key: &str, size: Option<u64>) -> bool {
        self.takes_suffix(OsStr::new(key)) && self.takes_size(size)
    }

    /// Whether an image is taken by its size. One whose size is unknown is.
    pub(super) fn takes_size(&self, size: Option<u64>) -> bool {
        let Some(size) = size else { return true };
        self.min_size.is_none_or(|min| size >= min) && self.max_size.is_none_or(|max| size <= max)
    }

    /// The column among `names` that holds uris.
    pub(super) fn uri_column(&self, names: &[&str]) -> Option<usize> {
        let position = |wanted: &str| names.iter().position(|name| *name == wanted);
        match &self.uri_column {
            Some(wanted) => position(wanted),
            None => URI_COLUMNS.iter().find_map(|wanted| {
                names
                    .iter()
                    .position(|name| name.eq_ignore_ascii_case(wanted))
            }),
        }
    }

    /// The options that choose images, in words that are part of a job's identity.
    pub(super) fn describe(&self) -> String {
        let mut words = Vec::new();
        let mut add = |name: &str, value: Option<String>| {
            words.extend(value.map(|value| format!(" --{name} {value}")));
        };
        add(
            "suffixes",
            self.suffixes.as_ref().map(|suffixes| suffixes.join(",")),
        );
        add("min-size", self.min_size.map(|size| size.to_string()));
        add("max-size", self.max_size.map(|size| size.to_string()));
        add("sample", self.sample.map(|count| count.to_string()));
        add(
            "sample-seed",
            self.sample.map(|_| self.sample_seed.to_string()),
        );
        add("uri-column", self.uri_column.clone());
        add("image-column", self.image_column.clone());
        words.concat()
    }
}
