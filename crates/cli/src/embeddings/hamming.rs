//! Pairs of 64-bit hashes that differ in few bits, without comparing all pairs.
//!
//! Permuted tables (Manku, Jain, Das Sarma: "Detecting near-duplicates for web crawling", 2007): if
//! hashes are cut into blocks, two that differ in `d` bits are equal in all blocks except at most
//! `d`. Each choice of blocks is a table sorted by these blocks, in which equal neighbours are
//! compared. No pair is missed.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread::{available_parallelism, scope};

/// Bits of a hash.
pub(super) const BITS: u32 = u64::BITS;
/// Most blocks that have to be equal.
const MOST_EQUAL: u32 = 4;
/// Pairs that a thread collects before it passes them on.
const KEPT: usize = 4096;

/// Two hashes by position, the lower one first, and the number of different bits.
pub(super) type Pair = (usize, usize, u32);

/// Passes all pairs of different hashes that differ in at most `distance` bits to `each`, some of
/// them repeatedly, in any order. Takes 16 bytes per hash and core.
pub(super) fn pairs(hashes: &[u64], distance: u32, each: impl FnMut(Pair) + Send) {
    let tables = tables(hashes.len(), distance);
    let (next, each) = (AtomicUsize::new(0), Mutex::new(each));
    let threads = available_parallelism().map_or(1, Into::into);
    let hand_over = |found: &mut Vec<Pair>| {
        let mut each = each.lock().unwrap_or_else(PoisonError::into_inner);
        found.drain(..).for_each(&mut *each);
    };
    scope(|scope| {
        for _ in 0..threads.min(tables.len()) {
            scope.spawn(|| {
                let (mut table, mut found) = (Vec::new(), Vec::new());
                while let Some(mask) = tables.get(next.fetch_add(1, Relaxed)) {
                    compare(hashes, *mask, distance, &mut table, |pair| {
                        found.push(pair);
                        if found.len() == KEPT {
                            hand_over(&mut found);
                        }
                    });
                }
                hand_over(&mut found);
            });
        }
    });
}

/// Compares hashes with equal bits in `mask`.
fn compare(
    hashes: &[u64],
    mask: u64,
    distance: u32,
    table: &mut Vec<(u64, usize)>,
    mut each: impl FnMut(Pair),
) {
    table.clear();
    let place = |hash: u64| hash & mask;
    table.extend(hashes.iter().copied().zip(0..));
    table.sort_unstable_by_key(|(hash, _)| place(*hash));
    for bucket in table.chunk_by(|a, b| place(a.0) == place(b.0)) {
        for (before, (second, second_place)) in bucket.iter().enumerate() {
            for (first, first_place) in &bucket[..before] {
                let apart = (first ^ second).count_ones();
                if (1..=distance).contains(&apart) {
                    let (low, high) =
                        (first_place.min(second_place), first_place.max(second_place));
                    each((*low, *high, apart));
                }
            }
        }
    }
}

/// The bits that have to be equal, for each table of the cheapest plan.
fn tables(count: usize, distance: u32) -> Vec<u64> {
    if distance == 0 {
        return Vec::new(); // no different hashes are that near
    }
    let count = count.max(2) as f64;
    let cost = |equal: &u32| {
        let blocks = distance + equal;
        let bits = f64::from(BITS * equal) / f64::from(blocks);
        let tables = chosen(blocks, *equal);
        tables * (count * count.log2() + count * count / 2.0 / bits.exp2())
    };
    let equal = (1..=MOST_EQUAL).min_by(|a, b| cost(a).total_cmp(&cost(b)));
    let equal = equal.unwrap_or(1);
    let blocks = distance + equal;
    let block = |number: u32| {
        let (begin, end) = (number * BITS / blocks, (number + 1) * BITS / blocks);
        (u64::MAX >> (BITS - (end - begin))) << begin
    };
    let choices = (0u32..1 << blocks).filter(|choice| choice.count_ones() == equal);
    let mask = |choice: u32| {
        (0..blocks)
            .filter(|place| choice >> place & 1 == 1)
            .map(block)
            .sum()
    };
    choices.map(mask).collect()
}

/// Number of ways to choose `k` of `n`.
fn chosen(of: u32, some: u32) -> f64 {
    (0..some).fold(1.0, |ways, place| {
        ways * f64::from(of - place) / f64::from(place + 1)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Hashes with many near neighbours: xorshift, with some bits flipped.
    fn hashes(count: usize) -> Vec<u64> {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let mut hashes: Vec<u64> = Vec::new();
        for place in 0..count {
            let mut hash = match place % 3 {
                0 => random(),
                _ => hashes[random() as usize % place],
            };
            for _ in 0..random() % 9 {
                hash ^= 1 << (random() % 64);
            }
            hashes.push(hash);
        }
        hashes
    }

    #[test]
    fn no_pair_is_missed_at_any_distance() {
        let hashes = hashes(1500);
        for distance in [0, 1, 2, 4, 7, 12] {
            let mut expected = BTreeSet::new();
            for (second, b) in hashes.iter().enumerate() {
                for (first, a) in hashes[..second].iter().enumerate() {
                    let apart = (a ^ b).count_ones();
                    if (1..=distance).contains(&apart) {
                        expected.insert((first, second, apart));
                    }
                }
            }
            let mut found = BTreeSet::new();
            pairs(&hashes, distance, |pair| {
                found.insert(pair);
            });
            assert!(
                found == expected,
                "{} of {} at {distance}",
                found.len(),
                expected.len()
            );
        }
    }

    #[test]
    fn blocks_cover_each_bit_and_many_hashes_take_longer_keys() {
        for distance in 1..=12 {
            let all = tables(1000, distance);
            assert_eq!(all.iter().fold(0, |bits, mask| bits | mask), u64::MAX);
        }
        let bits = |count| tables(count, 4)[0].count_ones();
        assert!(bits(10_000_000) > bits(1000));
    }
}
