//! What a sink refuses to touch, and what it says then.

use super::*;

pub(crate) fn refused(path: &Path, overwrite: bool) -> StorageError {
    match try_open(path, overwrite) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => error,
    }
}

/// The content of every file below a folder, but for the lock.
fn snapshot(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(snapshot(&path));
        } else if !path.ends_with("_lock") {
            found.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    found
}

#[test]
fn another_job_is_told_what_differs_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    open(&path).commit(rows(0..2)).unwrap();
    let before = snapshot(dir.path());
    let no_columns = JobRecord {
        columns: Vec::new(),
        ..job()
    };
    let others = [
        (
            JobRecord {
                source: "folder cats".to_owned(),
                ..job()
            },
            ["folder photos", "folder cats"],
        ),
        (
            JobRecord {
                model: "birds".to_owned(),
                ..job()
            },
            ["digits", "birds"],
        ),
        (
            JobRecord {
                model_version: "ffff".to_owned(),
                ..job()
            },
            ["0123456789ab", "ffff"],
        ),
        (
            JobRecord {
                options: BTreeMap::from([("top-k".to_owned(), "5".to_owned())]),
                ..job()
            },
            ["top-k was 2", "is 5"],
        ),
        (
            JobRecord {
                logits: false,
                embedding: false,
                embedding_type: Default::default(),
                ..job()
            },
            ["true", "false"],
        ),
        (no_columns, ["\"weight\" Float", "none"]),
    ];
    for (other, values) in others {
        let error = match open_alone(destination(&path), other, Reuse::Resume) {
            Ok(_) => panic!("opened for another job"),
            Err(error) => error,
        };
        assert_eq!(
            error.kind(),
            StorageErrorKind::OutputOfAnotherJob,
            "{error}"
        );
        for word in values.iter().chain(&["--output", "--overwrite"]) {
            assert!(error.to_string().contains(word), "{error}");
        }
    }
    assert_eq!(snapshot(dir.path()), before);

    drop(open(&dir.path().join("out/?format=csv")));
    let error = refused(&dir.path().join("out/?format=jsonl"), false);
    assert!(
        error.to_string().contains("format was csv, is jsonl"),
        "{error}"
    );
}

#[test]
fn files_of_others_are_never_touched() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rows.csv");
    fs::write(&file, "uri,label\na.jpg,cat\n").unwrap();
    // Parts without the record of a job may be another program's, or another job's.
    let folder = dir.path().join("out/");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("part-00000000-0a1b2c3d.parquet"), b"PAR1").unwrap();
    let in_the_way = dir.path().join("x.jsonl.parts");
    fs::write(&in_the_way, b"a file").unwrap();
    let dangling = dir.path().join("link.csv");
    std::os::unix::fs::symlink(dir.path().join("nowhere"), &dangling).unwrap();

    let before = {
        fs::remove_file(&dangling).unwrap();
        let before = snapshot(dir.path());
        std::os::unix::fs::symlink(dir.path().join("nowhere"), &dangling).unwrap();
        before
    };
    for overwrite in [false, true] {
        for path in [&file, &folder, &dir.path().join("x.jsonl"), &dangling] {
            let error = refused(path, overwrite);
            assert_eq!(error.kind(), StorageErrorKind::OutputExists, "{error}");
            assert!(error.to_string().contains("another --output"), "{error}");
        }
    }
    assert!(dangling.symlink_metadata().unwrap().is_symlink());
    fs::remove_file(&dangling).unwrap();
    assert_eq!(snapshot(dir.path()), before);
}

#[test]
fn overwriting_removes_what_is_trommels_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("out/");
    open(&folder).commit(rows(0..2)).unwrap();
    fs::write(folder.join("notes.txt"), "mine").unwrap();
    let mut sink = ready(try_open(&folder, true).unwrap());
    assert!(!sink.is_resumed() && sink.committed().is_empty());
    assert_eq!(names(&folder), ["_job.json", "_lock", "notes.txt"]);
    sink.commit(rows(0..3)).unwrap();
    sink.finish().unwrap();
    assert_eq!(indices(&folder), [0, 1, 2]);
    assert_eq!(
        fs::read_to_string(folder.join("notes.txt")).unwrap(),
        "mine"
    );
}

#[test]
fn an_overwritten_file_stays_until_the_new_one_takes_its_place() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        let path = dir.path().join(format!("rows.{format}"));
        let mut sink = open(&path);
        sink.commit(rows(0..2)).unwrap();
        sink.finish().unwrap();
        let next = JobRecord {
            job_id: "job-2".to_owned(),
            model: "birds".to_owned(),
            ..job()
        };
        let again = |reuse| ready(open_alone(destination(&path), next.clone(), reuse).unwrap());
        again(Reuse::Overwrite).commit(rows(0..3)).unwrap();
        assert_eq!(indices(&path), [0, 1]);
        // A crash; the job resumes without the flag too.
        let mut sink = again(Reuse::Resume);
        sink.commit(rows(3..4)).unwrap();
        sink.finish().unwrap();
        assert_eq!(indices(&path), [0, 1, 2, 3], "{format}");
    }
}

