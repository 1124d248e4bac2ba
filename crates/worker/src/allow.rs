//! Where a worker may read and write on behalf of those who submit jobs.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use percent_encoding::percent_decode_str;
use trommel_storage::PlaceRule;
use trommel_storage::cloud::Cloud;
use trommel_storage::http::HttpUrl;
use trommel_storage::uri::{remote_scheme, to_path};
use trommel_types::{Content, ImageRef};

use crate::AccessConfig;

/// Longest quote of a uri in a message, in characters.
const QUOTED: usize = 200;
/// The scheme of S3.
const S3: &str = "s3";
/// The default port of a PostgreSQL server.
const POSTGRES_PORT: u16 = 5432;

/// The places that jobs may read images from and write rows to.
///
/// A place is refused before it is opened, unless it is allowed. Local paths, buckets of other
/// clouds, web hosts and databases have to be allowed by name; S3 is allowed wherever the
/// credentials reach, until one of its places is named.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    sources: Vec<Prefix>,
    outputs: Vec<Prefix>,
}

/// A place in a job that the worker's operator has not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// A place and everything below it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Prefix {
    /// A path with its symbolic links resolved.
    Local(PathBuf),
    /// A bucket of the store with this scheme, and a key prefix, which is empty or ends with a
    /// slash.
    Bucket {
        scheme: &'static str,
        bucket: String,
        key: String,
    },
    /// A web host with scheme and port, and a path prefix, which ends with a slash.
    Web { origin: String, path: String },
    /// A database, or all databases of a server.
    Postgres {
        server: (String, u16),
        database: Option<String>,
    },
    /// Subjects, with the wildcards of NATS.
    Nats(String),
}

impl Allowed {
    /// Reads the settings `access.sources` and `access.outputs`. Symbolic links in local paths are
    /// resolved now.
    ///
    /// # Errors
    /// Everything that is invalid in them, each with its remedy.
    pub fn new(config: &AccessConfig) -> Result<Self, Vec<String>> {
        let mut problems = Vec::new();
        let mut read = |setting: &str, places: &[String]| -> Vec<Prefix> {
            let places = places.iter().filter_map(|place| {
                let parsed = Prefix::parse(place);
                let problem = |reason| format!("access.{setting}: {}: {reason}", quoted(place));
                parsed.map_err(|reason| problems.push(problem(reason))).ok()
            });
            places.collect()
        };
        let sources = read("sources", &config.sources);
        let outputs = read("outputs", &config.outputs);
        if outputs.iter().any(|place| matches!(place, Prefix::Nats(_))) {
            problems.push("access.outputs: rows cannot go to nats://; remove it".to_owned());
        }
        if outputs
            .iter()
            .any(|place| matches!(place, Prefix::Web { .. }))
        {
            problems.push("access.outputs: rows cannot go to https://; remove it".to_owned());
        }
        for place in &outputs {
            if let Prefix::Bucket { scheme, .. } = place
                && *scheme != S3
            {
                let problem = format!("access.outputs: rows cannot go to {scheme}://; remove it");
                problems.push(problem);
            }
        }
        match problems.is_empty() {
            true => Ok(Self { sources, outputs }),
            false => Err(problems),
        }
    }

    /// Web addresses only, as listed in the setting of this name.
    ///
    /// # Errors
    /// Everything that is invalid in them, each with its remedy.
    pub(crate) fn of_urls(setting: &str, places: &[String]) -> Result<Self, Vec<String>> {
        let (mut sources, mut problems) = (Vec::new(), Vec::new());
        for place in places {
            match Prefix::parse(place) {
                Ok(prefix @ Prefix::Web { .. }) => sources.push(prefix),
                Ok(_) => problems.push(format!(
                    "{setting}: {}: give https://host/ or http://host/",
                    quoted(place)
                )),
                Err(reason) => problems.push(format!("{setting}: {}: {reason}", quoted(place))),
            }
        }
        match problems.is_empty() {
            true => Ok(Self {
                sources,
                outputs: Vec::new(),
            }),
            false => Err(problems),
        }
    }

    /// Checks a source of a job, as given to `trommel submit`.
    ///
    /// For a pattern, the folder before the first wildcard counts;
    /// [`check_image`](Self::check_image) checks each image that it matches.
    ///
    /// # Errors
    /// If it is not allowed; the error says what to add.
    pub fn check_source(&self, source: &str) -> Result<(), Refusal> {
        let place = Place::parse(source);
        let allowed = place
            .as_ref()
            .is_ok_and(|place| place.in_any(&self.sources));
        refuse_unless(allowed, source, "--allow-source", || {
            suggestion(source, place)
        })
    }

