//! What a crash leaves, put there by hand, and writers that do not know of each other.

use super::*;

const MARKS: [&str; 2] = ["_SUCCESS", "_summary.json"];

/// The parts of a single file, as they were before the last step of its job.
struct Before(Vec<(PathBuf, Vec<u8>)>);

impl Before {
    fn of(path: &Path) -> Self {
        let dir = parts_of(path);
        let parts = names(&dir)
            .into_iter()
            .filter(|name| name.starts_with("part-"));
        let read = |path: PathBuf| (path.clone(), fs::read(&path).unwrap());
        Self(parts.map(|name| read(dir.join(name))).collect())
    }

    fn restore(&self) {
        self.0
            .iter()
            .for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
    }
}

/// A job of six rows in two parts, finished; and its parts from before.
fn finished(path: &Path) -> (Summary, Before) {
    let mut sink = open(path);
    sink.commit(rows(0..3)).unwrap();
    sink.commit(rows(3..6)).unwrap();
    let before = Before::of(path);
    assert_eq!(before.0.len(), 2);
    (sink.finish().unwrap(), before)
}

fn no_part_is_left(path: &Path) {
    let left = names(&parts_of(path));
    assert_eq!(left, ["_SUCCESS", "_job.json", "_lock", "_summary.json"]);
}

#[test]
fn hidden_files_of_a_crash_are_removed_and_count_for_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        let path = dir.path().join(format!("rows.{format}"));
        open(&path).commit(rows(0..3)).unwrap();
        let parts = parts_of(&path);
        // Before the link: half a part. After it: the part under both names. In the merge: half a
        // file. While the job is created: half a record.
        let half = parts.join(format!(".part-00000001-0a1b2c3d.{format}.77-0.tmp"));
        fs::write(&half, b"half").unwrap();
        let part = parts.join(format!("part-00000000-0a1b2c3d.{format}"));
        fs::hard_link(
            &part,
            parts.join(format!(".part-00000000-0a1b2c3d.{format}.77-1.tmp")),
        )
        .unwrap();
        fs::write(parts.join(".merged.77-2.tmp"), b"half").unwrap();
        fs::write(parts.join("._job.json.77-3.tmp"), b"{").unwrap();

        let mut sink = open(&path);
        let part_name = format!("part-00000000-0a1b2c3d.{format}");
        assert_eq!(names(&parts), ["_job.json", "_lock", part_name.as_str()]);
        assert_eq!(sink.committed().len(), 3);
        sink.commit(rows(0..6)).unwrap();
        sink.finish().unwrap();
        assert_eq!(indices(&path), [0, 1, 2, 3, 4, 5]);
        no_part_is_left(&path);
    }
}

#[test]
fn a_crash_before_the_record_of_the_job_leaves_a_folder_that_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out/");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("_lock"), "77").unwrap();
    fs::write(path.join("._job.json.77-0.tmp"), b"{").unwrap();
    assert!(!open(&path).is_resumed());
}

#[test]
fn a_crash_between_the_single_file_and_its_marks_ends_right() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        // After the file; after the summary too.
        for marks in [&MARKS[..], &MARKS[..1]] {
            let path = dir.path().join(format!("rows-{}.{format}", marks.len()));
            let (summary, before) = finished(&path);
            before.restore();
            marks
                .iter()
                .for_each(|mark| fs::remove_file(parts_of(&path).join(mark)).unwrap());

            let sink = open(&path);
            assert_eq!(sink.committed().len(), 6);
            assert_eq!(sink.finish().unwrap(), summary);
            assert_eq!(indices(&path), [0, 1, 2, 3, 4, 5]);
            no_part_is_left(&path);
        }
    }
}

