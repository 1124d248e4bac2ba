//! The metrics of engines and devices; `docs/metrics.md` lists them.

use std::sync::OnceLock;
use std::time::Duration;

use metrics::{
    Histogram, Unit, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use nvml_wrapper::Nvml;

const BATCH_SIZE: &str = "trommel_batch_size";
const BATCH_FILL: &str = "trommel_batch_fill";
const INFER: &str = "trommel_infer_seconds";
const GAP: &str = "trommel_batch_gap_seconds";
const LIVE_BATCH_FILL: &str = "trommel_live_batch_fill";
const REQUEST_QUEUE: &str = "trommel_request_queue_seconds";
const REQUEST_SERVICE: &str = "trommel_request_service_seconds";
pub(crate) const PROMPT_REQUESTS: &str = "trommel_prompt_requests_total";
pub(crate) const PROMPT_TOKENS: &str = "trommel_prompt_tokens_total";
const GPU_MEMORY: &str = "trommel_gpu_memory_used_bytes";
const GPU_UTILISATION: &str = "trommel_gpu_utilisation_ratio";

/// Describes the metrics of this crate to the recorder that is installed.
pub fn describe_metrics() {
    describe_histogram!(BATCH_SIZE, "Images in a batch");
    describe_histogram!(BATCH_FILL, "Images in a batch, as a share of a full one");
    describe_histogram!(
        INFER,
        Unit::Seconds,
        "Running a batch, from normalisation to scores"
    );
    describe_histogram!(
        GAP,
        Unit::Seconds,
        "Time between two batches of an instance although the next one was waiting"
    );
    describe_histogram!(
        LIVE_BATCH_FILL,
        "Images in a batch of requests, as a share of a full one"
    );
    describe_histogram!(
        REQUEST_QUEUE,
        Unit::Seconds,
        "Wait of a request's image for a thread that decodes, or for the model"
    );
    describe_histogram!(
        REQUEST_SERVICE,
        Unit::Seconds,
        "Work on a request's image: decoding and resizing, or the batch that it is in"
    );
    describe_counter!(
        PROMPT_REQUESTS,
        "Requests to the servers of a prompt, by how they ended"
    );
    describe_counter!(
        PROMPT_TOKENS,
        "Tokens that the servers of a prompt have read and written, as they count them"
    );
    describe_gauge!(
        GPU_MEMORY,
        Unit::Bytes,
        "Memory of an NVIDIA GPU that is in use, by all processes"
    );
    describe_gauge!(
        GPU_UTILISATION,
        "Share of time in which an NVIDIA GPU ran a kernel, as its driver reports it"
    );
}

/// The metrics of one instance.
pub(crate) struct InstanceMetrics {
    size: Histogram,
    fill: Histogram,
    infer: Histogram,
    gap: Histogram,
    live_fill: Histogram,
    live_wait: Histogram,
    live_work: Histogram,
}

impl InstanceMetrics {
    pub(crate) fn of(model: &str) -> Self {
        let of = |name: &'static str| histogram!(name, "model" => model.to_owned());
        let of_requests = |name: &'static str| histogram!(name, "stage" => "infer");
        Self {
            size: of(BATCH_SIZE),
            fill: of(BATCH_FILL),
            infer: of(INFER),
            gap: of(GAP),
            live_fill: of(LIVE_BATCH_FILL),
            live_wait: of_requests(REQUEST_QUEUE),
            live_work: of_requests(REQUEST_SERVICE),
        }
    }

    /// `places` is the size of a full batch.
    pub(crate) fn batch(&self, images: usize, places: usize, took: Duration) {
        self.size.record(images as f64);
        self.fill.record(images as f64 / places as f64);
        self.infer.record(took);
    }

    /// An image of a request waited this long for its batch to begin.
    pub(crate) fn live_wait(&self, waited: Duration) {
        self.live_wait.record(waited);
    }

    /// As [`InstanceMetrics::batch`], for images of requests.
    pub(crate) fn live_batch(&self, images: usize, places: usize, took: Duration) {
        self.live_fill.record(images as f64 / places as f64);
        for _ in 0..images {
            self.live_work.record(took);
        }
    }

    pub(crate) fn gap(&self, took: Duration) {
        self.gap.record(took);
    }
}

/// The name of the NVIDIA GPU with this number, if its driver's management library is available.
/// That library counts by bus; CUDA does too with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
pub fn gpu_name(number: u32) -> Option<String> {
    nvml()?.device_by_index(number).ok()?.name().ok()
}

fn nvml() -> Option<&'static Nvml> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    NVML.get_or_init(|| Nvml::init().ok()).as_ref()
}

/// Measures the NVIDIA GPUs of this machine once, if their driver's management library (NVML) is
/// available.
pub fn measure_devices() {
    let Some(nvml) = nvml() else { return };
    for number in 0..nvml.device_count().unwrap_or(0) {
        let Ok(device) = nvml.device_by_index(number) else {
            continue;
        };
        let label = format!("cuda:{number}");
        if let Ok(memory) = device.memory_info() {
            gauge!(GPU_MEMORY, "device" => label.clone()).set(memory.used as f64);
        }
        if let Ok(rates) = device.utilization_rates() {
            gauge!(GPU_UTILISATION, "device" => label).set(f64::from(rates.gpu) / 100.0);
        }
    }
}
