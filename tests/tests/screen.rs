//! What a newcomer sees first: the demo, completions, manual pages, and messages about mistakes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;

use serde_json::Value;
use trommel_storage::testsuite::S3Server;
use trommel_tests::{Folder, Trommel, assert_code, digits_model, free_address, rows, stderr};

fn stdout(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_demo_needs_nothing_and_leaves_a_table_and_a_report() {
    let folder = Folder::new();
    let demo = || Trommel::new(["demo"]).current_dir(&folder.path("")).run();
    let run = demo();
    assert_code(&run, 0);
    let said = stdout(&run);
    let dir = folder.path("trommel-demo");
    assert_eq!(rows(&dir.join("results.parquet")).len(), 20);
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    assert!(page.contains("<b>20</b>images"));
    // The three commands to try next do what they say.
    let next = said.lines().filter_map(|line| {
        let command = line.strip_prefix("  trommel ")?.split(" # ").next()?;
        Some(
            command
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>(),
        )
    });
    let mut next: Vec<_> = next.collect();
    assert_eq!(next.len(), 3, "{said}");
    for word in &mut next[2] {
        *word = word.replace("PHOTOS", "trommel-demo/images");
        *word = word.replace("MODEL", "trommel-demo/model");
    }
    for command in next {
        let run = Trommel::new(command).current_dir(&folder.path("")).run();
        assert_code(&run, 0);
    }
    // Once more in the same folder.
    assert_code(&demo(), 0);
}

#[test]
fn the_demo_writes_to_no_folder_of_other_files() {
    let folder = Folder::with_digits(1);
    let run = Trommel::new(["demo"]).arg(folder.images()).run();
    assert_code(&run, 2);
    assert!(
        stderr(&run).contains("give a new folder"),
        "{}",
        stderr(&run)
    );
    assert_eq!(fs::read_dir(folder.images()).unwrap().count(), 1);
}

#[test]
fn shells_complete_commands_and_each_has_a_manual_page() {
    for (shell, words) in [
        ("bash", "complete -F _trommel"),
        ("zsh", "#compdef trommel"),
        ("fish", "complete -c trommel"),
    ] {
        let run = Trommel::new(["completions", shell]).run();
        assert_code(&run, 0);
        let script = stdout(&run);
        assert!(
            script.contains(words) && script.contains("classify"),
            "{shell}"
        );
    }
    let folder = Folder::new();
    let run = Trommel::new(["man"]).arg(folder.path("man")).run();
    assert_code(&run, 0);
    for (page, words) in [
        ("trommel.1", "classify"),
        ("trommel-classify.1", r"\-\-fail\-on\-error"),
        ("trommel-jobs-show.1", "Show the state of a job"),
    ] {
        let text = fs::read_to_string(folder.path("man").join(page)).unwrap();
        assert!(text.contains(words), "{page} lacks {words}");
    }
}

/// N17: every image failed, and scripts were told that all is well.
#[test]
fn a_job_of_which_every_image_failed_is_no_success() {
    let folder = Folder::with_digits(2);
    let results = folder.path("rows.csv");
    for name in ["000000.jpg", "000001.jpg"] {
        fs::write(folder.images().join(name), "no image").unwrap();
    }
    let run = Trommel::classify(&folder.images(), &results).run();
    assert_code(&run, 3);
    assert!(
        stderr(&run).contains("all 2 images failed"),
        "{}",
        stderr(&run)
    );
    assert_eq!(rows(&results).len(), 2, "each has its row");
    // Also when it is asked again, and when nothing else is said.
    let again = Trommel::classify(&folder.images(), &results)
        .arg("--quiet")
        .run();
    assert_code(&again, 3);

    let folder = Folder::with_digits(2);
    fs::write(folder.images().join("000001.jpg"), "no image").unwrap();
    let run = Trommel::classify(&folder.images(), &folder.path("rows.csv")).run();
    assert_code(&run, 0);
    assert!(stderr(&run).contains("--fail-on-error"), "{}", stderr(&run));
}

/// N33: the summary had no id of the job when rows went to standard output.
#[test]
fn the_summary_names_the_job_of_the_rows_on_standard_output() {
    let folder = Folder::with_digits(3);
    let run = Trommel::new(["classify", "--json", "--model"])
        .args([digits_model(), folder.images()])
        .run();
    assert_code(&run, 0);
    let summary: Value = serde_json::from_str(&stderr(&run)).unwrap();
    let row: Value = serde_json::from_str(stdout(&run).lines().next().unwrap()).unwrap();
    assert!(row["job_id"].as_str().is_some_and(|id| !id.is_empty()));
    assert_eq!(summary["job_id"], row["job_id"]);
}

/// N30: the system's message was in the line twice.
#[test]
fn what_the_system_says_is_said_once() {
    let folder = Folder::new();
    for args in [
        &["config", "--config", "none.toml"][..],
        &["classify", "none/"],
    ] {
        let run = Trommel::new(args).current_dir(&folder.path("")).run();
        assert_code(&run, 2);
        let said = stderr(&run);
        assert_eq!(said.matches("os error 2").count(), 1, "{said}");
    }
}

/// N30: a store that is unreachable or forbidden is reported in one line.
#[test]
fn a_store_that_cannot_be_used_is_told_in_a_line() {
    let folder = Folder::new();
    let classify = |endpoint: &str| {
        Trommel::new(["classify", "s3://photos/", "--model"])
            .arg(digits_model())
            .env("TROMMEL_S3__ENDPOINT", endpoint)
            .env("TROMMEL_S3__ATTEMPTS", "1")
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .env("AWS_REGION", "us-east-1")
            .env("HOME", folder.path("").to_str().unwrap())
    };
    let away = classify(&format!("http://{}", free_address()))
        .env("AWS_ACCESS_KEY_ID", "a")
        .env("AWS_SECRET_ACCESS_KEY", "b")
        .run();
    let server = S3Server::start();
    let nobody = classify(&server.endpoint())
        .env("AWS_ACCESS_KEY_ID", "")
        .env("AWS_SECRET_ACCESS_KEY", "")
        .run();
    for (run, words) in [(&away, "refused"), (&nobody, "no credentials were found")] {
        assert!(!run.status.success());
        let said = stderr(run);
        assert!(said.contains(words), "{said}");
        assert!(said.lines().count() == 1 && said.len() < 400, "{said}");
        for debug in ["{", "Error(", "\u{1b}"] {
            assert!(!said.contains(debug), "{debug}: {said}");
        }
    }
}

/// N29: for the flags of other programs, ours are suggested.
#[test]
fn a_flag_by_another_programs_name_is_answered_with_ours() {
    for (flag, ours) in [
        ("--batch-size", "--max-batch"),
        ("--threads", "--preprocess-threads"),
    ] {
        let run = Trommel::new(["classify", "photos", flag, "8"]).run();
        assert_code(&run, 2);
        assert!(stderr(&run).contains(ours), "{}", stderr(&run));
        assert!(!stderr(&run).contains("--max-size"), "{}", stderr(&run));
    }
    let help = stdout(&Trommel::new(["classify", "--help"]).run());
    assert!(!help.contains("--batch-size"), "{help}");
}
