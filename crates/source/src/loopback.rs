//! Serves an object in a store at a local url, for a child process that reads it by ranges.
//!
//! The child needs neither credentials nor TLS, and the store is read by the same client, with the
//! same conditions and limits, as always.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use parquet::file::reader::Length;
use trommel_storage::StorageError;

use crate::stored::Stored;

/// Longest request header in bytes.
const LONGEST_HEAD: u64 = 16 << 10;
/// Bytes sent at a time.
const STEP: usize = 64 << 10;
/// Time limit for the request header.
const PATIENCE: Duration = Duration::from_secs(30);

/// Serves one object to anyone who knows its path, until this is dropped.
pub(super) struct Loopback {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    stored: Stored,
    path: String,
    stop: AtomicBool,
    failure: Mutex<Option<StorageError>>,
}

impl Loopback {
    /// Listens on a port of the loopback interface.
    ///
    /// # Errors
    /// If no port or thread is available.
    pub(super) fn serve(stored: &Stored) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            stored: stored.clone(),
            path: format!("/{:016x}{:016x}", random(), random()),
            stop: AtomicBool::new(false),
            failure: Mutex::default(),
        });
        let served = Arc::clone(&shared);
        let thread = thread::Builder::new().name("trommel-loopback".to_owned());
        thread.spawn(move || accept(&listener, &served))?;
        Ok(Self { address, shared })
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}{}", self.address, self.shared.path)
    }

    /// The error that prevented reading the object, if any.
    pub(super) fn failure(&self) -> Option<StorageError> {
        let mut failure = self.shared.failure.lock();
        failure.as_mut().map_or_else(
            |poisoned| poisoned.get_mut().take(),
            |failure| failure.take(),
        )
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        // Wakes the accepting thread.
        drop(TcpStream::connect(self.address));
    }
}

/// An unpredictable number: the system's randomness keys the hash.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for connection in listener.incoming() {
        if shared.stop.load(Relaxed) {
            return;
        }
        let Ok(connection) = connection else { continue };
        let shared = Arc::clone(shared);
        let thread = thread::Builder::new().name("trommel-loopback".to_owned());
        // A reader that leaves early ends its connection, as does a failure to start a thread.
        drop(thread.spawn(move || drop(answer(&connection, &shared))));
    }
}

/// Answers one request, and closes.
fn answer(connection: &TcpStream, shared: &Shared) -> io::Result<()> {
    connection.set_read_timeout(Some(PATIENCE))?;
    let (path, start) = request(connection)?;
    let mut output = connection;
    if path != shared.path {
        return output.write_all(
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        );
    }
    let size = shared.stored.len();
    let Some(last) = size.checked_sub(1).filter(|last| start <= *last) else {
        let head = format!(
            "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */{size}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        return output.write_all(head.as_bytes());
    };
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\nAccept-Ranges: bytes\r\nContent-Range: bytes {start}-{last}/{size}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        size - start
    );
    output.write_all(head.as_bytes())?;
    let mut reader = shared.stored.open().map_err(io::Error::other)?;
    reader.seek(SeekFrom::Start(start))?;
    let mut buffer = vec![0; STEP];
    loop {
        let read = match reader.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(error) => {
                let error = match error.downcast::<StorageError>() {
                    Ok(error) => error,
                    Err(error) => StorageError::read(&shared.stored, error),
                };
                let mut failure = shared
                    .failure
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                failure.get_or_insert(error);
                return Ok(());
            }
        };
        output.write_all(&buffer[..read])?;
    }
}

/// The path of a request, and the first byte of its range.
fn request(connection: &TcpStream) -> io::Result<(String, u64)> {
    let mut head = BufReader::new(connection.take(LONGEST_HEAD));
    let (mut path, mut start, mut line) = (String::new(), 0, String::new());
    loop {
        line.clear();
        if head.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let text = line.trim_end();
        if text.is_empty() {
            return Ok((path, start));
        }
        if path.is_empty() {
            path = text.split(' ').nth(1).unwrap_or_default().to_owned();
        }
        let Some((name, value)) = text.split_once(':') else {
            continue;
        };
        if name.eq_ignore_ascii_case("range") {
            let first = value.trim().strip_prefix("bytes=");
            let first = first.and_then(|range| range.split('-').next()?.parse().ok());
            start = first.unwrap_or(0);
        }
    }
}
