//! Rows in S3, against a store that checks signatures.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::{Arc, Barrier};

use common::{KeptClaims, Sink, open_alone, open_leased, ready, record, row, server, wait};
use trommel_sink::{
    Claims, Destination, Format, JobRecord, Leased, Opened, Output, Preconditions, Retry, Reuse,
    Summary,
};
use trommel_storage::StorageErrorKind;
use trommel_storage::testsuite::S3Server;
use trommel_types::Classification;

fn rows(indices: impl IntoIterator<Item = u64>) -> Vec<Classification> {
    let row = |index| row(index, &format!("s3://bucket/images/{index}.jpg"));
    indices.into_iter().map(row).collect()
}

fn destination(server: &S3Server, text: &str) -> Destination {
    Destination::in_bucket(text, Format::Parquet, &server.config())
        .unwrap()
        .unwrap()
}

type Claimed = Arc<KeptClaims>;

#[track_caller]
fn sink(to: &Destination, claims: &Claimed) -> Sink {
    ready(open_leased(to.clone(), record(), false, claims).unwrap())
}

/// Runs a test on a store that honours preconditions, and on one that ignores them.
fn on_both_kinds_of_store(test: impl Fn(&S3Server, &Destination, &Claimed)) {
    for ignores in [false, true] {
        let server = server();
        server.ignore_preconditions(ignores);
        let claims = Claimed::default();
        test(&server, &destination(&server, "s3://bucket/rows/"), &claims);
    }
}

#[test]
fn rows_are_committed_once_and_a_job_is_resumed() {
    on_both_kinds_of_store(|server, to, claims| {
        let mut first = sink(to, claims);
        assert_eq!(first.commit(rows(0..100)).unwrap().rows, 100);
        assert_eq!(first.commit(rows(50..150)).unwrap().rows, 50);
        assert_eq!(first.commit(rows(0..10)).unwrap().part, None);
        drop(first);
        let mut second = sink(to, claims);
        assert_eq!(second.committed().len(), 150);
        second.commit(rows(151..200)).unwrap();
        let error = sink(to, claims).finish().unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Incomplete, "{error}");
        second.commit(rows(150..151)).unwrap();
        let summary = second.finish().unwrap();
        assert_eq!((summary.images, summary.failed), (200, 200));
        assert!(server.path("bucket", "rows/_SUCCESS").exists());
        let stored = std::fs::read(server.path("bucket", "rows/_summary.json")).unwrap();
        let stored: Summary = serde_json::from_slice(&stored).unwrap();
        assert_eq!(stored, summary);
        assert!(matches!(
            open_leased(to.clone(), record(), false, claims).unwrap(),
            Opened::Complete(complete) if *complete == summary
        ));
    });
}

#[test]
fn a_sink_that_has_lost_its_job_commits_nothing_twice() {
    on_both_kinds_of_store(|server, to, claims| {
        let mut zombie = sink(to, claims);
        zombie.commit(rows(0..10)).unwrap();
        let mut heir = sink(to, claims);
        heir.commit(rows(5..20)).unwrap();
        let error = zombie.commit(rows(10..30)).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
        // The other way round: the heir is late, reads again and continues.
        let mut zombie = sink(to, claims);
        zombie.commit(rows(20..25)).unwrap();
        let error = heir.commit(rows(20..30)).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
        let mut heir = sink(to, claims);
        assert_eq!(heir.commit(rows(20..30)).unwrap().rows, 5);
        let summary = heir.finish().unwrap();
        assert_eq!(summary.images, 30);
        let total: u64 = summary.parts.iter().map(|part| part.rows).sum();
        assert_eq!(total, 30);
        let there = std::fs::read_dir(server.path("bucket", "rows")).unwrap();
        let names = there.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name.starts_with("part-")).collect();
        names.sort();
        let counted: Vec<_> = summary.parts.iter().map(|part| part.name.clone()).collect();
        assert_eq!(names, counted, "parts that do not count are removed");
    });
}

#[test]
fn of_sixteen_sinks_one_wins_each_part() {
    on_both_kinds_of_store(|_, to, claims| {
        drop(sink(to, claims));
        let barrier = Barrier::new(16);
        let won: Vec<bool> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16_u64)
                .map(|number| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        let mut sink = sink(to, claims);
                        barrier.wait();
                        match sink.commit(rows(number * 10..number * 10 + 10)) {
                            Ok(_) => true,
                            Err(error) if error.kind() == StorageErrorKind::LostRace => false,
                            Err(error) => panic!("{error}"),
                        }
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert_eq!(won.iter().filter(|won| **won).count(), 1);
        assert_eq!(sink(to, claims).committed().len(), 10);
    });
}

#[test]
fn a_claim_that_was_never_committed_is_taken_over() {
    let server = server();
    server.ignore_preconditions(true);
    let to = destination(&server, "s3://bucket/rows/");
    let claims = Claimed::default();
    let mut crashed = sink(&to, &claims);
    crashed.commit(rows(0..10)).unwrap();
    // It died between its claim and its part.
    wait(claims.open(1, None)).unwrap();
    let mut heir = sink(&to, &claims);
    heir.commit(rows(10..20)).unwrap();
    assert_eq!(heir.finish().unwrap().images, 20);
}

