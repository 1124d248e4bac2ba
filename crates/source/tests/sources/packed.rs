//! Compressed archives: zip, and tar by gzip and Zstandard.

use std::fs::File;
use std::io::{Cursor, Write};

use flate2::{Compression, write::GzEncoder};
use tar::{Builder, Header};
use trommel_types::{Content, Packing};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::*;

/// Bytes that are no image and hardly shrink, different for each number.
fn noise(number: u64, length: usize) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// A tar of members with these names and contents.
fn tar_of(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        archive
            .append_data(&mut header, name, &content[..])
            .unwrap();
    }
    archive.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstandard(bytes: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(bytes, 1).unwrap()
}

fn zip_of(members: &[(&str, &[u8], CompressionMethod)]) -> Vec<u8> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content, method) in members {
        let options = SimpleFileOptions::default().compression_method(*method);
        archive.start_file(*name, options).unwrap();
        archive.write_all(content).unwrap();
    }
    archive.finish().unwrap().into_inner()
}

const STORED: CompressionMethod = CompressionMethod::Stored;
const DEFLATED: CompressionMethod = CompressionMethod::Deflated;

fn numbered(count: u64, length: usize) -> Vec<(String, Vec<u8>)> {
    (0..count)
        .map(|number| (format!("d/{number:04}.jpg"), noise(number, length)))
        .collect()
}

#[tokio::test]
async fn members_of_a_compressed_tar_are_read_in_any_order() {
    let place = Place::new();
    let members = numbered(200, 3000);
    let tar = tar_of(&members);
    for (name, packing, packed) in [
        ("a.tar.gz", Packing::Gzip, gzip(&tar)),
        (
            "a.tgz",
            Packing::Gzip,
            [gzip(&tar[..5000]), gzip(&tar[5000..])].concat(),
        ),
        ("a.tar.zst", Packing::Zstd, zstandard(&tar)),
        // Known by its content, whatever it is called.
        ("b.tar", Packing::Gzip, gzip(&tar)),
    ] {
        place.write(name, packed);
        let source = place.open(name);
        let found = list(&source).await.unwrap();
        assert_eq!(found.len(), 200);
        assert!(
            found[7].uri.ends_with(&format!("{name}#d/0007.jpg")),
            "{}",
            found[7].uri
        );
        assert_eq!(found[7].size, Some(3000));
        assert!(
            matches!(&found[7].content, Content::Unpacked { packing: is, .. } if *is == packing)
        );
        let order = (0..200).rev().chain((0..200).step_by(7)).chain(0..200);
        let fetches = order.map(async |number: usize| {
            let bytes = fetch(&source, &found[number]).await.unwrap();
            assert!(bytes == members[number].1, "{name}: member {number}");
        });
        futures::future::join_all(fetches).await;
    }
}

/// A pass over the archive serves all who wait, and what comes late finds it in memory.
#[tokio::test]
async fn a_late_request_does_not_cost_a_pass_over_the_archive() {
    let place = Place::new();
    let members = numbered(300, 200_000);
    place.write("a.tar.zst", zstandard(&tar_of(&members)));
    let source = place.open("a.tar.zst");
    let found = list(&source).await.unwrap();
    for (number, found) in found.iter().enumerate() {
        assert!(fetch(&source, found).await.unwrap() == members[number].1);
    }
    // Far behind what is kept: another pass.
    assert!(fetch(&source, &found[0]).await.unwrap() == members[0].1);
    // Another archive while these are idle, more of them than are unpacked at once.
    for copy in 0..6 {
        let name = format!("copy-{copy}.tar.gz");
        place.write(&name, gzip(&tar_of(&members[..3])));
        let source = place.open(&name);
        let found = list(&source).await.unwrap();
        assert!(fetch(&source, &found[2]).await.unwrap() == members[2].1);
    }
    for copy in (0..6).rev() {
        let found = Found {
            content: Content::Unpacked {
                archive: place.spec(&format!("copy-{copy}.tar.gz")),
                packing: Packing::Gzip,
                offset: 512,
                length: 10,
            },
            etag: None,
            ..found[0].clone()
        };
        assert_eq!(fetch(&source, &found).await.unwrap(), members[0].1[..10]);
    }
}

#[tokio::test]
async fn a_compressed_shard_passes_its_siblings_through() {
    let place = Place::new();
    let members = ["a.jpg", "a.cls", "b.jpg", "b.txt"].map(|name| (name.to_owned(), name.into()));
    let zip: Vec<_> = members
        .iter()
        .map(|(name, content): &(String, Vec<u8>)| (name.as_str(), &content[..], DEFLATED))
        .collect();
    place.write("a.zip", zip_of(&zip));
    place.write("a.tar.gz", gzip(&tar_of(&members)));
    for name in ["a.zip", "a.tar.gz"] {
        let source = place.open(name);
        let expected = ["cls", "txt"].map(|name| column(name, ColumnKind::String));
        assert_eq!(source.columns(), expected, "{name}");
        let found = list(&source).await.unwrap();
        assert_eq!(found[0].columns, [text("a.cls"), Scalar::Null]);
        assert_eq!(found[1].columns, [Scalar::Null, text("b.txt")]);
    }
}

