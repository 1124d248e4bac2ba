//! `trommel model verify`: compares Trommel's tensors with those of the user's own image processor.
//!
//! It writes the tensors and a Python program to a folder, runs the program with the user's Python,
//! and reads its verdict: only the user's own installation knows the reference.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use trommel_preprocess::{Limits, Plan, Prepared, Preparer};

use crate::args::VerifyArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};

/// The comparison program.
const PROGRAM: &str = include_str!("compare.py");
const PROGRAM_FILE: &str = "compare.py";
const TASK_FILE: &str = "task.json";
const VERDICT_FILE: &str = "verdict.json";

/// Tolerance in grey levels: far more than rounding errors of normalisation, and far less than one
/// level, the smallest real difference.
const TOLERANCE: f64 = 0.05;

/// The task of the program.
#[derive(Debug, Serialize)]
struct Task {
    model: PathBuf,
    scale: f32,
    mean: [f32; 3],
    std: [f32; 3],
    tolerance: f64,
    images: Vec<Case>,
}

#[derive(Debug, Serialize)]
struct Case {
    image: PathBuf,
    /// A NumPy file: `HWC u8`.
    tensor: String,
}

/// The result of the program.
#[derive(Debug, Serialize, Deserialize)]
struct Verdict {
    /// The class of the processor.
    processor: String,
    /// The version of Transformers.
    transformers: String,
    images: Vec<Compared>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Compared {
    image: PathBuf,
    /// The largest difference in grey levels; absent if shapes differ.
    levels: Option<f64>,
    /// Shape of the processor's tensor: channels, rows, columns.
    shape: Vec<u32>,
}

/// Runs the command.
pub(crate) fn run(args: &VerifyArgs, config: &Config) -> Result<Exit> {
    let reference = args.reference.unwrap_or(config.preprocess.reference);
    let dir = args.model.folder(args.dtype, false).context(Usage)?;
    let plan = Plan::load(&dir, reference).context(Usage)?;
    let shape = plan.fixed_shape();
    let shape = shape.with_context(|| format!("model {}", dir.display()));
    let shape = shape.context(Usage)?;
    let images = images(&args.images, args.limit.get()).context(Usage)?;
    start_folder(&args.output).context(Usage)?;
    let limits = Limits {
        max_bytes: config.preprocess.max_bytes,
        max_pixels: config.preprocess.max_pixels,
        max_side: config.preprocess.max_side,
    };
    let plan = Arc::new(plan);
    let mut out = io::stdout().lock();
    writeln!(out, "preprocess  {plan}, from {}", plan.read_from)?;
    let followed = (plan.arithmetic, &plan.arithmetic_reason);
    writeln!(out, "reference   {:?}: {}", followed.0, followed.1)?;
    let cases = tensors(args, Preparer::new(Arc::clone(&plan), limits), images)?;
    let normalization = plan.normalization();
    let task = Task {
        model: absolute(&dir)?,
        scale: normalization.scale,
        mean: normalization.mean,
        std: normalization.std,
        tolerance: TOLERANCE,
        images: cases,
    };
    write(
        &args.output.join(TASK_FILE),
        &serde_json::to_vec_pretty(&task)?,
    )?;
    let program = args.output.join(PROGRAM_FILE);
    write(&program, PROGRAM.as_bytes())?;
    let verdict = ask(args, &program)?;
    if verdict.images.len() != task.images.len() {
        let (found, asked) = (verdict.images.len(), task.images.len());
        bail!(
            "{} lacks {} of {asked} images",
            program.display(),
            asked.abs_diff(found)
        );
    }
    writeln!(
        out,
        "{}",
        Shown {
            verdict: &verdict,
            shape
        }
    )?;
    Ok(match verdict.images.iter().all(Compared::is_equal) {
        true => Exit::Success,
        false => Exit::Failed,
    })
}

/// Image files in folders and their subfolders, or given by name; at most `limit`, evenly spaced by
/// path.
fn images(named: &[PathBuf], limit: usize) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in named {
        let metadata = path.metadata();
        let metadata = metadata.with_context(|| format!("images {}", path.display()))?;
        match metadata.is_dir() {
            true => add_images(path, &mut found)?,
            false => found.push(path.clone()),
        }
    }
    found.sort();
    if found.is_empty() {
        bail!("no images found to compare");
    }
    let every = found.len().div_ceil(limit);
    Ok(found.into_iter().step_by(every).collect())
}

