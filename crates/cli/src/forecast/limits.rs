//! Limits on the time and cost of a job in this process.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio_util::sync::{CancellationToken, DropGuard};
use trommel_types::{Held, Price, Usage, cost, problem_of_prices, problem_of_token_prices};
use trommel_worker::{Progress, WorkerConfig};

use super::money;

/// Time between two checks.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The limits of a job, and which of them ended it, if one did.
#[derive(Debug, Clone, Default)]
pub(crate) struct Limits {
    pub(crate) runtime: Option<Duration>,
    pub(crate) cost: Option<f64>,
    passed: Arc<OnceLock<String>>,
}

/// The cost of a job in this process.
#[derive(Debug, Clone)]
pub(crate) struct Spending {
    pub(crate) prices: Vec<Price>,
    /// Resources held per hour while it runs.
    pub(crate) held: Usage,
    pub(crate) to_s3: bool,
}

/// The problem with the prices and a limit, if there is one.
pub(crate) fn problem_of_costs(
    prices: &[Price],
    max_cost: Option<f64>,
    dry_run: bool,
) -> Option<String> {
    let uncounted = || problem_of_token_prices(prices).filter(|_| !dry_run);
    if let Some(problem) = problem_of_prices(prices).or_else(uncounted) {
        return Some(format!("--price: {problem}"));
    }
    let is_free = max_cost.is_some() && prices.is_empty();
    is_free.then(|| "--max-cost needs prices; give them with --price".to_owned())
}

impl Spending {
    /// Of a process that holds all roles.
    pub(crate) fn new(prices: &[Price], config: &WorkerConfig, to_s3: bool) -> Self {
        let held = |cores: usize| Held {
            processes: 1.0,
            cores: cores as f64,
        };
        let infer = config.infer.instances() * config.infer.intra_threads();
        let cores = std::thread::available_parallelism().map_or(1, Into::into);
        Self {
            prices: prices.to_vec(),
            held: Usage {
                hours: 1.0,
                ingest: held(1),
                preprocess: held(config.preprocess.threads()),
                infer: held(infer),
                sink: held(1),
                machine: held(cores),
                ..Usage::default()
            },
            to_s3,
        }
    }

    /// The cost so far; `None` without prices.
    pub(crate) fn cost(&self, ran: Duration, progress: &Progress) -> Option<f64> {
        let puts = if self.to_s3 { progress.parts() } else { 0 };
        let usage = Usage {
            hours: ran.as_secs_f64() / 3600.0,
            gets: progress.from_s3() as f64,
            puts: puts as f64,
            read: progress.bytes() as f64,
            ..self.held
        };
        (!self.prices.is_empty()).then(|| cost(&self.prices, &usage))
    }
}

impl Limits {
    pub(crate) fn new(runtime: Option<Duration>, cost: Option<f64>) -> Self {
        Self {
            runtime,
            cost,
            passed: Arc::default(),
        }
    }

    /// Stops the job at a limit, until the returned guard is dropped. Call it within the runtime.
    pub(crate) fn watch(
        &self,
        started: Instant,
        spending: &Spending,
        progress: &Arc<Progress>,
        stop: &CancellationToken,
    ) -> DropGuard {
        let ended = CancellationToken::new();
        let guard = ended.clone().drop_guard();
        if self.runtime.is_none() && self.cost.is_none() {
            return guard;
        }
        let (limits, spending) = (self.clone(), spending.clone());
        let (progress, stop) = (Arc::clone(progress), stop.clone());
        tokio::spawn(async move {
            let look = || tokio::time::sleep(LOOK_EVERY);
            while ended.run_until_cancelled(look()).await.is_some() {
                let ran = started.elapsed();
                if let Some(reason) = limits.over(ran, spending.cost(ran, &progress)) {
                    limits.passed.get_or_init(|| reason);
                    return stop.cancel();
                }
            }
        });
        guard
    }

    fn over(&self, ran: Duration, spent: Option<f64>) -> Option<String> {
        if let Some(limit) = self.runtime.filter(|limit| ran >= *limit) {
            let limit = humantime::format_duration(limit);
            return Some(format!("reached --max-runtime {limit}"));
        }
        let limit = self
            .cost
            .filter(|limit| spent.is_some_and(|spent| spent >= *limit))?;
        Some(format!("reached --max-cost {}", money(limit)))
    }

    /// Why the job was ended, if one of these limits did it.
    pub(crate) fn passed(&self) -> Option<&str> {
        self.passed.get().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_and_money_end_a_job() {
        let limits = Limits::new(Some(Duration::from_secs(60)), Some(2.0));
        let over = |seconds, spent| limits.over(Duration::from_secs(seconds), Some(spent));
        assert_eq!(over(59, 1.9), None);
        assert!(over(60, 0.0).unwrap().contains("--max-runtime 1m"));
        assert!(over(1, 2.0).unwrap().contains("--max-cost $2.00"));
        assert_eq!(Limits::default().over(Duration::MAX, Some(1e9)), None);
    }

    #[tokio::test]
    async fn a_job_that_takes_too_long_is_stopped_and_says_why() {
        let limits = Limits::new(Some(Duration::ZERO), None);
        let spending = Spending::new(&[], &WorkerConfig::default(), false);
        let (progress, stop) = (Arc::default(), CancellationToken::new());
        let _guard = limits.watch(Instant::now(), &spending, &progress, &stop);
        stop.cancelled().await;
        assert!(limits.passed().unwrap().contains("--max-runtime"));
    }

    #[test]
    fn a_limit_without_prices_is_refused() {
        let problem = problem_of_costs(&[], Some(1.0), false).unwrap();
        assert!(problem.contains("give them with --price"), "{problem}");
        assert_eq!(
            problem_of_costs(&["infer=1/h".parse().unwrap()], Some(1.0), false),
            None
        );
    }
}
