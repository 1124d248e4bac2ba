use std::fs;
use std::os::unix::fs::symlink;

use proptest::prelude::*;

use super::*;

fn allowed(sources: &[&str], outputs: &[&str]) -> Allowed {
    let owned = |places: &[&str]| places.iter().map(|place| (*place).to_owned()).collect();
    Allowed::new(&AccessConfig {
        sources: owned(sources),
        outputs: owned(outputs),
    })
    .unwrap()
}

fn image(uri: &str, content: Content) -> ImageRef {
    ImageRef {
        job: "job".into(),
        index: 0,
        lane: trommel_types::Lane::Normal,
        uri: uri.to_owned(),
        content,
        etag: None,
        size: None,
        columns: Vec::new(),
    }
}

/// A folder with `data/photos/cat.jpg`, `database/` and `secret/key.pem`, and in `data` the links
/// `out` to `secret`, `in` to `photos` and `nowhere` to what is not there.
fn tree() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    for inner in ["data/photos", "database", "secret"] {
        fs::create_dir_all(root.join(inner)).unwrap();
    }
    fs::write(root.join("data/photos/cat.jpg"), "cat").unwrap();
    fs::write(root.join("secret/key.pem"), "key").unwrap();
    symlink(root.join("secret"), root.join("data/out")).unwrap();
    symlink("photos", root.join("data/in")).unwrap();
    symlink(root.join("secret/absent"), root.join("data/nowhere")).unwrap();
    let root = root.to_str().unwrap().to_owned();
    (folder, root)
}

/// R36, R52: a submitter could name any path, and outputs outside of the worker's folder.
#[test]
fn local_paths_are_allowed_below_the_prefix_and_nowhere_else() {
    let (_folder, root) = tree();
    let data = allowed(&[&format!("{root}/data")], &[&format!("{root}/data/")]);
    let cases = [
        ("data", true),
        ("data/", true),
        ("data//photos/.//cat.jpg", true),
        ("data/photos/*.jpg", true),
        ("data/new/rows.parquet", true),
        ("data/photos/../photos/cat.jpg", true),
        ("database/../data/photos", true),
        ("data/in/cat.jpg", true),
        ("data/photos/cat.jpg/inner", true),
        ("data/%2e%2e/secret", true), // a mere name: only file:// is decoded
        ("", false),
        ("database", false),
        ("data.parquet", false),
        ("secret/key.pem", false),
        ("data/..", false),
        ("data/../secret", false),
        ("data/photos/../../secret/key.pem", false),
        ("data/out", false),
        ("data/out/", false),
        ("data/out/key.pem", false),
        ("data/out/new/rows.parquet", false),
        ("data/in/../../secret/key.pem", false),
        ("data/nowhere", false),
        ("data/nowhere/", false),
        ("data/nowhere/rows.parquet", false),
        ("data/absent/../../secret/new", false),
    ];
    for (path, expected) in cases {
        let uri = format!("{root}/{path}");
        assert_eq!(data.check_source(&uri).is_ok(), expected, "{uri}");
        assert_eq!(data.check_output(&uri).is_ok(), expected, "{uri}");
        let image = image(&uri, Content::Whole);
        assert_eq!(data.check_image(&image).is_ok(), expected, "{uri}");
    }
}

#[test]
fn file_urls_are_the_paths_that_they_encode() {
    let (_folder, root) = tree();
    let data = allowed(&[&format!("file://{root}/data")], &[]);
    let all = allowed(&[], &["/"]);
    let cases = [
        (format!("file://{root}/data/photos/cat.jpg"), true),
        (format!("file://localhost{root}/data/photos"), true),
        (format!("file://{root}/data/photos/%63at.jpg"), true),
        (format!("file://{root}/data/%2e%2e/secret/key.pem"), false),
        (format!("file://{root}/data/..%2fsecret"), false),
        ("file:///etc/passwd".to_owned(), false),
        ("file://".to_owned(), false),
        ("file:///".to_owned(), false),
        (format!("FILE://{root}/data"), false),
        (format!("file://elsewhere{root}/data"), false),
        (format!("file://{root}/data/%00"), false),
    ];
    for (uri, expected) in cases {
        assert_eq!(data.check_source(&uri).is_ok(), expected, "{uri}");
        // Where rows go is a path as it stands: this would be a folder named `file:`.
        assert!(all.check_output(&uri).is_err(), "{uri}");
    }
}

