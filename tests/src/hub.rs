//! A small Hugging Face Hub on loopback: the requests of its clients, and its faults.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// The commit that every repository is at.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A server with one repository. Files that end in `.onnx`, or have `.onnx` in their names, are large
/// files, which it keeps elsewhere: on another port, which must not see the token.
pub struct Hub {
    shared: Arc<Shared>,
    address: SocketAddr,
}

struct Shared {
    repository: String,
    files: BTreeMap<String, Vec<u8>>,
    /// Where large files are.
    store: SocketAddr,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The token that is needed, if one is.
    token: Option<String>,
    gated: bool,
    /// Bytes of a large file after which the connection is cut, and how often that happens.
    cut: Option<(usize, u32)>,
    /// Whether a large file arrives with one byte changed.
    damaged: bool,
    /// Whether a request for a part gets the whole.
    without_ranges: bool,
    /// Answers of this status, so many of them.
    failing: u32,
    requests: Vec<String>,
}

impl Hub {
    /// Serves a repository of these files.
    pub fn serve(repository: &str, files: &[(&str, Vec<u8>)]) -> Self {
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (hub, store) = (listen(), listen());
        let address = hub.local_addr().unwrap();
        let files = files.iter();
        let shared = Arc::new(Shared {
            repository: repository.to_owned(),
            files: files
                .map(|(name, bytes)| ((*name).to_owned(), bytes.clone()))
                .collect(),
            store: store.local_addr().unwrap(),
            state: Mutex::default(),
        });
        for (listener, is_store) in [(hub, false), (store, true)] {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                for client in listener.incoming().flatten() {
                    let shared = Arc::clone(&shared);
                    // A client may disconnect in the middle of an answer.
                    thread::spawn(move || shared.answer(client, is_store));
                }
            });
        }
        Self { shared, address }
    }

    /// What `HF_ENDPOINT` has to be.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Lets in only who has the token; `gated` says why others are not.
    pub fn needs_token(&self, token: &str, gated: bool) {
        let mut state = self.shared.state.lock().unwrap();
        (state.token, state.gated) = (Some(token.to_owned()), gated);
    }

    /// Cuts the connection after so many bytes of a large file, so many times.
    pub fn cuts(&self, after: usize, times: u32) {
        self.shared.state.lock().unwrap().cut = Some((after, times));
    }

    /// Changes a byte of each large file on its way.
    pub fn damages(&self, damaged: bool) {
        self.shared.state.lock().unwrap().damaged = damaged;
    }

    /// Forgets how to send a part of a file.
    pub fn knows_no_ranges(&self) {
        self.shared.state.lock().unwrap().without_ranges = true;
    }

    /// Answers 503 so many times.
    pub fn fails(&self, times: u32) {
        self.shared.state.lock().unwrap().failing = times;
    }

    /// What was requested so far: `GET path`, with the range that was requested.
    pub fn requests(&self) -> Vec<String> {
        self.shared.state.lock().unwrap().requests.clone()
    }
}

/// A request's path, and the headers that matter here.
#[derive(Default)]
struct Request {
    path: String,
    token: Option<String>,
    /// The first byte that is requested.
    from: Option<usize>,
}

impl Request {
    fn read(client: &TcpStream) -> Option<Self> {
        let mut lines = BufReader::new(client).lines().map_while(Result::ok);
        let path = lines.next()?.split(' ').nth(1)?.to_owned();
        let mut request = Self {
            path,
            ..Self::default()
        };
        for line in lines.take_while(|line| !line.is_empty()) {
            let Some((name, value)) = line.split_once(": ") else {
                continue;
            };
            match &*name.to_ascii_lowercase() {
                "authorization" => request.token = value.strip_prefix("Bearer ").map(str::to_owned),
                "range" => {
                    let start = value.strip_prefix("bytes=")?.trim_end_matches('-');
                    request.from = Some(start.parse().ok()?);
                }
                _ => {}
            }
        }
        Some(request)
    }
}

