//! Pairs of near vectors, without comparing all pairs.
//!
//! Locality-sensitive hashing for Euclidean distance (Datar, Immorlica, Indyk, Mirrokni:
//! "Locality-Sensitive Hashing Scheme Based on p-Stable Distributions", 2004): a table sorts
//! vectors into buckets by several random projections, each cut into slices, and vectors in the
//! same bucket are compared. The probability that two vectors at a distance share a bucket is
//! known, and so is the number of tables that finds a given share of all pairs. Unlike angles,
//! distances do not change if all vectors lean to one side, as embeddings do.

use std::collections::HashMap;
use std::f64::consts::{PI, SQRT_2};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::{available_parallelism, scope};

use trommel_infer::multiply;

/// Width of a slice relative to the wanted distance: four of five such pairs share one.
const SLICE: f64 = 4.0;
/// Most projections of a table.
const MOST_PROJECTIONS: usize = 24;
/// Random pairs sampled for the distribution of distances.
const SAMPLED: usize = 2000;
/// Vectors projected at once.
const BLOCK: usize = 1024;

/// Two vectors and their cosine, the one with the lower position first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pair {
    pub(super) places: (usize, usize),
    pub(super) cosine: f32,
}

/// Pairs of `vectors`, `f32[n, width]` of length 1, whose cosine is at least `threshold`, sorted;
/// each is found with a probability of at least `recall`. Deterministic.
pub(super) fn pairs(vectors: &[f32], width: usize, threshold: f32, recall: f32) -> Vec<Pair> {
    let count = vectors.len() / width;
    let distance = (2.0 - 2.0 * f64::from(threshold)).max(1e-6).sqrt();
    let plan = Plan::new(vectors, width, distance, f64::from(recall));
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = available_parallelism().map_or(1, Into::into);
    scope(|scope| {
        for _ in 0..threads.min(plan.tables) {
            scope.spawn(|| {
                loop {
                    let table = next.fetch_add(1, Relaxed);
                    if table >= plan.tables {
                        break;
                    }
                    let own = plan.table(table, vectors, width, threshold);
                    found
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .extend(own);
                }
            });
        }
    });
    let mut pairs = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    debug_assert!(
        pairs.iter().all(|pair: &Pair| pair.places.1 < count),
        "places of vectors"
    );
    pairs.sort_unstable_by_key(|pair| pair.places);
    pairs.dedup_by_key(|pair| pair.places);
    pairs
}

/// The parameters of the tables.
struct Plan {
    tables: usize,
    /// Projections per table.
    projections: usize,
    slice: f64,
}

impl Plan {
    /// The cheapest parameters that find pairs at this distance.
    fn new(vectors: &[f32], width: usize, distance: f64, recall: f64) -> Self {
        let slice = SLICE * distance;
        let count = vectors.len() / width;
        let near = shared(slice / distance);
        let others = sampled(vectors, width);
        let cost = |projections: usize| {
            let power = i32::try_from(projections).unwrap_or(i32::MAX);
            let tables = tables(near.powi(power), recall);
            let chance: f64 = others
                .iter()
                .map(|other| shared(slice / other.max(1e-9)).powi(power))
                .sum();
            let compared = count as f64 * chance / others.len().max(1) as f64 / 2.0;
            tables * (projections as f64 + compared)
        };
        let choices = 1..=MOST_PROJECTIONS;
        let projections = choices
            .min_by(|a, b| cost(*a).total_cmp(&cost(*b)))
            .unwrap_or(1);
        let power = i32::try_from(projections).unwrap_or(i32::MAX);
        Self {
            tables: tables(near.powi(power), recall) as usize,
            projections,
            slice,
        }
    }

    /// The near pairs that share a bucket of one table.
    fn table(&self, number: usize, vectors: &[f32], width: usize, threshold: f32) -> Vec<Pair> {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (number as u64 + 1));
        let directions: Vec<f32> = (0..self.projections * width)
            .map(|_| random.normal() as f32)
            .collect();
        let offsets: Vec<f64> = (0..self.projections)
            .map(|_| random.share() * self.slice)
            .collect();
        let mut buckets: HashMap<Vec<i32>, Vec<usize>> = HashMap::new();
        let mut projected = vec![0.0; BLOCK * self.projections];
        for (block, rows) in vectors.chunks(BLOCK * width).enumerate() {
            let count = rows.len() / width;
            let projected = &mut projected[..count * self.projections];
            multiply(rows, &directions, count, width, self.projections, projected);
            for (row, values) in projected.chunks_exact(self.projections).enumerate() {
                let values = values.iter().zip(&offsets);
                let key = values.map(|(value, offset)| {
                    ((f64::from(*value) + offset) / self.slice).floor() as i32
                });
                buckets
                    .entry(key.collect())
                    .or_default()
                    .push(block * BLOCK + row);
            }
        }
        let vector = |place: usize| &vectors[place * width..][..width];
        let mut pairs = Vec::new();
        for places in buckets.into_values() {
            for (before, second) in places.iter().enumerate() {
                for first in &places[..before] {
                    let cosine = dot(vector(*first), vector(*second));
                    if cosine >= threshold {
                        pairs.push(Pair {
                            places: (*first, *second),
                            cosine,
                        });
                    }
                }
            }
        }
        pairs
    }
}

