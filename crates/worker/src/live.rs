//! Answers requests: one image at a time, without a persistent queue.
//!
//! An image is decoded on the CPU pool and classified by the engine, in the live lane of both. If
//! the client leaves, work that has not begun is skipped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use bytes::Bytes;
use thiserror::Error;
use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;
use trommel_infer::Wanted;
use trommel_preprocess::{Plan, Prepared};
use trommel_sink::JobRecord;
use trommel_types::{
    Classification, Content, Failure, ImageRef, ImageSize, Lane, Mode, Outcome, RowOptions,
};

use crate::admission::{Admission, Entry};
use crate::asked_rows::AskedRows;
use crate::clock::now;
use crate::fatal::Fatal;
use crate::fault::{Scope, TaskError};
use crate::job::{ModelId, PlannedModel};
use crate::live_engine::{EngineAnswer, EngineFault, LiveEngine, LiveImage};
use crate::preprocess::PreparePool;
use crate::{Progress, WorkerConfig, WorkerError};

/// Threads that only decode images of requests, while jobs occupy all others.
const RESERVED: usize = 1;
/// What `source` is in the rows of requests.
const SOURCE: &str = "request";

/// A warm model, and its preprocessing.
pub struct LiveModel {
    /// Its name in requests.
    pub name: Arc<str>,
    /// Preprocessing.
    pub plan: Arc<Plan>,
    /// The running model.
    pub engine: LiveEngine,
}

/// Models that answer requests.
pub struct Answers {
    models: BTreeMap<Arc<str>, Arc<ServedModel>>,
    pool: Arc<PreparePool>,
    max_pixels: u64,
    progress: Arc<Progress>,
    fatal: Fatal,
}

/// A model as requests see it.
pub struct ServedModel {
    id: ModelId,
    planned: Arc<[PlannedModel]>,
    engine: LiveEngine,
    mode: Mode,
    wanted: Arc<Wanted>,
    asked: AskedRows,
    admission: Arc<Admission>,
    /// Images being decoded that will reach the engine.
    coming: AtomicUsize,
}

/// An admitted request. Dropping it makes room for another.
pub struct Admitted {
    model: Arc<ServedModel>,
    entry: Entry,
}

/// An image of a request.
#[derive(Debug, Clone)]
pub struct LiveRequest {
    /// The job id in the row.
    pub id: Arc<str>,
    /// The image's position in the request.
    pub index: u64,
    /// The uri in the row.
    pub uri: String,
    /// The encoded image.
    pub bytes: Bytes,
    /// The row options. See [`ServedModel::rows`].
    pub wanted: Arc<Wanted>,
    /// When the client stops waiting.
    pub deadline: Option<Instant>,
}

/// Why a request has no row.
#[derive(Debug, Error)]
pub enum NotAnswered {
    /// The queue is as long as requests can be answered in time.
    #[error("model {model} has as many requests as it answers in time; try again later")]
    Full {
        /// The model.
        model: Arc<str>,
    },
    /// Its deadline has passed, or would pass before the work is done.
    #[error("the deadline of the request has passed")]
    Expired,
    /// The model does not support such rows.
    #[error("{0}")]
    Settings(String),
    /// No infer worker serves the model.
    #[error("{0}")]
    Away(String),
    /// The process has failed.
    #[error("{0}")]
    Broken(String),
}

impl Answers {
    /// Starts the decoding threads.
    ///
    /// # Errors
    /// If threads cannot be started, or two models have the same name.
    pub fn start(
        models: Vec<LiveModel>,
        rows: &RowOptions,
        config: &WorkerConfig,
    ) -> Result<Self, WorkerError> {
        let pool = Arc::new(PreparePool::start(&config.preprocess)?);
        Self::on(pool, models, rows, config)
    }

    /// As [`Answers::start`], on threads shared with jobs.
    ///
    /// # Errors
    /// As [`Answers::start`].
    pub(crate) fn on(
        pool: Arc<PreparePool>,
        models: Vec<LiveModel>,
        rows: &RowOptions,
        config: &WorkerConfig,
    ) -> Result<Self, WorkerError> {
        pool.reserve_live(RESERVED)?;
        let mut served = BTreeMap::new();
        for model in models {
            let model = ServedModel::new(model, rows, config);
            let name = Arc::clone(&model.id.name);
            if served.insert(Arc::clone(&name), Arc::new(model)).is_some() {
                return Err(WorkerError::Settings(format!(
                    "two models are called {name}; rename the folder of one of them"
                )));
            }
        }
        Ok(Self {
            models: served,
            pool,
            max_pixels: config.serve.max_pixels,
            progress: Arc::default(),
            fatal: Fatal::new(&CancellationToken::new()),
        })
    }

