//! Sources on the web and compressed ones, from the command line to the rows.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Write};
use std::path::Path;
use std::time::Duration;

use trommel_sink::ResultRow;
use trommel_storage::testsuite::{Reply, S3Server, WebServer};
use trommel_tests::{
    Cluster, Folder, PIPELINE, Trommel, assert_code, assert_each_index_once, digits, rows, stderr,
};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn labels(rows: &[ResultRow]) -> Vec<Option<&str>> {
    rows.iter().map(|row| row.label.as_deref()).collect()
}

/// The rows of a source by the shipped model.
fn classify(source: &str, folder: &Folder, name: &str) -> Vec<ResultRow> {
    let output = folder.path(name);
    let run = Trommel::classify(Path::new(source), &output)
        .env("TROMMEL_HTTP__ALLOW_PRIVATE", "true")
        .run();
    assert_code(&run, 0);
    rows(&output)
}

/// The shipped digits, named by their numbers with their own suffixes.
fn members() -> Vec<(String, Vec<u8>)> {
    let numbered = digits().into_iter().take(60).enumerate();
    numbered
        .map(|(number, path)| {
            let suffix = path.extension().unwrap().to_str().unwrap();
            (format!("{number:04}.{suffix}"), fs::read(&path).unwrap())
        })
        .collect()
}

fn archives(members: &[(String, Vec<u8>)]) -> Vec<(&'static str, Vec<u8>)> {
    let mut tar = tar::Builder::new(Vec::new());
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, &content[..]).unwrap();
        let options = zip::write::SimpleFileOptions::default();
        zip.start_file(name, options).unwrap();
        zip.write_all(content).unwrap();
    }
    let tar = tar.into_inner().unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&tar).unwrap();
    vec![
        ("a.tar.gz", gzip.finish().unwrap()),
        ("a.tar.zst", zstd::stream::encode_all(&tar[..], 1).unwrap()),
        ("a.zip", zip.finish().unwrap().into_inner()),
        ("a.tar", tar),
    ]
}

/// However images are packed, and wherever the archive lies, they get the same rows.
#[test]
fn archives_of_every_kind_give_the_same_labels() {
    let (folder, members) = (Folder::new(), members());
    fs::create_dir(folder.path("plain")).unwrap();
    for (name, content) in &members {
        fs::write(folder.path("plain").join(name), content).unwrap();
    }
    let expected = classify(text(&folder.path("plain")), &folder, "plain.jsonl");
    assert_each_index_once(&expected, members.len());

    let archives = archives(&members);
    for (name, bytes) in &archives {
        fs::write(folder.path(name), bytes).unwrap();
        let found = classify(text(&folder.path(name)), &folder, &format!("{name}.jsonl"));
        assert_each_index_once(&found, members.len());
        assert_eq!(labels(&found), labels(&expected), "{name}");
        assert!(
            found[3].uri.contains(&format!("{name}#0003.")),
            "{}",
            found[3].uri
        );
    }
    let on_web = archives.clone();
    let server = WebServer::start(move |asked| {
        let archive = on_web.iter().find(|(name, _)| asked.target.ends_with(name));
        archive.map_or(Reply::status(404), |(_, bytes)| {
            Reply::object(asked, bytes, "\"1\"")
        })
    });
    for (name, _) in &archives {
        let url = server.url(&format!("/{name}"));
        let found = classify(&url, &folder, &format!("web-{name}.jsonl"));
        assert_eq!(labels(&found), labels(&expected), "{url}");
    }
}