fn add_images(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let entries = folder.read_dir();
    for entry in entries.with_context(|| format!("failed to read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            add_images(&path, found)?;
        } else if is_image(&path) {
            found.push(path);
        }
    }
    Ok(())
}

fn is_image(path: &Path) -> bool {
    const SUFFIXES: [&str; 9] = [
        "jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jfif",
    ];
    let suffix = path.extension().and_then(|suffix| suffix.to_str());
    suffix.is_some_and(|suffix| SUFFIXES.contains(&suffix.to_ascii_lowercase().as_str()))
}

/// Creates the folder. A folder with other contents is refused: Python imports modules from the
/// program's folder.
fn start_folder(folder: &Path) -> Result<()> {
    let is_own = |name: &str| [PROGRAM_FILE, TASK_FILE, VERDICT_FILE, "tensors"].contains(&name);
    let entries = match folder.read_dir() {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error).with_context(|| folder.display().to_string()),
    };
    let names = entries.iter().map(|entry| entry.file_name().into_string());
    if names
        .into_iter()
        .any(|name| !name.is_ok_and(|name| is_own(&name)))
    {
        bail!(
            "{} contains other files; give a new folder with --output",
            folder.display()
        );
    }
    fs::create_dir_all(folder.join("tensors"))
        .with_context(|| format!("failed to create {}", folder.display()))?;
    match fs::remove_file(folder.join(VERDICT_FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Writes the tensor of each image; files that are not images are reported and left out.
fn tensors(args: &VerifyArgs, mut preparer: Preparer, images: Vec<PathBuf>) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for image in images {
        let bytes = fs::read(&image);
        let bytes = bytes.with_context(|| format!("failed to read {}", image.display()))?;
        let prepared = match preparer.prepare(&bytes) {
            Ok(prepared) => prepared,
            Err(error) => {
                writeln!(io::stderr(), "left out: {}: {error}", image.display())?;
                continue;
            }
        };
        let tensor = format!("tensors/{:05}.npy", cases.len());
        write(&args.output.join(&tensor), &npy(&prepared))?;
        let image = absolute(&image)?;
        cases.push(Case { image, tensor });
    }
    if cases.is_empty() {
        bail!("none of the files is a readable image");
    }
    Ok(cases)
}

/// A tensor as a file of NumPy, version 1.0.
fn npy(tensor: &Prepared) -> Vec<u8> {
    let shape = tensor.shape;
    let mut header = format!(
        "{{'descr': '|u1', 'fortran_order': False, 'shape': ({}, {}, {}), }}",
        shape.height, shape.width, shape.channels
    );
    // Magic bytes, header and line end together are a multiple of 64 bytes.
    let padding = 63 - (10 + header.len()) % 64;
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    let length = u16::try_from(header.len()).expect("a header of three numbers is short");
    bytes.extend(length.to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(&tensor.pixels);
    bytes
}

/// Runs the program with the user's Python, and reads its result.
fn ask(args: &VerifyArgs, program: &Path) -> Result<Verdict> {
    let by_hand = format!("{} {}", args.python.display(), program.display());
    let output = Command::new(&args.python).arg(program).output();
    let output = output.with_context(|| {
        format!(
            "failed to run {}; give a Python interpreter that has Transformers with --python",
            args.python.display()
        )
    })?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let last = text.trim_end().lines().last().unwrap_or("no output");
        bail!(
            "`{by_hand}` failed: {last}; give a Python interpreter that has Transformers with --python"
        );
    }
    let path = args.output.join(VERDICT_FILE);
    let text = fs::read(&path);
    let text = text.with_context(|| format!("`{by_hand}` wrote no {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is malformed", path.display()))
}

impl Compared {
    fn is_equal(&self) -> bool {
        self.levels.is_some_and(|levels| levels <= TOLERANCE)
    }
}

/// A verdict as lines for people.
struct Shown<'a> {
    verdict: &'a Verdict,
    /// Of Trommel's tensors.
    shape: trommel_types::Shape,
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict {
            processor,
            transformers,
            images,
        } = self.verdict;
        writeln!(f, "compared    {processor} of Transformers {transformers}")?;
        let mut different: Vec<_> = images.iter().filter(|image| !image.is_equal()).collect();
        if different.is_empty() {
            return write!(f, "verdict     equal in all {} images", images.len());
        }
        let worst = |image: &Compared| image.levels.unwrap_or(f64::INFINITY);
        different.sort_by(|a, b| worst(b).total_cmp(&worst(a)));
        write!(
            f,
            "verdict     {} of {} images differ",
            different.len(),
            images.len()
        )?;
        for image in different.iter().take(5) {
            write!(f, "\n            {}: ", image.image.display())?;
            match image.levels {
                Some(levels) => write!(f, "by up to {levels:.1} grey levels")?,
                None => write!(
                    f,
                    "{:?} there, [{}, {}, {}] here",
                    image.shape, self.shape.channels, self.shape.height, self.shape.width
                )?,
            }
        }
        Ok(())
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    let found = path.canonicalize();
    found.with_context(|| format!("failed to find {}", path.display()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("failed to write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_is_a_file_of_numpy() {
        let bytes = npy(&Prepared {
            pixels: vec![7; 12],
            shape: trommel_types::Shape {
                height: 2,
                width: 2,
                channels: 3,
            },
            original: trommel_types::ImageSize {
                width: 9,
                height: 9,
            },
            phash: None,
        });
        let length = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
        assert_eq!((10 + length) % 64, 0);
        let header = std::str::from_utf8(&bytes[10..10 + length]).unwrap();
        assert!(
            header.contains("'shape': (2, 2, 3)") && header.ends_with('\n'),
            "{header}"
        );
        assert_eq!(bytes[10 + length..], [7; 12]);
    }

    #[test]
    fn a_verdict_names_what_differs_most() {
        let verdict = |levels: &[Option<f64>]| Verdict {
            processor: "ViTImageProcessor".to_owned(),
            transformers: "5.23.0".to_owned(),
            images: levels
                .iter()
                .enumerate()
                .map(|(number, levels)| Compared {
                    image: format!("{number}.jpg").into(),
                    levels: *levels,
                    shape: vec![3, 8, 9],
                })
                .collect(),
        };
        let shape = trommel_types::Shape {
            height: 8,
            width: 8,
            channels: 3,
        };
        let shown = |levels: &[Option<f64>]| {
            let verdict = &verdict(levels);
            Shown { verdict, shape }.to_string()
        };
        let text = shown(&[Some(0.0), Some(0.001)]);
        assert!(
            text.contains("ViTImageProcessor of Transformers 5.23.0"),
            "{text}"
        );
        assert!(text.ends_with("equal in all 2 images"), "{text}");
        let text = shown(&[Some(0.0), Some(1.0), None, Some(3.0)]);
        assert!(text.contains("3 of 4 images differ"), "{text}");
        let order = [
            "2.jpg: [3, 8, 9] there, [3, 8, 8] here",
            "3.jpg: by up to 3.0",
            "1.jpg",
        ];
        let places = order.map(|words| text.find(words).unwrap());
        assert!(places.is_sorted(), "{text}");
    }

    #[test]
    fn a_folder_with_other_files_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        start_folder(&dir.path().join("new")).unwrap();
        start_folder(&dir.path().join("new")).unwrap();
        fs::write(dir.path().join("numpy.py"), "").unwrap();
        let error = start_folder(dir.path()).unwrap_err().to_string();
        assert!(error.contains("contains other files"), "{error}");
    }
}
