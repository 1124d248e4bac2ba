//! Lines for people: counts with their nouns, and messages wrapped to the terminal.

use std::io::{self, IsTerminal};

use indicatif::HumanCount;
use ratatui::crossterm::terminal;
use textwrap::{Options, WordSplitter};

/// A count with its noun: `1 image`, `2,034 images`.
pub(crate) fn counted(count: impl TryInto<u64>, noun: &str) -> String {
    let count = count.try_into().unwrap_or(u64::MAX);
    let plural = match count {
        1 => "",
        _ if noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{} {noun}{plural}", HumanCount(count))
}

/// `head` followed by `text`. On a terminal, long texts are wrapped and aligned below their beginning.
pub(crate) fn with_head(head: &str, text: &str) -> String {
    let columns = io::stderr().is_terminal().then(terminal::size);
    match columns {
        Some(Ok((columns, _))) => wrapped(head, text, columns.into()),
        _ => format!("{head}{text}"),
    }
}

/// Least width of a column of text; in less room, text is wrapped under `head`.
const NARROWEST: usize = 40;

fn wrapped(head: &str, text: &str, columns: usize) -> String {
    let width = textwrap::core::display_width(head);
    let indent = if columns >= width + NARROWEST {
        width
    } else {
        4
    };
    let indent = " ".repeat(indent);
    let options = Options::new(columns.max(NARROWEST))
        .initial_indent(head)
        .subsequent_indent(&indent)
        .break_words(false)
        .word_splitter(WordSplitter::NoHyphenation);
    textwrap::fill(text, options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_plural() {
        assert_eq!(counted(1_u64, "image"), "1 image");
        assert_eq!(counted(0_usize, "row"), "0 rows");
        assert_eq!(counted(2034_u64, "image"), "2,034 images");
        assert_eq!(counted(2_u64, "process"), "2 processes");
    }

    #[test]
    fn long_messages_are_wrapped_below_their_beginning() {
        let text = "s3://bucket/photos/cat.jpg: JPEG ends before its image does";
        assert_eq!(
            wrapped("      3 truncated         ", text, 80),
            "      3 truncated         s3://bucket/photos/cat.jpg: JPEG ends before its image\n                          does"
        );
        // A uri is not broken, so that it can be copied.
        let uri = format!("s3://{}", "a-b/".repeat(30));
        let lines = wrapped("  1 empty  ", &format!("{uri}: empty"), 80);
        assert!(lines.contains(&uri), "{lines}");
        assert_eq!(wrapped("  1 empty  ", "short", 80), "  1 empty  short");
    }
}
