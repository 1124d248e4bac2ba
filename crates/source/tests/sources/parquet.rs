//! Parquet files that name images or hold them.

use std::fs::File;

use ::parquet::arrow::ArrowWriter;
use ::parquet::basic::{Compression, GzipLevel, ZstdLevel};
use ::parquet::file::properties::WriterProperties;
use arrow_array::builder::{ListBuilder, StringBuilder};
use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, BinaryArray, BooleanArray, Date32Array, DictionaryArray, Float32Array, Int16Array,
    LargeBinaryArray, RecordBatch, StringArray, StructArray, UInt64Array,
};
use arrow_schema::{DataType, Field};
use trommel_types::Content;

use super::*;

fn write(place: &Place, path: &str, columns: Vec<(&str, ArrayRef)>, rows_a_group: usize) {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(rows_a_group))
        .set_data_page_row_count_limit(16)
        .set_write_batch_size(16)
        .build();
    let file = File::create(place.path(path)).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn strings(values: &[&str]) -> ArrayRef {
    Arc::new(StringArray::from(values.to_vec()))
}

fn content(row: u64) -> Vec<u8> {
    format!("image {row} ")
        .repeat(1 + row as usize % 5)
        .into_bytes()
}

fn images(rows: u64) -> ArrayRef {
    Arc::new(BinaryArray::from_iter_values((0..rows).map(content)))
}

#[tokio::test]
async fn a_parquet_manifest_passes_typed_columns_through() {
    let place = Place::with(&["d/a.jpg", "d/b.jpg"]);
    let mut tags = ListBuilder::new(StringBuilder::new());
    tags.append_value([Some("x"), None]);
    tags.append_null();
    let kinds: DictionaryArray<Int32Type> = vec!["cat", "dog"].into_iter().collect();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("shot", Arc::new(Int16Array::from(vec![Some(-3), None]))),
        ("path", strings(&["a.jpg", "b.jpg"])),
        ("ratio", Arc::new(Float32Array::from(vec![0.5, 1.5]))),
        ("dark", Arc::new(BooleanArray::from(vec![true, false]))),
        ("site", strings(&["north", "south"])),
        ("id", Arc::new(UInt64Array::from(vec![u64::MAX, 1]))),
        ("day", Arc::new(Date32Array::from(vec![0, 365]))),
        ("tags", Arc::new(tags.finish())),
        ("kind", Arc::new(kinds)),
    ];
    write(&place, "d/list.parquet", columns, 1000);
    let source = place.open("d/list.parquet");
    assert_eq!(place.uris(&source).await, ["d/a.jpg", "d/b.jpg"]);
    let expected = [
        column("shot", ColumnKind::Int),
        column("ratio", ColumnKind::Float),
        column("dark", ColumnKind::Bool),
        column("site", ColumnKind::String),
        column("id", ColumnKind::String),
        column("day", ColumnKind::String),
        column("tags", ColumnKind::String),
        column("kind", ColumnKind::String),
    ];
    assert_eq!(source.columns(), expected);
    let found = list(&source).await.unwrap();
    let first = [
        Scalar::Int(-3),
        Scalar::Float(0.5),
        Scalar::Bool(true),
        text("north"),
        text("18446744073709551615"),
        text("1970-01-01"),
        text(r#"["x",null]"#),
        text("cat"),
    ];
    assert_eq!(found[0].columns, first);
    assert_eq!(found[1].columns[0], Scalar::Null);
    assert_eq!(found[1].columns[5], text("1971-01-01"));
    assert_eq!(found[1].columns[6], Scalar::Null);
    assert_eq!(fetch(&source, &found[1]).await.unwrap(), "d/b.jpg");
}

