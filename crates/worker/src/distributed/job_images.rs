//! Where the images of a job come from.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::time::Instant;
use trommel_queue::Feed;
use trommel_source::{Found, Source};
use trommel_storage::StorageError;
use trommel_types::{Column, JobRequest};

use crate::distributed::feed;
use crate::distributed::record::{Counted, Job, Listing};
use crate::ingest::{self, Announced, Share};
use crate::{WorkerConfig, WorkerError};

/// Images that a dry run classifies.
const DRY_RUN_IMAGES: u64 = 512;
/// Time limit for counting the images of a dry run.
const COUNT_FOR: Duration = Duration::from_secs(30);

/// Where the images of a job come from.
pub(crate) enum Images {
    Source(Arc<dyn Source>),
    Feed(Box<Feed>),
}

/// Which images of a job are listed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Which {
    All,
    /// The sample of a cascade.
    Sample(Share),
    /// The images of a cascade without a row.
    Rest,
}

impl Images {
    /// A description, for rows and people.
    pub(crate) fn describe(&self, request: &JobRequest) -> String {
        match self {
            Self::Source(source) => source.describe(),
            Self::Feed(_) => request.sources.concat(),
        }
    }

    pub(crate) fn columns(&self) -> Vec<Column> {
        match self {
            Self::Source(source) => source.columns().to_vec(),
            Self::Feed(_) => feed::columns(),
        }
    }
}

/// Counts the images of a source, within a time limit.
pub(crate) async fn count(source: &dyn Source) -> Result<Counted, WorkerError> {
    let (deadline, mut listing) = (Instant::now() + COUNT_FOR, source.list());
    let mut images = 0;
    loop {
        match tokio::time::timeout_at(deadline, listing.next()).await {
            Ok(Some(found)) => {
                found?;
                images += 1;
            }
            ended => {
                let is_all = ended.is_ok();
                return Ok(Counted { images, is_all });
            }
        }
    }
}

/// The images of a job. For a feed, those after its position.
pub(crate) fn listed(
    request: &JobRequest,
    images: &Images,
    config: &WorkerConfig,
    mark: Option<String>,
) -> BoxStream<'static, Result<Found, StorageError>> {
    let source = match images {
        Images::Source(source) => source,
        Images::Feed(feed) => {
            let options = config.source_options(&request.options);
            return feed::images(feed.as_ref().clone(), mark.as_deref(), options);
        }
    };
    let all = source.list();
    if request.options.dry_run {
        return all
            .take(usize::try_from(DRY_RUN_IMAGES).unwrap_or(usize::MAX))
            .boxed();
    }
    all
}

/// Where the listing of a job resumes.
pub(crate) fn start_of(job: &Job, known: &Listing, images: &Images) -> ingest::Start {
    let (is_feed, is_retry) = (
        matches!(images, Images::Feed(_)),
        job.spec.request.options.retry.is_some(),
    );
    ingest::Start {
        first: if is_feed { known.listed } else { 0 },
        stored: match is_retry {
            true => 0, // its rows say what is done
            false if job.lists_some() => known.passed.unwrap_or_default(),
            false => known.listed,
        },
        announced: match is_feed || is_retry {
            true => Announced::default(),
            false => known.announced,
        },
        generation: match known.generation {
            0 => String::new(),
            generation => format!("-{generation}"),
        },
        is_checked: false,
    }
}
