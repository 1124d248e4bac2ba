//! Prompts: exactly one row for each image, whatever the servers do.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;
use trommel_sink::ResultRow;
use trommel_tests::{
    ChatServer, Cluster, Folder, PIPELINE, Question, Said, Trommel, assert_code,
    assert_each_index_once, eventually, rows, stderr,
};

const CHOICES: [&str; 3] = ["cat", "dog", "no animal"];

/// The choice that depends on the image.
fn choice(question: &Question) -> Said {
    Said::Text(CHOICES[question.pick(3)].to_owned())
}

/// Writes the folder of a prompt for these servers.
fn prompt(folder: &Folder, servers: &[&ChatServer], more: &str) {
    let urls: Vec<_> = servers.iter().map(|server| server.url()).collect();
    write_prompt(&folder.path("models/animals"), &urls, more);
}

fn write_prompt(dir: &Path, urls: &[String], more: &str) {
    fs::create_dir_all(dir).unwrap();
    let text = format!(
        "[prompt]\nurls = {urls:?}\nmodel = \"tiny\"\ntext = \"Which animal?\"\n\
         choices = {CHOICES:?}\nconstrain = \"guided_choice\"\nencoding = \"png\"\n{more}\n"
    );
    fs::write(dir.join("trommel.toml"), text).unwrap();
}

/// `trommel classify` of the folder's images by its prompt.
fn classify(folder: &Folder) -> Trommel {
    Trommel::new(["classify"])
        .arg(folder.images())
        .arg("--model")
        .arg(folder.path("models/animals"))
        .arg("--output")
        .arg(folder.path("rows.parquet"))
        .env("TROMMEL_SINK__PART_INTERVAL", "200ms")
}

fn found(folder: &Folder) -> Vec<ResultRow> {
    rows(&folder.path("rows.parquet"))
}

#[track_caller]
fn assert_labelled(rows: &[ResultRow], count: usize) {
    assert_each_index_once(rows, count);
    for row in rows {
        assert_eq!(row.status, "ok", "{row:?}");
        assert!(CHOICES.contains(&row.label.as_deref().unwrap()), "{row:?}");
        assert!((row.score.unwrap() - 0.8).abs() < 1e-4, "{row:?}");
        assert_eq!(row.columns["prompt_tokens"], "100");
        assert_eq!(row.columns["completion_tokens"], "2");
    }
}

#[test]
fn each_image_is_asked_about_once_and_gets_its_row() {
    let server = ChatServer::start(choice);
    let folder = Folder::with_digits(60);
    prompt(
        &folder,
        &[&server],
        "max-pixels = 400\nprice-in = 2\nprice-out = 10",
    );
    let run = classify(&folder).arg("--json").run();
    assert_code(&run, 0);
    assert_labelled(&found(&folder), 60);
    let questions = server.questions();
    assert_eq!(questions.len(), 60);
    for question in &questions {
        let content = &question.body["messages"][0]["content"];
        assert_eq!(content[0]["text"], "Which animal?", "the text comes first");
        assert!(question.image.starts_with("data:image/png;base64,"));
        assert_eq!(question.body["guided_choice"].as_array().unwrap().len(), 3);
        assert_eq!(question.body["model"], "tiny");
    }
    let summary: Value = serde_json::from_slice(&run.stdout).unwrap();
    let asked = &summary["prompt"];
    assert_eq!(asked["prompt_tokens"], 6000);
    assert_eq!(asked["cached_tokens"], 600);
    assert_eq!(asked["completion_tokens"], 120);
    let price = asked["price"].as_f64().unwrap();
    assert!(
        (price - (6000.0 * 2.0 + 120.0 * 10.0) / 1e6).abs() < 1e-9,
        "{price}"
    );
}

#[test]
fn requests_in_flight_grow_to_what_the_server_takes_and_no_further() {
    let server = ChatServer::start(choice);
    server.hold_after(4);
    let folder = Folder::with_digits(150);
    prompt(&folder, &[&server], "max-concurrency = 16");
    let run = classify(&folder).arg("--json");
    let run = std::thread::spawn(move || run.run());
    eventually("four answers make room for sixteen questions", || {
        (server.questions().len() == 20).then_some(())
    });
    server.open();
    let run = run.join().unwrap();
    assert_code(&run, 0);
    assert_labelled(&found(&folder), 150);
    let summary: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(summary["prompt"]["peak"], 16);
    assert_eq!(server.questions().len(), 150);
}

