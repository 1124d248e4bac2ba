//! Rows in a table of a PostgreSQL database.

mod connection;
mod copy;
mod read;
mod retried;
mod schema;
mod table_sink;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};
use trommel_storage::{StorageError, StorageErrorKind};

pub use read::TableRows;
pub(crate) use table_sink::TableSink;

/// Longest name in PostgreSQL, which truncates longer ones without an error.
const MAX_NAME: usize = 63;
/// Suffix of the name of the jobs table.
const JOBS: &str = "_jobs";

/// Who writes to PostgreSQL, where an address does not say it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct PostgresConfig {
    /// The user. Default: that of the environment (`PGUSER`).
    pub user: Option<String>,
    /// The server that the password is for, or several with commas between; also the one of an
    /// address without a host. Default: that of the environment (`PGHOST`), else this machine.
    pub host: Option<String>,
    /// The user's password; from the environment (`PGPASSWORD`), never read from a file. It goes to
    /// no other server than `host`.
    #[serde(skip)]
    pub password: Option<String>,
    /// Longest time of a statement that inserts rows. Reading what is committed may take longer.
    /// Default: `120s`.
    #[serde(with = "humantime_serde")]
    pub statement_timeout: Duration,
}

impl Default for PostgresConfig {
    fn default() -> Self {
        Self {
            user: None,
            host: None,
            password: None,
            statement_timeout: Duration::from_secs(120),
        }
    }
}

impl PostgresConfig {
    /// Whether the password may be sent to all of these.
    fn trusts(&self, hosts: &[Host]) -> bool {
        let is_trusted = |host: &Host| match (host, &self.host) {
            (Host::Tcp(host), Some(trusted)) => trusted.split(',').any(|name| name.trim() == host),
            (Host::Tcp(host), None) => ["localhost", "127.0.0.1", "::1"].contains(&host.as_str()),
            (Host::Unix(path), Some(trusted)) => trusted.split(',').any(|name| path == name.trim()),
            (Host::Unix(_), None) => true,
        };
        hosts.iter().all(is_trusted)
    }
}

impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("user", &self.user)
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

/// A table in a PostgreSQL database, as in `postgres://user@host/database?table=name`.
#[derive(Clone)]
pub struct TableDestination {
    config: Config,
    /// The trusted certificates; by default the system's.
    roots: Option<PathBuf>,
    statement_timeout: Duration,
    /// The table's schema, if given, and its name.
    schema: Option<String>,
    table: String,
}

impl TableDestination {
    /// Parses the address of a table; `None` if it is not in a PostgreSQL database.
    ///
    /// Besides `table` (`name` or `schema.name`) the address may have the parameters of libpq, such
    /// as `sslmode`, `sslrootcert` and `connect_timeout`. A server's certificate is always checked.
    ///
    /// # Errors
    /// [`InvalidDestination`](StorageErrorKind::InvalidDestination) for an address that lacks a
    /// table or is malformed. Messages never contain a password.
    pub fn parse(text: &str, access: &PostgresConfig) -> Result<Option<Self>, StorageError> {
        if !text.starts_with("postgres://") && !text.starts_with("postgresql://") {
            return Ok(None);
        }
        let (address, query) = text.split_once('?').unwrap_or((text, ""));
        let (mut table, mut roots, mut rest) = (None, None, Vec::new());
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let value = percent_decode_str(value).decode_utf8_lossy();
            match (name, &*value) {
                ("table", name) => table = Some(name.to_owned()),
                ("sslrootcert", path) => roots = Some(PathBuf::from(path)),
                // `require` means both here.
                ("sslmode", "verify-ca" | "verify-full") => rest.push("sslmode=require"),
                _ => rest.push(option),
            }
        }
        let mut config =
            Config::from_str(&format!("{address}?{}", rest.join("&"))).map_err(|error| {
                invalid(&format!("its address is not understood: {}", chain(&error)))
            })?;
        if config.get_hosts().is_empty() {
            let hosts = access.host.as_deref().unwrap_or("localhost");
            for host in hosts.split(',') {
                config.host(host.trim());
            }
        }
        if let (None, Some(user)) = (config.get_user(), &access.user) {
            config.user(user.as_str());
        }
        if let (None, Some(password)) = (config.get_password(), &access.password) {
            if !access.trusts(config.get_hosts()) {
                let hosts: Vec<_> = config.get_hosts().iter().map(shown).collect();
                return Err(StorageError::new(
                    StorageErrorKind::PermissionDenied,
                    format!(
                        "output in PostgreSQL: PGPASSWORD is not for {}; set postgres.host or PGHOST to it, or give a password in the address",
                        hosts.join(",")
                    ),
                ));
            }
            config.password(password);
        }
        let table = table.filter(|table| !table.is_empty()).ok_or_else(|| {
            invalid("it names no table; add ?table=NAME, as in postgres://user@host/database?table=labels")
        })?;
        let (schema, table) = match table.split_once('.') {
            Some((schema, table)) => (Some(schema.to_owned()), table.to_owned()),
            None => (None, table),
        };
        for name in schema.iter().chain([&table]) {
            if name.is_empty() || name.len() > MAX_NAME - JOBS.len() || name.contains('\0') {
                return Err(invalid(&format!(
                    "{name:?} is not a valid table name; use 1 to {} bytes",
                    MAX_NAME - JOBS.len()
                )));
            }
        }
        Ok(Some(Self {
            config,
            roots,
            statement_timeout: access.statement_timeout,
            schema,
            table,
        }))
    }

    /// The address without its password, for people and records.
    pub fn redacted(&self) -> String {
        let user = self
            .config
            .get_user()
            .map_or_else(String::new, |user| format!("{user}@"));
        let hosts: Vec<String> = self
            .config
            .get_hosts()
            .iter()
            .enumerate()
            .map(|(number, host)| {
                let host = shown(host);
                // One port may apply to all hosts.
                let ports = self.config.get_ports();
                match ports.get(number).or(ports.first()) {
                    Some(port) => format!("{host}:{port}"),
                    None => host,
                }
            })
            .collect();
        let database = self.config.get_dbname().unwrap_or_default();
        let schema = self
            .schema
            .as_ref()
            .map_or_else(String::new, |schema| format!("{schema}."));
        format!(
            "postgres://{user}{}/{database}?table={schema}{}",
            hosts.join(","),
            self.table
        )
    }

    /// The quoted name of the table, or of the jobs table.
    fn quoted(&self, suffix: &str) -> String {
        let table = quote(&format!("{}{suffix}", self.table));
        match &self.schema {
            Some(schema) => format!("{}.{table}", quote(schema)),
            None => table,
        }
    }

    fn wants_tls(&self) -> bool {
        self.config.get_ssl_mode() != SslMode::Disable
    }
}

