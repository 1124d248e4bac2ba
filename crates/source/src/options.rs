use std::ffi::OsStr;
use std::path::Path;

use trommel_storage::{CloudConfig, HttpConfig, PlaceRule, S3Config};
use trommel_types::{FrameRate, JobOptions};

use crate::VideoConfig;

/// Which images of a source are listed.
#[derive(Debug, Clone)]
pub struct SourceOptions {
    /// File name suffixes to include, `*` for every file. `None` includes the supported formats in
    /// folders, archives and patterns without a suffix, and everything named by a manifest or the
    /// user. Images in a Parquet column have no file names and are always included.
    pub suffixes: Option<Vec<String>>,
    /// Smallest encoded size in bytes. Refused for images in a Parquet column, whose sizes are
    /// unknown before they are read.
    pub min_size: Option<u64>,
    /// Largest encoded size in bytes; refused like `min_size`.
    pub max_size: Option<u64>,
    /// Size of a sample: the images with the lowest hashes of their uris, in listing order.
    /// Requires one complete listing before the first image, and memory for this many images.
    pub sample: Option<u64>,
    /// Seed of the sample.
    pub sample_seed: u64,
    /// The uri column of a manifest.
    pub uri_column: Option<String>,
    /// Base of relative paths in lists: a folder, `s3://bucket/prefix`, `https://host/path` or a
    /// prefix in another store. Default: the list's own folder; for standard input, the current
    /// one.
    pub base: Option<String>,
    /// The column of images in a Parquet file.
    pub image_column: Option<String>,
    /// Frames per second to take from videos. Default: 1.
    pub fps: Option<FrameRate>,
    /// Longest CSV record or line of another list in bytes, so that a stray quote does not swallow
    /// the rest of the file. Not part of a job's identity. Default: 1 MiB.
    pub max_record_bytes: u64,
    /// Connection to S3. Not part of a job's identity.
    pub s3: S3Config,
    /// Connection to Google Cloud Storage and Azure. Not part of a job's identity.
    pub cloud: CloudConfig,
    /// Requests to web servers. Not part of a job's identity.
    pub http: HttpConfig,
    /// Decoding videos. Not part of a job's identity.
    pub video: VideoConfig,
    /// Where redirects may lead and which files a pattern may open. Not part of a job's identity.
    pub rule: PlaceRule,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self {
            suffixes: None,
            min_size: None,
            max_size: None,
            sample: None,
            sample_seed: 0,
            uri_column: None,
            base: None,
            image_column: None,
            fps: None,
            max_record_bytes: Self::MAX_RECORD_BYTES,
            s3: S3Config::default(),
            cloud: CloudConfig::default(),
            http: HttpConfig::default(),
            video: VideoConfig::default(),
            rule: PlaceRule::default(),
        }
    }
}

impl From<&JobOptions> for SourceOptions {
    /// From a job's options.
    fn from(options: &JobOptions) -> Self {
        Self {
            suffixes: options.suffixes.clone(),
            min_size: options.min_size,
            max_size: options.max_size,
            sample: options.sample,
            sample_seed: options.sample_seed,
            uri_column: options.uri_column.clone(),
            base: options.base.clone(),
            image_column: options.image_column.clone(),
            fps: options.fps,
            ..Self::default()
        }
    }
}

/// Suffixes of images.
const SUFFIXES: [&str; 11] = [
    "jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "jxl",
];

/// Suffixes of images in builds that support them. Other builds skip such files like all files that
/// are not images; a file given by name gets a failed row.
const HEIF_SUFFIXES: [&str; 3] = ["heic", "heif", "avif"];

/// A note about skipped files that another build would read as images.
pub const NOT_IN_THIS_BUILD: Option<&str> = match cfg!(feature = "heif") {
    true => None,
    false => Some("HEIC and AVIF need a build with --features heif"),
};

/// Common names of uri columns, most likely first.
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

/// Whether files with this suffix are images in a supported format.
pub(super) fn is_image_suffix(suffix: &str) -> bool {
    let heif = HEIF_SUFFIXES.iter().filter(|_| cfg!(feature = "heif"));
    let mut known = SUFFIXES.iter().chain(heif);
    known.any(|known| known.eq_ignore_ascii_case(suffix))
}

/// The remedy if no file has the suffix of an image.
pub(super) fn name_others() -> String {
    let build = NOT_IN_THIS_BUILD.map_or(String::new(), |build| format!(" ({build})"));
    format!("give other suffixes with --suffixes{build}")
}

/// Whether a path below the source is hidden, or left by macOS next to other files: `._cat.jpg` and
/// everything in `__MACOSX`.
pub(super) fn is_clutter(path: &str) -> bool {
    path.split('/').any(|name| match name {
        "" | "." | ".." => false,
        name => name.starts_with('.') || name == "__MACOSX",
    })
}

/// Whether a file's name has the suffix of an image.
pub(super) fn has_image_suffix(name: &str) -> bool {
    name.rsplit_once('.')
        .is_some_and(|(_, suffix)| is_image_suffix(suffix))
}

impl SourceOptions {
    /// The default of [`SourceOptions::max_record_bytes`].
    pub const MAX_RECORD_BYTES: u64 = 1 << 20;

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
        self.takes_member(key) && self.takes_size(size)
    }

    /// Whether a member of an archive, or an object, is taken by its name.
    pub(super) fn takes_member(&self, name: &str) -> bool {
        self.takes_suffix(OsStr::new(name)) && !is_clutter(name)
    }

    /// Whether an image is taken by its size. One whose size is unknown is.
    pub fn takes_size(&self, size: Option<u64>) -> bool {
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
        add("base", self.base.clone());
        add("fps", self.fps.map(|rate| rate.to_string()));
        words.concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_build_reads_is_an_image_by_its_suffix() {
        for suffix in ["jpg", "TIFF", "jxl"] {
            assert!(is_image_suffix(suffix), "{suffix}");
        }
        for suffix in ["heic", "HEIF", "avif"] {
            assert_eq!(is_image_suffix(suffix), cfg!(feature = "heif"), "{suffix}");
        }
        let says = name_others().contains("--features heif");
        assert_eq!(says, !cfg!(feature = "heif"));
    }

    #[test]
    fn what_systems_leave_next_to_images_is_no_image() {
        for path in [
            "._cat.jpg",
            "a/._cat.jpg",
            "__MACOSX/a/cat.jpg",
            ".cat.jpg",
            ".thumbs/1.jpg",
        ] {
            assert!(is_clutter(path), "{path}");
        }
        for path in [
            "cat.jpg",
            "./a/cat.jpg",
            "../cat.jpg",
            "a.b/c.jpg",
            "a//_cat.jpg",
        ] {
            assert!(!is_clutter(path), "{path}");
        }
    }
}
