//! Failed rows are tried again, and the new ones count.

use super::*;

fn retry(number: u32, kinds: &[ErrorKind]) -> JobRecord {
    let retry = Retry {
        number,
        of_run: job().run,
        kinds: kinds.to_vec(),
        ..Retry::default()
    };
    JobRecord {
        run: format!("{number:08x}"),
        retry: Some(retry),
        ..job()
    }
}

pub(super) fn leased(path: &Path, job: JobRecord) -> Result<Opened, StorageError> {
    open_leased(destination(path), job, false, &Arc::default())
}

fn alone(path: &Path, kinds: &[ErrorKind]) -> Result<Opened, StorageError> {
    let job = JobRecord {
        job_id: "another-id".to_owned(),
        ..retry(0, kinds)
    };
    open_alone(destination(path), job, Reuse::Resume)
}

/// Rows with a label that says by which try.
pub(super) fn labelled(indices: impl IntoIterator<Item = u64>, label: &str) -> Vec<Classification> {
    let row = |index| {
        let top = TopLabel {
            label: label.into(),
            class: 1,
            score: 0.5,
        };
        let mut row = row(index);
        row.outcome = Outcome::Ok(Scores {
            top: vec![top],
            logits: Some(vec![0.5]),
            embedding: Some(vec![0.5, 0.25, 0.75]),
        });
        row
    };
    indices.into_iter().map(row).collect()
}

/// Folders and single files of all formats.
pub(super) fn places(dir: &Path) -> Vec<PathBuf> {
    let of = |format: &&str| {
        let folder = format!("out-{format}/?format={format}");
        [folder, format!("rows.{format}")].map(|name| dir.join(name))
    };
    FORMATS.iter().flat_map(of).collect()
}

/// Rows 0..40, of which 3, 13, 23 and 33 have failed.
fn finished(path: &Path) -> Summary {
    let mut sink = open(path);
    sink.commit(rows(0..15)).unwrap();
    sink.commit(rows(15..40)).unwrap();
    sink.finish().unwrap()
}

fn label(path: &Path, index: u64) -> Option<String> {
    let rows = read(destination(path).path());
    assert_eq!(rows.len(), 40, "{}", path.display());
    rows[&index].label.clone()
}

