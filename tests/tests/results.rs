//! Commands that read results: `evaluate`, `report` and `export`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;

use serde_json::Value;
use trommel_storage::testsuite::{PostgresServer, S3Server};
use trommel_tests::{Folder, Trommel, assert_code, digits_model, rows, stderr};

/// The evaluation of results against the names of folders, as JSON.
fn evaluation(results: &str, with: impl Fn(Trommel) -> Trommel) -> Value {
    let evaluate = Trommel::new(["evaluate", "--labels-from", "folders", "--json", results]);
    let run = with(evaluate).run();
    assert_code(&run, 0);
    serde_json::from_slice(&run.stdout).unwrap()
}

/// A folder of the shipped digits, which are in a folder for each label.
fn examples() -> std::path::PathBuf {
    digits_model().join("examples")
}

/// N38: only files of this machine were read.
#[test]
fn results_in_a_table_and_in_a_bucket_are_read_as_files_are() {
    let folder = Folder::new();
    let file = folder.path("rows.parquet");
    assert_code(&Trommel::classify(&examples(), &file).run(), 0);
    let expected = evaluation(file.to_str().unwrap(), |run| run);

    let database = PostgresServer::start();
    let table = database.url("labels");
    let in_table = || Trommel::classify(&examples(), Path::new(&table));
    assert_code(&in_table().run(), 0);
    assert_eq!(evaluation(&table, |run| run), expected);
    let page = folder.path("report.html");
    let report = Trommel::new(["report", &table, "--output"]).arg(&page);
    assert_code(&report.run(), 0);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("<b>359</b>images") && page.contains("<img src=\"data:"));
    assert!(
        !page.contains(database.password()),
        "the page shows a password"
    );
    let against = Trommel::new(["evaluate", &table, "--min-agreement", "1", "--against"]);
    assert_code(&against.arg(&file).run(), 0);

    // A second job in the same table: one has to be chosen.
    assert_code(&in_table().args(["--sample", "50"]).run(), 0);
    let evaluate = ["evaluate", "--labels-from", "folders"];
    let run = Trommel::new(evaluate).arg(&table).run();
    assert_code(&run, 2);
    let said = stderr(&run);
    let jobs: Vec<_> = said.split("job=").skip(1).map(|rest| &rest[..36]).collect();
    assert_eq!(jobs.len(), 2, "{said}");
    let images = jobs.iter().map(|job| {
        let chosen = format!("{table}&job={job}&model=digits");
        evaluation(&chosen, |run| run)["images"].as_u64().unwrap()
    });
    let mut images: Vec<_> = images.collect();
    images.sort();
    assert_eq!(images, [50, 359]);
    let none = Trommel::new(evaluate)
        .arg(format!("{table}&job=none"))
        .run();
    assert_code(&none, 2);
    assert!(
        stderr(&none).contains("&job=none holds no rows"),
        "{}",
        stderr(&none)
    );

    let server = S3Server::start();
    server.create_bucket("results");
    let s3 = |command: Trommel| {
        command
            .env("TROMMEL_S3__ENDPOINT", &server.endpoint())
            .env("AWS_ACCESS_KEY_ID", S3Server::ACCESS_KEY)
            .env("AWS_SECRET_ACCESS_KEY", S3Server::SECRET_KEY)
    };
    let bucket = "s3://results/digits/";
    let classify = Trommel::classify(&examples(), Path::new(bucket));
    assert_code(&s3(classify).run(), 0);
    assert_eq!(evaluation(bucket, s3), expected);
}

