//! Tar archives and WebDataset shards.

use std::fs::File;
use std::io::Write;

use tar::{Builder, EntryType, Header};
use trommel_types::Content;

use super::*;

fn member(archive: &mut Builder<File>, mut header: Header, name: &str, content: &[u8]) {
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    archive.append_data(&mut header, name, content).unwrap();
}

/// An archive whose members hold their names, in the GNU format.
fn shard(place: &Place, path: &str, names: &[&str]) {
    let mut archive = Builder::new(File::create(place.path(path)).unwrap());
    for name in names {
        member(&mut archive, Header::new_gnu(), name, name.as_bytes());
    }
    archive.finish().unwrap();
}

#[tokio::test]
async fn members_of_every_tar_format_are_read_by_range() {
    let place = Place::new();
    let long = format!("{}/{}.jpg", "folder".repeat(30), "name".repeat(30));
    let mut archive = Builder::new(File::create(place.path("all.tar")).unwrap());
    member(&mut archive, Header::new_old(), "old.jpg", b"old");
    member(&mut archive, Header::new_ustar(), "ustar/a.png", b"ustar");
    member(
        &mut archive,
        Header::new_gnu(),
        &format!("gnu/{long}"),
        b"gnu",
    );
    let name = format!("pax/{long}");
    archive
        .append_pax_extensions([("path", name.as_bytes())])
        .unwrap();
    member(
        &mut archive,
        Header::new_ustar(),
        "short.jpg",
        &[b'p'; 1500],
    );
    member(&mut archive, Header::new_gnu(), "notes.md", b"none");
    let mut folder = Header::new_gnu();
    folder.set_entry_type(EntryType::Directory);
    member(&mut archive, folder, "folder.jpg/", b"");
    archive.finish().unwrap();

    let source = place.open("all.tar");
    let expected = ["old.jpg", "ustar/a.png", &format!("gnu/{long}"), &name]
        .map(|name| format!("all.tar#{name}"));
    assert_eq!(place.uris(&source).await, expected);
    assert_eq!(source.skipped(), 1);
    let found = list(&source).await.unwrap();
    assert_eq!(found[1].size, Some(5));
    assert!(found[1].etag.is_some());
    for (found, content) in found
        .iter()
        .zip([&b"old"[..], b"ustar", b"gnu", &[b'p'; 1500]])
    {
        assert!(
            matches!(&found.content, Content::Range { length, .. } if *length == content.len() as u64)
        );
        assert_eq!(fetch(&source, found).await.unwrap(), content);
    }
    let too_large = source.fetch(&image(&found[3]), 1499).await.unwrap_err();
    assert_eq!(too_large.kind(), StorageErrorKind::TooLarge);
    assert_says(&too_large.to_string(), &["all.tar#pax/"]);
}

#[tokio::test]
async fn siblings_of_a_webdataset_sample_pass_through() {
    let place = Place::new();
    let names = [
        "x/0001.cls",
        "x/0001.jpg",
        "x/0001.json",
        "x/0002.jpg",
        "x/0002.TXT",
        "y/0002.left.png",
        "y/0002.right.png",
        "y/0002.cls",
        "y/0003.meta.json",
        "y/0003.jpg",
    ];
    shard(&place, "shard.tar", &names);
    let source = place.open("shard.tar");
    let expected = ["json", "cls", "txt"].map(|name| column(name, ColumnKind::String));
    assert_eq!(source.columns(), expected);
    let found = list(&source).await.unwrap();
    let null = || Scalar::Null;
    let values: Vec<_> = found
        .iter()
        .map(|found| (found.uri.rsplit('#').next().unwrap(), found.columns.clone()))
        .collect();
    let expected = [
        (
            "x/0001.jpg",
            vec![text("x/0001.json"), text("x/0001.cls"), null()],
        ),
        ("x/0002.jpg", vec![null(), null(), text("x/0002.TXT")]),
        ("y/0002.left.png", vec![null(), text("y/0002.cls"), null()]),
        ("y/0002.right.png", vec![null(), text("y/0002.cls"), null()]),
        ("y/0003.jpg", vec![null(), null(), null()]),
    ];
    assert_eq!(values, expected);
    assert_eq!(source.skipped(), 1, "0003.meta.json is no sibling");
}

#[tokio::test]
async fn several_shards_are_one_source() {
    let place = Place::new();
    shard(&place, "s-0.tar", &["0.jpg", "0.cls"]);
    shard(&place, "s-1.tar", &["1.jpg", "1.json"]);
    let specs = ["s-0.tar", "s-1.tar"].map(|path| place.spec(path));
    let source = open_source(&specs, &SourceOptions::default()).unwrap();
    assert_eq!(
        place.uris(&source).await,
        ["s-0.tar#0.jpg", "s-1.tar#1.jpg"]
    );
    let found = list(&source).await.unwrap();
    assert_eq!(found[0].columns, [text("0.cls"), Scalar::Null]);
    assert_eq!(found[1].columns, [Scalar::Null, text("1.json")]);
}

