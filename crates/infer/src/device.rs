use std::fmt;
use std::path::PathBuf;

use ort::ep::{self, ArbitrarilyConfigurableExecutionProvider, ExecutionProviderDispatch};
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::builder::SessionBuilder;
use serde::{Deserialize, Serialize, Serializer};

use crate::error::reason;
use crate::{InferError, InferErrorKind};

/// Where a model runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// The NVIDIA GPU with this number, with ONNX Runtime's CUDA kernels.
    Cuda(u32),
    /// The NVIDIA GPU with this number, with a TensorRT engine, and CUDA kernels for operators that
    /// TensorRT lacks.
    TensorRt(u32),
}

/// The devices over which a model's sessions are distributed in turn: one or several of a kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Devices(Vec<Device>);

/// The precision of TensorRT.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// As in the model.
    #[default]
    Model,
    /// 16-bit floats wherever they are faster.
    Fp16,
    /// The 8-bit integers of a quantised model, and 16-bit floats elsewhere.
    Int8,
}

/// Settings of a session on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuOptions {
    /// Whether to record and replay its work.
    pub(crate) graphs: bool,
    /// Largest arena in the device's memory, in bytes.
    pub(crate) memory_limit: Option<usize>,
    pub(crate) precision: Precision,
    /// Folder for TensorRT's engines.
    pub(crate) cache: Option<PathBuf>,
    /// The model's input and its shape without the batch.
    pub(crate) input: String,
    pub(crate) image: [usize; 3],
    /// Smallest and largest batch.
    pub(crate) batches: (usize, usize),
}

/// A kind of memory for tensors.
#[derive(Debug)]
pub(crate) struct Memory {
    of: AllocationDevice<'static>,
    number: i32,
    kind: MemoryType,
}

impl Memory {
    pub(crate) fn info(&self) -> ort::Result<MemoryInfo<'static>> {
        MemoryInfo::new(
            self.of.clone(),
            self.number,
            AllocatorType::Device,
            self.kind,
        )
    }
}

