//! Models by name: `NAME/` or `NAME/VERSION/` in a folder, or under a prefix of a bucket.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use trommel_infer::{Capacity, Engine, LiveOptions, Model, Prompt, Runtime, cascade_columns};
use trommel_preprocess::Plan;
use trommel_storage::{Mirror, S3Config};
use trommel_types::{Column, JobModel, JobSpec, Reference, is_model_name};

use crate::distributed::cascade_jobs::{self, Stages};
use crate::job::{ModelId, PlannedModel};
use crate::{InferConfig, WorkerError, start_engine};

/// Bytes of a message apart from the tensor: uri, pass-through columns, names.
const MESSAGE_ROOM: usize = 16 << 10;
/// Shortest time between two checks of the original.
const UPDATE_EVERY: Duration = Duration::from_secs(15);

/// The models that this worker can preprocess for and run.
pub(crate) struct Repository {
    root: PathBuf,
    /// The original of the folder, if it is a copy, model by model.
    mirror: Option<Mirror>,
    /// When each model's copy was last updated.
    updated: Mutex<HashMap<String, Instant>>,
    known: Mutex<HashMap<PathBuf, Arc<KnownModel>>>,
    /// The stages of cascades that jobs have named.
    cascades: Mutex<HashMap<JobModel, Stages>>,
}

/// A model that was checked.
pub(crate) struct KnownModel {
    dir: PathBuf,
    pub(crate) id: ModelId,
    /// Preprocessing plans by reference.
    plans: Mutex<HashMap<Reference, Arc<Plan>>>,
}

impl KnownModel {
    /// The preprocessing plan if a job requests this reference.
    ///
    /// # Errors
    /// If its folder cannot be followed, or does not allow this choice.
    pub(crate) fn plan(&self, reference: Reference) -> Result<Arc<Plan>, WorkerError> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&reference) {
            return Ok(Arc::clone(plan));
        }
        let plan = Plan::load(&self.dir, reference);
        let plan = Arc::new(plan.map_err(|error| WorkerError::Model(error.to_string()))?);
        plans.insert(reference, Arc::clone(&plan));
        Ok(plan)
    }

    /// Any plan; shape and normalisation do not depend on the reference.
    fn any_plan(&self) -> Result<Arc<Plan>, WorkerError> {
        let plan = self.plan(Reference::Auto);
        plan.or_else(|error| self.plan(Reference::Pillow).map_err(|_| error))
    }

    /// Whether it is a prompt, which servers run.
    pub(crate) fn is_prompt(&self) -> bool {
        Prompt::is_in(&self.dir)
    }

    /// Why a model whose images have varying sizes cannot be used.
    pub(crate) fn without_shape(&self) -> WorkerError {
        WorkerError::Model(format!(
            "model {}: its images end up in different sizes; set [preprocess] crop or resize in trommel.toml",
            self.id.name
        ))
    }
}