    /// The same as a rule for places that sources lead to: redirects, and files that patterns
    /// match.
    pub(crate) fn rule(self: Arc<Self>) -> PlaceRule {
        PlaceRule::new(move |uri| {
            let checked = self.check_source(uri);
            checked.map_err(|refusal| refusal.to_string())
        })
    }

    /// Checks the output of a job.
    ///
    /// # Errors
    /// If it is not allowed; the error says what to add.
    pub fn check_output(&self, output: &str) -> Result<(), Refusal> {
        let place = Place::parse(output).and_then(|place| match place {
            Place::Nats(_) | Place::Web(_) => Err("rows cannot go there".to_owned()),
            Place::Bucket { scheme, .. } if scheme != S3 => {
                Err(format!("rows cannot go to {scheme}://"))
            }
            // Outputs are literal paths; nothing decodes them.
            Place::Local { .. } if output.starts_with("file://") => {
                Err("give the path itself, without file://".to_owned())
            }
            place => Ok(place),
        });
        let allowed = place
            .as_ref()
            .is_ok_and(|place| place.in_any(&self.outputs));
        refuse_unless(allowed, output, "--allow-output", || {
            suggestion(output, place)
        })
    }

    /// Checks the file or object that an image is read from: its own, or the archive or table that
    /// contains it. An image whose bytes came with the job is not read from anywhere.
    ///
    /// Costs a look at the file system for a local image, and a comparison for others.
    ///
    /// If it is not allowed; the error says what to add.
    pub fn check_image(&self, image: &ImageRef) -> Result<(), Refusal> {
        if let Content::Inline(_) = &image.content {
            return Ok(());
        }
        let uri = image.content.container().unwrap_or(&image.uri);
        let place = Place::parse(uri);
        let allowed = place
            .as_ref()
            .is_ok_and(|place| place.in_any(&self.sources));
        refuse_unless(allowed, uri, "--allow-source", || {
            // The folder of an image represents the other images in it.
            let folder = match (&place, uri.rsplit_once('/')) {
                (Ok(_), Some((folder, _))) if !folder.is_empty() => folder,
                _ => uri,
            };
            suggestion(folder, place)
        })
    }
}

/// A place in a job, as far as it matters here.
#[derive(Debug)]
enum Place {
    /// A path with symbolic links resolved, and whether that changed it.
    Local {
        real: PathBuf,
        moved: bool,
    },
    Bucket {
        scheme: &'static str,
        bucket: String,
        key: String,
    },
    Web(HttpUrl),
    Postgres {
        server: (String, u16),
        database: String,
    },
    Nats(String),
}

impl Place {
    /// Parses a uri like those who open it. If they could interpret it differently, it is an error.
    fn parse(uri: &str) -> Result<Self, String> {
        let rest = |scheme: &str| uri[scheme.len() + "://".len()..].to_owned();
        if HttpUrl::is_url(uri) {
            return HttpUrl::parse(uri).map(Self::Web);
        }
        match remote_scheme(uri) {
            None if uri.is_empty() => Err("it is empty".to_owned()),
            None => {
                let path = to_path(uri);
                let real = resolved(&path).map_err(|error| error.to_string())?;
                let lexical = std::path::absolute(&path).map_err(|error| error.to_string())?;
                let moved = real != lexical;
                Ok(Self::Local { real, moved })
            }
            Some(scheme) if let Some(scheme) = bucket_scheme(scheme) => {
                let rest = rest(scheme);
                let (bucket, key) = rest.split_once('/').unwrap_or((&rest, ""));
                match bucket.is_empty() {
                    true => Err("it names no bucket".to_owned()),
                    false => Ok(Self::Bucket {
                        scheme,
                        bucket: bucket.to_owned(),
                        key: key.to_owned(),
                    }),
                }
            }
            Some("postgres" | "postgresql") => {
                let (server, database, _) = postgres(uri)?;
                Ok(Self::Postgres { server, database })
            }
            Some(scheme @ "nats") => {
                let subject = rest(scheme);
                check_subject(&subject)?;
                Ok(Self::Nats(subject))
            }
            Some(scheme) => Err(format!("{scheme}:// is not read or written")),
        }
    }

    fn in_any(&self, prefixes: &[Prefix]) -> bool {
        let named_s3 = || {
            prefixes
                .iter()
                .any(|prefix| matches!(prefix, Prefix::Bucket { scheme: S3, .. }))
        };
        let open = matches!(self, Self::Bucket { scheme: S3, .. }) && !named_s3();
        open || prefixes.iter().any(|prefix| self.is_in(prefix))
    }

