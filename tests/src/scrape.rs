//! Questions to a process over HTTP, as a prober or Prometheus asks them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// An address that nothing listens at.
pub fn free_address() -> SocketAddr {
    let port = portpicker::pick_unused_port().expect("a port is free");
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// The status and the body of the answer to `GET path`; `None` while nothing listens.
pub fn get(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Some((status, body.to_owned()))
}
