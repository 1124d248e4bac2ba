//! The load of the stages between two polls, and what to change.

use std::collections::HashMap;

use trommel_worker::{JobState, JobStatus, Presence, Role};

/// One poll of the workers and jobs.
pub(super) struct Look {
    pub(super) workers: Vec<Presence>,
    pub(super) jobs: Vec<JobStatus>,
}

/// A stage between two polls.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stage {
    pub(super) role: Role,
    pub(super) workers: usize,
    pub(super) threads: usize,
    /// Images per second.
    pub(super) rate: f64,
    /// Busy share of its threads, 0 to 1; `None` for ingest, which only waits.
    pub(super) busy: Option<f64>,
    /// Messages waiting for it, over all jobs.
    pub(super) waiting: u64,
}

/// Below this share a stage is not the bottleneck.
const SATURATED: f64 = 0.85;

/// The stages in flow order. Workers that started or ended between the polls count from the next
/// poll on.
pub(super) fn stages(before: &Look, now: &Look) -> Vec<Stage> {
    let earlier: HashMap<&str, &Presence> = before
        .workers
        .iter()
        .map(|worker| (worker.id.as_str(), worker))
        .collect();
    let running = || now.jobs.iter().filter(|job| job.state == JobState::Running);
    let waiting = |role: Role| {
        let stages = running().flat_map(|job| &job.stages);
        let of_role = stages.filter(|stage| stage.stage == role);
        of_role.map(|stage| stage.waiting).sum::<u64>()
    };
    let stage = |role: Role| {
        let mut stage = Stage {
            role,
            workers: 0,
            threads: 0,
            rate: 0.0,
            busy: None,
            waiting: waiting(role),
        };
        let mut busy = 0.0;
        for worker in now
            .workers
            .iter()
            .filter(|worker| worker.roles.contains(&role))
        {
            stage.workers += 1;
            let of = |worker: &Presence| worker.work.iter().find(|work| work.role == role).cloned();
            let Some(work) = of(worker) else { continue };
            stage.threads += work.threads;
            let earlier = earlier.get(worker.id.as_str()).copied();
            let Some((past, at)) = earlier.and_then(|past| Some((of(past)?, past.seen_at))) else {
                continue;
            };
            let seconds = (worker.seen_at - at) as f64 / 1e6;
            if seconds > 0.0 {
                stage.rate += work.images.saturating_sub(past.images) as f64 / seconds;
                busy += (work.busy_seconds - past.busy_seconds).max(0.0) / seconds;
            }
        }
        stage.busy = match (role, stage.threads) {
            (Role::Ingest, _) | (_, 0) => None,
            (_, threads) => Some((busy / threads as f64).min(1.0)),
        };
        stage
    };
    Role::ALL.into_iter().map(stage).collect()
}

