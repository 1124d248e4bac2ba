//! Frames of videos, decoded by `ffmpeg` in stretches.
//!
//! One thread per stretch starts `ffmpeg` at the last key frame before it, reads the frames as
//! uncompressed BMP files, and passes them to the requests. Stretches begin at fixed frames, so
//! that a frame is always decoded from the same place. Frames that are not requested yet are kept,
//! up to a limit; then the decoder waits. A frame that was dropped, or that follows an error in its
//! stretch, is decoded alone.

mod decode;
mod decoding;
mod stretch;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::FrameRate;

use self::decoding::{Decoding, End};
use self::stretch::Stretch;
use crate::ffmpeg::Ffmpeg;
use crate::stores::Stores;
use crate::{FetchLimits, Fetched, VideoConfig};

/// Remembered finished stretches.
const REMEMBERED: usize = 8;
/// Interval between checks for an idle decoder.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A requested frame.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    /// Its name in errors.
    pub(super) uri: String,
    pub(super) video: String,
    /// The listed version of the video.
    pub(super) etag: Option<String>,
    pub(super) rate: FrameRate,
    pub(super) number: u64,
}

/// Why a stretch lacks a frame.
enum Missed {
    /// It has to be decoded alone.
    Alone,
    /// It is unavailable.
    Failed(Cause),
}

/// Why frames are unavailable, for each request.
#[derive(Debug, Clone)]
struct Cause {
    kind: StorageErrorKind,
    /// The error without the name of the frame.
    reason: String,
}

impl Cause {
    fn new(kind: StorageErrorKind, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self { kind, reason }
    }

    fn of(error: &StorageError) -> Self {
        Self::new(error.kind(), error.to_string())
    }

    fn error(&self, frame: &Frame) -> StorageError {
        match self.kind {
            StorageErrorKind::Changed => StorageError::changed(&frame.uri),
            kind => StorageError::new(
                kind,
                format!("failed to decode {}: {}", frame.uri, self.reason),
            ),
        }
    }
}

type Answer = Result<Fetched, Missed>;

/// The videos being decoded.
pub(super) struct Frames {
    config: VideoConfig,
    stores: Stores,
    permits: Arc<Semaphore>,
    open: Mutex<Vec<Arc<Decoding>>>,
}

impl Frames {
    pub(super) fn new(stores: &Stores, config: &VideoConfig) -> Self {
        Self {
            config: config.clone(),
            stores: stores.clone(),
            permits: Arc::new(Semaphore::new(config.max_decoders.get())),
            open: Mutex::default(),
        }
    }

    /// Decodes a frame to a BMP file. The time in `limits` is the longest without progress.
    ///
    /// # Errors
    /// If there is no `ffmpeg`, or the video cannot be read, has another version, is damaged there,
    /// or ends earlier.
    pub(super) async fn read(
        &self,
        frame: &Frame,
        limits: FetchLimits,
    ) -> Result<Fetched, StorageError> {
        let mut stretch = Stretch::of(frame);
        loop {
            let is_alone = stretch.count == 1;
            let (sender, answer) = oneshot::channel();
            self.ask(frame, stretch, sender, limits).await?;
            match answer.await {
                Ok(Ok(fetched)) => return Ok(fetched),
                Ok(Err(Missed::Failed(cause))) => return Err(cause.error(frame)),
                Ok(Err(Missed::Alone)) if !is_alone => stretch = Stretch::only(frame),
                // Another request for the same frame alone took it, or the thread ended.
                Ok(Err(Missed::Alone)) => {}
                Err(_) => {
                    let message = format!("failed to decode {}: the thread ended", frame.uri);
                    return Err(StorageError::new(StorageErrorKind::Unreadable, message));
                }
            }
        }
    }

    /// Passes a request to a decoder that will reach it, or to a new one.
    async fn ask(
        &self,
        frame: &Frame,
        stretch: Stretch,
        mut sender: oneshot::Sender<Answer>,
        limits: FetchLimits,
    ) -> Result<(), StorageError> {
        let mut permit = None;
        loop {
            {
                let mut open = lock(&self.open);
                forget(&mut open);
                for decoding in open.iter().filter(|one| one.is_of(frame, stretch)) {
                    match decoding.take(frame.number, sender) {
                        None => return Ok(()),
                        Some(refused) => sender = refused,
                    }
                }
                if let Some(permit) = permit.take() {
                    let decoding = Arc::new(Decoding::new(frame, stretch, sender));
                    self.start(&decoding, permit, limits)?;
                    open.push(decoding);
                    return Ok(());
                }
                // Makes room for another.
                if self.permits.available_permits() == 0
                    && let Some(idle) = open.iter().find(|decoding| decoding.state().is_idle())
                {
                    idle.stop();
                }
            }
            // A busy decoder may become idle soon.
            let free = Arc::clone(&self.permits).acquire_owned();
            permit = timeout(LOOK_EVERY, free).await.ok().and_then(Result::ok);
        }
    }

    /// Starts the thread of a stretch.
    fn start(
        &self,
        decoding: &Arc<Decoding>,
        permit: OwnedSemaphorePermit,
        limits: FetchLimits,
    ) -> Result<(), StorageError> {
        let ffmpeg = Ffmpeg::find(&self.config).map_err(|reason| {
            let uri = &decoding.frame.uri;
            StorageError::unavailable(format!("failed to decode {uri}: {reason}"))
        })?;
        let (decoding, stores) = (Arc::clone(decoding), self.stores.clone());
        let thread = thread::Builder::new().name("trommel-frames".to_owned());
        let started = thread.spawn(move || {
            let ended = decoding.run(&ffmpeg, &stores, limits);
            drop(permit);
            decoding.end(ended);
        });
        started
            .map(drop)
            .map_err(|error| StorageError::read("a video: no thread to decode it", error))
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        lock(&self.open).iter().for_each(|decoding| decoding.stop());
    }
}

/// Forgets finished stretches: those without kept frames, and the oldest.
fn forget(open: &mut Vec<Arc<Decoding>>) {
    open.retain(|decoding| {
        let state = decoding.state();
        match &state.ended {
            Some(End::Rest(Missed::Failed(_))) => true,
            Some(_) => !state.kept.is_empty(),
            None => true,
        }
    });
    let has_ended = |decoding: &Arc<Decoding>| decoding.state().ended.is_some();
    while open.iter().filter(|decoding| has_ended(decoding)).count() > REMEMBERED {
        let Some(oldest) = open.iter().position(has_ended) else {
            return;
        };
        open.remove(oldest);
    }
}

impl Missed {
    /// The same error for another request.
    fn again(&self) -> Self {
        match self {
            Self::Alone => Self::Alone,
            Self::Failed(cause) => Self::Failed(cause.clone()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
