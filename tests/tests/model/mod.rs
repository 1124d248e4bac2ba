//! The protocol of a job as a model: what is decided where, so that each image gets one row.
//!
//! This is the statement of the protocol, in the order of the design's section "exactly one row per
//! image". The code of the product follows it; where the two differ, one of them is wrong.
//!
//! 1. **At least once** ([`world`]). From its task to its result an image is one message that leaves
//!    the broker when it is acknowledged, and not before. Each stage between publishes, waits until
//!    that is stored, and acknowledges then, so the stages are one such queue. A message may be
//!    delivered to any number of sinks at any time. A publish that repeats one is dropped, or, when
//!    the broker has forgotten it, stored again.
//! 2. **One ingest lists a job, one sink writes it** ([`ingest`], [`sink`]). Both leases lie in the
//!    job's record of progress, each with a fence that grows with each holder. A holder writes to
//!    the record under its fence; the model only keeps whose fence it is. A lease may be lost at any time, whatever its holder is
//!    about to do: it may have been suspended for hours, and does not know.
//! 3. **A part is its own commit record** on a store that honours preconditions: it is written if
//!    its number is free. Elsewhere a number is claimed in the broker by compare-and-set, the part
//!    written under a name with the claim's revision, and the claim confirmed; a part counts when
//!    its claim is confirmed. Messages are acknowledged after that.
//! 4. PostgreSQL is not modelled: its transactions leave nothing to choose.
//! 5. **The checkpoint** follows what is published: the listing's place and its end never go back.
//! 6. **The end**: a job is complete when its listing has ended and each index is committed. A sink
//!    that misses rows and gets no messages reads again what is committed: one that has lost the
//!    lease may have committed and acknowledged them after this one read.
//!    Who ends a job, as complete or cancelled, takes its fences: its record of progress stays as it
//!    is, though a zombie may see parts that the next job has removed.
//! 7. **Overwriting** is decided once. A job takes the record of its output when the job before has
//!    ended, removes what other runs left, and begins; each part has the run in its name. Who
//!    removes parts lists them first, then makes sure that the output is still its job's, and then
//!    removes what it listed: what a later run writes is not among that. The record at the output
//!    takes the place of the one that was found there, if that is there still; a store that ignores
//!    preconditions lets a zombie put its own there in between, and the job that has the output
//!    opens it again when it finds another record than its own.
//!
//! # What is assumed
//! - A record of the broker changes only by compare-and-set. One that fails changes nothing and is
//!   tried again on what is there then, so reading and the compare-and-set that succeeds are one
//!   step. What a process remembers from before (its place, its fence, what is committed) may be old.
//! - The store is consistent: what was written is listed at once. A PUT of a process that died or
//!   gave up may land at any later time, or never. An answer may be lost though the PUT was applied.
//! - A process does one step at a time, and between any two of them anything may happen. It may end
//!   at any point, and starts again knowing nothing.
//! - What a zombie ingest does for a job that has ended reaches subjects and records of that job
//!   only, so it is left out. So are the marks `_SUCCESS` and `_summary.json`, which follow the
//!   record; a part that comes after the end of its run stays where it is, and does not count.
//! - The numbers of crashes, lost leases, forgotten publishes and lost answers are bounded; see
//!   [`world::Faults`]. The broker keeps what it has stored.

pub(crate) mod ingest;
pub(crate) mod properties;
pub(crate) mod sink;
pub(crate) mod world;

use std::collections::HashSet;
use std::sync::Mutex;

use stateright::{Model, Property};

use ingest::IngestStep;
use sink::SinkStep;
use world::{Faults, JobState, World};

/// A configuration of the protocol.
#[derive(Debug, Default)]
pub(crate) struct Protocol {
    /// Images of each job.
    pub(crate) images: u8,
    /// Jobs one after the other at one output; the second one overwrites.
    pub(crate) jobs: usize,
    /// Ingests and sinks.
    pub(crate) ingests: usize,
    pub(crate) sinks: usize,
    /// Whether the store ignores preconditions, so that numbers of parts are claimed.
    pub(crate) claims: bool,
    /// What may go wrong.
    pub(crate) faults: Faults,
    /// A mistake to be found.
    pub(crate) mistake: Option<Mistake>,
    /// States from which the job is known to end.
    pub(crate) ends: Mutex<HashSet<u64>>,
}

/// Mistakes that the product has made, or could make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// R4: the listing's checkpoint is written without compare-and-set and without a fence.
    BlindCheckpoint,
    /// R5: a lease for each job and none for the output, and names of parts without the run.
    LeasePerJob,
    /// Who removes parts does not look again whose output it is after it has listed them.
    UncheckedRemoval,
    /// A sink writes its record whatever record is there.
    BlindRecord,
    /// A sink reads once what is committed, and waits for messages that nobody has any more.
    ReadOnce,
    /// A sink acknowledges a part under a claim without confirming the claim.
    UnconfirmedClaim,
}

/// A step of somebody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// The operator cancels the first job.
    Cancel,
    /// The operator submits the next job for the same output, with `--overwrite`.
    Submit,
    /// An ingest's step.
    Ingest(usize, IngestStep),
    /// A sink's step.
    Sink(usize, SinkStep),
    /// A PUT of a process that is gone lands.
    LateLands(usize),
    /// A PUT of a process that is gone never lands.
    LateVanishes(usize),
}

impl Protocol {
    /// All indices.
    pub(crate) fn all(&self) -> u8 {
        (1 << self.images) - 1
    }

    pub(crate) fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn apply(&self, world: &mut World, action: Action) {
        match action {
            Action::Cancel => world.end(0, JobState::Cancelled),
            Action::Submit => self.submit(world, 1),
            Action::Ingest(number, step) => self.ingest(world, number, step),
            Action::Sink(number, step) => self.sink(world, number, step),
            Action::LateLands(number) => {
                let put = world.late.remove(number);
                self.put(world, &put);
            }
            Action::LateVanishes(number) => {
                world.late.remove(number);
            }
        }
        world.normalize();
    }

    /// What happens next when nothing goes wrong any more and everybody works; `None` at the end.
    fn fair_step(&self, world: &World) -> Option<Action> {
        if !world.late.is_empty() {
            return Some(Action::LateLands(0));
        }
        let sink = |number| Some(Action::Sink(number, self.fair_sink_step(world, number)?));
        let ingest = |number| {
            Some(Action::Ingest(
                number,
                self.fair_ingest_step(world, number)?,
            ))
        };
        let step = (0..self.sinks).find_map(sink);
        step.or_else(|| (0..self.ingests).find_map(ingest))
    }
}

impl Model for Protocol {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if self.jobs > 1 {
            if world.jobs[0].state == JobState::Running {
                actions.push(Action::Cancel);
            } else if world.jobs[1].state == JobState::Absent {
                actions.push(Action::Submit);
            }
        }
        for number in 0..self.ingests {
            self.ingest_steps(world, number, &mut |step| {
                actions.push(Action::Ingest(number, step));
            });
        }
        for number in 0..self.sinks {
            self.sink_steps(world, number, &mut |step| {
                actions.push(Action::Sink(number, step));
            });
        }
        for number in 0..world.late.len() {
            actions.extend([Action::LateLands(number), Action::LateVanishes(number)]);
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        self.apply(&mut next, action);
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all()
    }
}