/// Advice for an operator, most urgent first.
pub(super) fn advice(stages: &[Stage], jobs: &[JobStatus]) -> Vec<String> {
    if !jobs.iter().any(|job| job.state == JobState::Running) {
        return vec!["no job is running".to_owned()];
    }
    let missing = stages.iter().filter(|stage| stage.workers == 0);
    let missing: Vec<_> = missing
        .map(|stage| {
            let role = stage.role.as_str();
            format!("no worker has the role {role}: start trommel worker --role {role}")
        })
        .collect();
    if !missing.is_empty() {
        return missing;
    }
    let of = |role| stages.iter().find(|stage| stage.role == role);
    let (Some(preprocess), Some(infer), Some(sink)) =
        (of(Role::Preprocess), of(Role::Infer), of(Role::Sink))
    else {
        return Vec::new();
    };
    let share = |stage: &Stage| stage.busy.unwrap_or(0.0);
    if share(sink) > SATURATED && sink.waiting > 0 {
        return vec![format!(
            "sink is busy {:.0} % of the time: the store or the database holds the job up; more jobs go \
             to more sinks, one job to one",
            100.0 * share(sink)
        )];
    }
    if share(infer) > SATURATED {
        return vec![format!(
            "infer is busy {:.0} % of the time: add infer workers, or take a smaller precision \
             (INT8, FP16)",
            100.0 * share(infer)
        )];
    }
    if share(preprocess) > SATURATED && share(infer) > 0.0 {
        // As much more preprocessing as saturates infer.
        let more = preprocess.workers as f64 * (1.0 / share(infer) - 1.0);
        return vec![format!(
            "infer waits {:.0} % of the time: add about {} preprocess workers",
            100.0 * (1.0 - share(infer)),
            more.ceil().max(1.0)
        )];
    }
    vec!["no stage is saturated: the source, the store or the broker holds the job up".to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use trommel_types::Lane;
    use trommel_worker::{StageStatus, StageWork};

    fn worker(id: &str, role: Role, at: i64, images: u64, busy_seconds: f64) -> Presence {
        Presence {
            id: id.to_owned(),
            roles: vec![role],
            models: BTreeMap::new(),
            seen_at: at * 1_000_000,
            work: vec![StageWork {
                role,
                threads: 2,
                images,
                busy_seconds,
            }],
            times: std::collections::BTreeMap::new(),
            put_off: Vec::new(),
            requests: Vec::new(),
        }
    }

    fn job(waiting: u64) -> JobStatus {
        let stage = |stage| StageStatus { stage, waiting };
        JobStatus {
            id: "job".to_owned(),
            state: JobState::Running,
            reason: None,
            source: "photos".to_owned(),
            output: "rows/".to_owned(),
            lane: Lane::Normal,
            submitted_at: 0,
            started_at: Some(0),
            finished_at: None,
            listed: 0,
            counted: None,
            total: None,
            dry_run: false,
            retry: None,
            retries: 0,
            retried_by: None,
            cascade: None,
            models: Vec::new(),
            stages: vec![stage(Role::Preprocess), stage(Role::Infer)],
            times: std::collections::BTreeMap::new(),
            cost: None,
            forecast: None,
            eta_seconds: None,
        }
    }

    /// A poll of one worker per role, with `busy` seconds of two threads' four.
    fn looks(prepare: f64, infer: f64) -> (Look, Look) {
        let look = |at: i64| {
            let part = at as f64 / 2.0;
            Look {
                workers: vec![
                    worker("a", Role::Ingest, at, 0, 0.0),
                    worker("b", Role::Preprocess, at, 100 * at as u64, prepare * part),
                    worker("c", Role::Infer, at, 100 * at as u64, infer * part),
                    worker("d", Role::Sink, at, 100 * at as u64, 0.1 * part),
                ],
                jobs: vec![job(7), job(7)],
            }
        };
        (look(0), look(2))
    }

    #[test]
    fn rates_and_shares_are_those_between_the_looks() {
        let (before, now) = looks(4.0, 2.0);
        let stages = stages(&before, &now);
        assert_eq!(stages[1].rate, 100.0);
        assert_eq!(stages[1].busy, Some(1.0));
        assert_eq!(stages[2].busy, Some(0.5));
        assert_eq!(stages[0].busy, None);
        assert_eq!(stages[1].waiting, 14, "what waits of both jobs");
        let said = advice(&stages, &now.jobs);
        assert_eq!(
            said,
            ["infer waits 50 % of the time: add about 1 preprocess workers"]
        );
    }

    #[test]
    fn the_busiest_stage_is_named() {
        let (before, now) = looks(1.0, 3.9);
        let said = advice(&stages(&before, &now), &now.jobs);
        assert!(said[0].starts_with("infer is busy 98 %"), "{said:?}");
        let (before, now) = looks(1.0, 1.0);
        let said = advice(&stages(&before, &now), &now.jobs);
        assert!(said[0].starts_with("no stage is saturated"), "{said:?}");
    }

    #[test]
    fn a_role_that_nobody_has_comes_before_all() {
        let (before, mut now) = looks(4.0, 2.0);
        now.workers
            .retain(|worker| !worker.roles.contains(&Role::Infer));
        let said = advice(&stages(&before, &now), &now.jobs);
        assert_eq!(
            said,
            ["no worker has the role infer: start trommel worker --role infer"]
        );
        now.jobs.clear();
        let said = advice(&stages(&before, &now), &now.jobs);
        assert_eq!(said, ["no job is running"]);
    }

    #[test]
    fn a_worker_that_just_began_counts_from_the_next_look_on() {
        let (mut before, now) = looks(4.0, 2.0);
        before.workers.remove(1);
        let stages = stages(&before, &now);
        assert_eq!((stages[1].workers, stages[1].rate), (1, 0.0));
    }
}