#[test]
fn outputs_that_cannot_be_used_are_refused() {
    let server = server();
    server.put("bucket", "mine/letter.txt", b"hands off");
    let open = |to: &str, job: JobRecord, reuse| {
        open_alone(destination(&server, to), job, reuse)
            .err()
            .unwrap()
    };
    let error = open("s3://bucket/mine/", record(), Reuse::Overwrite);
    assert_eq!(error.kind(), StorageErrorKind::OutputExists, "{error}");
    assert!(error.to_string().contains("letter.txt"), "{error}");

    let error = open("s3://none/rows/", record(), Reuse::Resume);
    assert!(
        error.to_string().contains("the bucket does not exist"),
        "{error}"
    );

    let rows_of_one = destination(&server, "s3://bucket/rows/");
    let claims = Claimed::default();
    sink(&rows_of_one, &claims).commit(rows(0..3)).unwrap();
    let other = || JobRecord {
        job_id: "other".to_owned(),
        run: "0b0b0b0b".to_owned(),
        ..record()
    };
    let leased = |overwrite| open_leased(rows_of_one.clone(), other(), overwrite, &claims);
    let error = leased(false).err().unwrap();
    assert_eq!(
        error.kind(),
        StorageErrorKind::OutputOfAnotherJob,
        "{error}"
    );
    assert!(ready(leased(true).unwrap()).committed().is_empty());

    server.ignore_preconditions(true);
    let error = open("s3://bucket/new/", record(), Reuse::Resume);
    assert!(error.to_string().contains("If-None-Match"), "{error}");

    for wrong in [
        "s3://bucket/rows.parquet",
        "s3:///x/",
        "s3://bucket/x/?format=xml",
    ] {
        let error = Destination::in_bucket(wrong, Format::Parquet, &server.config());
        let error = error.unwrap_err();
        assert_eq!(
            error.kind(),
            StorageErrorKind::InvalidDestination,
            "{error}"
        );
    }
    let local = Destination::in_bucket("rows/", Format::Parquet, &server.config());
    assert!(local.unwrap().is_none());
}

#[test]
fn text_parts_are_resumed_too() {
    for format in ["jsonl", "csv"] {
        let server = server();
        let to = destination(&server, &format!("s3://bucket/rows/?format={format}"));
        let claims = Claimed::default();
        sink(&to, &claims).commit(rows(0..7)).unwrap();
        let mut again = sink(&to, &claims);
        assert_eq!(again.committed().len(), 7);
        again.commit(rows(5..9)).unwrap();
        assert_eq!(again.finish().unwrap().images, 9);
    }
}

/// R5 in a bucket, and R60: nothing is left behind but what counts.
#[test]
fn late_parts_of_an_old_run_never_count_and_no_claim_or_probe_stays() {
    on_both_kinds_of_store(|server, to, claims| {
        let mut old = sink(to, claims);
        old.commit(rows(0..3)).unwrap();
        let new = || JobRecord {
            job_id: "new".to_owned(),
            run: "0b0b0b0b".to_owned(),
            ..record()
        };
        let open = || ready(open_leased(to.clone(), new(), true, claims).unwrap());
        let mut sink = open();
        sink.commit(rows(0..2)).unwrap();
        // On stores that ignore preconditions it loses the number to the new run's claim.
        drop(old.commit(rows(3..9)));
        drop(sink);
        let mut sink = open();
        assert_eq!(sink.committed().len(), 2);
        sink.commit(rows(2..4)).unwrap();
        let summary = sink.finish().unwrap();
        assert_eq!((summary.run.as_str(), summary.images), ("0b0b0b0b", 4));
        assert!(claims.lock().1.is_empty());
        let there = std::fs::read_dir(server.path("bucket", "rows")).unwrap();
        let names = there.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        let parts = summary.parts.iter().map(|part| part.name.as_str());
        let expected: Vec<_> = ["_SUCCESS", "_job.json", "_summary.json"]
            .into_iter()
            .chain(parts)
            .collect();
        assert_eq!(names, expected);
    });
}

/// R58: what was found once holds for all sinks of the job.
#[test]
fn whether_preconditions_are_honoured_is_decided_once() {
    on_both_kinds_of_store(|server, to, claims| {
        let mut first = sink(to, claims);
        let found = first.preconditions();
        assert_ne!(found, Preconditions::Probe);
        first.commit(rows(0..3)).unwrap();
        drop(first);
        // A proxy that changes its mind.
        server.ignore_preconditions(found == Preconditions::Honoured);
        let lease = Leased {
            overwrite: false,
            claims: Arc::clone(claims) as Arc<dyn Claims>,
            preconditions: found,
        };
        let output = Output::from(to.clone());
        let sink = ready(wait(output.open_leased(record(), lease)).unwrap());
        assert_eq!((sink.preconditions(), sink.committed().len()), (found, 3));
    });
}

#[test]
fn rows_for_new_images_are_added_to_a_finished_job() {
    let server = server();
    let to = destination(&server, "s3://bucket/rows/?format=csv");
    let mut sink = ready(open_alone(to.clone(), record(), Reuse::Resume).unwrap());
    sink.commit(rows(0..3)).unwrap();
    sink.finish().unwrap();
    let retry = Retry {
        adds: true,
        ..Retry::default()
    };
    let job = JobRecord {
        run: JobRecord::new_run(),
        retry: Some(retry),
        ..record()
    };
    let mut sink = ready(open_alone(to, job, Reuse::Resume).unwrap());
    let mut existing = sink.existing();
    let mut index_for = |name: &str| {
        let uri = format!("s3://bucket/images/{name}.jpg");
        existing.index_for(&uri, None)
    };
    assert_eq!((index_for("1"), index_for("new")), (None, Some(3)));
    sink.commit(rows(3..4)).unwrap();
    assert_eq!(sink.finish().unwrap().whole.unwrap().images, 4);
}