impl Repository {
    /// Opens a folder, or `s3://bucket/prefix`, whose models are copied to `cache` when they are
    /// used. Blocking.
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
                        "model repository {root} has no models; give another prefix with --model-repository"
                    )));
                }
                mirror.root().to_owned()
            }
            None if Path::new(root).is_dir() => PathBuf::from(root),
            None => {
                return Err(WorkerError::Settings(format!(
                    "model repository {root} does not exist; give another folder with --model-repository"
                )));
            }
        };
        Ok(Self {
            root,
            mirror,
            updated: Mutex::default(),
            known: Mutex::default(),
            cascades: Mutex::default(),
        })
    }

    /// Learns what a job means by the name of its cascade, if it is one.
    pub(crate) fn know(&self, spec: &JobSpec) {
        if let Some((both, stages)) = cascade_jobs::stages(spec) {
            let mut known = self.cascades.lock().unwrap_or_else(PoisonError::into_inner);
            known.entry(both.clone()).or_insert(stages);
        }
    }

    fn cascade(&self, model: &JobModel) -> Option<Stages> {
        let known = self.cascades.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(model).cloned()
    }

    /// The models of a cascade, or the model itself.
    pub(crate) fn stages_of(&self, model: &JobModel) -> Vec<JobModel> {
        match self.cascade(model) {
            Some(Stages { small, large, .. }) => vec![small, large],
            None => vec![model.clone()],
        }
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

    /// Updates the copy of a model, unless that was done recently.
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

    /// Versions of the models on this machine, by name, newest first. Blocking. Unreadable models
    /// are reported when a job names them.
    pub(crate) fn versions_here(&self) -> BTreeMap<String, Vec<String>> {
        let of = |name: &String| {
            let dirs = versions(&self.root.join(name)).into_iter();
            let known = dirs.filter_map(|dir| self.look(name, &dir).ok());
            known.map(|model| model.id.version.to_string()).collect()
        };
        let names = self.names_here().into_iter();
        names.map(|name| (name.clone(), of(&name))).collect()
    }

    /// All versions of all models that are on this machine. Blocking.
    pub(crate) fn all_here(&self) -> Vec<JobModel> {
        let models = self.versions_here().into_iter();
        let each = models.flat_map(|(name, versions)| {
            let versions = versions.into_iter();
            versions.map(move |version| JobModel {
                name: name.clone(),
                version,
            })
        });
        each.collect()
    }

    /// A model by its name, or `NAME/VERSION`; the newest version if none is named. Blocking: the
    /// first call reads the whole model.
    ///
    /// # Errors
    /// If it does not exist, or its folder cannot be used.
    pub(crate) fn model(&self, name: &str) -> Result<Arc<KnownModel>, WorkerError> {
        check_name(name)?;
        self.update(name)?;
        self.model_here(name)
    }

    /// As [`Repository::model`], for models on this machine.
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

    /// The model of a job, in the version that the job began with.
    ///
    /// # Errors
    /// If it does not exist, or as [`Repository::model`].
    fn of_job(&self, model: &JobModel) -> Result<Arc<KnownModel>, WorkerError> {
        check_name(&model.name)?;
        self.update(&model.name)?;
        for dir in versions(&self.root.join(&model.name)) {
            let known = self.look(&model.name, &dir)?;
            if *known.id.version == *model.version {
                return Ok(known);
            }
        }
        Err(self.other_version(model, &self.model(&model.name)?.id.version))
    }

    fn other_version(&self, model: &JobModel, found: &str) -> WorkerError {
        WorkerError::OtherVersion {
            name: model.name.clone(),
            expected: model.version.clone(),
            found: found.to_owned(),
            root: self.root.clone(),
        }
    }

    fn look(&self, name: &str, dir: &Path) -> Result<Arc<KnownModel>, WorkerError> {
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let version = trommel_infer::version(dir)?; // read again only if a file has changed
        if let Some(model) = known().get(dir)
            && model.id.version == version
        {
            return Ok(Arc::clone(model));
        }
        let model = KnownModel {
            id: ModelId {
                name: name.into(),
                version,
            },
            plans: Mutex::default(),
            dir: dir.to_owned(),
        };
        model.any_plan()?; // what cannot be followed is reported at once
        let model = Arc::new(model);
        known().insert(dir.to_owned(), Arc::clone(&model));
        Ok(model)
    }

    /// Refuses a model whose tensors are larger than a message.
    ///
    /// # Errors
    /// When they are, with the setting to change.
    pub(crate) fn check_payload(model: &PlannedModel, max: usize) -> Result<(), WorkerError> {
        let bytes = model.tensor_bytes();
        if bytes + MESSAGE_ROOM <= max {
            return Ok(());
        }
        Err(WorkerError::Model(format!(
            "a tensor of model {} holds {bytes} bytes, and the broker takes messages of {max}; raise max_payload in nats-server's configuration, or run workers with --tensor-hop local",
            model.id.name
        )))
    }

    /// The additional columns of these models' rows, by model name.
    pub(crate) fn answers(&self, models: &[JobModel]) -> BTreeMap<String, Vec<Column>> {
        let of_model = |model: &JobModel| match self.of_job(model) {
            Ok(known) if known.is_prompt() => Prompt::columns(),
            _ => Vec::new(),
        };
        let answers = models.iter().map(|model| {
            let columns = match self.cascade(model) {
                None => of_model(model),
                Some(stages) => [cascade_columns(), of_model(&stages.large)].concat(),
            };
            (model.name.clone(), columns)
        });
        answers.filter(|(_, columns)| !columns.is_empty()).collect()
    }

    /// The preprocessing plan of a job's model for this reference.
    ///
    /// # Errors
    /// If the version that the job began with does not exist, or as [`KnownModel::plan`].
    pub(crate) fn planned(
        &self,
        model: &JobModel,
        reference: Reference,
    ) -> Result<PlannedModel, WorkerError> {
        if let Some(stages) = self.cascade(model) {
            let small = self.planned(&stages.small, reference)?;
            let large = self.planned(&stages.large, reference)?;
            return Ok(PlannedModel {
                id: model.into(),
                plan: small.plan,
                also: Some(large.plan),
            });
        }
        let known = self.of_job(model)?;
        Ok(PlannedModel {
            id: known.id.clone(),
            plan: known.plan(reference)?,
            also: None,
        })
    }

    /// Starts the model of a job. Blocking, for as long as loading and warming up takes.
    ///
    /// # Errors
    /// If it does not exist, is not a classifier, or cannot run on the device.
    pub(crate) fn start(
        &self,
        wanted: &JobModel,
        runtime: &Runtime,
        config: &InferConfig,
        live: LiveOptions,
        capacity: Capacity,
    ) -> Result<Engine, WorkerError> {
        if let Some(stages) = self.cascade(wanted) {
            let start = |stage| self.start(stage, runtime, config, live, capacity);
            let (small, large) = (start(&stages.small)?, start(&stages.large)?);
            return Ok(Engine::cascade(small, large, stages.agree)?);
        }
        let known = self.of_job(wanted)?;
        if known.is_prompt() {
            let prompt = Prompt::open(&known.dir)?;
            if **prompt.version() != *known.id.version {
                return Err(self.other_version(wanted, prompt.version()));
            }
            return Ok(Engine::ask(prompt)?);
        }
        let config = &config.tuned(&known.id.version);
        let plan = known.any_plan()?;
        let shape = plan.shape().ok_or_else(|| known.without_shape())?;
        let model = Model::open(
            runtime,
            &known.dir,
            plan.normalization(),
            shape,
            &config.model_options(capacity)?,
        )?;
        // The files may have been replaced since they were checked: the loaded version counts.
        if **model.version() != *known.id.version {
            return Err(self.other_version(wanted, model.version()));
        }
        Ok(start_engine(model, config, live)?)
    }
}

