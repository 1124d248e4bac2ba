//! Checks which addresses may be connected to.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::vec;

use hyper_util::client::legacy::connect::dns::Name;
use tower_service::Service;

/// Whether an address is on the public internet, not on this machine, in a private network or a
/// cloud's own service.
pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    !matches!(
        (a, b, c),
        (0 | 10 | 127 | 224.., _, _)
            | (100, 64..=127, _)
            | (169, 254, _)
            | (172, 16..=31, _)
            | (192, 168, _)
            | (192, 0, 0 | 2)
            | (198, 18 | 19, _)
            | (198, 51, 100)
            | (203, 0, 113)
    )
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    if let Some(inner) = address.to_ipv4_mapped() {
        return is_public_v4(inner);
    }
    let [a, b, c, d, e, f, g, h] = address.segments();
    let inner = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match (a, b) {
        // IPv4 addresses embedded in IPv6.
        (0x64, 0xff9b) if (c, d, e, f) == (0, 0, 0, 0) => inner(g, h),
        (0x2002, _) => inner(b, c),
        // Teredo, benchmarks, documentation and other special ones.
        (0x2001, 0..=0x1ff | 0xdb8) | (0x3fff, 0..=0xfff) => false,
        (0x2000..=0x3fff, _) => true,
        _ => false,
    }
}

/// A host with only private addresses, which are refused.
#[derive(Debug)]
pub(super) struct Private {
    host: String,
}

impl Private {
    pub(super) fn new(host: &str) -> Self {
        Self {
            host: host.to_owned(),
        }
    }
}

impl fmt::Display for Private {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is an address of this machine or a private network; to allow these, set http.allow-private = true (TROMMEL_HTTP__ALLOW_PRIVATE=true)",
            self.host
        )
    }
}

impl std::error::Error for Private {}

/// Resolves names, without forbidden addresses: connections go to exactly the addresses that were
/// checked.
#[derive(Clone)]
pub(super) struct Resolver {
    pub(super) allow_private: bool,
}

impl Service<Name> for Resolver {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let allow_private = self.allow_private;
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let found: Vec<_> = found
                .filter(|address| allow_private || is_public(address.ip()))
                .collect();
            match found.is_empty() {
                true => Err(io::Error::other(Private::new(name.as_str()))),
                false => Ok(found.into_iter()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_internet_are_public() {
        for (address, expected) in [
            ("8.8.8.8", true),
            ("1.1.1.1", true),
            ("172.15.0.1", true),
            ("172.32.0.1", true),
            ("100.63.0.1", true),
            ("192.0.1.1", true),
            ("223.255.255.255", true),
            ("0.0.0.0", false),
            ("10.1.2.3", false),
            ("100.64.0.1", false),
            ("127.0.0.1", false),
            ("169.254.169.254", false),
            ("172.16.0.1", false),
            ("172.31.255.255", false),
            ("192.0.0.1", false),
            ("192.168.1.1", false),
            ("198.19.0.1", false),
            ("224.0.0.1", false),
            ("255.255.255.255", false),
            ("2606:4700::1111", true),
            ("2a00:1450::1", true),
            ("64:ff9b::808:808", true),
            ("2002:808:808::1", true),
            ("::", false),
            ("::1", false),
            ("::ffff:127.0.0.1", false),
            ("::ffff:10.0.0.1", false),
            ("64:ff9b::7f00:1", false),
            ("64:ff9b:1::1", false),
            ("2001::1", false),
            ("2001:db8::1", false),
            ("2002:a00:1::1", false),
            ("3fff::1", false),
            ("fc00::1", false),
            ("fd12:3456::1", false),
            ("fe80::1", false),
            ("fec0::1", false),
            ("ff02::1", false),
        ] {
            let parsed: IpAddr = address.parse().unwrap();
            assert_eq!(is_public(parsed), expected, "{address}");
        }
        assert!(is_public("::ffff:8.8.8.8".parse().unwrap()));
    }

    #[tokio::test]
    async fn a_name_of_this_machine_has_no_public_address() {
        let lookup = |allow_private| {
            let mut resolver = Resolver { allow_private };
            resolver.call("localhost".parse().unwrap())
        };
        assert!(lookup(true).await.unwrap().count() > 0);
        let error = lookup(false).await.unwrap_err();
        assert!(error.to_string().contains("http.allow-private"), "{error}");
    }
}
