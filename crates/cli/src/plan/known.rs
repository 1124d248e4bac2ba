//! The inputs of a plan: times and sizes, measured or given.

use anyhow::{Result, bail};

use super::service::Service;
use crate::args::{PlanArgs, PlanHop};
use crate::bench::Measures;

/// Times and sizes of the parts of a pipeline.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub(crate) service: Service,
    /// Fixed overhead of an image in seconds.
    pub(crate) other: f64,
    /// Core seconds of preprocessing per image.
    pub(crate) prepare: Option<f64>,
    pub(crate) tensor_bytes: Option<f64>,
    pub(crate) image_bytes: Option<f64>,
    /// Tensors per second that a stream carries.
    pub(crate) broker: Option<f64>,
    pub(crate) hop: PlanHop,
    /// Sessions per process.
    pub(crate) instances_each: usize,
}

impl Known {
    /// Arguments override measurements.
    ///
    /// # Errors
    /// If the measurements cannot be read, or have no batch times of the model.
    pub(crate) fn of(args: &PlanArgs) -> Result<Self> {
        let measured = args.from.as_deref().map(Measures::read).transpose()?;
        let measured = measured.as_ref();
        let service = match (&args.service, measured) {
            (Some(service), _) => service.clone(),
            (None, Some(measured)) => {
                let times = measured.compute.iter();
                Service::new(times.map(|time| (time.batch, time.milliseconds / 1e3)))?
            }
            (None, None) => bail!("give the times of the model with --service or --from"),
        };
        let largest = service.largest();
        if args.max_batch.is_some_and(|batch| batch.get() > largest) {
            bail!(
                "--max-batch: no batch above {largest} was measured; give its time with --service, or measure it with trommel bench --batches"
            );
        }
        let prepare = || {
            let stages = ["decode", "resize"].map(|name| measured?.stage(name));
            let sum = stages
                .into_iter()
                .map(|stage| Some(stage?.milliseconds.mean / 1e3));
            sum.sum::<Option<f64>>()
        };
        let broker = || {
            let mut hops = measured?.hops.iter();
            let hop = hops.find(|hop| hop.hop == "jetstream")?;
            Some(hop.images_per_second)
        };
        let bytes = |given: Option<std::num::NonZeroUsize>| given.map(|bytes| bytes.get() as f64);
        let each = || measured.map_or(1, |measured| measured.model.instances.max(1));
        Ok(Self {
            service,
            other: args.other,
            prepare: args
                .prepare
                .or_else(prepare)
                .filter(|seconds| *seconds > 0.0),
            tensor_bytes: bytes(args.tensor_bytes)
                .or_else(|| measured.map(|measured| measured.sample.tensor_bytes as f64)),
            image_bytes: bytes(args.image_bytes)
                .or_else(|| measured.map(|measured| measured.sample.image_bytes)),
            broker: args.broker.or_else(broker),
            hop: args.hop,
            instances_each: args.instances_each.map_or_else(each, Into::into),
        })
    }

    /// The parts of the plan that are missing, and the flag that supplies each.
    pub(crate) fn missing(&self, of_requests: bool) -> Vec<String> {
        let mut missing = Vec::new();
        let mut note = |is_missing: bool, text: &str| {
            if is_missing {
                missing.push(text.to_owned());
            }
        };
        note(
            self.prepare.is_none(),
            "preprocess cores: give the time of an image with --prepare, or measurements with --from",
        );
        let by_broker = !of_requests && self.hop == PlanHop::Jetstream;
        note(
            by_broker && self.broker.is_none(),
            "limit of the broker: give the rate of a stream with --broker, or measure it with trommel bench --nats",
        );
        note(
            by_broker && self.tensor_bytes.is_none(),
            "bandwidth of the broker: give the size of a tensor with --tensor-bytes",
        );
        missing
    }
}