#[tokio::test]
async fn members_of_a_zip_are_read_however_they_are_packed() {
    let place = Place::new();
    let (large, flat) = (noise(1, 70_000), vec![b'x'; 70_000]);
    let members: [(&str, &[u8], _); 6] = [
        ("a.jpg", &large, STORED),
        ("d/b.jpg", &flat, DEFLATED),
        ("d/é.png", &flat, CompressionMethod::Zstd),
        ("empty.jpg", b"", STORED),
        ("notes.md", b"none", STORED),
        ("__MACOSX/d/._b.jpg", b"fork", STORED),
    ];
    let zip = zip_of(&members);
    // A program before an archive, as in one that unpacks itself.
    let before = [vec![b'#'; 777], zip.clone()].concat();
    for (name, bytes) in [("a.zip", zip), ("b.zip", before)] {
        place.write(name, bytes);
        let source = place.open(name);
        let names =
            ["a.jpg", "d/b.jpg", "d/é.png", "empty.jpg"].map(|file| format!("{name}#{file}"));
        assert_eq!(place.uris(&source).await, names);
        assert_eq!(source.skipped(), 2);
        let found = list(&source).await.unwrap();
        assert_eq!((found[0].size, found[1].size), (Some(70_000), Some(70_000)));
        assert!(fetch(&source, &found[0]).await.unwrap() == large);
        assert!(fetch(&source, &found[1]).await.unwrap() == flat);
        assert!(fetch(&source, &found[2]).await.unwrap() == flat);
        assert_eq!(failure(&source, &found[3]).await, StorageErrorKind::Empty);
        let error = source.fetch(&image(&found[1]), 69_999).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::TooLarge);
    }
}

/// Where a member's header in the directory has a field, from its signature on.
fn directory_entries(zip: &[u8]) -> Vec<usize> {
    let is_entry = |place: &usize| zip[*place..].starts_with(b"PK\x01\x02");
    (0..zip.len() - 4).filter(is_entry).collect()
}

#[tokio::test]
async fn members_that_are_not_read_fail_by_name() {
    let place = Place::new();
    let members: Vec<(&str, &[u8], _)> = ["a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg", "f.jpg"]
        .map(|name| (name, &b"some bytes that are some bytes"[..], DEFLATED))
        .into();
    let mut zip = zip_of(&members);
    let entries = directory_entries(&zip);
    zip[entries[0] + 8] |= 1; // encrypted
    zip[entries[1] + 10] = 14; // LZMA
    zip[entries[2] + 16] ^= 1; // checksum
    zip[entries[3] + 24] += 1; // unpacks to less than it says
    zip[entries[4] + 24] -= 1; // to more
    place.write("a.zip", zip);
    let source = place.open("a.zip");
    let found = list(&source).await.unwrap();
    assert_eq!(found.len(), 6);
    for (found, words) in found.iter().zip([
        &["encrypted", "password"][..],
        &["LZMA (method 14)", "zip -r"],
        &["checksum"],
        &["31 bytes"],
        &["29 bytes"],
    ]) {
        let error = fetch(&source, found).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::NotAFile);
        let name = found.uri.rsplit('/').next().unwrap();
        assert_says(&error.to_string(), &[words, &[name]].concat());
    }
    assert_eq!(
        fetch(&source, &found[5]).await.unwrap(),
        "some bytes that are some bytes"
    );
}

#[tokio::test]
async fn a_bomb_costs_no_more_than_an_image() {
    let place = Place::new();
    let zeros = vec![0; 8 << 20];
    let mut zip = zip_of(&[
        ("bomb.jpg", &zeros, DEFLATED),
        ("liar.jpg", &zeros, DEFLATED),
    ]);
    let liar = directory_entries(&zip)[1];
    zip[liar + 24..liar + 28].copy_from_slice(&1000_u32.to_le_bytes());
    place.write("a.zip", zip);
    let source = place.open("a.zip");
    let found = list(&source).await.unwrap();
    // By what it declares; and by what it holds where that is more.
    assert_eq!(
        failure(&source, &found[0]).await,
        StorageErrorKind::TooLarge
    );
    assert_eq!(
        failure(&source, &found[1]).await,
        StorageErrorKind::NotAFile
    );

    // A tar that unpacks to far more than it could be of images.
    let mut tar = tar_of(&[("a.jpg".to_owned(), vec![1; 10])]);
    tar.truncate(1024);
    let mut header = Header::new_gnu();
    header.set_path("bomb.jpg").unwrap();
    header.set_size(1 << 40);
    header.set_cksum();
    tar.extend(header.as_bytes());
    let zeros = std::io::Read::take(std::io::repeat(0), 256 << 20);
    let bomb = std::io::Read::chain(Cursor::new(tar), zeros);
    place.write("a.tar.zst", zstd::stream::encode_all(bomb, 1).unwrap());
    let error = place.refusal("a.tar.zst");
    assert_says(&error, &["a.tar.zst", "500 times", "bomb"]);
}

