use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use http::header::{ETAG, IF_MATCH, IF_NONE_MATCH};
use http::{Method, Request, Response, StatusCode};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::Body;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::S3Config;

/// An S3 store over HTTP in this process, whose objects are files in a temporary folder. It checks
/// signatures, and ends when dropped.
pub struct S3Server {
    address: SocketAddr,
    root: tempfile::TempDir,
    faults: Arc<Faults>,
    _runtime: Runtime,
}

/// What goes wrong on purpose.
#[derive(Default)]
struct Faults {
    ignore_preconditions: AtomicBool,
    /// How many requests are refused, and how.
    refused: std::sync::Mutex<(u64, StatusCode, String)>,
    /// Uploads in pieces that are completed with the answer lost.
    lost_answers: AtomicU64,
    /// Those of them that are completed again.
    gone_uploads: AtomicU64,
    requests: AtomicU64,
    /// Objects are given one at a time, and each takes this long, those of results too or not.
    pace: std::sync::Mutex<(Duration, bool)>,
    turn: Mutex<()>,
    /// The store below checks and writes in two steps.
    conditional: Mutex<()>,
}

impl S3Server {
    /// The key that requests are signed with.
    pub const ACCESS_KEY: &str = "trommel-test";
    /// Its secret.
    pub const SECRET_KEY: &str = "trommel-test-secret";

    /// Starts a store without buckets.
    pub fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        let faults = Arc::new(Faults::default());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root.path()).unwrap());
        builder.set_auth(SimpleAuth::from_single(Self::ACCESS_KEY, Self::SECRET_KEY));
        let service = builder.build();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let folder = root.path().to_owned();
        runtime.spawn(serve(listener, service, Arc::clone(&faults), folder));
        Self {
            address,
            root,
            faults,
            _runtime: runtime,
        }
    }

    /// Its address.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// How to reach it.
    pub fn config(&self) -> S3Config {
        let config = S3Config {
            endpoint: Some(self.endpoint()),
            ..S3Config::default()
        };
        config.with_credentials(Self::ACCESS_KEY, Self::SECRET_KEY)
    }

    /// Makes a bucket.
    pub fn create_bucket(&self, bucket: &str) {
        fs::create_dir(self.root.path().join(bucket)).unwrap();
    }

    /// Puts an object into a bucket, as if by another program.
    pub fn put(&self, bucket: &str, key: &str, content: &[u8]) {
        let path = self.path(bucket, key);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// The file that is an object.
    pub fn path(&self, bucket: &str, key: &str) -> PathBuf {
        self.root.path().join(bucket).join(key)
    }

    /// Whether `If-None-Match` is silently ignored from now on, as some stores do.
    pub fn ignore_preconditions(&self, ignore: bool) {
        self.faults
            .ignore_preconditions
            .store(ignore, Ordering::Relaxed);
    }

    /// Answers the next requests with 503.
    pub fn be_unavailable(&self, requests: u64) {
        self.refuse(requests, 503, "");
    }

    /// Answers the next requests with a status, and an error of this code unless it is empty.
    pub fn refuse(&self, requests: u64, status: u16, code: &str) {
        let status = StatusCode::from_u16(status).unwrap();
        *self.faults.refused.lock().unwrap() = (requests, status, code.to_owned());
    }

    /// Completes the next uploads in pieces, but answers 500, and 404 when they are completed again.
    pub fn lose_answers(&self, uploads: u64) {
        self.faults.lost_answers.store(uploads, Ordering::Relaxed);
    }

    /// Gives objects one after the other from now on, each after this time.
    pub fn slow_down(&self, each: Duration) {
        *self.faults.pace.lock().unwrap() = (each, true);
    }

    /// The same, but the records and parts of results come at once.
    pub fn slow_down_images(&self, each: Duration) {
        *self.faults.pace.lock().unwrap() = (each, false);
    }

    /// Requests that came so far.
    pub fn requests(&self) -> u64 {
        self.faults.requests.load(Ordering::Relaxed)
    }
}

