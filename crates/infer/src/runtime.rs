use std::env::{consts, current_exe, split_paths, var_os};
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf, absolute};
use std::sync::{Mutex, PoisonError};

use ort::environment::Environment;
use ort::logging::LogLevel;

use crate::error::reason;
use crate::{InferError, InferErrorKind};

/// The tested version of ONNX Runtime; `scripts/setup.sh` and `pyproject.toml` have it too.
const VERSION: &str = "1.31.1";

/// ONNX Runtime, loaded into this process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Runtime {
    environment: Environment,
    path: PathBuf,
}

/// ONNX Runtime allows one environment per process and cannot be unloaded, so the first one stays.
static LOADED: Mutex<Option<Runtime>> = Mutex::new(None);

impl Runtime {
    /// Loads ONNX Runtime's shared library: `path` if given (the library, or its folder), else the
    /// one in the variable `ORT_DYLIB_PATH`. Without either it is searched for: next to the
    /// executable; in `lib/trommel` next to the executable's `bin`, as in packages; in the Python
    /// environment that the executable is installed in; in `.tools/onnxruntime` next to the
    /// `target` folder that the executable was built into; in the absolute folders of
    /// `LD_LIBRARY_PATH`; in the system's library folders.
    ///
    /// The current directory is never searched, so that no file among a user's images is run. A
    /// later call returns the library that is already loaded, unless `path` names another one.
    /// Blocks for some ten milliseconds.
    ///
    /// # Errors
    /// If the library in `path` or the variable does not load; then nothing else is tried. If none
    /// of the searched libraries loads: the message lists the places, and the problem with each
    /// library found.
    pub fn load(path: Option<&Path>) -> Result<Self, InferError> {
        Search {
            argument: path.map(Path::to_owned),
            variable: var_os("ORT_DYLIB_PATH").filter(|value| !value.is_empty()),
            executable: current_exe().ok(),
            library_path: var_os("LD_LIBRARY_PATH"),
        }
        .load()
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version and build, as reported by itself.
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
    library_path: Option<OsString>,
}

impl Search {
    fn load(&self) -> Result<Runtime, InferError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*loaded {
            return match &self.argument {
                Some(argument) if !same_file(&library_at(argument), &runtime.path) => {
                    Err(failed(format_args!(
                        "cannot load ONNX Runtime from {}: {} is loaded already, and a process \
                         can hold only one",
                        argument.display(),
                        runtime.path.display()
                    )))
                }
                _ => Ok(runtime.clone()),
            };
        }
        let runtime = match self.given() {
            Some((path, origin)) => start(&path).map_err(|why| {
                failed(format_args!(
                    "cannot load ONNX Runtime from {} (given by {origin}): {}; {}",
                    path.display(),
                    reason(&why),
                    self.remedy()
                ))
            }),
            None => self.first_that_loads(),
        }?;
        *loaded = Some(runtime.clone());
        Ok(runtime)
    }

    /// The one specified place, and its origin.
    fn given(&self) -> Option<(PathBuf, &'static str)> {
        let argument = self.argument.as_deref().map(|path| (path, "--onnxruntime"));
        let variable = || Some((Path::new(self.variable.as_ref()?), "ORT_DYLIB_PATH"));
        let (path, origin) = argument.or_else(variable)?;
        Some((library_at(path), origin))
    }

    fn first_that_loads(&self) -> Result<Runtime, InferError> {
        let places = self.places();
        let mut problems = Vec::new();
        for path in places.iter().filter_map(Place::file) {
            match start(&path) {
                Ok(runtime) => {
                    for problem in problems {
                        tracing::warn!("skipped an ONNX Runtime that does not load: {problem}");
                    }
                    return Ok(runtime);
                }
                Err(why) => problems.push(format!("{}: {}", path.display(), reason(&why))),
            }
        }
        let places: Vec<_> = places.iter().map(ToString::to_string).collect();
        let found = match problems.is_empty() {
            true => "no ONNX Runtime was found".to_owned(),
            false => format!("no ONNX Runtime loads ({})", problems.join("; ")),
        };
        let places = places.join(", ");
        Err(failed(format_args!(
            "{found}; looked for {places}; {}",
            self.remedy()
        )))
    }

    /// What to do without a working library: the one command that installs one where it is found.
    fn remedy(&self) -> String {
        let executable = self.executable.as_deref();
        let command = if executable.is_some_and(|file| built_in(file).is_some()) {
            Some("make setup".to_owned())
        } else {
            let prefix = executable.and_then(prefix);
            prefix.map(|prefix| {
                format!(
                    "python3 -m pip install --no-deps --target {}/lib/python3/site-packages \
                     onnxruntime=={VERSION}",
                    prefix.display()
                )
            })
        };
        let command = command.map_or_else(String::new, |command| {
            format!("`{command}` fetches one that works; ")
        });
        format!("{command}--onnxruntime PATH and ORT_DYLIB_PATH name one")
    }

