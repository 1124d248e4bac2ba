//! Images that requests name by url.

use std::time::Instant;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use serde::Deserialize;
use tokio::sync::OwnedSemaphorePermit;

use crate::entrance::{Entrance, Image};
use crate::refused::Refused;

/// The content type of a request with a url.
pub(crate) const CONTENT_TYPE: &str = "application/json";

/// Images of one request fetched at a time.
const ABREAST: usize = 4;

/// The body of such a request.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    url: String,
}

/// Reads a request with a url, and fetches the image. The row's uri is the url unless another is
/// given. The image may be held as long as the permit.
///
/// # Errors
/// If the request is malformed, or as [`Entrance::fetch`].
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

/// Fetches the images at these urls, in order. They may be held as long as the permits.
///
/// # Errors
/// As [`Entrance::fetch`], for the first that fails.
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
