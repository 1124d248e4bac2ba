//! What a source is, by the name of its file.

use trommel_types::Packing;

use crate::options::is_image_suffix;

/// What a name says of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// An image, or anything else whose name says nothing.
    Image,
    /// One uri a line.
    Lines,
    /// Fields between commas.
    Csv,
    /// Fields between tabs.
    Tsv,
    /// A JSON array.
    Json,
    /// A JSON object a line.
    JsonLines,
    /// A table.
    Parquet,
    /// A tar or zip archive.
    Archive,
    /// A video, whose frames are images.
    Video,
    /// Something compressed in a way that is not read, or that hides what it is.
    Compressed,
    /// A list or archive of a kind that is not read.
    NotRead,
}

/// Suffixes of lists and archives that are not read, so that such a file is not considered an image.
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
    /// What the name of a file says; a whole path or uri will do.
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

    /// A list that is text.
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

    /// Whether such a file is opened to learn which images it names or holds.
    pub(super) fn is_list(self) -> bool {
        !matches!(self, Self::Image | Self::Compressed | Self::NotRead)
    }
}

/// How a list is compressed, by its name.
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
