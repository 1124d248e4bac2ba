//! Committing a job's rows.

use super::world::{Claim, JobState, Name, Part, Rows, World};
use super::{Mistake, Protocol};

/// What a sink does.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Sink {
    Idle,
    Writes(Session),
}

/// What a sink knows of the job that it writes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Session {
    pub(crate) job: usize,
    /// Whether its fence is the one in the record.
    pub(crate) holds: bool,
    pub(crate) phase: Phase,
    /// Whose record it found at the output.
    pub(crate) found: Option<usize>,
    /// Indices that are committed.
    pub(crate) bitmap: Rows,
    /// The number of the next part.
    pub(crate) next: u8,
    /// The claim on that number that nobody confirmed.
    pub(crate) replaces: Option<u8>,
}

/// Where a sink is in its work.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Removes what other runs left, before the first row or after the last one.
    Removes { at_end: bool, removal: Removal },
    /// Is about to replace the record that it found by its own.
    Empty,
    /// Does so on a store that ignores preconditions, and has seen that it is still there.
    Records,
    /// Is about to read what is committed.
    Rebuilds,
    /// Takes messages.
    Ready,
    /// Has sent a part to the store.
    Puts(Part),
    /// Has written a part, and is about to confirm its claim.
    Confirms(Part),
    /// Has committed these rows, and is about to acknowledge them.
    Acks(Rows),
    /// Is about to write to the record that the job is complete.
    Completes,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Removal {
    Begins,
    Listed(Vec<Name>),
    Checked(Vec<Name>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SinkStep {
    /// Makes a job the one that may write to the output, after the job before has ended.
    TakeOutput(usize),
    /// Takes the lease of a job's rows.
    Take(usize),
    /// The same, while another process lives that believes it has the lease.
    TakeFromLiving(usize),
    /// The next step of opening, committing or finishing.
    Step,
    /// Makes a part of these rows.
    Commit(Rows),
    /// Acknowledges messages whose rows are committed.
    Drop,
    /// No message comes, and rows are missing: reads again what is committed.
    ReadAgain,
    /// Begins to finish a job whose rows are all committed.
    Finish,
    /// The PUT is applied, and the answer lost: it will be sent again.
    LoseAnswer,
    /// Sees that the job has ended, or that another has the lease.
    GiveUp,
    /// Dies.
    Crash,
}

impl Protocol {
    pub(crate) fn sink_steps(&self, world: &World, number: usize, offer: &mut dyn FnMut(SinkStep)) {
        let Sink::Writes(session) = &world.sinks[number] else {
            for (index, job) in world.jobs.iter().enumerate() {
                if job.state != JobState::Running {
                    continue;
                }
                let free = world
                    .output
                    .is_none_or(|other| world.jobs[other].state != JobState::Running);
                if world.output != Some(index) && !self.is(Mistake::LeasePerJob) {
                    if free {
                        offer(SinkStep::TakeOutput(index));
                    }
                } else if !world.is_written(index) {
                    offer(SinkStep::Take(index));
                } else if world.faults.leases_lost > 0 {
                    offer(SinkStep::TakeFromLiving(index));
                }
            }
            return;
        };
        let job = &world.jobs[session.job];
        if !session.holds || job.state != JobState::Running {
            offer(SinkStep::GiveUp);
        }
        if world.faults.sink_crashes > 0 {
            offer(SinkStep::Crash);
        }
        if session.phase != Phase::Ready {
            offer(SinkStep::Step);
            if matches!(session.phase, Phase::Puts(_)) && world.faults.answers_lost > 0 {
                offer(SinkStep::LoseAnswer);
            }
            return;
        }
        if job.queue & session.bitmap != 0 {
            offer(SinkStep::Drop);
        }
        let fresh = job.queue & !session.bitmap;
        for rows in (1..=fresh).rev().filter(|rows| rows & fresh == *rows) {
            offer(SinkStep::Commit(rows));
        }
        if job.ended && session.bitmap == self.all() {
            offer(SinkStep::Finish);
        }
        // Reading what it knows changes nothing.
        let mut again = session.clone();
        self.rebuild(world, &mut again);
        if job.ended && fresh == 0 && again.bitmap != session.bitmap && !self.is(Mistake::ReadOnce)
        {
            offer(SinkStep::ReadAgain);
        }
    }

    pub(crate) fn fair_sink_step(&self, world: &World, number: usize) -> Option<SinkStep> {
        let mut steps = Vec::new();
        self.sink_steps(world, number, &mut |step| steps.push(step));
        steps.into_iter().find(|step| {
            !matches!(
                step,
                SinkStep::Crash | SinkStep::TakeFromLiving(_) | SinkStep::LoseAnswer
            )
        })
    }

    pub(crate) fn sink(&self, world: &mut World, number: usize, step: SinkStep) {
        match step {
            SinkStep::TakeOutput(job) => world.output = Some(job),
            SinkStep::Take(job) => world.sinks[number] = self.open(world, job),
            SinkStep::TakeFromLiving(job) => {
                world.faults.leases_lost -= 1;
                for sink in &mut world.sinks {
                    if let Sink::Writes(session) = sink
                        && session.job == job
                    {
                        session.holds = false;
                    }
                }
                world.sinks[number] = self.open(world, job);
            }
            SinkStep::Crash => {
                world.faults.sink_crashes -= 1;
                leave(world, number);
            }
            SinkStep::GiveUp => leave(world, number),
            _ => {
                let Sink::Writes(mut session) = world.sinks[number].clone() else {
                    return;
                };
                let goes_on = match step {
                    SinkStep::Commit(rows) => self.claim(world, &mut session, rows),
                    SinkStep::Drop => {
                        world.jobs[session.job].queue &= !session.bitmap;
                        true
                    }
                    SinkStep::ReadAgain => {
                        session.phase = Phase::Rebuilds;
                        true
                    }
                    SinkStep::Finish => {
                        session.phase = Phase::Removes {
                            at_end: true,
                            removal: Removal::Begins,
                        };
                        true
                    }
                    SinkStep::LoseAnswer => {
                        world.faults.answers_lost -= 1;
                        if let Phase::Puts(part) = session.phase {
                            self.put(world, &part);
                        }
                        true
                    }
                    _ => self.step(world, &mut session),
                };
                world.sinks[number] = match goes_on {
                    true => Sink::Writes(session),
                    false => Sink::Idle,
                };
            }
        }
    }

    fn open(&self, world: &World, index: usize) -> Sink {
        Sink::Writes(Session {
            job: index,
            holds: true,
            phase: match world.record == Some(index) {
                true => Phase::Rebuilds,
                false => Phase::Removes {
                    at_end: false,
                    removal: Removal::Begins,
                },
            },
            found: world.record,
            bitmap: 0,
            next: 0,
            replaces: None,
        })
    }

    /// Begins a part of these rows; where preconditions are ignored its number is claimed first.
    fn claim(&self, world: &mut World, session: &mut Session, rows: Rows) -> bool {
        let mut revision = 0;
        if self.claims {
            let claims = &mut world.jobs[session.job].claims;
            let next = usize::from(session.next);
            let found = claims.get(next);
            let is_taken = found.is_some_and(|claim| claim.confirmed);
            if is_taken || found.map(|claim| claim.revision) != session.replaces {
                return false;
            }
            // Revisions only have to differ.
            revision = found.map_or(1, |claim| claim.revision + 1);
            claims.truncate(next);
            claims.push(Claim {
                revision,
                confirmed: false,
            });
            session.replaces = None;
        }
        session.phase = Phase::Puts(Part {
            name: Name {
                run: (!self.is(Mistake::LeasePerJob)).then_some(session.job),
                number: session.next,
                revision,
            },
            run: session.job,
            rows,
        });
        true
    }

    /// The next step of opening, committing or finishing. Whether it continues.
    fn step(&self, world: &mut World, session: &mut Session) -> bool {
        match session.phase.clone() {
            Phase::Removes { at_end, removal } => {
                return self.remove(world, session, at_end, removal);
            }
            Phase::Empty => {
                let own = Some(session.job);
                let is_blind = [Mistake::LeasePerJob, Mistake::BlindRecord]
                    .map(Some)
                    .contains(&self.mistake);
                if ![session.found, own].contains(&world.record) && !is_blind {
                    return false;
                }
                session.phase = match self.claims {
                    true => Phase::Records,
                    false => {
                        world.record = own;
                        Phase::Rebuilds
                    }
                };
            }
            Phase::Records => {
                world.record = Some(session.job);
                session.phase = Phase::Rebuilds;
            }
            Phase::Rebuilds => self.rebuild(world, session),
            Phase::Ready => {}
            Phase::Puts(part) => {
                if !self.put(world, &part) {
                    // Another sink has committed a part of this number, or this one has, and did
                    // not hear of it: it reads again what is committed.
                    return false;
                }
                session.phase = match self.claims {
                    true => Phase::Confirms(part),
                    false => Phase::Acks(part.rows),
                };
            }
            Phase::Confirms(part) => {
                let claim = &mut world.jobs[session.job].claims[usize::from(part.name.number)];
                if claim.revision != part.name.revision || claim.confirmed {
                    if !self.is(Mistake::UnconfirmedClaim) {
                        return false;
                    }
                } else {
                    claim.confirmed = true;
                }
                session.phase = Phase::Acks(part.rows);
            }
            Phase::Acks(rows) => {
                let job = &mut world.jobs[session.job];
                job.queue &= !rows;
                session.bitmap |= rows;
                if session.holds {
                    job.committed = count(session.bitmap);
                }
                session.next += 1;
                session.phase = Phase::Ready;
            }
            Phase::Completes => {
                if world.jobs[session.job].state == JobState::Running {
                    world.end(session.job, JobState::Complete);
                }
                return false;
            }
        }
        true
    }

    /// Reads which rows are committed.
    fn rebuild(&self, world: &World, session: &mut Session) {
        let run = (!self.is(Mistake::LeasePerJob)).then_some(session.job);
        for part in world.parts.iter().filter(|part| part.name.run == run) {
            if self.counts(world, session.job, part.name) {
                session.bitmap |= part.rows;
                session.next = session.next.max(part.name.number + 1);
            }
        }
        // Only the claim on the last number can be open.
        let open = world.jobs[session.job]
            .claims
            .get(usize::from(session.next));
        session.replaces = open.map(|claim| claim.revision);
        session.phase = Phase::Ready;
    }

    /// Removes parts of other runs, and those of this one that lost their claim.
    fn remove(
        &self,
        world: &mut World,
        session: &mut Session,
        at_end: bool,
        removal: Removal,
    ) -> bool {
        let names = match removal {
            Removal::Begins => self.foreign(world, session.job, at_end),
            Removal::Listed(names) => {
                let checks = ![Mistake::LeasePerJob, Mistake::UncheckedRemoval]
                    .map(Some)
                    .contains(&self.mistake);
                let own = Some(session.job);
                // At the end the record says it, where no late one can take its place.
                let expected = if at_end { own } else { session.found };
                let is_known = at_end && !self.claims;
                let is_ours = world.record == expected && (is_known || world.output == own);
                if checks && !is_ours {
                    return false;
                }
                let removal = Removal::Checked(names);
                session.phase = Phase::Removes { at_end, removal };
                return true;
            }
            Removal::Checked(names) => {
                world.parts.retain(|part| !names.contains(&part.name));
                Vec::new()
            }
        };
        session.phase = match (names.is_empty(), at_end) {
            (true, true) => Phase::Completes,
            (true, false) => Phase::Empty,
            (false, _) => Phase::Removes {
                at_end,
                removal: Removal::Listed(names),
            },
        };
        true
    }

    /// The parts that a job removes from its output.
    fn foreign(&self, world: &World, job: usize, at_end: bool) -> Vec<Name> {
        // In the old design the end removed nothing.
        if at_end && self.is(Mistake::LeasePerJob) {
            return Vec::new();
        }
        let names = world.parts.iter().map(|part| part.name);
        let foreign =
            |name: &Name| name.run != Some(job) || at_end && !self.counts(world, job, *name);
        names.filter(foreign).collect()
    }
}

/// A sink dies or gives up. What it has sent may still arrive.
fn leave(world: &mut World, number: usize) {
    if let Sink::Writes(session) = &world.sinks[number]
        && let Phase::Puts(part) = session.phase
    {
        world.late.push(part);
    }
    world.sinks[number] = Sink::Idle;
}

fn count(rows: Rows) -> u8 {
    u8::try_from(rows.count_ones()).expect("a byte has eight bits")
}