#[test]
fn relative_paths_start_from_where_the_worker_runs() {
    let here = std::env::current_dir().unwrap();
    let sources = allowed(&[here.join("src").to_str().unwrap()], &["src"]);
    for (path, expected) in [
        ("src", true),
        ("src/allow.rs", true),
        ("./src/new", true),
        ("src/../src", true),
        ("Cargo.toml", false),
        (".", false),
        ("..", false),
        ("../../etc", false),
        ("../../../../../../etc/passwd", false),
        ("new/../src", false),
        ("-", false),
    ] {
        assert_eq!(sources.check_source(path).is_ok(), expected, "{path}");
        assert_eq!(sources.check_output(path).is_ok(), expected, "{path}");
    }
}

#[test]
fn by_default_nothing_is_allowed_but_s3() {
    let none = allowed(&[], &[]);
    for (place, expected) in [
        ("s3://bucket/prefix/", true),
        ("s3://bucket", true),
        ("s3://", false),
        ("s3:///key", false),
        ("S3://bucket", false),
        ("gs://bucket/prefix/", false),
        ("az://container/", false),
        ("/", false),
        ("/tmp", false),
        ("photos", false),
        ("nats://bucket.events", false),
        ("postgres://localhost/db?table=t", false),
        ("https://host/x.jpg", false),
        ("", false),
    ] {
        assert_eq!(none.check_source(place).is_ok(), expected, "{place}");
        assert_eq!(none.check_output(place).is_ok(), expected, "{place}");
    }
    assert!(
        none.check_image(&image("x", Content::Inline(vec![1])))
            .is_ok()
    );
}

#[test]
fn buckets_of_other_clouds_are_read_once_they_are_named() {
    let some = allowed(&["gs://photos/cats"], &[]);
    for (place, expected) in [
        ("gs://photos/cats/1.jpg", true),
        ("gs://photos/cats", true),
        ("gs://photos/dogs/1.jpg", false),
        ("gs://other/cats/1.jpg", false),
        ("az://photos/cats/1.jpg", false),
        ("s3://photos/dogs/1.jpg", true),
    ] {
        assert_eq!(some.check_source(place).is_ok(), expected, "{place}");
    }
    let refusal = some.check_source("az://a/b/1.jpg").unwrap_err().to_string();
    assert!(refusal.ends_with("--allow-source az://a/b/"), "{refusal}");
    let refusal = some.check_output("gs://photos/cats/").unwrap_err();
    assert!(refusal.to_string().contains("gs://"), "{refusal}");
    let config = AccessConfig {
        outputs: vec!["az://rows/".to_owned()],
        ..AccessConfig::default()
    };
    assert_eq!(Allowed::new(&config).unwrap_err().len(), 1);
}

#[test]
fn once_a_bucket_is_named_no_other_is_allowed() {
    let some = allowed(&["s3://photos/", "s3://shared/a/b"], &["s3://rows"]);
    for (place, expected) in [
        ("s3://photos/x/y.jpg", true),
        ("s3://photos", true),
        ("s3://photos/../x", true), // a key like any other, in a bucket that is allowed whole
        ("s3://photos2/x.jpg", false),
        ("s3://photo", false),
        ("s3://shared/a/b", true),
        ("s3://shared/a/b/", true),
        ("s3://shared/a/b/*.jpg", true),
        ("s3://shared/a/bc", false),
        ("s3://shared/a/", false),
        ("s3://shared/a/b/../c", false),
        ("s3://shared/a/b/./../../c", false),
        ("s3://rows/x/", false),
    ] {
        assert_eq!(some.check_source(place).is_ok(), expected, "{place}");
    }
    assert!(some.check_output("s3://rows/x/").is_ok());
    assert!(some.check_output("s3://photos/x/").is_err());
}