    fn is_in(&self, prefix: &Prefix) -> bool {
        match (self, prefix) {
            (Self::Local { real, .. }, Prefix::Local(prefix)) => real.starts_with(prefix),
            (
                Self::Bucket {
                    scheme,
                    bucket,
                    key,
                },
                Prefix::Bucket {
                    scheme: store,
                    bucket: allowed,
                    key: prefix,
                },
            ) => {
                // To S3 a key is a plain name, but a store may keep it as a path.
                let climbs = || key.split('/').any(|name| matches!(name, "." | ".."));
                let below = key.starts_with(prefix) || *key == prefix.trim_end_matches('/');
                scheme == store && bucket == allowed && (prefix.is_empty() || (below && !climbs()))
            }
            (Self::Web(url), Prefix::Web { origin, path }) => {
                let below =
                    url.path().starts_with(path) || url.path() == path.trim_end_matches('/');
                url.origin() == *origin && (path == "/" || (below && !url.climbs()))
            }
            (
                Self::Postgres { server, database },
                Prefix::Postgres {
                    server: allowed,
                    database: only,
                },
            ) => server == allowed && only.as_ref().is_none_or(|only| only == database),
            (Self::Nats(subject), Prefix::Nats(allowed)) => covers(allowed, subject),
            _ => false,
        }
    }
}

impl Prefix {
    /// # Errors
    /// Says what is wrong and what to write instead.
    fn parse(text: &str) -> Result<Self, String> {
        match Place::parse(text)? {
            Place::Local { real, .. } => Ok(Self::Local(real)),
            Place::Bucket {
                scheme,
                bucket,
                mut key,
            } => {
                if !key.is_empty() && !key.ends_with('/') {
                    key.push('/');
                }
                Ok(Self::Bucket {
                    scheme,
                    bucket,
                    key,
                })
            }
            Place::Web(url) => {
                let mut path = url.path().to_owned();
                if !path.ends_with('/') {
                    path.push('/');
                }
                let origin = url.origin();
                Ok(Self::Web { origin, path })
            }
            Place::Postgres { server, database } => match postgres(text)? {
                (_, _, true) => Err(
                    "give host and database only, without user, password and options".to_owned(),
                ),
                _ => Ok(Self::Postgres {
                    server,
                    database: Some(database).filter(|database| !database.is_empty()),
                }),
            },
            Place::Nats(subject) => Ok(Self::Nats(subject)),
        }
    }
}

/// The scheme of a store with buckets.
fn bucket_scheme(scheme: &str) -> Option<&'static str> {
    match scheme {
        S3 => Some(S3),
        other => Cloud::of_scheme(other).map(Cloud::scheme),
    }
}

/// A path as the file system sees it: canonical, or the canonical form of its nearest existing
/// ancestor, and the rest.
fn resolved(path: &Path) -> io::Result<PathBuf> {
    let mut missing = Vec::new();
    let mut path = match path {
        path if path.as_os_str().is_empty() => Path::new("."),
        path => path,
    };
    let error = |reason| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    loop {
        match path.canonicalize() {
            Ok(mut real) => {
                real.extend(missing.iter().rev());
                return Ok(real);
            }
            Err(absent) if is_absent(absent.kind()) => {
                let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                    return error("it climbs by `..` out of a folder that does not exist");
                };
                // Creating it would write to the link's target. Asked without a slash at the end,
                // which would follow the link.
                if parent.join(name).is_symlink() {
                    return error("it is a symbolic link that leads nowhere");
                }
                missing.push(name);
                path = match parent {
                    parent if parent.as_os_str().is_empty() => Path::new("."),
                    parent => parent,
                };
            }
            Err(other) => return Err(other),
        }
    }
}

