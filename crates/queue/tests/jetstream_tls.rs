//! Connections over TLS.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::PathBuf;

use common::{SECOND, config, load, queue};
use tempfile::TempDir;
use trommel_queue::test_server::NatsServer;
use trommel_queue::{Broker, BrokerConfig, Queue, QueueErrorKind};

/// A self-signed certificate for this machine and its key, as files.
struct Identity {
    certificate: PathBuf,
    key: PathBuf,
    _folder: TempDir,
}

fn identity() -> Identity {
    let folder = tempfile::tempdir().unwrap();
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    let (certificate, key) = (
        folder.path().join("cert.pem"),
        folder.path().join("key.pem"),
    );
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    Identity {
        certificate,
        key,
        _folder: folder,
    }
}

fn start(server: &Identity, more: &[&str]) -> NatsServer {
    let text = |path: &PathBuf| path.to_str().unwrap().to_owned();
    let (certificate, key) = (text(&server.certificate), text(&server.key));
    let mut arguments = vec!["-js", "--tls", "--tlscert", &certificate, "--tlskey", &key];
    arguments.extend(more);
    NatsServer::start_with(&arguments)
}

/// R37.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_broker_is_reached_over_tls_with_a_password() {
    let identity = identity();
    let server = start(&identity, &["--user", "me", "--pass", "secret"]);
    let trusting = BrokerConfig {
        url: server.url().replace("nats://", "tls://me:secret@"),
        tls_ca: Some(identity.certificate.clone()),
        ..config(&server)
    };
    let broker = Broker::connect(&trusting, "test").await.unwrap();
    broker.ensure_streams().await.unwrap();
    let queue = queue(&broker, 10 * SECOND).await;
    queue.publish("load-1", load(1)).await.unwrap();
    let pulled = queue.pull(1, 10 * SECOND).await.unwrap();
    assert_eq!(pulled[0].message().number, 1);

    let other = self::identity();
    let mistrusting = BrokerConfig {
        tls_ca: Some(other.certificate.clone()),
        ..trusting.clone()
    };
    let error = Broker::connect(&mistrusting, "test")
        .await
        .map(drop)
        .unwrap_err();
    assert!(!error.to_string().contains("secret"), "{error}");
    let missing = BrokerConfig {
        tls_ca: Some("/no/such.pem".into()),
        ..trusting
    };
    let error = Broker::connect(&missing, "test")
        .await
        .map(drop)
        .unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::Refused);
    assert!(error.to_string().contains("/no/such.pem"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_verifies_clients_takes_the_certificate() {
    let (own, client) = (identity(), identity());
    let ca = client.certificate.to_str().unwrap().to_owned();
    let server = start(&own, &["--tlsverify", "--tlscacert", &ca]);
    let anonymous = BrokerConfig {
        tls_ca: Some(own.certificate.clone()),
        ..config(&server)
    };
    assert!(Broker::connect(&anonymous, "test").await.is_err());
    let known = BrokerConfig {
        tls_certificate: Some(client.certificate.clone()),
        tls_key: Some(client.key.clone()),
        ..anonymous
    };
    Broker::connect(&known, "test").await.unwrap();
}
