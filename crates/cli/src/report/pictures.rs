//! Thumbnails of the images in a report.

use std::collections::{BTreeSet, HashMap};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::{StreamExt, stream};
use trommel_preprocess::{Limits, thumbnail};

use crate::originals::Originals;

/// Longer side of a thumbnail in pixels: twice its size on the page.
const SIDE: u32 = 192;
/// Images read concurrently.
const SIDE_BY_SIDE: usize = 16;

/// A thumbnail as a `data:` URL, or why it could not be made.
pub(super) type Picture = Result<String, String>;

/// Makes thumbnails of these images.
pub(super) async fn make(
    uris: BTreeSet<String>,
    originals: &Originals,
) -> HashMap<String, Picture> {
    stream::iter(uris)
        .map(|uri| async move {
            let picture = make_one(originals, &uri).await;
            (uri, picture)
        })
        .buffer_unordered(SIDE_BY_SIDE)
        .collect()
        .await
}

async fn make_one(originals: &Originals, uri: &str) -> Picture {
    let limits = Limits::default();
    let bytes = originals.read(uri, limits.max_bytes).await?;
    let made = tokio::task::spawn_blocking(move || thumbnail(&bytes, SIDE, limits));
    let made = made.await.map_err(|_| "it cannot be drawn".to_owned())?;
    let (jpeg, _) = made.map_err(|error| error.to_string())?;
    Ok(format!("data:image/jpeg;base64,{}", STANDARD.encode(jpeg)))
}
