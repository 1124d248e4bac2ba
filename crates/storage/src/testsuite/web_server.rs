use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use crate::HttpConfig;

/// A server on this machine's own address, which answers as a test says. Ends when dropped.
pub struct WebServer {
    address: SocketAddr,
    seen: Arc<Seen>,
    _runtime: Runtime,
}

#[derive(Default)]
struct Seen {
    requests: AtomicU64,
    under_way: AtomicU64,
    most_under_way: AtomicU64,
    by_target: Mutex<HashMap<String, u64>>,
}

/// A request.
pub struct Asked {
    /// Its path and query.
    pub target: String,
    /// How often the same was requested before.
    pub before: u64,
    headers: HashMap<String, String>,
}

impl Asked {
    /// The value of a header, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// What a test's server does with a request.
pub enum Reply {
    /// Answers.
    Answer {
        /// The status.
        status: u16,
        /// Headers besides the length.
        headers: Vec<(&'static str, String)>,
        /// The content.
        body: Vec<u8>,
    },
    /// Closes the connection without an answer.
    Reset,
    /// Answers with half of what it promises, then closes the connection.
    Cut(Vec<u8>),
    /// Answers with half of what it promises, and nothing more.
    Stall(Vec<u8>),
    /// Answers after this time.
    Late(Duration, Vec<u8>),
}

impl Reply {
    /// An answer without content.
    pub fn status(status: u16) -> Self {
        Self::with(status, "x-nothing", "")
    }

    /// An answer with one header and no content.
    pub fn with(status: u16, name: &'static str, value: impl Into<String>) -> Self {
        Self::Answer {
            status,
            headers: vec![(name, value.into())],
            body: Vec::new(),
        }
    }

    /// An object of this version, or the part of it that is requested.
    pub fn object(asked: &Asked, body: &[u8], etag: &str) -> Self {
        if asked
            .header("if-match")
            .is_some_and(|wanted| wanted != etag)
        {
            return Self::status(412);
        }
        let mut headers = vec![("etag", etag.to_owned())];
        let range = asked.header("range").and_then(|range| {
            let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
        });
        let Some((first, last)) = range else {
            return Self::Answer {
                status: 200,
                headers,
                body: body.to_vec(),
            };
        };
        if first >= body.len() {
            return Self::status(416);
        }
        let end = body.len().min(last + 1);
        headers.push((
            "content-range",
            format!("bytes {first}-{}/{}", end - 1, body.len()),
        ));
        Self::Answer {
            status: 206,
            headers,
            body: body[first..end].to_vec(),
        }
    }
}

type Handler = dyn Fn(&Asked) -> Reply + Send + Sync;

impl WebServer {
    /// Starts a server that answers by `handler`.
    pub fn start(handler: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Seen::default());
        runtime.spawn(serve(listener, Arc::new(handler), Arc::clone(&seen)));
        Self {
            address,
            seen,
            _runtime: runtime,
        }
    }

    /// The url of a path that begins with a slash.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// How to reach it: private addresses are allowed, and waits are short.
    pub fn config(&self) -> HttpConfig {
        HttpConfig {
            allow_private: true,
            timeout: Duration::from_secs(2),
            ..HttpConfig::default()
        }
    }

    /// Requests that came so far.
    pub fn requests(&self) -> u64 {
        self.seen.requests.load(Ordering::Relaxed)
    }

    /// The most requests that were under way at once.
    pub fn most_under_way(&self) -> u64 {
        self.seen.most_under_way.load(Ordering::Relaxed)
    }
}

async fn serve(listener: TcpListener, handler: Arc<Handler>, seen: Arc<Seen>) {
    while let Ok((socket, _)) = listener.accept().await {
        let (handler, seen) = (Arc::clone(&handler), Arc::clone(&seen));
        // A client that goes away is no fault of the server.
        tokio::spawn(async move { drop(converse(socket, &*handler, &seen).await) });
    }
}

/// Answers the requests of one connection.
async fn converse(mut socket: TcpStream, handler: &Handler, seen: &Seen) -> std::io::Result<()> {
    let mut read = Vec::new();
    loop {
        let end = loop {
            if let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") {
                break end;
            }
            if socket.read_buf(&mut read).await? == 0 {
                return Ok(());
            }
        };
        let head: Vec<u8> = read.drain(..end + 4).collect();
        let asked = asked(&String::from_utf8_lossy(&head), seen);
        seen.requests.fetch_add(1, Ordering::Relaxed);
        let under_way = seen.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        seen.most_under_way.fetch_max(under_way, Ordering::Relaxed);
        let goes_on = answer(&mut socket, handler(&asked)).await;
        seen.under_way.fetch_sub(1, Ordering::Relaxed);
        if !goes_on? {
            return Ok(());
        }
    }
}

fn asked(head: &str, seen: &Seen) -> Asked {
    let mut lines = head.split("\r\n");
    let first = lines.next().unwrap_or_default();
    let target = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let headers = lines.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    });
    let mut by_target = seen.by_target.lock().unwrap();
    let count = by_target.entry(target.clone()).or_default();
    *count += 1;
    Asked {
        target,
        before: *count - 1,
        headers: headers.collect(),
    }
}

/// Whether the connection continues.
async fn answer(socket: &mut TcpStream, reply: Reply) -> std::io::Result<bool> {
    let head = |status: u16, headers: &[(&str, String)], length: usize| {
        let mut head = format!("HTTP/1.1 {status} Status\r\ncontent-length: {length}\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        (head + "\r\n").into_bytes()
    };
    match reply {
        Reply::Answer {
            status,
            headers,
            body,
        } => {
            let mut bytes = head(status, &headers, body.len());
            bytes.extend(body);
            socket.write_all(&bytes).await?;
            Ok(true)
        }
        Reply::Late(time, body) => {
            tokio::time::sleep(time).await;
            let mut bytes = head(200, &[], body.len());
            bytes.extend(body);
            socket.write_all(&bytes).await?;
            Ok(true)
        }
        Reply::Reset => {
            // With nothing sent and nothing waited for, the other side sees a reset.
            socket.set_zero_linger()?;
            Ok(false)
        }
        Reply::Cut(body) => {
            socket.write_all(&head(200, &[], body.len())).await?;
            socket.write_all(&body[..body.len() / 2]).await?;
            Ok(false)
        }
        Reply::Stall(body) => {
            socket.write_all(&head(200, &[], body.len())).await?;
            socket.write_all(&body[..body.len() / 2]).await?;
            // Until the other side gives up.
            Ok(socket.read(&mut [0; 1]).await? > 0)
        }
    }
}
