//! HTTP requests to a process, as from a prober or Prometheus.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// An address with no listener.
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

/// The value of a metric, summed over the lines that hold all of `labels`.
pub fn metric(address: SocketAddr, name: &str, labels: &[&str]) -> f64 {
    sum(&get(address, "/metrics").unwrap().1, name, labels)
}

/// The same, of metrics that were read before.
pub fn sum(metrics: &str, name: &str, labels: &[&str]) -> f64 {
    let of_name = metrics.lines().filter(|line| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
    });
    let chosen = of_name.filter(|line| labels.iter().all(|label| line.contains(label)));
    let value = |line: &str| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
    chosen.map(value).sum()
}