#[test]
fn a_file_that_comes_up_while_the_job_runs_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        let path = dir.path().join(format!("rows.{format}"));
        let mut sink = open(&path);
        sink.commit(rows(0..2)).unwrap();
        fs::write(&path, "a letter").unwrap();
        let error = sink.finish().unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::OutputExists, "{error}");
        assert_eq!(refused(&path, false).kind(), StorageErrorKind::OutputExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "a letter");
        fs::remove_file(&path).unwrap();
        open(&path).finish().unwrap();
        assert_eq!(indices(&path), [0, 1], "{format}");

        fs::write(&path, "a letter").unwrap();
        let error = refused(&path, false);
        assert_eq!(
            error.kind(),
            StorageErrorKind::OutputExists,
            "finished, but not this: {error}"
        );
    }
}

#[test]
fn damaged_files_are_named_with_the_way_on() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        let path = dir.path().join(format!("rows.{format}"));
        let mut sink = open(&path);
        sink.commit(rows(0..3)).unwrap();
        sink.commit(rows(3..5)).unwrap();
        drop(sink);
        let part = parts_of(&path).join(format!("part-00000001-0a1b2c3d.{format}"));
        let whole = fs::read(&part).unwrap();
        let other =
            fs::read(parts_of(&path).join(format!("part-00000000-0a1b2c3d.{format}"))).unwrap();
        let cut = |len: usize| whole[..len].to_vec();
        for damage in [
            Vec::new(),
            cut(whole.len() / 2),
            cut(whole.len() - 1),
            other,
        ] {
            fs::write(&part, damage).unwrap();
            let error = refused(&path, false);
            assert_eq!(error.kind(), StorageErrorKind::Corrupt, "{error}");
            assert!(error.to_string().contains("part-00000001"), "{error}");
            assert!(error.to_string().contains("remove it"), "{error}");
        }
        // The remedy works.
        fs::remove_file(&part).unwrap();
        let mut sink = open(&path);
        sink.commit(rows(0..5)).unwrap();
        sink.finish().unwrap();
        assert_eq!(indices(&path), [0, 1, 2, 3, 4]);
    }
    let record = parts_of(&dir.path().join("rows.csv")).join("_job.json");
    fs::write(record, "{").unwrap();
    let error = refused(&dir.path().join("rows.csv"), false);
    assert_eq!(error.kind(), StorageErrorKind::Corrupt);
    assert!(error.to_string().contains("--overwrite"), "{error}");
    assert!(matches!(
        try_open(&dir.path().join("rows.csv"), true),
        Ok(Opened::Ready(_))
    ));
}

#[test]
fn a_part_of_another_job_is_not_taken_in() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        let (mine, theirs) = (dir.path().join("mine/"), dir.path().join("theirs/"));
        let typed = |dir: &Path| PathBuf::from(format!("{}/?format={format}", dir.display()));
        drop(open(&typed(&mine)));
        let other = JobRecord {
            job_id: "job-2".to_owned(),
            ..job()
        };
        let opened = open_alone(destination(&typed(&theirs)), other, Reuse::Resume);
        let mut sink = ready(opened.unwrap());
        sink.commit(rows(0..2)).unwrap();
        let name = format!("part-00000000-0a1b2c3d.{format}");
        fs::copy(theirs.join(&name), mine.join(&name)).unwrap();
        let error = refused(&typed(&mine), false);
        assert_eq!(error.kind(), StorageErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("job-2"), "{error}");
        fs::remove_dir_all(&mine).unwrap();
        fs::remove_dir_all(&theirs).unwrap();
    }
}

#[test]
fn what_cannot_be_written_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let error = refused(&dir.path().join("file/out/"), false);
    assert!(error.to_string().contains("file/out"), "{error}");
    let error = refused(&dir.path().join("absent/rows.csv"), false);
    assert_eq!(error.kind(), StorageErrorKind::InvalidDestination);
    assert!(error.to_string().contains("absent"), "{error}");
    assert_eq!(names(dir.path()), ["file"]);
}

#[test]
fn what_is_no_result_is_not_read_and_nobody_is_told_to_remove_it() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["x.csv", "x.jsonl", "x.parquet"] {
        let path = dir.path().join(name);
        fs::write(&path, "uri,label\na.jpg,cat\n").unwrap();
        let error = match read_rows(&path) {
            Ok(mut rows) => rows.next().unwrap().unwrap_err(),
            Err(error) => error,
        };
        assert!(error.to_string().contains(name) && !error.to_string().contains("remove"));
    }
    let kind = |name: &str| read_rows(&dir.path().join(name)).err().unwrap().kind();
    assert_eq!(kind("x.txt"), StorageErrorKind::InvalidSource);
    assert_eq!(kind("absent.csv"), StorageErrorKind::NotFound);
    assert_eq!(kind(""), StorageErrorKind::NotFound);
}
