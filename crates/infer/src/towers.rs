//! Models with two towers: finds the files of the image tower and the text tower.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::config::{ModelConfig, invalid, read_optional};
use crate::onnx_file::OnnxFile;
use crate::version::find_file;
use crate::{Activation, InferError, InferErrorKind};

/// File name of a text tower, in the layout of transformers.js.
const TEXT_FILES: [&str; 2] = ["text_model.onnx", "onnx/text_model.onnx"];
/// File name of a graph with both towers, in the layout of Optimum.
const BOTH_FILES: [&str; 2] = ["model.onnx", "onnx/model.onnx"];
/// The input of a text tower.
pub(crate) const TOKENS: &str = "input_ids";
/// The outputs of an image tower and of a text tower, in order of preference.
pub(crate) const IMAGE_OUTPUTS: [&str; 2] = ["image_embeds", "pooler_output"];
pub(crate) const TEXT_OUTPUTS: [&str; 2] = ["text_embeds", "pooler_output"];
/// The output of a graph with both towers that compares images with texts.
pub(crate) const COMPARED: &str = "logits_per_image";

/// The text tower in a model's folder, and its settings.
#[derive(Debug, Clone)]
pub(crate) struct TextFiles {
    /// The graph, and whether it contains the other tower too.
    pub(crate) file: PathBuf,
    pub(crate) is_shared: bool,
    /// A graph with both towers, which shows how they are compared.
    pub(crate) both: Option<PathBuf>,
    pub(crate) tokenizer: PathBuf,
    /// Most tokens per text.
    pub(crate) max_length: usize,
    /// Whether every text is padded to that length.
    pub(crate) fills_up: bool,
    /// On which side.
    pub(crate) padding_side: PaddingSide,
    /// Whether texts are lowercased first, whatever `tokenizer.json` says.
    pub(crate) lowers: bool,
    /// The padding token, as text or number.
    pub(crate) filler: Option<Filler>,
    pub(crate) scaling: Option<Scaling>,
    /// How the comparison becomes scores.
    pub(crate) activation: Activation,
}

/// A token, as files name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Filler {
    Text(String),
    Number(u32),
}

/// `logit = scale × cosine + bias`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Scaling {
    pub(crate) scale: f32,
    pub(crate) bias: f32,
}

/// The section `[text]` of `trommel.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct TextSection {
    file: Option<PathBuf>,
    max_length: Option<usize>,
    fill_up: Option<bool>,
    filler: Option<String>,
    logit_scale: Option<f32>,
    logit_bias: Option<f32>,
}

/// The fields of `config.json` and `tokenizer_config.json` that matter here.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    model_type: Option<String>,
    text_config: Option<TextConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TextConfig {
    max_position_embeddings: Option<usize>,
    pad_token_id: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TokenizerConfig {
    /// Beyond all numbers where there is no limit.
    model_max_length: Option<f64>,
    pad_token: Option<Token>,
    padding_side: Option<PaddingSide>,
    tokenizer_class: Option<String>,
}

impl TokenizerConfig {
    /// Whether a class of Transformers reads the tokenizer, in either spelling.
    fn is(&self, class: &str) -> bool {
        let found = self.tokenizer_class.as_deref();
        found.is_some_and(|found| found.trim_end_matches("Fast") == class)
    }

    /// The side on which texts are filled up: that of the class where the file does not name one.
    fn side(&self) -> PaddingSide {
        let is_left = self.is("Siglip2Tokenizer") || self.is("GemmaTokenizer");
        self.padding_side.unwrap_or(match is_left {
            true => PaddingSide::Left,
            false => PaddingSide::Right,
        })
    }
}

/// A side of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PaddingSide {
    Left,
    Right,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Described { content: String },
}

impl Token {
    fn text(self) -> String {
        match self {
            Self::Text(text) | Self::Described { content: text } => text,
        }
    }
}

/// The file of a folder that holds the tower for images, or all of the model, and whether it holds one for
/// texts too.
///
/// # Errors
/// If the folder has no such file.
pub(crate) fn image_file(dir: &Path, config: &ModelConfig) -> Result<(PathBuf, bool), InferError> {
    let path = find_file(dir, config.file.as_deref())?;
    let inputs = OnnxFile::describe(&path)?.inputs;
    Ok((
        path,
        inputs.len() > 1 && inputs.iter().any(|input| input == TOKENS),
    ))
}

/// The files besides the one for images that decide what texts become.
pub(crate) fn beside(dir: &Path) -> impl Iterator<Item = PathBuf> {
    TEXT_FILES
        .into_iter()
        .chain([
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
        ])
        .map(move |name| dir.join(name))
}

