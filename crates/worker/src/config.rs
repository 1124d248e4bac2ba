use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trommel_infer::{Device, Devices, InferError, ModelOptions, Precision};
use trommel_preprocess::{Limits, Mode};
use trommel_queue::BrokerConfig;
use trommel_storage::{PostgresConfig, S3Config};

const MIB: usize = 1 << 20;
/// Sessions on a GPU.
const ON_A_GPU: usize = 2;

/// How the roles work. Every default suits one machine that classifies a folder.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct WorkerConfig {
    /// The broker, for roles in separate processes.
    pub broker: BrokerConfig,
    /// How S3 is reached.
    pub s3: S3Config,
    /// Who writes to PostgreSQL.
    pub postgres: PostgresConfig,
    /// Listing.
    pub ingest: IngestConfig,
    /// Fetching, decoding and resizing.
    pub preprocess: PreprocessConfig,
    /// Running the model.
    pub infer: InferConfig,
    /// Committing rows.
    pub sink: SinkConfig,
    /// When a failed attempt is repeated.
    pub retry: RetryPolicy,
    /// How a stop is carried out.
    pub shutdown: ShutdownConfig,
    /// What the outside learns of the process.
    pub telemetry: TelemetryConfig,
}

/// Listing, in a worker over the broker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct IngestConfig {
    /// Jobs that one process lists side by side. Default: 64.
    pub max_jobs: NonZeroUsize,
    /// Tasks of one job that may be on their way to the broker at once. Default: 256.
    pub publish_window: NonZeroUsize,
}

impl Default for IngestConfig {
    fn default() -> Self {
        Self {
            max_jobs: NonZeroUsize::new(64).expect("64 is not 0"),
            publish_window: NonZeroUsize::new(256).expect("256 is not 0"),
        }
    }
}

/// Fetching, decoding and resizing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct PreprocessConfig {
    /// How much tensors may differ from the reference's: `exact`, or `fast`, which decodes large
    /// JPEGs to a half, a quarter or an eighth of their size. All workers of a job should have the
    /// same. Default: `exact`.
    pub mode: Mode,
    /// Threads that decode and resize. Default: one a core.
    pub threads: Option<NonZeroUsize>,
    /// Whether each of them stays on one core. Default: no.
    pub pin_threads: bool,
    /// Images held at once, being fetched or decoded. Bounds memory: about one decoded image for
    /// each thread and one encoded image for each of the rest. Default: 4 for each thread.
    pub max_in_flight: Option<NonZeroUsize>,
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
            mode: Mode::Exact,
            threads: None,
            pin_threads: false,
            max_in_flight: None,
            max_bytes: 256 << 20,
            max_pixels: 178_956_970,
            max_side: 65_535,
        }
    }
}

/// Running the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct InferConfig {
    /// Where the model runs: `cpu`, `cuda:N` or `tensorrt:N`, or several GPUs as in
    /// `cuda:0,cuda:1`. A device that is not there is an error at start. Default: `cpu`.
    pub device: String,
    /// Sessions that run side by side on each device, each with a copy of the model. Default: on a
    /// CPU one a core, at most 4; on a GPU 2, of which one copies while the other computes.
    pub instances: Option<NonZeroUsize>,
    /// Threads inside one session. Default: the cores divided by the instances; for a GPU 1.
    pub intra_threads: Option<NonZeroUsize>,
    /// Whether the threads of each session stay on cores of their own. Default: no.
    pub pin_threads: bool,
    /// Whether images are normalised and the best classes chosen in the model's graph, on its
    /// device. Default: on GPUs.
    pub fused: Option<bool>,
    /// Whether a GPU records what it does with a batch and plays it again, by CUDA graphs. Default:
    /// yes, with a warning for a model that cannot be recorded.
    pub cuda_graphs: bool,
    /// In how many bits TensorRT computes: `model` (as the model says), `fp16` or `int8`. Default:
    /// `model`.
    pub precision: Precision,
    /// Most memory in MiB that the sessions of one model may take on a device: the processor's for
    /// their weights, a GPU's for their arenas. Default: as much as there is.
    pub memory_budget: Option<NonZeroUsize>,
    /// Images in a full batch. Default: the fastest number, which is measured when a model is
    /// first loaded on a machine.
    pub max_batch: Option<NonZeroUsize>,
    /// Folder for what is measured. Default: `trommel` in the user's cache folder.
    pub cache: Option<PathBuf>,
    /// Longest time an image waits for its batch to fill. Default: `20ms`.
    #[serde(with = "humantime_serde")]
    pub max_wait: Duration,
    /// Classes in a row's `top`. Default: 5.
    pub top_k: NonZeroU32,
    /// Whether rows hold the raw output of the model too. Default: no.
    pub logits: bool,
    /// Whether rows hold the images' embeddings, of models that give them. Default: no.
    pub embedding: bool,
    /// Models that one process over the broker keeps loaded. Default: 4.
    pub max_models: NonZeroUsize,
    /// Models that a process over the broker loads before it is ready; the others are loaded when a
    /// job names them. Default: none.
    pub preload: Vec<String>,
}

