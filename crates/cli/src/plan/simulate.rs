//! A discrete-event model of the path of an image: stations, the batch former, and the sessions of a model.
//!
//! Pure and seeded: the same settings give the same figures on every machine. It forms batches as
//! `trommel-infer` does: a batch is ready when it is full, or when the longest wait since its first image has
//! passed, and grows until a session is free.
//!
//! It is tested against closed forms. For Poisson arrivals at one server of a fixed time
//! `s` and load `ρ`, the mean wait is `ρs / 2(1 − ρ)` (Pollaczek and Khinchine; Gross, Shortle, Thompson
//! and Harris, *Fundamentals of Queueing Theory*, 4th edition, section 5.1). For `c` servers of
//! exponential times it is Erlang's C formula (the same book, section 2.3). The mean number in the system is
//! the rate times the mean time in it (Little, *A Proof for the Queuing Formula: L = λW*, Operations
//! Research 9, 1961).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::random::Random;
use super::service::Service;

/// Nanoseconds since the beginning.
type Time = u64;

const SECOND: f64 = 1e9;

/// Arrivals of images.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Arrivals {
    /// Random and independent, at this mean rate per second.
    Poisson(f64),
    /// At equal intervals, at this rate per second.
    Constant(f64),
    /// This many in flight at all times: each finished image is replaced at once.
    InFlight(usize),
}

/// Identical servers behind one queue, before batches form: preprocess cores, streams of a broker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Station {
    pub(crate) servers: usize,
    /// Service time of an image.
    pub(crate) seconds: f64,
}

/// The system to simulate.
#[derive(Debug, Clone)]
pub(crate) struct System<'a> {
    pub(crate) service: &'a Service,
    /// Images in a full batch.
    pub(crate) max_batch: usize,
    /// Longest time in seconds that a batch waits for images after its first.
    pub(crate) max_wait: f64,
    /// Batches computed in parallel.
    pub(crate) instances: usize,
    /// Fixed overhead of an image in seconds, at any load.
    pub(crate) other: f64,
    /// In order.
    pub(crate) stations: Vec<Station>,
    /// Whether batch times are exponentially distributed around their mean instead of fixed. Only for tests
    /// against formulas that assume it.
    pub(crate) exponential: bool,
}

/// The result of a simulation, without its warm-up.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    /// Seconds from arrival to answer, sorted.
    latencies: Vec<f64>,
    /// Throughput in images per second.
    pub(crate) rate: f64,
    /// Mean batch size.
    pub(crate) mean_batch: f64,
    /// How busy the sessions were, 0 to 1.
    pub(crate) busy: f64,
    /// How busy each station was, 0 to 1.
    pub(crate) stations: Vec<f64>,
    /// Time-weighted mean number of images in the system.
    pub(crate) in_flight: f64,
}

/// Above this load queues keep growing, and results depend on the length of the simulation.
pub(crate) const SATURATED: f64 = 0.985;

impl Outcome {
    /// The latency in seconds at this quantile.
    pub(crate) fn percentile(&self, percent: f64) -> f64 {
        let rank = (percent / 100.0 * self.latencies.len() as f64).ceil() as usize;
        self.latencies[rank.clamp(1, self.latencies.len()) - 1]
    }

    pub(crate) fn mean(&self) -> f64 {
        self.latencies.iter().sum::<f64>() / self.latencies.len() as f64
    }

    /// Whether sessions and stations keep up with the arrivals.
    pub(crate) fn keeps_up(&self) -> bool {
        self.busy.max(self.busiest_station()) < SATURATED
    }

    fn busiest_station(&self) -> f64 {
        self.stations.iter().copied().fold(0.0, f64::max)
    }
}

/// An event and its time; of two at the same time the one scheduled first comes first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives,
    /// An image leaves this station.
    Passed(usize, Time),
    /// The longest wait of an image for its batch is over.
    Due,
    /// A session has finished a batch of images with these arrival times.
    Done(Vec<Time>),
}

