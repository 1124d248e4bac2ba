//! A server of chat completions on loopback, with answers and faults chosen by the test.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use serde_json::{Value, json};

/// A received question about an image.
#[derive(Debug, Clone)]
pub struct Question {
    /// Number of earlier questions.
    pub number: usize,
    /// Number of earlier questions about the same image.
    pub times: usize,
    /// The head of the request.
    pub head: String,
    /// The whole body.
    pub body: Value,
    /// The data URL of the image.
    pub image: String,
}

impl Question {
    /// A number below `most` that depends on the image.
    pub fn pick(&self, most: usize) -> usize {
        let letters = self.image.bytes().map(usize::from);
        letters.fold(7, |sum, letter| (sum * 31 + letter) % 1_000_003) % most
    }
}

/// How a question is answered.
#[derive(Debug, Clone)]
pub enum Said {
    /// This answer.
    Text(String),
    /// This status with these lines of headers and this body.
    Status(u16, &'static str, String),
    /// A success whose body is this, whole.
    Body(&'static str),
    /// The first half of an answer, after which the connection ends.
    Half,
    /// Nothing: the connection ends.
    Cut,
    /// No answer for as long as the client waits.
    Stall,
}

type Decide = dyn Fn(&Question) -> Said + Send + Sync;

/// The server. It stops when it is dropped.
pub struct ChatServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    listener: Option<thread::JoinHandle<()>>,
}

struct Shared {
    decide: Box<Decide>,
    stopped: AtomicBool,
    questions: Mutex<Vec<Question>>,
    seen: Mutex<HashMap<String, usize>>,
    /// Questions that are answered before the others wait; none if nobody waits.
    gate: Mutex<Option<usize>>,
    opened: Condvar,
}

impl ChatServer {
    /// A server with these answers.
    pub fn start(decide: impl Fn(&Question) -> Said + Send + Sync + 'static) -> Self {
        Self::at("127.0.0.1:0".parse().unwrap(), decide)
    }

    /// The same at the address of an earlier server.
    pub fn at(
        address: SocketAddr,
        decide: impl Fn(&Question) -> Said + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            decide: Box::new(decide),
            stopped: AtomicBool::new(false),
            questions: Mutex::default(),
            seen: Mutex::default(),
            gate: Mutex::new(None),
            opened: Condvar::new(),
        });
        let of_thread = Arc::clone(&shared);
        let listener = thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if of_thread.stopped.load(Ordering::Relaxed) {
                    return;
                }
                let shared = Arc::clone(&of_thread);
                // A client may disconnect in the middle of an answer.
                thread::spawn(move || shared.answer(client));
            }
        });
        Self {
            shared,
            address,
            listener: Some(listener),
        }
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What `url` has to be.
    pub fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// All questions so far.
    pub fn questions(&self) -> Vec<Question> {
        self.shared.questions.lock().unwrap().clone()
    }

    /// Answers so many questions; later ones wait for [`ChatServer::open`].
    pub fn hold_after(&self, questions: usize) {
        *self.shared.gate.lock().unwrap() = Some(questions);
    }

    /// Answers all questions.
    pub fn open(&self) {
        *self.shared.gate.lock().unwrap() = None;
        self.shared.opened.notify_all();
    }
}

impl Drop for ChatServer {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        self.open();
        drop(TcpStream::connect(self.address)); // wakes the thread that listens
        if let Some(listener) = self.listener.take() {
            listener.join().unwrap();
        }
    }
}

impl Shared {
    /// Answers one request of a connection. `None` if the client disconnects.
    fn answer(&self, client: TcpStream) -> Option<()> {
        let mut reader = BufReader::new(client.try_clone().ok()?);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).ok()? == 0 {
                return None;
            }
        }
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let is_length = name.eq_ignore_ascii_case("content-length");
            is_length.then(|| value.trim().parse::<usize>().ok())?
        });
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body).ok()?;
        if head.starts_with("GET") {
            return write(client, 200, "", r#"{"object":"list","data":[]}"#);
        }
        let question = self.note(head, serde_json::from_slice(&body).unwrap());
        let mut gate = self.gate.lock().unwrap();
        while gate.is_some_and(|gate| question.number >= gate) {
            gate = self.opened.wait(gate).unwrap();
        }
        drop(gate);
        if self.stopped.load(Ordering::Relaxed) {
            return None;
        }
        match (self.decide)(&question) {
            Said::Text(text) => write(client, 200, "", &completion(&text)),
            Said::Status(status, headers, body) => write(client, status, headers, &body),
            Said::Body(body) => write(client, 200, "", body),
            Said::Half => {
                let whole = completion("half");
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", whole.len());
                let mut client = client;
                client.write_all(head.as_bytes()).ok()?;
                client.write_all(&whole.as_bytes()[..whole.len() / 2]).ok()
            }
            Said::Cut => None,
            Said::Stall => {
                // Until the client gives up.
                drop(reader.read(&mut [0]));
                None
            }
        }
    }

    fn note(&self, head: String, body: Value) -> Question {
        let content = body["messages"].as_array().unwrap().last().unwrap()["content"].clone();
        let mut parts = content.as_array().unwrap().iter();
        let image = parts.find_map(|part| part["image_url"]["url"].as_str());
        let image = image.unwrap().to_owned();
        let mut seen = self.seen.lock().unwrap();
        let times = seen.entry(image.clone()).or_default();
        let mut questions = self.questions.lock().unwrap();
        let question = Question {
            number: questions.len(),
            times: *times,
            head,
            body,
            image,
        };
        *times += 1;
        questions.push(question.clone());
        question
    }
}

/// A completion that says this, with a probability of 0.8 in two tokens.
fn completion(text: &str) -> String {
    let middle = text.ceil_char_boundary(text.len() / 2);
    let token = |token: &str| json!({ "token": token, "logprob": 0.8_f64.ln() / 2.0 });
    json!({
        "id": "1", "object": "chat.completion", "model": "stub",
        "choices": [{
            "index": 0,
            "message": { "role": "assistant", "content": text },
            "finish_reason": "stop",
            "logprobs": { "content": [token(&text[..middle]), token(&text[middle..])] },
        }],
        "usage": { "prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102,
                   "prompt_tokens_details": { "cached_tokens": 10 } },
    })
    .to_string()
}

fn write(mut client: TcpStream, status: u16, headers: &str, body: &str) -> Option<()> {
    let answer = format!(
        "HTTP/1.1 {status} Status\r\n{headers}connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    client.write_all(answer.as_bytes()).ok()
}
