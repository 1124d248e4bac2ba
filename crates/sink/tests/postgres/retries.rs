//! Failed rows of a table are tried again, and rows are added for images that have none.

use super::*;

fn retry_of(id: &str, number: u32, kinds: &[ErrorKind]) -> JobRecord {
    let retry = Retry {
        number,
        of_run: record(id).run,
        kinds: kinds.to_vec(),
        ..Retry::default()
    };
    JobRecord {
        run: format!("{number:08x}"),
        retry: Some(retry),
        ..record(id)
    }
}

fn labelled(indices: impl IntoIterator<Item = u64>, attempts: u32) -> Vec<Classification> {
    let mut rows = rows(indices);
    for row in &mut rows {
        row.attempts = attempts;
        row.outcome = Outcome::Ok(Scores::default());
    }
    rows
}

/// A retry replaces failed rows, in whatever order the generations come, and nothing else.
#[test]
fn of_several_rows_of_an_index_the_one_of_the_last_retry_stays() {
    let server = PostgresServer::start();
    let table = table(&server, "retried");
    let unknown = open(&table, retry_of("job", 1, &[]), false).err().unwrap();
    assert!(
        unknown.to_string().contains("no rows of job job"),
        "{unknown}"
    );
    let mut sink = sink(&table, "job");
    sink.commit(rows(0..4)).unwrap();
    sink.commit(labelled([4], 1)).unwrap();
    assert_eq!(sink.finish().unwrap().failed, 4);

    let mut late = ready(open(&table, retry_of("job", 1, &[]), false).unwrap());
    assert_eq!(late.wanted(), Some(4));
    let mut newer = ready(open(&table, retry_of("job", 2, &[]), false).unwrap());
    let images: Vec<_> = newer
        .failed_images()
        .iter()
        .map(|image| image.index)
        .collect();
    assert_eq!(images, [0, 1, 2, 3]);
    // Row 4 has a label.
    assert_eq!(newer.commit(labelled([1, 3, 4], 20)).unwrap().rows, 2);
    let lost = late.commit(labelled([1, 3], 10)).unwrap_err();
    assert_eq!(lost.kind(), StorageErrorKind::LostRace, "{lost}");
    assert_eq!(
        server.query("SELECT index, attempts, generation FROM retried ORDER BY index"),
        "0|1|0\n1|20|2\n2|1|0\n3|20|2\n4|1|0"
    );
    let early = ready(open(&table, retry_of("job", 2, &[]), false).unwrap());
    assert_eq!((early.committed().len(), early.wanted()), (2, Some(4)));
    let error = early.finish().unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Incomplete, "{error}");
    newer.commit(rows([0, 2])).unwrap();
    let summary = newer.finish().unwrap();
    let whole = summary.whole.clone().unwrap();
    assert_eq!((whole.images, whole.ok, whole.failed), (5, 3, 2));
    assert_eq!(whole.failures["empty"].count, 2);
    assert_eq!(
        server.query("SELECT job_id, summary->>'ok', summary->>'failed', summary ? 'retried_at' FROM retried_jobs ORDER BY job_id"),
        "job|3|2|t\njob/retry-0001|||\njob/retry-0002|2|2|f"
    );
    // The job itself is as finished as before, and the retry too.
    assert!(matches!(
        open(&table, record("job"), false).unwrap(),
        Opened::Complete(complete) if complete.ok == 3
    ));
    assert!(matches!(
        open(&table, retry_of("job", 2, &[]), false).unwrap(),
        Opened::Complete(complete) if complete.whole == summary.whole && complete.failed == 2
    ));
    // Of kinds that no row has, none is wanted.
    let none = ready(open(&table, retry_of("job", 3, &[ErrorKind::Timeout]), false).unwrap());
    assert_eq!(none.wanted(), Some(0));
}