/// R35, R36: rows, and with them a password, could go to any host.
#[test]
fn databases_are_allowed_by_host_port_and_name() {
    let one = allowed(
        &[],
        &["postgres://db.example:5433/labels", "postgresql://any/"],
    );
    for (place, expected) in [
        ("postgres://db.example:5433/labels?table=t", true),
        (
            "postgresql://me:pass@DB.example:5433/labels?table=t&sslmode=require",
            true,
        ),
        ("postgres://any/whatever?table=t", true),
        ("postgres://any:5432/whatever?table=t", true),
        ("postgres://any:5433/whatever?table=t", false),
        ("postgres://db.example/labels?table=t", false),
        ("postgres://db.example:5433/other?table=t", false),
        ("postgres://db.example:5433?table=t", false),
        ("postgres://db.example:5433/labels/../other?table=t", false),
        ("postgres://stranger/labels?table=t", false),
        ("postgres://db.example:5433,stranger/labels?table=t", false),
        ("postgres://db.example:5433@stranger/labels?table=t", false),
        ("postgres://a@db.example:5433/x@stranger/labels", false),
        (
            "postgres://db.example:5433/labels?table=t&host=stranger",
            false,
        ),
        (
            "postgres://db.example:5433/labels?table=t&%68ostaddr=10.0.0.1",
            false,
        ),
        ("postgres://db.example:5433/labels?dbname=other", false),
        ("postgres://any/x?table=t@stranger/y", false),
        ("postgres:///labels?table=t", false),
        ("postgres://%2Fvar%2Frun/labels?table=t", false),
    ] {
        assert_eq!(one.check_output(place).is_ok(), expected, "{place}");
    }
    assert!(one.check_source("postgres://any/whatever").is_err());
}

#[test]
fn subjects_are_allowed_with_their_wildcards() {
    let some = allowed(
        &["nats://bucket.events", "nats://shop.*.new", "nats://all.>"],
        &[],
    );
    for (place, expected) in [
        ("nats://bucket.events", true),
        ("nats://shop.a.new", true),
        ("nats://shop.*.new", true),
        ("nats://all.a.b", true),
        ("nats://all.>", true),
        ("nats://all", false),
        ("nats://shop.>", false),
        ("nats://shop.a.old", false),
        ("nats://*.events", false),
        ("nats://>", false),
        ("nats://trommel.api.>", false),
        ("nats://", false),
        ("nats://all..b", false),
    ] {
        assert_eq!(some.check_source(place).is_ok(), expected, "{place}");
        assert!(some.check_output(place).is_err(), "{place}");
    }
}

#[test]
fn hosts_of_the_web_are_allowed_by_name_with_what_is_below() {
    let none = allowed(&[], &[]);
    assert!(none.check_source("https://a.example/x.jpg").is_err());
    let some = allowed(
        &[
            "https://a.example",
            "https://b.example/photos/2024",
            "http://c.example:8080/",
        ],
        &[],
    );
    for (url, expected) in [
        ("https://a.example/", true),
        ("https://a.example/x/../y.jpg?w=1", true),
        ("https://a.example/x/..%2f..%2fy.jpg", true),
        ("HTTPS://A.example:443/x.jpg", true),
        ("http://a.example/x.jpg", false),
        ("https://a.example:444/x.jpg", false),
        ("https://a.example.evil.example/x.jpg", false),
        ("https://a.example@evil.example/x.jpg", false),
        ("https://evil.example/?https://a.example/", false),
        ("https://b.example/photos/2024/x.jpg", true),
        ("https://b.example/photos/2024", true),
        ("https://b.example/photos/2024-private/x.jpg", false),
        ("https://b.example/photos/2024/../x.jpg", false),
        ("https://b.example/photos/2024/%2e%2e/x.jpg", false),
        ("https://b.example/photos/2024/..%2fx.jpg", false),
        ("https://b.example/photos/2024/..%5cx.jpg", false),
        ("http://c.example:8080/x.jpg", true),
        ("http://c.example/x.jpg", false),
    ] {
        assert_eq!(some.check_source(url).is_ok(), expected, "{url}");
        let image = image(url, Content::Whole);
        assert_eq!(some.check_image(&image).is_ok(), expected, "{url}");
        assert!(some.check_output(url).is_err(), "{url}");
    }
    let refusal = |url: &str| some.check_source(url).unwrap_err().to_string();
    let other = refusal("https://d.example/photos/x.jpg?token=hunter2");
    assert!(
        other.ends_with("--allow-source https://d.example/"),
        "{other}"
    );
    let secret = refusal("https://me:hunter2@a.example/x.jpg");
    assert!(!secret.contains("hunter2"), "{secret}");
    let rule = Arc::new(some).rule();
    assert!(rule.check("https://a.example/x").is_ok() && rule.check("https://d.example/").is_err());
}

