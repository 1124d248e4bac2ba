use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use trommel_types::{Column, Lane, Scores, Shape};

use crate::affinity::pin_thread;
use crate::backend::Image;
use crate::cascade::Cascade;
use crate::instances::{Instances, Shared};
use crate::learning::Learning;
use crate::prompt::{Servers, SharedServers};
use crate::wanted::{Known, Resolved};
use crate::{
    Answer, Decided, EngineStats, InferError, InferErrorKind, Model, Prompt, PromptStats, Wanted,
};

/// How a model is distributed over threads and batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    /// Parallel sessions, at least 1, on the model's devices in turn; each is one thread with a
    /// copy of the model.
    pub instances: usize,
    /// Images in a full batch, at least 1. A model with a fixed batch uses that instead.
    pub max_batch: usize,
    /// Longest time a batch waits for more images after its first one.
    pub max_wait: Duration,
    /// Time limit of a batch. A batch that exceeds it is abandoned with its session, which is
    /// replaced; its images end as [`Timeout`](InferErrorKind::Timeout).
    pub run_timeout: Duration,
    /// How live work is treated.
    pub live: LiveOptions,
}

/// How live work is treated, see [`Lane::Live`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveOptions {
    /// Longest time a batch of live images waits for more after its first one. Default: 5 ms.
    pub max_wait: Duration,
    /// Longest time that a batch may occupy the device while live images arrive, judging by past
    /// batches; single images are always run. Default: 30 ms.
    pub hold: Duration,
    /// Threads for a live image that finds the engine idle, on the CPU. If there are more than a
    /// session has, they are those of an additional session. Default: 1.
    pub lone_threads: usize,
    /// Least time that an image must take a session for the additional one to be opened. Default: 0.
    pub lone_min_time: Duration,
}

impl Default for LiveOptions {
    fn default() -> Self {
        Self {
            max_wait: Duration::from_millis(5),
            hold: Duration::from_millis(30),
            lone_threads: 1,
            lone_min_time: Duration::ZERO,
        }
    }
}

impl EngineOptions {
    /// A `run_timeout` that only endless runs exceed.
    pub const RUN_TIMEOUT: Duration = Duration::from_secs(5 * 60);
}

/// Upper limit of learned batch sizes, if the first one is small.
const LARGEST_AT_LEAST: usize = 4;

/// A running model with its own threads.
///
/// Dropping it finishes the accepted images, then joins the threads; that blocks for the time of a
/// few batches. A hung thread is not joined.
#[derive(Debug)]
pub struct Engine {
    work: Work,
    wanted: Known,
}

/// Who classifies.
#[derive(Debug)]
enum Work {
    /// Sessions on this machine.
    Sessions { model: Model, instances: Instances },
    /// Servers.
    Servers(SharedServers),
    /// A small model, and a large one for uncertain images.
    Cascade(Arc<Cascade>),
}

impl Engine {
    /// Starts the threads and runs one batch of black images on each, so that everything is ready
    /// for the first real one. Blocks until then.
    ///
    /// # Errors
    /// If an option is 0, a session cannot be opened, or the model cannot run a full batch.
    pub fn start(model: Model, options: EngineOptions) -> Result<Self, InferError> {
        Self::start_with(model, options, None)
    }

