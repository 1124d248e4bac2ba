//! Rows as parts: each part is its own commit record.

mod bucket;
mod destination;
mod existing;
mod files;
mod finish;
mod folder;
mod ledger;
mod merge;
mod output;
mod owner;
mod parquet_part;
mod part;
mod part_sink;
mod read_back;
mod result_sink;
mod row;
mod runs;
mod table;
mod text_part;

pub use bucket::{BucketDestination, BucketSink, Claim, Claims};
pub use destination::{Destination, Format};
pub use existing::Existing;
pub use finish::{PartSummary, Summary};
pub use output::{Output, Reuse};
pub use part::FailureSummary;
pub use part_sink::PartSink;
pub use read_back::{ResultRow, read_rows};
pub use result_sink::{Committed, Opened, ResultSink};
pub use row::{JobRecord, JsonLines};
pub use runs::{Runs, SourceCheck};
pub use table::{PostgresConfig, TableDestination, TableSink};