impl Default for InferConfig {
    fn default() -> Self {
        Self {
            device: "cpu".to_owned(),
            instances: None,
            intra_threads: None,
            pin_threads: false,
            fused: None,
            cuda_graphs: true,
            precision: Precision::Model,
            memory_budget: None,
            max_batch: None,
            cache: None,
            max_wait: Duration::from_millis(20),
            top_k: NonZeroU32::new(5).expect("5 is not 0"),
            logits: false,
            embedding: false,
            max_models: NonZeroUsize::new(4).expect("4 is not 0"),
            preload: Vec::new(),
        }
    }
}

impl PreprocessConfig {
    /// Threads that decode and resize, with the default applied.
    pub fn threads(&self) -> usize {
        self.threads.map_or_else(cores, Into::into)
    }

    /// Images held at once, with the default applied.
    pub(crate) fn in_flight(&self) -> usize {
        self.max_in_flight
            .map_or_else(|| 4 * self.threads(), Into::into)
    }

    /// What one image may cost.
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            max_bytes: self.max_bytes,
            max_pixels: self.max_pixels,
            max_side: self.max_side,
        }
    }
}

impl InferConfig {
    /// How models are to be opened.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn model_options(&self) -> Result<ModelOptions, InferError> {
        Ok(ModelOptions {
            devices: Devices::parse(&self.device)?,
            intra_threads: self.intra_threads(),
            pin_threads: self.pin_threads,
            fused: self.fused,
            max_batch: self.largest_batch(),
            cuda_graphs: self.cuda_graphs,
            precision: self.precision,
            cache: self.cache.clone(),
            memory_limit: self.memory_of_one(),
            top_k: self.top_k,
            logits: self.logits,
            embedding: self.embedding,
        })
    }

    /// Sessions that run side by side on all devices, with the default applied.
    pub fn instances(&self) -> usize {
        self.of_each_device() * self.devices().len()
    }

    fn of_each_device(&self) -> usize {
        let default = || match self.is_gpu() {
            true => ON_A_GPU,
            false => cores().min(4),
        };
        self.instances.map_or_else(default, Into::into)
    }

    /// Bytes that one session may take of its device's memory.
    fn memory_of_one(&self) -> Option<usize> {
        let budget = self.memory_budget?.get().saturating_mul(MIB);
        Some(budget / self.of_each_device())
    }

    /// What is no device, and refused by [`WorkerConfig::problems`], counts as the processor.
    fn devices(&self) -> Devices {
        Devices::parse(&self.device).unwrap_or_else(|_| Device::Cpu.into())
    }

    fn is_gpu(&self) -> bool {
        self.devices().first().is_gpu()
    }

    /// Tensors that infer holds: a batch in each instance, one formed ahead for each, one forming.
    pub(crate) fn tensors_in_hand(&self, max_batch: usize) -> usize {
        max_batch * (2 * self.instances() + 1)
    }

    /// Images in a full batch at most: as many as are configured, or as the device is tried with.
    pub(crate) fn largest_batch(&self) -> usize {
        let largest = || self.devices().first().largest_batch();
        self.max_batch.map_or_else(largest, Into::into)
    }

    /// Threads inside one session, with the default applied.
    pub fn intra_threads(&self) -> usize {
        let default = || match self.is_gpu() {
            true => 1,
            false => (cores() / self.instances()).max(1),
        };
        self.intra_threads.map_or_else(default, Into::into)
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
    /// Longest time a finished row waits for its part, so the work that a crash repeats.
    /// Default: `5s`.
    #[serde(with = "humantime_serde")]
    pub part_interval: Duration,
    /// Time after which a sink that has not been heard of loses its jobs to another. Default:
    /// `15s`.
    #[serde(with = "humantime_serde")]
    pub lease: Duration,
    /// Jobs that one process commits side by side. Default: 64.
    pub max_jobs: NonZeroUsize,
}

