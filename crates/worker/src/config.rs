use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trommel_infer::{Capacity, Engine};
use trommel_preprocess::{Limits, Reference};
use trommel_queue::BrokerConfig;
use trommel_sink::PostgresConfig;
use trommel_source::{SourceOptions, VideoConfig};
use trommel_storage::{CloudConfig, HttpConfig, S3Config};
use trommel_types::JobOptions;

use crate::{Allowed, ServeConfig};

mod infer;
mod live;
mod telemetry;

use self::infer::images_in_flight;

pub use self::infer::InferConfig;
pub use self::live::{LiveConfig, is_source_name};
pub use self::telemetry::{LogFormat, OtlpProtocol, TelemetryConfig};

const MIB: usize = 1 << 20;
/// With less memory, batches would be single images.
const SMALLEST_BUDGET: usize = 64;

/// Settings of the roles. The defaults suit one machine that classifies a folder.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct WorkerConfig {
    /// Memory in MiB for encoded images, tensors and rows in flight in one process. It lowers the limits
    /// below to their shares; an image or row larger than its share is processed alone. The models and the
    /// pixels that each thread decodes come on top. Default: half the memory limit of the process's
    /// control group (its container); without one, only the limits below apply.
    pub memory_budget: Option<NonZeroUsize>,
    /// The broker, for roles in separate processes.
    pub broker: BrokerConfig,
    /// Connection to S3.
    pub s3: S3Config,
    /// Connection to Google Cloud Storage and Azure Blob Storage.
    pub cloud: CloudConfig,
    /// Requests to web servers.
    pub http: HttpConfig,
    /// Decoding videos.
    pub video: VideoConfig,
    /// Access to PostgreSQL.
    pub postgres: PostgresConfig,
    /// Where workers may read and write for submitted jobs.
    pub access: AccessConfig,
    /// Listing.
    pub ingest: IngestConfig,
    /// Fetching, decoding and resizing.
    pub preprocess: PreprocessConfig,
    /// Running the model.
    pub infer: InferConfig,
    /// Answering requests.
    pub serve: ServeConfig,
    /// Classifying frames of live sources.
    pub live: LiveConfig,
    /// Committing rows.
    pub sink: SinkConfig,
    /// When a failed attempt is repeated.
    pub retry: RetryPolicy,
    /// Graceful shutdown.
    pub shutdown: ShutdownConfig,
    /// Logs, traces, metrics and health.
    pub telemetry: TelemetryConfig,
}

/// Where a worker over the broker may read and write for submitted jobs. `classify`, which runs as
/// its user, has no such limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct AccessConfig {
    /// Places that jobs may read images and lists from, each with all below it: `/data/photos`,
    /// `s3://bucket/` or `s3://bucket/prefix/` (likewise `gs://` and `az://`), `https://host/` or
    /// `https://host/path/`, `nats://SUBJECT`. Redirects may lead to these too. Default: nothing but S3,
    /// as far as the credentials reach; once a place in S3 is named, no other is allowed.
    pub sources: Vec<String>,
    /// Places that jobs may write rows to: `/data/results`, `s3://bucket/prefix/`,
    /// `postgres://host:port/database`. Default: as for `sources`.
    pub outputs: Vec<String>,
}

/// Listing, in a worker over the broker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct IngestConfig {
    /// Jobs that one process lists concurrently. Default: 64.
    pub max_jobs: NonZeroUsize,
    /// Tasks of one job that may be published without an ack at once. Default: 256.
    pub publish_window: NonZeroUsize,
    /// Time that the record of an ended job is kept. Default: `30d`.
    #[serde(with = "humantime_serde")]
    pub keep_ended: Duration,
}

impl Default for IngestConfig {
    fn default() -> Self {
        Self {
            max_jobs: NonZeroUsize::new(64).expect("64 is not 0"),
            publish_window: NonZeroUsize::new(256).expect("256 is not 0"),
            keep_ended: Duration::from_secs(30 * 86_400),
        }
    }
}

