use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, ConnectErrorKind, ConnectOptions, ServerAddr, ServerError};
use tokio::sync::watch;
use tracing::{info, warn};

use super::config::BrokerConfig;
use super::denial::{Denial, Denials};
use super::version::ServerVersion;
use crate::{QueueError, QueueErrorKind};

/// Time limit for one answer of the server.
pub(super) const ANSWER: Duration = Duration::from_secs(2);

/// Whether the connection is up, how often it was made, and what the server denied on it.
#[derive(Clone)]
pub(super) struct Link {
    state: watch::Receiver<LinkState>,
}

#[derive(Debug, Default)]
struct LinkState {
    up: bool,
    /// Grows with each lost connection.
    losses: u64,
    denials: Denials,
}

/// The state of the connection when an operation began.
#[derive(Debug, Clone, Copy)]
pub(super) struct Begun {
    losses: u64,
    denials: u64,
}

/// Why an operation stops waiting for the server.
#[derive(Debug)]
pub(super) enum Interruption {
    /// The connection was lost.
    Lost,
    /// The server denies a subject required by the operation.
    Denied(QueueError),
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        self.state.borrow().up
    }

    /// Now, for [`Link::interrupted`].
    pub(super) fn now(&self) -> Begun {
        self.state.borrow().begun()
    }

    /// Waits until the connection is up.
    pub(super) async fn up(&self) -> Begun {
        let mut state = self.state.clone();
        match state.wait_for(|state| state.up).await {
            Ok(state) => state.begun(),
            // The sender is in the client's event callback. If the client is gone, requests fail by
            // themselves.
            Err(_) => self.now(),
        }
    }

    /// The denial on this connection that `concerns` an operation, if any.
    pub(super) fn denied(&self, concerns: impl Fn(&Denial) -> bool) -> Option<QueueError> {
        let state = self.state.borrow();
        state.denials.since(0, concerns).map(Denial::error)
    }

    /// Waits until the connection has been lost since `begun`, or the server has denied something
    /// that `concerns` the operation.
    pub(super) async fn interrupted(
        &self,
        begun: Begun,
        concerns: impl Fn(&Denial) -> bool,
    ) -> Interruption {
        let mut state = self.state.clone();
        let mut interruption = None;
        let waited = state.wait_for(|state| {
            interruption = match state.denials.since(begun.denials, &concerns) {
                Some(denial) => Some(Interruption::Denied(denial.error())),
                None if state.losses > begun.losses => Some(Interruption::Lost),
                None => None,
            };
            interruption.is_some()
        });
        drop(waited.await);
        match interruption {
            Some(interruption) => interruption,
            None => std::future::pending().await,
        }
    }
}

impl LinkState {
    fn begun(&self) -> Begun {
        Begun {
            losses: self.losses,
            denials: self.denials.count(),
        }
    }
}

/// Connects and keeps the connection.
pub(super) async fn open(config: &BrokerConfig, name: &str) -> Result<(Client, Link), QueueError> {
    let url = config.redacted_url();
    let mut addresses = Vec::new();
    for address in config.url.split(',').map(str::trim) {
        if !address.is_empty() {
            addresses.push(address.parse::<ServerAddr>().map_err(|error| {
                let message = format!("broker url {url} is invalid: {error}");
                QueueError::new(QueueErrorKind::Misconfigured, message)
            })?);
        }
    }
    let (state, link) = watch::channel(LinkState::default());
    let state = Arc::new(state);
    let mut options = ConnectOptions::new()
        .name(name)
        .connection_timeout(config.connect_timeout)
        .request_timeout(Some(ANSWER))
        .custom_inbox_prefix(&config.inbox_prefix)
        .event_callback({
            let state = Arc::clone(&state);
            move |event| {
                let state = Arc::clone(&state);
                async move { heard(&state, &event) }
            }
        });
    // The client library leaves the part of an address before the @ to us.
    if let Some(user) = addresses.iter().find_map(|address| {
        let user = percent_decoded(address.username()?);
        Some((user, address.password().map(percent_decoded)))
    }) {
        options = match user {
            (user, Some(password)) => options.user_and_password(user, password),
            (token, None) => options.token(token),
        };
    }
    if let Some(ca) = &config.tls_ca {
        readable(ca, "CA certificates")?;
        options = options.add_root_certificates(ca.clone()).require_tls(true);
    }
    if let (Some(certificate), Some(key)) = (&config.tls_certificate, &config.tls_key) {
        readable(certificate, "the client certificate")?;
        readable(key, "the client key")?;
        options = options
            .add_client_certificate(certificate.clone(), key.clone())
            .require_tls(true);
    }
    if let Some(path) = &config.credentials {
        options = options.credentials_file(path).await.map_err(|error| {
            let message = format!("failed to read credentials {}: {error}", path.display());
            QueueError::new(QueueErrorKind::Refused, message)
        })?;
    }
    let client = options.connect(addresses).await.map_err(|error| {
        let (kind, remedy) = match error.kind() {
            ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => (
                QueueErrorKind::Refused,
                "check user and password in the url, or the credentials file",
            ),
            ConnectErrorKind::ServerParse => (QueueErrorKind::Misconfigured, "check the url"),
            ConnectErrorKind::Tls => (
                QueueErrorKind::Refused,
                "check tls-ca, tls-certificate and tls-key, and that the server's certificate names \
                 the host in the url",
            ),
            _ => (
                QueueErrorKind::Unreachable,
                "check that nats-server runs there and that the url is right",
            ),
        };
        QueueError::new(
            kind,
            format!("failed to connect to the broker at {url}: {error}; {remedy}"),
        )
    })?;
    // The first call of the event callback may come later.
    state.send_modify(|state| state.up |= state.losses == 0);
    Ok((client, Link { state: link }))
}