#[test]
fn of_an_archive_or_a_table_the_file_counts() {
    let (_folder, root) = tree();
    let data = allowed(&[&format!("{root}/data")], &[]);
    let in_archive = |archive: String| Content::Range {
        archive,
        offset: 0,
        length: 1,
    };
    let in_table = |file: String| Content::ParquetCell {
        file,
        column: "image".to_owned(),
        row: 0,
    };
    for (file, expected) in [("data/photos/x", true), ("secret/key.pem", false)] {
        let file = format!("{root}/{file}");
        let in_zip = Content::ZipMember {
            archive: file.clone(),
            offset: 0,
            name_length: 1,
            length: 1,
            size: 1,
            method: 0,
            checksum: 0,
            encrypted: false,
        };
        let unpacked = Content::Unpacked {
            archive: file.clone(),
            packing: trommel_types::Packing::Gzip,
            offset: 0,
            length: 1,
        };
        for content in [in_archive(file.clone()), in_table(file), in_zip, unpacked] {
            // The name of a member is no path of ours.
            let member = image(&format!("{root}/data/x.tar/../../etc"), content);
            assert_eq!(data.check_image(&member).is_ok(), expected, "{member:?}");
        }
    }
}

#[test]
fn a_refusal_names_the_flag_and_gives_no_secret_away() {
    let (_folder, root) = tree();
    let data = allowed(&[&format!("{root}/data"), "s3://a/"], &[]);
    let source = |place: &str| data.check_source(place).unwrap_err().to_string();
    let output = |place: &str| data.check_output(place).unwrap_err().to_string();
    let ends = |refusal: String, end: &str| assert!(refusal.ends_with(end), "{refusal}");
    ends(source("/srv/photos"), "--allow-source /srv/photos");
    ends(source("s3://b/x/*.jpg"), "--allow-source s3://b/x/");
    ends(source("nats://x.y"), "--allow-source nats://x.y");
    ends(output("/srv/rows/"), "--allow-output /srv/rows/");
    let cat = image("file:///srv/photos/cat.jpg", Content::Whole);
    let refusal = data.check_image(&cat).unwrap_err().to_string();
    ends(refusal, "--allow-source /srv/photos");
    let database = output("postgres://me:hunter2@db/labels?table=t&password=hunter2");
    assert!(!database.contains("hunter2"), "{database}");
    ends(database, "--allow-output postgres://db:5432/labels");
    let linked = source(&format!("{root}/data/out/key.pem"));
    assert!(
        linked.contains("--allow-source") && !linked.contains("secret"),
        "{linked}"
    );
    let long = source(&"x\n".repeat(300_000));
    assert!(long.len() < 2000 && !long.contains('\n'), "{long}");
}

#[test]
fn what_cannot_be_allowed_is_a_problem_of_the_configuration() {
    let problems = |sources: &[&str], outputs: &[&str]| {
        let owned = |places: &[&str]| places.iter().map(|place| (*place).to_owned()).collect();
        Allowed::new(&AccessConfig {
            sources: owned(sources),
            outputs: owned(outputs),
        })
        .unwrap_err()
    };
    let found = problems(
        &["", "ftp://host/", "s3://"],
        &["postgres://me:hunter2@db/labels"],
    );
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(found[3].starts_with("access.outputs: "), "{found:?}");
    assert_eq!(problems(&[], &["nats://x"]).len(), 1);
}

proptest! {
    /// Whatever is allowed lies inside of the prefix, also once it has been created.
    #[test]
    fn no_path_leads_out(
        names in prop::collection::vec(
            prop::sample::select(vec![
                "data", "photos", "out", "in", "nowhere", "secret", "new", "cat.jpg", "..", ".", "",
                "%2e%2e", "..%2f..",
            ]),
            0..7,
        ),
        scheme in prop::sample::select(vec!["", "file://", "file://localhost"]),
    ) {
        let (_folder, root) = tree();
        let data = allowed(&[&format!("{root}/data")], &[&format!("{root}/data")]);
        let uri = format!("{scheme}{root}/data/{}", names.join("/"));
        if data.check_output(&uri).is_ok() {
            let path = to_path(&uri);
            // What is a file in the middle of the path cannot be created; nothing is then written.
            drop(fs::create_dir_all(&path));
            if let Ok(real) = path.canonicalize() {
                let inside = Path::new(&root).join("data");
                prop_assert!(real.starts_with(&inside), "{uri} leads to {}", real.display());
            }
        }
    }
}
