//! What holds in every state.

use std::hash::{DefaultHasher, Hash, Hasher};

use stateright::Property;

use super::Protocol;
use super::world::{Faults, Job, JobState, Part, World};

/// No row is doubled.
pub(crate) const ONCE: &str = "no index is committed twice among the parts that count";
/// No row is another job's.
pub(crate) const OWN: &str = "every part that counts belongs to the current run";
/// No row is lost, seen at once.
pub(crate) const KEPT: &str = "an index whose message is acknowledged is in a part that counts";
/// No row is lost, seen at the end.
pub(crate) const WHOLE: &str = "a complete job has all rows";
/// The output of a complete job is found again.
pub(crate) const NAMED: &str = "the record at the output names the complete job that has it";
/// R4, R11.
pub(crate) const FORWARD: &str = "what the record says of progress never goes backwards";
/// Liveness.
pub(crate) const ENDS: &str = "from here the job ends when nothing goes wrong any more";

pub(crate) fn all() -> Vec<Property<Protocol>> {
    vec![
        Property::always(ONCE, |protocol, world| {
            let mut seen = 0;
            protocol.counting(world).all(|part| {
                let once = seen & part.rows == 0;
                seen |= part.rows;
                once
            })
        }),
        Property::always(OWN, |protocol, world| {
            let current = protocol.current(world);
            protocol
                .counting(world)
                .all(|part| Some(part.run) == current)
        }),
        Property::always(KEPT, |protocol, world| {
            let Some(current) = protocol.current(world) else {
                return true;
            };
            let job = &world.jobs[current];
            let gone = job.published & !job.queue;
            job.state == JobState::Cancelled || gone & !rows(protocol, world) == 0
        }),
        Property::always(WHOLE, |protocol, world| {
            let current = protocol.current(world);
            current.is_none_or(|job| {
                world.jobs[job].state != JobState::Complete
                    || rows(protocol, world) == protocol.all()
            })
        }),
        Property::always(NAMED, |protocol: &Protocol, world: &World| {
            // A store that ignores preconditions lets a late record take the place of a newer one.
            protocol.claims
                || world.output.is_none_or(|job| {
                    world.jobs[job].state != JobState::Complete || world.record == Some(job)
                })
        }),
        Property::always(FORWARD, |_, world: &World| {
            let forward = |job: &Job| job.reached == (job.listed, job.ended, job.committed);
            world.jobs.iter().all(forward)
        }),
        Property::always(ENDS, ends),
        Property::sometimes(
            "the last job completes after all faults",
            |protocol: &Protocol, world: &World| {
                world.jobs[protocol.jobs - 1].state == JobState::Complete
                    && world.faults == Faults::default()
            },
        ),
        Property::sometimes(
            "a PUT is on its way when its job has ended",
            |_, world: &World| {
                let ended = |part: &Part| world.jobs[part.run].state != JobState::Running;
                world.late.iter().any(ended)
            },
        ),
    ]
}

/// The rows of the current job that count.
fn rows(protocol: &Protocol, world: &World) -> u8 {
    let current = protocol.current(world);
    let own = |part: &&Part| Some(part.run) == current;
    protocol
        .counting(world)
        .filter(own)
        .fold(0, |rows, part| rows | part.rows)
}

/// Follows the one path on which nothing goes wrong and everybody works. Most states of it are known
/// from other paths.
fn ends(protocol: &Protocol, world: &World) -> bool {
    const STEPS: usize = 1000;
    let mut path = Vec::new();
    let mut world = world.clone();
    while path.len() < STEPS {
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        let state = hasher.finish();
        let mut known = protocol.ends.lock().expect("no check panics");
        let running = |job: &Job| job.state == JobState::Running;
        if known.contains(&state) || !world.jobs.iter().any(running) {
            path.push(state);
            known.extend(path);
            return true;
        }
        drop(known);
        path.push(state);
        let Some(action) = protocol.fair_step(&world) else {
            return false;
        };
        protocol.apply(&mut world, action);
    }
    false
}
