//! Rows are added to those of a job, for images that have none.

use super::retries::{labelled, leased, places, stored};
use super::*;

fn adds(number: u32, source: &str) -> JobRecord {
    let retry = Retry {
        number,
        of_run: job().run,
        adds: true,
        ..Retry::default()
    };
    JobRecord {
        run: format!("{number:08x}"),
        retry: Some(retry),
        source: source.to_owned(),
        ..job()
    }
}

/// As a process that works alone, on another listing.
fn alone(path: &Path) -> Sink {
    let job = JobRecord {
        job_id: "another-id".to_owned(),
        run: JobRecord::new_run(),
        ..adds(0, "folder more")
    };
    ready(open_alone(destination(path), job, Reuse::Resume).unwrap())
}

/// The indices of images with these numbers and etags.
fn indices_for(sink: &mut Sink, images: &[(u64, Option<&str>)]) -> Vec<Option<u64>> {
    let mut existing = sink.existing();
    let images = images.iter();
    images
        .map(|(number, etag)| existing.index_for(&uri(*number), *etag))
        .collect()
}

/// Rows of these indices, with the uris of these numbers, and another etag.
fn moved(rows: &[(u64, u64)], label: &str) -> Vec<Classification> {
    let row = |(index, number): &(u64, u64)| {
        let mut row = labelled([*index], label).remove(0);
        row.image.uri = uri(*number);
        row.image.etag = Some("other".to_owned());
        row
    };
    rows.iter().map(row).collect()
}

/// Each uri once, with its label.
fn labels(path: &Path) -> BTreeMap<String, Option<String>> {
    let mut labels = BTreeMap::new();
    for row in read_rows(destination(path).path()).unwrap() {
        let row = row.unwrap();
        let before = labels.insert(row.uri.clone(), row.label);
        assert_eq!(before, None, "{} stands twice", row.uri);
    }
    labels
}

const OTHER: Option<&str> = Some("other");

#[test]
fn new_images_come_behind_all_others_and_changed_ones_in_their_places() {
    let dir = tempfile::tempdir().unwrap();
    for path in places(dir.path()) {
        let mut sink = open(&path);
        sink.commit(rows(0..40)).unwrap();
        sink.finish().unwrap();
        let before = stored(&path);

        let mut sink = ready(leased(&path, adds(1, "folder more")).unwrap());
        assert_eq!((sink.committed().len(), sink.wanted()), (0, None));
        // 4 has changed, 5 has no etag to tell by, 90 is new.
        let listed = [(0, Some("etag")), (4, OTHER), (5, OTHER), (90, OTHER)];
        let expected = [None, Some(4), None, Some(40)];
        assert_eq!(indices_for(&mut sink, &listed), expected);
        sink.commit(moved(&[(40, 90)], "added")).unwrap();
        // Whoever lists again gives the same indices, whatever is committed.
        let mut again = ready(leased(&path, adds(1, "folder more")).unwrap());
        assert_eq!(indices_for(&mut again, &listed), expected);
        assert_eq!(again.committed().len(), 1);
        // No reader sees them before the end.
        assert_eq!(labels(&path).len(), 40);
        again.commit(moved(&[(4, 4)], "changed")).unwrap();
        let summary = again.finish().unwrap();
        assert_eq!((summary.images, summary.failed), (2, 0));
        let whole = *summary.whole.clone().unwrap();
        assert_eq!((whole.images, whole.ok, whole.failed), (41, 37, 4));

        let found = labels(&path);
        assert_eq!(found.len(), 41, "{}", path.display());
        assert_eq!(found[&uri(4)].as_deref(), Some("changed"));
        assert_eq!(found[&uri(90)].as_deref(), Some("added"));
        assert_eq!(complete(&path), whole);
        let after = stored(&path);
        assert_eq!(after["finished_at"], before["finished_at"]);
        match leased(&path, adds(1, "folder more")).unwrap() {
            Opened::Complete(again) => assert_eq!(*again, summary),
            Opened::Ready(_) => panic!("it is finished"),
        }

        // The next one stands on both.
        let mut next = ready(leased(&path, adds(2, "folder more")).unwrap());
        let listed = [(4, OTHER), (90, OTHER), (90, Some("third")), (91, None)];
        assert_eq!(
            indices_for(&mut next, &listed),
            [None, None, Some(40), Some(41)]
        );
        next.commit(moved(&[(40, 90), (41, 91)], "next")).unwrap();
        let whole = next.finish().unwrap().whole.unwrap();
        assert_eq!((whole.images, whole.failed), (42, 4));
        assert_eq!(labels(&path)[&uri(90)].as_deref(), Some("next"));
    }
}

