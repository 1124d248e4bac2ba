//! An OpenTelemetry collector that stores what it receives.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// A span, and the process that sent it.
#[derive(Debug, Clone)]
pub struct Traced {
    /// The number of the process.
    pub process: i64,
    /// The span as it was sent.
    pub span: Span,
}

impl Traced {
    /// An attribute of the span that is a text.
    pub fn attribute(&self, name: &str) -> Option<String> {
        let found = self
            .span
            .attributes
            .iter()
            .find(|found| found.key == name)?;
        match found.value.as_ref()?.value.as_ref()? {
            Value::StringValue(text) => Some(text.clone()),
            _ => None,
        }
    }
}

/// The collector. Listens for as long as this process lives.
pub struct Collector {
    address: SocketAddr,
    kept: Kept,
}

#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<Traced>>>);

impl Kept {
    fn keep(&self, request: ExportTraceServiceRequest) {
        let mut kept = self.0.lock().unwrap();
        for resource in request.resource_spans {
            let attributes = resource.resource.unwrap_or_default().attributes;
            let process = attributes.iter().find(|found| found.key == "process.pid");
            let process = process.and_then(|found| found.value.as_ref()?.value.clone());
            let Some(Value::IntValue(process)) = process else {
                panic!("spans of no process");
            };
            let spans = resource.scope_spans.into_iter();
            kept.extend(
                spans
                    .flat_map(|scope| scope.spans)
                    .map(|span| Traced { process, span }),
            );
        }
    }
}

#[tonic::async_trait]
impl TraceService for Kept {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.keep(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// One that listens for gRPC.
    pub fn grpc() -> Self {
        let kept = Kept::default();
        let service = TraceServiceServer::new(kept.clone());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                tonic::transport::Server::builder()
                    .add_service(service)
                    .serve_with_incoming(TcpListenerStream::new(listener))
                    .await
                    .unwrap();
            });
        });
        Self { address, kept }
    }

    /// One that listens for Protobuf over HTTP.
    pub fn http() -> Self {
        let kept = Kept::default();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let keeper = kept.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, keeper) = (stream.unwrap(), keeper.clone());
                thread::spawn(move || answer_posts(stream, &keeper));
            }
        });
        Self { address, kept }
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The spans received so far, once `enough` is satisfied.
    #[track_caller]
    pub fn spans(&self, enough: impl Fn(&[Traced]) -> bool) -> Vec<Traced> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let spans = self.kept.0.lock().unwrap().clone();
            if enough(&spans) {
                return spans;
            }
            let names = |name: &str| spans.iter().filter(|found| found.span.name == name).count();
            assert!(
                Instant::now() < deadline,
                "only {} spans came, {} of them of the sink",
                spans.len(),
                names("sink.image")
            );
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Stores the requests of a connection, one after the other.
fn answer_posts(stream: TcpStream, keeper: &Kept) {
    let mut stream = BufReader::new(stream);
    while let Some(body) = read_request(&mut stream) {
        keeper.keep(ExportTraceServiceRequest::decode(body.as_slice()).unwrap());
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        stream.get_mut().write_all(answer).unwrap();
    }
}

/// The body of a `POST /v1/traces`, or `None` at the end of the connection.
fn read_request(stream: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = String::new();
    if stream.read_line(&mut line).ok()? == 0 {
        return None;
    }
    assert!(line.starts_with("POST /v1/traces "), "{line}");
    let mut length = 0;
    loop {
        let mut header = String::new();
        stream.read_line(&mut header).unwrap();
        let header = header.trim().to_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    Some(body)
}
