//! How many processes of each role a rate needs, and what adding more gains.

use anyhow::{Result, bail};
use serde::Serialize;
use trommel_types::{Held, Usage};

use super::known::Known;
use super::simulate::{Arrivals, Station, System, simulate};
use crate::args::{PlanArgs, PlanHop};

/// Numbers of preprocess cores in the scaling table.
const CORES: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1000];
/// Numbers of devices in the scaling table.
const DEVICES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Images simulated per image in flight, for each line of the table.
const TURNS: usize = 12;
/// Rounding tolerance when a number of servers is exactly enough.
const ROUNDING: f64 = 1e-9;

/// Processes of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Fleet {
    /// Sessions of the model.
    pub(crate) instances: usize,
    /// Processes that run them.
    pub(crate) infer: usize,
    /// Preprocess cores; 0 if the cost of preprocessing is unknown.
    pub(crate) cores: usize,
    /// Streams that carry tensors; 0 if none is needed.
    pub(crate) streams: usize,
}

impl Fleet {
    pub(crate) fn new(instances: usize, cores: usize, streams: usize, known: &Known) -> Self {
        Self {
            instances,
            infer: instances.div_ceil(known.instances_each),
            cores,
            streams,
        }
    }

    /// Usage per hour at this rate, with one process for each other role.
    pub(crate) fn usage_in_an_hour(&self, rate: f64, known: &Known) -> Usage {
        let one = Held {
            processes: 1.0,
            cores: 1.0,
        };
        let images = rate * 3600.0;
        Usage {
            hours: 1.0,
            ingest: one,
            // How cores are spread over processes is the user's choice; here one process has them all.
            preprocess: Held {
                processes: 1.0,
                cores: self.cores as f64,
            },
            infer: Held {
                processes: self.infer as f64,
                cores: self.instances as f64,
            },
            sink: one,
            broker: Held {
                processes: self.streams.max(1) as f64,
                cores: self.streams.max(1) as f64,
            },
            gets: images,
            read: images * known.image_bytes.unwrap_or(0.0),
            ..Usage::default()
        }
    }
}

/// The resources of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct JobPlan {
    /// As simulated.
    pub(crate) images_per_second: f64,
    pub(crate) max_batch: usize,
    #[serde(flatten)]
    pub(crate) fleet: Fleet,
    /// How busy sessions, cores and streams are, 0 to 1.
    pub(crate) infer_busy: f64,
    pub(crate) cores_busy: Option<f64>,
    pub(crate) streams_busy: Option<f64>,
    pub(crate) bottleneck: &'static str,
    /// Mean number of images in flight from listing to row, which the limits of the roles have to allow.
    pub(crate) in_flight: f64,
    /// Bytes per second read from the source.
    pub(crate) read_bytes_per_second: Option<f64>,
    /// Bytes per second of tensors on the network, to the broker and from it.
    pub(crate) broker_bytes_per_second: Option<f64>,
}

/// The simulated part of a job.
#[derive(Debug, Clone, Copy)]
struct Pool {
    max_batch: usize,
    instances: usize,
    cores: Option<Station>,
    streams: Option<Station>,
}

/// A saturated pool.
struct Flow {
    rate: f64,
    infer: f64,
    cores: Option<f64>,
    streams: Option<f64>,
    in_flight: f64,
}

impl Pool {
    fn flow(&self, known: &Known) -> Flow {
        let stations: Vec<_> = self.cores.into_iter().chain(self.streams).collect();
        let system = System {
            service: &known.service,
            max_batch: self.max_batch,
            // Images never run out, so batches fill.
            max_wait: 3600.0,
            instances: self.instances,
            other: 0.0,
            stations,
            exponential: false,
        };
        // Enough to saturate each part: twice what it holds at once.
        let servers: usize = system.stations.iter().map(|station| station.servers).sum();
        let in_flight = 2 * (servers + self.max_batch * self.instances) + self.max_batch;
        let images = (TURNS * in_flight)
            .max(2000)
            .next_multiple_of(self.max_batch);
        let seen = simulate(&system, Arrivals::InFlight(in_flight), images, 0);
        let mut busy = seen.stations.iter().copied();
        Flow {
            rate: seen.rate,
            infer: seen.busy,
            cores: self.cores.and_then(|_| busy.next()),
            streams: self.streams.and_then(|_| busy.next()),
            in_flight: seen.in_flight,
        }
    }
}

impl Flow {
    /// The busiest part.
    fn bottleneck(&self) -> &'static str {
        let parts = [
            ("preprocess", self.cores.unwrap_or(0.0)),
            ("broker", self.streams.unwrap_or(0.0)),
            ("infer", self.infer),
        ];
        let busiest = parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        busiest.map_or("infer", |(name, _)| name)
    }
}

fn servers_for(rate: f64, seconds: f64) -> usize {
    (rate * seconds - ROUNDING).ceil().max(1.0) as usize
}

