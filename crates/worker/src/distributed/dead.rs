//! Dead letters, for people.

use serde::{Deserialize, Serialize};
use trommel_queue::{Broker, Stream};

use crate::WorkerError;
use crate::distributed::names::Subjects;

/// The header with the reason.
const REASON: &str = "Trommel-Reason";
/// Letters per answer.
const LETTERS: usize = 200;

/// A message that could not be processed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadLetter {
    /// The stage that set it aside.
    pub stage: String,
    /// When, in microseconds since the Unix epoch, UTC.
    pub at: i64,
    /// The image's place in the listing, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u64>,
    /// The image's uri, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// The reason.
    pub reason: String,
}

/// The dead letters of a job, oldest first, as many as fit into an answer.
pub(crate) async fn letters(
    broker: &Broker,
    subjects: &Subjects,
    job: &str,
) -> Result<Vec<DeadLetter>, WorkerError> {
    let subject = subjects.dead("*", job);
    let (mut letters, mut from) = (Vec::new(), 1);
    while letters.len() < LETTERS {
        let Some(held) = broker.peek(Stream::Dead, &subject, from).await? else {
            break;
        };
        from = held.sequence + 1;
        let image = image_of(&held.payload);
        let header = |name: &str| held.headers.get(name).map(ToString::to_string);
        letters.push(DeadLetter {
            stage: held
                .subject
                .rsplit('.')
                .nth(1)
                .unwrap_or_default()
                .to_owned(),
            at: held.stored_at,
            index: image.as_ref().map(|image| image.index),
            uri: image.map(|image| image.uri),
            reason: header(REASON).unwrap_or_default(),
        });
    }
    Ok(letters)
}

/// The common part of tasks, tensors and rows: the image.
fn image_of(payload: &[u8]) -> Option<Image> {
    #[derive(Deserialize)]
    struct Outer {
        image: Image,
    }
    let inner = rmp_serde::from_slice::<Outer>(payload).map(|outer| outer.image);
    inner.or_else(|_| rmp_serde::from_slice(payload)).ok()
}

#[derive(Deserialize)]
struct Image {
    index: u64,
    uri: String,
}
