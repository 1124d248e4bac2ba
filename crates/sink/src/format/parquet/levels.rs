//! Levels of nested columns, which mark where lists begin and which values are null.

use parquet::errors::ParquetError;

/// Decodes `count` levels of `bits` bits (1 or 2), encoded as runs and packed groups of 8, and
/// passes each run to `each`: its level and its length.
///
/// # Errors
/// If there are fewer.
pub(super) fn levels(
    encoded: &[u8],
    bits: usize,
    count: usize,
    mut each: impl FnMut(u8, usize),
) -> Result<(), ParquetError> {
    debug_assert!(bits == 1 || bits == 2, "no level crosses a byte");
    let (mut rest, mut left) = (encoded, count);
    while left > 0 {
        let header = varint(&mut rest)?;
        let length = header >> 1;
        if header & 1 == 0 {
            let run = length.min(left);
            each(taken(&mut rest, 1)?[0], run);
            left -= run;
            continue;
        }
        let packed = taken(&mut rest, length.saturating_mul(bits))?;
        let run = length.saturating_mul(8).min(left);
        let mask = (1 << bits) - 1;
        for place in 0..run {
            let bit = place * bits;
            each((packed[bit / 8] >> (bit % 8)) & mask, 1);
        }
        left -= run;
    }
    Ok(())
}

/// A number in groups of 7 bits, lowest first.
fn varint(rest: &mut &[u8]) -> Result<usize, ParquetError> {
    let mut number = 0;
    for shift in (0..usize::BITS).step_by(7) {
        let byte = taken(rest, 1)?[0];
        number |= usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(ParquetError::General(
        "a run of levels has no end".to_owned(),
    ))
}

/// The next bytes.
///
/// # Errors
/// If there are fewer.
pub(super) fn taken<'a>(rest: &mut &'a [u8], count: usize) -> Result<&'a [u8], ParquetError> {
    let (taken, later) = rest
        .split_at_checked(count)
        .ok_or_else(|| ParquetError::EOF("a page ends too early".to_owned()))?;
    *rest = later;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(encoded: &[u8], bits: usize, count: usize) -> Result<Vec<u8>, ParquetError> {
        let mut all = Vec::new();
        levels(encoded, bits, count, |level, run| {
            all.extend(std::iter::repeat_n(level, run));
        })?;
        Ok(all)
    }

    #[test]
    fn runs_and_packed_groups_are_read_in_turn() {
        // Eight packed levels of one bit, then a run of 300 ones, whose length takes two bytes.
        let encoded = [0b0000_0011, 0b1111_1110, 0b1101_1000, 0b0000_0100, 1];
        let all = decoded(&encoded, 1, 308).unwrap();
        assert_eq!(all[..8], [0, 1, 1, 1, 1, 1, 1, 1]);
        assert!(all.len() == 308 && all[8..].iter().all(|level| *level == 1));
        // Two bits per level, with an incomplete last group.
        let encoded = [0b0000_0011, 0b1110_0100, 0b0000_0011];
        assert_eq!(decoded(&encoded, 2, 5).unwrap(), [0, 1, 2, 3, 3]);
    }

    #[test]
    fn levels_that_end_too_early_are_an_error() {
        for encoded in [&[][..], &[0b0000_1000], &[0b0000_0011], &[0x80; 12]] {
            decoded(encoded, 1, 8).unwrap_err();
        }
    }
}