    /// The models sorted by name.
    pub fn models(&self) -> impl Iterator<Item = &Arc<ServedModel>> {
        self.models.values()
    }

    /// A model by its name.
    pub fn model(&self, name: &str) -> Option<&Arc<ServedModel>> {
        self.models.get(name)
    }

    /// Fires when the process has failed; [`Answers::cause`] has the reason.
    pub fn broken(&self) -> &CancellationToken {
        self.fatal.token()
    }

    /// Returns the cause of the failure, once.
    ///
    /// # Errors
    /// That error.
    pub fn cause(&self) -> Result<(), WorkerError> {
        self.fatal.clone().into_result()
    }

    /// The row of one image. A failed row is an answer too.
    ///
    /// Cancel-safe: parts of the work that no thread has begun are skipped when it is dropped.
    ///
    /// # Errors
    /// See [`NotAnswered`].
    pub async fn classify(
        &self,
        admitted: &Admitted,
        request: LiveRequest,
    ) -> Result<Classification, NotAnswered> {
        let row = match request.deadline {
            None => self.row(&admitted.model, request).await?,
            Some(deadline) if deadline <= Instant::now() => return Err(NotAnswered::Expired),
            Some(deadline) => {
                let row = timeout_at(deadline.into(), self.row(&admitted.model, request));
                row.await.unwrap_or(Err(NotAnswered::Expired))?
            }
        };
        admitted.entry.answered(Instant::now());
        Ok(row)
    }

    async fn row(
        &self,
        model: &Arc<ServedModel>,
        request: LiveRequest,
    ) -> Result<Classification, NotAnswered> {
        let length = request.bytes.len() as u64;
        let image = ImageRef {
            job: Arc::clone(&request.id),
            index: request.index,
            lane: Lane::Live,
            uri: request.uri.clone(),
            content: Content::Whole,
            etag: None,
            size: None,
            columns: Vec::new(),
        };
        let answered = self.answer(model, request).await;
        let (original, outcome) = match answered {
            Ok((size, EngineAnswer::Scores(scores))) => (Some(size), Outcome::Ok(scores)),
            Ok((size, EngineAnswer::Failed(failure))) => (Some(size), Outcome::Failed(failure)),
            Err(EngineFault::There(reason)) => return Err(reason),
            Err(EngineFault::Here(error)) => match error.scope() {
                Scope::Image(kind) => {
                    let error = error.to_string();
                    (None, Outcome::Failed(Failure { kind, error }))
                }
                Scope::Job(_) => return Err(NotAnswered::Settings(error.to_string())),
                Scope::Nothing => return Err(NotAnswered::Broken(error.to_string())),
                Scope::Worker => return Err(self.end(error)),
            },
        };
        Ok(Classification {
            image,
            model: Arc::clone(&model.id.name),
            model_version: Arc::clone(&model.id.version),
            bytes: Some(length),
            original,
            outcome,
            attempts: 1,
            finished_at: now(),
        })
    }

    async fn answer(
        &self,
        model: &Arc<ServedModel>,
        request: LiveRequest,
    ) -> Result<(ImageSize, EngineAnswer), EngineFault> {
        let coming = Coming::begin(model);
        let (planned, progress) = (Arc::clone(&model.planned), Arc::clone(&self.progress));
        let prepared = self.pool.prepare_live(
            request.bytes,
            planned,
            model.mode,
            self.max_pixels,
            progress,
        );
        let mut prepared = prepared.await?;
        let no_plan = WorkerError::Panicked {
            what: "the preparation of a request",
        };
        let Prepared {
            pixels, original, ..
        } = prepared
            .pop()
            .ok_or_else(|| TaskError::from(no_plan))?
            .map_err(TaskError::from)?;
        let image = LiveImage {
            request: request.id,
            pixels: pixels.into(),
            deadline: request.deadline,
        };
        let others = coming.others();
        let taken = move || drop(coming);
        let call = model.engine.classify(image, &request.wanted, others, taken);
        Ok((original, call.await?))
    }

