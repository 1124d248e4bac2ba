//! Recognises kinds of sources by file name.

use trommel_types::Packing;

use crate::options::is_image_suffix;

/// The kind of a file by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// An image, or an unknown name.
    Image,
    /// One uri per line.
    Lines,
    /// Comma-separated.
    Csv,
    /// Tab-separated.
    Tsv,
    /// A JSON array.
    Json,
    /// One JSON object per line.
    JsonLines,
    /// A table.
    Parquet,
    /// A tar or zip archive.
    Archive,
    /// A video, whose frames are images.
    Video,
    /// Compressed in an unsupported way, or in a way that hides its kind.
    Compressed,
    /// An unsupported kind of list or archive.
    NotRead,
}

/// Suffixes of unsupported lists and archives, so that these are not treated as images.
const NOT_READ: [&str; 20] = [
    "xls", "xlsx", "ods", "yaml", "yml", "xml", "toml", "arrow", "feather", "avro", "orc", "db",
    "sqlite", "tfrecord", "npz", "hdf5", "h5", "rar", "7z", "lmdb",
];

/// Suffixes of videos.
const VIDEOS: [&str; 15] = [
    "mp4", "m4v", "mov", "mkv", "webm", "avi", "mpg", "mpeg", "ts", "mts", "m2ts", "wmv", "flv",
    "3gp", "ogv",
];

impl Kind {
    /// The kind of a file by its name, path or uri.
    pub(super) fn of(name: &str) -> Self {
        let name = name.rsplit('/').next().unwrap_or(name).to_ascii_lowercase();
        let Some((stem, suffix)) = name.rsplit_once('.') else {
            return Self::Image;
        };
        if is_image_suffix(suffix) {
            return Self::Image;
        }
        match suffix {
            "tgz" | "tzst" | "tar" | "zip" => Self::Archive,
            "parquet" => Self::Parquet,
            "gz" | "zst" => {
                let inner = stem.rsplit_once('.').map_or("", |(_, suffix)| suffix);
                match inner {
                    "tar" => Self::Archive,
                    inner => Self::text(inner).unwrap_or(Self::Compressed),
                }
            }
            "bz2" | "xz" | "tbz2" | "tbz" | "txz" | "lz4" | "lz" | "br" | "z" => Self::Compressed,
            suffix if VIDEOS.contains(&suffix) => Self::Video,
            suffix if NOT_READ.contains(&suffix) => Self::NotRead,
            suffix => Self::text(suffix).unwrap_or(Self::Image),
        }
    }

    /// A text list.
    fn text(suffix: &str) -> Option<Self> {
        Some(match suffix {
            "txt" => Self::Lines,
            "csv" => Self::Csv,
            "tsv" | "tab" => Self::Tsv,
            "json" => Self::Json,
            "jsonl" | "ndjson" => Self::JsonLines,
            _ => return None,
        })
    }

    /// Whether such a file is opened to learn which images it names or contains.
    pub(super) fn is_list(self) -> bool {
        !matches!(self, Self::Image | Self::Compressed | Self::NotRead)
    }
}

/// The compression of a list, by its name.
pub(super) fn packing_of(name: &str) -> Option<Packing> {
    let suffix = name.rsplit_once('.').map_or("", |(_, suffix)| suffix);
    match suffix.to_ascii_lowercase().as_str() {
        "gz" => Some(Packing::Gzip),
        "zst" => Some(Packing::Zstd),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_is_in_a_file() {
        for (name, kind) in [
            ("cat.jpg", Kind::Image),
            ("CAT.JPEG", Kind::Image),
            ("cat", Kind::Image),
            ("cat.bin", Kind::Image),
            ("a.d/cat", Kind::Image),
            ("list.txt", Kind::Lines),
            ("list.TSV", Kind::Tsv),
            ("x/list.csv.gz", Kind::Csv),
            ("list.jsonl.zst", Kind::JsonLines),
            ("list.json", Kind::Json),
            ("t.parquet", Kind::Parquet),
            ("a.tar", Kind::Archive),
            ("a.tar.gz", Kind::Archive),
            ("a.b.tgz", Kind::Archive),
            ("a.tar.zst", Kind::Archive),
            ("a.zip", Kind::Archive),
            ("a.tar.xz", Kind::Compressed),
            ("cat.jpg.gz", Kind::Compressed),
            ("a.rar", Kind::NotRead),
            ("clips/a.MP4", Kind::Video),
        ] {
            assert_eq!(Kind::of(name), kind, "{name}");
        }
        assert_eq!(packing_of("a.tar.zst"), Some(Packing::Zstd));
        assert_eq!(packing_of("list.csv"), None);
    }
}