#[test]
fn a_crash_while_parts_are_removed_ends_right() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        let path = dir.path().join(format!("rows.{format}"));
        let (summary, before) = finished(&path);
        before.restore();
        fs::remove_file(&before.0[0].0).unwrap();
        assert_eq!(complete(&path), summary);
        no_part_is_left(&path);
        assert_eq!(indices(&path), [0, 1, 2, 3, 4, 5]);
    }
}

#[test]
fn a_source_that_has_grown_after_such_a_crash_gets_all_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.csv");
    let (_, before) = finished(&path);
    before.restore();
    MARKS
        .iter()
        .for_each(|mark| fs::remove_file(parts_of(&path).join(mark)).unwrap());
    let mut sink = open(&path);
    sink.commit(rows(0..8)).unwrap();
    sink.finish().unwrap();
    assert_eq!(indices(&path), (0..8).collect::<Vec<_>>());
}

#[test]
fn results_that_were_taken_away_are_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rows.jsonl");
    finished(&file);
    fs::remove_file(&file).unwrap();
    assert!(
        open(&file).committed().is_empty(),
        "its rows were in the file only"
    );

    let folder = dir.path().join("folder/");
    finished(&folder);
    fs::remove_file(folder.join("part-00000000-0a1b2c3d.parquet")).unwrap();
    let mut sink = open(&folder);
    assert_eq!(sink.committed().iter().collect::<Vec<_>>(), [3, 4, 5]);
    let made = sink.commit(rows(0..6)).unwrap();
    assert_eq!(made.part.as_deref(), Some("part-00000002-0a1b2c3d.parquet"));
    sink.finish().unwrap();
    assert_eq!(indices(&folder), [0, 1, 2, 3, 4, 5]);
}

/// Opens a folder that another sink holds, as on a file system that loses locks.
fn open_despite_lock(path: &Path) -> Sink {
    fs::remove_file(parts_of(path).join("_lock")).unwrap();
    open(path)
}

#[test]
fn of_two_sinks_on_one_folder_one_loses_each_race_and_no_row_stands_twice() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        let path = dir.path().join(format!("out-{format}/?format={format}"));
        let mut zombie = open(&path);
        zombie.commit(rows(0..2)).unwrap();
        let mut heir = open_despite_lock(&path);
        heir.commit(rows(2..4)).unwrap();

        for _ in 0..2 {
            let error = zombie.commit(rows(2..6)).unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
            assert!(error.to_string().contains("part-00000001"), "{error}");
        }
        heir.commit(rows(0..6)).unwrap();
        heir.finish().unwrap();
        let folder = destination(&path).path().to_owned();
        assert_eq!(indices(&folder), [0, 1, 2, 3, 4, 5]);
        assert!(names(&folder).iter().all(|name| !name.ends_with(".tmp")));
    }
}