#[tokio::test]
async fn cells_are_fetched_in_any_order() {
    let place = Place::new();
    let rows = 3000;
    let numbers: Vec<String> = (0..rows).map(|row| row.to_string()).collect();
    let numbers: Vec<&str> = numbers.iter().map(String::as_str).collect();
    let columns = vec![("name", strings(&numbers)), ("jpeg", images(rows))];
    write(&place, "table.parquet", columns, 700);
    let source = place.open("table.parquet");
    assert_eq!(source.columns(), [column("name", ColumnKind::String)]);
    let found = list(&source).await.unwrap();
    assert_eq!(found.len(), rows as usize);
    assert_eq!(
        found[2999].uri,
        format!("{}#2999", place.spec("table.parquet"))
    );
    assert_eq!(found[2999].columns, [text("2999")]);
    let Content::ParquetCell { column, row, .. } = &found[2999].content else {
        panic!("{:?}", found[2999].content);
    };
    assert_eq!((column.as_str(), *row), ("jpeg", 2999));
    assert!(found[0].etag.is_some());

    let check = async |row: u64| {
        let bytes = fetch(&source, &found[row as usize]).await.unwrap();
        assert_eq!(bytes, content(row), "row {row}");
    };
    for row in 0..rows {
        check(row).await;
    }
    for row in (0..rows).rev().step_by(37) {
        check(row).await;
    }
    let mut row = 1;
    for _ in 0..500 {
        row = row * 7919 % rows; // jumps all over the file
        check(row).await;
    }
}

#[tokio::test]
async fn cells_are_fetched_by_many_tasks_at_once() {
    let place = Place::new();
    write(&place, "table.parquet", vec![("jpeg", images(1000))], 300);
    let source = place.open("table.parquet");
    assert!(source.columns().is_empty());
    let found = list(&source).await.unwrap();
    let mut tasks = Vec::new();
    for (row, found) in found.into_iter().enumerate() {
        let source = Arc::clone(&source);
        tasks.push(tokio::spawn(async move {
            assert_eq!(fetch(&source, &found).await.unwrap(), content(row as u64));
        }));
    }
    assert_eq!(tasks.len(), 1000);
    for task in tasks {
        task.await.unwrap();
    }
}

#[tokio::test]
async fn images_of_a_hugging_face_data_set_are_found() {
    let place = Place::new();
    let cells: ArrayRef = Arc::new(BinaryArray::from_opt_vec(vec![
        Some(b"one"),
        None,
        Some(b""),
        Some(b"four"),
    ]));
    let paths = StringArray::from(vec![Some("1.jpg"), None, Some("3.jpg"), Some("4.jpg")]);
    let image = StructArray::from(vec![
        (Arc::new(Field::new("bytes", DataType::Binary, true)), cells),
        (
            Arc::new(Field::new("path", DataType::Utf8, true)),
            Arc::new(paths) as ArrayRef,
        ),
    ]);
    let labels = strings(&["cat", "dog", "cat", "dog"]);
    let columns = vec![("image", Arc::new(image) as ArrayRef), ("label", labels)];
    write(&place, "train.parquet", columns, 1000);
    let options = SourceOptions {
        image_column: Some("image".to_owned()),
        ..SourceOptions::default()
    };
    for source in [
        place.open("train.parquet"),
        place.open_with("train.parquet", options),
    ] {
        assert_eq!(source.columns(), [column("label", ColumnKind::String)]);
        let found = list(&source).await.unwrap();
        assert_eq!(found[3].columns, [text("dog")]);
        assert_eq!(fetch(&source, &found[0]).await.unwrap(), "one");
        let error = fetch(&source, &found[1]).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::NotAFile);
        assert_says(&error.to_string(), &["train.parquet#1", "null"]);
        assert_eq!(failure(&source, &found[2]).await, StorageErrorKind::Empty);
        assert_eq!(fetch(&source, &found[3]).await.unwrap(), "four");
        let large = source.fetch(&super::image(&found[3]), 3).await.unwrap_err();
        assert_eq!(large.kind(), StorageErrorKind::TooLarge);
        assert_eq!(
            fetch(&source, &found[3]).await.unwrap(),
            "four",
            "a refusal breaks nothing"
        );
    }
}