#[tokio::test]
async fn archives_that_were_replaced_are_noticed() {
    let place = Place::new();
    let members = numbered(3, 100);
    for (name, bytes) in [
        ("a.tar.gz", gzip(&tar_of(&members))),
        (
            "a.zip",
            zip_of(&[("a.jpg", b"a", STORED), ("b.jpg", b"b", STORED)]),
        ),
    ] {
        place.write(name, &bytes);
        let source = place.open(name);
        let found = list(&source).await.unwrap();
        assert!(fetch(&source, &found[1]).await.is_ok());
        place.write(name, &bytes);
        touch(&place.path(name));
        assert_eq!(
            failure(&source, &found[0]).await,
            StorageErrorKind::Changed,
            "{name}"
        );
    }
}

#[tokio::test]
async fn what_is_damaged_is_refused_or_fails_alone() {
    let place = Place::new();
    place.write("noise.zip", noise(1, 5000));
    assert_says(
        &place.refusal("noise.zip"),
        &["noise.zip", "zip", "no directory"],
    );
    let zip = zip_of(&[("a.jpg", b"a", STORED), ("b.jpg", b"b", STORED)]);
    place.write("cut.zip", &zip[..zip.len() - 30]);
    assert_says(&place.refusal("cut.zip"), &["cut.zip", "cut short"]);
    let mut outside = zip.clone();
    let entry = directory_entries(&zip)[1];
    outside[entry + 42..entry + 46].copy_from_slice(&0x00ff_ffff_u32.to_le_bytes());
    place.write("outside.zip", outside);
    assert_says(&place.refusal("outside.zip"), &["outside.zip", "outside"]);
    let mut moved = zip;
    moved[entry + 42] += 1;
    place.write("moved.zip", moved);
    let source = place.open("moved.zip");
    let found = list(&source).await.unwrap();
    assert_eq!(fetch(&source, &found[0]).await.unwrap(), "a");
    assert_eq!(
        failure(&source, &found[1]).await,
        StorageErrorKind::NotAFile
    );
    place.write("texts.zip", zip_of(&[("a.md", b"a", STORED)]));
    assert_says(
        &place.refusal("texts.zip"),
        &["texts.zip", "no images", "--suffixes"],
    );

    // Cut within the second member: the first is listed and read, then the listing fails.
    let packed = gzip(&tar_of(&numbered(2, 100_000)));
    place.write("cut.tar.gz", &packed[..packed.len() - 50_000]);
    let error = place.refusal("cut.tar.gz");
    assert_says(&error, &["cut.tar.gz", "cannot be read as tar"]);
    for name in ["a.tar.xz", "a.tar.bz2", "a.rar", "cat.jpg.gz"] {
        place.write(name, "x");
        assert_says(&place.refusal(name), &[name]);
    }
}

/// Sizes and offsets of more than 32 bits, as large archives have them.
#[tokio::test]
async fn a_zip_of_more_than_four_gigabytes_is_read() {
    let place = Place::new();
    let file = File::create(place.path("large.zip")).unwrap();
    let mut archive = ZipWriter::new(Sparse::new(file));
    let large = SimpleFileOptions::default()
        .compression_method(STORED)
        .large_file(true);
    archive.start_file("hole.bin", large).unwrap();
    let hole = vec![0; 1 << 20];
    for _ in 0..(4 << 10) + 1 {
        archive.write_all(&hole).unwrap();
    }
    archive.start_file("behind.jpg", large).unwrap();
    archive.write_all(b"behind").unwrap();
    archive.finish().unwrap();
    let source = place.open("large.zip");
    assert_eq!(place.uris(&source).await, ["large.zip#behind.jpg"]);
    let found = list(&source).await.unwrap();
    assert!(matches!(&found[0].content, Content::ZipMember { offset, .. } if *offset > 1 << 32));
    assert_eq!(fetch(&source, &found[0]).await.unwrap(), "behind");
}

/// A file in which zeros take no room.
struct Sparse(File);

impl Sparse {
    fn new(file: File) -> Self {
        Self(file)
    }
}

impl Write for Sparse {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.iter().any(|byte| *byte != 0) {
            return self.0.write(bytes);
        }
        let end = std::io::Seek::seek(&mut self.0, std::io::SeekFrom::Current(bytes.len() as i64))?;
        if self.0.metadata()?.len() < end {
            self.0.set_len(end)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

impl std::io::Seek for Sparse {
    fn seek(&mut self, to: std::io::SeekFrom) -> std::io::Result<u64> {
        self.0.seek(to)
    }
}
