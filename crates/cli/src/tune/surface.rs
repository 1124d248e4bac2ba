//! Predicts the scores of settings from the trials so far: a Gaussian process over the logarithm of the score
//! (Rasmussen and Williams, *Gaussian Processes for Machine Learning*, MIT Press 2006, chapter 2). A trial of some
//! settings thus informs about similar ones, and the machine's drift is part of the model. How much settings matter
//! differs between models, so the prediction is that of the likeliest of several scales.

use trommel_worker::Tuned;

/// How many times as much settings matter.
const SCALES: [f64; 3] = [1.0, 2.0, 4.0];
/// Standard deviations of the logarithm of the score: between machines or models, by the settings of the model, by the
/// preprocess threads and images in flight, by the wait, by what these do together.
const LEVEL: f64 = 0.5;
const MODEL: f64 = 0.25;
const PREPARE: f64 = 0.18;
const WAIT: f64 = 0.1;
const TOGETHER: f64 = 0.08;
/// The same of a trial of full length, and of the machine's speed over many trials.
const NOISE: f64 = 0.08;
const DRIFT: f64 = 0.03;
/// Trials after which the machine's speed is hardly the same.
const TRIALS: f64 = 10.0;
/// Doublings (of the wait, tenfolds) after which another value says little: of the batch, the sessions,
/// the preprocess threads, the images in flight for each of these, the wait.
const REACH: [f64; 5] = [4.0, 1.5, 1.5, 3.0, 3.0];

/// The prediction at each scale, to which trials are added one by one.
#[derive(Debug)]
pub(super) struct Surfaces([Surface; 3]);

impl Surfaces {
    pub(super) fn new(all: &[Tuned]) -> Self {
        Self(SCALES.map(|scale| Surface::new(all, scale)))
    }

    /// Adds the score of a trial of these settings with this share of the budget.
    pub(super) fn add(&mut self, arm: usize, share: f64, score: f64) {
        self.0.iter_mut().for_each(|one| one.add(arm, share, score));
    }

    /// The one that fits the trials best.
    pub(super) fn likeliest(&self) -> &Surface {
        let [first, others @ ..] = &self.0;
        let others = others.iter();
        others.fold(first, |best, other| {
            match other.likelihood > best.likelihood {
                true => other,
                false => best,
            }
        })
    }
}

/// The prediction at one scale.
#[derive(Debug)]
pub(super) struct Surface {
    scale: f64,
    /// The logarithm, without a constant.
    likelihood: f64,
    arms: Vec<Arm>,
    /// The first score, as the logarithm.
    first: f64,
    trials: Vec<Place>,
    /// The Cholesky factor of the trials' covariance, row by row.
    factor: Vec<Vec<f64>>,
    /// The solution of that factor for the logarithms of the scores.
    solved: Vec<f64>,
}

/// Settings, and what is known of them.
#[derive(Debug)]
struct Arm {
    place: Place,
    /// The solution of the factor for their covariance with the trials.
    alike: Vec<f64>,
    mean: f64,
    variance: f64,
}

impl Surface {
    fn new(all: &[Tuned], scale: f64) -> Self {
        let arm = |settings| {
            let place = place(settings);
            Arm {
                place,
                alike: Vec::new(),
                mean: 0.0,
                variance: covariance(&place, &place, scale),
            }
        };
        Self {
            scale,
            likelihood: 0.0,
            arms: all.iter().map(arm).collect(),
            first: 0.0,
            trials: Vec::new(),
            factor: Vec::new(),
            solved: Vec::new(),
        }
    }

    /// The expected logarithm of the score of these settings, relative to that of the first trial, and its standard
    /// deviation.
    pub(super) fn at(&self, arm: usize) -> (f64, f64) {
        let arm = &self.arms[arm];
        (arm.mean, arm.variance.max(0.0).sqrt())
    }

    /// Adds a trial: a row of the factor, from which the expectation of all arms follows.
    fn add(&mut self, arm: usize, share: f64, score: f64) {
        let (place, log, count) = (self.arms[arm].place, score.ln(), self.trials.len());
        if count == 0 {
            self.first = log;
        }
        let scale = self.scale;
        let drift = |trial: usize| DRIFT.powi(2) * (-((count - trial) as f64) / TRIALS).exp();
        let mut row: Vec<f64> = Vec::with_capacity(count + 1);
        for (trial, other) in self.trials.iter().enumerate() {
            let alike = covariance(&place, other, scale) + drift(trial);
            let factor = &self.factor[trial];
            row.push((alike - dot(factor, &row)) / factor[trial]);
        }
        let own = covariance(&place, &place, scale) + drift(count) + NOISE.powi(2) / share;
        let left = (own - dot(&row, &row)).sqrt();
        let solved = (log - self.first - dot(&row, &self.solved)) / left;
        self.likelihood -= solved.powi(2) / 2.0 + left.ln();
        for arm in &mut self.arms {
            let alike = (covariance(&arm.place, &place, scale) - dot(&row, &arm.alike)) / left;
            arm.mean += alike * solved;
            arm.variance -= alike.powi(2);
            arm.alike.push(alike);
        }
        row.push(left);
        self.factor.push(row);
        self.solved.push(solved);
        self.trials.push(place);
    }
}

/// The sum of products, as far as both go.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Coordinates in which the distance of two settings says how much their scores differ.
type Place = [f64; 5];

fn place(settings: &Tuned) -> Place {
    let threads = settings.preprocess_threads.get() as f64;
    [
        (settings.max_batch.get() as f64).log2(),
        (settings.instances.get() as f64).log2(),
        threads.log2(),
        (settings.max_in_flight.get() as f64 / threads).log2(),
        settings.max_wait.as_secs_f64().max(1e-4).log10(),
    ]
}

fn covariance(a: &Place, b: &Place, scale: f64) -> f64 {
    let alike = |axis: usize| (-(a[axis] - b[axis]).abs() / REACH[axis]).exp();
    let (model, prepare, wait) = (alike(0) * alike(1), alike(2) * alike(3), alike(4));
    let settings = MODEL.powi(2) * model
        + PREPARE.powi(2) * prepare
        + WAIT.powi(2) * wait
        + TOGETHER.powi(2) * model * prepare * wait;
    LEVEL.powi(2) + scale.powi(2) * settings
}