/// The processes that a rate needs, or the rate of the given processes.
///
/// # Errors
/// If neither a rate nor processes are given.
pub(crate) fn plan_job(args: &PlanArgs, known: &Known) -> Result<JobPlan> {
    let service = &known.service;
    let max_batch = args.max_batch.map_or_else(|| service.fastest(), Into::into);
    let each = service.rate(max_batch);
    let Some(rate) = args.rate.or_else(|| {
        args.instances
            .map(|instances| instances.get() as f64 * each)
    }) else {
        bail!(
            "give a rate with --rate, a number of sessions with --instances, or a latency with --p95"
        );
    };
    let instances = args
        .instances
        .map_or_else(|| servers_for(rate, 1.0 / each), Into::into);
    let cores = known.prepare.map(|seconds| Station {
        servers: args
            .cores
            .map_or_else(|| servers_for(rate, seconds), Into::into),
        seconds,
    });
    let streams = known
        .broker
        .filter(|_| known.hop == PlanHop::Jetstream)
        .map(|carried| Station {
            servers: args
                .streams
                .map_or_else(|| servers_for(rate, 1.0 / carried), Into::into),
            seconds: 1.0 / carried,
        });
    let pool = Pool {
        max_batch,
        instances,
        cores,
        streams,
    };
    let flow = pool.flow(known);
    let servers = |station: Option<Station>| station.map_or(0, |station| station.servers);
    Ok(JobPlan {
        images_per_second: flow.rate,
        max_batch,
        fleet: Fleet::new(instances, servers(cores), servers(streams), known),
        infer_busy: flow.infer,
        cores_busy: flow.cores,
        streams_busy: flow.streams,
        bottleneck: flow.bottleneck(),
        in_flight: flow.in_flight,
        read_bytes_per_second: known.image_bytes.map(|bytes| bytes * flow.rate),
        broker_bytes_per_second: known
            .tensor_bytes
            .filter(|_| known.hop == PlanHop::Jetstream)
            .map(|bytes| 2.0 * bytes * flow.rate),
    })
}

/// How the rate scales with each part, if nothing else limits it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Scale {
    /// By preprocess cores, with enough devices.
    pub(crate) by_cores: Vec<Line>,
    /// By devices, with enough preprocess cores.
    pub(crate) by_devices: Vec<Line>,
    /// Tensors per second that saturate one stream.
    pub(crate) stream_is_full_at: Option<f64>,
}

/// A line of the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Line {
    pub(crate) cores: usize,
    /// Processes of the role infer, each with the sessions of a device.
    pub(crate) devices: usize,
    /// With the local hop: tensors never reach the broker.
    pub(crate) local: f64,
    /// Through one stream.
    pub(crate) one_stream: Option<f64>,
    /// Streams with which the broker is not the bottleneck.
    pub(crate) streams: Option<usize>,
    /// Bytes per second of tensors on the network then.
    pub(crate) broker_bytes_per_second: Option<f64>,
}

impl Scale {
    pub(crate) fn of(known: &Known, prepare: f64) -> Self {
        let device = known.instances_each as f64 * known.service.rate(known.service.fastest());
        let devices_for = |cores: usize| servers_for(cores as f64 / prepare, 1.0 / device);
        let cores_for = |devices: usize| servers_for(devices as f64 * device, prepare);
        Self {
            by_cores: CORES
                .map(|cores| Line::of(known, prepare, cores, devices_for(cores)))
                .into(),
            by_devices: DEVICES
                .map(|devices| Line::of(known, prepare, cores_for(devices), devices))
                .into(),
            stream_is_full_at: known.broker,
        }
    }
}

impl Line {
    fn of(known: &Known, prepare: f64, cores: usize, devices: usize) -> Self {
        let pool = Pool {
            max_batch: known.service.fastest(),
            instances: devices * known.instances_each,
            cores: Some(Station {
                servers: cores,
                seconds: prepare,
            }),
            streams: None,
        };
        let local = pool.flow(known).rate;
        let through = |carried: f64| Pool {
            streams: Some(Station {
                servers: 1,
                seconds: 1.0 / carried,
            }),
            ..pool
        };
        Self {
            cores,
            devices,
            local,
            one_stream: known
                .broker
                .map(|carried| through(carried).flow(known).rate),
            streams: known
                .broker
                .map(|carried| servers_for(local, 1.0 / carried)),
            broker_bytes_per_second: known.tensor_bytes.map(|bytes| 2.0 * bytes * local),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Service;

    fn known() -> Known {
        Known {
            service: Service::parse("b1=4,b8=16,b32=48").unwrap(),
            other: 0.0,
            prepare: Some(0.002),
            tensor_bytes: Some(150_528.0),
            image_bytes: Some(60_000.0),
            broker: Some(2000.0),
            hop: PlanHop::Jetstream,
            instances_each: 2,
        }
    }

    /// With enough to do, each line flows at the rate of its narrowest part.
    #[test]
    fn a_thousand_cores_and_sixty_four_devices_flow_at_the_rate_of_the_narrowest_part() {
        let known = known();
        let scale = Scale::of(&known, 0.002);
        let device = 2.0 * 32.0 / 0.048;
        for line in scale.by_cores.iter().chain(&scale.by_devices) {
            let least = (line.cores as f64 / 0.002).min(line.devices as f64 * device);
            let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.06;
            assert!(near(line.local, least), "{line:?}: {least}");
            let through = line.one_stream.unwrap();
            assert!(near(through, least.min(2000.0)), "{line:?}: {through}");
            let streams = line.streams.unwrap() as f64;
            assert!(streams * 2000.0 >= line.local && (streams - 1.0) * 2000.0 < line.local);
        }
        assert_eq!(scale.by_cores.last().unwrap().cores, 1000);
        assert_eq!(scale.by_devices.last().unwrap().devices, 64);
    }

    #[test]
    fn the_bottleneck_is_the_part_that_is_never_idle() {
        let known = known();
        let pool = Pool {
            max_batch: 32,
            instances: 4,
            cores: Some(Station {
                servers: 16,
                seconds: 0.002,
            }),
            streams: Some(Station {
                servers: 1,
                seconds: 0.0005,
            }),
        };
        assert_eq!(pool.flow(&known).bottleneck(), "broker");
        let cores = Pool {
            cores: Some(Station {
                servers: 2,
                seconds: 0.002,
            }),
            ..pool
        };
        assert_eq!(cores.flow(&known).bottleneck(), "preprocess");
        let device = Pool {
            instances: 1,
            streams: None,
            ..pool
        };
        assert_eq!(device.flow(&known).bottleneck(), "infer");
    }
}