impl Default for SinkConfig {
    fn default() -> Self {
        Self {
            part_rows: NonZeroUsize::new(20_000).expect("20,000 is not 0"),
            part_interval: Duration::from_secs(5),
            lease: Duration::from_secs(15),
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
    /// Deliveries, those counted that ended with their worker, before an image is taken for what
    /// ended it and fails. Default: 10.
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

/// How a stop is carried out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ShutdownConfig {
    /// Time a draining process may use to finish what it holds. Default: `25s`.
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

/// Logs, traces, metrics and health.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct TelemetryConfig {
    /// Address that answers `/metrics`, `/healthz` and `/readyz`, such as `0.0.0.0:9464`. Default:
    /// none.
    pub listen: Option<SocketAddr>,
    /// Where traces are sent, such as `http://collector:4317`. Default: nowhere.
    pub otlp_endpoint: Option<String>,
    /// How they are sent: `grpc`, or `http` (binary Protobuf). Default: `grpc`.
    pub otlp_protocol: OtlpProtocol,
    /// Share of images that are traced, 0 to 1. Default: 0.01.
    pub sample: f64,
    /// How log lines are written: `text` or `json`. Default: `text`.
    pub log_format: LogFormat,
}

/// How traces are sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OtlpProtocol {
    /// gRPC; of `https` addresses too.
    #[default]
    Grpc,
    /// Protobuf over HTTP, not encrypted.
    Http,
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            listen: None,
            otlp_endpoint: None,
            otlp_protocol: OtlpProtocol::Grpc,
            sample: 0.01,
            log_format: LogFormat::Text,
        }
    }
}

impl TelemetryConfig {
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if !(0.0..=1.0).contains(&self.sample) {
            problems.push(format!(
                "telemetry.sample: {} is no share; give a number from 0 to 1",
                self.sample
            ));
        }
        let scheme = |endpoint: &str| {
            endpoint
                .split_once("://")
                .map(|(scheme, _)| scheme.to_owned())
        };
        if let Some(endpoint) = &self.otlp_endpoint {
            match (scheme(endpoint).as_deref(), self.otlp_protocol) {
                (Some("http"), _) | (Some("https"), OtlpProtocol::Grpc) => {}
                (Some("https"), OtlpProtocol::Http) => problems.push(
                    "telemetry.otlp-endpoint: https needs otlp-protocol = \"grpc\"; or send to a collector beside this process over http".to_owned(),
                ),
                _ => problems.push(format!(
                    "telemetry.otlp-endpoint: {endpoint:?} is no address; give one like http://localhost:4317"
                )),
            }
        }
        problems
    }
}

impl WorkerConfig {
    /// What in the configuration changes rows, as the record of a job has it.
    pub fn row_options(&self) -> String {
        let mut options = format!("top-k={}", self.infer.top_k);
        if self.preprocess.mode == Mode::Fast {
            options.push_str(", preprocess.mode=fast");
        }
        options
    }

    /// Names every setting that cannot work, with its remedy; empty when all can.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = self.broker.problems();
        problems.extend(self.s3.problems());
        problems.extend(self.telemetry.problems());
        let options = self.infer.model_options();
        if let Err(error) = options.and_then(|options| options.check()) {
            problems.push(format!("infer: {error}"));
        }
        if self.preprocess.max_bytes == 0 {
            problems.push("preprocess.max-bytes: 0 refuses every image; set at least 1".to_owned());
        }
        if self.preprocess.max_pixels == 0 || self.preprocess.max_side == 0 {
            problems.push(
                "preprocess.max-pixels, max-side: 0 refuses every image; set at least 1".to_owned(),
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
    fn gpus_have_two_sessions_each_and_share_no_core() {
        let of = |device: &str| {
            let config = InferConfig {
                device: device.to_owned(),
                ..InferConfig::default()
            };
            (config.instances(), config.intra_threads())
        };
        assert_eq!(of("cuda:0"), (2, 1));
        assert_eq!(of("tensorrt:0,tensorrt:1"), (4, 1));
        let (instances, threads) = of("cpu");
        assert!(instances * threads <= cores() && instances <= 4);
    }

    #[test]
    fn the_memory_of_a_device_is_shared_by_its_sessions() {
        let config = InferConfig {
            device: "cuda:0,cuda:1".to_owned(),
            memory_budget: NonZeroUsize::new(64),
            ..InferConfig::default()
        };
        let options = config.model_options().unwrap();
        assert_eq!(options.memory_limit, Some(32 << 20));
        assert_eq!(options.devices.len(), 2);
    }
}
