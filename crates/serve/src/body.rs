use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::header::{CONTENT_ENCODING, CONTENT_LENGTH, EXPECT};
use hyper::{HeaderMap, StatusCode};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use crate::entrance::Entrance;
use crate::refused::Refused;

/// Most bytes of a refused body that are read and discarded, so that its client reads the answer.
const THROWN_AWAY: usize = 256 << 20;
/// Time limit for that.
const LINGER: Duration = Duration::from_secs(2);

/// The body of a request, and its reserved memory.
pub(crate) struct HeldBody {
    pub(crate) bytes: Bytes,
    _room: OwnedSemaphorePermit,
}

/// Reads a body within the limits.
///
/// # Errors
/// If it is too large, too slow, truncated, compressed, or there is no room.
pub(crate) async fn read(
    entrance: &Entrance,
    headers: &HeaderMap,
    mut body: Body,
) -> Result<HeldBody, Refused> {
    if let Some(encoding) = headers.get(CONTENT_ENCODING)
        && !encoding.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        return Err(Refused::unsupported(
            "the body is compressed; send it without Content-Encoding",
        ));
    }
    let most = entrance.config.max_body.get();
    let announced = headers
        .get(CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    let result = match announced {
        Some(length) if length > most as u64 => Err(too_large(most)),
        _ => {
            let announced = announced.map_or(0, |length| length as usize);
            let reading = collect(entrance, &mut body, announced, most);
            let limit = entrance.config.body_timeout;
            timeout(limit, reading).await.unwrap_or_else(|_| {
                Err(Refused::new(
                    StatusCode::REQUEST_TIMEOUT,
                    "timeout",
                    "the body did not come within serve.body-timeout",
                ))
            })
        }
    };
    match result {
        Err(refused) if refused.kind != "timeout" => Err(refuse(headers, body, refused).await),
        result => result,
    }
}

/// Reads and discards the rest of a refused body: a client that is still sending would find its
/// connection closed before it reads the reason.
pub(crate) async fn refuse(headers: &HeaderMap, body: Body, refused: Refused) -> Refused {
    // A client that waits for `100 Continue` has sent nothing yet.
    if !headers.contains_key(EXPECT) {
        linger(body).await;
    }
    refused
}

async fn collect(
    entrance: &Entrance,
    body: &mut Body,
    announced: usize,
    most: usize,
) -> Result<HeldBody, Refused> {
    let mut room = entrance.hold(announced)?;
    let mut bytes = BytesMut::new();
    let mut covered = announced;
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| Refused::malformed(format!("the body breaks off: {error}")))?;
        let Ok(data) = frame.into_data() else {
            continue;
        }; // trailers
        if bytes.len() + data.len() > most {
            return Err(too_large(most));
        }
        bytes.extend_from_slice(&data);
        if bytes.len() > covered {
            let more = (bytes.len() - covered).max(64 << 10);
            room.merge(entrance.hold(more)?);
            covered += more;
        }
    }
    Ok(HeldBody {
        bytes: bytes.freeze(),
        _room: room,
    })
}

fn too_large(most: usize) -> Refused {
    Refused::too_large(format!(
        "the body holds more than serve.max-body = {most} bytes"
    ))
}

async fn linger(mut body: Body) {
    let reading = async {
        let mut left = THROWN_AWAY;
        while let Some(Ok(frame)) = body.frame().await {
            let read = frame.data_ref().map_or(0, Bytes::len);
            match left.checked_sub(read) {
                Some(rest) => left = rest,
                None => return,
            }
        }
    };
    // If a client sends more, or more slowly, its connection may be closed.
    drop(timeout(LINGER, reading).await);
}
