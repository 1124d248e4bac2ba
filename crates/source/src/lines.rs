use std::io::{self, BufRead, BufReader, Read};

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The non-blank lines of a text, without line ends.
pub(super) struct Lines<R> {
    reader: BufReader<R>,
    /// The line end, once it is known.
    end: Option<u8>,
    line: Vec<u8>,
    longest: u64,
    number: u64,
}

impl<R: Read> Lines<R> {
    /// Reads lines of at most `longest` bytes.
    pub(super) fn new(reader: R, longest: u64) -> Self {
        Self {
            reader: BufReader::with_capacity(1 << 16, reader),
            end: Some(b'\n'),
            line: Vec::new(),
            longest,
            number: 0,
        }
    }

    /// As [`Lines::new`], but lines may end with a zero byte instead, as `find -print0` writes
    /// them, and then nothing in them is white space. The first line end applies to all.
    pub(super) fn of_names(reader: R, longest: u64) -> Self {
        Self {
            end: None,
            ..Self::new(reader, longest)
        }
    }

    /// Reads the next line. Blocks.
    ///
    /// # Errors
    /// If reading fails, a line is too long, or the text is UTF-16. [`Lines::number`] is then the
    /// number of that line.
    pub(super) fn next(&mut self) -> io::Result<Option<&[u8]>> {
        loop {
            self.line.clear();
            self.number += 1;
            if !self.read_line()? {
                return Ok(None);
            }
            if self.line.len() as u64 > self.longest {
                return Err(io::Error::other(format!(
                    "the line is longer than {} bytes; check that the file is a list with one image a line",
                    self.longest
                )));
            }
            if self.number == 1 {
                if self.line.starts_with(b"\xff\xfe") || self.line.starts_with(b"\xfe\xff") {
                    return Err(io::Error::other("the text is UTF-16; convert it to UTF-8"));
                }
                if self.line.starts_with(BYTE_ORDER_MARK) {
                    self.line.drain(..BYTE_ORDER_MARK.len());
                }
            }
            if self.end == Some(0) {
                if self.line != [0] {
                    return Ok(Some(self.line.strip_suffix(&[0]).unwrap_or(&self.line)));
                }
            } else if !self.line.trim_ascii().is_empty() {
                let line = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
                return Ok(Some(line.strip_suffix(b"\r").unwrap_or(line)));
            }
        }
    }

    /// Reads a line with its end, or one byte more than the limit; `false` at the end of the text.
    fn read_line(&mut self) -> io::Result<bool> {
        let most = usize::try_from(self.longest.saturating_add(1)).unwrap_or(usize::MAX);
        while self.line.len() < most {
            let buffer = match self.reader.fill_buf() {
                Ok(buffer) => buffer,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if buffer.is_empty() {
                break;
            }
            let room = buffer.len().min(most - self.line.len());
            let is_end = |byte: &u8| match self.end {
                Some(end) => *byte == end,
                None => matches!(byte, b'\n' | 0),
            };
            let end = buffer[..room].iter().position(is_end);
            let taken = end.map_or(room, |end| end + 1);
            if let Some(end) = end {
                self.end = Some(buffer[end]);
            }
            self.line.extend_from_slice(&buffer[..taken]);
            self.reader.consume(taken);
            if end.is_some() {
                break;
            }
        }
        Ok(!self.line.is_empty())
    }

    /// The number of the last line read, from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether reading the next line may block.
    pub(super) fn may_wait(&self) -> bool {
        !self.reader.buffer().contains(&self.end.unwrap_or(b'\n'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_lose_their_ends_and_nothing_else() {
        let text = b"\xef\xbb\xbf first \r\n\n \t\ncaf\xe9\nlast";
        let mut lines = Lines::new(&text[..], 100);
        assert_eq!(lines.next().unwrap(), Some(&b" first "[..]));
        assert_eq!(lines.number(), 1);
        assert_eq!(lines.next().unwrap(), Some(&b"caf\xe9"[..]));
        assert_eq!(lines.number(), 4);
        assert_eq!(lines.next().unwrap(), Some(&b"last"[..]));
        assert_eq!(lines.next().unwrap(), None);
    }

    #[test]
    fn names_may_end_with_a_zero_byte() {
        let text = b" a.jpg\0\0b\nc.jpg\0caf\xe9\r";
        let mut lines = Lines::of_names(&text[..], 100);
        assert_eq!(lines.next().unwrap(), Some(&b" a.jpg"[..]));
        assert_eq!(lines.next().unwrap(), Some(&b"b\nc.jpg"[..]));
        assert_eq!(lines.next().unwrap(), Some(&b"caf\xe9\r"[..]));
        assert_eq!(lines.next().unwrap(), None);
        let mut lines = Lines::of_names(&b"a\nb\0c\n"[..], 100);
        assert_eq!(lines.next().unwrap(), Some(&b"a"[..]));
        assert_eq!(lines.next().unwrap(), Some(&b"b\0c"[..]));
    }

    #[test]
    fn what_is_no_text_is_refused_before_it_fills_memory() {
        let mut endless = Lines::new(io::repeat(b'x'), 1000);
        assert!(
            endless
                .next()
                .unwrap_err()
                .to_string()
                .contains("1000 bytes")
        );
        let mut wide = Lines::new(&b"\xff\xfea\0"[..], 1000);
        assert!(wide.next().unwrap_err().to_string().contains("UTF-16"));
    }
}