/// Options of an execution provider, named as in ONNX Runtime's documentation.
type ProviderOptions = Vec<(&'static str, String)>;

impl Device {
    /// Parses `cpu`, `cuda:N` or `tensorrt:N`; `cuda` means `cuda:0`, likewise `tensorrt`.
    ///
    /// # Errors
    /// If `text` names no such device. [`Model::open`](crate::Model::open) checks whether the device
    /// exists.
    pub fn parse(text: &str) -> Result<Self, InferError> {
        let (name, number) = text
            .split_once(':')
            .map_or((text, None), |(n, i)| (n, Some(i)));
        let number = number.map_or(Some(0), |number| number.parse().ok());
        match (name, number) {
            ("cpu", _) if name == text => Ok(Self::Cpu),
            ("cuda", Some(number)) => Ok(Self::Cuda(number)),
            ("tensorrt", Some(number)) => Ok(Self::TensorRt(number)),
            _ => Err(InferError::new(
                InferErrorKind::Settings,
                format_args!("unknown device {text:?}: give cpu, cuda:N or tensorrt:N"),
            )),
        }
    }

    /// Whether it has its own memory.
    pub fn is_gpu(self) -> bool {
        self != Self::Cpu
    }

    /// The same device for a graph too small for an engine.
    pub(crate) fn without_engines(self) -> Self {
        match self {
            Self::TensorRt(number) => Self::Cuda(number),
            device => device,
        }
    }

    /// Configures sessions to run here, or returns why they cannot: a session never runs elsewhere
    /// instead.
    pub(crate) fn apply(
        self,
        builder: SessionBuilder,
        options: Option<&GpuOptions>,
    ) -> Result<SessionBuilder, InferError> {
        let providers = self.providers(options)?;
        if providers.is_empty() {
            return Ok(builder);
        }
        builder
            .with_execution_providers(providers)
            .map_err(|error| self.unavailable(&error))
    }

    /// The execution providers to register, in order; none for the CPU. ONNX Runtime runs operators
    /// that none of them supports on the CPU.
    fn providers(
        self,
        options: Option<&GpuOptions>,
    ) -> Result<Vec<ExecutionProviderDispatch>, InferError> {
        let cuda = |number| {
            let mut cuda = ep::CUDA::default().with_device_id(self.id(number)?);
            let options = options.map(|options| options.cuda(self));
            for (name, value) in options.unwrap_or_default() {
                cuda = cuda.with_arbitrary_config(name, value);
            }
            Ok::<_, InferError>(cuda.build().error_on_failure())
        };
        Ok(match self {
            Self::Cpu => Vec::new(),
            Self::Cuda(number) => vec![cuda(number)?],
            Self::TensorRt(number) => {
                let mut tensorrt = ep::TensorRT::default().with_device_id(self.id(number)?);
                for (name, value) in options.map(GpuOptions::tensorrt).unwrap_or_default() {
                    tensorrt = tensorrt.with_arbitrary_config(name, value);
                }
                vec![tensorrt.build().error_on_failure(), cuda(number)?]
            }
        })
    }

    /// Where its tensors are on the host, page-locked for a GPU, which can then copy them itself.
    pub(crate) fn host_memory(self) -> Memory {
        match self {
            Self::Cpu => self.memory(),
            Self::Cuda(_) | Self::TensorRt(_) => Memory {
                of: AllocationDevice::CUDA_PINNED,
                kind: MemoryType::CPUOutput,
                ..self.memory()
            },
        }
    }

    /// Where they are on the device; the same for the CPU.
    pub(crate) fn memory(self) -> Memory {
        let (of, number) = match self {
            Self::Cpu => (AllocationDevice::CPU, 0),
            // `providers` has refused numbers that are too large.
            Self::Cuda(number) | Self::TensorRt(number) => (
                AllocationDevice::CUDA,
                i32::try_from(number).unwrap_or(i32::MAX),
            ),
        };
        Memory {
            of,
            number,
            kind: MemoryType::Default,
        }
    }

    /// The error for a device that ONNX Runtime rejected.
    pub(crate) fn unavailable(self, why: &impl fmt::Display) -> InferError {
        InferError::new(
            InferErrorKind::Device,
            format_args!(
                "device {self} is not available: {}; give an ONNX Runtime library built for it \
                 with --onnxruntime PATH, or another device such as cpu",
                reason(why)
            ),
        )
    }

    fn id(self, number: u32) -> Result<i32, InferError> {
        i32::try_from(number).map_err(|_| self.unavailable(&"no machine has so many devices"))
    }
}

impl Devices {
    /// Parses devices of one kind, separated by commas, such as `cpu` or `cuda:0,cuda:1`.
    ///
    /// # Errors
    /// If one is invalid, repeated, or of another kind than the first.
    pub fn parse(text: &str) -> Result<Self, InferError> {
        let refused = |why: &dyn fmt::Display| Err(InferError::new(InferErrorKind::Settings, why));
        let mut devices: Vec<Device> = Vec::new();
        for part in text.split(',') {
            let device = Device::parse(part.trim())?;
            if devices.contains(&device) {
                return refused(&format_args!("device {device} is given twice in {text:?}"));
            }
            let is_other =
                |first: &Device| std::mem::discriminant(first) != std::mem::discriminant(&device);
            if devices.first().is_some_and(is_other) {
                return refused(&format_args!(
                    "devices of several kinds in {text:?}: give those of one kind, and start \
                     another worker for the others"
                ));
            }
            devices.push(device);
        }
        Ok(Self(devices))
    }

    /// The device of the session with this number.
    pub(crate) fn of(&self, number: usize) -> Device {
        self.0[number % self.0.len()]
    }

    /// Number of devices, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The first; all others are of its kind.
    pub fn first(&self) -> Device {
        self.0[0]
    }
}

impl From<Device> for Devices {
    fn from(device: Device) -> Self {
        Self(vec![device])
    }
}

impl GpuOptions {
    fn cuda(&self, device: Device) -> ProviderOptions {
        // After TensorRT it runs pieces of a graph, and TensorRT makes its own recording.
        let graphs = self.graphs && matches!(device, Device::Cuda(_));
        let mut options = vec![("enable_cuda_graph", flag(graphs))];
        options.extend(
            self.memory_limit
                .map(|limit| ("gpu_mem_limit", limit.to_string())),
        );
        options
    }

    fn tensorrt(&self) -> ProviderOptions {
        let [first, second, third] = self.image;
        let shape = |batch| format!("{}:{batch}x{first}x{second}x{third}", self.input);
        let (smallest, largest) = self.batches;
        let mut options = vec![
            ("trt_profile_min_shapes", shape(smallest)),
            ("trt_profile_opt_shapes", shape(largest)),
            ("trt_profile_max_shapes", shape(largest)),
            // It keeps one recording, whatever the batch size.
            (
                "trt_cuda_graph_enable",
                flag(self.graphs && smallest == largest),
            ),
            ("trt_fp16_enable", flag(self.precision != Precision::Model)),
            ("trt_int8_enable", flag(self.precision == Precision::Int8)),
        ];
        if let Some(cache) = &self.cache {
            let cache = cache.display().to_string();
            options.extend([
                ("trt_engine_cache_enable", flag(true)),
                ("trt_engine_cache_path", cache.clone()),
                ("trt_timing_cache_enable", flag(true)),
                ("trt_timing_cache_path", cache),
            ]);
        }
        options.extend(
            self.memory_limit
                .map(|limit| ("trt_max_workspace_size", limit.to_string())),
        );
        options
    }
}

fn flag(value: bool) -> String {
    if value { "1" } else { "0" }.to_owned()
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
            Self::TensorRt(number) => write!(f, "tensorrt:{number}"),
        }
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, device) in self.0.iter().enumerate() {
            write!(f, "{}{device}", if place == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl Serialize for Devices {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_and_written_the_same_way() {
        for text in ["cpu", "cuda:0", "cuda:3", "tensorrt:1"] {
            assert_eq!(Device::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Device::parse("cuda").unwrap(), Device::Cuda(0));
    }

    #[test]
    fn several_devices_of_a_kind_are_taken_in_turn() {
        let devices = Devices::parse("cuda:1, cuda:3").unwrap();
        assert_eq!(devices.to_string(), "cuda:1,cuda:3");
        let of = [0, 1, 2].map(|number| devices.of(number));
        assert_eq!(of, [Device::Cuda(1), Device::Cuda(3), Device::Cuda(1)]);
        for (text, words) in [
            ("cuda:0,cuda:0", "twice"),
            ("cpu,cuda:0", "several kinds"),
            ("cuda:0,tensorrt:1", "several kinds"),
            ("cuda:0,", "unknown device"),
        ] {
            let error = Devices::parse(text).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    fn options() -> GpuOptions {
        GpuOptions {
            graphs: true,
            memory_limit: Some(1 << 30),
            precision: Precision::Int8,
            cache: Some("/cache/key".into()),
            input: "pixels".to_owned(),
            image: [224, 192, 3],
            batches: (1, 48),
        }
    }

    #[test]
    fn tensorrt_is_told_the_shapes_that_will_come_and_where_engines_are_kept() {
        let told = options().tensorrt();
        for option in [
            ("trt_profile_min_shapes", "pixels:1x224x192x3"),
            ("trt_profile_opt_shapes", "pixels:48x224x192x3"),
            ("trt_profile_max_shapes", "pixels:48x224x192x3"),
            ("trt_fp16_enable", "1"),
            ("trt_int8_enable", "1"),
            ("trt_engine_cache_path", "/cache/key"),
            ("trt_timing_cache_path", "/cache/key"),
            ("trt_max_workspace_size", "1073741824"),
        ] {
            assert!(told.contains(&(option.0, option.1.to_owned())), "{told:?}");
        }
        let plain = GpuOptions {
            precision: Precision::Model,
            cache: None,
            ..options()
        };
        let told = plain.tensorrt();
        assert!(told.contains(&("trt_fp16_enable", "0".to_owned())));
        assert!(
            !told.iter().any(|(name, _)| name.contains("cache")),
            "{told:?}"
        );
    }

    #[test]
    fn tensorrt_records_a_graph_only_where_all_batches_have_one_size() {
        let graphs = |batches| {
            let told = GpuOptions {
                batches,
                ..options()
            };
            told.tensorrt()
                .contains(&("trt_cuda_graph_enable", "1".to_owned()))
        };
        assert_eq!([graphs((1, 48)), graphs((8, 8))], [false, true]);
    }

    #[test]
    fn cuda_records_graphs_unless_tensorrt_does() {
        let told = |device, name| {
            let options = options().cuda(device);
            let option = options.into_iter().find(|option| option.0 == name);
            option.map(|(_, value)| value)
        };
        let [cuda, tensorrt] = [Device::Cuda(0), Device::TensorRt(0)]
            .map(|device| told(device, "enable_cuda_graph").unwrap());
        assert_eq!((&*cuda, &*tensorrt), ("1", "0"));
        let limit = told(Device::Cuda(0), "gpu_mem_limit").unwrap();
        assert_eq!(limit, (1_usize << 30).to_string());
    }

    #[test]
    fn a_gpu_copies_from_page_locked_memory_to_its_own() {
        let names = |device: Device| {
            let (host, own) = (device.host_memory(), device.memory());
            assert_eq!(host.number, own.number);
            (host.of.as_str().to_owned(), own.of.as_str().to_owned())
        };
        let pinned = ("CudaPinned".to_owned(), "Cuda".to_owned());
        assert_eq!(names(Device::TensorRt(1)), pinned);
        assert_eq!(names(Device::Cpu), ("Cpu".to_owned(), "Cpu".to_owned()));
    }

    #[test]
    fn anything_else_is_an_error_that_names_it() {
        for text in [
            "",
            "gpu",
            "cpu:0",
            "cuda:",
            "cuda:x",
            "cuda:-1",
            "CUDA:0",
            "cuda:99999999999",
        ] {
            let error = Device::parse(text).unwrap_err();
            assert_eq!(error.kind(), InferErrorKind::Settings, "{text}");
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }
}
