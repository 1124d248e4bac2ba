use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use trommel_infer::Wanted;
use trommel_sink::RowShape;
use trommel_types::{Classification, Outcome};
use trommel_worker::{
    Admitted, Answers, LiveRequest, LiveUrls, NotAnswered, Readiness, ServeConfig, ServedModel,
    UrlFaultKind,
};

use crate::Token;
use crate::refused::Refused;

/// Bytes per permit.
const UNIT: usize = 1 << 10;

/// The shared state of all protocols: models, limits, and access.
pub struct Entrance {
    pub(crate) answers: Arc<Answers>,
    pub(crate) config: ServeConfig,
    pub(crate) readiness: Readiness,
    pub(crate) token: Option<Token>,
    /// Fetches images that requests name by url, if allowed.
    pub(crate) urls: Option<LiveUrls>,
    /// Limit for the bytes of bodies in memory.
    bodies: Arc<Semaphore>,
}

/// An image of a request, as it was read.
pub(crate) struct Image {
    pub(crate) uri: String,
    pub(crate) bytes: Bytes,
}

/// What the images of a request have in common.
pub(crate) struct Asked {
    pub(crate) id: Arc<str>,
    pub(crate) wanted: Arc<Wanted>,
    pub(crate) deadline: Option<Instant>,
}

impl Entrance {
    /// Serves these models. With a `token`, HTTP requests must send it; with `urls`, they may name
    /// images by url.
    pub fn new(
        answers: Arc<Answers>,
        config: ServeConfig,
        readiness: Readiness,
        token: Option<Token>,
        urls: Option<LiveUrls>,
    ) -> Self {
        let units = config.max_bytes_in_flight.get().div_ceil(UNIT);
        Self {
            answers,
            config,
            readiness,
            token,
            urls,
            bodies: Arc::new(Semaphore::new(units.min(Semaphore::MAX_PERMITS))),
        }
    }

    /// Fires when the process has failed.
    pub fn broken(&self) -> &CancellationToken {
        self.answers.broken()
    }

    pub(crate) fn model(&self, name: &str) -> Result<&Arc<ServedModel>, Refused> {
        let model = self.answers.model(name);
        model.ok_or_else(|| Refused::unknown_model(name))
    }

    /// Reserves this many bytes for a body.
    pub(crate) fn hold(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Refused> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        let held = Arc::clone(&self.bodies).try_acquire_many_owned(units);
        held.map_err(|_| {
            Refused::full(format!(
                "serve.max-bytes-in-flight = {} are held by other requests; try again later",
                self.config.max_bytes_in_flight
            ))
        })
    }

    /// Fetches the image at a url, with its reserved memory.
    ///
    /// # Errors
    /// If it is not allowed, or cannot be fetched in time.
    pub(crate) async fn fetch(
        &self,
        url: &str,
        deadline: Option<Instant>,
    ) -> Result<(Bytes, OwnedSemaphorePermit), Refused> {
        let urls = self.urls.as_ref().ok_or_else(Refused::no_urls)?;
        let most = self.config.max_body.get();
        let mut room = self.hold(most)?; // nobody knows yet how much it is
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let limit = self.config.body_timeout;
        let time = left.map_or(limit, |left| left.min(limit));
        let fetched = urls.fetch(url, most as u64, time).await;
        let bytes = fetched.map_err(|fault| match (fault.kind, left) {
            (UrlFaultKind::TimedOut, Some(left)) if left <= limit => NotAnswered::Expired.into(),
            _ => Refused::from(fault),
        })?;
        let spare = room.num_permits() - bytes.len().div_ceil(UNIT).min(room.num_permits());
        drop(room.split(spare));
        Ok((bytes, room))
    }

    /// The answer for a request of one image.
    pub(crate) async fn one(
        &self,
        admitted: Admitted,
        asked: Asked,
        image: Image,
    ) -> Result<Classification, NotAnswered> {
        let request = asked.request(0, image);
        self.answers.classify(&admitted, request).await
    }

    /// The answers for a request with several images, in order, [`abreast`] at a time.
    pub(crate) async fn several(
        &self,
        admitted: &Admitted,
        asked: &Asked,
        images: Vec<Image>,
    ) -> Vec<Result<Classification, NotAnswered>> {
        let requests = (0..).zip(images).map(|(index, image)| {
            let request = asked.request(index, image);
            self.answers.classify(admitted, request)
        });
        futures::stream::iter(requests)
            .buffered(abreast(usize::MAX))
            .collect()
            .await
    }
}

impl Asked {
    fn request(&self, index: u64, image: Image) -> LiveRequest {
        LiveRequest {
            id: Arc::clone(&self.id),
            index,
            uri: image.uri,
            bytes: image.bytes,
            wanted: Arc::clone(&self.wanted),
            deadline: self.deadline,
        }
    }

    /// The format of the request's rows.
    pub(crate) fn shape(&self, model: &ServedModel) -> RowShape {
        RowShape::new(model.record(&self.id, &self.wanted))
    }
}

/// How many images of a request are processed at a time: one per core.
pub(crate) fn abreast(images: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, Into::into);
    images.min(cores)
}

/// The deadline of a request that arrived at `since`, from its header `Trommel-Deadline-Ms`.
pub(crate) fn deadline(since: Instant, header: Option<&str>) -> Result<Option<Instant>, Refused> {
    let Some(text) = header else { return Ok(None) };
    let millis: u64 = text.trim().parse().map_err(|_| {
        Refused::malformed(format!(
            "Trommel-Deadline-Ms is {text:?}; give milliseconds, such as 100"
        ))
    })?;
    let deadline = since.checked_add(Duration::from_millis(millis));
    match deadline {
        Some(deadline) if deadline <= Instant::now() => Err(NotAnswered::Expired.into()),
        deadline => Ok(deadline), // too far away for the type: no deadline
    }
}

/// The id of a request: the client's, if valid, or a new one.
pub(crate) fn request_id(header: Option<&str>) -> Arc<str> {
    let usable =
        |id: &&str| (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    match header.filter(usable) {
        Some(id) => id.into(),
        None => uuid::Uuid::now_v7().to_string().into(),
    }
}

/// The outcome of a row in metrics.
pub(crate) fn outcome(row: &Classification) -> &'static str {
    match row.outcome {
        Outcome::Ok(_) => "ok",
        Outcome::Failed(_) => "failed",
    }
}
