//! The elements of a JSON array, one at a time.

use std::cell::Cell;
use std::fmt;
use std::io::{BufReader, Read};
use std::rc::Rc;

use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::csv_records::Bounded;

/// Bytes read ahead.
const AHEAD: u64 = 1 << 13;

/// Passes each element with its number, from 0, to `each`. An element has at most `longest` bytes.
///
/// # Errors
/// Errors of `each`, or a problem of the text with the number of the element.
pub(super) fn for_each_element<E>(
    input: impl Read,
    longest: u64,
    each: &mut dyn FnMut(u64, &RawValue) -> Result<(), E>,
) -> Result<(), ArrayError<E>> {
    let (input, left) = Bounded::new(input);
    let allowed = longest.saturating_add(AHEAD);
    left.set(allowed);
    let input = BufReader::with_capacity(AHEAD as usize, input);
    let mut elements = Elements {
        left: &left,
        allowed,
        number: 0,
        each,
        ended: None,
    };
    let mut json = serde_json::Deserializer::from_reader(input);
    let read = json.deserialize_seq(&mut elements);
    let (number, ended) = (elements.number, elements.ended);
    if let Some(error) = ended {
        return Err(ArrayError::Ended(error));
    }
    let read = read.and_then(|()| {
        left.set(allowed);
        json.end()
    });
    read.map_err(|error| match left.get() {
        0 => ArrayError::TooLong { number, longest },
        _ => ArrayError::Invalid { number, error },
    })
}

/// Why elements were not read to the end.
pub(super) enum ArrayError<E> {
    /// The receiver wants no more.
    Ended(E),
    /// An element exceeds the limit.
    TooLong { number: u64, longest: u64 },
    /// The text is not a JSON array.
    Invalid {
        number: u64,
        error: serde_json::Error,
    },
}

struct Elements<'a, E> {
    left: &'a Rc<Cell<u64>>,
    allowed: u64,
    number: u64,
    each: &'a mut dyn FnMut(u64, &RawValue) -> Result<(), E>,
    ended: Option<E>,
}

impl<'de, E> Visitor<'de> for &mut Elements<'_, E> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(element) = elements.next_element::<Box<RawValue>>()? {
            if let Err(ended) = (self.each)(self.number, &element) {
                self.ended = Some(ended);
                return Err(A::Error::custom("no more is wanted"));
            }
            self.number += 1;
            self.left.set(self.allowed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn elements(text: &[u8], longest: u64) -> (Vec<String>, Option<String>) {
        let mut read = Vec::new();
        let ended = for_each_element::<()>(text, longest, &mut |number, element| {
            assert_eq!(number, read.len() as u64);
            read.push(element.get().to_owned());
            Ok(())
        });
        let error = ended.err().map(|error| match error {
            ArrayError::Ended(()) => "ended".to_owned(),
            ArrayError::TooLong { number, .. } => format!("{number} is too long"),
            ArrayError::Invalid { number, error } => format!("{number}: {error}"),
        });
        (read, error)
    }

    #[test]
    fn elements_come_one_by_one() {
        let (read, error) = elements(b" [ {\"a\": [1]},\n\"b]\" , 3 ]\n", 100);
        assert_eq!(
            (read.as_slice(), error),
            (
                &["{\"a\": [1]}", "\"b]\"", "3"].map(str::to_owned)[..],
                None
            )
        );
        assert_eq!(elements(b"[]", 100), (Vec::new(), None));
        let many = format!("[{}]", vec!["\"0123456789\""; 100_000].join(","));
        assert_eq!(elements(many.as_bytes(), 12).0.len(), 100_000);
    }

    #[test]
    fn what_is_no_array_is_refused_where_it_goes_wrong() {
        for (text, words) in [
            (&b"{}"[..], "expected a JSON array"),
            (b"[1, 2", "2: EOF"),
            (b"[1] 2", "1: trailing"),
            (b"[1, x]", "1: expected value"),
        ] {
            let error = elements(text, 100).1.unwrap();
            assert!(error.contains(words), "{error}");
        }
        let endless = (&b"[1, \""[..]).chain(io::repeat(b'x'));
        let ended = for_each_element::<()>(endless, 1000, &mut |_, _| Ok(()));
        assert!(matches!(ended, Err(ArrayError::TooLong { number: 1, .. })));
    }
}