    fn end(&self, error: TaskError) -> NotAnswered {
        let message = error.to_string();
        let cause = match error {
            TaskError::Worker(error) => error,
            TaskError::Infer(error) => error.into(),
            TaskError::Queue(error) => error.into(),
            other => WorkerError::Settings(other.to_string()),
        };
        self.fatal.check(Err(cause));
        NotAnswered::Broken(message)
    }
}

impl ServedModel {
    fn new(model: LiveModel, rows: &RowOptions, config: &WorkerConfig) -> Self {
        let LiveModel { name, plan, engine } = model;
        let id = ModelId {
            name,
            version: Arc::clone(engine.version()),
        };
        let planned = PlannedModel {
            id: id.clone(),
            plan,
            also: None,
        };
        let serve = &config.serve;
        // As many as are processed at once, and as many waiting.
        let least = 2 * (config.preprocess.threads() + engine.instances());
        Self {
            id,
            planned: [planned].into(),
            mode: rows.mode,
            wanted: Arc::new(Wanted::from(rows)),
            admission: Arc::new(Admission::new(least, serve.queue.get(), serve.slo)),
            asked: AskedRows::of(engine.clone()),
            engine,
            coming: AtomicUsize::new(0),
        }
    }

    /// Its name.
    pub fn name(&self) -> &Arc<str> {
        &self.id.name
    }

    /// The first digits of its content hash.
    pub fn version(&self) -> &Arc<str> {
        &self.id.version
    }

    /// Its classes; empty until an infer worker has reported them.
    pub fn labels(&self) -> Option<&[Arc<str>]> {
        self.engine.labels()
    }

    /// The default row options.
    pub fn wanted(&self) -> &Arc<Wanted> {
        &self.wanted
    }

    /// Checks whether rows can be as `wanted`, and embeds labels that are not cached.
    ///
    /// # Errors
    /// [`NotAnswered::Settings`] with the problem.
    pub async fn rows(&self, wanted: Wanted) -> Result<Arc<Wanted>, NotAnswered> {
        self.asked.get(wanted).await
    }

    /// Admits a request whose images are here, and are processed this many at a time.
    ///
    /// # Errors
    /// [`NotAnswered::Full`] if there is no room.
    pub fn admit(self: &Arc<Self>, images: usize) -> Result<Admitted, NotAnswered> {
        match self.admission.enter(images, Instant::now()) {
            Some(entry) => Ok(Admitted {
                model: Arc::clone(self),
                entry,
            }),
            None => Err(self.full()),
        }
    }

    /// Refuses a request before it is read, if there is no room for it.
    ///
    /// # Errors
    /// As [`ServedModel::admit`].
    pub fn check_room(&self) -> Result<(), NotAnswered> {
        match self.admission.is_full(Instant::now()) {
            true => Err(self.full()),
            false => Ok(()),
        }
    }

    fn full(&self) -> NotAnswered {
        NotAnswered::Full {
            model: Arc::clone(&self.id.name),
        }
    }

    /// The job named in the rows of a request.
    pub fn record(&self, id: &str, wanted: &Wanted) -> JobRecord {
        JobRecord {
            job_id: id.to_owned(),
            run: String::new(),
            spec_hash: String::new(),
            source: SOURCE.to_owned(),
            model: self.id.name.to_string(),
            model_version: self.id.version.to_string(),
            options: BTreeMap::new(),
            format: trommel_sink::Format::Jsonl,
            columns: Vec::new(),
            logits: wanted.logits,
            embedding: wanted.embedding,
            embedding_type: wanted.embedding_type,
            escape_formulas: false,
            retry: None,
            created_at: 0,
        }
    }
}

impl Admitted {
    /// The model.
    pub fn model(&self) -> &Arc<ServedModel> {
        &self.model
    }
}

/// An image on its way to the engine. The last one closes the waiting batch.
struct Coming<'a>(&'a ServedModel);

impl<'a> Coming<'a> {
    fn begin(model: &'a ServedModel) -> Self {
        model.coming.fetch_add(1, Relaxed);
        Self(model)
    }

    /// The other images.
    fn others(&self) -> u32 {
        let all = self.0.coming.load(Relaxed);
        u32::try_from(all.saturating_sub(1)).unwrap_or(u32::MAX)
    }
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        if self.0.coming.fetch_sub(1, Relaxed) == 1 {
            self.0.engine.flush();
        }
    }
}
