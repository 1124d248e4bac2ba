use std::io::{self, BufRead, BufReader, Read};

/// Longest line in bytes that is read; a longer one is no line of a list.
const LONGEST: u64 = 16 << 20;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The lines of a text that hold more than white space, without their ends.
pub(super) struct Lines<R> {
    reader: BufReader<R>,
    line: Vec<u8>,
    number: u64,
}

impl<R: Read> Lines<R> {
    pub(super) fn new(reader: R) -> Self {
        Self {
            reader: BufReader::with_capacity(1 << 16, reader),
            line: Vec::new(),
            number: 0,
        }
    }

    /// Reads the next line. Blocks.
    ///
    /// # Errors
    /// When reading fails, a line is longer than 16 MiB, or the text is UTF-16. Then
    /// [`Lines::number`] is that of the line.
    pub(super) fn next(&mut self) -> io::Result<Option<&[u8]>> {
        loop {
            self.line.clear();
            self.number += 1;
            let mut limited = (&mut self.reader).take(LONGEST + 1);
            if limited.read_until(b'\n', &mut self.line)? == 0 {
                return Ok(None);
            }
            if self.line.len() as u64 > LONGEST {
                return Err(io::Error::other("the line is longer than 16 MiB"));
            }
            if self.number == 1 {
                if self.line.starts_with(b"\xff\xfe") || self.line.starts_with(b"\xfe\xff") {
                    return Err(io::Error::other("the text is UTF-16; convert it to UTF-8"));
                }
                if self.line.starts_with(BYTE_ORDER_MARK) {
                    self.line.drain(..BYTE_ORDER_MARK.len());
                }
            }
            if !self.line.trim_ascii().is_empty() {
                break;
            }
        }
        let line = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
        Ok(Some(line.strip_suffix(b"\r").unwrap_or(line)))
    }

    /// The number of the line read last, from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether the next line may have to be waited for.
    pub(super) fn may_wait(&self) -> bool {
        !self.reader.buffer().contains(&b'\n')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_lose_their_ends_and_nothing_else() {
        let text = b"\xef\xbb\xbf first \r\n\n \t\ncaf\xe9\nlast";
        let mut lines = Lines::new(&text[..]);
        assert_eq!(lines.next().unwrap(), Some(&b" first "[..]));
        assert_eq!(lines.number(), 1);
        assert_eq!(lines.next().unwrap(), Some(&b"caf\xe9"[..]));
        assert_eq!(lines.number(), 4);
        assert_eq!(lines.next().unwrap(), Some(&b"last"[..]));
        assert_eq!(lines.next().unwrap(), None);
    }

    #[test]
    fn what_is_no_text_is_refused_before_it_fills_memory() {
        let mut endless = Lines::new(io::repeat(b'x'));
        assert!(endless.next().unwrap_err().to_string().contains("16 MiB"));
        let mut wide = Lines::new(&b"\xff\xfea\0"[..]);
        assert!(wide.next().unwrap_err().to_string().contains("UTF-16"));
    }
}
