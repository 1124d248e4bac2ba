//! A run that is killed at any moment still has the right number of rows.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]
#![allow(clippy::print_stdout, reason = "a failed test shows its seed")]

use std::fs;
use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use trommel_tests::{Folder, Trommel, assert_code, assert_each_index_once, rows};

/// A job that commits small parts often and works slowly enough to be caught at it.
fn slow_job(images: &Path, output: &Path) -> Trommel {
    Trommel::classify(images, output)
        .arg("--preprocess-threads")
        .arg("1")
        .arg("--instances")
        .arg("1")
        .env("TROMMEL_SINK__PART_ROWS", "150")
        .env("TROMMEL_SINK__PART_INTERVAL", "40ms")
}

/// The parts that a job has committed while it has not ended, in the folder or next to the single file.
fn parts(output: &Path) -> usize {
    let mut beside = output.as_os_str().to_owned();
    beside.push(".parts");
    let is_part = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with("part-")
    };
    let folders = [output, beside.as_ref()].map(fs::read_dir);
    let entries = folders.into_iter().flatten().flatten().flatten();
    entries.filter(is_part).count()
}

/// Kills a job of 3,000 images 20 times and runs it to its end.
fn kill_twenty_times(name: &str) {
    const IMAGES: usize = 3000;
    const KILLS: usize = 20;
    let seed = rand::rng().random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);

    let folder = Folder::with_digits(IMAGES);
    let mut round = 0;
    let mut output = folder.path(&format!("{round}-{name}"));
    let mut kills = 0;
    let mut kills_with_rows = 0;
    while kills < KILLS {
        let before = parts(&output);
        let mut child = slow_job(&folder.images(), &output).spawn();
        // Every other kill waits for rows of this process, however slow the machine is.
        if kills % 2 == 1 {
            while parts(&output) == before && child.try_wait().unwrap().is_none() {
                sleep(Duration::from_millis(1));
            }
        }
        let wait = if kills % 2 == 1 { 50 } else { 400 };
        sleep(Duration::from_millis(random.random_range(0..wait)));
        match child.try_wait().unwrap() {
            None => {
                child.kill().unwrap();
                // By the signal: it had not ended by itself.
                if child.wait().unwrap().code().is_none() {
                    kills += 1;
                    kills_with_rows += usize::from(parts(&output) > 0);
                }
            }
            // It was done before it could be killed: the rows have to be right, and the next one
            // is killed.
            Some(status) => {
                assert!(status.success(), "seed {seed}: {status}");
                assert_each_index_once(&rows(&output), IMAGES);
                round += 1;
                assert!(
                    round < 100,
                    "seed {seed}: no job lives long enough to be killed"
                );
                output = folder.path(&format!("{round}-{name}"));
            }
        }
    }
    assert!(
        kills_with_rows > 0,
        "seed {seed}: no kill hit a job that had rows"
    );
    let last = slow_job(&folder.images(), &output).run();
    assert_code(&last, 0);
    let rows = rows(&output);
    assert_each_index_once(&rows, IMAGES);
    for (number, row) in rows.iter().enumerate() {
        assert!(
            row.uri.contains(&format!("{number:06}.")),
            "seed {seed}: row {number} is of {}",
            row.uri
        );
    }
}

#[test]
fn a_parquet_file_survives_twenty_kills() {
    kill_twenty_times("rows.parquet");
}

#[test]
fn a_csv_file_survives_twenty_kills() {
    kill_twenty_times("rows.csv");
}

#[test]
fn a_folder_of_parts_survives_twenty_kills() {
    kill_twenty_times("rows");
}

#[test]
fn an_interrupt_commits_what_is_in_hand_and_the_same_command_goes_on() {
    let folder = Folder::with_digits(3000);
    let output = folder.path("rows");
    let mut interrupted = false;
    for _ in 0..50 {
        let before = parts(&output);
        let mut child = slow_job(&folder.images(), &output).spawn();
        let works = |child: &mut Child| {
            let holder = fs::read_to_string(output.join("_lock")).unwrap_or_default();
            holder == child.id().to_string() || child.try_wait().unwrap().is_some()
        };
        while !works(&mut child) {
            sleep(Duration::from_millis(1));
        }
        // It has committed something of its own.
        while parts(&output) == before && child.try_wait().unwrap().is_none() {
            sleep(Duration::from_millis(1));
        }
        if child.try_wait().unwrap().is_none() {
            let pid = Pid::from_child(&child);
            kill_process(pid, Signal::INT).unwrap();
        }
        let status = child.wait().unwrap();
        if status.success() {
            break;
        }
        assert_eq!(
            status.code(),
            Some(1),
            "a stopped job ends with 1, not by the signal"
        );
        interrupted = true;
    }
    assert!(
        interrupted,
        "the job was done before it could be interrupted"
    );
    assert_each_index_once(&rows(&output), 3000);
}

#[test]
fn two_processes_never_write_one_output() {
    let folder = Folder::with_digits(3000);
    let output = folder.path("rows.parquet");
    let mut first = slow_job(&folder.images(), &output).spawn();
    while !folder.path("rows.parquet.parts/_job.json").exists() {
        sleep(Duration::from_millis(1));
    }
    // It holds the output and does not end meanwhile.
    assert!(first.try_wait().unwrap().is_none());
    kill_process(Pid::from_child(&first), Signal::STOP).unwrap();
    let second = slow_job(&folder.images(), &output).run();
    kill_process(Pid::from_child(&first), Signal::CONT).unwrap();
    let said = trommel_tests::stderr(&second);
    assert_code(&second, 2);
    assert!(said.contains("another trommel process"), "{said}");
    assert!(first.wait().unwrap().success());
    assert_each_index_once(&rows(&output), 3000);
}

#[test]
fn a_source_that_changed_under_a_job_is_refused() {
    let folder = Folder::with_digits(3000);
    let output = folder.path("rows");
    let mut child = slow_job(&folder.images(), &output).spawn();
    let has_part = || {
        let entries = std::fs::read_dir(&output).into_iter().flatten();
        let mut names = entries.map(|entry| entry.unwrap().file_name());
        names.any(|name| name.to_string_lossy().starts_with("part-00000000-"))
    };
    while !has_part() {
        sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        !output.join("_SUCCESS").exists(),
        "the job was done before it could be killed"
    );

    // Another name for the first image, in the same place of the listing.
    let entries = std::fs::read_dir(folder.images())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let first = entries.min().unwrap();
    std::fs::rename(&first, first.with_extension("jpeg")).unwrap();
    let run = slow_job(&folder.images(), &output).run();
    assert_code(&run, 1);
    let said = trommel_tests::stderr(&run);
    assert!(
        said.contains("other images than before") && said.contains("--overwrite"),
        "{said}"
    );
}
