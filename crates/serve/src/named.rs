//! Images that requests name by a url.

use std::time::Instant;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use serde::Deserialize;
use tokio::sync::OwnedSemaphorePermit;

use crate::entrance::{Entrance, Image};
use crate::refused::Refused;

/// The content type of a request that names its image.
pub(crate) const CONTENT_TYPE: &str = "application/json";

/// Images of one request that are fetched at a time.
const ABREAST: usize = 4;

/// What such a request holds.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    url: String,
}

/// Reads a request that names its image, and fetches that. The row's uri is the url unless there is
/// another. The image may be held as long as the permit.
///
/// # Errors
/// When the request is malformed, or as [`Entrance::fetch`].
pub(crate) async fn fetch(
    entrance: &Entrance,
    request: Bytes,
    uri: Option<String>,
    deadline: Option<Instant>,
) -> Result<(Image, OwnedSemaphorePermit), Refused> {
    let Named { url } = serde_json::from_slice(&request).map_err(|error| {
        let message = format!("the request cannot be read as {{\"url\": \"https://…\"}}: {error}");
        Refused::malformed(message)
    })?;
    drop(request);
    let (bytes, room) = entrance.fetch(&url, deadline).await?;
    let uri = uri.unwrap_or(url);
    Ok((Image { uri, bytes }, room))
}

/// Fetches the images at these urls, in their order. They may be held as long as the permits.
///
/// # Errors
/// As [`Entrance::fetch`], for the first that cannot be.
pub(crate) async fn fetch_all(
    entrance: &Entrance,
    urls: &[Bytes],
    deadline: Option<Instant>,
) -> Result<(Vec<Image>, Vec<OwnedSemaphorePermit>), Refused> {
    let fetched = urls.iter().cloned().map(|url: Bytes| async move {
        let uri = String::from_utf8_lossy(&url).into_owned();
        let (bytes, room) = entrance.fetch(&uri, deadline).await?;
        Ok::<_, Refused>((Image { uri, bytes }, room))
    });
    let fetched = futures::stream::iter(fetched).buffered(ABREAST);
    fetched.try_collect().await
}
