//! Checks an output independently: it reads Parquet and SQL with code that is not Trommel's.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use serde_json::Value;
use trommel_storage::testsuite::PostgresServer;

/// A row: the name of its image, its status, its label.
pub(crate) type Said = (String, String, String);

/// Rows by index, and the versions of models in them.
#[derive(Default)]
pub(crate) struct Rows {
    rows: BTreeMap<u64, Said>,
    versions: Vec<String>,
}

impl Rows {
    fn add(&mut self, index: u64, uri: &str, status: &str, label: &str, version: &str) {
        let name = uri.rsplit('/').next().unwrap().to_owned();
        let said = (name, status.to_owned(), label.to_owned());
        let other = self.rows.insert(index, said);
        assert_eq!(other, None, "index {index} is there twice");
        if !self.versions.iter().any(|known| known == version) {
            self.versions.push(version.to_owned());
        }
    }

    /// The rows of one Parquet file.
    pub(crate) fn of_file(path: &Path) -> Self {
        let mut rows = Self::default();
        rows.read(path);
        rows
    }

    /// The rows of a folder: those of the parts that its summary lists.
    pub(crate) fn of_folder(folder: &Path) -> Self {
        assert!(
            folder.join("_SUCCESS").exists(),
            "{} has no _SUCCESS",
            folder.display()
        );
        let summary = fs::read(folder.join("_summary.json")).unwrap();
        let summary: Value = serde_json::from_slice(&summary).unwrap();
        let mut rows = Self::default();
        for part in summary["parts"].as_array().unwrap() {
            rows.read(&folder.join(part["name"].as_str().unwrap()));
        }
        rows
    }

    /// The rows of a job in a table.
    pub(crate) fn of_table(database: &PostgresServer, table: &str, job: &str) -> Self {
        let mut rows = Self::default();
        let found = database.query(&format!(
            "SELECT index, uri, status, coalesce(label, ''), model_version FROM {table} \
             WHERE job_id = '{job}'"
        ));
        for line in found.lines() {
            let fields: Vec<&str> = line.split('|').collect();
            let [index, uri, status, label, version] = fields[..] else {
                panic!("a row with other columns: {line}");
            };
            rows.add(index.parse().unwrap(), uri, status, label, version);
        }
        rows
    }

    fn read(&mut self, path: &Path) {
        let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let reader = SerializedFileReader::new(file).unwrap();
        for row in reader.get_row_iter(None).unwrap() {
            let row = row.unwrap();
            let columns: BTreeMap<&str, &Field> = row
                .get_column_iter()
                .map(|(name, field)| (name.as_str(), field))
                .collect();
            let text = |name: &str| match columns[name] {
                Field::Str(text) => text.clone(),
                Field::Null => String::new(),
                other => panic!("{name} is {other:?}"),
            };
            let Field::Long(index) = columns["index"] else {
                panic!("index is {:?}", columns["index"]);
            };
            let index = u64::try_from(*index).unwrap();
            let (uri, status) = (text("uri"), text("status"));
            self.add(index, &uri, &status, &text("label"), &text("model_version"));
        }
    }

    /// Fails unless these are the rows of a run without faults.
    #[track_caller]
    pub(crate) fn assert_are(&self, expected: &Self, bad: &[u64], of: &str) {
        let indices = (0..).zip(self.rows.keys());
        let gap = indices.clone().find(|(index, found)| index != *found);
        assert_eq!(gap, None, "{of}: (expected, found)");
        assert_eq!(self.rows.len(), expected.rows.len(), "{of}: rows");
        for (index, said) in &self.rows {
            assert_eq!(said, &expected.rows[index], "{of}: row {index}");
        }
        let failed = self.rows.iter().filter(|(_, said)| said.1 != "ok");
        let failed: Vec<u64> = failed.map(|(index, _)| *index).collect();
        assert_eq!(failed, bad, "{of}: failed rows");
        assert_eq!(self.versions.len(), 1, "{of}: {:?}", self.versions);
    }
}

/// Makes images in a folder, a share of which no decoder can read. The indices of those.
pub(crate) fn make_images(folder: &Path, good: &[PathBuf], count: u64, bad: u64) -> Vec<u64> {
    fs::create_dir_all(folder).unwrap();
    let good: Vec<Vec<u8>> = good.iter().map(|path| fs::read(path).unwrap()).collect();
    let kinds = bad_kinds();
    let every = count / bad;
    let mut indices = Vec::new();
    for index in 0..count {
        let number = usize::try_from(index).unwrap();
        let is_bad = index % every == every / 2;
        let content = if is_bad {
            indices.push(index);
            &kinds[indices.len() % kinds.len()]
        } else {
            &good[number % good.len()]
        };
        fs::write(folder.join(format!("{index:06}.jpg")), content).unwrap();
    }
    indices
}

/// Thirty kinds of files that are not images, whatever their names.
fn bad_kinds() -> Vec<Vec<u8>> {
    let png = |width: u32, height: u32| {
        let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
        png.extend(width.to_be_bytes());
        png.extend(height.to_be_bytes());
        png.extend([8, 2, 0, 0, 0]);
        let sum = crc32fast::hash(&png[12..]);
        png.extend(sum.to_be_bytes());
        png
    };
    let mut kinds = vec![png(8, 8), png(0, 8), png(60_000, 60_000), png(u32::MAX, 1)];
    let texts: [&[u8]; 26] = [
        b"",
        b"\0",
        b"not an image",
        b"<html><body>404 Not Found</body></html>",
        b"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>",
        b"<svg xmlns=\"http://www.w3.org/2000/svg\"/>",
        b"{\"error\": \"no such image\"}",
        b"%PDF-1.7\n",
        b"PK\x03\x04",
        b"\x1f\x8b\x08\0",
        b"\x28\xb5\x2f\xfd",
        b"BZh9",
        b"\x7fELF\x02\x01\x01",
        b"MZ\x90\0",
        b"\xff\xd8",
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xe0\0\x10JFIF\0",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"GIF89a\0\0\0\0\0\0\0;",
        b"BM",
        b"RIFF\x04\0\0\0WEBP",
        b"II*\0\x08\0\0\0",
        b"MM\0*\0\0\0\x08",
        b"\0\0\0\x18ftypmp42",
        b"version https://git-lfs.github.com/spec/v1\n",
    ];
    kinds.extend(texts.map(<[u8]>::to_vec));
    assert_eq!(kinds.len(), 30);
    kinds
}
