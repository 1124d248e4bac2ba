use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use http::header::IF_NONE_MATCH;
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
    unavailable: AtomicU64,
    requests: AtomicU64,
    /// One object at a time, and how long each takes.
    pace: Mutex<Duration>,
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

    /// Whether `If-None-Match` is ignored without a word from now on, as some stores do.
    pub fn ignore_preconditions(&self, ignore: bool) {
        self.faults
            .ignore_preconditions
            .store(ignore, Ordering::Relaxed);
    }

    /// Answers the next requests with 503.
    pub fn be_unavailable(&self, requests: u64) {
        self.faults.unavailable.store(requests, Ordering::Relaxed);
    }

    /// Gives objects one after the other from now on, each after this time.
    pub fn slow_down(&self, each: Duration) {
        *self.faults.pace.blocking_lock() = each;
    }

    /// Requests that came so far.
    pub fn requests(&self) -> u64 {
        self.faults.requests.load(Ordering::Relaxed)
    }
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
    let unavailable = &faults.unavailable;
    let is_unavailable = unavailable
        .try_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            left.checked_sub(1)
        })
        .is_ok();
    if is_unavailable {
        return refusal(StatusCode::SERVICE_UNAVAILABLE);
    }
    if request.method() == Method::GET {
        let pace = faults.pace.lock().await;
        sleep(*pace).await;
    }
    let _alone = if request.method() == Method::PUT && request.headers().contains_key(IF_NONE_MATCH)
    {
        let alone = faults.conditional.lock().await;
        if faults.ignore_preconditions.load(Ordering::Relaxed) {
            // The header is signed and has to stay, so the object goes that it asks about.
            let path = root.join(request.uri().path().trim_start_matches('/'));
            drop(fs::remove_file(path));
        }
        Some(alone)
    } else {
        None
    };
    service
        .call(request)
        .await
        .unwrap_or_else(|_| refusal(StatusCode::INTERNAL_SERVER_ERROR))
}

fn refusal(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}