#[test]
fn what_is_interrupted_goes_on_alone_and_what_has_nothing_new_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for path in places(dir.path()) {
        // There is nothing yet, so all of it is new.
        let first = alone(&path);
        assert!(!first.job().adds());
        drop(first);
        fs::remove_dir_all(destination(&path).parts()).unwrap();
        let mut sink = open(&path);
        sink.commit(rows(0..40)).unwrap();
        sink.finish().unwrap();
        let mut first = alone(&path);
        assert_eq!(first.job().job_id, "job-1");
        assert_eq!(
            indices_for(&mut first, &[(90, None), (91, None)]),
            [Some(40), Some(41)]
        );
        first.commit(moved(&[(41, 91)], "first")).unwrap();
        drop(first);
        // The listing is another one now: what is committed keeps its index, and no index is left out.
        let mut again = alone(&path);
        assert!(again.is_resumed());
        assert_eq!(
            indices_for(&mut again, &[(89, None), (90, None), (91, None)]),
            [Some(40), Some(42), None]
        );
        again.commit(moved(&[(40, 89), (42, 90)], "again")).unwrap();
        let whole = again.finish().unwrap().whole.unwrap();
        assert_eq!((whole.images, labels(&path).len()), (43, 43));
        assert_eq!(labels(&path)[&uri(91)].as_deref(), Some("first"));
        let before = stored(&path);
        let whole = alone(&path).finish().unwrap().whole.unwrap();
        assert_eq!((whole.images, whole.failed), (43, 4));
        assert_eq!(stored(&path), before);
        let left = destination(&path).parts().join("retry-0002/_job.json");
        assert!(!left.exists());
    }
}

/// A job that ended early is finished by the one that adds what it lacks.
#[test]
fn a_job_that_was_not_finished_is_with_the_rows_that_are_added() {
    let dir = tempfile::tempdir().unwrap();
    for path in places(dir.path()) {
        let mut sink = ready(leased(&path, job()).unwrap());
        sink.commit(rows(0..20)).unwrap();
        drop(sink);
        let mut sink = ready(leased(&path, adds(1, "folder photos")).unwrap());
        let listed = [(3, None), (20, None), (21, None)];
        assert_eq!(indices_for(&mut sink, &listed), [None, Some(20), Some(21)]);
        sink.commit(rows(20..22)).unwrap();
        let whole = sink.finish().unwrap().whole.unwrap();
        assert_eq!((whole.images, whole.failed), (22, 2));
        assert_eq!(labels(&path).len(), 22, "{}", path.display());
        assert_eq!(complete(&path), *whole);
        let parts = names(destination(&path).parts());
        let own = parts.iter().filter(|name| name.starts_with("part-"));
        let is_file = destination(&path).path() != destination(&path).parts();
        assert_eq!(own.count(), usize::from(!is_file));
    }
}

/// A job that went on meanwhile has taken the indices that the interrupted one had given.
#[test]
fn rows_that_were_added_to_what_is_not_there_any_more_do_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out/");
    let mut base = open(&path);
    base.commit(rows(0..5)).unwrap();
    drop(base);
    let mut first = alone(&path);
    first.commit(moved(&[(5, 90)], "lost")).unwrap();
    drop(first);
    let mut base = open(&path);
    base.commit(rows(5..8)).unwrap();
    base.finish().unwrap();
    let mut again = alone(&path);
    assert_eq!(again.job().generation(), 2);
    assert_eq!(
        indices_for(&mut again, &[(90, None), (6, None)]),
        [Some(8), None]
    );
    again.commit(moved(&[(8, 90)], "kept")).unwrap();
    again.finish().unwrap();
    let found = labels(&path);
    assert_eq!((found.len(), found[&uri(90)].as_deref()), (9, Some("kept")));
    assert!(found.contains_key(&uri(5)));
    // And the job does not continue once others are added to it.
    let part = names(&path)
        .into_iter()
        .find(|name| name.starts_with("part-"));
    fs::remove_file(path.join(part.unwrap())).unwrap();
    let error = try_open(&path, false).err().unwrap();
    assert!(error.to_string().contains("--skip-existing"), "{error}");
}