/// Fetching, decoding and resizing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct PreprocessConfig {
    /// Whose processor the tensors follow: `pillow`, `torchvision`, or `auto` for what each model's folder
    /// says. Part of a job, so it is read where jobs begin: by `trommel classify` and `trommel submit`.
    /// Default: `auto`.
    pub reference: Reference,
    /// Threads that decode and resize. Default: one per core.
    pub threads: Option<NonZeroUsize>,
    /// Whether to pin each thread to one core. Default: no.
    pub pin_threads: bool,
    /// Images being fetched or decoded at once. Bounds memory: about one decoded image per thread,
    /// and one encoded image for each of the others. Default: 4 for each thread.
    pub max_in_flight: Option<NonZeroUsize>,
    /// Encoded bytes held at once, counting images whose size is known before they are fetched; one
    /// image is always admitted. Default: 512 MiB.
    pub max_bytes_in_flight: u64,
    /// Time limit for fetching one image, not counting the wait for a free connection. The fetch is
    /// then retried. Default: `60s`.
    #[serde(with = "humantime_serde")]
    pub fetch_timeout: Duration,
    /// Time limit for decoding and resizing one image. The image then fails, and a new thread
    /// replaces the one that hangs. Default: `60s`.
    #[serde(with = "humantime_serde")]
    pub decode_timeout: Duration,
    /// Largest encoded image in bytes. Default: 256 MiB.
    pub max_bytes: u64,
    /// Largest decoded image in pixels. Default: 178,956,970, the limit of Pillow.
    pub max_pixels: u64,
    /// Longest side in pixels. Default: 65,535, the limit of JPEG.
    pub max_side: u32,
}

impl Default for PreprocessConfig {
    fn default() -> Self {
        Self {
            reference: Reference::Auto,
            threads: None,
            pin_threads: false,
            max_in_flight: None,
            max_bytes_in_flight: 512 << 20,
            fetch_timeout: Duration::from_secs(60),
            decode_timeout: Duration::from_secs(60),
            max_bytes: 256 << 20,
            max_pixels: 178_956_970,
            max_side: 65_535,
        }
    }
}

impl PreprocessConfig {
    /// Threads that decode and resize, with the default applied.
    pub fn threads(&self) -> usize {
        self.threads.map_or_else(cores, Into::into)
    }

    /// Images held at once, with the default applied.
    pub fn in_flight(&self) -> usize {
        self.max_in_flight
            .map_or_else(|| 4 * self.threads(), Into::into)
    }

    /// Limits for one image.
    pub fn limits(&self) -> Limits {
        Limits {
            max_bytes: self.max_bytes,
            max_pixels: self.max_pixels,
            max_side: self.max_side,
        }
    }
}

/// Cores this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// Committing rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct SinkConfig {
    /// Rows in a full part. Default: 20,000.
    pub part_rows: NonZeroUsize,
    /// Approximate bytes of rows (text, logits, embeddings) in a full part. Default: 64 MiB.
    pub part_bytes: NonZeroUsize,
    /// Longest time a finished row waits for its part to be committed; a crash repeats at most this
    /// much work. Default: `5s`.
    #[serde(with = "humantime_serde")]
    pub part_interval: Duration,
    /// Time without a heartbeat after which a sink loses its jobs to another one. Default: `8s`.
    #[serde(with = "humantime_serde")]
    pub lease: Duration,
    /// Time that a job waits for an output that rejects writes before it ends as failed. Default:
    /// `30m`.
    #[serde(with = "humantime_serde")]
    pub patience: Duration,
    /// Jobs that one process commits concurrently. Default: 64.
    pub max_jobs: NonZeroUsize,
}

impl Default for SinkConfig {
    fn default() -> Self {
        Self {
            part_rows: NonZeroUsize::new(20_000).expect("20,000 is not 0"),
            part_bytes: NonZeroUsize::new(64 << 20).expect("64 MiB are not 0"),
            part_interval: Duration::from_secs(5),
            lease: Duration::from_secs(8),
            patience: Duration::from_secs(1800),
            max_jobs: NonZeroUsize::new(64).expect("64 is not 0"),
        }
    }
}

