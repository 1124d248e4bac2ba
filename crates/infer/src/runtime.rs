use std::env::{consts, current_dir, current_exe, var_os};
use std::ffi::OsString;
use std::fmt::{self, Write};
use std::path::{Path, PathBuf, absolute};
use std::sync::{Mutex, PoisonError};

use ort::environment::Environment;
use ort::logging::LogLevel;

use crate::error::reason;
use crate::{InferError, InferErrorKind};

/// ONNX Runtime, loaded into this process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Runtime {
    environment: Environment,
    path: PathBuf,
}

/// ONNX Runtime allows one environment a process and cannot be unloaded, so the first one stays.
static LOADED: Mutex<Option<Runtime>> = Mutex::new(None);

impl Runtime {
    /// Loads ONNX Runtime's shared library: `path` if given (the library, or a folder that holds
    /// it), else what the variable `ORT_DYLIB_PATH` names, else the one beside the executable,
    /// else the one in `.tools/onnxruntime/` below the current directory or below a folder that
    /// the executable lies in.
    ///
    /// A later call gives the library that is loaded already, unless `path` names another one.
    /// Blocks for some ten milliseconds.
    ///
    /// # Errors
    /// When a library that `path` or the variable names does not load; a search never goes on from
    /// there. When the first library found does not load, or none is found: the message then lists
    /// the places.
    pub fn load(path: Option<&Path>) -> Result<Self, InferError> {
        Search {
            argument: path.map(Path::to_owned),
            variable: var_os("ORT_DYLIB_PATH").filter(|value| !value.is_empty()),
            executable: current_exe().ok(),
            current_dir: current_dir().ok(),
        }
        .load()
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version and how it was built, as it says itself.
    pub(crate) fn build(&self) -> &'static str {
        ort::info()
    }

    pub(crate) fn environment(&self) -> &Environment {
        &self.environment
    }
}

/// Where to look.
struct Search {
    argument: Option<PathBuf>,
    variable: Option<OsString>,
    executable: Option<PathBuf>,
    current_dir: Option<PathBuf>,
}

/// A place and how it came to be looked at.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    path: PathBuf,
    origin: Origin,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Argument,
    Variable,
    Searched,
}

impl Search {
    fn load(&self) -> Result<Runtime, InferError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*loaded {
            return match &self.argument {
                Some(argument) if !same_file(&library_at(argument), &runtime.path) => {
                    Err(InferError::new(
                        InferErrorKind::Runtime,
                        format_args!(
                            "cannot load ONNX Runtime from {}: {} is loaded already, and a \
                             process can hold only one",
                            argument.display(),
                            runtime.path.display()
                        ),
                    ))
                }
                _ => Ok(runtime.clone()),
            };
        }
        let places = self.places();
        let Some(place) = places
            .iter()
            .find(|place| place.origin != Origin::Searched || place.path.is_file())
        else {
            return Err(nowhere(&places));
        };
        let environment = start(&place.path).map_err(|why| place.broken(&why))?;
        let runtime = Runtime {
            environment,
            path: place.path.clone(),
        };
        *loaded = Some(runtime.clone());
        Ok(runtime)
    }

    /// Every place in the order of preference; a given place is the only one.
    fn places(&self) -> Vec<Place> {
        if let Some(argument) = &self.argument {
            return vec![Place {
                path: library_at(argument),
                origin: Origin::Argument,
            }];
        }
        if let Some(variable) = &self.variable {
            return vec![Place {
                path: library_at(Path::new(variable)),
                origin: Origin::Variable,
            }];
        }
        let ancestors = self
            .executable
            .iter()
            .flat_map(|file| file.ancestors().skip(1));
        let beside = ancestors.clone().take(1).map(Path::to_owned);
        let tools = self
            .current_dir
            .iter()
            .map(PathBuf::as_path)
            .chain(ancestors);
        let mut paths = Vec::new();
        for folder in beside.chain(tools.map(|folder| folder.join(".tools/onnxruntime"))) {
            let path = folder.join(library_name());
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
        paths
            .into_iter()
            .map(|path| Place {
                path,
                origin: Origin::Searched,
            })
            .collect()
    }
}