#[test]
fn sinks_that_race_for_every_part_leave_each_row_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out/?format=jsonl");
    drop(open(&path));
    let sinks: Vec<_> = (0..8).map(|_| open_despite_lock(&path)).collect();
    let barrier = std::sync::Barrier::new(sinks.len());
    let run = |mut sink: Sink| {
        barrier.wait();
        let mut wins = 0;
        for start in (0..40).step_by(4) {
            match sink.commit(rows(start..start + 4)) {
                Ok(_) => wins += 1,
                Err(error) => {
                    assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
                    break;
                }
            }
        }
        wins
    };
    let run = &run;
    let wins: Vec<usize> = std::thread::scope(|scope| {
        let threads: Vec<_> = sinks
            .into_iter()
            .map(|sink| scope.spawn(move || run(sink)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(
        wins.iter().filter(|wins| **wins == 10).count(),
        1,
        "{wins:?}"
    );
    assert_eq!(wins.iter().sum::<usize>(), 10, "{wins:?}");
    assert_eq!(
        indices(&dir.path().join("out")),
        (0..40).collect::<Vec<_>>()
    );
}

#[test]
fn a_second_live_process_is_told_who_holds_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.csv");
    let first = open(&path);
    for overwrite in [false, true] {
        let error = refusals::refused(&path, overwrite);
        assert_eq!(error.kind(), StorageErrorKind::Locked, "{error}");
        assert!(
            error
                .to_string()
                .contains(&format!("pid {}", std::process::id())),
            "{error}"
        );
    }
    drop(first);
    assert!(open(&path).is_resumed());
}

/// A job and run as a worker with a lease opens them.
fn leased(path: &Path, id: &str, run: &str, overwrite: bool) -> Sink {
    let job = JobRecord {
        job_id: id.to_owned(),
        run: run.to_owned(),
        ..job()
    };
    let claims = Arc::new(KeptClaims::default());
    ready(open_leased(destination(path), job, overwrite, &claims).unwrap())
}

/// R5, R11: a job is cancelled and overwritten by a new one, and the old sink's part lands only
/// then. Its rows never count, and it cannot end the new job.
#[test]
fn what_an_old_run_commits_late_never_counts() {
    for (format, after_the_end) in FORMATS.into_iter().flat_map(|f| [(f, false), (f, true)]) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("out/?format={format}"));
        let folder = dir.path().join("out");
        let mut old = leased(&path, "job-1", "00000001", true);
        old.commit(rows(0..3)).unwrap();
        let mut new = leased(&path, "job-2", "00000002", true);
        assert!(new.committed().is_empty());
        new.commit(rows(0..2)).unwrap();
        if !after_the_end {
            old.commit(rows(3..9)).unwrap();
            // A sink that takes the new job over does not see them either.
            drop(new);
            new = leased(&path, "job-2", "00000002", true);
            assert_eq!(
                new.committed().len(),
                2,
                "the same run never clears rows (R1)"
            );
        }
        new.commit(rows(2..4)).unwrap();
        let summary = new.finish().unwrap();
        assert_eq!((summary.run.as_str(), summary.images), ("00000002", 4));
        if after_the_end {
            old.commit(rows(3..9)).unwrap();
        } else {
            let parts = names(&folder).into_iter();
            let parts: Vec<_> = parts.filter(|name| name.starts_with("part-")).collect();
            assert_eq!(parts.len(), 2, "{parts:?}");
        }
        let error = old.finish().unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
        assert_eq!(indices(&folder), [0, 1, 2, 3]);
        let again = JobRecord {
            job_id: "job-2".to_owned(),
            run: "00000002".to_owned(),
            ..job()
        };
        let claims = Arc::new(KeptClaims::default());
        let opened = open_leased(destination(&path), again, true, &claims).unwrap();
        assert!(matches!(opened, Opened::Complete(complete) if *complete == summary));
    }
}

/// A run that is resumed is the same whatever else differs; another one is refused.
#[test]
fn a_leased_output_is_resumed_by_its_run_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out/");
    leased(&path, "job-1", "00000001", false)
        .commit(rows(0..3))
        .unwrap();
    let claims = Arc::new(KeptClaims::default());
    let mut other = JobRecord {
        run: "00000001".to_owned(),
        source: "folder cats".to_owned(),
        ..job()
    };
    let opened = open_leased(destination(&path), other.clone(), false, &claims).unwrap();
    assert_eq!(ready(opened).committed().len(), 3);
    other.run = "00000002".to_owned();
    let error = open_leased(destination(&path), other, false, &claims)
        .err()
        .unwrap();
    assert_eq!(
        error.kind(),
        StorageErrorKind::OutputOfAnotherJob,
        "{error}"
    );
    assert!(error.to_string().contains("folder cats"), "{error}");
}

/// R39.
#[test]
fn an_index_that_rows_cannot_hold_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut sink = open(&dir.path().join("out/"));
    let mut hostile = row(1);
    hostile.image.index = u64::MAX;
    let error = sink.commit(vec![row(0), hostile]).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("2^63"), "{error}");
    assert_eq!(sink.commit(rows([0])).unwrap().rows, 1);
}
