//! Every order of steps, crashes and late writes that a small job can meet; see [`model`].

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]
#![allow(clippy::print_stdout, reason = "the size of the check is a result")]

mod model;

use std::time::Instant;

use model::properties::{ENDS, FORWARD, KEPT, NAMED, OWN};
use model::world::Faults;
use model::{Mistake, Protocol};
use stateright::{Checker, HasDiscoveries, Model};

/// A parameter of the check; a variable such as `MODEL_IMAGES` sets a larger one.
fn size(name: &str, default: u8) -> u8 {
    let given = std::env::var(format!("MODEL_{name}"));
    given.map_or(default, |given| given.parse().unwrap())
}

/// Two sinks at one job, with all faults.
fn two_sinks(claims: bool) -> Protocol {
    Protocol {
        images: size("IMAGES", 2),
        jobs: 1,
        ingests: usize::from(size("INGESTS", 1)),
        sinks: 2,
        claims,
        faults: Faults {
            sink_crashes: size("SINK_CRASHES", 1),
            leases_lost: size("LEASES_LOST", 1),
            // Under a claim a PUT that is sent again only writes the same again.
            answers_lost: if claims { 0 } else { size("ANSWERS_LOST", 1) },
            ..Faults::default()
        },
        ..Protocol::default()
    }
}

/// Two ingests at one job, with all faults.
fn two_ingests() -> Protocol {
    Protocol {
        ingests: 2,
        sinks: 1,
        faults: Faults {
            ingest_crashes: size("INGEST_CRASHES", 2),
            listings_lost: size("LISTINGS_LOST", 2),
            forgotten: size("FORGOTTEN", 1),
            sink_crashes: 1,
            ..Faults::default()
        },
        ..two_sinks(false)
    }
}

/// Two of each at one job.
fn two_of_each() -> Protocol {
    Protocol {
        images: size("IMAGES_OF_TWO", 2),
        ingests: 2,
        faults: Faults {
            ingest_crashes: 1,
            listings_lost: 1,
            sink_crashes: 1,
            leases_lost: 1,
            ..Faults::default()
        },
        ..two_sinks(false)
    }
}

/// A job is cancelled at any moment, and another one submitted for the same output.
fn overwritten(claims: bool) -> Protocol {
    let two_sinks = two_sinks(claims);
    Protocol {
        images: size("IMAGES_OVERWRITTEN", if claims { 1 } else { 2 }),
        jobs: 2,
        // Listing touches no other job, so both come listed.
        ingests: 0,
        faults: Faults {
            answers_lost: 0,
            ..two_sinks.faults
        },
        ..two_sinks
    }
}

/// Visits every state.
#[track_caller]
fn assert_holds(name: &str, protocol: Protocol) {
    let begun = Instant::now();
    let checker = protocol.checker().threads(2).spawn_bfs().join();
    println!(
        "{name}: {} states, {} steps, depth {}, {:.1?}",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        begun.elapsed()
    );
    checker.assert_properties();
}

/// Finds a way in which this mistake breaks this property.
#[track_caller]
fn assert_breaks(mistake: Mistake, protocol: Protocol, broken: &'static str) {
    let begun = Instant::now();
    let protocol = Protocol {
        mistake: Some(mistake),
        ..protocol
    };
    let checker = protocol
        .checker()
        .finish_when(HasDiscoveries::AllOf([broken].into()))
        .spawn_bfs()
        .join();
    let path = checker.discovery(broken);
    let path = path.unwrap_or_else(|| panic!("{mistake:?} does not break \"{broken}\""));
    println!(
        "{mistake:?} breaks \"{broken}\", found after {} states, {:.1?}:",
        checker.unique_state_count(),
        begun.elapsed()
    );
    for step in path.into_actions() {
        println!("    {step:?}");
    }
}

#[test]
fn each_row_is_written_once_where_preconditions_hold() {
    assert_holds("two sinks, preconditions", two_sinks(false));
    let three_images = Protocol {
        images: 3,
        ingests: 0,
        ..two_sinks(false)
    };
    assert_holds("two sinks, three images, preconditions", three_images);
}

#[test]
fn each_row_is_written_once_where_preconditions_are_ignored() {
    assert_holds("two sinks, claims", two_sinks(true));
}

#[test]
fn each_image_is_listed_by_two_ingests() {
    assert_holds("two ingests", two_ingests());
}

#[test]
fn each_row_is_written_once_with_two_of_each() {
    assert_holds("two of each, preconditions", two_of_each());
}

#[test]
fn an_overwriting_job_has_its_own_rows_where_preconditions_hold() {
    assert_holds("overwritten, preconditions", overwritten(false));
}

#[test]
fn an_overwriting_job_has_its_own_rows_where_preconditions_are_ignored() {
    assert_holds("overwritten, claims", overwritten(true));
}

/// R4: a zombie ingest writes its old checkpoint over `ended`, and dies: the job never ends.
#[test]
fn the_checker_finds_a_checkpoint_that_is_written_blindly() {
    assert_breaks(Mistake::BlindCheckpoint, two_ingests(), FORWARD);
    assert_breaks(Mistake::BlindCheckpoint, two_ingests(), ENDS);
}

/// R5: the late PUT of a cancelled job lands after the clear.
#[test]
fn the_checker_finds_a_late_part_of_a_cancelled_job() {
    for claims in [false, true] {
        assert_breaks(Mistake::LeasePerJob, overwritten(claims), OWN);
    }
}

#[test]
fn the_checker_finds_a_removal_by_a_sink_whose_job_has_lost_the_output() {
    assert_breaks(Mistake::UncheckedRemoval, overwritten(false), KEPT);
}

/// A sink that was stopped in a takeover writes its record over the one of a job that is complete.
#[test]
fn the_checker_finds_a_record_that_is_written_blindly() {
    assert_breaks(Mistake::BlindRecord, overwritten(false), NAMED);
}

/// A zombie commits and acknowledges the last rows after its heir has read what is committed.
#[test]
fn the_checker_finds_an_heir_that_waits_for_rows_that_are_committed() {
    assert_breaks(Mistake::ReadOnce, two_sinks(false), ENDS);
}

#[test]
fn the_checker_finds_an_ack_without_a_confirmed_claim() {
    assert_breaks(Mistake::UnconfirmedClaim, two_sinks(true), KEPT);
}
