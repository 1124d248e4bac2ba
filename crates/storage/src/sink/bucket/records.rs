//! What the parts in a bucket commit.

use std::io::Write;

use crate::StorageError;
use crate::s3::Object;
use crate::sink::bucket::BucketDestination;
use crate::sink::part::PartRecord;
use crate::sink::row::JobRecord;
use crate::sink::{Format, parquet_part};

/// Bytes at the end of a Parquet part that are read to learn what it commits; more when its footer
/// is larger.
const FOOTER: u64 = 64 << 10;

/// What a part commits: of Parquet the footer alone is read, of the text formats all of it.
pub(super) async fn record_of(
    destination: &BucketDestination,
    job: &JobRecord,
    object: &Object,
) -> Result<PartRecord, StorageError> {
    let (place, path) = (
        destination.object(&object.key),
        destination.shown(&object.key),
    );
    if destination.format != Format::Parquet {
        let content = destination.s3.get(&place, None, u64::MAX).await?;
        return text_record(&content, destination.format, job);
    }
    let mut wanted = FOOTER;
    loop {
        let length = wanted.min(object.size);
        let range = (object.size - length, length);
        let end = destination.s3.get(&place, Some(range), u64::MAX).await?;
        match parquet_part::read_record_from(end, object.size, &path, &job.job_id)? {
            Ok(record) => return record.check(&path),
            Err(needed) if needed > length => wanted = needed,
            Err(_) => return Err(StorageError::corrupt(&path, "its footer cannot be read")),
        }
    }
}

fn text_record(
    content: &[u8],
    format: Format,
    job: &JobRecord,
) -> Result<PartRecord, StorageError> {
    PartRecord::read(temporary(content)?.path(), format, job)
}

/// An object as a file, for readers of files.
pub(super) fn temporary(content: &[u8]) -> Result<tempfile::NamedTempFile, StorageError> {
    let failed = |error| StorageError::write(std::env::temp_dir().as_path(), error);
    let mut file = tempfile::NamedTempFile::new().map_err(failed)?;
    file.write_all(content).map_err(failed)?;
    Ok(file)
}