/// The client library would only report that a file is missing, not which one.
fn readable(path: &Path, what: &str) -> Result<(), QueueError> {
    std::fs::File::open(path).map(drop).map_err(|error| {
        let message = format!("failed to read {what} {}: {error}", path.display());
        QueueError::new(QueueErrorKind::Refused, message)
    })
}

fn percent_decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

fn heard(state: &watch::Sender<LinkState>, event: &async_nats::Event) {
    match event {
        async_nats::Event::Connected => {
            state.send_modify(|state| state.up = true);
        }
        async_nats::Event::Disconnected | async_nats::Event::Closed => {
            warn!("connection to the broker: {event}");
            state.send_modify(|state| {
                state.up = false;
                state.losses += 1;
                state.denials.forget();
            });
        }
        async_nats::Event::ServerError(ServerError::Other(text)) => match Denial::parse(text) {
            Some(denial) => {
                warn!("{}", denial.error());
                state.send_modify(|state| state.denials.add(denial));
            }
            None => warn!("broker: {text}"),
        },
        async_nats::Event::LameDuckMode | async_nats::Event::Draining => info!("broker: {event}"),
        _ => warn!("broker: {event}"),
    }
}

/// Whether a server of this version supports this number of replicas.
pub(super) fn check_version(
    text: &str,
    replicas: usize,
    url: &str,
) -> Result<ServerVersion, QueueError> {
    let unsupported = |message| Err(QueueError::new(QueueErrorKind::Unsupported, message));
    let Some(version) = ServerVersion::parse(text) else {
        return unsupported(format!("server at {url} has an invalid version: {text:?}"));
    };
    if version < ServerVersion::OLDEST {
        return unsupported(format!(
            "nats-server at {url} is {version}: upgrade it to 2.10 or newer"
        ));
    }
    if replicas > 1 && version < ServerVersion::OLDEST_REPLICATED {
        return unsupported(format!(
            "nats-server at {url} is {version}, which loses messages of full streams with {replicas} \
             replicas: upgrade it to 2.12 or newer, or set broker replicas to 1"
        ));
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_servers_are_refused() {
        let kind = |text, replicas| {
            check_version(text, replicas, "nats://a:4222")
                .map_err(|error| error.kind())
                .map(|version| version.minor)
        };
        assert_eq!(kind("2.9.25", 1), Err(QueueErrorKind::Unsupported));
        assert_eq!(kind("2.10.0", 1), Ok(10));
        assert_eq!(kind("2.11.10", 3), Err(QueueErrorKind::Unsupported));
        assert_eq!(kind("2.12.0", 3), Ok(12));
        assert_eq!(kind("?", 1), Err(QueueErrorKind::Unsupported));
        let error = check_version("2.11.10", 3, "nats://a:4222").unwrap_err();
        assert!(error.to_string().contains("2.12 or newer"), "{error}");
    }
}
