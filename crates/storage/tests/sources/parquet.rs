//! Parquet files that name images or hold them.

use std::fs::File;

use ::parquet::arrow::ArrowWriter;
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
    let paths = strings(&["1.jpg", "2.jpg", "3.jpg", "4.jpg"]);
    let image = StructArray::from(vec![
        (Arc::new(Field::new("bytes", DataType::Binary, true)), cells),
        (Arc::new(Field::new("path", DataType::Utf8, false)), paths),
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

#[tokio::test]
async fn a_file_that_was_replaced_is_read_anew() {
    let place = Place::new();
    write(&place, "table.parquet", vec![("jpeg", images(3000))], 700);
    let source = place.open("table.parquet");
    let found = list(&source).await.unwrap();
    assert_eq!(fetch(&source, &found[0]).await.unwrap(), content(0));
    std::fs::remove_file(place.path("table.parquet")).unwrap();
    write(&place, "table.parquet", vec![("jpeg", images(10))], 700);
    let error = fetch(&source, &found[2500]).await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::NotAFile);
    assert_says(&error.to_string(), &["table.parquet#2500", "row 2500"]);
    assert_eq!(fetch(&source, &found[9]).await.unwrap(), content(9));
}
