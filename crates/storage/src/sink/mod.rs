//! Rows as parts: each part is its own commit record.

mod bucket_sink;
mod destination;
mod files;
mod finish;
mod folder;
mod ledger;
mod merge;
mod output;
mod parquet_part;
mod part;
mod part_sink;
mod read_back;
mod row;
mod runs;
mod text_part;

pub use bucket_sink::{BucketDestination, BucketSink, Claim, Claims};
pub use destination::{Destination, Format};
pub use finish::{PartSummary, Summary};
pub use part::FailureSummary;
pub use part_sink::{Committed, Opened, PartSink};
pub use read_back::{ResultRow, read_rows};
pub use row::{JobRecord, JsonLines};
pub use runs::{Runs, SourceCheck};
