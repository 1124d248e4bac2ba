//! Models by name: `NAME/` or `NAME/VERSION/` in a folder, or under a prefix of a bucket.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use trommel_infer::{Engine, Model, Runtime};
use trommel_preprocess::Plan;
use trommel_storage::{Mirror, S3Config};

use crate::distributed::record::JobModel;
use crate::job::{ModelId, PlannedModel};
use crate::{InferConfig, WorkerError, engine_options};

/// Bytes of a message besides the tensor: uri, pass-through columns, names.
const MESSAGE_ROOM: usize = 16 << 10;
/// Shortest time between two looks at what a copy is made of.
const UPDATE_EVERY: Duration = Duration::from_secs(15);

/// The models that this worker can prepare for and run.
pub(crate) struct Repository {
    root: PathBuf,
    /// What the folder is a copy of, model by model.
    mirror: Option<Mirror>,
    /// When each model's copy was last brought up to date.
    updated: Mutex<HashMap<String, Instant>>,
    known: Mutex<HashMap<PathBuf, Arc<KnownModel>>>,
}

/// A model that was looked at.
pub(crate) struct KnownModel {
    dir: PathBuf,
    pub(crate) id: ModelId,
    pub(crate) plan: Arc<Plan>,
}

impl Repository {
    /// Opens a folder, or `s3://bucket/prefix`, whose models are copied under `cache` when they are
    /// asked for. Blocking.
    ///
    /// # Errors
    /// When there is no such folder or prefix.
    pub(crate) fn open(root: &str, cache: &Path, s3: &S3Config) -> Result<Self, WorkerError> {
        let local = |name: &str| {
            let readable: String = name
                .chars()
                .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
                .collect();
            cache.join(readable)
        };
        let mirror = Mirror::of(root, &local(root), s3);
        let root = match &mirror {
            Some(mirror) => {
                if mirror.folders()?.is_empty() {
                    return Err(WorkerError::Settings(format!(
                        "model repository {root}: there are no models under this prefix; name another with --model-repository"
                    )));
                }
                mirror.root().to_owned()
            }
            None if Path::new(root).is_dir() => PathBuf::from(root),
            None => {
                return Err(WorkerError::Settings(format!(
                    "model repository {root}: there is no such folder; name another with --model-repository"
                )));
            }
        };
        Ok(Self {
            root,
            mirror,
            updated: Mutex::default(),
            known: Mutex::default(),
        })
    }

    /// Whether the models on this machine can be read.
    pub(crate) fn is_reachable(&self) -> bool {
        self.root.read_dir().is_ok()
    }

    /// Names of all models, without versions. Blocking.
    pub(crate) fn names(&self) -> Vec<String> {
        match self.mirror.as_ref().map(Mirror::folders) {
            None => self.names_here(),
            Some(Ok(names)) => names,
            Some(Err(error)) => {
                tracing::warn!(%error, "only models that were copied before are known");
                self.names_here()
            }
        }
    }

    /// Brings the copy of a model up to date, unless that was done a moment ago.
    fn update(&self, name: &str) -> Result<(), WorkerError> {
        let Some(mirror) = &self.mirror else {
            return Ok(());
        };
        let folder = name.split('/').next().unwrap_or(name);
        let mut updated = self.updated.lock().unwrap_or_else(PoisonError::into_inner);
        let is_fresh = |at: &Instant| at.elapsed() < UPDATE_EVERY;
        if !updated.get(folder).is_some_and(is_fresh) {
            mirror.update(folder)?;
            updated.insert(folder.to_owned(), Instant::now());
        }
        Ok(())
    }

