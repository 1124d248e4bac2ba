//! Writes objects, large ones in pieces.

use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};

use super::{Location, S3, failed, unreadable};
use crate::StorageError;

/// Bytes of a piece; S3 takes none below 5 MiB but the last one, and at most 10,000 of them.
pub(super) const PIECE: u64 = 5 << 20;
const MOST_PIECES: u64 = 10_000;
/// Pieces on their way at once.
const SIDE_BY_SIDE: usize = 4;

impl S3 {
    /// Writes an object; it is there as a whole or not at all. With `only_if_absent`,
    /// [`LostRace`](crate::StorageErrorKind::LostRace) says that the store had one of this name.
    pub(crate) async fn put(
        &self,
        object: &Location,
        content: Bytes,
        only_if_absent: bool,
    ) -> Result<(), StorageError> {
        if content.len() as u64 > self.shared.config.multipart_bytes {
            return self.put_in_pieces(object, content, only_if_absent).await;
        }
        let request = self
            .client()
            .await
            .put_object()
            .bucket(&object.bucket)
            .key(&object.key)
            .set_if_none_match(only_if_absent.then(|| "*".to_owned()))
            .body(ByteStream::from(content));
        match request.send().await {
            Ok(_) => Ok(()),
            Err(error) => Err(failed("write", object, &error)),
        }
    }

    async fn put_in_pieces(
        &self,
        object: &Location,
        content: Bytes,
        only_if_absent: bool,
    ) -> Result<(), StorageError> {
        let client = self.client().await;
        let created = client
            .create_multipart_upload()
            .bucket(&object.bucket)
            .key(&object.key)
            .send()
            .await
            .map_err(|error| failed("write", object, &error))?;
        let upload = created.upload_id.ok_or_else(|| {
            unreadable(format!(
                "failed to write {}: the store named no upload",
                object.uri()
            ))
        })?;
        let put = self
            .complete(object, &upload, content, only_if_absent)
            .await;
        if put.is_err() {
            // What is left of it costs money and shows nowhere.
            let abort = client
                .abort_multipart_upload()
                .bucket(&object.bucket)
                .key(&object.key)
                .upload_id(&upload);
            if let Err(error) = abort.send().await {
                let error = failed("write", object, &error);
                tracing::warn!(%error, upload, "its pieces are left in the store");
            }
        }
        put
    }

    async fn complete(
        &self,
        object: &Location,
        upload: &str,
        content: Bytes,
        only_if_absent: bool,
    ) -> Result<(), StorageError> {
        let size = content.len() as u64;
        let piece = PIECE.max(size.div_ceil(MOST_PIECES));
        let pieces = (0..size.div_ceil(piece)).map(|number| {
            let range = number * piece..size.min((number + 1) * piece);
            let bytes = content.slice(range.start as usize..range.end as usize);
            self.put_piece(object, upload, number + 1, bytes)
        });
        let parts: Vec<CompletedPart> = stream::iter(pieces)
            .buffered(SIDE_BY_SIDE)
            .try_collect()
            .await?;
        let client = self.client().await;
        let complete = client
            .complete_multipart_upload()
            .bucket(&object.bucket)
            .key(&object.key)
            .upload_id(upload)
            .set_if_none_match(only_if_absent.then(|| "*".to_owned()))
            .multipart_upload(
                CompletedMultipartUpload::builder()
                    .set_parts(Some(parts))
                    .build(),
            );
        match complete.send().await {
            Ok(_) => Ok(()),
            Err(error) => Err(failed("write", object, &error)),
        }
    }

    async fn put_piece(
        &self,
        object: &Location,
        upload: &str,
        number: u64,
        bytes: Bytes,
    ) -> Result<CompletedPart, StorageError> {
        let number = i32::try_from(number).expect("there are at most 10,000 pieces");
        let stored = self
            .client()
            .await
            .upload_part()
            .bucket(&object.bucket)
            .key(&object.key)
            .upload_id(upload)
            .part_number(number)
            .body(ByteStream::from(bytes))
            .send()
            .await
            .map_err(|error| failed("write", object, &error))?;
        Ok(CompletedPart::builder()
            .part_number(number)
            .set_e_tag(stored.e_tag)
            .build())
    }
}