#[tokio::test]
async fn links_and_empty_members_get_their_rows() {
    let place = Place::new();
    let mut archive = Builder::new(File::create(place.path("a.tar")).unwrap());
    member(&mut archive, Header::new_gnu(), "a.jpg", b"a");
    member(&mut archive, Header::new_gnu(), "b.jpg", b"");
    for (name, kind) in [("c.jpg", EntryType::Link), ("d.jpg", EntryType::Symlink)] {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(0);
        archive.append_link(&mut header, name, "a.jpg").unwrap();
    }
    archive.finish().unwrap();
    let source = place.open("a.tar");
    let found = list(&source).await.unwrap();
    assert_eq!(found.len(), 4);
    for found in &found[1..] {
        assert_eq!(
            failure(&source, found).await,
            StorageErrorKind::Empty,
            "{}",
            found.uri
        );
    }
}

#[tokio::test]
async fn a_member_that_is_cut_off_fails_alone() {
    let place = Place::new();
    shard(&place, "a.tar", &["a.jpg", "b.jpg"]);
    // Both headers and the first content, then two bytes of the second.
    let file = File::options()
        .write(true)
        .open(place.path("a.tar"))
        .unwrap();
    file.set_len(3 * 512 + 2).unwrap();
    let source = place.open("a.tar");
    let found = list(&source).await.unwrap();
    assert_eq!(fetch(&source, &found[0]).await.unwrap(), "a.jpg");
    let error = fetch(&source, &found[1]).await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::NotAFile);
    assert_says(&error.to_string(), &["a.tar#b.jpg", "cut off"]);
}

#[tokio::test]
async fn names_in_an_archive_may_be_no_utf_8() {
    let place = Place::new();
    let mut archive = Builder::new(File::create(place.path("a.tar")).unwrap());
    let mut header = Header::new_gnu();
    header.as_mut_bytes()[..8].copy_from_slice(b"caf\xe9.jpg");
    header.set_size(2);
    header.set_cksum();
    archive.append(&header, &b"hi"[..]).unwrap();
    archive.finish().unwrap();
    let source = place.open("a.tar");
    assert_eq!(place.uris(&source).await, ["a.tar#caf%E9.jpg"]);
    let found = list(&source).await.unwrap();
    assert_eq!(fetch(&source, &found[0]).await.unwrap(), "hi");
}

#[test]
fn what_is_no_readable_archive_is_refused() {
    let place = Place::new();
    shard(&place, "texts.tar", &["a.txt", "b.md"]);
    assert_says(
        &place.refusal("texts.tar"),
        &["texts.tar", "no images", "--suffixes"],
    );
    place.write("noise.tar", [b'x'; 1024]);
    assert_says(&place.refusal("noise.tar"), &["noise.tar", "tar"]);
    // Compressed archives are known by their content, whatever they are called.
    for magic in [&b"\xfd7zXZ\0"[..], b"BZh9"] {
        let mut file = File::create(place.path("packed.tar")).unwrap();
        file.write_all(magic).unwrap();
        assert_says(
            &place.refusal("packed.tar"),
            &["packed.tar", "unsupported compression", "decompress it"],
        );
    }
}

/// R9: a member is never read from another archive than the one that was listed.
#[tokio::test]
async fn members_of_an_archive_that_was_replaced_fail_as_changed() {
    let place = Place::new();
    shard(&place, "a.tar", &["a.jpg", "b.jpg"]);
    let source = place.open("a.tar");
    let found = list(&source).await.unwrap();
    shard(&place, "a.tar", &["b.jpg", "a.jpg"]);
    touch(&place.path("a.tar"));
    let error = fetch(&source, &found[0]).await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Changed);
    assert_says(&error.to_string(), &["a.tar#a.jpg", "changed"]);
}

/// R31: an archive whose names share the part before the first dot is no sample.
#[tokio::test]
async fn a_hundred_thousand_members_with_one_key_are_listed_one_by_one() {
    let place = Place::new();
    let count = 100_000;
    let file = std::io::BufWriter::new(File::create(place.path("frames.tar")).unwrap());
    let mut archive = Builder::new(file);
    let mut add = |name: &str, content: &[u8]| {
        let mut header = Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, name, content).unwrap();
    };
    add("frame.json", b"{}");
    for number in 0..count {
        add(&format!("frame.{number:06}.jpg"), b"");
    }
    add("frame.cls", b"7");
    drop(archive);
    let source = place.open("frames.tar");
    let found = list(&source).await.unwrap();
    assert_eq!(found.len(), count);
    assert!(found[count - 1].uri.ends_with("#frame.099999.jpg"));
    // What precedes an image is still its sibling.
    let json = source
        .columns()
        .iter()
        .position(|column| column.name == "json");
    assert!(
        found
            .iter()
            .all(|found| found.columns[json.unwrap()] == text("{}"))
    );
}

/// R30: what describes a member is not read whatever size it claims.
#[test]
fn names_that_claim_to_fill_memory_are_refused() {
    for (kind, what) in [
        (EntryType::GNULongName, "a name"),
        (EntryType::XHeader, "an extended header"),
    ] {
        let place = Place::new();
        let mut archive = Builder::new(File::create(place.path("a.tar")).unwrap());
        member(&mut archive, Header::new_gnu(), "a.jpg", b"a");
        let mut header = Header::new_gnu();
        header.as_mut_bytes()[..1].copy_from_slice(b"x");
        header.set_entry_type(kind);
        header.set_size(1 << 30);
        header.set_cksum();
        let mut file = archive.into_inner().unwrap();
        file.set_len(2 * 512).unwrap();
        std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len(2 << 30).unwrap();
        assert_says(&place.refusal("a.tar"), &["a.tar", what, "1073741824"]);
    }
}