pub(super) fn stored(path: &Path) -> serde_json::Value {
    let text = fs::read(destination(path).parts().join("_summary.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

#[test]
fn of_several_rows_of_an_index_the_one_of_the_last_retry_counts() {
    let dir = tempfile::tempdir().unwrap();
    for path in places(dir.path()) {
        assert_eq!(finished(&path).failed, 4);
        let before = stored(&path);
        let mut first = ready(leased(&path, retry(1, &[])).unwrap());
        assert_eq!((first.committed().len(), first.wanted()), (0, Some(4)));
        let images = first.failed_images();
        assert_eq!(
            images.iter().map(|image| image.index).collect::<Vec<_>>(),
            [3, 13, 23, 33]
        );
        // What the row holds of its image is known again, whatever the format.
        for image in images {
            let row = row(image.index);
            assert_eq!((image.uri, image.etag), (row.image.uri, row.image.etag));
            assert_eq!(image.columns, row.image.columns);
        }
        // Row 4 has a label.
        assert_eq!(first.commit(labelled([3, 4, 13], "try 1")).unwrap().rows, 2);
        // No reader sees a retry before its end.
        assert_eq!(label(&path, 3), None);
        let error = ready(leased(&path, retry(1, &[])).unwrap())
            .finish()
            .unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Incomplete, "{error}");
        first.commit(rows([23, 33])).unwrap();
        let summary = first.finish().unwrap();
        assert_eq!((summary.images, summary.ok, summary.failed), (4, 2, 2));
        let whole = summary.whole.clone().unwrap();
        assert_eq!((whole.images, whole.ok, whole.failed), (40, 38, 2));
        assert_eq!(whole.failures["empty"].count, 2);
        assert_eq!(whole.failures["empty"].example, uri(23));
        match leased(&path, retry(1, &[])).unwrap() {
            Opened::Complete(again) => assert_eq!(*again, summary),
            Opened::Ready(_) => panic!("the retry is finished"),
        }
        assert_eq!(label(&path, 3).as_deref(), Some("try 1"));
        // The job itself is as finished as before, with the new counts.
        assert_eq!(complete(&path), *whole);
        let after = stored(&path);
        assert_eq!(after["started_at"], before["started_at"]);
        assert_eq!(after["finished_at"], before["finished_at"]);
        assert!(after["retried_at"].is_i64(), "{after}");

        let mut second = ready(leased(&path, retry(2, &[ErrorKind::Empty])).unwrap());
        assert_eq!(second.wanted(), Some(2));
        second.commit(labelled([3, 23], "try 2")).unwrap();
        second.commit(rows([33])).unwrap();
        let whole = second.finish().unwrap().whole.unwrap();
        assert_eq!((whole.ok, whole.failed), (39, 1));
        for (index, expected) in [
            (3, "try 1"),
            (13, "try 1"),
            (23, "try 2"),
            (0, "seven, \"7\""),
        ] {
            assert_eq!(
                label(&path, index).as_deref(),
                Some(expected),
                "{}",
                path.display()
            );
        }
        // Nothing failed in such a way.
        let none = ready(leased(&path, retry(3, &[ErrorKind::Timeout])).unwrap());
        assert_eq!(none.wanted(), Some(0));
    }
    let error = leased(&dir.path().join("none/"), retry(1, &[]))
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("no rows of job job-1"),
        "{error}"
    );
    let other = JobRecord {
        run: "0badcafe".to_owned(),
        ..job()
    };
    let path = dir.path().join("other/");
    drop(ready(leased(&path, other).unwrap()));
    let error = leased(&path, retry(1, &[])).err().unwrap();
    assert_eq!(
        error.kind(),
        StorageErrorKind::OutputOfAnotherJob,
        "{error}"
    );
}

/// A sink that crashes on its way to the end of a retry leaves one that the next sink ends.
#[test]
fn a_crash_at_any_step_of_the_end_of_a_retry_is_made_up_for() {
    let dir = tempfile::tempdir().unwrap();
    for path in places(dir.path()) {
        finished(&path);
        let parts = destination(&path).parts().to_owned();
        let own = parts.join("retry-0001");
        let keep = |name: &str| fs::read(own.join(name)).unwrap();
        let mut sink = ready(leased(&path, retry(1, &[])).unwrap());
        sink.commit(labelled([3, 13], "new")).unwrap();
        sink.commit(rows([23, 33])).unwrap();
        let names: Vec<String> = fs::read_dir(&own)
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("part-"))
            .collect();
        let kept: Vec<_> = names.iter().map(|name| (name, keep(name))).collect();
        assert_eq!(kept.len(), 2);
        let summary = sink.finish().unwrap();
        let whole = stored(&path);
        // The steps backwards: before the mark, before the retry's summary.
        for undone in [&["_SUCCESS"][..], &["_SUCCESS", "_summary.json"]] {
            for name in undone {
                fs::remove_file(own.join(name)).unwrap();
            }
            for (name, content) in &kept {
                fs::write(own.join(name), content).unwrap();
            }
            let again = ready(leased(&path, retry(1, &[])).unwrap());
            assert_eq!((again.committed().len(), again.wanted()), (4, Some(4)));
            assert_eq!(again.finish().unwrap(), summary, "{}", path.display());
            let mut now = stored(&path);
            now["retried_at"] = whole["retried_at"].clone();
            assert_eq!(now, whole);
            assert_eq!(label(&path, 3).as_deref(), Some("new"));
        }
    }
}

