use std::sync::Arc;

use async_nats::{Client, ConnectErrorKind, ConnectOptions, ServerAddr};
use tokio::sync::watch;
use tracing::{info, warn};

use super::broker::ANSWER;
use super::{BrokerConfig, ServerVersion};
use crate::{QueueError, QueueErrorKind};

/// Whether the connection stands, and how often it has been made.
#[derive(Clone)]
pub(super) struct Link {
    state: watch::Receiver<LinkState>,
}

#[derive(Debug, Clone, Copy, Default)]
struct LinkState {
    up: bool,
    /// Grows whenever the connection is lost.
    losses: u64,
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        self.state.borrow().up
    }

    /// How often the connection has been lost.
    pub(super) fn losses(&self) -> u64 {
        self.state.borrow().losses
    }

    /// Waits until the connection stands; says how often it was lost before.
    pub(super) async fn up(&self) -> u64 {
        let mut state = self.state.clone();
        match state.wait_for(|state| state.up).await {
            Ok(state) => state.losses,
            // The sender lives in the client's event callback. With the client gone, requests fail
            // by themselves.
            Err(_) => self.losses(),
        }
    }

    /// Waits until the connection has been lost more often than `losses` times.
    pub(super) async fn lost(&self, losses: u64) {
        let mut state = self.state.clone();
        if state.wait_for(|state| state.losses > losses).await.is_err() {
            std::future::pending().await
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
                let message = format!("broker url {url} is none: {error}");
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
        .event_callback({
            let state = Arc::clone(&state);
            move |event| {
                let state = Arc::clone(&state);
                async move { heard(&state, &event) }
            }
        });
    // The client library reads addresses and leaves what stands before the @ to us.
    if let Some(user) = addresses.iter().find_map(|address| {
        let user = percent_decoded(address.username()?);
        Some((user, address.password().map(percent_decoded)))
    }) {
        options = match user {
            (user, Some(password)) => options.user_and_password(user, password),
            (token, None) => options.token(token),
        };
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
    // The first word of the event callback may come later than this.
    state.send_modify(|state| state.up |= state.losses == 0);
    Ok((client, Link { state: link }))
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
            });
        }
        async_nats::Event::LameDuckMode | async_nats::Event::Draining => info!("broker: {event}"),
        _ => warn!("broker: {event}"),
    }
}

/// Whether a server of this version can be used with so many replicas.
pub(super) fn check_version(
    text: &str,
    replicas: usize,
    url: &str,
) -> Result<ServerVersion, QueueError> {
    let unsupported = |message| Err(QueueError::new(QueueErrorKind::Unsupported, message));
    let Some(version) = ServerVersion::parse(text) else {
        return unsupported(format!(
            "server at {url} has a version that is none: {text:?}"
        ));
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
