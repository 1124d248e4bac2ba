//! Proxies between a process and a server that fail on purpose.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Forwards connections until it is cut.
pub struct Wire {
    address: SocketAddr,
    is_cut: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Wire {
    /// In front of a server at this port.
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let wire = Self {
            address: listener.local_addr().unwrap(),
            is_cut: Arc::default(),
            open: Arc::default(),
        };
        let (is_cut, open) = (Arc::clone(&wire.is_cut), Arc::clone(&wire.open));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let server = TcpStream::connect(("127.0.0.1", port));
                let (Ok(server), false) = (server, is_cut.load(Ordering::Acquire)) else {
                    continue;
                };
                let mut open = open.lock().unwrap();
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    open.push(from.try_clone().unwrap());
                    thread::spawn(move || pass_on(from, to));
                }
            }
        });
        wire
    }

    /// Its address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes all connections, and accepts no new ones.
    pub fn cut(&self) {
        self.is_cut.store(true, Ordering::Release);
        for stream in self.open.lock().unwrap().drain(..) {
            // It may have ended already.
            drop(stream.shutdown(Shutdown::Both));
        }
    }

    /// Accepts connections again.
    pub fn mend(&self) {
        self.is_cut.store(false, Ordering::Release);
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream) {
    // Either side may end.
    drop(io::copy(&mut from, &mut to));
    drop(to.shutdown(Shutdown::Both));
}

/// A fault of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoreFault {
    /// It answers slowly.
    Slow,
    /// It answers with this status and applies nothing.
    Refuses(u16),
    /// The connection ends before the request is applied.
    CutBefore,
    /// The connection ends after the request is applied, and before the answer.
    CutAfter,
}

/// Every kind.
const FAULTS: [StoreFault; 6] = [
    StoreFault::Slow,
    StoreFault::Refuses(500),
    StoreFault::Refuses(503),
    StoreFault::Refuses(429),
    StoreFault::CutBefore,
    StoreFault::CutAfter,
];

/// Forwards HTTP requests, each over its own connection, and makes a share of them fail.
pub struct FlakyStore {
    address: SocketAddr,
    state: Arc<Mutex<Flaky>>,
}

struct Flaky {
    random: StdRng,
    percent: u32,
    counts: BTreeMap<StoreFault, usize>,
}

impl FlakyStore {
    /// In front of a server at this address (`http://HOST:PORT`).
    pub fn before(endpoint: &str, seed: u64) -> Self {
        let server: SocketAddr = endpoint.trim_start_matches("http://").parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let store = Self {
            address: listener.local_addr().unwrap(),
            state: Arc::new(Mutex::new(Flaky {
                random: StdRng::seed_from_u64(seed),
                percent: 0,
                counts: BTreeMap::new(),
            })),
        };
        let state = Arc::clone(&store.state);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let state = Arc::clone(&state);
                // A client or a store that disconnects ends the exchange.
                thread::spawn(move || drop(exchange(client, server, &state)));
            }
        });
        store
    }

    /// Where to send requests to.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The percentage of requests that fail from now on.
    pub fn spoil(&self, percent: u32) {
        self.state.lock().unwrap().percent = percent;
    }

    /// The number of faults of each kind.
    pub fn counts(&self) -> BTreeMap<StoreFault, usize> {
        self.state.lock().unwrap().counts.clone()
    }
}

impl Flaky {
    fn next(&mut self) -> Option<StoreFault> {
        if self.random.random_range(0..100) >= self.percent {
            return None;
        }
        let fault = *FAULTS.choose(&mut self.random).unwrap();
        *self.counts.entry(fault).or_default() += 1;
        Some(fault)
    }
}

/// One request and its answer.
fn exchange(mut client: TcpStream, server: SocketAddr, state: &Mutex<Flaky>) -> io::Result<()> {
    let (head, mut body) = head(&mut client)?;
    let length = length(&head);
    if head.to_ascii_lowercase().contains("expect: 100-continue") {
        client.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    let rest = length.saturating_sub(body.len());
    io::copy(
        &mut (&mut client).take(u64::try_from(rest).unwrap()),
        &mut body,
    )?;
    let fault = state.lock().unwrap().next();
    match fault {
        Some(StoreFault::Slow) => thread::sleep(Duration::from_millis(400)),
        Some(StoreFault::Refuses(status)) => {
            let answer = format!(
                "HTTP/1.1 {status} Fault\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            );
            return client.write_all(answer.as_bytes());
        }
        Some(StoreFault::CutBefore) => return client.shutdown(Shutdown::Both),
        Some(StoreFault::CutAfter) | None => {}
    }
    let mut store = TcpStream::connect(server)?;
    let mut lines = head.lines().filter(|line| !line.is_empty());
    let mut request = lines.next().unwrap_or_default().to_owned() + "\r\n";
    for line in lines {
        let name = line.split(':').next().unwrap_or_default();
        if !["connection", "expect"].contains(&name.to_ascii_lowercase().as_str()) {
            request += &format!("{line}\r\n");
        }
    }
    store.write_all((request + "connection: close\r\n\r\n").as_bytes())?;
    store.write_all(&body)?;
    let mut answer = Vec::new();
    store.read_to_end(&mut answer)?;
    if fault != Some(StoreFault::CutAfter) {
        client.write_all(&answer)?;
    }
    client.shutdown(Shutdown::Both)
}

/// The head of a request, and the part of its body that was read with it.
fn head(client: &mut TcpStream) -> io::Result<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(4).position(|end| end == b"\r\n\r\n") {
            let body = bytes.split_off(end + 4);
            return Ok((String::from_utf8_lossy(&bytes).into_owned(), body));
        }
        let mut more = [0; 8192];
        let read = client.read(&mut more)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.extend_from_slice(&more[..read]);
    }
}

fn length(head: &str) -> usize {
    head.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .map_or(0, |(_, value)| value.trim().parse().unwrap())
}