    /// All searched places, in order of preference. All are absolute.
    fn places(&self) -> Vec<Place> {
        let executable = self.executable.as_deref();
        let beside = executable.and_then(Path::parent).map(Path::to_owned);
        let prefix = executable.and_then(prefix);
        let packaged = prefix.map(|prefix| prefix.join("lib/trommel"));
        let folders = beside.into_iter().chain(packaged);
        let folders = folders.map(|folder| (folder, Names::Plain));
        let installed = prefix.into_iter();
        let installed = installed.flat_map(|prefix| site_packages(&prefix.join("lib")));
        let built = executable.and_then(built_in);
        let built = built.map(|tree| (tree.join(".tools/onnxruntime"), Names::Plain));
        let linked = self.library_path.iter().flat_map(split_paths);
        let system = ["/usr/local/lib", "/usr/lib", "/lib"]
            .into_iter()
            .flat_map(|folder| [PathBuf::from(folder), multiarch(folder)])
            .chain(["/usr/lib64", "/lib64"].map(PathBuf::from));
        folders
            .chain(installed.map(|folder| (folder, Names::Versioned)))
            .chain(built)
            .chain(
                linked
                    .chain(system)
                    .map(|folder| (folder, Names::Versioned)),
            )
            // An empty or relative entry of LD_LIBRARY_PATH means the current directory.
            .filter(|(folder, _)| folder.is_absolute())
            .map(|(folder, names)| Place { folder, names })
            .collect()
    }
}

/// A searched folder.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    folder: PathBuf,
    names: Names,
}

/// File names of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    /// `libonnxruntime.so`
    Plain,
    /// That, or with a version suffix.
    Versioned,
}

impl Place {
    /// The library in it, the newest of several.
    fn file(&self) -> Option<PathBuf> {
        let (plain, numbered) = (library_name(), format!("{}.", library_name()));
        let is_library = |name: &str| {
            name == plain || (self.names == Names::Versioned && name.starts_with(&numbered))
        };
        let entries = fs::read_dir(&self.folder).ok()?;
        let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let files = files.filter(|file| {
            let name = file.file_name().and_then(|name| name.to_str());
            name.is_some_and(is_library) && file.is_file()
        });
        files.max_by_key(|file| version(file))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let versions = match self.names {
            Names::Plain => "",
            Names::Versioned => "*",
        };
        write!(
            f,
            "{}{versions}",
            self.folder.join(library_name()).display()
        )
    }
}

/// The folder that an executable is installed in, above its `bin`.
fn prefix(executable: &Path) -> Option<&Path> {
    let bin = executable.parent().filter(|folder| folder.ends_with("bin"));
    bin.and_then(Path::parent)
}

/// The tree that an executable was built in, above its `target`.
fn built_in(executable: &Path) -> Option<&Path> {
    let mut folders = executable.ancestors().skip(1);
    folders
        .find(|folder| folder.ends_with("target"))
        .and_then(Path::parent)
}

/// Where `pip install onnxruntime` puts the library, in each Python below the folder `lib`.
fn site_packages(lib: &Path) -> Vec<PathBuf> {
    const BELOW: &str = "onnxruntime/capi";
    let entries = fs::read_dir(lib).into_iter().flatten().flatten();
    let pythons =
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
    // Debian's own Python installs into the second one.
    let packages = ["site-packages", "dist-packages"];
    let mut folders: Vec<_> = pythons
        .flat_map(|python| packages.map(|name| python.path().join(name).join(BELOW)))
        .filter(|folder| folder.is_dir())
        .collect();
    if folders.is_empty() {
        // Listed among the places.
        folders.push(lib.join("python3/site-packages").join(BELOW));
    }
    folders.sort();
    folders
}

/// Debian's library folder for this architecture.
fn multiarch(folder: &str) -> PathBuf {
    Path::new(folder).join(format!("{}-linux-gnu", consts::ARCH))
}

/// The version numbers in a library's name, for comparison.
fn version(file: &Path) -> Vec<u32> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.split('.')
        .filter_map(|part| part.parse().ok())
        .collect()
}

/// `libonnxruntime.so`, as named on this system.
fn library_name() -> String {
    format!("{}onnxruntime{}", consts::DLL_PREFIX, consts::DLL_SUFFIX)
}

/// The library at a given path. Absolute, because the loader would look up a bare name in the
/// system's folders.
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

fn start(path: &Path) -> Result<Runtime, String> {
    if !path.is_file() {
        return Err("there is no such file".to_owned());
    }
    let builder = ort::init_from(path).map_err(|error| error.to_string())?;
    let environment = builder
        .with_name("trommel")
        // Not sufficient: the binary sets ORT_DISABLE_TELEMETRY before.
        .with_telemetry(false)
        .build()
        .map_err(|error| error.to_string())?;
    // Below this level ONNX Runtime formats a line for every node of a graph.
    environment.set_log_level(LogLevel::Warning);
    Ok(Runtime {
        environment,
        path: path.to_owned(),
    })
}

