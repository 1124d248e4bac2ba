//! `trommel report`: one self-contained page.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use trommel_storage::testsuite::S3Server;
use trommel_tests::{Folder, Trommel, assert_code, stderr};

/// The page of a result.
fn page(folder: &Folder, results: &str, args: &[&str]) -> String {
    let output = folder.path("report.html");
    let run = Trommel::new(["report", results, "--output"])
        .arg(&output)
        .args(args)
        .run();
    assert_code(&run, 0);
    std::fs::read_to_string(output).unwrap()
}

#[test]
fn a_page_shows_classes_failures_and_pictures_and_fetches_nothing() {
    let folder = Folder::with_digits(300);
    std::fs::write(folder.images().join("<b>bad.jpg"), "text").unwrap();
    let results = folder.path("rows.parquet");
    let run = Trommel::classify(&folder.images(), &results)
        .arg("--json")
        .run();
    assert_code(&run, 0);
    let summary = folder.path("summary.json");
    std::fs::write(&summary, &run.stdout).unwrap();

    let args = ["--summary", summary.to_str().unwrap(), "--per-class", "3"];
    let html = page(&folder, results.to_str().unwrap(), &args);
    for words in [
        "<b>301</b>images",
        "<b>300</b>labelled",
        "unknown_format <span",
        "bottleneck: <b>",
    ] {
        assert!(html.contains(words), "{words}");
    }
    // Ten digits, three images at either end.
    assert!(html.matches("<img src=\"data:image/jpeg;base64,").count() >= 60);
    assert_eq!(html.matches("no picture").count(), 0);
    assert!(!html.contains("<b>bad.jpg"), "a name is no markup");
    assert!(html.contains("&lt;b&gt;bad.jpg"));
    for reference in [
        "http://", "https://", "<script ", "@import", "url(", "fetch(",
    ] {
        assert!(!html.contains(reference), "the page refers to {reference}");
    }
}

#[test]
fn images_that_are_gone_are_named_and_stop_nothing() {
    let folder = Folder::with_digits(40);
    let results = folder.path("rows/");
    assert_code(&Trommel::classify(&folder.images(), &results).run(), 0);
    std::fs::remove_dir_all(folder.images()).unwrap();
    let html = page(&folder, results.to_str().unwrap(), &[]);
    assert!(html.contains("<b>40</b>images"));
    assert!(html.contains("no picture: "));
    assert!(!html.contains("<img"));
}

#[test]
fn results_in_a_bucket_are_reported_with_the_pictures_there() {
    let folder = Folder::with_digits(60);
    let server = S3Server::start();
    folder.upload(&server, "photos");
    server.create_bucket("results");
    let s3 = |command: Trommel| {
        command
            .env("TROMMEL_S3__ENDPOINT", &server.endpoint())
            .env("AWS_ACCESS_KEY_ID", S3Server::ACCESS_KEY)
            .env("AWS_SECRET_ACCESS_KEY", S3Server::SECRET_KEY)
    };
    let model = trommel_tests::digits_model();
    let classify = Trommel::new(["classify", "s3://photos/", "--model"])
        .arg(model)
        .args(["--output", "s3://results/digits/"]);
    assert_code(&s3(classify).run(), 0);
    let output = folder.path("report.html");
    let report = Trommel::new(["report", "s3://results/digits/", "--output"]).arg(&output);
    assert_code(&s3(report).run(), 0);
    let html = std::fs::read_to_string(output).unwrap();
    assert!(html.contains("<b>60</b>images"));
    assert!(html.contains("<img src=\"data:image/jpeg;base64,"));
}

#[test]
fn what_is_no_result_is_refused() {
    let folder = Folder::with_digits(1);
    for (results, words) in [
        (folder.path("nothing.parquet"), "nothing.parquet"),
        (folder.images(), "has no results in it"),
    ] {
        let run = Trommel::new(["report"])
            .arg(&results)
            .args(["--output", folder.path("report.html").to_str().unwrap()])
            .run();
        assert_code(&run, 2);
        assert!(stderr(&run).contains(words), "{}", stderr(&run));
    }
    assert!(!folder.path("report.html").exists());
}
