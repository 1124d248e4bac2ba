//! The one job of an embedded run.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use roaring::RoaringTreemap;
use trommel_infer::Wanted;
use trommel_types::{Classification, ImageRef};

use crate::WorkerError;
use crate::job::{JobPlan, Jobs, Planned, PlannedModel};
use crate::tried::Tried;

/// The job of a process that runs no other.
pub(crate) struct OneJob {
    plan: JobPlan,
    /// The rows of each model that were committed before this run.
    committed: Vec<RoaringTreemap>,
    /// Absent for a run whose rows are not stored.
    tried: Option<Arc<Tried>>,
    /// With several models: those that have stored a row of an image, until all have.
    stored: Mutex<HashMap<u64, Vec<Arc<str>>>>,
}

impl OneJob {
    /// `committed` has the rows of each model of the plan.
    pub(crate) fn new(
        plan: JobPlan,
        committed: Vec<RoaringTreemap>,
        tried: Option<Arc<Tried>>,
    ) -> Self {
        Self {
            plan,
            committed,
            tried,
            stored: Mutex::default(),
        }
    }

    /// The models that have no row of an image yet.
    fn missing(&self, index: u64) -> impl Iterator<Item = &PlannedModel> {
        let each = self.plan.models.iter().zip(&self.committed);
        let lacks = move |(_, rows): &(_, &RoaringTreemap)| !rows.contains(index);
        each.filter(lacks).map(|(model, _)| model)
    }

    /// Whether this row is the last of its image.
    fn is_last(&self, row: &Classification) -> bool {
        let index = row.image.index;
        if self.plan.models.len() == 1 {
            return true;
        }
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let models = stored.entry(index).or_default();
        if !models.contains(&row.model) {
            models.push(Arc::clone(&row.model));
        }
        let is_last = self
            .missing(index)
            .all(|model| models.contains(&model.id.name));
        if is_last {
            stored.remove(&index);
        }
        is_last
    }
}

#[async_trait]
impl Jobs for OneJob {
    async fn plan(&self, image: &ImageRef) -> Result<Planned, WorkerError> {
        let mut plan = self.plan.clone();
        if plan.models.len() > 1 {
            plan.models = self.missing(image.index).cloned().collect();
        }
        Ok(Planned::Running(plan))
    }

    async fn rows(&self, _: &ImageRef) -> Result<Arc<Wanted>, WorkerError> {
        Ok(Arc::clone(&self.plan.rows))
    }

    async fn columns(&self, _: &str) -> Result<usize, WorkerError> {
        Ok(self.plan.columns)
    }

    async fn fail(&self, _: &str, error: WorkerError) -> Result<(), WorkerError> {
        Err(error)
    }

    fn begin(&self, image: &ImageRef) -> u32 {
        let tried = self.tried.as_ref();
        tried.map_or(0, |tried| tried.begin(image.index))
    }

    fn end(&self, row: &Classification) {
        if let Some(tried) = &self.tried
            && self.is_last(row)
        {
            tried.end(row.image.index);
        }
    }

    async fn try_again(
        &self,
        _: &'static str,
        _: &str,
        _: &str,
        attempt: u32,
    ) -> Result<u32, WorkerError> {
        Ok(attempt)
    }
}

#[cfg(test)]
mod tests {
    use trommel_preprocess::{Plan, Reference};
    use trommel_types::{Content, Failure, Lane, Mode};

    use super::*;
    use crate::job::ModelId;
    use crate::settle::Subject;

    fn image(index: u64) -> ImageRef {
        ImageRef {
            job: "job".into(),
            index,
            lane: Lane::Normal,
            uri: format!("{index}.png"),
            content: Content::Whole,
            etag: None,
            size: None,
            columns: Vec::new(),
        }
    }

    fn job(models: &[(&str, &[u64])], tried: Option<Arc<Tried>>) -> OneJob {
        let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/digits");
        let plan = Arc::new(Plan::load(digits.as_ref(), Reference::Auto).unwrap());
        let planned = models.iter().map(|(name, _)| PlannedModel {
            id: ModelId {
                name: (*name).into(),
                version: "1".into(),
            },
            plan: Arc::clone(&plan),
            also: None,
        });
        let plan = JobPlan {
            models: planned.collect(),
            mode: Mode::Exact,
            phash: false,
            rows: Arc::default(),
            columns: 0,
            image_deadline: None,
        };
        let committed = models.iter().map(|(_, rows)| rows.iter().collect());
        OneJob::new(plan, committed.collect(), tried)
    }

    async fn planned(job: &OneJob, index: u64) -> Vec<String> {
        let Ok(Planned::Running(plan)) = job.plan(&image(index)).await else {
            panic!("image {index} has no plan");
        };
        let names = plan.models.iter().map(|model| model.id.name.to_string());
        names.collect()
    }

    #[tokio::test]
    async fn an_image_is_prepared_only_for_the_models_that_have_no_row_of_it() {
        let job = job(&[("one", &[0, 1]), ("two", &[1])], None);
        assert_eq!(planned(&job, 0).await, ["two"]);
        assert_eq!(planned(&job, 2).await, ["one", "two"]);
    }

    /// A process that dies while the second model runs has died during the image.
    #[test]
    fn an_image_is_done_when_the_last_of_its_models_has_stored_its_row() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let tried = || Arc::new(Tried::open(&path, &RoaringTreemap::new()));
        let row = |index, model: &str| {
            let failure = Failure {
                kind: trommel_types::ErrorKind::Timeout,
                error: String::new(),
            };
            let model = ModelId {
                name: model.into(),
                version: "1".into(),
            };
            image(index).failed(failure, 1, &model)
        };
        let run = job(&[("one", &[2]), ("two", &[])], Some(tried()));
        for index in 0..3 {
            assert_eq!(run.begin(&image(index)), 0);
        }
        run.end(&row(0, "one"));
        run.end(&row(0, "one")); // a repeat
        run.end(&row(1, "two"));
        run.end(&row(1, "one"));
        run.end(&row(2, "two"));
        assert!(run.stored.lock().unwrap().contains_key(&0));
        assert_eq!(run.stored.lock().unwrap().len(), 1);
        drop(run);
        // Lines of finished images are written with those of the next ones.
        let next = tried();
        assert_eq!(next.begin(0), 1);
    }
}