struct Run<'a> {
    system: &'a System<'a>,
    random: Random,
    now: Time,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    planned: u64,
    arrivals: Arrivals,
    to_come: usize,
    stations: Vec<At>,
    /// Images waiting for a session.
    forming: VecDeque<Waiting>,
    free: usize,
    seen: Seen,
}

/// An image behind the last station.
struct Waiting {
    came: Time,
    /// The end of its longest wait for a batch.
    due: Time,
}

/// The state of a station.
#[derive(Default)]
struct At {
    free: usize,
    queue: VecDeque<Time>,
    /// Nanoseconds, summed over its servers.
    busy: f64,
}

/// The measurements.
#[derive(Default)]
struct Seen {
    /// Answers discarded as warm-up.
    warm_up: usize,
    answered: usize,
    latencies: Vec<f64>,
    /// When measuring began.
    since: Time,
    busy: f64,
    batches: usize,
    images: usize,
    in_system: usize,
    /// Integral of the images in the system over time.
    area: f64,
    at: Time,
}

/// Simulates `images` images and discards the first tenth as warm-up.
pub(crate) fn simulate(system: &System, arrivals: Arrivals, images: usize, seed: u64) -> Outcome {
    let stations = system.stations.iter().map(|station| At {
        free: station.servers,
        ..At::default()
    });
    let mut run = Run {
        system,
        random: Random::new(seed),
        now: 0,
        events: BinaryHeap::new(),
        planned: 0,
        arrivals,
        to_come: images,
        stations: stations.collect(),
        forming: VecDeque::new(),
        free: system.instances,
        seen: Seen {
            warm_up: images / 10,
            ..Seen::default()
        },
    };
    let first = match arrivals {
        Arrivals::InFlight(images) => images,
        Arrivals::Poisson(_) | Arrivals::Constant(_) => 1,
    };
    (0..first).for_each(|_| run.expect_arrival());
    while run.seen.answered < images {
        let Some(Reverse((time, _, event))) = run.events.pop() else {
            break;
        };
        run.pass_to(time);
        run.happen(event);
    }
    run.outcome()
}

