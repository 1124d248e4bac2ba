use std::num::NonZeroUsize;
use std::time::Duration;

use trommel_infer::Device;

use super::*;
use crate::config::Config;
use crate::plan::Random;

/// A made-up machine: how fast settings are on it, without noise.
type Surface = fn(&Tuned) -> f64;

/// Measures a surface, with more noise where less of the budget is used.
struct MadeUp {
    surface: Surface,
    noise: f64,
    random: Random,
    /// Shares of the budget that were used in all.
    spent: f64,
}

impl MadeUp {
    fn new(surface: Surface, noise: f64, seed: u64) -> Self {
        Self {
            surface,
            noise,
            random: Random::new(seed),
            spent: 0.0,
        }
    }
}

impl Measure for MadeUp {
    fn measure(&mut self, settings: &Tuned, share: f64) -> Result<Option<f64>> {
        self.spent += share;
        // About normally distributed: a sum of twelve.
        let sum: f64 = (0..12).map(|_| self.random.exponential() - 1.0).sum();
        let noise = self.noise * sum / 12_f64.sqrt() / share.sqrt();
        let speed = (self.surface)(settings);
        Ok((speed > 0.0).then_some(speed * (1.0 + noise)))
    }
}

fn start() -> Tuned {
    let number = |number| NonZeroUsize::new(number).unwrap();
    Tuned {
        max_batch: number(1),
        max_wait: Duration::from_millis(20),
        instances: number(4),
        intra_threads: number(1),
        preprocess_threads: number(8),
        max_in_flight: number(32),
    }
}

/// 1 at `best`, falling off by this share for each power of two away from it.
fn peak(value: usize, best: usize, falls: f64) -> f64 {
    let away = (value as f64 / best as f64).log2().abs();
    (1.0 - falls * away).max(0.1)
}

/// A processor where small batches in many sessions are the fastest, and threads that prepare are in the way.
fn processor(settings: &Tuned) -> f64 {
    let model = peak(settings.max_batch.get(), 4, 0.06)
        * peak(settings.instances.get(), 8, 0.05)
        * if settings.max_batch.get() * settings.instances.get() > 64 {
            0.9
        } else {
            1.0
        };
    let prepare = peak(settings.preprocess_threads.get(), 4, 0.08)
        * peak(settings.max_in_flight.get(), 32, 0.03);
    700.0 * model * prepare * peak(settings.max_wait.as_millis() as usize, 20, 0.01)
}

/// A model that gains by large batches in one session, and has no memory for several.
fn large(settings: &Tuned) -> f64 {
    if settings.max_batch.get() * settings.instances.get() > 32 {
        return 0.0;
    }
    let model = peak(settings.max_batch.get(), 16, 0.1) * peak(settings.instances.get(), 1, 0.15);
    40.0 * model * peak(settings.preprocess_threads.get(), 12, 0.02)
}

fn flat(_: &Tuned) -> f64 {
    100.0
}

fn space() -> Space {
    Space::new(&Config::default(), Device::Cpu, 8, None, false)
}

/// The best of the whole grid.
fn best_of_grid(space: &Space, surface: Surface) -> f64 {
    let mut all = vec![start()];
    for group in Group::ALL {
        let around = all.iter().flat_map(|base| space.around(base, group));
        all = around.collect();
    }
    all.iter().map(surface).fold(0.0, f64::max)
}

#[test]
fn the_best_of_a_grid_is_found_within_two_percent_in_a_fifth_of_its_trials() {
    let space = space();
    for surface in [processor as Surface, large] {
        let best = best_of_grid(&space, surface);
        for seed in 0..20 {
            let mut made_up = MadeUp::new(surface, 0.004, seed);
            let found = search(&space, start(), &mut made_up).unwrap();
            let choice = choose(start(), found, &mut made_up).unwrap();
            assert!(matches!(choice, Choice::Better(_)), "{seed}: {choice:?}");
            assert!(surface(&found) >= 0.98 * best, "{seed}: {found:?}");
            let grid = space.size() as f64;
            assert!(made_up.spent <= grid / 5.0, "{} of {grid}", made_up.spent);
        }
    }
}

#[test]
fn inside_the_noise_the_defaults_stay() {
    let space = space();
    let mut taken = 0;
    for seed in 0..100 {
        let mut made_up = MadeUp::new(flat, 0.02, seed);
        let found = search(&space, start(), &mut made_up).unwrap();
        let choice = choose(start(), found, &mut made_up).unwrap();
        taken += usize::from(matches!(choice, Choice::Better(_)));
    }
    // By chance one in forty is above an interval of 95 %.
    assert!(taken <= 8, "{taken} of 100");
}

#[test]
fn what_does_not_keep_what_was_asked_for_is_not_chosen() {
    let only_large: Surface = |settings| match settings.max_batch.get() {
        16 => 10.0,
        _ => 0.0,
    };
    let mut made_up = MadeUp::new(only_large, 0.001, 1);
    let found = search(&space(), start(), &mut made_up).unwrap();
    assert_eq!(found.max_batch.get(), 16);
    let choice = choose(start(), found, &mut made_up).unwrap();
    assert_eq!(choice, Choice::OnlyThese);

    let none: Surface = |_| 0.0;
    let mut made_up = MadeUp::new(none, 0.001, 1);
    let found = search(&space(), start(), &mut made_up).unwrap();
    assert_eq!(found, start());
    assert_eq!(
        choose(start(), found, &mut made_up).unwrap(),
        Choice::Nothing
    );
    let mut made_up = MadeUp::new(flat, 0.001, 1);
    assert_eq!(
        choose(start(), start(), &mut made_up).unwrap(),
        Choice::DefaultsAreBest
    );
}
