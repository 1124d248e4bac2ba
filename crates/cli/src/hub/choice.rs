//! Chooses one of a repository's ONNX files.

use anyhow::{Result, bail};
use clap::ValueEnum;

use super::{HubName, folder_for};

/// The precision of a model's weights, as in file names of the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    Fp32,
    Fp16,
    Int8,
    Uint8,
    Q8,
    Q4,
    Q4f16,
    Bnb4,
}

impl Dtype {
    /// The suffix of file names.
    fn suffix(self) -> &'static str {
        match self {
            Self::Fp32 => "",
            Self::Fp16 => "_fp16",
            Self::Int8 => "_int8",
            Self::Uint8 => "_uint8",
            Self::Q8 => "_quantized",
            Self::Q4 => "_q4",
            Self::Q4f16 => "_q4f16",
            Self::Bnb4 => "_bnb4",
        }
    }

    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Folders of a repository that are searched for models.
const FOLDERS: [&str; 2] = ["", "onnx/"];

/// The file with this precision; by default full precision, or the only file.
///
/// # Errors
/// If no file has this precision; the error lists the existing ones.
pub(super) fn choose<'a>(
    files: &[&'a str],
    dtype: Option<Dtype>,
    name: &HubName,
) -> Result<&'a str> {
    let models: Vec<&str> = files
        .iter()
        .copied()
        .filter(|file| file.ends_with(".onnx"))
        .collect();
    if models.is_empty() {
        let repository = &name.repository;
        let folder = folder_for(repository);
        bail!(
            "{name} holds no ONNX file; export it with `python models/export.py {repository} --output {folder}` or `optimum-cli export onnx --model {repository} {folder}`, and give --model {folder}"
        );
    }
    let of = |dtype: Dtype| {
        let paths = FOLDERS.map(|folder| format!("{folder}model{}.onnx", dtype.suffix()));
        let mut models = models.iter().copied();
        models.find(|model| paths.iter().any(|path| path == model))
    };
    match (of(dtype.unwrap_or(Dtype::Fp32)), dtype, models.as_slice()) {
        (Some(model), _, _) => Ok(model),
        (None, None, [only]) => Ok(only),
        _ => {
            let all = Dtype::value_variants().iter();
            let known = all.filter_map(|dtype| Some((dtype.name(), of(*dtype)?)));
            let known: Vec<_> = known
                .map(|(name, file)| format!("{name} ({file})"))
                .collect();
            let wanted = dtype.unwrap_or(Dtype::Fp32).name();
            match known.is_empty() {
                false => bail!(
                    "{name} holds no {wanted} file; choose one with --dtype: {}",
                    known.join(", ")
                ),
                true => bail!(
                    "{name} has {}, none of which has the usual name of a classifier; download the right one into a folder as model.onnx, with config.json and preprocessor_config.json",
                    models.join(", ")
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEVERAL: [&str; 5] = [
        "README.md",
        "config.json",
        "onnx/model.onnx",
        "onnx/model_fp16.onnx",
        "onnx/model_quantized.onnx",
    ];

    fn choice(files: &[&'static str], dtype: Option<Dtype>) -> Result<&'static str, String> {
        let name = "hf:org/vit".parse().unwrap();
        choose(files, dtype, &name).map_err(|error| error.to_string())
    }

    #[test]
    fn the_precision_chooses_the_file() {
        assert_eq!(choice(&SEVERAL, None), Ok("onnx/model.onnx"));
        assert_eq!(
            choice(&SEVERAL, Some(Dtype::Fp16)),
            Ok("onnx/model_fp16.onnx")
        );
        assert_eq!(
            choice(&SEVERAL, Some(Dtype::Q8)),
            Ok("onnx/model_quantized.onnx")
        );
        assert_eq!(
            choice(&["model.onnx", "onnx/model.onnx"], None),
            Ok("model.onnx")
        );
        assert_eq!(choice(&["resnet.onnx"], None), Ok("resnet.onnx"));
    }

    #[test]
    fn what_is_not_there_is_answered_with_what_is() {
        let error = choice(&SEVERAL, Some(Dtype::Int8)).unwrap_err();
        let words = "no int8 file; choose one with --dtype: fp32 (onnx/model.onnx), fp16 (onnx/model_fp16.onnx), q8";
        assert!(error.contains(words), "{error}");
        let error = choice(&SEVERAL[3..], None).unwrap_err();
        assert!(
            error.contains("no fp32 file; choose one with --dtype: fp16"),
            "{error}"
        );
        let error = choice(&["encoder.onnx", "decoder.onnx"], None).unwrap_err();
        assert!(error.contains("encoder.onnx, decoder.onnx"), "{error}");
        let error = choice(&SEVERAL[..2], None).unwrap_err();
        for words in [
            "holds no ONNX file",
            "models/export.py org/vit --output models/vit",
            "optimum-cli export onnx --model org/vit models/vit",
        ] {
            assert!(error.contains(words), "{error}");
        }
    }
}
