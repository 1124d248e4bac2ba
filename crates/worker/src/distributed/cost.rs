//! The cost of a running job at its user's prices.

use std::time::{Duration, Instant};

use trommel_types::{Held, JobRequest, Price, Role, Usage, cost};

use crate::WorkerError;
use crate::distributed::job_store::JobStore;
use crate::distributed::presence::{self, Presence};

/// Time between two queries for live workers.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// The resources of the live workers, per hour. Each process counts as a machine, and all are
/// charged to this job: workers do not report which job they worked for.
pub fn fleet_usage(workers: &[Presence]) -> Usage {
    let held = |role: Role| {
        let of_role = workers.iter().filter(|worker| worker.has(role));
        let threads = |worker: &Presence| {
            let of_role = worker.work.iter().filter(|work| work.role == role);
            of_role.map(|work| work.threads).sum::<usize>()
        };
        Held {
            processes: of_role.clone().count() as f64,
            cores: of_role.map(threads).sum::<usize>() as f64,
        }
    };
    let one = Held {
        processes: 1.0,
        cores: 1.0,
    };
    let all = workers.len() as f64;
    Usage {
        hours: 1.0,
        ingest: held(Role::Ingest),
        preprocess: held(Role::Preprocess),
        infer: held(Role::Infer),
        sink: held(Role::Sink),
        broker: one,
        machine: Held {
            processes: all,
            cores: all,
        },
        ..Usage::default()
    }
}

/// Adds up what a job costs.
pub(crate) struct Meter {
    prices: Vec<Price>,
    limit: Option<f64>,
    /// Whether its images come from S3.
    from_s3: bool,
    spent: f64,
    /// Rows and bytes already charged.
    rows: u64,
    bytes: u64,
    since: Instant,
    fleet: Option<(Instant, Usage)>,
}

impl Meter {
    /// Continues from the cost of `rows` by earlier sinks.
    pub(crate) fn new(request: &JobRequest, spent: Option<f64>, rows: u64) -> Self {
        let is_s3 = |source: &String| source.starts_with("s3://");
        Self {
            prices: request.options.prices.clone(),
            limit: request.options.max_cost,
            from_s3: request.sources.iter().any(is_s3),
            spent: spent.unwrap_or(0.0),
            rows,
            bytes: 0,
            since: Instant::now(),
            fleet: None,
        }
    }

    /// The cost of the job so far; `None` without prices.
    ///
    /// # Errors
    /// If the workers cannot be queried.
    pub(crate) async fn read(
        &mut self,
        store: &JobStore,
        rows: u64,
        bytes: u64,
    ) -> Result<Option<f64>, WorkerError> {
        if self.prices.is_empty() {
            return Ok(None);
        }
        let fleet = match self.fleet {
            Some((at, fleet)) if at.elapsed() < LOOK_EVERY => fleet,
            _ => {
                let fleet = fleet_usage(&presence::alive(store).await?);
                self.fleet = Some((Instant::now(), fleet));
                fleet
            }
        };
        let now = Instant::now();
        self.add(fleet, now, rows, bytes);
        Ok(Some(self.spent))
    }

    fn add(&mut self, fleet: Usage, now: Instant, rows: u64, bytes: u64) {
        let new_rows = rows.saturating_sub(self.rows) as f64;
        let used = Usage {
            hours: now.duration_since(self.since).as_secs_f64() / 3600.0,
            gets: if self.from_s3 { new_rows } else { 0.0 },
            read: bytes.saturating_sub(self.bytes) as f64,
            ..fleet
        };
        self.spent += cost(&self.prices, &used);
        self.since = now;
        self.rows = self.rows.max(rows);
        self.bytes = self.bytes.max(bytes);
    }

    /// The reason to end the job, if it has reached its maximum cost.
    pub(crate) fn passed(&self) -> Option<f64> {
        self.limit.filter(|limit| self.spent >= *limit)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use trommel_types::JobOptions;

    use super::*;
    use crate::StageWork;

    fn worker(role: Role, threads: usize) -> Presence {
        Presence {
            id: String::new(),
            roles: vec![role],
            models: BTreeMap::new(),
            seen_at: 0,
            work: vec![StageWork {
                role,
                threads,
                images: 0,
                busy_seconds: 0.0,
            }],
            times: BTreeMap::new(),
            put_off: Vec::new(),
            requests: Vec::new(),
        }
    }

    #[test]
    fn a_job_pays_for_its_workers_by_time_and_for_its_images_once() {
        let workers = [
            worker(Role::Preprocess, 8),
            worker(Role::Preprocess, 4),
            worker(Role::Infer, 2),
        ];
        let fleet = fleet_usage(&workers);
        assert_eq!(
            (fleet.preprocess.processes, fleet.preprocess.cores),
            (2.0, 12.0)
        );
        assert_eq!(fleet.machine.processes, 3.0);
        let prices = ["infer=3.60/h", "preprocess=0.30/core-h", "s3-get=1/1000"];
        let request = JobRequest {
            sources: vec!["s3://bucket/".to_owned()],
            options: JobOptions {
                prices: prices.map(|price| price.parse().unwrap()).into(),
                max_cost: Some(4.0),
                ..JobOptions::default()
            },
            ..JobRequest::default()
        };
        // 500 rows were charged by the previous sink.
        let mut meter = Meter::new(&request, Some(1.0), 500);
        let half_an_hour = meter.since + Duration::from_secs(1800);
        meter.add(fleet, half_an_hour, 600, 0);
        let expected = 1.0 + 0.5 * (3.60 + 12.0 * 0.30) + 0.1;
        assert!((meter.spent - expected).abs() < 1e-9, "{}", meter.spent);
        assert_eq!(meter.passed(), Some(4.0));
        // Counting again, as after a restart, costs nothing.
        meter.add(fleet, half_an_hour, 550, 0);
        assert!((meter.spent - expected).abs() < 1e-9, "{}", meter.spent);
    }
}