#[test]
fn a_retry_alone_is_resumed_and_then_the_next_one_begins() {
    let dir = tempfile::tempdir().unwrap();
    for path in places(dir.path()) {
        let error = alone(&path, &[]).err().unwrap();
        assert!(error.to_string().contains("no rows of this job"), "{error}");
        assert!(
            !destination(&path).parts().exists(),
            "it has left something"
        );
        let mut sink = open(&path);
        sink.commit(rows(0..40)).unwrap();
        let locked = alone(&path, &[]).err().unwrap();
        assert_eq!(locked.kind(), StorageErrorKind::Locked, "{locked}");
        drop(sink);
        let error = alone(&path, &[]).err().unwrap();
        assert!(error.to_string().contains("is not finished"), "{error}");
        open(&path).finish().unwrap();
        let error = alone(&path, &[ErrorKind::Timeout]).err().unwrap();
        assert!(error.to_string().contains("failed as timeout"), "{error}");

        let mut first = ready(alone(&path, &[]).unwrap());
        assert_eq!(
            (first.job().job_id.as_str(), first.job().generation()),
            ("job-1", 1)
        );
        first.commit(labelled([3], "new")).unwrap();
        drop(first);
        let error = alone(&path, &[ErrorKind::Empty]).err().unwrap();
        assert!(error.to_string().contains("with --retry-failed"), "{error}");
        let mut again = ready(alone(&path, &[]).unwrap());
        assert!(again.is_resumed());
        assert_eq!(
            (again.committed().len(), again.failed_images().len()),
            (1, 3)
        );
        again.commit(labelled([13], "new")).unwrap();
        again.commit(rows([23, 33])).unwrap();
        again.finish().unwrap();
        let mut next = ready(alone(&path, &[ErrorKind::Empty]).unwrap());
        assert_eq!((next.job().generation(), next.wanted()), (2, Some(2)));
        next.commit(labelled([23, 33], "new")).unwrap();
        assert_eq!(next.finish().unwrap().whole.unwrap().failed, 0);
        assert_eq!(label(&path, 33).as_deref(), Some("new"));
        let error = alone(&path, &[]).err().unwrap();
        assert!(
            error.to_string().contains("nothing to try again"),
            "{error}"
        );
    }
}

/// What a job that failed has committed can be tried again; it stays as unfinished as it is.
#[test]
fn rows_of_a_job_that_has_not_finished_are_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    for path in places(dir.path()) {
        let mut sink = ready(leased(&path, job()).unwrap());
        sink.commit(rows(0..20)).unwrap();
        drop(sink);
        let mut retried = ready(leased(&path, retry(1, &[])).unwrap());
        retried.commit(labelled([3, 13], "new")).unwrap();
        let whole = retried.finish().unwrap().whole.unwrap();
        assert_eq!((whole.images, whole.ok, whole.failed), (20, 20, 0));
        let parts = destination(&path).parts().to_owned();
        assert!(!parts.join("_SUCCESS").exists() && !parts.join("_summary.json").exists());
        let read = read(&parts);
        assert_eq!((read.len(), read[&3].label.as_deref()), (20, Some("new")));
        let mut next = ready(leased(&path, retry(2, &[])).unwrap());
        assert_eq!((next.wanted(), next.failed_images().len()), (Some(0), 0));
    }
}

/// A sink that was stopped while a later retry was finished does not take its counts back.
#[test]
fn a_late_end_of_a_retry_changes_no_counts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out/");
    finished(&path);
    let mut zombie = ready(leased(&path, retry(1, &[])).unwrap());
    zombie.commit(rows([3, 13, 23, 33])).unwrap();
    let mut second = ready(leased(&path, retry(2, &[])).unwrap());
    second.commit(labelled([3, 13, 23, 33], "new")).unwrap();
    second.finish().unwrap();
    let error = zombie.finish().unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
    assert_eq!(stored(&path)["failed"], 0);
    assert_eq!(label(&path, 3).as_deref(), Some("new"));
}
