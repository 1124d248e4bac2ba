//! What is stored, and what each process knows.

use super::ingest::Ingest;
use super::sink::Sink;
use super::{Mistake, Protocol};

/// Indices as bits.
pub(crate) type Rows = u8;

/// What may still go wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Faults {
    /// Crashes of ingests.
    pub(crate) ingest_crashes: u8,
    /// Crashes of sinks.
    pub(crate) sink_crashes: u8,
    /// Listings taken from an ingest that lives.
    pub(crate) listings_lost: u8,
    /// Jobs taken from a sink that lives.
    pub(crate) leases_lost: u8,
    /// Repeated publishes that the broker does not recognise.
    pub(crate) forgotten: u8,
    /// PUTs that were applied and whose answer was lost.
    pub(crate) answers_lost: u8,
}

/// What the record of a job says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum JobState {
    #[default]
    Absent,
    Running,
    Cancelled,
    Complete,
}

/// A job: its record, its record of progress, and its messages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Job {
    pub(crate) state: JobState,
    /// Whether the message that asks for its listing is in the broker.
    pub(crate) message: bool,
    /// The listing's place.
    pub(crate) listed: u8,
    /// Whether the listing has ended.
    pub(crate) ended: bool,
    /// Rows that the record counts.
    pub(crate) committed: u8,
    /// Indices that were ever published.
    pub(crate) published: Rows,
    /// Indices whose message is in the broker.
    pub(crate) queue: Rows,
    /// Claims of part numbers, in their order.
    pub(crate) claims: Vec<Claim>,
    /// The largest that `listed`, `ended` and `committed` have been.
    pub(crate) reached: (u8, bool, u8),
}

/// Who may write a part of this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Claim {
    pub(crate) revision: u8,
    pub(crate) confirmed: bool,
}

/// The name of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Name {
    /// The run, unless names are without it.
    pub(crate) run: Option<usize>,
    pub(crate) number: u8,
    /// The claim's revision; 0 without claims.
    pub(crate) revision: u8,
}

/// A part in the store, or on its way there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Part {
    pub(crate) name: Name,
    /// Whose rows it has.
    pub(crate) run: usize,
    pub(crate) rows: Rows,
}

/// All there is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) jobs: [Job; 2],
    /// Which job may write to the output.
    pub(crate) output: Option<usize>,
    /// The store: whose record is there.
    pub(crate) record: Option<usize>,
    /// The store.
    pub(crate) parts: Vec<Part>,
    /// PUTs on their way, of processes that are gone or have given up.
    pub(crate) late: Vec<Part>,
    pub(crate) ingests: Vec<Ingest>,
    pub(crate) sinks: Vec<Sink>,
    pub(crate) faults: Faults,
}

impl World {
    pub(crate) fn new(protocol: &Protocol) -> Self {
        let mut world = Self {
            jobs: [Job::default(), Job::default()],
            output: None,
            record: None,
            parts: Vec::new(),
            late: Vec::new(),
            ingests: vec![Ingest::Idle; protocol.ingests],
            sinks: vec![Sink::Idle; protocol.sinks],
            faults: protocol.faults,
        };
        protocol.submit(&mut world, 0);
        world.normalize();
        world
    }

    /// Processes of one kind are alike: whichever of them does something, it is one state.
    pub(crate) fn normalize(&mut self) {
        self.ingests.sort_unstable();
        self.sinks.sort_unstable();
        self.parts.sort_unstable();
        self.late.sort_unstable();
        for job in &mut self.jobs {
            let (listed, ended, committed) = job.reached;
            job.reached = (
                listed.max(job.listed),
                ended || job.ended,
                committed.max(job.committed),
            );
        }
    }

    /// A job ends, and nobody writes to its record of progress any more.
    pub(crate) fn end(&mut self, job: usize, state: JobState) {
        self.jobs[job].state = state;
        for ingest in &mut self.ingests {
            if let Ingest::Lists(listing) = ingest {
                listing.holds &= listing.job != job;
            }
        }
        for sink in &mut self.sinks {
            if let Sink::Writes(session) = sink {
                session.holds &= session.job != job;
            }
        }
    }

    /// Whether a running process has the listing.
    pub(crate) fn is_listed(&self, job: usize) -> bool {
        let holds = |ingest: &Ingest| match ingest {
            Ingest::Idle => false,
            Ingest::Lists(listing) => listing.job == job && listing.holds,
        };
        self.ingests.iter().any(holds)
    }

    /// Whether a running process has the rows.
    pub(crate) fn is_written(&self, job: usize) -> bool {
        let holds = |sink: &Sink| match sink {
            Sink::Idle => false,
            Sink::Writes(session) => session.job == job && session.holds,
        };
        self.sinks.iter().any(holds)
    }
}

impl Protocol {
    /// A job is accepted; without ingests it comes with all its messages.
    pub(crate) fn submit(&self, world: &mut World, job: usize) {
        let job = &mut world.jobs[job];
        job.state = JobState::Running;
        job.message = self.ingests > 0;
        if self.ingests == 0 {
            (job.published, job.queue) = (self.all(), self.all());
            (job.listed, job.ended) = (self.images, true);
        }
    }

    /// Whose rows the output is to have.
    pub(crate) fn current(&self, world: &World) -> Option<usize> {
        if self.is(Mistake::LeasePerJob) {
            return world.record;
        }
        world.output.filter(|job| world.record == Some(*job))
    }

    /// The parts that a reader of the output takes as its rows.
    pub(crate) fn counting<'a>(&'a self, world: &'a World) -> impl Iterator<Item = &'a Part> {
        let current = self.current(world);
        world.parts.iter().filter(move |part| {
            let Some(run) = part.name.run else {
                return current.is_some();
            };
            current == Some(run) && self.counts(world, run, part.name)
        })
    }

    /// Whether a part of this run and name counts for the run.
    pub(crate) fn counts(&self, world: &World, run: usize, name: Name) -> bool {
        let claim = world.jobs[run].claims.get(usize::from(name.number));
        !self.claims
            || claim.is_some_and(|claim| claim.confirmed && claim.revision == name.revision)
    }

    /// A PUT arrives at the store. Whether it was applied.
    pub(crate) fn put(&self, world: &mut World, put: &Part) -> bool {
        if let Some(found) = world.parts.iter_mut().find(|part| part.name == put.name) {
            if self.claims {
                *found = *put;
            }
            return self.claims;
        }
        world.parts.push(*put);
        true
    }
}