impl Place {
    fn broken(&self, why: &dyn fmt::Display) -> InferError {
        let origin = match self.origin {
            Origin::Argument => " (given by --onnxruntime)",
            Origin::Variable => " (given by ORT_DYLIB_PATH)",
            Origin::Searched => "",
        };
        InferError::new(
            InferErrorKind::Runtime,
            format_args!(
                "cannot load ONNX Runtime from {}{origin}: {}; `make setup` fetches a library \
                 that works",
                self.path.display(),
                reason(&why)
            ),
        )
    }
}

/// `libonnxruntime.so`, as this system spells it.
fn library_name() -> String {
    format!("{}onnxruntime{}", consts::DLL_PREFIX, consts::DLL_SUFFIX)
}

/// The library that a given path means. Absolute, because the loader would take a bare name for
/// one to look up in the system's folders.
fn library_at(given: &Path) -> PathBuf {
    let path = if given.is_dir() {
        given.join(library_name())
    } else {
        given.to_owned()
    };
    absolute(&path).unwrap_or(path)
}

fn same_file(a: &Path, b: &Path) -> bool {
    match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    }
}

fn start(path: &Path) -> Result<Environment, String> {
    if !path.is_file() {
        return Err("there is no such file".to_owned());
    }
    let builder = ort::init_from(path).map_err(|error| error.to_string())?;
    let environment = builder
        .with_name("trommel")
        // Not enough: the binary sets ORT_DISABLE_TELEMETRY before it gets here.
        .with_telemetry(false)
        .build()
        .map_err(|error| error.to_string())?;
    // Below this level ONNX Runtime formats a line for every node of a graph.
    environment.set_log_level(LogLevel::Warning);
    Ok(environment)
}

fn nowhere(places: &[Place]) -> InferError {
    let mut message = "ONNX Runtime is not in any of the places where it is looked for:".to_owned();
    for place in places {
        // Writing into a String cannot fail.
        write!(message, " {},", place.path.display()).expect("a String takes any text");
    }
    message.pop();
    message.push_str(
        "; run `make setup`, or give the library with --onnxruntime PATH or ORT_DYLIB_PATH",
    );
    InferError::new(InferErrorKind::Runtime, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search() -> Search {
        Search {
            argument: None,
            variable: None,
            executable: Some("/opt/trommel/bin/trommel".into()),
            current_dir: Some("/home/user/photos".into()),
        }
    }

    fn paths(search: &Search) -> Vec<String> {
        search
            .places()
            .iter()
            .map(|place| place.path.display().to_string())
            .collect()
    }

    #[test]
    fn a_given_place_is_the_only_one_and_the_argument_wins() {
        let mut search = search();
        search.variable = Some("/variable/lib.so".into());
        assert_eq!(paths(&search), ["/variable/lib.so"]);
        search.argument = Some("/argument/lib.so".into());
        assert_eq!(paths(&search), ["/argument/lib.so"]);
    }

    #[test]
    fn the_search_goes_from_beside_the_executable_to_the_tools_folders() {
        let name = library_name();
        assert_eq!(
            paths(&search()),
            [
                format!("/opt/trommel/bin/{name}"),
                format!("/home/user/photos/.tools/onnxruntime/{name}"),
                format!("/opt/trommel/bin/.tools/onnxruntime/{name}"),
                format!("/opt/trommel/.tools/onnxruntime/{name}"),
                format!("/opt/.tools/onnxruntime/{name}"),
                format!("/.tools/onnxruntime/{name}"),
            ]
        );
    }

    #[test]
    fn a_folder_means_the_library_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let search = Search {
            argument: Some(folder.path().to_owned()),
            ..search()
        };
        assert_eq!(search.places()[0].path, folder.path().join(library_name()));
    }

    #[test]
    fn a_missing_library_names_every_place_and_the_command() {
        let error = nowhere(&search().places());
        assert_eq!(error.kind(), InferErrorKind::Runtime);
        for path in paths(&search()) {
            assert!(error.to_string().contains(&path), "{error}");
        }
        assert!(error.to_string().contains("`make setup`"), "{error}");
    }
}