fn failed(message: impl fmt::Display) -> InferError {
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
            library_path: None,
        }
    }

    fn folders(search: &Search) -> Vec<PathBuf> {
        let places = search.places().into_iter();
        places.map(|place| place.folder).collect()
    }

    #[test]
    fn a_given_place_is_the_only_one_and_the_argument_wins() {
        let mut search = search();
        search.variable = Some("/variable/lib.so".into());
        assert_eq!(search.given().unwrap().0, Path::new("/variable/lib.so"));
        search.argument = Some("/argument/lib.so".into());
        assert_eq!(search.given().unwrap().0, Path::new("/argument/lib.so"));
    }

    #[test]
    fn a_relative_given_place_is_where_the_user_says() {
        let search = Search {
            variable: Some("lib/ort.so".into()),
            ..search()
        };
        let here = std::env::current_dir().unwrap();
        assert_eq!(search.given().unwrap().0, here.join("lib/ort.so"));
    }

    #[test]
    fn the_search_goes_from_beside_the_executable_to_the_system() {
        let folders = folders(&search());
        let first = [
            "/opt/trommel/bin",
            "/opt/trommel/lib/trommel",
            "/opt/trommel/lib/python3/site-packages/onnxruntime/capi",
            "/usr/local/lib",
        ];
        assert_eq!(folders[..4], first.map(PathBuf::from));
        assert!(folders.contains(&multiarch("/usr/lib")));
        assert!(
            !folders
                .iter()
                .any(|folder| folder.ends_with(".tools/onnxruntime"))
        );
    }

    /// N1: a library in `.tools/onnxruntime` of the current directory, or of any folder above the
    /// binary, was loaded.
    #[test]
    fn only_the_tree_that_the_executable_was_built_in_has_tools() {
        let search = Search {
            executable: Some("/src/trommel/target/x86_64/release/deps/trommel".into()),
            ..search()
        };
        let folders = folders(&search);
        let is_tools = |folder: &&PathBuf| folder.ends_with(".tools/onnxruntime");
        let tools: Vec<_> = folders.iter().filter(is_tools).collect();
        assert_eq!(tools, [Path::new("/src/trommel/.tools/onnxruntime")]);
    }

    /// N1: an empty entry of LD_LIBRARY_PATH stands for the current directory.
    #[test]
    fn relative_entries_of_the_library_path_are_passed_over() {
        let search = Search {
            executable: None,
            library_path: Some(":/mine:lib:.:".into()),
            ..search()
        };
        let folders = folders(&search);
        assert_eq!(folders[..2], ["/mine", "/usr/local/lib"].map(PathBuf::from));
        assert!(folders.iter().all(|folder| folder.is_absolute()));
    }

    /// N28: pip's library was not found.
    #[test]
    fn the_library_of_the_environment_that_the_binary_is_installed_in_is_found() {
        let prefix = tempfile::tempdir().unwrap();
        let capi = prefix
            .path()
            .join("lib/python3.13/site-packages/onnxruntime/capi");
        fs::create_dir_all(&capi).unwrap();
        for name in ["so.1.9.0", "so.1.31.0", "dylib"] {
            fs::write(capi.join(format!("libonnxruntime.{name}")), "").unwrap();
        }
        fs::write(capi.join("libonnxruntime_providers_shared.so"), "").unwrap();
        let search = Search {
            executable: Some(prefix.path().join("bin/trommel")),
            ..search()
        };
        let found = search.places().iter().find_map(Place::file);
        assert_eq!(found, Some(capi.join("libonnxruntime.so.1.31.0")));
    }

    /// N28: the message named a command that a user of an installed binary does not have.
    #[test]
    fn the_remedy_is_one_command_that_fits_where_the_binary_is() {
        let built = Search {
            executable: Some("/src/trommel/target/release/trommel".into()),
            ..search()
        };
        assert!(built.remedy().starts_with("`make setup` "));
        // What the command installs is found.
        let remedy = search().remedy();
        let target = "--target /opt/trommel/lib/python3/site-packages onnxruntime==";
        assert!(remedy.contains(target), "{remedy}");
        let found = Path::new("/opt/trommel/lib/python3/site-packages/onnxruntime/capi");
        assert!(folders(&search()).contains(&found.to_owned()));
    }

    #[test]
    fn one_version_is_named_wherever_it_is_fetched() {
        let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for (file, line) in [
            (
                "scripts/setup.sh",
                format!("onnxruntime_version={VERSION}\n"),
            ),
            ("pyproject.toml", format!("\"onnxruntime=={VERSION}\"")),
            ("pyproject.toml", format!("\"onnxruntime-gpu=={VERSION}\"")),
        ] {
            let text = fs::read_to_string(tree.join(file)).unwrap();
            assert!(text.contains(&line), "{file} has no {line}");
        }
    }

    #[test]
    fn a_folder_means_the_library_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let search = Search {
            argument: Some(folder.path().to_owned()),
            ..search()
        };
        let library = folder.path().join(library_name());
        assert_eq!(search.given().unwrap().0, library);
    }
}