/// A run over a compressed archive that is killed continues where it was.
#[test]
fn a_run_over_compressed_archives_resumes() {
    let folder = Folder::new();
    let many = members().into_iter().cycle().take(3000).enumerate();
    let members: Vec<(String, Vec<u8>)> = many
        .map(|(number, (name, content))| (format!("{number:05}-{name}"), content))
        .collect();
    for (name, bytes) in archives(&members) {
        fs::write(folder.path(name), bytes).unwrap();
    }
    let output = folder.path("rows");
    let command = || {
        Trommel::new(["classify"])
            .arg(folder.path("*.tar.gz"))
            .arg(folder.path("*.tar.zst"))
            .arg(folder.path("a.zip"))
            .arg("--model")
            .arg(trommel_tests::digits_model())
            .arg("--output")
            .arg(format!("{}/", text(&output)))
            .env("TROMMEL_SINK__PART_ROWS", "100")
    };
    let mut running = command().spawn();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let parts = || fs::read_dir(&output).map_or(0, Iterator::count);
    while parts() < 4 && running.try_wait().unwrap().is_none() {
        assert!(
            std::time::Instant::now() < deadline,
            "no part was committed"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    running.kill().unwrap();
    running.wait().unwrap();
    let run = command().run();
    assert_code(&run, 0);
    assert_each_index_once(&rows(&output), 9000);
    let said = stderr(&run);
    assert!(said.contains("9,000 images: 9,000 ok"), "{said}");
}

/// A server on a bad day: an outcome for each url, and what passes is gone with another attempt.
#[test]
fn each_url_of_a_list_gets_one_row() {
    let (folder, members) = (Folder::new(), members());
    let contents: Vec<Vec<u8>> = members.iter().map(|(_, content)| content.clone()).collect();
    let server = WebServer::start(move |asked| {
        let number: usize = asked.target[1..]
            .split('.')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        let content = &contents[number % contents.len()];
        match (number % 10, asked.before) {
            (1, _) => Reply::status(404),
            (2, _) => Reply::object(asked, b"<html>Please sign in</html>", "\"1\""),
            (3, 0) => Reply::Reset,
            (4, 0) => Reply::status(500),
            (5, 0) if number % 100 == 5 => Reply::with(429, "retry-after", "0"),
            (6, _) => Reply::with(302, "location", asked.target.clone()),
            (7, 0) => Reply::Cut(content.clone()),
            _ => Reply::object(asked, content, "\"1\""),
        }
    });
    let mut list = "camera\turl\n".to_owned();
    for number in 0..1000 {
        list += &format!("c{number}\t{}\n", server.url(&format!("/{number}.jpg")));
    }
    fs::write(folder.path("urls.tsv"), list).unwrap();
    let found = classify(text(&folder.path("urls.tsv")), &folder, "rows.jsonl");
    assert_each_index_once(&found, 1000);
    let mut kinds = BTreeMap::new();
    for row in &found {
        let number = row.index as usize;
        let kind = row.error_kind.as_deref().unwrap_or("ok");
        *kinds.entry(kind.to_owned()).or_insert(0) += 1;
        assert_eq!(row.uri, server.url(&format!("/{number}.jpg")));
        let expected = match number % 10 {
            1 => "not_found",
            2 | 6 => "unreadable",
            _ => "ok",
        };
        assert_eq!(kind, expected, "{number}: {:?}", row.error);
    }
    assert_eq!(kinds["ok"], 700);
    let page = found[2].error.as_deref().unwrap();
    assert!(page.contains("HTML page"), "{page}");
}

/// Without permission, no request goes to this machine or a private network.
#[test]
fn private_addresses_fail_unless_they_are_allowed() {
    let folder = Folder::new();
    let content = members().remove(0).1;
    let server = WebServer::start(move |asked| Reply::object(asked, &content, "\"1\""));
    fs::write(folder.path("list.txt"), server.url("/a.jpg")).unwrap();
    let output = folder.path("rows.jsonl");
    let run = Trommel::classify(&folder.path("list.txt"), &output).run();
    assert_code(&run, 3);
    let found = rows(&output);
    assert_eq!(found[0].error_kind.as_deref(), Some("permission_denied"));
    let said = stderr(&run);
    assert!(said.contains("TROMMEL_HTTP__ALLOW_PRIVATE=true"), "{said}");
    assert!(said.contains("the only image failed"), "{said}");
    assert_eq!(server.requests(), 0);
}

/// A worker reads from hosts that its operator names, also where redirects lead.
#[test]
fn workers_ask_only_hosts_that_are_allowed() {
    let folder = Folder::new();
    let image = members().remove(0).1;
    let other_image = image.clone();
    let other = WebServer::start(move |asked| Reply::object(asked, &other_image, "\"1\""));
    let elsewhere = other.url("/b.jpg");
    let server = WebServer::start(move |asked| match asked.target.as_str() {
        "/away.jpg" => Reply::with(302, "location", elsewhere.clone()),
        _ => Reply::object(asked, &image, "\"1\""),
    });
    let store = S3Server::start();
    store.create_bucket("lists");
    let urls = [
        server.url("/a.jpg"),
        other.url("/b.jpg"),
        server.url("/away.jpg"),
    ];
    store.put("lists", "urls.txt", urls.join("\n").as_bytes());
    let mut cluster = Cluster::new()
        .s3(&store)
        .env("TROMMEL_HTTP__ALLOW_PRIVATE", "true");
    cluster.sources = vec!["s3://lists/".to_owned(), server.url("/")];
    cluster.outputs = vec![text(&folder.path("rows")).to_owned()];
    for role in PIPELINE {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let output = folder.path("rows/");
    let run = cluster
        .submit("s3://lists/urls.txt", text(&output))
        .arg("--wait")
        .run();
    cluster.assert_code(&run, 0);
    let found = rows(&output);
    assert_each_index_once(&found, 3);
    assert!(found[0].label.is_some(), "{:?}", found[0]);
    let allow = format!("--allow-source {}", other.url("/"));
    for row in &found[1..] {
        assert_eq!(row.error_kind.as_deref(), Some("permission_denied"));
        let error = row.error.as_deref().unwrap();
        assert!(error.contains(&allow), "{error}");
    }
    assert_eq!(other.requests(), 0);
    let refused = cluster
        .submit(&other.url("/b.jpg"), text(&output))
        .arg("--wait")
        .run();
    assert!(stderr(&refused).contains(&allow), "{}", stderr(&refused));
}

/// R41: the source was opened and listed once for the count and once for the work.
#[test]
fn a_bucket_is_looked_at_and_listed_once() {
    let (folder, server) = (Folder::with_digits(20), S3Server::start());
    folder.upload(&server, "photos");
    let before = server.requests();
    let run = Trommel::classify(Path::new("s3://photos/images/"), &folder.path("rows.jsonl"))
        .env("TROMMEL_S3__ENDPOINT", &server.endpoint())
        .env("AWS_ACCESS_KEY_ID", S3Server::ACCESS_KEY)
        .env("AWS_SECRET_ACCESS_KEY", S3Server::SECRET_KEY)
        .run();
    assert_code(&run, 0);
    assert_each_index_once(&rows(&folder.path("rows.jsonl")), 20);
    // One look whether there is anything, one listing, and each image.
    assert_eq!(server.requests() - before, 2 + 20);
}
