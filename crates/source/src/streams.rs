//! Members of compressed archives, which can only be read forwards.
//!
//! A thread for each open archive unpacks it once, from its beginning, and hands out the members
//! that are requested as it passes them, the foremost first. It keeps what it has unpacked last, for
//! those who come a little late. One that is requested behind that costs another pass, which all
//! share that wait for one: work grows with faults, not with images.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::Packing;

use crate::file::etag;
use crate::packed::Unpacker;
use crate::stored::{Reader, Stored};
use crate::stores::Stores;

/// Archives unpacked at once in a process, each by its own thread.
const STREAMS: usize = 4;
/// Bytes of unpacked data that each keeps, in addition to the current member.
const KEPT: usize = 32 << 20;
/// Bytes unpacked at a time.
const STEP: usize = 1 << 20;
/// Time without requests after which a thread ends.
const IDLE: Duration = Duration::from_secs(30);

/// Interval between checks for an idle thread.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A requested member.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// Its name in errors.
    pub(super) uri: String,
    pub(super) archive: String,
    pub(super) packing: Packing,
    /// The listed version of the archive.
    pub(super) etag: Option<String>,
    /// Its position in the unpacked archive.
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl Wanted {
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    fn damaged(&self, reason: &str) -> StorageError {
        let message = format!("failed to read {}: {reason}", self.uri);
        StorageError::new(StorageErrorKind::NotAFile, message)
    }
}

type Answer = Result<(Bytes, Duration), StorageError>;

/// The archives being unpacked.
pub(super) struct Streams {
    stores: Stores,
    permits: Arc<Semaphore>,
    open: Mutex<Vec<Arc<Stream>>>,
}

impl Streams {
    pub(super) fn new(stores: &Stores) -> Self {
        Self {
            stores: stores.clone(),
            permits: Arc::new(Semaphore::new(STREAMS)),
            open: Mutex::default(),
        }
    }

    /// Reads a member. Gives the time that unpacking it took, without what came before it. `patience`
    /// is the longest time without any progress.
    ///
    /// # Errors
    /// If the archive cannot be read, has another version, is damaged, or makes no progress.
    pub(super) async fn read(&self, wanted: &Wanted, patience: Duration) -> Answer {
        let (sender, mut answer) = oneshot::channel();
        let stream = self.ask(wanted, sender).await?;
        let mut moved = stream.moved.load(Ordering::Relaxed);
        loop {
            match timeout(patience, &mut answer).await {
                Ok(Ok(answer)) => return answer,
                Ok(Err(_)) => {
                    let message =
                        format!("failed to read {}: the reading thread ended", wanted.uri);
                    return Err(StorageError::new(StorageErrorKind::Unreadable, message));
                }
                Err(_) => {
                    let now = stream.moved.load(Ordering::Relaxed);
                    if now == moved {
                        return Err(StorageError::timed_out(&wanted.uri, patience));
                    }
                    moved = now;
                }
            }
        }
    }

    /// Passes a request to a thread that will reach it, or to a new one.
    async fn ask(
        &self,
        wanted: &Wanted,
        mut sender: oneshot::Sender<Answer>,
    ) -> Result<Arc<Stream>, StorageError> {
        let mut permit = None;
        loop {
            {
                let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
                open.retain(|stream| !stream.state().has_ended);
                // The nearest one before it.
                open.sort_by_key(|stream| std::cmp::Reverse(stream.moved.load(Ordering::Relaxed)));
                for stream in &*open {
                    match stream.take(wanted, sender) {
                        Ok(()) => return Ok(Arc::clone(stream)),
                        Err(refused) => sender = refused,
                    }
                }
                if let Some(permit) = permit.take() {
                    let stream = Arc::new(Stream::new(wanted, sender));
                    start(&stream, &self.stores, wanted, permit)?;
                    open.push(Arc::clone(&stream));
                    return Ok(stream);
                }
                // Makes room for another archive.
                if self.permits.available_permits() == 0
                    && let Some(idle) = open.iter().find(|stream| stream.state().is_idle())
                {
                    idle.end();
                }
            }
            // A busy one may become idle soon.
            let free = Arc::clone(&self.permits).acquire_owned();
            permit = timeout(LOOK_EVERY, free).await.ok().and_then(Result::ok);
        }
    }
}

/// A request, and its receiver.
type Request = (Wanted, oneshot::Sender<Answer>);