impl Run<'_> {
    fn plan(&mut self, after: f64, event: Event) {
        self.plan_at(self.in_future(after), event);
    }

    /// The time this many seconds later.
    fn in_future(&self, after: f64) -> Time {
        self.now + (after * SECOND).round().max(0.0) as Time
    }

    fn plan_at(&mut self, time: Time, event: Event) {
        self.planned += 1;
        self.events.push(Reverse((time, self.planned, event)));
    }

    fn pass_to(&mut self, time: Time) {
        let passed = (time - self.now) as f64;
        self.seen.area += passed * self.seen.in_system as f64;
        self.now = time;
        self.seen.at = time;
    }

    fn expect_arrival(&mut self) {
        if self.to_come == 0 {
            return;
        }
        self.to_come -= 1;
        let after = match self.arrivals {
            Arrivals::Poisson(rate) => self.random.exponential() / rate,
            Arrivals::Constant(rate) => 1.0 / rate,
            Arrivals::InFlight(_) => 0.0,
        };
        self.plan(after, Event::Arrives);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrives => {
                if !matches!(self.arrivals, Arrivals::InFlight(_)) {
                    self.expect_arrival();
                }
                self.seen.in_system += 1;
                self.enter(0, self.now);
            }
            Event::Passed(number, came) => {
                self.stations[number].free += 1;
                self.serve(number);
                self.enter(number + 1, came);
            }
            Event::Due => self.compute(),
            Event::Done(images) => {
                self.free += 1;
                self.answer(&images);
                self.compute();
            }
        }
    }

    /// Moves an image into a station, or after the last one into the forming batch.
    fn enter(&mut self, number: usize, came: Time) {
        if let Some(station) = self.stations.get_mut(number) {
            station.queue.push_back(came);
            return self.serve(number);
        }
        let due = self.in_future(self.system.max_wait);
        self.forming.push_back(Waiting { came, due });
        if self.forming.len() == 1 {
            self.plan_at(due, Event::Due);
        }
        self.compute();
    }

    fn serve(&mut self, number: usize) {
        let seconds = self.system.stations[number].seconds;
        let station = &mut self.stations[number];
        if station.free == 0 {
            return;
        }
        if let Some(came) = station.queue.pop_front() {
            station.free -= 1;
            station.busy += seconds * SECOND;
            self.plan(seconds, Event::Passed(number, came));
        }
    }

    /// Whether a batch is ready for a session.
    fn is_ready(&self) -> bool {
        let is_due = |first: &Waiting| first.due <= self.now;
        self.forming.len() >= self.system.max_batch || self.forming.front().is_some_and(is_due)
    }

    fn compute(&mut self) {
        while self.free > 0 && self.is_ready() {
            let size = self.forming.len().min(self.system.max_batch);
            let images: Vec<Time> = self.forming.drain(..size).map(|image| image.came).collect();
            // The remaining images have a first one of their own.
            if let Some(first) = self.forming.front() {
                self.plan_at(first.due.max(self.now), Event::Due);
            }
            self.free -= 1;
            let mut seconds = self.system.service.seconds(images.len());
            if self.system.exponential {
                seconds *= self.random.exponential();
            }
            self.seen.busy += seconds * SECOND;
            self.seen.batches += 1;
            self.seen.images += images.len();
            self.plan(seconds, Event::Done(images));
        }
    }

    fn answer(&mut self, images: &[Time]) {
        for came in images {
            self.seen.in_system -= 1;
            self.seen.answered += 1;
            if self.seen.answered > self.seen.warm_up {
                let waited = (self.now - came) as f64 / SECOND;
                self.seen.latencies.push(waited + self.system.other);
            }
            if matches!(self.arrivals, Arrivals::InFlight(_)) {
                self.expect_arrival();
            }
        }
        if self.seen.since == 0 && self.seen.answered >= self.seen.warm_up {
            self.begin_to_measure();
        }
    }

    fn begin_to_measure(&mut self) {
        self.seen.since = self.now.max(1);
        self.seen.busy = 0.0;
        self.seen.area = 0.0;
        (self.seen.batches, self.seen.images) = (0, 0);
        self.stations.iter_mut().for_each(|at| at.busy = 0.0);
    }

    fn outcome(self) -> Outcome {
        let Seen {
            mut latencies,
            since,
            busy,
            batches,
            images,
            area,
            at,
            ..
        } = self.seen;
        latencies.sort_by(f64::total_cmp);
        let nanos = at.saturating_sub(since).max(1) as f64;
        let share = |busy: f64, servers: usize| (busy / (nanos * servers.max(1) as f64)).min(1.0);
        let rate = latencies.len() as f64 * SECOND / nanos;
        let servers = self.system.stations.iter().map(|station| station.servers);
        Outcome {
            rate,
            mean_batch: images as f64 / batches.max(1) as f64,
            busy: share(busy, self.system.instances),
            stations: servers
                .zip(&self.stations)
                .map(|(servers, at)| share(at.busy, servers))
                .collect(),
            // The overhead of an image counts as in flight.
            in_flight: area / nanos + rate * self.system.other,
            latencies,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGES: usize = 200_000;

    fn system(service: &Service, instances: usize) -> System<'_> {
        System {
            service,
            max_batch: 1,
            max_wait: 0.0,
            instances,
            other: 0.0,
            stations: Vec::new(),
            exponential: false,
        }
    }

    fn near(found: f64, expected: f64, share: f64) {
        assert!(
            (found - expected).abs() <= share * expected,
            "{found} and not {expected}"
        );
    }

    #[test]
    fn the_wait_for_one_server_is_that_of_pollaczek_and_khinchine() {
        let service = Service::parse("b1=10").unwrap();
        for load in [0.3_f64, 0.6, 0.8] {
            let arrivals = Arrivals::Poisson(load / 0.010);
            // Waits under high load depend on each other, so one course says little.
            let courses = (0..8).map(|seed| simulate(&system(&service, 1), arrivals, IMAGES, seed));
            let (mut mean, mut busy) = (0.0, 0.0);
            for course in courses {
                mean += course.mean() / 8.0;
                busy += course.busy / 8.0;
            }
            let wait = load * 0.010 / (2.0 * (1.0 - load));
            near(mean, 0.010 + wait, 0.02);
            near(busy, load, 0.02);
        }
    }

    /// The probability of a wait at `servers` servers that are offered `load` of their time each.
    fn erlang_c(servers: usize, load: f64) -> f64 {
        let offered = load * servers as f64;
        let mut term = 1.0;
        let mut sum = 0.0;
        for number in 0..servers {
            sum += term;
            term *= offered / (number + 1) as f64;
        }
        let last = term / (1.0 - load);
        last / (sum + last)
    }

    #[test]
    fn the_wait_for_several_servers_is_that_of_erlang() {
        let service = Service::parse("b1=40").unwrap();
        for (servers, load) in [(1, 0.5), (4, 0.7), (16, 0.9)] {
            let rate = load * servers as f64 / 0.040;
            let system = System {
                exponential: true,
                ..system(&service, servers)
            };
            let found = simulate(&system, Arrivals::Poisson(rate), 2 * IMAGES, 2);
            let wait = erlang_c(servers, load) * 0.040 / (servers as f64 * (1.0 - load));
            near(found.mean(), 0.040 + wait, 0.03);
        }
    }

    #[test]
    fn the_number_in_flight_is_the_rate_times_the_time() {
        let service = Service::parse("b1=18,b2=20,b4=24,b8=32").unwrap();
        let stations = vec![Station {
            servers: 2,
            seconds: 0.012,
        }];
        let system = System {
            max_batch: 8,
            max_wait: 0.030,
            other: 0.010,
            stations,
            ..system(&service, 1)
        };
        let found = simulate(&system, Arrivals::Poisson(100.0), IMAGES, 3);
        near(found.in_flight, found.rate * found.mean(), 0.01);
        near(found.stations[0], 0.6, 0.02);
    }

    #[test]
    fn ten_milliseconds_at_a_hundred_a_second_gather_two_and_not_four() {
        let service = Service::parse("b1=1,b4=1").unwrap();
        let system = System {
            max_batch: 4,
            max_wait: 0.010,
            ..system(&service, 1)
        };
        let found = simulate(&system, Arrivals::Poisson(100.0), IMAGES, 4);
        // The first one, and those of the next 10 ms: 1 + 1, less what a full batch leaves out.
        near(found.mean_batch, 1.98, 0.02);
    }

    #[test]
    fn the_same_seed_gives_the_same_figures() {
        let service = Service::parse("b1=18,b8=32").unwrap();
        let system = System {
            max_batch: 8,
            max_wait: 0.020,
            ..system(&service, 2)
        };
        let run = |seed| simulate(&system, Arrivals::Poisson(120.0), 5_000, seed).latencies;
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn more_than_there_is_room_for_is_noticed() {
        let service = Service::parse("b1=18,b2=20").unwrap();
        let system = System {
            max_batch: 2,
            max_wait: 0.010,
            ..system(&service, 1)
        };
        let at = |rate| simulate(&system, Arrivals::Poisson(rate), 20_000, 5);
        assert!(at(50.0).keeps_up());
        assert!(!at(105.0).keeps_up());
        // What waits for the session fills its batches.
        near(at(150.0).rate, 2.0 / 0.020, 0.02);
    }
}