/// When a failed attempt is repeated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct RetryPolicy {
    /// Attempts before an image ends as failed. Default: 4.
    pub max_attempts: NonZeroU32,
    /// Deliveries, including those whose worker died, before an image is considered the cause and
    /// fails. In a single-process run: how often the process died while working on it. Default: 10.
    pub max_deliveries: NonZeroU32,
    /// Upper bound of the wait before the second attempt; it doubles with each further one.
    /// Default: `200ms`.
    #[serde(with = "humantime_serde")]
    pub base: Duration,
    /// Upper bound of any wait. Default: `30s`.
    #[serde(with = "humantime_serde")]
    pub cap: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_attempts: NonZeroU32::new(4).expect("4 is not 0"),
            max_deliveries: NonZeroU32::new(10).expect("10 is not 0"),
            base: Duration::from_millis(200),
            cap: Duration::from_secs(30),
        }
    }
}

/// Graceful shutdown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ShutdownConfig {
    /// Time limit for a draining process to finish what is in flight. Default: `25s`.
    #[serde(with = "humantime_serde")]
    pub drain_timeout: Duration,
}

impl Default for ShutdownConfig {
    fn default() -> Self {
        Self {
            drain_timeout: Duration::from_secs(25),
        }
    }
}

impl WorkerConfig {
    /// Lowers each limit of bytes in flight to its share of the memory budget. Encoded images,
    /// tensors and rows get an eighth each; a part gets half of the rows' share, because it is held
    /// three times while it is written: as rows, as columns, and encoded. The default budget is
    /// half of `limit`, the memory available to the process.
    pub fn keep_to_budget(&mut self, limit: Option<u64>) {
        if let (None, Some(limit)) = (self.memory_budget, limit) {
            let half = usize::try_from(limit / 2).unwrap_or(usize::MAX) / MIB;
            self.memory_budget = NonZeroUsize::new(half.max(SMALLEST_BUDGET));
        }
        let share = self.share_of_budget();
        let images = &mut self.preprocess.max_bytes_in_flight;
        *images = share.min(*images);
        let part = NonZeroUsize::new(usize::try_from(share / 2).unwrap_or(usize::MAX));
        self.sink.part_bytes =
            part.map_or(self.sink.part_bytes, |part| part.min(self.sink.part_bytes));
    }

    /// Which images of a source are classified, and how to reach them.
    pub fn source_options(&self, options: &JobOptions) -> SourceOptions {
        SourceOptions {
            s3: self.s3.clone(),
            cloud: self.cloud.clone(),
            http: self.http.clone(),
            video: self.video.clone(),
            ..SourceOptions::from(options)
        }
    }

    /// Limit in bytes for images, tensors and rows in flight, for each of the three.
    pub(crate) fn share_of_budget(&self) -> u64 {
        let share = |budget: NonZeroUsize| (budget.get().saturating_mul(MIB) / 8) as u64;
        self.memory_budget.map_or(u64::MAX, share)
    }

    /// Images that infer holds for a model: those of its batches, as many as fit into the budget
    /// with their tensors and raw outputs, but at least one batch.
    pub(crate) fn images_in_infer(&self, engine: &Engine) -> usize {
        if let Some(stages) = engine.stages() {
            let [small, large] = stages.map(|engine| self.images_in_infer(engine));
            return small + large;
        }
        if let Some(prompt) = engine.prompt() {
            return prompt.in_flight();
        }
        let tensor = engine.model().map_or(0, |model| model.shape().len());
        let bytes = tensor + size_of::<f32>() * engine.labels().len();
        let (largest, instances) = (engine.largest_batch(), engine.stats().instances);
        self.held(bytes, largest, images_in_flight(largest, instances))
    }

    /// The same, for images of `bytes` each.
    pub(crate) fn in_flight_of(&self, bytes: usize, max_batch: usize) -> usize {
        self.held(bytes, max_batch, self.infer.images_in_flight(max_batch))
    }

