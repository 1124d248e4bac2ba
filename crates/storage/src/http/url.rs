//! Web urls, parsed as browsers do.

use std::fmt;
use std::net::IpAddr;

use percent_encoding::percent_decode_str;
use url::{Host, Url};

use crate::uri::remote_scheme;

/// An `http://` or `https://` url.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpUrl(Url);

impl fmt::Display for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str())
    }
}

impl HttpUrl {
    /// Whether a uri looks like one.
    pub fn is_url(uri: &str) -> bool {
        remote_scheme(uri).is_some_and(|scheme| {
            scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https")
        })
    }

    /// Parses a url. The fragment after `#` is not sent.
    ///
    /// # Errors
    /// The problem. A url with a user or password is refused, because every row would contain it.
    pub fn parse(uri: &str) -> Result<Self, String> {
        let url = Url::parse(uri).map_err(|error| error.to_string())?;
        Self::new(url)
    }

    /// Resolves a relative url against this one.
    ///
    /// # Errors
    /// As [`HttpUrl::parse`].
    pub fn join(&self, location: &str) -> Result<Self, String> {
        let url = self.0.join(location).map_err(|error| error.to_string())?;
        Self::new(url)
    }

    fn new(mut url: Url) -> Result<Self, String> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(format!("{}:// is not read", url.scheme()));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(
                "it holds a user or a password, which rows would show; leave them out".into(),
            );
        }
        if url.host().is_none() {
            return Err("it names no host".to_owned());
        }
        url.set_fragment(None);
        Ok(Self(url))
    }

    /// `http` or `https`.
    pub fn scheme(&self) -> &str {
        self.0.scheme()
    }

    /// The host in lower case; IPv6 addresses in brackets.
    pub fn host(&self) -> &str {
        self.0.host_str().unwrap_or_default()
    }

    /// The port, including the scheme's default.
    pub fn port(&self) -> u16 {
        self.0.port_or_known_default().unwrap_or(0)
    }

    /// The path, percent-encoded, from its first slash.
    pub fn path(&self) -> &str {
        self.0.path()
    }

    /// Whether the path may leave its folder when the server decodes it.
    pub fn climbs(&self) -> bool {
        let decoded = percent_decode_str(self.path()).decode_utf8_lossy();
        decoded.split(['/', '\\']).any(|name| name == "..")
    }

    /// Scheme, host, and the port unless it is the default.
    pub fn origin(&self) -> String {
        match self.0.port() {
            Some(port) => format!("{}://{}:{port}", self.scheme(), self.host()),
            None => format!("{}://{}", self.scheme(), self.host()),
        }
    }

    /// The address, if the host is one.
    pub(super) fn address(&self) -> Option<IpAddr> {
        match self.0.host()? {
            Host::Ipv4(address) => Some(address.into()),
            Host::Ipv6(address) => Some(address.into()),
            Host::Domain(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_as_browsers_do() {
        let url = HttpUrl::parse("HTTPS://Example.com/a/./b%20c.jpg?w=1#top").unwrap();
        assert_eq!(url.to_string(), "https://example.com/a/b%20c.jpg?w=1");
        assert_eq!(
            (url.port(), url.origin()),
            (443, "https://example.com".to_owned())
        );
        let next = |location| url.join(location).map(|next| next.to_string());
        assert_eq!(next("../x.jpg").unwrap(), "https://example.com/x.jpg");
        assert_eq!(next("//cdn.example/x").unwrap(), "https://cdn.example/x");
        assert!(next("file:///etc/passwd").is_err() && next("ftp://x/").is_err());
    }

    #[test]
    fn addresses_are_seen_however_they_are_written() {
        for host in [
            "127.1",
            "0x7f000001",
            "2130706433",
            "0177.0.0.1",
            "127.0.0.1.",
        ] {
            let url = HttpUrl::parse(&format!("http://{host}/")).unwrap();
            assert_eq!(url.address(), Some([127, 0, 0, 1].into()), "{host}");
        }
        assert_eq!(HttpUrl::parse("http://a.example/").unwrap().address(), None);
    }

    #[test]
    fn what_cannot_be_asked_for_is_refused() {
        for (uri, reason) in [
            ("https://me:secret@host/a.jpg", "password"),
            ("https://me@host/a.jpg", "user"),
            ("https:///", "host"),
            ("https://ho st/", "invalid"),
        ] {
            let error = HttpUrl::parse(uri).unwrap_err();
            assert!(error.contains(reason), "{uri}: {error}");
        }
        assert!(HttpUrl::is_url("http://x") && HttpUrl::is_url("HTTPS://x"));
        assert!(!HttpUrl::is_url("s3://x/y") && !HttpUrl::is_url("photos/http.jpg"));
    }

    #[test]
    fn a_path_that_a_server_may_climb_by_is_known() {
        let climbs = |uri| HttpUrl::parse(uri).unwrap().climbs();
        assert!(climbs("https://h/a/..%2f..%2fb") && climbs("https://h/a/%2e%2e%5cb"));
        // Resolved before anything is sent.
        assert!(!climbs("https://h/a/../b") && !climbs("https://h/a/%2e%2e/b"));
        assert!(!climbs("https://h/a..b/c"));
    }
}