/// Number of tables of which at least one has a pair in a bucket, given the probability for each.
fn tables(chance: f64, recall: f64) -> f64 {
    let missed = (1.0 - recall).max(1e-6).ln();
    (missed / (1.0 - chance).max(1e-12).ln()).ceil().max(1.0)
}

/// The probability that two vectors share a slice `wide` times as wide as their distance.
fn shared(wide: f64) -> f64 {
    let tail = 1.0 - normal(wide);
    1.0 - 2.0 * tail - 2.0 / ((2.0 * PI).sqrt() * wide) * (1.0 - (-wide * wide / 2.0).exp())
}

/// The cumulative normal distribution, to seven digits (Abramowitz and Stegun, 7.1.26).
fn normal(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs() / SQRT_2);
    let series = [
        1.061_405_429,
        -1.453_152_027,
        1.421_413_741,
        -0.284_496_736,
        0.254_829_592,
    ];
    let polynomial = series.iter().fold(0.0, |sum, factor| (sum + factor) * t);
    let error = 1.0 - polynomial * (-x * x / 2.0).exp();
    match x < 0.0 {
        true => (1.0 - error) / 2.0,
        false => (1.0 + error) / 2.0,
    }
}

/// Distances of random pairs.
fn sampled(vectors: &[f32], width: usize) -> Vec<f64> {
    let count = (vectors.len() / width) as u64;
    let mut random = Random(1);
    let vector = |place: u64| &vectors[place as usize * width..][..width];
    let pairs = (0..SAMPLED).map(|_| (random.next() % count, random.next() % count));
    let pairs = pairs.filter(|(first, second)| first != second);
    pairs
        .map(|(first, second)| {
            (2.0 - 2.0 * f64::from(dot(vector(first), vector(second))))
                .max(0.0)
                .sqrt()
        })
        .collect()
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Several sums, which the CPU adds in parallel.
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    let (left, right) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in left.0.iter().zip(right.0) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f32 = left.1.iter().zip(right.1).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// SplitMix64.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// Uniform from 0 to 1.
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Normally distributed.
    pub(super) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.share()).ln()).sqrt();
        radius * (2.0 * PI * self.share()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearly_all_pairs_are_found_also_among_vectors_that_lean_to_one_side() {
        const WIDTH: usize = 48;
        for lean in [0.0, 1.5] {
            let mut random = Random(7);
            let mut vectors: Vec<f32> = Vec::new();
            for number in 0..3000 {
                let mut vector: Vec<f32> = match number % 3 {
                    // Near the previous one.
                    2 => vectors[vectors.len() - WIDTH..].to_vec(),
                    _ => (0..WIDTH)
                        .map(|place| random.normal() as f32 + if place < 20 { lean } else { 0.0 })
                        .collect(),
                };
                let scale = trommel_infer::length(&vector) / (WIDTH as f32).sqrt() * 0.25;
                if number % 3 == 2 {
                    vector
                        .iter_mut()
                        .for_each(|value| *value += scale * random.normal() as f32);
                }
                trommel_infer::normalize(&mut vector);
                vectors.extend(vector);
            }
            let count = vectors.len() / WIDTH;
            let vector = |place: usize| &vectors[place * WIDTH..][..WIDTH];
            let all = (0..count).flat_map(|second| (0..second).map(move |first| (first, second)));
            let all: Vec<_> = all
                .filter(|(first, second)| dot(vector(*first), vector(*second)) >= 0.95)
                .collect();
            let found = pairs(&vectors, WIDTH, 0.95, 0.99);
            assert!(all.len() > 300, "{}", all.len());
            assert!(found.iter().all(|pair| all.contains(&pair.places)));
            let recall = found.len() as f64 / all.len() as f64;
            assert!(recall >= 0.98, "{} of {}", found.len(), all.len());
        }
    }

    #[test]
    fn chances_are_those_of_the_paper() {
        assert!(
            (normal(1.0) - 0.841_344_7).abs() < 1e-6 && (normal(-1.0) - 0.158_655_3).abs() < 1e-6
        );
        assert!((shared(4.0) - 0.800_5).abs() < 1e-3, "{}", shared(4.0));
        assert!((shared(1.0) - 0.368_7).abs() < 1e-3, "{}", shared(1.0));
    }
}
