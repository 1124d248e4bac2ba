//! The whole pipeline compared with the limit of its parts.

use super::measures::{BatchTime, Pipeline, StageTime};

/// The limits of the parts.
pub(super) struct Parts<'a> {
    pub(super) stages: &'a [StageTime],
    pub(super) compute: &'a [BatchTime],
    /// Images per second preprocessed by all threads.
    pub(super) prepared: f64,
    /// Sessions times their threads, if these run on the CPU.
    pub(super) model_threads: Option<usize>,
    pub(super) preprocess_threads: usize,
    pub(super) cores: usize,
    /// The largest batch that the pipeline forms.
    pub(super) max_batch: usize,
}

impl Parts<'_> {
    /// The lowest rate among the parts, and which part it is. Parts on the CPU share its cores:
    /// then the limit is the rate at which all cores do both.
    fn limit(&self) -> (f64, String) {
        let fits = self
            .compute
            .iter()
            .filter(|time| time.batch <= self.max_batch);
        let infer = fits.map(|time| time.images_per_second).fold(0.0, f64::max);
        let fetch = self.stages.iter().find(|stage| stage.stage == "fetch");
        let fetch = fetch.map_or(f64::INFINITY, |stage| stage.images_per_second);
        let mut parts = vec![
            (fetch, "fetch"),
            (self.prepared, "preprocess"),
            (infer, "infer"),
        ];
        if let Some(threads) = self.model_threads {
            let prepare = self.preprocess_threads.min(self.cores) as f64 / self.prepared;
            let compute = threads.min(self.cores) as f64 / infer;
            parts.push((self.cores as f64 / (prepare + compute), "all cores"));
        }
        let least = parts.into_iter().min_by(|a, b| a.0.total_cmp(&b.0));
        let (rate, name) = least.unwrap_or((0.0, "infer"));
        (rate, name.to_owned())
    }

    pub(super) fn compare(&self, images: u64, seconds: f64, rate: f64) -> Pipeline {
        let (limit, bottleneck) = self.limit();
        Pipeline {
            images,
            seconds,
            images_per_second: rate,
            limit,
            bottleneck,
            efficiency: rate / limit.max(f64::MIN_POSITIVE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Spread;

    fn parts<'a>(stages: &'a [StageTime], compute: &'a [BatchTime]) -> Parts<'a> {
        Parts {
            stages,
            compute,
            prepared: 2000.0,
            model_threads: Some(4),
            preprocess_threads: 4,
            cores: 4,
            max_batch: 8,
        }
    }

    #[test]
    fn parts_that_share_cores_take_turns_and_others_do_not() {
        let fetch = [StageTime {
            stage: "fetch".to_owned(),
            milliseconds: Spread::default(),
            side_by_side: 16,
            images_per_second: 9000.0,
        }];
        let batch = |batch, images_per_second| BatchTime {
            batch,
            milliseconds: 1.0,
            images_per_second,
        };
        // Batches of 16 are faster, but not formed.
        let compute = [batch(1, 500.0), batch(8, 1000.0), batch(16, 3000.0)];
        let shared = parts(&fetch, &compute).compare(512, 1.0, 600.0);
        // 2 ms of four cores to prepare, 4 ms to compute: 4 cores / 6 ms.
        assert!((shared.limit - 4.0 / 0.006).abs() < 1e-6, "{shared:?}");
        assert!((shared.efficiency - 0.9).abs() < 1e-6, "{shared:?}");
        let gpu = Parts {
            model_threads: None,
            ..parts(&fetch, &compute)
        };
        let gpu = gpu.compare(512, 1.0, 600.0);
        assert_eq!((gpu.limit, gpu.bottleneck.as_str()), (1000.0, "infer"));
        let slow = [StageTime {
            images_per_second: 100.0,
            ..fetch[0].clone()
        }];
        assert_eq!(
            parts(&slow, &compute).compare(1, 1.0, 50.0).bottleneck,
            "fetch"
        );
    }
}