#[test]
fn what_passes_is_tried_again_and_leaves_no_trace_in_the_rows() {
    let server = ChatServer::start(|question| match (question.times, question.number % 7) {
        (0, 0) => Said::Status(429, "retry-after: 0\r\n", "{}".to_owned()),
        (0, 1) => Said::Status(500, "", "out of luck".to_owned()),
        (0, 2) => Said::Body("<!doctype html><title>please wait</title>"),
        (0, 3) => Said::Half,
        (0, 4) => Said::Cut,
        (0, 5) if question.number < 30 => Said::Stall,
        _ => choice(question),
    });
    let folder = Folder::with_digits(100);
    prompt(&folder, &[&server], "timeout = \"5s\"");
    assert_code(&classify(&folder).run(), 0);
    assert_labelled(&found(&folder), 100);
}

#[test]
fn what_stays_wrong_is_a_failed_row_with_the_servers_words() {
    let server = ChatServer::start(|question| match question.pick(5) {
        0 => Said::Text("I cannot tell.".to_owned()),
        1 => Said::Status(400, "", "the image is too odd".to_owned()),
        2 => Said::Status(500, "", "it broke".to_owned()),
        3 => Said::Body("{\"choices\": [{\"mess"),
        _ => choice(question),
    });
    let folder = Folder::with_digits(40);
    prompt(&folder, &[&server], "");
    assert_code(&classify(&folder).run(), 0);
    let rows = found(&folder);
    assert_each_index_once(&rows, 40);
    let words = [
        "\"I cannot tell.\", which is not one of the choices",
        "the image is too odd",
        "it broke",
        "not a completion",
    ];
    for words in words {
        let failed = rows.iter().filter(|row| row.status == "failed");
        let with = failed.filter(|row| row.error.as_ref().unwrap().contains(words));
        let mut with = with.peekable();
        assert!(with.peek().is_some(), "{words}");
        assert!(with.all(|row| row.error_kind.as_deref() == Some("model_failed")));
    }
    assert!(rows.iter().any(|row| row.status == "ok"));
    // A refused request is sent once, a failed one four times.
    let questions = server.questions();
    let times = |pick: usize| {
        let asked = questions.iter().filter(|question| question.pick(5) == pick);
        let images: BTreeSet<_> = asked.clone().map(|question| &question.image).collect();
        // Equal digits may occur twice.
        let shown = |image: &&&String| {
            let same = questions
                .iter()
                .filter(|question| question.image == ***image);
            same.count()
        };
        let most = images.iter().map(|image| shown(&image)).min();
        most.unwrap_or(0)
    };
    assert_eq!((times(0), times(1)), (1, 1));
    assert!(times(2) >= 4 && times(3) >= 4);
}

#[test]
fn a_server_that_is_not_there_is_named_before_anything_is_written() {
    let url = {
        let server = ChatServer::start(choice);
        server.url()
    };
    let folder = Folder::with_digits(2);
    write_prompt(
        &folder.path("models/animals"),
        std::slice::from_ref(&url),
        "",
    );
    let run = classify(&folder).run();
    assert_code(&run, 2);
    let said = stderr(&run);
    assert!(
        said.contains(&url) && said.contains("is not there"),
        "{said}"
    );
    assert!(!folder.path("rows.parquet").exists());
}

#[test]
fn a_server_that_dies_in_mid_job_ends_it_and_the_same_command_goes_on() {
    let server = ChatServer::start(choice);
    server.hold_after(30);
    let folder = Folder::with_digits(100);
    prompt(&folder, &[&server], "outage = \"9s\"\ntimeout = \"9s\"");
    let errors = folder.path("errors");
    let mut run = classify(&folder).spawn_logging(&errors);
    eventually("some are answered", || {
        (server.questions().len() > 30).then_some(())
    });
    let address = server.address();
    drop(server);
    let ended = run.wait().unwrap();
    let said = fs::read_to_string(&errors).unwrap();
    assert_eq!(ended.code(), Some(1), "{said}");
    assert!(said.contains("no server has answered for 9s"), "{said}");
    let server = ChatServer::at(address, choice);
    assert_code(&classify(&folder).run(), 0);
    assert_labelled(&found(&folder), 100);
    assert!(server.questions().len() <= 100);
}

#[test]
fn of_two_servers_one_may_die() {
    let (lasting, dying) = (ChatServer::start(choice), ChatServer::start(choice));
    dying.hold_after(3);
    let folder = Folder::with_digits(80);
    prompt(&folder, &[&lasting, &dying], "");
    let mut run = classify(&folder).spawn();
    eventually("both are asked", || {
        (dying.questions().len() > 3 && !lasting.questions().is_empty()).then_some(())
    });
    drop(dying);
    assert_eq!(run.wait().unwrap().code(), Some(0));
    assert_labelled(&found(&folder), 80);
}

