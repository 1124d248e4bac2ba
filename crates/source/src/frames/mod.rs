//! Frames of videos, decoded by `ffmpeg` a stretch at a time.
//!
//! A thread for each stretch starts `ffmpeg` at the last key frame before it, takes the frames as
//! uncompressed BMP files, and hands them to those who ask. Stretches begin at fixed frames, so that a
//! frame is decoded from the same place whoever asks for it. What nobody has asked for yet is kept, up to
//! a bound; then the decoder waits. A frame that was let go, or that lies behind a fault in its stretch,
//! is decoded alone.

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

/// Stretches that are remembered once they are decoded.
const REMEMBERED: usize = 8;
/// How often a decoder is looked for that has nothing to do, by who needs one.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A frame that is wanted.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    /// What errors call it.
    pub(super) uri: String,
    pub(super) video: String,
    /// The version of the video that was listed.
    pub(super) etag: Option<String>,
    pub(super) rate: FrameRate,
    pub(super) number: u64,
}

/// Why a stretch has no such frame.
enum Missed {
    /// It has to be decoded alone.
    Alone,
    /// It cannot be had.
    Failed(Cause),
}

/// Why frames cannot be had, for each who waits for one.
#[derive(Debug, Clone)]
struct Cause {
    kind: StorageErrorKind,
    /// What follows the name of the frame.
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

/// The videos that are being decoded.
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

    /// Decodes a frame to a BMP file. Of `limits`, the time is the longest without any progress.
    ///
    /// # Errors
    /// When there is no `ffmpeg`, or the video cannot be read, is another version, damaged there, or ends
    /// before.
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
                // Another who asked for the same frame alone has it; or the thread ended.
                Ok(Err(Missed::Alone)) => {}
                Err(_) => {
                    let message = format!("failed to decode {}: the thread ended", frame.uri);
                    return Err(StorageError::new(StorageErrorKind::Unreadable, message));
                }
            }
        }
    }

    /// Leaves a request with a decoder that will come to it, a new one if there is none.
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
            // One that is busy now may be idle soon.
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

/// Forgets stretches that have ended: those that keep nothing, and the oldest.
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
    /// The same for another who waits.
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