impl Shared {
    fn answer(&self, client: TcpStream, is_store: bool) -> Option<()> {
        let request = Request::read(&client)?;
        let (refused, gated) = {
            let mut state = self.state.lock().unwrap();
            let range = request
                .from
                .map(|from| format!(" from {from}"))
                .unwrap_or_default();
            let place = if is_store { "store" } else { "hub" };
            state
                .requests
                .push(format!("{place} {}{range}", request.path));
            if state.failing > 0 {
                state.failing -= 1;
                return send(&client, "503 Service Unavailable", &[], b"");
            }
            (
                state.token.is_some() && state.token != request.token,
                state.gated,
            )
        };
        if is_store {
            assert_eq!(request.token, None, "the store was sent the hub's token");
            return self.large_file(&client, &request);
        }
        if refused {
            let code = if gated { "GatedRepo" } else { "RepoNotFound" };
            return send(&client, "401 Unauthorized", &[("X-Error-Code", code)], b"");
        }
        let repository = &self.repository;
        if request.path == format!("/api/models/{repository}/revision/main?blobs=true")
            || request.path == format!("/api/models/{repository}/revision/{COMMIT}?blobs=true")
        {
            return send(&client, "200 OK", &[], self.description().as_bytes());
        }
        if request
            .path
            .starts_with(&format!("/api/models/{repository}/"))
        {
            return send(
                &client,
                "404 Not Found",
                &[("X-Error-Code", "RevisionNotFound")],
                b"",
            );
        }
        let path = request
            .path
            .strip_prefix(&format!("/{repository}/resolve/{COMMIT}/"));
        match path.and_then(|path| Some((path, self.files.get(path)?))) {
            None => send(
                &client,
                "404 Not Found",
                &[("X-Error-Code", "RepoNotFound")],
                b"",
            ),
            Some((path, _)) if is_large(path) => {
                let location = format!("http://{}/{path}", self.store);
                send(&client, "302 Found", &[("Location", &location)], b"")
            }
            Some((_, bytes)) => send(&client, "200 OK", &[], bytes),
        }
    }

    fn large_file(&self, client: &TcpStream, request: &Request) -> Option<()> {
        let mut bytes = self
            .files
            .get(request.path.trim_start_matches('/'))?
            .clone();
        let (from, cut) = {
            let mut state = self.state.lock().unwrap();
            if state.damaged {
                bytes[0] ^= 1;
            }
            let cut = match &mut state.cut {
                Some((after, times)) if *times > 0 => {
                    *times -= 1;
                    Some(*after)
                }
                _ => None,
            };
            (request.from.filter(|_| !state.without_ranges), cut)
        };
        let (status, range) = match from {
            None => ("200 OK", None),
            Some(from) if from >= bytes.len() => {
                return send(client, "416 Range Not Satisfiable", &[], b"");
            }
            Some(from) => {
                let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
                ("206 Partial Content", Some(range))
            }
        };
        let rest = &bytes[from.unwrap_or(0)..];
        let sent = cut.map_or(rest, |after| &rest[..after.min(rest.len())]);
        let range = range.as_deref().map(|range| ("Content-Range", range));
        head(client, status, range.as_slice(), rest.len())?;
        let mut client = client;
        client.write_all(sent).ok()
    }

    /// What the hub says of the repository.
    fn description(&self) -> String {
        let files = self.files.iter().map(|(path, bytes)| {
            let size = bytes.len();
            let mut file = serde_json::json!({
                "rfilename": path, "size": size, "blobId": format!("{size:040x}"),
            });
            if is_large(path) {
                file["lfs"] = serde_json::json!({ "sha256": sha256(bytes), "size": size });
            }
            file
        });
        let siblings: Vec<_> = files.collect();
        serde_json::json!({ "sha": COMMIT, "siblings": siblings }).to_string()
    }
}

fn is_large(path: &str) -> bool {
    path.contains(".onnx")
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    let digits = Sha256::digest(bytes);
    digits.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn send(client: &TcpStream, status: &str, headers: &[(&str, &str)], body: &[u8]) -> Option<()> {
    head(client, status, headers, body.len())?;
    let mut client = client;
    client.write_all(body).ok()
}

fn head(
    mut client: &TcpStream,
    status: &str,
    headers: &[(&str, &str)],
    length: usize,
) -> Option<()> {
    let more = headers
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"));
    let more: String = more.collect();
    let text =
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{more}Connection: close\r\n\r\n");
    client.write_all(text.as_bytes()).ok()
}