#[tokio::test]
async fn the_image_column_is_named_where_there_are_several() {
    let place = Place::new();
    let thumbs: ArrayRef = Arc::new(LargeBinaryArray::from_iter_values([b"t0", b"t1"]));
    let columns = vec![
        ("full.size", images(2)),
        ("thumb", thumbs),
        ("uri", strings(&["a.jpg", "b.jpg"])),
    ];
    write(&place, "table.parquet", columns, 1000);
    let refusal = place.refusal("table.parquet");
    assert_says(
        &refusal,
        &["table.parquet", "full.size, thumb", "--image-column"],
    );
    let named = |name: &str| SourceOptions {
        image_column: Some(name.to_owned()),
        ..SourceOptions::default()
    };
    for (name, expected) in [("full.size", content(1)), ("thumb", b"t1".to_vec())] {
        let source = place.open_with("table.parquet", named(name));
        assert_eq!(source.columns(), [column("uri", ColumnKind::String)]);
        let found = list(&source).await.unwrap();
        assert_eq!(fetch(&source, &found[1]).await.unwrap(), expected);
    }
    let refusal = place.refusal_with("table.parquet", named("uri"));
    assert_says(&refusal, &["`uri`", "full.size, thumb"]);
    let by_uri = SourceOptions {
        uri_column: Some("uri".to_owned()),
        ..SourceOptions::default()
    };
    let source = place.open_with("table.parquet", by_uri);
    assert_eq!(place.uris(&source).await, ["a.jpg", "b.jpg"]);
}

#[test]
fn what_is_no_usable_parquet_file_is_refused() {
    let place = Place::new();
    place.write("noise.parquet", "not a table at all");
    assert_says(
        &place.refusal("noise.parquet"),
        &["noise.parquet", "Parquet"],
    );
    write(
        &place,
        "plain.parquet",
        vec![("left", strings(&["a"])), ("right", strings(&["b"]))],
        9,
    );
    assert_says(
        &place.refusal("plain.parquet"),
        &["--uri-column", "left, right"],
    );
    write(&place, "cells.parquet", vec![("jpeg", images(3))], 9);
    let by_size = SourceOptions {
        max_size: Some(9),
        ..SourceOptions::default()
    };
    let refusal = place.refusal_with("cells.parquet", by_size);
    assert_says(&refusal, &["cells.parquet", "--max-size"]);
    let missing: ArrayRef = Arc::new(StringArray::from(vec![Some("a.jpg"), None]));
    write(&place, "holes.parquet", vec![("uri", missing)], 9);
    assert_says(
        &place.refusal("holes.parquet"),
        &["holes.parquet: row 1", "no uri"],
    );
}

/// R9: a cell is never read from another file than the one that was listed.
#[tokio::test]
async fn cells_of_a_file_that_was_replaced_fail_as_changed() {
    let place = Place::new();
    write(&place, "table.parquet", vec![("jpeg", images(3000))], 700);
    let source = place.open("table.parquet");
    let found = list(&source).await.unwrap();
    assert_eq!(fetch(&source, &found[0]).await.unwrap(), content(0));
    std::fs::remove_file(place.path("table.parquet")).unwrap();
    write(&place, "table.parquet", vec![("jpeg", images(10))], 700);
    for row in [2500, 900, 9] {
        let error = fetch(&source, &found[row]).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Changed);
        assert_says(&error.to_string(), &[&format!("table.parquet#{row}")]);
    }
    // Who does not say which version gets what is there.
    let any = |row: usize| Found {
        etag: None,
        ..found[row].clone()
    };
    assert_eq!(fetch(&source, &any(9)).await.unwrap(), content(9));
    let error = fetch(&source, &any(2500)).await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::NotAFile);
    assert_says(&error.to_string(), &["table.parquet#2500", "row 2500"]);
    let again = list(&place.open("table.parquet")).await.unwrap();
    assert_eq!(fetch(&source, &again[9]).await.unwrap(), content(9));
}

