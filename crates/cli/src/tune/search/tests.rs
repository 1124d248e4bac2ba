use std::num::NonZeroUsize;
use std::time::Duration;

use trommel_infer::Device;

use super::*;
use crate::config::Config;
use crate::plan::Random;
use crate::tune::space::Space;

/// A made-up machine: how fast settings are on it, without noise.
type Surface = fn(&Tuned) -> f64;

/// Measures a surface. Settings with a speed of 0 do not run.
struct MadeUp {
    surface: Surface,
    space: Space,
    /// Whether settings meet the latency target.
    keeps: fn(&Tuned) -> bool,
    /// Standard deviation of a trial of full length; shorter ones have more.
    noise: f64,
    /// The speed of the machine, which changes slowly and as much as that.
    drift: f64,
    random: Random,
    /// Shares of the budget that were used in all.
    spent: f64,
    /// Settings whose latency was measured.
    asked: usize,
}

impl MadeUp {
    fn new(surface: Surface, noise: f64, seed: u64) -> Self {
        Self {
            surface,
            space: Space::new(&Config::default(), Device::Cpu, 8, None, false),
            keeps: |_| true,
            noise,
            drift: 0.0,
            random: Random::new(seed),
            spent: 0.0,
            asked: 0,
        }
    }

    /// About normally distributed: a sum of twelve.
    fn normal(&mut self) -> f64 {
        let sum: f64 = (0..12).map(|_| self.random.uniform() - 0.5).sum();
        self.noise * sum
    }

    /// The same for requests.
    fn answering(surface: Surface, keeps: fn(&Tuned) -> bool, noise: f64, seed: u64) -> Self {
        Self {
            space: Space::new(&Config::default(), Device::Cpu, 8, None, true),
            keeps,
            ..Self::new(surface, noise, seed)
        }
    }

    /// The best of the whole grid that meets the latency target.
    fn best(&self) -> f64 {
        let all = self.space.all(start()).into_iter().filter(self.keeps);
        all.map(|settings| (self.surface)(&settings))
            .fold(0.0, f64::max)
    }

    fn chosen(&mut self) -> (Option<Tuned>, Choice) {
        let all = self.space.all(start());
        let found = search(&all, self).unwrap();
        (found, choose(&all, found, self).unwrap())
    }
}

impl Measure for MadeUp {
    fn measure(&mut self, settings: &Tuned, share: f64) -> Result<Option<f64>> {
        self.spent += share;
        self.drift = 0.9 * self.drift + 0.4 * self.normal();
        let noise = self.normal() / share.sqrt();
        let speed = (self.surface)(settings);
        Ok((speed > 0.0).then_some(speed * (self.drift + noise).exp()))
    }

    fn keeps(&mut self, settings: &Tuned) -> Result<bool> {
        self.asked += 1;
        Ok((self.surface)(settings) > 0.0 && (self.keeps)(settings))
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

/// A model that hardly gains by anything but large batches.
fn steep(settings: &Tuned) -> f64 {
    let model = (settings.max_batch.get() as f64).powf(0.8);
    let prepare = peak(settings.preprocess_threads.get(), 8, 0.05);
    10.0 * model * peak(settings.instances.get(), 2, 0.1) * prepare
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

#[test]
fn the_best_of_a_grid_is_found_within_two_percent_in_a_fifth_of_its_trials() {
    for surface in [processor as Surface, large, steep] {
        let mut share = 0.0;
        for seed in 0..30 {
            let mut made_up = MadeUp::new(surface, 0.04, seed);
            let (found, choice) = made_up.chosen();
            assert!(matches!(choice, Choice::Better(_)), "{seed}: {choice:?}");
            let found = surface(&found.unwrap()) / made_up.best();
            assert!(found >= 0.9, "{seed}: {found}");
            share += found / 30.0;
            let grid = made_up.space.size() as f64;
            assert!(made_up.spent <= grid / 5.0, "{} of {grid}", made_up.spent);
        }
        assert!(share >= 0.98, "{share}");
    }
}

#[test]
fn inside_the_noise_the_defaults_stay() {
    let is_better = |seed| {
        let (_, choice) = MadeUp::new(flat, 0.02, seed).chosen();
        matches!(choice, Choice::Better(_))
    };
    let taken = (0..100).filter(|seed| is_better(*seed)).count();
    // By chance one in forty is above an interval of 95 %.
    assert!(taken <= 8, "{taken} of 100");
}

#[test]
fn the_best_that_meets_the_latency_target_is_found_with_few_measurements_of_it() {
    let keeps: fn(&Tuned) -> bool = |settings| settings.max_batch.get() <= 2;
    let mut share = 0.0;
    for seed in 0..50 {
        let mut made_up = MadeUp::answering(processor, keeps, 0.04, seed);
        let (found, _) = made_up.chosen();
        assert!(keeps(&found.unwrap()));
        assert!(made_up.asked <= 20, "{seed}: {}", made_up.asked);
        share += processor(&found.unwrap()) / made_up.best() / 50.0;
    }
    assert!(share >= 0.98, "{share}");
}

#[test]
fn what_does_not_run_or_keep_the_target_is_not_chosen() {
    let only_large: Surface = |settings| match settings.max_batch.get() {
        16 => 10.0,
        _ => 0.0,
    };
    let (found, choice) = MadeUp::new(only_large, 0.001, 1).chosen();
    assert_eq!(found.unwrap().max_batch.get(), 16);
    assert_eq!(choice, Choice::OnlyThese);

    let (found, choice) = MadeUp::new(|_| 0.0, 0.001, 1).chosen();
    assert_eq!((found, choice), (None, Choice::Nothing));

    let only_many = |settings: &Tuned| settings.preprocess_threads.get() > 8;
    let (_, choice) = MadeUp::answering(flat, only_many, 0.001, 1).chosen();
    assert_eq!(choice, Choice::OnlyThese);
    let (found, choice) = MadeUp::answering(flat, |_| false, 0.001, 1).chosen();
    assert_eq!((found, choice), (None, Choice::Nothing));

    let mut made_up = MadeUp::new(flat, 0.001, 1);
    assert_eq!(search(&[start()], &mut made_up).unwrap(), Some(start()));
    assert_eq!(
        choose(&[start()], Some(start()), &mut made_up).unwrap(),
        Choice::DefaultsAreBest
    );
}