/// Failed rows of the one source are not looked for in the other.
#[test]
fn a_retry_takes_only_failed_rows_of_its_own_source() {
    let dir = tempfile::tempdir().unwrap();
    let retry = |number, source: &str| {
        let mut retry = adds(number, source);
        retry.retry.as_mut().unwrap().adds = false;
        retry
    };
    for path in places(dir.path()) {
        let mut sink = open(&path);
        sink.commit(rows(0..20)).unwrap();
        sink.finish().unwrap();
        let mut sink = ready(leased(&path, adds(1, "folder more")).unwrap());
        sink.commit(rows(20..30)).unwrap();
        sink.finish().unwrap();
        let own = leased(&path, retry(2, &job().source));
        if destination(&path).path() != destination(&path).parts() {
            let error = own.err().unwrap();
            assert!(error.to_string().contains("folder more"), "{error}");
            continue;
        }
        let mut own = ready(own.unwrap());
        let wanted = |sink: &mut Sink| {
            let images = sink.failed_images().into_iter();
            images.map(|image| image.index).collect::<Vec<_>>()
        };
        assert_eq!((wanted(&mut own), own.wanted()), (vec![3, 13], Some(2)));
        own.commit(labelled([3, 13], "new")).unwrap();
        let whole = own.finish().unwrap().whole.unwrap();
        assert_eq!((whole.images, whole.failed), (30, 1));
        let mut other = ready(leased(&path, retry(3, "folder more")).unwrap());
        assert_eq!(wanted(&mut other), [23]);
        other.commit(labelled([23], "new")).unwrap();
        assert_eq!(other.finish().unwrap().whole.unwrap().failed, 0);
    }
}

#[test]
fn rows_of_another_shape_are_not_added() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out/");
    let mut sink = open(&path);
    sink.commit(rows(0..5)).unwrap();
    sink.finish().unwrap();
    for (other, word) in [
        (
            JobRecord {
                model_version: "fedcba987654".to_owned(),
                ..adds(0, "folder photos")
            },
            "model version",
        ),
        (
            JobRecord {
                logits: false,
                ..adds(0, "folder photos")
            },
            "logits",
        ),
        (
            JobRecord {
                columns: Vec::new(),
                ..adds(0, "folder photos")
            },
            "columns",
        ),
    ] {
        let error = open_alone(destination(&path), other, Reuse::Resume)
            .err()
            .unwrap();
        assert_eq!(
            error.kind(),
            StorageErrorKind::OutputOfAnotherJob,
            "{error}"
        );
        assert!(error.to_string().contains(word), "{error}");
        assert!(!path.join("retry-0001").exists());
    }
    // One that only lists something else gets an error that names the flag.
    let other = JobRecord {
        source: "folder more".to_owned(),
        ..job()
    };
    let error = open_alone(destination(&path), other, Reuse::Resume)
        .err()
        .unwrap();
    assert!(error.to_string().contains("--skip-existing"), "{error}");
}

/// A sink that crashes on its way to the end leaves one that the next sink ends, with the same counts.
#[test]
fn a_crash_at_any_step_of_the_end_is_made_up_for() {
    let dir = tempfile::tempdir().unwrap();
    for path in places(dir.path()) {
        for is_finished in [true, false] {
            drop(fs::remove_dir_all(destination(&path).parts()));
            drop(fs::remove_file(destination(&path).path()));
            let mut sink = open(&path);
            sink.commit(rows(0..20)).unwrap();
            match is_finished {
                true => drop(sink.finish().unwrap()),
                false => drop(sink),
            }
            let parts = destination(&path).parts().to_owned();
            let own = parts.join("retry-0001");
            let mut sink = ready(leased(&path, adds(1, "folder more")).unwrap());
            sink.commit(moved(&[(2, 2), (20, 90), (21, 91)], "new"))
                .unwrap();
            let keep = |folder: &Path| -> Vec<_> {
                let names = names(folder).into_iter();
                let names = names.filter(|name| name.starts_with("part-"));
                names
                    .map(|name| (folder.join(&name), fs::read(folder.join(&name)).unwrap()))
                    .collect()
            };
            let kept: Vec<_> = keep(&own).into_iter().chain(keep(&parts)).collect();
            let summary = sink.finish().unwrap();
            let whole = summary.whole.clone().unwrap();
            assert_eq!((whole.images, whole.failed), (22, 2));
            // The steps backwards.
            let steps = [
                own.join("_SUCCESS"),
                own.join("_summary.json"),
                parts.join("_SUCCESS"),
                parts.join("_summary.json"),
            ];
            let steps = if is_finished { &steps[..2] } else { &steps[..] };
            for count in 1..=steps.len() {
                for undone in &steps[..count] {
                    drop(fs::remove_file(undone));
                }
                for (part, content) in &kept {
                    fs::write(part, content).unwrap();
                }
                let again = ready(leased(&path, adds(1, "folder more")).unwrap());
                assert_eq!(again.committed().len(), 3);
                let ended = again.finish().unwrap();
                assert_eq!(
                    ended.whole.unwrap().images,
                    22,
                    "{} {count}",
                    path.display()
                );
                assert_eq!(labels(&path).len(), 22);
                assert_eq!(labels(&path)[&uri(2)].as_deref(), Some("new"));
                assert_eq!(stored(&path)["images"], 22);
            }
        }
    }
}
