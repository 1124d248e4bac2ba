//! Which columns of a file are copied unchanged to rows with new classes.

use std::sync::Arc;

use arrow_schema::{Schema, SchemaRef};
use parquet::arrow::ArrowSchemaConverter;
use parquet::basic::LogicalType;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use parquet::schema::types::{ColumnDescriptor, SchemaDescPtr};

use super::job_ids::JOB_ID;
use super::{schema, vectors};
use crate::JobRecord;

/// Columns that depend on the classes.
const NEW: [&str; 4] = [JOB_ID, "label", "score", "top"];
/// Columns that change if an embedding has no classes.
pub(super) const OUTCOME: [&str; 3] = ["status", "error_kind", "error"];

/// The columns of rows with new classes.
pub(super) struct Shape {
    /// The job's schema, in which copied columns may be null as in the source.
    pub(super) schema: SchemaRef,
    parquet: SchemaDescPtr,
    /// Columns that may be null in the source but never are in rows.
    never_null: Vec<String>,
}

impl Shape {
    /// The schema of a job whose rows come from files like the first one; `None` if columns are
    /// missing.
    ///
    /// # Errors
    /// If Parquet cannot represent the columns.
    pub(super) fn of(
        job: &JobRecord,
        first: &ParquetMetaData,
    ) -> Result<Option<Self>, ParquetError> {
        let mut never_null = Vec::new();
        let mut fields = Vec::new();
        for field in schema(job, None).fields() {
            if NEW.contains(&field.name().as_str()) {
                fields.push(Arc::clone(field));
                continue;
            }
            let Some(place) = leaf(first, field.name()) else {
                return Ok(None);
            };
            let is_optional = column(first, place).self_type().is_optional();
            if is_optional && !field.is_nullable() {
                never_null.push(field.name().clone());
            }
            let field = field.as_ref().clone().with_nullable(is_optional);
            fields.push(Arc::new(field));
        }
        let schema = Arc::new(Schema::new(fields));
        let parquet = Arc::new(ArrowSchemaConverter::new().convert(&schema)?);
        Ok(Some(Self {
            schema,
            parquet,
            never_null,
        }))
    }

    /// Whether a file has all columns, including embeddings, with these types, and no nulls where
    /// rows have none.
    pub(super) fn fits(&self, metadata: &ParquetMetaData) -> bool {
        let copied = self.parquet.columns().iter().all(|wanted| {
            let Some(name) = copied(wanted) else {
                return true;
            };
            leaf(metadata, name).is_some_and(|place| is_same(wanted, column(metadata, place)))
        });
        let no_nulls = |name: &String| {
            let groups = metadata.row_groups().iter();
            leaf(metadata, name).is_some_and(|place| {
                groups
                    .map(|group| group.column(place))
                    .all(|chunk| nulls(chunk) == Some(0))
            })
        };
        copied && vectors::place(metadata).is_some() && self.never_null.iter().all(no_nulls)
    }

    /// For each leaf column, in order, the source's column to copy; `None` for new ones.
    pub(super) fn sources(&self, metadata: &ParquetMetaData) -> Vec<Option<usize>> {
        let columns = self.parquet.columns().iter();
        columns
            .map(|wanted| leaf(metadata, copied(wanted)?))
            .collect()
    }
}

/// The name of a copied column.
fn copied(column: &ColumnDescriptor) -> Option<&str> {
    let name = column.path().parts()[0].as_str();
    (!NEW.contains(&name)).then_some(name)
}

/// The position of a column that is not a list.
pub(super) fn leaf(metadata: &ParquetMetaData, name: &str) -> Option<usize> {
    let columns = metadata.file_metadata().schema_descr().columns();
    columns
        .iter()
        .position(|column| column.path().parts() == [name])
}

fn column(metadata: &ParquetMetaData, place: usize) -> &ColumnDescriptor {
    &metadata.file_metadata().schema_descr().columns()[place]
}

/// Whether the values of both columns are encoded in the same way.
fn is_same(a: &ColumnDescriptor, b: &ColumnDescriptor) -> bool {
    let text = |column: &ColumnDescriptor| match column.logical_type_ref() {
        // The older name, which all writers provide as well.
        None | Some(LogicalType::String) => Some(column.converted_type()),
        Some(_) => None,
    };
    a.physical_type() == b.physical_type()
        && a.max_def_level() == b.max_def_level()
        && a.max_rep_level() == b.max_rep_level()
        && match (text(a), text(b)) {
            (Some(a), Some(b)) => a == b,
            _ => a.logical_type_ref() == b.logical_type_ref(),
        }
}

fn nulls(chunk: &ColumnChunkMetaData) -> Option<u64> {
    chunk.statistics()?.null_count_opt()
}

/// The text that all rows of a column have, if its statistics show one.
pub(super) fn only_text(chunk: &ColumnChunkMetaData) -> Option<&[u8]> {
    let statistics = chunk.statistics()?;
    // Both bounds may be truncated, but no value lies between two equal ones.
    let (least, most) = (statistics.min_bytes_opt()?, statistics.max_bytes_opt()?);
    (least == most && statistics.null_count_opt() == Some(0)).then_some(least)
}
