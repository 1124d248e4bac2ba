//! Thumbnails of the images that a report shows.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::{StreamExt, stream};
use trommel_preprocess::{Limits, thumbnail};
use trommel_storage::{Source, SourceOptions, fetcher};
use trommel_types::{Content, ImageRef, Lane};

/// Longer side of a thumbnail, in pixels: twice what it takes on the page.
const SIDE: u32 = 192;
/// Images that are read side by side.
const SIDE_BY_SIDE: usize = 16;

/// A thumbnail as a `data:` URL, or why there is none.
pub(super) type Picture = Result<String, String>;

/// Makes thumbnails of these images, wherever they are.
pub(super) async fn make(
    uris: BTreeSet<String>,
    options: &SourceOptions,
) -> HashMap<String, Picture> {
    let source = fetcher(options);
    stream::iter(uris)
        .map(|uri| {
            let source = Arc::clone(&source);
            async move {
                let picture = make_one(source, &uri).await;
                (uri, picture)
            }
        })
        .buffer_unordered(SIDE_BY_SIDE)
        .collect()
        .await
}

async fn make_one(source: Arc<dyn Source>, uri: &str) -> Picture {
    if uri.contains('#') {
        return Err("it is inside an archive or a table".to_owned());
    }
    let image = ImageRef {
        job: "report".into(),
        index: 0,
        lane: Lane::Normal,
        uri: uri.to_owned(),
        content: Content::Whole,
        etag: None,
        size: None,
        columns: Vec::new(),
    };
    let limits = Limits::default();
    let bytes = source.fetch(&image, limits.max_bytes).await;
    let bytes = bytes.map_err(|error| error.to_string())?;
    let made = tokio::task::spawn_blocking(move || thumbnail(&bytes, SIDE, limits));
    let made = made.await.map_err(|_| "it cannot be drawn".to_owned())?;
    let (jpeg, _) = made.map_err(|error| error.to_string())?;
    Ok(format!("data:image/jpeg;base64,{}", STANDARD.encode(jpeg)))
}