    /// Names of all models that are on this machine, without versions.
    pub(crate) fn names_here(&self) -> Vec<String> {
        let folders = self.root.read_dir().into_iter().flatten().flatten();
        let mut names: Vec<String> = folders
            .filter(|folder| !versions(&folder.path()).is_empty())
            .filter_map(|folder| folder.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// A model by its name, or `NAME/VERSION`; the newest version if none is named. Blocking: the
    /// first look reads the whole model.
    ///
    /// # Errors
    /// When there is none, or its folder cannot be used.
    pub(crate) fn model(&self, name: &str) -> Result<Arc<KnownModel>, WorkerError> {
        self.update(name)?;
        self.model_here(name)
    }

    /// As [`Repository::model`], of what is on this machine.
    pub(crate) fn model_here(&self, name: &str) -> Result<Arc<KnownModel>, WorkerError> {
        match versions(&self.root.join(name)).first() {
            Some(dir) => self.look(name, dir),
            None => Err(WorkerError::UnknownModel {
                name: name.to_owned(),
                known: self.names().join(", "),
                root: self.root.clone(),
            }),
        }
    }

    /// The model of a job: of all versions that are there the one that the job began with.
    ///
    /// # Errors
    /// When it is not there, or as [`Repository::model`].
    fn of_job(&self, model: &JobModel) -> Result<Arc<KnownModel>, WorkerError> {
        self.update(&model.name)?;
        for dir in versions(&self.root.join(&model.name)) {
            let known = self.look(&model.name, &dir)?;
            if *known.id.version == *model.version {
                return Ok(known);
            }
        }
        Err(WorkerError::OtherVersion {
            name: model.name.clone(),
            expected: model.version.clone(),
            found: self.model(&model.name)?.id.version.to_string(),
            root: self.root.clone(),
        })
    }

    fn look(&self, name: &str, dir: &Path) -> Result<Arc<KnownModel>, WorkerError> {
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(model) = known().get(dir) {
            return Ok(Arc::clone(model));
        }
        let plan = Plan::load(dir).map_err(|error| WorkerError::Settings(error.to_string()))?;
        let model = Arc::new(KnownModel {
            id: ModelId {
                name: name.into(),
                version: trommel_infer::version(dir)?,
            },
            plan: Arc::new(plan),
            dir: dir.to_owned(),
        });
        known().insert(dir.to_owned(), Arc::clone(&model));
        Ok(model)
    }

    /// Refuses a model whose tensors are larger than a message may be.
    ///
    /// # Errors
    /// When they are, with the setting to change.
    pub(crate) fn check_payload(model: &KnownModel, max_payload: usize) -> Result<(), WorkerError> {
        let Some(shape) = model.plan.shape() else {
            return Ok(()); // told when it is started
        };
        if shape.len() + MESSAGE_ROOM <= max_payload {
            return Ok(());
        }
        Err(WorkerError::Settings(format!(
            "a tensor of model {} holds {} bytes, and the broker takes messages of {max_payload}; raise max_payload in nats-server's configuration, or run workers with --tensor-hop local",
            model.id.name,
            shape.len()
        )))
    }

    /// How images are prepared for the model of a job.
    ///
    /// # Errors
    /// When the version that the job began with is not there.
    pub(crate) fn planned(&self, model: &JobModel) -> Result<PlannedModel, WorkerError> {
        let known = self.of_job(model)?;
        Ok(PlannedModel {
            id: known.id.clone(),
            plan: Arc::clone(&known.plan),
        })
    }

    /// Starts the model of a job. Blocking, for as long as loading and warming up takes.
    ///
    /// # Errors
    /// When it is not there, is no classifier, or cannot run on the device.
    pub(crate) fn start(
        &self,
        model: &JobModel,
        runtime: &Runtime,
        config: &InferConfig,
    ) -> Result<Engine, WorkerError> {
        let known = self.of_job(model)?;
        let shape = known.plan.shape().ok_or_else(|| {
            WorkerError::Settings(format!(
                "model {}: its images end up in different sizes; set [preprocess] crop or resize in trommel.toml",
                known.dir.display()
            ))
        })?;
        let model = Model::open(
            runtime,
            &known.dir,
            known.plan.normalization(),
            shape,
            &config.model_options()?,
        )?;
        let options = engine_options(&model, config)?;
        Ok(Engine::start(model, options)?)
    }
}

/// The folder itself if a model is in it, else those of its versions, the newest first: numbers by
/// size, other names by their bytes.
fn versions(dir: &Path) -> Vec<PathBuf> {
    if is_model(dir) {
        return vec![dir.to_owned()];
    }
    let folders = dir.read_dir().into_iter().flatten().flatten();
    let mut versions: Vec<_> = folders
        .map(|entry| entry.path())
        .filter(|version| is_model(version))
        .collect();
    versions.sort_by_key(|version| {
        let name = version.file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        let number = name.trim_start_matches('v').parse::<u64>().ok();
        std::cmp::Reverse((number, name))
    });
    versions
}

fn is_model(dir: &Path) -> bool {
    dir.join("model.onnx").exists() || dir.join("onnx/model.onnx").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digits() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/digits")
    }

    fn open(root: &Path) -> Result<Repository, WorkerError> {
        Repository::open(
            root.to_str().unwrap(),
            Path::new("none"),
            &S3Config::default(),
        )
    }

    /// Links the shipped model into `root` under this name.
    fn link(root: &Path, name: &str) {
        let dir = root.join(name);
        std::fs::create_dir_all(&dir).unwrap();
        for file in ["model.onnx", "config.json", "preprocessor_config.json"] {
            std::os::unix::fs::symlink(digits().join(file), dir.join(file)).unwrap();
        }
    }

    #[test]
    fn the_newest_version_is_taken_unless_one_is_named() {
        let root = tempfile::tempdir().unwrap();
        for name in ["flat", "many/2", "many/10", "many/9"] {
            link(root.path(), name);
        }
        std::fs::create_dir(root.path().join("empty")).unwrap();
        let repository = open(root.path()).unwrap();
        assert_eq!(repository.names(), ["flat", "many"]);
        let dir = |name| repository.model(name).unwrap().dir.clone();
        assert_eq!(dir("flat"), root.path().join("flat"));
        assert_eq!(dir("many"), root.path().join("many/10"));
        assert_eq!(dir("many/2"), root.path().join("many/2"));
        link(root.path(), "many/11");
        assert_eq!(dir("many"), root.path().join("many/11"), "picked up");
    }

    #[test]
    fn what_is_not_there_or_has_changed_is_told() {
        let root = tempfile::tempdir().unwrap();
        link(root.path(), "flat");
        let repository = open(root.path()).unwrap();
        let error = repository.model("none").err().unwrap().to_string();
        assert!(error.contains("none") && error.contains("flat"), "{error}");
        let model = JobModel {
            name: "flat".to_owned(),
            version: "0123456789ab".to_owned(),
        };
        let error = repository.planned(&model).err().unwrap().to_string();
        assert!(error.contains("0123456789ab"), "{error}");
        assert!(open(&root.path().join("nowhere")).is_err());
    }
}