/// The records and parts that sinks keep in one folder.
fn is_of_results(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.starts_with('_') || name.starts_with("part-")
}

async fn serve(listener: TcpListener, service: S3Service, faults: Arc<Faults>, root: PathBuf) {
    while let Ok((socket, _)) = listener.accept().await {
        let (service, faults, root) = (service.clone(), Arc::clone(&faults), root.clone());
        tokio::spawn(async move {
            let answer = service_fn(move |request: Request<hyper::body::Incoming>| {
                let (service, faults, root) = (service.clone(), Arc::clone(&faults), root.clone());
                async move {
                    Ok::<_, Infallible>(
                        answer(&service, &faults, &root, request.map(Body::from)).await,
                    )
                }
            });
            let builder = Builder::new(TokioExecutor::new());
            // A client that goes away is no fault of the store.
            drop(builder.serve_connection(TokioIo::new(socket), answer).await);
        });
    }
}

async fn answer(
    service: &S3Service,
    faults: &Faults,
    root: &Path,
    request: Request<Body>,
) -> Response<Body> {
    faults.requests.fetch_add(1, Ordering::Relaxed);
    {
        let mut refused = faults.refused.lock().unwrap();
        let (left, status, code) = &mut *refused;
        if *left > 0 {
            *left -= 1;
            return refusal(*status, code);
        }
    }
    let (_, of_results_too) = *faults.pace.lock().unwrap();
    if request.method() == Method::GET && (of_results_too || !is_of_results(request.uri().path())) {
        let _turn = faults.turn.lock().await;
        let (pace, _) = *faults.pace.lock().unwrap();
        sleep(pace).await;
    }
    let is_completion = request.method() == Method::POST
        && (request.uri().query()).is_some_and(|query| query.contains("uploadId"));
    if is_completion && take(&faults.gone_uploads) {
        return refusal(StatusCode::NOT_FOUND, "NoSuchUpload");
    }
    let is_lost = is_completion && take(&faults.lost_answers);
    let writes = request.method() == Method::PUT || is_completion;
    let ignores = faults.ignore_preconditions.load(Ordering::Relaxed);
    let _alone = if request.method() == Method::GET && ignores {
        // An overwritten object is never seen as absent.
        Some(faults.conditional.lock().await)
    } else if writes && request.headers().contains_key(IF_NONE_MATCH) {
        let alone = faults.conditional.lock().await;
        if ignores {
            // The header is signed and has to stay, so the object goes that it asks about.
            let path = root.join(request.uri().path().trim_start_matches('/'));
            drop(fs::remove_file(path));
        }
        Some(alone)
    } else {
        None
    };
    let wanted = (request.method() == Method::GET)
        .then(|| request.headers().get(IF_MATCH).cloned())
        .flatten()
        .filter(|_| !ignores);
    let answer = service.call(request).await;
    if is_lost {
        faults.gone_uploads.fetch_add(1, Ordering::Relaxed);
    }
    let answer = match answer {
        Ok(answer) if !is_lost => answer,
        _ => return refusal(StatusCode::INTERNAL_SERVER_ERROR, ""),
    };
    // The store below does not know this precondition of GET.
    if answer.status().is_success()
        && wanted.is_some()
        && wanted.as_ref() != answer.headers().get(ETAG)
    {
        return refusal(StatusCode::PRECONDITION_FAILED, "PreconditionFailed");
    }
    answer
}

/// Takes one of a number of faults that are left.
fn take(left: &AtomicU64) -> bool {
    left.try_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
        left.checked_sub(1)
    })
    .is_ok()
}

fn refusal(status: StatusCode, code: &str) -> Response<Body> {
    let body = match code {
        "" => Body::empty(),
        code => Body::from(format!("<Error><Code>{code}</Code></Error>")),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
}