fn is_absent(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Server and database of an address, and whether it contains anything else.
///
/// Clients differ in how they read unusual addresses, so only the plain form is accepted: one host,
/// at most one `@`, and no options that name another server or database.
fn postgres(uri: &str) -> Result<((String, u16), String, bool), String> {
    let (_, rest) = uri.split_once("://").unwrap_or(("", uri));
    let (address, options) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, database) = address.split_once('/').unwrap_or((address, ""));
    let (user, server) = match authority.split_once('@') {
        Some((user, server)) => (Some(user), server),
        None => (None, authority),
    };
    let odd = |character| matches!(character, '@' | ',' | '%' | '#' | '\\') || character <= ' ';
    if server.is_empty() || server.contains(odd) || database.contains(['@', '/', '%', '#', '?']) {
        return Err(
            "its host and database are not plain; write postgres://user@host:port/database"
                .to_owned(),
        );
    }
    // An IPv6 address in brackets contains colons.
    let (host, port) = match server.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => {
            let number = port
                .parse()
                .map_err(|_| "its port is not a number".to_owned())?;
            (host, number)
        }
        _ => (server, POSTGRES_PORT),
    };
    for option in options.split('&') {
        let name = option.split_once('=').map_or(option, |(name, _)| name);
        let name = percent_decode_str(name).decode_utf8_lossy();
        if ["host", "hostaddr", "port", "dbname"].contains(&name.as_ref()) || options.contains('@')
        {
            return Err(format!(
                "option {name} may name another server; name host and database before the `?`"
            ));
        }
    }
    let more = user.is_some() || !options.is_empty();
    Ok(((host.to_ascii_lowercase(), port), database.to_owned(), more))
}

/// Refuses an invalid NATS subject, or one with wildcards.
fn check_subject(subject: &str) -> Result<(), String> {
    let tokens: Vec<&str> = subject.split('.').collect();
    let valid = |(number, token): (usize, &&str)| match *token {
        "" => false,
        ">" => number + 1 == tokens.len(),
        token => {
            token == "*" || !token.contains(|c: char| c.is_whitespace() || c == '*' || c == '>')
        }
    };
    match tokens.iter().enumerate().all(valid) {
        true => Ok(()),
        false => Err("it is not a NATS subject".to_owned()),
    }
}

/// Whether `allowed` matches every subject that `subject` matches.
fn covers(allowed: &str, subject: &str) -> bool {
    let (mut allowed, mut subject) = (allowed.split('.'), subject.split('.'));
    loop {
        match (allowed.next(), subject.next()) {
            (Some(">"), Some(_)) | (None, None) => return true,
            (Some("*"), Some(token)) if token != ">" => {}
            (Some(allowed), Some(token)) if allowed == token => {}
            _ => return false,
        }
    }
}

fn refuse_unless(
    allowed: bool,
    uri: &str,
    flag: &str,
    remedy: impl FnOnce() -> Result<String, String>,
) -> Result<(), Refusal> {
    if allowed {
        return Ok(());
    }
    let shown = quoted(&without_password(uri));
    Err(Refusal(match remedy() {
        Ok(place) => format!(
            "{shown} is not allowed: a worker reads and writes only where its operator allows it; start the workers with {flag} {place}"
        ),
        Err(reason) => format!("{shown} is not allowed: {reason}"),
    }))
}

/// What to allow for a place. The target of a link is not revealed.
fn suggestion(uri: &str, place: Result<Place, String>) -> Result<String, String> {
    match place? {
        Place::Local { moved: true, .. } => Ok(
            "DIR, where DIR is the folder that it leads to with `..` and symbolic links resolved"
                .to_owned(),
        ),
        Place::Local { .. } => {
            let path = to_path(uri);
            let path = std::path::absolute(&path).unwrap_or(path);
            Ok(quoted(&path.to_string_lossy()))
        }
        Place::Bucket {
            scheme,
            bucket,
            key,
        } => {
            let folder = key
                .rsplit_once('/')
                .map_or(String::new(), |(folder, _)| format!("{folder}/"));
            Ok(quoted(&format!("{scheme}://{bucket}/{folder}")))
        }
        // The whole host: web paths say little about access rights.
        Place::Web(url) => Ok(quoted(&format!("{}/", url.origin()))),
        Place::Postgres {
            server: (host, port),
            database,
        } => Ok(quoted(&format!("postgres://{host}:{port}/{database}"))),
        Place::Nats(subject) => Ok(quoted(&format!("nats://{subject}"))),
    }
}

/// The uri without user, password and options, for messages.
fn without_password(uri: &str) -> String {
    match remote_scheme(uri) {
        Some(scheme @ ("postgres" | "postgresql")) => {
            let address = uri.split('?').next().unwrap_or(uri);
            let host = address
                .rsplit_once('@')
                .map_or(&address[scheme.len() + 3..], |(_, host)| host);
            format!("{scheme}://{host}")
        }
        Some(scheme) if HttpUrl::is_url(uri) => {
            let rest = &uri[scheme.len() + 3..];
            let (host, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
            let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
            let path = path.split('?').next().unwrap_or_default();
            format!("{scheme}://{host}{path}")
        }
        _ => uri.to_owned(),
    }
}

/// Untrusted text, on one line and not too long.
fn quoted(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .take(QUOTED)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(QUOTED).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests;