impl fmt::Display for TableDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted())
    }
}

impl fmt::Debug for TableDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted())
    }
}

fn shown(host: &Host) -> String {
    match host {
        Host::Tcp(host) => host.clone(),
        Host::Unix(path) => path.display().to_string(),
    }
}

fn invalid(reason: &str) -> StorageError {
    let message = format!("output in PostgreSQL: {reason}");
    StorageError::new(StorageErrorKind::InvalidDestination, message)
}

/// A quoted name.
fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Option<TableDestination>, StorageError> {
        TableDestination::parse(text, &PostgresConfig::default())
    }

    #[test]
    fn user_and_password_come_from_the_address_first() {
        let access = PostgresConfig {
            user: Some("other".to_owned()),
            password: Some("word".to_owned()),
            host: Some("h".to_owned()),
            ..PostgresConfig::default()
        };
        for (text, user, password) in [
            ("postgres://h/db?table=t", "other", "word"),
            ("postgres://me@h/db?table=t", "me", "word"),
            ("postgres://me:own@h/db?table=t", "me", "own"),
        ] {
            let table = TableDestination::parse(text, &access).unwrap().unwrap();
            assert_eq!(table.config.get_user(), Some(user));
            assert_eq!(table.config.get_password(), Some(password.as_bytes()));
        }
    }

    #[test]
    fn an_address_names_server_database_and_table() {
        let table = parse(
            "postgresql://me:secret@db.example:6543/images?table=ml.labels&sslmode=verify-full",
        )
        .unwrap()
        .unwrap();
        assert_eq!(table.quoted(JOBS), "\"ml\".\"labels_jobs\"");
        assert_eq!(
            table.to_string(),
            "postgres://me@db.example:6543/images?table=ml.labels"
        );
        assert!(!format!("{table:?}").contains("secret"));
        assert!(table.wants_tls());
        assert!(parse("s3://bucket/x/").unwrap().is_none());
    }

    #[test]
    fn a_name_cannot_leave_its_quotes() {
        let table = parse("postgres://h/db?table=a%22;drop").unwrap().unwrap();
        assert_eq!(table.quoted(""), "\"a\"\";drop\"");
    }

    #[test]
    fn an_address_that_cannot_be_used_is_refused_without_its_password() {
        let long = format!("postgres://h/db?table={}", "x".repeat(59));
        for (wrong, hint) in [
            ("postgres://u:secret@h/db", "?table=NAME"),
            ("postgres://u:secret@h/db?table=", "?table=NAME"),
            (
                "postgres://u:secret@h/db?table=a.",
                "not a valid table name",
            ),
            ("postgres://u:secret@h:x/db?table=t", "not understood"),
            (
                "postgres://u:secret@h/db?table=t&frobnicate=1",
                "frobnicate",
            ),
            (&long, "58 bytes"),
        ] {
            let error = parse(wrong).unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::InvalidDestination);
            assert!(error.to_string().contains(hint), "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