/// A process that works alone counts its retries itself.
#[test]
fn a_retry_alone_is_resumed_and_then_the_next_one_begins() {
    let server = PostgresServer::start();
    let table = table(&server, "alone");
    let alone = |kinds: &[ErrorKind]| {
        let retry = Retry {
            kinds: kinds.to_vec(),
            ..Retry::default()
        };
        let job = JobRecord {
            job_id: "another-id".to_owned(),
            run: JobRecord::new_run(),
            retry: Some(retry),
            ..record("alone")
        };
        retry_while_locked(|| open_alone(table.clone(), job.clone(), Reuse::Resume))
    };
    let mut first = ready(open_alone(table.clone(), record("alone"), Reuse::Resume).unwrap());
    first.commit(rows(0..3)).unwrap();
    drop(first);
    let error = alone(&[]).err().unwrap();
    assert!(error.to_string().contains("is not finished"), "{error}");
    let first = retry_while_locked(|| open_alone(table.clone(), record("alone"), Reuse::Resume));
    ready(first.unwrap()).finish().unwrap();
    let mut retry = ready(alone(&[]).unwrap());
    assert_eq!(retry.job().job_id, "alone");
    retry.commit(labelled([1], 2)).unwrap();
    drop(retry);
    let error = alone(&[ErrorKind::Empty]).err().unwrap();
    assert!(error.to_string().contains("--retry-failed"), "{error}");
    let mut again = ready(alone(&[]).unwrap());
    assert_eq!((again.committed().len(), again.wanted()), (1, Some(3)));
    again.commit(rows([0, 2])).unwrap();
    assert_eq!(again.finish().unwrap().whole.unwrap().failed, 2);
    let next = ready(alone(&[ErrorKind::Empty]).unwrap());
    assert_eq!(next.job().generation(), 2);
    drop(next);
    let mut next = ready(alone(&[ErrorKind::Empty]).unwrap());
    next.commit(labelled([0, 2], 3)).unwrap();
    next.finish().unwrap();
    let error = alone(&[]).err().unwrap();
    assert!(
        error.to_string().contains("nothing to try again"),
        "{error}"
    );
}

/// New images come behind all others, changed ones take the place of their rows, of images with a label too.
#[test]
fn rows_are_added_for_images_that_have_none() {
    let server = PostgresServer::start();
    let table = table(&server, "added");
    let adds = |id: &str, number: u32, source: &str| {
        let mut job = retry_of(id, number, &[]);
        job.retry.as_mut().unwrap().adds = true;
        job.source = source.to_owned();
        job
    };
    let mut sink = sink(&table, "job");
    sink.commit(labelled(0..3, 1)).unwrap();
    sink.commit(rows([3])).unwrap();
    drop(sink);

    let mut sink = ready(open(&table, adds("job", 1, "s3://bucket/more/"), false).unwrap());
    let mut existing = sink.existing();
    let mut index_for = |name: &str| existing.index_for(name, None);
    let known = rows([1])[0].image.uri.clone();
    assert_eq!((index_for(&known), index_for("new")), (None, Some(4)));
    sink.commit(labelled([1, 4], 10)).unwrap();
    sink.commit(rows([5])).unwrap();
    let mut again = ready(open(&table, adds("job", 1, "s3://bucket/more/"), false).unwrap());
    assert_eq!(again.committed().len(), 3);
    // Whoever lists again gives the same indices: 1 has been written over.
    let mut existing = again.existing();
    let mut index_for = |name: &str| existing.index_for(name, Some("other"));
    assert_eq!((index_for(&known), index_for("new")), (Some(1), Some(4)));
    let summary = again.finish().unwrap();
    let whole = summary.whole.unwrap();
    assert_eq!((summary.images, whole.images, whole.failed), (3, 6, 2));
    assert_eq!(
        server.query("SELECT index, attempts, generation FROM added ORDER BY index"),
        "0|1|0\n1|10|1\n2|1|0\n3|1|0\n4|10|1\n5|1|1"
    );
    // The job is finished with the rows that it lacked.
    assert_eq!(
        server.query(
            "SELECT job_id, summary->>'images', finished_at IS NULL FROM added_jobs ORDER BY job_id"
        ),
        "job|6|f\njob/retry-0001|3|f"
    );
    // Each source has its own failed rows.
    let mut retry = retry_of("job", 2, &[]);
    retry.source = record("job").source;
    let mut own = ready(open(&table, retry, false).unwrap());
    let images = own.failed_images();
    assert_eq!((own.wanted(), images[0].index), (Some(1), 3));
    own.commit(labelled([3], 20)).unwrap();
    assert_eq!(own.finish().unwrap().whole.unwrap().failed, 1);

    // Alone: the job of the same source, or the only one.
    let alone = |source: &str| {
        let job = JobRecord {
            run: JobRecord::new_run(),
            ..adds("another-id", 0, source)
        };
        retry_while_locked(|| open_alone(table.clone(), job.clone(), Reuse::Resume)).unwrap()
    };
    let other = ready(alone("s3://bucket/third/"));
    assert_eq!(
        (other.job().job_id.as_str(), other.job().generation()),
        ("job", 3)
    );
    drop(other);
    drop(ready(
        open_alone(
            table.clone(),
            JobRecord {
                source: "x".to_owned(),
                ..record("second")
            },
            Reuse::Resume,
        )
        .unwrap(),
    ));
    let job = JobRecord {
        run: JobRecord::new_run(),
        ..adds("another-id", 0, "s3://bucket/fourth/")
    };
    let error = open_alone(table.clone(), job, Reuse::Resume).err().unwrap();
    assert!(error.to_string().contains("several jobs"), "{error}");
}
