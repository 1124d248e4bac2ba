//! `trommel tune`: settings are searched, and what was kept is taken up by others. No figure is compared with
//! another: whether settings are faster is shown on made-up machines, next to the search.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroUsize;
use std::time::Duration;

use serde_json::Value;
use trommel_tests::{Folder, Trommel, assert_code, digits_model, stderr};
use trommel_worker::{InferConfig, Tuned, TunedProfile};

/// What the log says of a profile that is taken.
const TAKEN: &str = "taking the settings that trommel tune has found";

fn parsed(stdout: &[u8]) -> Value {
    serde_json::from_slice(stdout).unwrap()
}

/// A command with a cache of its own, and one value for all settings but one.
fn tune(folder: &Folder) -> Trommel {
    let fixed = [
        "--max-batch",
        "2",
        "--instances",
        "1",
        "--intra-threads",
        "1",
    ];
    Trommel::new([
        "tune",
        "--json",
        "--images",
        "32",
        "--preprocess-threads",
        "1",
    ])
    .arg(folder.images())
    .arg("--model")
    .arg(digits_model())
    .args(fixed)
    .env("XDG_CACHE_HOME", folder.path("cache").to_str().unwrap())
    .env("TROMMEL_INFER__MAX_WAIT", "5ms")
}

#[test]
fn settings_are_tried_and_the_page_shows_them() {
    let folder = Folder::with_digits(40);
    let page = folder.path("tune.html");
    let run = tune(&folder).arg("--page").arg(&page).run();
    assert_code(&run, 0);
    let found = parsed(&run.stdout);
    assert_eq!(found["grid"], 3, "images held alone are not fixed: {found}");
    for settings in [&found["default"], &found["best"]] {
        assert_eq!(settings["max-batch"], 2);
        assert_eq!(settings["instances"], 1);
        assert_eq!(settings["max-wait"], "5ms");
    }
    let tried = found["tried"].as_array().unwrap();
    assert!(tried.len() >= 3, "{tried:?}");
    let rate = |one: &Value| one["images_per_second"].as_f64().unwrap();
    assert!(tried.iter().all(|one| rate(one) > 0.0));
    // A profile is written where, and only where, something better was found.
    let is_better = found["choice"]["better"].is_object();
    let kept = found["profile"].as_str();
    assert_eq!(kept.is_some(), is_better, "{found}");
    assert!(kept.is_none_or(|path| std::path::Path::new(path).exists()));
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.contains("<svg") && page.contains("frontier"));
}

#[test]
fn a_time_of_answer_that_cannot_be_kept_is_said_and_nothing_is_written() {
    let folder = Folder::with_digits(4);
    let asked = ["--p95", "1ns", "--rate", "40", "--duration", "1s"];
    let run = tune(&folder).args(asked).run();
    assert_code(&run, 3);
    let found = parsed(&run.stdout);
    assert_eq!(found["choice"], "nothing");
    assert!(found["profile"].is_null());
    assert!(found["tried"][0]["p95_milliseconds"].as_f64().unwrap() > 0.0);

    let run = Trommel::new(["tune", "x/", "--model", "y", "--p95", "1ms"]).run();
    assert_code(&run, 2);
    assert!(stderr(&run).contains("--rate"), "{}", stderr(&run));
}

/// The version of the digits' model.
fn version() -> String {
    let run = Trommel::new(["model", "inspect", "--json"])
        .arg(digits_model())
        .run();
    assert_code(&run, 0);
    let found = parsed(&run.stdout);
    found["model"]["version"].as_str().unwrap().to_owned()
}

/// Writes a profile that nobody would measure.
fn write_profile(folder: &Folder) {
    let config = InferConfig {
        cache: Some(folder.path("cache/trommel")),
        ..InferConfig::default()
    };
    let number = |number| NonZeroUsize::new(number).unwrap();
    let profile = TunedProfile {
        model: "digits".to_owned(),
        model_version: version(),
        objective: "most throughput".to_owned(),
        settings: Tuned {
            max_batch: number(5),
            max_wait: Duration::from_millis(7),
            instances: number(3),
            intra_threads: number(1),
            preprocess_threads: number(2),
            max_in_flight: number(9),
        },
    };
    let path = TunedProfile::path(&config, &profile.model_version).unwrap();
    profile.write(&path).unwrap();
}

#[test]
fn a_profile_is_taken_up_and_a_flag_wins() {
    let folder = Folder::with_digits(20);
    write_profile(&folder);
    let classify = |name: &str, flags: &[&str]| {
        let run = Trommel::classify(&folder.images(), &folder.path(name))
            .args(["--json", "--log", "info"])
            .args(flags)
            .env("XDG_CACHE_HOME", folder.path("cache").to_str().unwrap())
            .run();
        assert_code(&run, 0);
        let engine = parsed(&run.stdout)["engine"].clone();
        let of = |name: &str| engine[name].as_u64().unwrap();
        (
            of("max_batch"),
            of("instances"),
            stderr(&run).contains(TAKEN),
        )
    };
    assert_eq!(classify("taken.jsonl", &[]), (5, 3, true));
    let larger = ["--max-batch", "6"];
    assert_eq!(classify("larger.jsonl", &larger), (6, 3, true));
    // The size was found for other sessions.
    let single = ["--instances", "1", "--max-batch", "4"];
    assert_eq!(classify("single.jsonl", &single), (4, 1, true));
    let without = ["--no-profile", "--instances", "2", "--max-batch", "1"];
    assert_eq!(classify("without.jsonl", &without), (1, 2, false));
}

#[test]
fn a_profile_with_absurd_settings_is_named_and_not_taken() {
    let folder = Folder::with_digits(4);
    write_profile(&folder);
    let tuned = folder.path("cache/trommel/tuned");
    let file = tuned.read_dir().unwrap().next().unwrap().unwrap().path();
    let text = std::fs::read_to_string(&file).unwrap();
    let absurd = text.replace("\"instances\": 3", "\"instances\": 3000000");
    assert_ne!(absurd, text);
    std::fs::write(&file, absurd).unwrap();
    let run = Trommel::classify(&folder.images(), &folder.path("rows.jsonl"))
        .args(["--json", "--log", "info"])
        .env("XDG_CACHE_HOME", folder.path("cache").to_str().unwrap())
        .run();
    assert_code(&run, 0);
    let said = stderr(&run);
    let name = file.file_name().unwrap().to_str().unwrap();
    for words in [name, "settings.instances is 3000000", "from 1 to 1024"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!said.contains(TAKEN), "{said}");
}

#[test]
fn what_cannot_be_tuned_with_is_named() {
    let run = Trommel::new(["tune", "-", "--model"])
        .arg(digits_model())
        .run();
    assert_code(&run, 2);
    assert!(stderr(&run).contains("standard input"), "{}", stderr(&run));

    let folder = Folder::new();
    let broken = folder.path("broken");
    std::fs::create_dir(&broken).unwrap();
    let tune_broken = || {
        let run = Trommel::new(["tune", "--images", "32", "--model"]);
        let run = run.arg(digits_model()).arg(&broken);
        run.env("XDG_CACHE_HOME", folder.path("cache").to_str().unwrap())
            .run()
    };
    std::fs::write(broken.join("no-image.png"), "no image").unwrap();
    let run = tune_broken();
    assert_code(&run, 1);
    let said = stderr(&run);
    for words in ["none of the 1 images", "no-image.png"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!said.contains("too few"), "{said}");
}