/// R30: a page that inflates is refused before memory is allocated for it.
#[tokio::test]
async fn a_cell_that_inflates_is_refused_before_it_is_decoded() {
    let codecs = [
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
    ];
    for (codec, dictionary) in codecs.into_iter().zip([false, true]) {
        let place = Place::new();
        let bomb = vec![0; 64 << 20];
        let cells: [&[u8]; 3] = [b"one", &bomb, b"three"];
        let cells: ArrayRef = Arc::new(BinaryArray::from_iter_values(cells));
        let batch = RecordBatch::try_from_iter([("jpeg", cells)]).unwrap();
        let properties = WriterProperties::builder()
            .set_max_row_group_row_count(Some(1))
            .set_compression(codec)
            .set_dictionary_enabled(dictionary)
            .build();
        let file = File::create(place.path("bomb.parquet")).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        assert!(place.path("bomb.parquet").metadata().unwrap().len() < 1 << 20);
        let source = place.open("bomb.parquet");
        let found = list(&source).await.unwrap();
        assert_eq!(fetch(&source, &found[0]).await.unwrap(), "one");
        let error = fetch(&source, &found[1]).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::TooLarge, "{error}");
        assert_says(
            &error.to_string(),
            &["bomb.parquet#1", "inflates", "max-bytes"],
        );
        assert_eq!(fetch(&source, &found[2]).await.unwrap(), "three");
        let all = source.fetch(&super::image(&found[1]), 100 << 20).await;
        assert_eq!(all.unwrap(), bomb);
    }
}

/// As `datasets` writes them when images are not embedded: the path alone says where one is.
#[tokio::test]
async fn images_of_a_hugging_face_data_set_may_be_files() {
    let place = Place::with(&["d/images/2.jpg", "d/3.jpg"]);
    for (name, bytes, uris) in [
        (
            "d/some.parquet",
            vec![Some(&b"one"[..]), None, None],
            ["d/some.parquet#0", "d/images/2.jpg", "d/3.jpg"],
        ),
        (
            "d/none.parquet",
            vec![None, None, None],
            ["d/1.jpg", "d/images/2.jpg", "d/3.jpg"],
        ),
    ] {
        let cells: ArrayRef = Arc::new(BinaryArray::from_opt_vec(bytes));
        let paths = strings(&["1.jpg", "images/2.jpg", "3.jpg"]);
        let image = StructArray::from(vec![
            (Arc::new(Field::new("bytes", DataType::Binary, true)), cells),
            (Arc::new(Field::new("path", DataType::Utf8, false)), paths),
        ]);
        let labels = strings(&["cat", "dog", "owl"]);
        let columns = vec![("label", labels), ("image", Arc::new(image) as ArrayRef)];
        write(&place, name, columns, 2);
        let source = place.open(name);
        assert_eq!(place.uris(&source).await, uris);
        let found = list(&source).await.unwrap();
        assert_eq!(found[1].columns, [text("dog")]);
        assert_eq!(fetch(&source, &found[1]).await.unwrap(), "d/images/2.jpg");
        assert_eq!(found[2].size, Some(7));
    }
}

/// A column of bytes next to uris holds the images only if its values are images.
#[tokio::test]
async fn bytes_next_to_uris_are_taken_if_they_are_images() {
    let place = Place::with(&["a.jpg", "b.jpg"]);
    let table = |name: &str, column: &str, values: Vec<Option<&[u8]>>| {
        let bytes: ArrayRef = Arc::new(BinaryArray::from_opt_vec(values));
        let columns = vec![("uri", strings(&["a.jpg", "b.jpg"])), (column, bytes)];
        write(&place, name, columns, 1000);
        place.open(name)
    };
    let hash = table(
        "hash.parquet",
        "hash",
        vec![Some(b"\x01\x02"), Some(b"\x03")],
    );
    assert_eq!(place.uris(&hash).await, ["a.jpg", "b.jpg"]);
    let jpegs = vec![None, Some(&b"\xff\xd8\xff\xe0 and so on"[..])];
    let jpegs = table("jpegs.parquet", "thumbnail", jpegs);
    assert_eq!(
        place.uris(&jpegs).await,
        ["jpegs.parquet#0", "jpegs.parquet#1"]
    );
    assert_eq!(jpegs.columns(), [column("uri", ColumnKind::String)]);
    // The user's own choice goes before what the bytes look like.
    let options = SourceOptions {
        image_column: Some("hash".to_owned()),
        ..SourceOptions::default()
    };
    let hash = place.open_with("hash.parquet", options);
    assert_eq!(
        place.uris(&hash).await,
        ["hash.parquet#0", "hash.parquet#1"]
    );
}