#[test]
fn a_job_that_was_killed_goes_on_without_asking_again_for_what_it_has() {
    let server = ChatServer::start(choice);
    server.hold_after(50);
    let folder = Folder::with_digits(120);
    prompt(&folder, &[&server], "max-concurrency = 8");
    let mut run = classify(&folder).spawn();
    let parts = folder.path("rows.parquet.parts");
    eventually("rows are committed", || {
        let parts = fs::read_dir(&parts).ok()?.flatten();
        let mut names = parts.map(|part| part.file_name().into_string().unwrap());
        names.find(|name| name.starts_with("part-") && name.ends_with(".parquet"))
    });
    run.kill().unwrap();
    run.wait().unwrap();
    let before = server.questions().len();
    server.open();
    assert_code(&classify(&folder).run(), 0);
    assert_labelled(&found(&folder), 120);
    let again = server.questions().len() - before;
    assert!(again < 120, "{again} of 120 were asked about again");
}

#[test]
fn a_key_is_sent_and_seen_nowhere_else() {
    const KEY: &str = "sk-do-not-show-me";
    let server = ChatServer::start(|question| match question.pick(2) {
        0 => Said::Status(400, "", format!("bad request with {KEY}")),
        _ => choice(question),
    });
    let folder = Folder::with_digits(20);
    prompt(&folder, &[&server], "key-env = \"ANIMALS_KEY\"");
    let missing = classify(&folder).run();
    assert_code(&missing, 2);
    assert!(stderr(&missing).contains("ANIMALS_KEY"));
    let run = classify(&folder)
        .env("ANIMALS_KEY", KEY)
        .args(["--log", "trace"])
        .run();
    assert_code(&run, 0);
    for question in server.questions() {
        let head = question.head.to_lowercase();
        assert!(
            head.contains(&format!("authorization: bearer {KEY}")),
            "{head}"
        );
    }
    let shown = |text: &[u8]| String::from_utf8_lossy(text).contains(KEY);
    assert!(!shown(&run.stderr) && !shown(&run.stdout));
    let rows = found(&folder);
    assert_each_index_once(&rows, 20);
    let failed = rows.iter().filter_map(|row| row.error.as_ref());
    let mut failed = failed.peekable();
    assert!(failed.peek().is_some_and(|error| error.contains("[key]")));
    assert!(failed.all(|error| !error.contains(KEY)));
    assert!(!shown(&fs::read(folder.path("rows.parquet")).unwrap()));
    let config = Trommel::new(["config"]).env("ANIMALS_KEY", KEY).run();
    assert!(!shown(&config.stdout));
    let inspect = Trommel::new(["model", "inspect"])
        .arg(folder.path("models/animals"))
        .env("ANIMALS_KEY", KEY)
        .run();
    assert_code(&inspect, 0);
    assert!(
        !shown(&inspect.stdout) && String::from_utf8_lossy(&inspect.stdout).contains("ANIMALS_KEY")
    );
}

#[test]
fn a_key_that_is_not_taken_ends_the_job_at_once() {
    let server = ChatServer::start(|_| Said::Status(401, "", "who are you?".to_owned()));
    let folder = Folder::with_digits(20);
    prompt(&folder, &[&server], "");
    let run = classify(&folder).run();
    assert_code(&run, 1);
    let said = stderr(&run);
    assert!(
        said.contains("who are you?") && said.contains("key-env"),
        "{said}"
    );
    assert!(!folder.path("rows.parquet").exists());
}

#[test]
fn a_column_of_the_source_by_our_name_keeps_its_values() {
    let server = ChatServer::start(choice);
    let folder = Folder::with_digits(3);
    prompt(&folder, &[&server], "");
    let names = fs::read_dir(folder.images()).unwrap().flatten();
    let lines: Vec<_> = names
        .map(|image| format!("{},seven\n", image.path().display()))
        .collect();
    let list = folder.path("list.csv");
    fs::write(&list, format!("uri,prompt_tokens\n{}", lines.concat())).unwrap();
    let run = Trommel::new(["classify"])
        .arg(&list)
        .arg("--model")
        .arg(folder.path("models/animals"))
        .arg("--output")
        .arg(folder.path("rows.parquet"))
        .run();
    assert_code(&run, 0);
    let rows = found(&folder);
    assert_labelled(&rows, 3);
    assert!(
        rows.iter()
            .all(|row| row.columns["source_prompt_tokens"] == "seven")
    );
}