    /// As [`Engine::start`], with an initial batch size: sizes of up to its double are tried
    /// occasionally on real images, if enough of them wait, and a size that is faster by more than
    /// the noise replaces it. For a model with a fixed batch nothing is learned.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_learning(
        model: Model,
        options: EngineOptions,
        learning: Learning,
    ) -> Result<Self, InferError> {
        let learning = Some(learning).filter(|_| model.fixed_batch().is_none());
        Self::start_with(model, options, learning)
    }

    fn start_with(
        model: Model,
        options: EngineOptions,
        learning: Option<Learning>,
    ) -> Result<Self, InferError> {
        for (name, value) in [
            ("instances", options.instances),
            ("max-batch", options.max_batch),
        ] {
            if value == 0 {
                return Err(InferError::new(
                    InferErrorKind::Settings,
                    format_args!("{name} is 0, with which no image is classified; give at least 1"),
                ));
            }
        }
        let max_batch = model.fixed_batch().unwrap_or(options.max_batch);
        let options = EngineOptions {
            max_batch,
            ..options
        };
        let started = model.clone();
        let learning = learning.map(|learning| {
            let most = model.devices().first().largest_batch();
            let largest = (2 * max_batch).max(LARGEST_AT_LEAST).min(most);
            (learning, largest.max(max_batch))
        });
        let largest = learning.as_ref().map_or(max_batch, |(_, largest)| *largest);
        let lone = model.lone_session(options.live)?;
        let instances = Instances::start(model.name(), options, learning, move |number| {
            let options = &started.classifier().options;
            if options.pin_threads {
                pin_thread(number, options.intra_threads)?;
            }
            started.backend(number, largest, lone.clone())
        })?;
        Ok(Self {
            work: Work::Sessions { model, instances },
            wanted: Known::default(),
        })
    }

    /// An engine that asks the servers of a prompt. Blocks while it checks for a server.
    ///
    /// Its images are encoded files. Its calls need the async runtime that they are made on.
    ///
    /// # Errors
    /// [`Unreachable`](InferErrorKind::Unreachable) if there is no server,
    /// [`ModelConfig`](InferErrorKind::ModelConfig) if there is no key, or a server rejects it.
    pub fn ask(prompt: Prompt) -> Result<Self, InferError> {
        Ok(Self {
            work: Work::Servers(Arc::new(Servers::start(prompt)?)),
            wanted: Known::default(),
        })
    }

    /// An engine whose small model decides images that it is certain of, and whose large model
    /// decides the rest and the sample, so that at least `agree` of the labels are the large
    /// model's. Images are the small model's tensor followed by the large one's.
    ///
    /// # Errors
    /// [`Settings`](InferErrorKind::Settings) if the small model is a prompt, the models have no
    /// label in common, or `agree` is not from 0.5 to below 1.
    pub fn cascade(small: Self, large: Self, agree: f64) -> Result<Self, InferError> {
        Ok(Self {
            work: Work::Cascade(Arc::new(Cascade::new(small, large, agree)?)),
            wanted: Known::default(),
        })
    }

    /// How often each model of a cascade decided.
    pub fn decided(&self) -> Option<Decided> {
        match &self.work {
            Work::Cascade(cascade) => Some(cascade.decided()),
            _ => None,
        }
    }

    /// The models of a cascade, the small one first.
    pub fn stages(&self) -> Option<[&Self; 2]> {
        match &self.work {
            Work::Cascade(cascade) => Some([cascade.small(), cascade.large()]),
            _ => None,
        }
    }

    /// Whether the engine supports rows as `wanted`. The choices of a device are fixed when the
    /// model is opened, by [`ModelOptions::capacity`](crate::ModelOptions::capacity); on the CPU
    /// every row is possible.
    pub fn covers(&self, wanted: &Wanted) -> bool {
        match &self.work {
            Work::Sessions { model, .. } => model.classifier().covers(wanted),
            Work::Servers(_) => true,
            Work::Cascade(cascade) => {
                cascade.small().covers(wanted) && cascade.large().covers(wanted)
            }
        }
    }

    /// Classifies one image, given as HWC pixels of the model's shape, in a batch with others of
    /// its lane, whose rows may be `wanted` differently. Share one `wanted` among the images of a
    /// job: it is checked once.
    ///
    /// Waits while the engine holds as many images of the lane as it may: one waiting batch per
    /// instance, and one that is forming. Images of a lane are taken in the order in which their
    /// calls were first polled; batches of urgent lanes come first, with occasional exceptions, and
    /// those of live images before all others.
    ///
    /// Cancel-safe: if dropped before the image is accepted, nothing has happened; later, the image
    /// is skipped, or its answer dropped. The future does not borrow the engine; an accepted image
    /// is answered even if the engine is dropped meanwhile.
    ///
    /// # Errors
    /// [`Settings`](InferErrorKind::Settings) when the engine does not cover `wanted`, or the model
    /// cannot mean it (as [`Model::check`]),
    /// [`Pixels`](InferErrorKind::Pixels) when the length is not that of the shape,
    /// [`ModelFailed`](InferErrorKind::ModelFailed) when the model failed on this image, also when
    /// run alone, [`Timeout`](InferErrorKind::Timeout) when its batch took too long,
    /// [`DeviceLost`](InferErrorKind::DeviceLost) or
    /// [`EngineStopped`](InferErrorKind::EngineStopped) when no image will be classified any more; of a
    /// prompt, as [`Engine::answer`].
    pub fn classify<P: Into<Bytes>>(
        &self,
        pixels: P,
        lane: Lane,
        wanted: &Arc<Wanted>,
    ) -> impl Future<Output = Result<Scores, InferError>> + Send + use<P> {
        let answer = self.answer(pixels, lane, wanted);
        async move { Ok(answer.await?.scores) }
    }

    /// As [`Engine::classify`], with the values of [`Engine::columns`].
    ///
    /// # Errors
    /// As [`Engine::classify`]; of a prompt, [`ModelFailed`](InferErrorKind::ModelFailed) for an answer
    /// that matches no choice, and [`Unreachable`](InferErrorKind::Unreachable) when no server
    /// answers.
    pub fn answer<P: Into<Bytes>>(
        &self,
        pixels: P,
        lane: Lane,
        wanted: &Arc<Wanted>,
    ) -> impl Future<Output = Result<Answer, InferError>> + Send + use<P> {
        let pixels = pixels.into();
        let call = match &self.work {
            Work::Sessions { model, instances } => {
                let wanted = self.wanted.get(wanted, || self.resolve(model, wanted));
                let (shared, expected) = (Arc::clone(instances.shared()), model.shape());
                Call::Session(shared, expected, wanted)
            }
            Work::Servers(servers) => {
                let checked = servers.prompt().check(wanted);
                Call::Server(Arc::clone(servers), checked)
            }
            Work::Cascade(cascade) => {
                let checked = cascade.check(wanted);
                Call::Cascade(Arc::clone(cascade), Arc::clone(wanted), checked)
            }
        };
        async move {
            let (shared, expected, wanted) = match call {
                Call::Session(shared, expected, wanted) => (shared, expected, wanted),
                Call::Server(servers, checked) => {
                    checked?;
                    return servers.ask(pixels).await;
                }
                Call::Cascade(cascade, wanted, checked) => {
                    checked?;
                    return cascade.answer(pixels, lane, &wanted).await;
                }
            };
            if pixels.len() != expected.len() {
                return Err(InferError::new(
                    InferErrorKind::Pixels,
                    format_args!(
                        "an image of {} bytes was given to a model that takes {} x {} x {}",
                        pixels.len(),
                        expected.height,
                        expected.width,
                        expected.channels
                    ),
                ));
            }
            let wanted = wanted?;
            let scores = shared.classify(Image { pixels, wanted }, lane).await?;
            Ok(Answer {
                scores,
                columns: Vec::new(),
            })
        }
    }

    /// Whether [`Engine::classify`] knows what `wanted` means; otherwise it would block while
    /// labels are embedded. [`Engine::prepare`] does this in advance.
    pub fn is_prepared(&self, wanted: &Arc<Wanted>) -> bool {
        match &self.work {
            Work::Sessions { .. } => wanted.labels.is_none() || self.wanted.find(wanted).is_some(),
            Work::Servers(_) => true,
            Work::Cascade(cascade) => {
                cascade.small().is_prepared(wanted) && cascade.large().is_prepared(wanted)
            }
        }
    }

    /// Prepares for `wanted`, which takes long if a job has its own labels. Blocks.
    ///
    /// # Errors
    /// As [`Engine::check`].
    pub fn prepare(&self, wanted: &Arc<Wanted>) -> Result<(), InferError> {
        match &self.work {
            Work::Sessions { model, .. } => {
                let resolved = self.wanted.get(wanted, || self.resolve(model, wanted));
                resolved.map(drop)
            }
            Work::Servers(servers) => servers.prompt().check(wanted),
            Work::Cascade(cascade) => {
                cascade.small().prepare(wanted)?;
                cascade.large().prepare(wanted)
            }
        }
    }

    fn resolve(&self, model: &Model, wanted: &Wanted) -> Result<Resolved, InferError> {
        if !self.covers(wanted) {
            return Err(InferError::new(
                InferErrorKind::Settings,
                format_args!(
                    "model {} was opened for smaller rows than those requested; open it with a \
                     capacity that covers them",
                    model.name()
                ),
            ));
        }
        model.classifier().resolve(wanted)
    }

    /// Closes the batch in flight before it is full: no more images arrive for a while.
    pub fn flush(&self) {
        match &self.work {
            Work::Sessions { instances, .. } => instances.shared().flush(),
            Work::Servers(_) => {}
            Work::Cascade(cascade) => {
                cascade.small().flush();
                cascade.large().flush();
            }
        }
    }

    /// As [`Engine::flush`], of one lane.
    pub fn flush_lane(&self, lane: Lane) {
        match &self.work {
            Work::Sessions { instances, .. } => instances.shared().flush_lane(lane),
            Work::Servers(_) => {}
            Work::Cascade(cascade) => {
                cascade.small().flush_lane(lane);
                cascade.large().flush_lane(lane);
            }
        }
    }

    /// The engine's statistics so far.
    pub fn stats(&self) -> EngineStats {
        match &self.work {
            Work::Sessions { instances, .. } => instances.stats(),
            Work::Servers(servers) => servers.stats(),
            Work::Cascade(cascade) => {
                let (small, large) = (cascade.small().stats(), cascade.large());
                match &large.work {
                    Work::Sessions { .. } => small.beside(&large.stats()),
                    _ => small,
                }
            }
        }
    }

    /// Largest possible batch, if it runs a model itself, including sizes that may be learned.
    pub fn largest_batch(&self) -> usize {
        match &self.work {
            Work::Sessions { instances, .. } => instances.largest_batch(),
            Work::Servers(_) | Work::Cascade(_) => self.stats().max_batch,
        }
    }

    /// Requests to servers, if it is a prompt.
    pub fn prompt_stats(&self) -> Option<PromptStats> {
        match &self.work {
            Work::Sessions { .. } => None,
            Work::Servers(servers) => Some(servers.prompt_stats()),
            Work::Cascade(cascade) => cascade.large().prompt_stats(),
        }
    }

    /// The model of this process; `None` for a prompt.
    pub fn model(&self) -> Option<&Model> {
        match &self.work {
            Work::Sessions { model, .. } => Some(model),
            Work::Servers(_) | Work::Cascade(_) => None,
        }
    }

    /// The prompt, if it is one.
    pub fn prompt(&self) -> Option<&Prompt> {
        match &self.work {
            Work::Sessions { .. } | Work::Cascade(_) => None,
            Work::Servers(servers) => Some(servers.prompt()),
        }
    }

    /// The name of the model's folder.
    pub fn name(&self) -> &Arc<str> {
        match &self.work {
            Work::Sessions { model, .. } => model.name(),
            Work::Servers(servers) => servers.prompt().name(),
            Work::Cascade(cascade) => cascade.name(),
        }
    }

    /// The first digits of the content hash of the model or the prompt.
    pub fn version(&self) -> &Arc<str> {
        match &self.work {
            Work::Sessions { model, .. } => model.version(),
            Work::Servers(servers) => servers.prompt().version(),
            Work::Cascade(cascade) => cascade.version(),
        }
    }

    /// The names of the classes; empty for a prompt without choices.
    pub fn labels(&self) -> &Arc<[Arc<str>]> {
        match &self.work {
            Work::Sessions { model, .. } => model.labels(),
            Work::Servers(servers) => servers.prompt().labels(),
            Work::Cascade(cascade) => cascade.large().labels(),
        }
    }

    /// The columns of its rows besides those of all rows and of the source.
    pub fn columns(&self) -> Vec<Column> {
        match &self.work {
            Work::Sessions { .. } => Vec::new(),
            Work::Servers(_) => Prompt::columns(),
            Work::Cascade(cascade) => cascade.columns(),
        }
    }

    /// Whether it supports rows as `wanted`, regardless of how it was opened.
    ///
    /// # Errors
    /// As [`Model::check`] and [`Prompt::check`].
    pub fn check(&self, wanted: &Wanted) -> Result<(), InferError> {
        match &self.work {
            Work::Sessions { model, .. } => model.check(wanted),
            Work::Servers(servers) => servers.prompt().check(wanted),
            Work::Cascade(cascade) => cascade.check(wanted),
        }
    }
}

/// The target of a call.
enum Call {
    Session(Arc<Shared>, Shape, Result<Arc<Resolved>, InferError>),
    Server(SharedServers, Result<(), InferError>),
    Cascade(Arc<Cascade>, Arc<Wanted>, Result<(), InferError>),
}