    /// As many of the `wanted` images of `bytes` as fit into the budget, but at least one batch.
    fn held(&self, bytes: usize, max_batch: usize, wanted: usize) -> usize {
        let held = self.share_of_budget() / bytes.max(1) as u64;
        let held = usize::try_from(held).unwrap_or(usize::MAX);
        wanted.min(held.max(max_batch))
    }

    /// Names every invalid setting, with its remedy; empty if all are valid.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = self.broker.problems();
        problems.extend(self.s3.problems());
        problems.extend(self.cloud.problems());
        problems.extend(self.http.problems());
        problems.extend(self.telemetry.problems());
        problems.extend(self.serve.problems());
        problems.extend(self.live.problems());
        problems.extend(Allowed::new(&self.access).err().into_iter().flatten());
        let options = self.infer.model_options(Capacity::default());
        if let Err(error) = options.and_then(|options| options.check()) {
            problems.push(format!("infer: {error}"));
        }
        if self
            .memory_budget
            .is_some_and(|budget| budget.get() < SMALLEST_BUDGET)
        {
            problems.push(format!(
                "memory-budget: set at least {SMALLEST_BUDGET} MiB, or leave it out"
            ));
        }
        if self.preprocess.max_bytes == 0 {
            problems.push("preprocess.max-bytes: 0 refuses every image; set at least 1".to_owned());
        }
        if self.preprocess.max_pixels == 0 || self.preprocess.max_side == 0 {
            problems.push(
                "preprocess.max-pixels, max-side: 0 refuses every image; set at least 1".to_owned(),
            );
        }
        if self.preprocess.fetch_timeout.is_zero() || self.preprocess.decode_timeout.is_zero() {
            problems.push(
                "preprocess.fetch-timeout, decode-timeout: must be longer than 0s".to_owned(),
            );
        }
        if self.retry.max_deliveries < self.retry.max_attempts {
            problems.push("retry.max-deliveries: must not be below retry.max-attempts".to_owned());
        }
        if self.retry.cap < self.retry.base {
            problems.push("retry.cap: must not be below retry.base".to_owned());
        }
        if self.sink.lease < Duration::from_secs(1) {
            problems.push("sink.lease: must be at least 1s".to_owned());
        }
        if self.sink.part_interval.is_zero() {
            problems.push("sink.part-interval: must be longer than 0s".to_owned());
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_budget_lowers_what_is_in_flight_and_raises_nothing() {
        let mut config = WorkerConfig::default();
        let default = config.clone();
        config.keep_to_budget(None);
        assert_eq!(config, default);
        assert_eq!(
            config.in_flight_of(1 << 20, 8),
            config.infer.images_in_flight(8)
        );

        config.memory_budget = NonZeroUsize::new(128);
        config.keep_to_budget(Some(u64::MAX));
        assert_eq!(config.preprocess.max_bytes_in_flight, 16 << 20);
        assert_eq!(config.sink.part_bytes.get(), 8 << 20);
        assert_eq!(
            config.in_flight_of(1 << 20, 2),
            config.infer.images_in_flight(2).min(16)
        );
        assert_eq!(config.in_flight_of(1 << 20, 64), 64, "a batch in any case");

        config.memory_budget = NonZeroUsize::new(100_000);
        config.keep_to_budget(Some(u64::MAX));
        assert_eq!(config.sink.part_bytes.get(), 8 << 20, "set lower before");
        config.memory_budget = NonZeroUsize::new(1);
        assert!(config.problems()[0].contains("memory-budget"));

        // A container with 512 MiB, and one that is too small for anything.
        let mut config = default.clone();
        config.keep_to_budget(Some(512 << 20));
        assert_eq!(config.memory_budget, NonZeroUsize::new(256));
        assert_eq!(config.preprocess.max_bytes_in_flight, 32 << 20);
        let mut config = default;
        config.keep_to_budget(Some(1 << 20));
        assert_eq!(config.memory_budget, NonZeroUsize::new(SMALLEST_BUDGET));
        assert_eq!(config.problems(), Vec::<String>::new());
    }
}
