//! Confidence bounds of shares, and a test whether two samples have the same shares.

/// The one-sided upper bound of a share by Clopper and Pearson (1934), given `hits` of `trials`, at
/// the level `1 - alpha`. Exact for every share and number of trials.
pub(super) fn upper(hits: usize, trials: usize, alpha: f64) -> f64 {
    if hits >= trials {
        return 1.0;
    }
    let (mut low, mut high) = (hits as f64 / trials as f64, 1.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        // The larger the share, the less likely are so few hits.
        match at_most(hits, trials, middle) > alpha {
            true => low = middle,
            false => high = middle,
        }
    }
    high
}

/// The lower bound, like [`upper`].
pub(super) fn lower(hits: usize, trials: usize, alpha: f64) -> f64 {
    1.0 - upper(trials - hits, trials, alpha)
}

/// The probability of at most this many hits.
fn at_most(hits: usize, trials: usize, share: f64) -> f64 {
    let (ln_hit, ln_miss) = (share.ln(), (1.0 - share).ln());
    let mut ln_choose = 0.0;
    let mut sum = 0.0;
    for hit in 0..=hits {
        if hit > 0 {
            ln_choose += ((trials - hit + 1) as f64 / hit as f64).ln();
        }
        let (hit, miss) = (hit as f64, (trials - hit) as f64);
        sum += (ln_choose + hit * ln_hit + miss * ln_miss).exp();
    }
    sum
}

/// Expected counts below which a class is merged with others.
const FEW: f64 = 5.0;
/// 99 % of the normal distribution.
const NOTICED: f64 = 2.326;

/// Whether two samples differ more than happens by chance once in a hundred times: Pearson's
/// chi-squared test of homogeneity, with the approximation of Wilson and Hilferty (1931). Counts
/// are by class, in the same order.
pub(super) fn differ(before: &[usize], now: &[usize]) -> bool {
    let (all_before, all_now) = (total(before), total(now));
    if all_before == 0.0 || all_now == 0.0 {
        return false;
    }
    let share_now = all_now / (all_before + all_now);
    let mut cells: Vec<(f64, f64)> = Vec::new();
    let mut rest = (0.0, 0.0);
    for (before, now) in before.iter().zip(now) {
        let (before, now) = (*before as f64, *now as f64);
        let both = before + now;
        let is_rare = both * share_now < FEW || both * (1.0 - share_now) < FEW;
        match is_rare {
            true => rest = (rest.0 + before, rest.1 + now),
            false => cells.push((before, now)),
        }
    }
    if rest.0 + rest.1 > 0.0 {
        cells.push(rest);
    }
    if cells.len() < 2 {
        return false;
    }
    let statistic: f64 = cells
        .iter()
        .map(|(before, now)| {
            let both = before + now;
            let (expected_before, expected_now) = (both * (1.0 - share_now), both * share_now);
            (before - expected_before).powi(2) / expected_before
                + (now - expected_now).powi(2) / expected_now
        })
        .sum();
    let freedom = (cells.len() - 1) as f64;
    let spread = 2.0 / (9.0 * freedom);
    let normal = ((statistic / freedom).cbrt() - (1.0 - spread)) / spread.sqrt();
    normal > NOTICED
}

fn total(counts: &[usize]) -> f64 {
    counts.iter().sum::<usize>() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are those of `scipy.stats.beta.ppf(1 - alpha, hits + 1, trials - hits)`.
    #[test]
    fn the_bounds_are_those_of_clopper_and_pearson() {
        for (hits, trials, alpha, expected) in [
            (0, 500, 0.05, 0.005_973_551_5),
            (1, 500, 0.05, 0.009_452_282_2),
            (3, 1000, 0.05, 0.007_735_244_7),
            (50, 100, 0.025, 0.601_678_87),
            (10, 10, 0.05, 1.0),
        ] {
            let found = upper(hits, trials, alpha);
            assert!(
                (found - expected).abs() < 1e-6,
                "{hits} of {trials}: {found}"
            );
        }
        assert!((lower(50, 100, 0.025) - (1.0 - 0.601_678_87)).abs() < 1e-6);
        assert!(lower(0, 10, 0.05).abs() < 1e-12);
    }

    #[test]
    fn a_shift_of_classes_is_told_from_chance() {
        assert!(!differ(&[100, 100, 100], &[52, 47, 51]));
        assert!(!differ(&[300, 0, 2], &[150, 1, 0]));
        assert!(differ(&[100, 100, 100], &[90, 30, 30]));
        assert!(differ(&[100, 100, 0], &[50, 50, 50]), "a new class");
        assert!(!differ(&[], &[]) && !differ(&[3, 4], &[0, 0]));
    }
}