/// N38: labels that fit no row, and folders that are no classes.
#[test]
fn labels_that_have_nothing_to_do_with_the_rows_are_refused_with_an_example() {
    let folder = Folder::with_digits(3);
    let results = folder.path("rows.csv");
    assert_code(&Trommel::classify(&folder.images(), &results).run(), 0);
    let evaluate = |args: &[&str]| {
        let run = Trommel::new(["evaluate"]).arg(&results).args(args).run();
        assert_code(&run, 2);
        stderr(&run)
    };
    let labels = folder.path("labels.csv");
    fs::write(&labels, "label,uri\n7,photos/a.jpg\n").unwrap();
    let said = evaluate(&["--labels", labels.to_str().unwrap()]);
    let uri = folder.images().join("000000.jpg");
    for words in ["none of the 3 rows", uri.to_str().unwrap(), "photos/a.jpg"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let said = evaluate(&["--labels-from", "folders"]);
    assert!(said.contains("(images)"), "{said}");
    let said = evaluate(&["--labels-from", "column:kind"]);
    assert!(said.contains("no column \"kind\""), "{said}");
}

#[test]
fn a_leading_dot_in_the_source_does_not_separate_rows_from_labels() {
    let folder = Folder::with_digits(3);
    let (results, labels) = (folder.path("rows.csv"), folder.path("labels.csv"));
    let run = Trommel::classify(Path::new("./images"), &results)
        .current_dir(&folder.path(""))
        .run();
    assert_code(&run, 0);
    assert!(rows(&results)[0].uri.starts_with("./images/"));
    let label = rows(&results)[0].label.clone().unwrap();
    fs::write(&labels, format!("uri,label\nimages/000000.jpg,{label}\n")).unwrap();
    let run = Trommel::new(["evaluate", "--min-accuracy", "1"])
        .arg(&results)
        .arg("--labels")
        .arg(&labels)
        .run();
    assert_code(&run, 0);
    let others = folder.path("others.csv");
    assert_code(&Trommel::classify(&folder.images(), &others).run(), 0);
    let relative = fs::read_to_string(&others).unwrap();
    let root = folder.path("").display().to_string();
    fs::write(folder.path("relative.csv"), relative.replace(&root, "")).unwrap();
    let run = Trommel::new(["evaluate", "--min-agreement", "1"])
        .arg(&results)
        .arg("--against")
        .arg(folder.path("relative.csv"))
        .run();
    assert_code(&run, 0);
}

#[test]
fn the_threshold_that_reaches_a_precision_is_named() {
    let folder = Folder::new();
    let results = folder.path("rows.jsonl");
    assert_code(&Trommel::classify(&examples(), &results).run(), 0);
    let results = results.to_str().unwrap();
    let told = evaluation(results, |run| run.args(["--precision", "1"]));
    let all = &told["reaching"]["all"];
    let threshold = all["threshold"].as_f64().unwrap();
    // One of the shipped digits is classified wrongly, so some have to be left out.
    let rows = rows(Path::new(results));
    let is_wrong = |row: &&trommel_sink::ResultRow| {
        let folder = Path::new(&row.uri).parent().unwrap().file_name().unwrap();
        folder.to_str() != row.label.as_deref()
    };
    let wrong = rows.iter().filter(is_wrong).filter_map(|row| row.score);
    let surest = f64::from(wrong.reduce(f32::max).unwrap());
    assert!(surest < threshold && threshold <= surest + 0.0011, "{all}");
    let reached = rows
        .iter()
        .filter(|row| f64::from(row.score.unwrap()) >= threshold);
    assert_eq!(all["images"].as_u64(), Some(reached.count() as u64));
    assert_eq!(told["reaching"]["classes"].as_object().unwrap().len(), 10);
    let first = &told["thresholds"][0];
    assert_eq!(first["threshold"].as_f64(), Some(0.0));
    assert_eq!(first["precision"], told["accuracy"]);
    let words = Trommel::new(["evaluate", results, "--labels-from", "folders"])
        .args(["--precision", "0.99"])
        .run();
    assert_code(&words, 0);
    let words = String::from_utf8(words.stdout).unwrap();
    assert!(
        words.contains("all classes") && words.contains("for 99.0 %"),
        "{words}"
    );
}

/// Labels and scores of all rows, by index.
fn tops(path: &Path) -> Vec<(u64, Option<String>, Vec<trommel_types::TopLabel>)> {
    let mut tops: Vec<_> = rows(path)
        .into_iter()
        .map(|row| (row.index, row.label, row.top))
        .collect();
    tops.sort_by_key(|(index, ..)| *index);
    tops
}

/// N10: thresholds needed all images to be classified again.
#[test]
fn thresholds_decide_labels_from_stored_scores_as_a_new_job_would() {
    let folder = Folder::new();
    let classify = |name: &str, args: &[&str]| {
        let output = folder.path(name);
        assert_code(&Trommel::classify(&examples(), &output).args(args).run(), 0);
        output
    };
    let relabel = |results: &Path, name: &str, args: &[&str]| {
        let output = folder.path(name);
        let run = Trommel::new(["relabel"])
            .arg(results)
            .arg("--output")
            .arg(&output)
            .args(args);
        (run.run(), output)
    };
    let model = digits_model();
    let model = ["--model", model.to_str().unwrap()];
    let stricter = ["--threshold-of", "8=0.999", "--threshold-of", "3=0.999"];
    let with_model = [&model[..], &stricter].concat();

    let all = classify("all.parquet", &["--top-k", "10"]);
    let (run, new) = relabel(&all, "new.parquet", &with_model);
    assert_code(&run, 0);
    let expected = classify(
        "expected.parquet",
        &[&["--top-k", "10"], &stricter[..]].concat(),
    );
    assert_eq!(tops(&new), tops(&expected));
    let labels = |path| tops(path).into_iter().map(|(_, label, _)| label);
    assert!(labels(&all).ne(labels(&new)), "no label changes");

    let text = classify("all.jsonl", &["--top-k", "10"]);
    let (run, new) = relabel(&text, "new.jsonl", &with_model);
    assert_code(&run, 0);
    assert_eq!(tops(&new), tops(&expected));

    // What was left out below 0.5 cannot be the label where more is requested.
    let half = classify("half.parquet", &["--top-k", "10", "--threshold", "0.5"]);
    let (run, new) = relabel(
        &half,
        "surer.parquet",
        &[&model[..], &["--threshold", "0.9"]].concat(),
    );
    assert_code(&run, 0);
    assert!(labels(&half).eq(labels(&new)));

    let few = classify("few.parquet", &["--top-k", "1"]);
    let unknown = ["--threshold-of", "zebra=0.5"];
    for (results, args, words) in [
        (&few, &with_model[..], "--top-k 10 --threshold 0"),
        (&half, &with_model, "--top-k 10 --threshold 0"),
        (&all, &stricter, "--model"),
        (&all, &[&model[..], &unknown].concat(), "\"zebra\""),
        (
            &few,
            &[&with_model[..], &["--top-k", "2"]].concat(),
            "--top-k 2",
        ),
        (
            &folder.path("surer.parquet"),
            &with_model,
            "give the results of that job",
        ),
    ] {
        let (run, output) = relabel(results, "refused.parquet", args);
        assert_code(&run, 2);
        assert!(stderr(&run).contains(words), "{words}: {}", stderr(&run));
        assert!(!output.exists(), "{words}");
    }
}

/// N37: a report that was made in another folder had no pictures, and said nothing about it.
#[test]
fn a_report_finds_its_pictures_from_any_folder_and_links_to_them() {
    let folder = Folder::with_digits(20);
    let elsewhere = Folder::new();
    let run = Trommel::new(["classify", "images", "--output", "rows.parquet", "--model"])
        .arg(digits_model())
        .current_dir(&folder.path(""))
        .run();
    assert_code(&run, 0);
    let report = |results: &Path, args: &[&str]| {
        let run = Trommel::new(["report"])
            .arg(results)
            .args(args)
            .current_dir(&elsewhere.path(""))
            .run();
        assert_code(&run, 0);
        let page = fs::read_to_string(elsewhere.path("report.html")).unwrap();
        (stderr(&run), page)
    };
    let (said, page) = report(&folder.path("rows.parquet"), &[]);
    assert!(said.contains("20 of 20 pictures"), "{said}");
    let link = format!("file://{}", folder.images().join("000000.jpg").display());
    assert!(
        page.replace("&#x2f;", "/")
            .contains(&format!("href=\"{link}\""))
    );

    // The results alone, in another place: the message says why, and gives the remedy.
    fs::copy(folder.path("rows.parquet"), elsewhere.path("rows.parquet")).unwrap();
    let (said, page) = report(&elsewhere.path("rows.parquet"), &[]);
    assert!(
        said.contains("0 of 20 pictures") && said.contains("--root"),
        "{said}"
    );
    assert!(!page.contains("<img"));
    let root = folder.path("");
    let (said, _) = report(
        &elsewhere.path("rows.parquet"),
        &["--root", root.to_str().unwrap()],
    );
    assert!(said.contains("20 of 20 pictures"), "{said}");
}

/// N39: nothing put images into folders by class, or the unsure ones apart.
#[test]
fn images_are_exported_by_label() {
    let folder = Folder::new();
    let results = folder.path("rows.parquet");
    assert_code(&Trommel::classify(&examples(), &results).run(), 0);
    let rows = rows(&results);
    let export = |name: &str, args: &[&str]| {
        Trommel::new(["export"])
            .arg(&results)
            .arg("--by-label")
            .arg(folder.path(name))
            .args(args)
            .run()
    };
    let files = |name: &str| -> Vec<_> {
        let labels = fs::read_dir(folder.path(name)).unwrap();
        let files = labels.flat_map(|label| fs::read_dir(label.unwrap().path()).unwrap());
        files.map(|file| file.unwrap().path()).collect()
    };
    assert_code(&export("copies", &[]), 0);
    let copies = files("copies");
    assert_eq!(copies.len(), 359);
    for row in rows.iter().step_by(37) {
        let name = Path::new(&row.uri).file_name().unwrap();
        let copy = folder
            .path("copies")
            .join(row.label.as_ref().unwrap())
            .join(name);
        assert_eq!(fs::read(copy).unwrap(), fs::read(&row.uri).unwrap());
    }

    let unsure = rows.iter().filter(|row| row.score.unwrap() <= 0.9).count();
    assert_code(&export("links", &["--link", "--max-score", "0.9"]), 0);
    let links = files("links");
    assert!(
        unsure > 0 && links.len() == unsure,
        "{} {unsure}",
        links.len()
    );
    assert!(links.iter().all(|link| link.is_symlink() && link.is_file()));

    // Nothing is written to a folder in use, and nothing is left out silently.
    let again = export("copies", &[]);
    assert_code(&again, 2);
    assert!(
        stderr(&again).contains("is not empty"),
        "{}",
        stderr(&again)
    );
    let none = export("none", &["--label", "cat"]);
    assert_code(&none, 1);
    assert!(stderr(&none).contains("no row"), "{}", stderr(&none));
    let images = Folder::with_digits(2);
    let results = images.path("rows.csv");
    assert_code(&Trommel::classify(&images.images(), &results).run(), 0);
    fs::remove_file(images.images().join("000000.jpg")).unwrap();
    let run = Trommel::new(["export", "--by-label"])
        .args([images.path("export"), results])
        .run();
    assert_code(&run, 1);
    let said = stderr(&run);
    for words in [
        "1 image of 1 label",
        "1 image could not be exported",
        "000000.jpg",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
}
