//! Where rows go: Parquet, JSON Lines and CSV in folders and buckets, and tables.
//!
//! An [`Output`] is the destination of a [`JobRecord`]'s rows; once opened, it is a [`ResultSink`],
//! which commits rows in parts. A [`SourceCheck`] compares a listing with the committed rows.
//! [`read_rows`] reads results back.
//!
//! Guarantees. A part appears whole or not at all, is durable before [`ResultSink::commit`]
//! returns, and is its own commit record: a restarted sink knows from the parts alone which indices
//! are committed. No index is committed twice. Parts of other runs of a job are ignored.
//! `design.md` describes the protocol and its failure cases.
//!
//! Deliberately absent: retries and queues, which belong to the worker.

mod cascade_rows;
mod claims;
mod destination;
mod existing;
mod format;
mod format_name;
mod generations;
mod job_record;
mod ledger;
mod numbering;
mod output;
mod owner;
mod part;
mod part_sink;
mod read_back;
mod result_sink;
mod retried;
mod row;
mod runs;
mod stored;
mod stream_sink;
mod summary;
mod table;
mod takeover;

pub use cascade_rows::{CascadeRows, SampledRow};
pub use claims::{Claim, Claims, Preconditions};
pub use destination::Destination;
pub use existing::Existing;
pub use format::{
    Answers, Classes, EncodedPart, EncodedParts, RelabelError, RelabelledGroup, RowGroup,
    RowGroups, StoredColumns,
};
pub use format_name::Format;
pub use generations::FailedImage;
pub use job_record::{JobRecord, Retry};
pub use ledger::Ledger;
pub use numbering::{Misnumbered, misnumbered};
pub use output::{Base, Leased, Output, Reuse};
pub use part::FailureSummary;
pub use read_back::{ResultRow, read_rows};
pub use result_sink::{Committed, Opened, ResultSink};
pub use row::{JsonLines, RowShape};
pub use runs::{Runs, SourceCheck};
pub use stored::{StoredRows, read_stored};
pub use stream_sink::StreamSink;
pub use summary::{PartSummary, Summary};
pub use table::{PostgresConfig, TableDestination, TableRows};