/// One pass over an archive.
struct Stream {
    archive: String,
    etag: Option<String>,
    /// Unpacked bytes, which only grow.
    moved: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By offset, then in order of arrival.
    requests: BTreeMap<(u64, u64), Request>,
    arrivals: u64,
    /// Everything before this is gone.
    floor: u64,
    is_busy: bool,
    has_ended: bool,
}

impl State {
    fn is_idle(&self) -> bool {
        self.requests.is_empty() && !self.is_busy
    }
}

impl Stream {
    /// A pass with its first request.
    fn new(wanted: &Wanted, sender: oneshot::Sender<Answer>) -> Self {
        let request = ((wanted.offset, 0), (wanted.clone(), sender));
        Self {
            archive: wanted.archive.clone(),
            etag: wanted.etag.clone(),
            moved: AtomicU64::new(0),
            state: Mutex::new(State {
                requests: BTreeMap::from([request]),
                is_busy: true,
                ..State::default()
            }),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts a request that it has not passed; returns any other.
    fn take(
        &self,
        wanted: &Wanted,
        sender: oneshot::Sender<Answer>,
    ) -> Result<(), oneshot::Sender<Answer>> {
        if self.archive != wanted.archive || self.etag != wanted.etag {
            return Err(sender);
        }
        let mut state = self.state();
        if state.has_ended || wanted.offset < state.floor {
            return Err(sender);
        }
        state.arrivals += 1;
        let key = (wanted.offset, state.arrivals);
        state.requests.insert(key, (wanted.clone(), sender));
        self.changed.notify_one();
        Ok(())
    }

    fn end(&self) {
        self.state().has_ended = true;
        self.changed.notify_one();
    }

    /// The foremost request; `None` after a while without any. What will be let go for it is
    /// not promised to anybody from here on.
    fn next(&self, pass: &Pass) -> Option<Request> {
        let mut state = self.state();
        state.is_busy = false;
        let until = Instant::now() + IDLE;
        loop {
            if let Some((_, request)) = state.requests.pop_first() {
                // Whoever has gone away wants nothing any more.
                if request.1.is_closed() {
                    continue;
                }
                state.is_busy = true;
                state.floor = state.floor.max(pass.floor_for(request.0.offset));
                return Some(request);
            }
            let left = until.saturating_duration_since(Instant::now());
            if state.has_ended || left.is_zero() {
                state.has_ended = true;
                return None;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends, and tells all who wait why. They may try again: what stopped it may concern the one
    /// member that it was at.
    fn fail(&self, error: &StorageError) {
        let requests = {
            let mut state = self.state();
            state.has_ended = true;
            std::mem::take(&mut state.requests)
        };
        for (wanted, sender) in requests.into_values() {
            let error = match error.kind() {
                StorageErrorKind::Changed => StorageError::changed(&wanted.uri),
                StorageErrorKind::NotFound | StorageErrorKind::PermissionDenied => {
                    let reason = format!("failed to read {}: {error}", wanted.uri);
                    StorageError::new(error.kind(), reason)
                }
                _ => {
                    let reason = format!(
                        "failed to read {}: its archive was not read so far: {error}",
                        wanted.uri
                    );
                    StorageError::new(StorageErrorKind::Unreadable, reason)
                }
            };
            // Who has gone away needs no answer.
            drop(sender.send(Err(error)));
        }
    }
}

/// Starts the thread of a stream.
fn start(
    stream: &Arc<Stream>,
    stores: &Stores,
    wanted: &Wanted,
    permit: OwnedSemaphorePermit,
) -> Result<(), StorageError> {
    let (stream, stores, wanted) = (Arc::clone(stream), stores.clone(), wanted.clone());
    let thread = thread::Builder::new().name("trommel-unpack".to_owned());
    let started = thread.spawn(move || {
        let _permit = permit;
        match Pass::open(&stores, &wanted) {
            Ok(mut pass) => {
                while let Some((wanted, sender)) = stream.next(&pass) {
                    let answer = pass.read(&wanted, &stream.moved);
                    let failed = answer
                        .as_ref()
                        .err()
                        .map(|error| StorageError::new(error.kind(), error.to_string()));
                    drop(sender.send(answer));
                    // Nothing comes behind the end or a fault.
                    if let Some(error) = failed {
                        return stream.fail(&error);
                    }
                }
            }
            Err(error) => stream.fail(&error),
        }
    });
    started
        .map(drop)
        .map_err(|error| StorageError::read("a compressed archive: no thread to unpack it", error))
}

/// What a thread reads of an archive.
struct Pass {
    input: Unpacker,
    /// Looked at for changes in place; objects are requested by their version.
    file: Option<File>,
    etag: Option<String>,
    /// What was unpacked last, and where it begins.
    kept: Vec<u8>,
    start: u64,
}

impl Pass {
    fn open(stores: &Stores, wanted: &Wanted) -> Result<Self, StorageError> {
        let stored = Stored::at(stores, &wanted.archive)?;
        let reader = match &stored {
            Stored::File(path) => Reader::File(
                File::open(path).map_err(|error| StorageError::read(&wanted.archive, error))?,
            ),
            Stored::Object(_) => stored.open()?,
        };
        let file = match &reader {
            Reader::File(file) => file.try_clone().ok(),
            Reader::Object(_) => None,
        };
        if file.is_none() && wanted.etag.is_some() && stored.version() != wanted.etag {
            return Err(StorageError::changed(&wanted.archive));
        }
        let input = Unpacker::new(reader, wanted.packing)
            .map_err(|error| StorageError::read(&wanted.archive, error))?;
        Ok(Self {
            input,
            file,
            etag: wanted.etag.clone(),
            kept: Vec::new(),
            start: 0,
        })
    }

    fn end(&self) -> u64 {
        self.start + self.kept.len() as u64
    }

    /// Where what is kept begins at the latest once a member was read.
    fn floor_for(&self, offset: u64) -> u64 {
        let end = self.end().max(offset);
        self.start.max(end.saturating_sub(KEPT as u64).min(offset))
    }

    fn read(&mut self, wanted: &Wanted, moved: &AtomicU64) -> Answer {
        self.pass_to(wanted, moved)?;
        let began = Instant::now();
        while self.end() < wanted.end() {
            self.step(wanted, wanted.end() - self.end(), moved)?;
        }
        self.check_version(wanted)?;
        let from = usize::try_from(wanted.offset - self.start).unwrap_or(usize::MAX);
        let bytes = self.kept.get(from..from + wanted.length as usize);
        let bytes = bytes.ok_or_else(|| wanted.damaged("its archive was passed already"))?;
        Ok((Bytes::copy_from_slice(bytes), began.elapsed()))
    }

    /// Unpacks up to a member, and lets go of what is too far behind it.
    fn pass_to(&mut self, wanted: &Wanted, moved: &AtomicU64) -> Result<(), StorageError> {
        while self.end() < wanted.offset {
            self.step(wanted, wanted.offset - self.end(), moved)?;
            self.let_go(wanted.offset);
        }
        self.let_go(wanted.offset);
        Ok(())
    }

    /// Unpacks some more, at most `most` bytes.
    fn step(&mut self, wanted: &Wanted, most: u64, moved: &AtomicU64) -> Result<(), StorageError> {
        let before = self.kept.len();
        let most = most.min(STEP as u64);
        let read = (&mut self.input).take(most).read_to_end(&mut self.kept);
        let read = read.and_then(|read| match read {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            read => Ok(read),
        });
        match read {
            Ok(read) => {
                moved.fetch_add(read as u64, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => {
                self.kept.truncate(before);
                Err(match error.downcast::<StorageError>() {
                    Ok(error) => {
                        let message = format!("failed to read {}: {error}", wanted.uri);
                        StorageError::new(error.kind(), message)
                    }
                    Err(error) => {
                        wanted.damaged(&format!("its archive cannot be unpacked: {error}"))
                    }
                })
            }
        }
    }

    /// Keeps so much of what lies before `offset`. In large moves, so that they cost little.
    fn let_go(&mut self, offset: u64) {
        let keep_from = self.end().saturating_sub(KEPT as u64).min(offset);
        let gone = usize::try_from(keep_from.saturating_sub(self.start)).unwrap_or(0);
        if gone > KEPT {
            self.kept.drain(..gone);
            self.start = keep_from;
        }
    }

    /// Refuses an archive that is written to while it is read.
    fn check_version(&self, wanted: &Wanted) -> Result<(), StorageError> {
        let (Some(file), Some(listed)) = (&self.file, &self.etag) else {
            return Ok(());
        };
        let metadata = file
            .metadata()
            .map_err(|error| StorageError::read(&wanted.uri, error))?;
        match etag(&metadata) {
            Some(found) if found != *listed => Err(StorageError::changed(&wanted.uri)),
            _ => Ok(()),
        }
    }
}
