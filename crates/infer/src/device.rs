use std::fmt;

use ort::ep;
use ort::session::builder::SessionBuilder;
use serde::{Serialize, Serializer};

use crate::error::reason;
use crate::{InferError, InferErrorKind};

/// Where a model runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// The NVIDIA GPU with this number, by ONNX Runtime's CUDA kernels.
    Cuda(u32),
    /// The NVIDIA GPU with this number, by a TensorRT engine.
    TensorRt(u32),
}

impl Device {
    /// Reads `cpu`, `cuda:N` or `tensorrt:N`; `cuda` alone is `cuda:0`, `tensorrt` likewise.
    ///
    /// # Errors
    /// When `text` is none of these. Whether the device is there is found out by
    /// [`Model::open`](crate::Model::open).
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

    /// Makes sessions run here, or says why they cannot: a session never runs elsewhere instead.
    pub(crate) fn apply(self, builder: SessionBuilder) -> Result<SessionBuilder, InferError> {
        let provider = match self {
            Self::Cpu => return Ok(builder),
            Self::Cuda(number) => ep::CUDA::default().with_device_id(self.id(number)?).build(),
            Self::TensorRt(number) => ep::TensorRT::default()
                .with_device_id(self.id(number)?)
                .build(),
        };
        builder
            .with_execution_providers([provider.error_on_failure()])
            .map_err(|error| self.unavailable(&error))
    }

    /// The error for a device that ONNX Runtime refused.
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

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
            Self::TensorRt(number) => write!(f, "tensorrt:{number}"),
        }
    }
}

impl Serialize for Device {
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
