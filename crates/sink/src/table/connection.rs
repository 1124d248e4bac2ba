//! Connections to the server, and what its errors mean.

use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tokio_postgres_rustls::MakeRustlsConnect;
use trommel_storage::{StorageError, StorageErrorKind};

use crate::table::{TableDestination, chain, invalid};

/// Time limit for connecting, if the address has none.
const CONNECT: Duration = Duration::from_secs(10);
/// Settings of every session. A sink that is suspended during a transaction must not block its
/// successor for longer than this.
const SESSION: &str = "\
    SET idle_in_transaction_session_timeout = '20s'; \
    SET client_min_messages = 'warning'";

impl TableDestination {
    /// Connects. The connection lives on the caller's runtime.
    pub(super) async fn connect(&self) -> Result<Client, StorageError> {
        let mut config = self.config.clone();
        if config.get_application_name().is_none() {
            config.application_name("trommel");
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(CONNECT);
        }
        // To detect a server that vanished.
        config.keepalives_idle(Duration::from_secs(15));
        config.tcp_user_timeout(Duration::from_secs(30));
        let failed = |error| self.failed("failed to connect", &error);
        let client = if self.wants_tls() {
            let tls = MakeRustlsConnect::new(self.tls()?);
            let (client, connection) = config.connect(tls).await.map_err(failed)?;
            tokio::spawn(connection);
            client
        } else {
            let (client, connection) = config
                .connect(tokio_postgres::NoTls)
                .await
                .map_err(failed)?;
            tokio::spawn(connection);
            client
        };
        client.batch_execute(SESSION).await.map_err(failed)?;
        self.limit_statements(&client, self.statement_timeout)
            .await?;
        let encoding = client
            .query_one("SHOW server_encoding", &[])
            .await
            .map_err(failed)?;
        let encoding: &str = encoding.get(0);
        if encoding != "UTF8" {
            return Err(invalid(&format!(
                "{self} is encoded in {encoding}, which cannot hold every name; use a database with ENCODING 'UTF8'"
            )));
        }
        Ok(client)
    }

    /// Limits the time of each statement from now on; zero means no limit.
    pub(super) async fn limit_statements(
        &self,
        client: &Client,
        limit: Duration,
    ) -> Result<(), StorageError> {
        client
            .batch_execute(&format!("SET statement_timeout = {}", limit.as_millis()))
            .await
            .map_err(|error| self.failed("failed to set a limit of time", &error))
    }

    fn tls(&self) -> Result<ClientConfig, StorageError> {
        let mut roots = RootCertStore::empty();
        match &self.roots {
            Some(path) => {
                let unusable = |error: &dyn std::fmt::Display| {
                    invalid(&format!("sslrootcert {}: {error}", path.display()))
                };
                let certificates =
                    CertificateDer::pem_file_iter(path).map_err(|error| unusable(&error))?;
                for certificate in certificates {
                    let certificate = certificate.map_err(|error| unusable(&error))?;
                    roots.add(certificate).map_err(|error| unusable(&error))?;
                }
                if roots.is_empty() {
                    return Err(unusable(&"it holds no certificate"));
                }
            }
            None => {
                // Unreadable ones are ignored; without any, the handshake fails.
                let found = rustls_native_certs::load_native_certs();
                roots.add_parsable_certificates(found.certs);
            }
        }
        let provider = rustls::crypto::ring::default_provider();
        Ok(ClientConfig::builder_with_provider(provider.into())
            .with_safe_default_protocol_versions()
            .expect("ring offers the protocol versions that rustls asks for")
            .with_root_certificates(roots)
            .with_no_client_auth())
    }

    /// The meaning of an error of the server or the connection.
    pub(super) fn failed(&self, what: &str, error: &tokio_postgres::Error) -> StorageError {
        let Some(server) = error.as_db_error() else {
            // TLS reports problems with certificates only as text.
            let text = chain(error);
            let (kind, remedy) = if text.contains("certificate") {
                (
                    StorageErrorKind::InvalidDestination,
                    "; name the authority by sslrootcert=FILE, or do without TLS by sslmode=disable",
                )
            } else if text.contains("password missing") {
                (
                    StorageErrorKind::PermissionDenied,
                    "; give one in the address, or by PGPASSWORD",
                )
            } else if text.contains("server does not support TLS") {
                (
                    StorageErrorKind::InvalidDestination,
                    "; let the server offer it, or do without by sslmode=disable",
                )
            } else {
                (StorageErrorKind::Unreadable, "")
            };
            return StorageError::new(kind, format!("{self}: {what}: {text}{remedy}"));
        };
        let (kind, remedy) = meaning(server.code());
        let detail = server
            .detail()
            .map_or_else(String::new, |detail| format!(" ({detail})"));
        StorageError::new(
            kind,
            format!("{self}: {what}: {}{detail}{remedy}", server.message()),
        )
    }
}

fn meaning(code: &SqlState) -> (StorageErrorKind, &'static str) {
    if *code == SqlState::DISK_FULL {
        return (
            StorageErrorKind::NoSpace,
            "; committed rows are kept; free some space and run the same command again",
        );
    }
    if *code == SqlState::INSUFFICIENT_PRIVILEGE {
        return (
            StorageErrorKind::PermissionDenied,
            "; grant SELECT, INSERT, UPDATE and DELETE on the table and on its table of jobs, or CREATE on the schema",
        );
    }
    // A statement that waited for a lock too long may succeed later.
    if *code == SqlState::QUERY_CANCELED || *code == SqlState::LOCK_NOT_AVAILABLE {
        return (StorageErrorKind::Unreadable, "");
    }
    match &code.code()[..2] {
        "28" => (
            StorageErrorKind::PermissionDenied,
            "; check user and password",
        ),
        "3D" | "3F" => (StorageErrorKind::InvalidDestination, "; create it first"),
        // Connections, serialization, resources, a server that stops or starts.
        "08" | "25" | "40" | "53" | "57" | "58" => (StorageErrorKind::Unreadable, ""),
        _ => (StorageErrorKind::InvalidDestination, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_told_from_what_will_not() {
        for (code, kind) in [
            (SqlState::ADMIN_SHUTDOWN, StorageErrorKind::Unreadable),
            (SqlState::CANNOT_CONNECT_NOW, StorageErrorKind::Unreadable),
            (SqlState::TOO_MANY_CONNECTIONS, StorageErrorKind::Unreadable),
            (
                SqlState::T_R_DEADLOCK_DETECTED,
                StorageErrorKind::Unreadable,
            ),
            (
                SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT,
                StorageErrorKind::Unreadable,
            ),
            (SqlState::DISK_FULL, StorageErrorKind::NoSpace),
            (
                SqlState::INVALID_PASSWORD,
                StorageErrorKind::PermissionDenied,
            ),
            (
                SqlState::INSUFFICIENT_PRIVILEGE,
                StorageErrorKind::PermissionDenied,
            ),
            (
                SqlState::INVALID_CATALOG_NAME,
                StorageErrorKind::InvalidDestination,
            ),
            (
                SqlState::UNDEFINED_COLUMN,
                StorageErrorKind::InvalidDestination,
            ),
        ] {
            assert_eq!(meaning(&code).0, kind, "{}", code.code());
        }
    }
}