/// The tower for texts in the folder `dir`, whose images go through `image`.
///
/// # Errors
/// What is missing or malformed, with its remedy.
pub(crate) fn text_files(
    dir: &Path,
    image: &Path,
    holds_both: bool,
    config: &ModelConfig,
) -> Result<TextFiles, InferError> {
    let section = TextSection::read(&dir.join("trommel.toml"))?;
    let (file, is_shared) = match (&section.file, holds_both) {
        (Some(file), _) => (dir.join(file), false),
        (None, true) => (image.to_owned(), true),
        (None, false) => {
            let file = first_file(dir, TEXT_FILES).ok_or_else(|| missing(format_args!(
                "model {} has no text tower, so it cannot use labels: add text_model.onnx and tokenizer.json, or give a model that has them",
                dir.display()
            )))?;
            (file, false)
        }
    };
    let tokenizer = dir.join("tokenizer.json");
    if !tokenizer.is_file() {
        return Err(missing(format_args!(
            "{} is missing, without which texts are no tokens: save it with tokenizer.save_pretrained of Transformers",
            tokenizer.display()
        )));
    }
    let hub: Config = read_json(&dir.join("config.json"))?.unwrap_or_default();
    let text: TextConfig = hub.text_config.unwrap_or_default();
    let tokens: TokenizerConfig =
        read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
    let special: TokenizerConfig =
        read_json(&dir.join("special_tokens_map.json"))?.unwrap_or_default();
    let kind = hub.model_type.as_deref().unwrap_or_default();
    let is_siglip = kind.contains("siglip");
    let limit = tokens.model_max_length;
    let limit = limit.filter(|length| (1.0..1e6).contains(length));
    let max_length = section
        .max_length
        .or(limit.map(|length| length as usize))
        .or(text.max_position_embeddings)
        .or(match kind {
            "clip" => Some(77),
            _ if is_siglip => Some(64),
            _ => None,
        });
    let max_length = max_length.filter(|length| (4..1 << 20).contains(length)).ok_or_else(|| {
        invalid(dir, &"no file gives the most tokens of a text; set max-length in the section [text] of trommel.toml")
    })?;
    let fills_up = section.fill_up.unwrap_or(is_siglip);
    let padding_side = tokens.side();
    if padding_side == PaddingSide::Left && !fills_up {
        return Err(invalid(
            dir,
            &"its tokenizer fills up texts on the left, so that an embedding would depend on the other texts of its batch; set fill-up in the section [text] of trommel.toml, or padding_side in tokenizer_config.json",
        ));
    }
    // Transformers adds it to the tokenizer of this class, also where the file does not have it.
    let lowers = tokens.is("Siglip2Tokenizer");
    let pad = tokens.pad_token.or(special.pad_token);
    let filler = section.filler.clone().or(pad.map(|token| token.text()));
    let filler = filler.map(Filler::Text);
    Ok(TextFiles {
        both: match is_shared {
            true => Some(file.clone()),
            false => first_file(dir, BOTH_FILES).filter(|both| both != image),
        },
        file,
        is_shared,
        tokenizer,
        max_length,
        fills_up,
        padding_side,
        lowers,
        filler: filler.or(text.pad_token_id.map(Filler::Number)),
        scaling: section.scaling(dir)?,
        activation: text_activation(dir, config, kind)?,
    })
}

/// The first of these files that is in the folder.
fn first_file(dir: &Path, names: [&str; 2]) -> Option<PathBuf> {
    let mut paths = names.into_iter().map(|name| dir.join(name));
    paths.find(|path| path.is_file())
}

/// What makes scores of the comparisons of a kind of model, by its name in `config.json`.
fn text_activation(dir: &Path, config: &ModelConfig, kind: &str) -> Result<Activation, InferError> {
    match (config.set_activation, kind) {
        (Some(activation), _) => Ok(activation),
        (None, "") => Err(invalid(
            dir,
            &"config.json names no model_type, so it is not known how its comparisons become scores; set activation in the section [model] of trommel.toml",
        )),
        // As Transformers' pipeline for zero-shot classification does.
        (None, _) if kind.contains("siglip") => Ok(Activation::Sigmoid),
        (None, _) => Ok(Activation::Softmax),
    }
}

/// Whether images of this kind of model are described by the first of their tokens, by the name of the kind
/// in `config.json`.
pub(crate) fn has_class_token(dir: &Path) -> Result<bool, InferError> {
    let config: Config = read_json(&dir.join("config.json"))?.unwrap_or_default();
    let kinds = [
        "dinov2",
        "dinov2_with_registers",
        "dinov3_vit",
        "vit",
        "vit_msn",
        "deit",
    ];
    Ok(config
        .model_type
        .is_some_and(|kind| kinds.contains(&kind.as_str())))
}

impl TextSection {
    fn read(path: &Path) -> Result<Self, InferError> {
        #[derive(Deserialize)]
        struct Sections {
            #[serde(default)]
            text: TextSection,
        }
        let Some(text) = read_optional(path)? else {
            return Ok(Self::default());
        };
        let sections: Sections = toml::from_str(&text).map_err(|error| invalid(path, &error))?;
        Ok(sections.text)
    }

    /// How the comparisons are scaled, if it says so.
    fn scaling(&self, dir: &Path) -> Result<Option<Scaling>, InferError> {
        match (self.logit_scale, self.logit_bias) {
            (Some(scale), bias) => Ok(Some(Scaling {
                scale,
                bias: bias.unwrap_or(0.0),
            })),
            (None, None) => Ok(None),
            (None, Some(_)) => Err(invalid(
                &dir.join("trommel.toml"),
                &"logit-bias is set in the section [text] and logit-scale is not; set both",
            )),
        }
    }
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>, InferError> {
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| invalid(path, &error)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(invalid(path, &error)),
    }
}

fn missing(why: std::fmt::Arguments<'_>) -> InferError {
    InferError::new(InferErrorKind::ModelMissing, why)
}
