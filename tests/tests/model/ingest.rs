//! Listing a job's source.

use super::world::{JobState, World};
use super::{Mistake, Protocol};

/// What an ingest does.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Ingest {
    Idle,
    Lists(Listing),
}

/// What an ingest knows of the job that it lists.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Listing {
    pub(crate) job: usize,
    /// Whether its fence is the one in the record.
    pub(crate) holds: bool,
    /// The next index to publish: what is before it is stored in the broker.
    pub(crate) place: u8,
    /// What it has written to the record.
    pub(crate) saved: u8,
    /// Whether it has written the end.
    pub(crate) ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IngestStep {
    /// Takes the lease of a job whose message came, and reads the checkpoint.
    Take(usize),
    /// The same, while another process lives that believes it has the lease.
    TakeFromLiving(usize),
    /// Acknowledges the message of a job that is listed or has ended.
    Settle(usize),
    /// Publishes the next image and waits until it is stored.
    Publish,
    /// The same, of an image that was published long ago: the broker stores it again.
    PublishForgotten,
    /// Writes its place to the record.
    Checkpoint,
    /// Writes to the record that all is listed.
    End,
    /// Sees that the job has ended, or that another has the lease.
    GiveUp,
    /// Dies.
    Crash,
}

impl Protocol {
    pub(crate) fn ingest_steps(
        &self,
        world: &World,
        number: usize,
        offer: &mut dyn FnMut(IngestStep),
    ) {
        let Ingest::Lists(listing) = &world.ingests[number] else {
            for (index, job) in world.jobs.iter().enumerate().filter(|(_, job)| job.message) {
                if job.state != JobState::Running || job.ended {
                    offer(IngestStep::Settle(index));
                } else if !world.is_listed(index) {
                    offer(IngestStep::Take(index));
                } else if world.faults.listings_lost > 0 {
                    offer(IngestStep::TakeFromLiving(index));
                }
            }
            return;
        };
        let job = &world.jobs[listing.job];
        if world.faults.ingest_crashes > 0 {
            offer(IngestStep::Crash);
        }
        if job.state != JobState::Running || self.lost_listing(world, number) {
            offer(IngestStep::GiveUp);
        }
        if job.state != JobState::Running {
            return;
        }
        if listing.ended {
            offer(IngestStep::Settle(listing.job));
            return;
        }
        if listing.place < self.images {
            offer(IngestStep::Publish);
            let known = job.published & !job.queue & (1 << listing.place) != 0;
            if known && world.faults.forgotten > 0 {
                offer(IngestStep::PublishForgotten);
            }
        }
        if listing.place > listing.saved {
            offer(IngestStep::Checkpoint);
        }
        if listing.saved == self.images {
            offer(IngestStep::End);
        }
    }

    pub(crate) fn fair_ingest_step(&self, world: &World, number: usize) -> Option<IngestStep> {
        let mut steps = Vec::new();
        self.ingest_steps(world, number, &mut |step| steps.push(step));
        steps.into_iter().find(|step| {
            !matches!(
                step,
                IngestStep::Crash | IngestStep::TakeFromLiving(_) | IngestStep::PublishForgotten
            )
        })
    }

    fn lost_listing(&self, world: &World, number: usize) -> bool {
        match &world.ingests[number] {
            Ingest::Lists(listing) => !listing.holds && !self.is(Mistake::BlindCheckpoint),
            Ingest::Idle => false,
        }
    }

    pub(crate) fn ingest(&self, world: &mut World, number: usize, step: IngestStep) {
        let lost = self.lost_listing(world, number);
        if let IngestStep::TakeFromLiving(index) = step {
            world.faults.listings_lost -= 1;
            for ingest in &mut world.ingests {
                if let Ingest::Lists(listing) = ingest
                    && listing.job == index
                {
                    listing.holds = false;
                }
            }
        }
        let ingest = &mut world.ingests[number];
        match step {
            IngestStep::Take(index) | IngestStep::TakeFromLiving(index) => {
                let job = &world.jobs[index];
                *ingest = Ingest::Lists(Listing {
                    job: index,
                    holds: true,
                    place: job.listed,
                    saved: job.listed,
                    ended: false,
                });
                return;
            }
            IngestStep::Settle(index) => {
                world.jobs[index].message = false;
                *ingest = Ingest::Idle;
                return;
            }
            IngestStep::Crash => {
                world.faults.ingest_crashes -= 1;
                *ingest = Ingest::Idle;
                return;
            }
            IngestStep::GiveUp => {
                *ingest = Ingest::Idle;
                return;
            }
            _ => {}
        }
        let Ingest::Lists(listing) = ingest else {
            return;
        };
        let job = &mut world.jobs[listing.job];
        let image = 1 << listing.place;
        match step {
            IngestStep::Publish => {
                if job.published & image == 0 {
                    job.queue |= image;
                    job.published |= image;
                }
                listing.place += 1;
            }
            IngestStep::PublishForgotten => {
                world.faults.forgotten -= 1;
                job.queue |= image;
                listing.place += 1;
            }
            // The record is not as this process left it: another has the lease.
            IngestStep::Checkpoint | IngestStep::End if lost => *ingest = Ingest::Idle,
            IngestStep::Checkpoint => {
                listing.saved = listing.place;
                job.listed = listing.place;
                // All of the record is written, as this process knows it.
                job.ended = false;
            }
            IngestStep::End => {
                listing.ended = true;
                job.ended = true;
            }
            _ => {}
        }
    }
}
