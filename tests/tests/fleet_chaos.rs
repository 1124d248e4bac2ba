//! A fleet under a seeded script of everything that goes wrong, and of what operators do meanwhile.
//!
//! The short run is part of `cargo test`. `make chaos SEED=7 MINUTES=30` runs the long one; `FAULTS=kill,stop`
//! limits that to some kinds.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]
#![allow(clippy::print_stdout, reason = "the script of faults is a result")]

mod fleet;

use std::time::Duration;

use fleet::Fleet;

/// The variable's value, or this default.
fn given<T: std::str::FromStr>(name: &str, default: T) -> T {
    let given = std::env::var(name).ok();
    given.map_or(default, |text| {
        let parsed = text.parse().ok();
        parsed.unwrap_or_else(|| panic!("{name}={text} is malformed"))
    })
}

/// What the short run does: one fault after the other, with time for each. Every other kind has a test of
/// its own, or is part of the long run.
const SHORT: [&str; 9] = [
    "kill",
    "store",
    "upgrade",
    "cut",
    "database",
    "model",
    "node",
    "stop",
    "overwrite",
];

#[test]
fn a_fleet_survives_faults() {
    if std::env::var_os("MINUTES").is_none() {
        Fleet::start(given("SEED", 11), 600, 30).survive(&SHORT);
    } else {
        let minutes: f64 = given("MINUTES", 10.0);
        let mut fleet = Fleet::start(given("SEED", rand::random()), 10_000, 300);
        fleet.torment(Duration::from_secs_f64(60.0 * minutes));
    }
}