/// Refuses invalid folder names, which could lead outside the repository.
fn check_name(name: &str) -> Result<(), WorkerError> {
    if is_model_name(name) {
        return Ok(());
    }
    Err(WorkerError::Model(format!(
        "model {name:?}: a name is letters, digits, -, _ and . and does not begin with a dot"
    )))
}

/// The folder itself if it contains a model, else those of its versions, newest first: numbers by
/// value, other names by their bytes.
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
    dir.join("model.onnx").exists() || dir.join("onnx/model.onnx").exists() || Prompt::is_in(dir)
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
    fn what_is_here_follows_what_comes_changes_and_goes() {
        let root = tempfile::tempdir().unwrap();
        link(root.path(), "many/1");
        let repository = open(root.path()).unwrap();
        let first = repository.versions_here();
        assert_eq!(first["many"].len(), 1);
        link(root.path(), "many/2");
        let config = root.path().join("many/2/config.json");
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::remove_file(&config).unwrap();
        std::fs::write(&config, text.replace("\"3\": \"3\"", "\"3\": \"three\"")).unwrap();
        link(root.path(), "broken");
        std::fs::remove_file(root.path().join("broken/config.json")).unwrap();
        std::fs::write(root.path().join("broken/config.json"), "{").unwrap();
        let second = repository.versions_here();
        assert_eq!(second["many"].len(), 2);
        assert_ne!(second["many"][0], first["many"][0]);
        assert_eq!(second["broken"], [""; 0]);
        std::fs::write(&config, text.replace("\"3\": \"3\"", "\"3\": \"drei\"")).unwrap();
        let third = repository.versions_here();
        assert_ne!(third["many"][0], second["many"][0], "replaced in place");
        std::fs::remove_dir_all(root.path().join("many/1")).unwrap();
        assert_eq!(repository.versions_here()["many"], third["many"][..1]);
    }

    #[test]
    fn a_job_gets_the_plan_of_the_reference_that_it_asks_for() {
        let root = tempfile::tempdir().unwrap();
        link(root.path(), "flat");
        let repository = open(root.path()).unwrap();
        let model = JobModel {
            name: "flat".to_owned(),
            version: repository.model("flat").unwrap().id.version.to_string(),
        };
        let plan = |reference| repository.planned(&model, reference).unwrap().plan;
        let torchvision = plan(Reference::Torchvision);
        assert_ne!(plan(Reference::Pillow).arithmetic, torchvision.arithmetic);
        assert!(
            Arc::ptr_eq(&plan(Reference::Torchvision), &torchvision),
            "read once"
        );
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
        let error = repository
            .planned(&model, Reference::Auto)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("0123456789ab"), "{error}");
        assert!(open(&root.path().join("nowhere")).is_err());
    }
    /// R55: a name in a message was joined to the repository's folder unchecked.
    #[test]
    fn no_name_leads_out_of_the_repository() {
        let root = tempfile::tempdir().unwrap();
        link(root.path(), "outside");
        link(root.path(), "repository/inside");
        let repository = open(&root.path().join("repository")).unwrap();
        let absolute = root.path().join("outside");
        for name in [
            absolute.to_str().unwrap(),
            "../outside",
            "inside/../../outside",
            "",
            ".",
            "..",
        ] {
            for error in [
                repository.model(name).err().unwrap(),
                repository
                    .planned(
                        &JobModel {
                            name: name.to_owned(),
                            version: repository.model("inside").unwrap().id.version.to_string(),
                        },
                        Reference::Auto,
                    )
                    .err()
                    .unwrap(),
            ] {
                assert!(matches!(error, WorkerError::Model(_)), "{name}: {error}");
            }
        }
    }
}