#[test]
fn workers_over_a_broker_ask_too_and_survive_each_others_deaths() {
    let server = ChatServer::start(choice);
    server.hold_after(40);
    let folder = Folder::with_digits(150);
    prompt(&folder, &[&server], "max-concurrency = 8");
    let mut cluster = Cluster::new();
    cluster.set_repository(&folder.path("models"));
    for role in PIPELINE {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let output = folder.path("rows/");
    let run = cluster
        .command(["submit"])
        .arg(folder.images())
        .args(["--model", "animals", "--output"])
        .arg(&output)
        .run();
    cluster.assert_code(&run, 0);
    cluster.eventually("questions wait", || {
        (server.questions().len() > 40).then_some(())
    });
    let infer = cluster.of_role("infer")[0];
    cluster.kill_and_restart(infer);
    server.open();
    cluster.eventually("the job is complete", || {
        output.join("_SUCCESS").exists().then_some(())
    });
    assert_labelled(&rows(&output), 150);
    cluster.assert_nothing_left();
}

#[test]
fn a_dry_run_says_tokens_and_what_they_cost() {
    let server = ChatServer::start(choice);
    let folder = Folder::with_digits(40);
    prompt(
        &folder,
        &[&server],
        "family = \"qwen2.5-vl\"\nmax-tokens = 7",
    );
    let prices = "input-tokens=0.5/M,output-tokens=2/M";
    let dry = |more: &[&str]| {
        let run = Trommel::new(["classify"])
            .arg(folder.images())
            .arg("--model")
            .arg(folder.path("models/animals"))
            .args(["--dry-run", "--price", prices])
            .args(more)
            .run();
        assert_code(&run, 0);
        String::from_utf8(run.stdout).unwrap()
    };
    let found: Value = serde_json::from_str(&dry(&["--json"])).unwrap();
    let tokens = &found["tokens"];
    let of = |name: &str| tokens[name].as_f64().unwrap();
    assert_eq!((of("input"), of("output")), (100.0, 2.0), "{found}");
    assert!(of("image") >= 4.0, "{found}");
    assert_eq!(of("image") + of("text"), 100.0, "{found}");
    assert_eq!((of("input_total"), of("output_total")), (4000.0, 80.0));
    assert_eq!((of("max_output"), of("max_output_total")), (7.0, 280.0));
    let total = found["cost"]["total"].as_f64().unwrap();
    assert!(
        (total - (4000.0 * 0.5 + 80.0 * 2.0) / 1e6).abs() < 1e-12,
        "{found}"
    );
    let words = dry(&[]);
    for line in [
        "tokens      read 100 an image (image ",
        "4,000 read, 80 written (at most 280)",
    ] {
        assert!(words.contains(line), "{line}: {words}");
    }

    // Tokens are counted nowhere else.
    let refused = |run: Trommel| {
        let run = run.run();
        assert_code(&run, 2);
        assert!(
            stderr(&run).contains("dry runs of a prompt"),
            "{}",
            stderr(&run)
        );
    };
    refused(classify(&folder).args(["--price", prices]));
    let digits = Trommel::classify(&folder.images(), &folder.path("digits.jsonl"));
    refused(digits.args(["--dry-run", "--price", prices]));
    let submit = Trommel::new([
        "submit", "photos/", "--model", "digits", "--output", "rows/",
    ]);
    refused(submit.args(["--price", prices]));
}

#[test]
fn a_dry_run_of_workers_says_tokens_too() {
    let server = ChatServer::start(choice);
    let folder = Folder::with_digits(30);
    prompt(&folder, &[&server], "");
    let mut cluster = Cluster::new();
    cluster.set_repository(&folder.path("models"));
    for role in PIPELINE {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let run = cluster
        .command(["submit", "--dry-run", "--json"])
        .arg(folder.images())
        .args(["--model", "animals", "--output"])
        .arg(folder.path("rows/"))
        .args(["--price", "input-tokens=0.5/M,output-tokens=2/M"])
        .run();
    cluster.assert_code(&run, 0);
    let found: Value = serde_json::from_slice(&run.stdout).unwrap();
    let of = |name: &str| found["tokens"][name].as_f64();
    assert_eq!(
        (of("input"), of("output")),
        (Some(100.0), Some(2.0)),
        "{found}"
    );
    assert_eq!(of("input_total"), Some(3000.0), "{found}");
    assert_eq!(of("image"), None, "{found}");
    let total = found["cost"]["total"].as_f64().unwrap();
    assert!(
        (total - (3000.0 * 0.5 + 60.0 * 2.0) / 1e6).abs() < 1e-12,
        "{found}"
    );
}
