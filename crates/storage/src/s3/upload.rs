//! Writes objects, large ones in pieces.

use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};

use super::fault::{failed, unreadable};
use super::{Location, S3};
use crate::{StorageError, StorageErrorKind};

/// Bytes per piece; S3 requires at least 5 MiB except for the last one, and at most 10,000 pieces.
pub(super) const PIECE: u64 = 5 << 20;
const MOST_PIECES: u64 = 10_000;
/// Pieces uploaded concurrently.
const SIDE_BY_SIDE: usize = 4;

impl S3 {
    /// Writes an object atomically. With `only_if_absent`,
    /// [`LostRace`](crate::StorageErrorKind::LostRace) means that the store had one with this name.
    pub async fn put(
        &self,
        object: &Location,
        content: Bytes,
        only_if_absent: bool,
    ) -> Result<(), StorageError> {
        if content.len() as u64 > self.shared.config.multipart_bytes {
            let put = self.put_in_pieces(object, content.clone(), only_if_absent);
            let Err(error) = put.await else {
                return Ok(());
            };
            // If the response to a completion is lost, the next attempt finds the upload gone, or
            // the object present.
            let may_be_there = [StorageErrorKind::NotFound, StorageErrorKind::LostRace];
            if may_be_there.contains(&error.kind()) && self.holds(object, &content).await? {
                return Ok(());
            }
            return Err(error);
        }
        self.put_whole(object, content, only_if_absent).await
    }

    /// Replaces an object that contains `old`, in the version reported by the store. An object that
    /// already contains `content` counts as written by this.
    pub async fn replace(
        &self,
        object: &Location,
        old: &Bytes,
        content: Bytes,
    ) -> Result<(), StorageError> {
        let lost = || StorageError::lost_race(object.uri());
        let written = async {
            let client = self.client().await;
            let (bucket, key) = (&object.bucket, &object.key);
            let found = client.head_object().bucket(bucket).key(key).send().await;
            let found = found.map_err(|error| failed("look at", object, &error))?;
            let version = found.e_tag().map(|etag| etag.trim_matches('"'));
            let held = self.get_version(object, None, version, u64::MAX).await?;
            if held != *old {
                return Err(lost());
            }
            let request = client.put_object().bucket(bucket).key(key);
            let request = request
                .set_if_match(version.map(|etag| format!("\"{etag}\"")))
                .body(ByteStream::from(content.clone()));
            let put = request.send().await;
            put.map_err(|error| failed("write", object, &error))
        };
        let Err(error) = written.await else {
            return Ok(());
        };
        // Another version; or this one, whose response was lost.
        let is_other = matches!(
            error.kind(),
            StorageErrorKind::LostRace | StorageErrorKind::Changed | StorageErrorKind::NotFound
        );
        match is_other {
            true if self.holds(object, &content).await? => Ok(()),
            true => Err(lost()),
            false => Err(error),
        }
    }

    /// As [`S3::put`], in one request.
    pub(super) async fn put_whole(
        &self,
        object: &Location,
        content: Bytes,
        only_if_absent: bool,
    ) -> Result<(), StorageError> {
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

    /// As [`S3::put`], in several requests.
    pub(super) async fn put_in_pieces(
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
            // Its remains cost money and are not visible.
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

    /// Whether an object has this content.
    async fn holds(&self, object: &Location, content: &Bytes) -> Result<bool, StorageError> {
        match self.get(object, None, content.len() as u64).await {
            Ok(found) => Ok(found == content),
            Err(error)
                if matches!(
                    error.kind(),
                    StorageErrorKind::NotFound | StorageErrorKind::TooLarge
                ) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
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
