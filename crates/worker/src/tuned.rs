//! Settings that `trommel tune` found for a model on a kind of machine, and where they are stored.

use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::calibration::{allowed, machine_of, write_whole};
use crate::{InferConfig, WorkerConfig};

/// Largest valid values in a profile. Found values are far below; larger ones were written by hand
/// and would exhaust the machine's memory or threads.
const LARGEST: [(&str, u64); 5] = [
    ("max-batch", 4096),
    ("instances", 1024),
    ("intra-threads", 1024),
    ("preprocess-threads", 1024),
    ("max-in-flight", 65_536),
];
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Settings that determine the speed of a model on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Tuned {
    /// Images in a full batch.
    pub max_batch: NonZeroUsize,
    /// Longest time an image waits for its batch to fill.
    #[serde(with = "humantime_serde")]
    pub max_wait: Duration,
    /// Sessions on each device.
    pub instances: NonZeroUsize,
    /// Threads inside one session.
    pub intra_threads: NonZeroUsize,
    /// Threads that decode and resize.
    pub preprocess_threads: NonZeroUsize,
    /// Images in flight, being fetched or decoded.
    pub max_in_flight: NonZeroUsize,
}

/// The stored result of a search.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TunedProfile {
    /// The name of the model's folder.
    pub model: String,
    /// The model's version. Other contents have another one.
    pub model_version: String,
    /// The objective, as text.
    pub objective: String,
    /// The settings.
    pub settings: Tuned,
}

impl Tuned {
    /// The settings of a configuration, with the defaults applied, and this batch size if none is
    /// configured.
    pub fn of(config: &WorkerConfig, max_batch: NonZeroUsize) -> Self {
        let at_least_1 = |number: usize| NonZeroUsize::new(number).unwrap_or(NonZeroUsize::MIN);
        Self {
            max_batch: config.infer.max_batch.unwrap_or(max_batch),
            max_wait: config.infer.max_wait(),
            instances: at_least_1(config.infer.of_each_device()),
            intra_threads: at_least_1(config.infer.intra_threads()),
            preprocess_threads: at_least_1(config.preprocess.threads()),
            max_in_flight: at_least_1(config.preprocess.in_flight()),
        }
    }

    /// Fills in settings that are not configured. Sessions and their threads belong together, and
    /// the batch size was found for them: if one of the two is configured, none of the three is
    /// filled in.
    pub fn fill_in(&self, config: &mut WorkerConfig) {
        self.fill_in_model(&mut config.infer);
        let preprocess = &mut config.preprocess;
        if preprocess.threads.is_none() && preprocess.max_in_flight.is_none() {
            preprocess.threads = Some(self.preprocess_threads);
            preprocess.max_in_flight = Some(self.max_in_flight);
        }
    }

    /// Sets all of them, overriding the configuration.
    pub fn set(&self, config: &mut WorkerConfig) {
        let (infer, preprocess) = (&mut config.infer, &mut config.preprocess);
        infer.max_batch = Some(self.max_batch);
        infer.max_wait = Some(self.max_wait);
        infer.instances = Some(self.instances);
        infer.intra_threads = Some(self.intra_threads);
        preprocess.threads = Some(self.preprocess_threads);
        preprocess.max_in_flight = Some(self.max_in_flight);
    }

    /// Fills in only the settings of the model.
    fn fill_in_model(&self, infer: &mut InferConfig) {
        if infer.instances.is_none() && infer.intra_threads.is_none() {
            infer.instances = Some(self.instances);
            infer.intra_threads = Some(self.intra_threads);
            infer.max_batch = infer.max_batch.or(Some(self.max_batch));
        }
        infer.max_wait = infer.max_wait.or(Some(self.max_wait));
    }
}

impl TunedProfile {
    /// Where the profile of a model is stored for this kind of machine; `None` without a cache.
    pub fn path(config: &InferConfig, model_version: &str) -> Option<PathBuf> {
        let name = format!("{model_version}{}", suffix(config));
        Some(folder(config)?.join(name))
    }

    /// Writes it atomically.
    ///
    /// # Errors
    /// If the folder cannot be written, or a setting exceeds what [`TunedProfile::recall`] accepts.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let profile = serde_json::to_value(self)?;
        match &*problems(&profile) {
            [] => write_whole(path, &serde_json::to_vec_pretty(&profile)?),
            problems => Err(io::Error::other(problems.join("; "))),
        }
    }

    /// Reads the profile of a model with this version.
    fn read(text: &[u8], model_version: &str) -> Result<Self, String> {
        let profile: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        let problems = problems(&profile);
        if !problems.is_empty() {
            return Err(problems.join("; "));
        }
        let profile: Self = serde_json::from_value(profile).map_err(|error| error.to_string())?;
        match profile.model_version == model_version {
            true => Ok(profile),
            false => Err(format!(
                "model-version is {:?}, and the model has {model_version:?}",
                profile.model_version
            )),
        }
    }

    /// Whether there is a profile of any model for this kind of machine. Cheap: no model is read.
    pub fn is_any(config: &InferConfig) -> bool {
        let suffix = suffix(config);
        let files = folder(config).and_then(|folder| fs::read_dir(folder).ok());
        let mut files = files.into_iter().flatten().flatten();
        files.any(|file| file.file_name().to_string_lossy().ends_with(&suffix))
    }

    /// The profile of a model for this kind of machine, if wanted and present. An unreadable one is
    /// ignored with a warning.
    pub fn recall(config: &InferConfig, model_version: &str) -> Option<Self> {
        let path = Self::path(config, model_version).filter(|_| config.profiles)?;
        let text = fs::read(&path).ok()?;
        match Self::read(&text, model_version) {
            Ok(profile) => {
                tracing::info!(
                    model = %profile.model,
                    profile = %path.display(),
                    objective = %profile.objective,
                    settings = ?profile.settings,
                    "taking the settings that trommel tune has found, where none are configured"
                );
                Some(profile)
            }
            Err(error) => {
                tracing::warn!(
                    "{}: {error}; going on without it: remove or correct it, or run trommel tune again",
                    path.display()
                );
                None
            }
        }
    }
}

impl InferConfig {
    /// These settings, filled in for a model with a profile.
    pub fn tuned(&self, model_version: &str) -> Self {
        let mut filled = self.clone();
        if let Some(profile) = TunedProfile::recall(self, model_version) {
            profile.settings.fill_in_model(&mut filled);
        }
        filled
    }
}

/// The settings out of range, each with its key, value and range. The decoder reports missing and
/// unknown keys.
fn problems(profile: &Value) -> Vec<String> {
    let setting = |key: &str| profile.get("settings")?.get(key);
    let numbers = LARGEST.iter().filter_map(|(key, largest)| {
        let value = setting(key)?;
        let fits = value
            .as_u64()
            .is_some_and(|value| (1..=*largest).contains(&value));
        (!fits).then(|| format!("settings.{key} is {value}; give a number from 1 to {largest}"))
    });
    let wait = setting("max-wait").and_then(|value| {
        let wait = value.as_str().map(humantime::parse_duration);
        let fits = matches!(wait, Some(Ok(wait)) if wait <= LONGEST_WAIT);
        (!fits).then(|| {
            let longest = humantime::format_duration(LONGEST_WAIT);
            format!("settings.max-wait is {value}; give a time from \"0s\" to \"{longest}\"")
        })
    });
    numbers.chain(wait).collect()
}

fn folder(config: &InferConfig) -> Option<PathBuf> {
    Some(config.cache.as_ref()?.join("tuned"))
}

/// The suffix of profile names for this kind of machine.
fn suffix(config: &InferConfig) -> String {
    let (devices, precision) = (config.devices(), config.precision);
    let (machine, cores) = (machine_of(devices.first()), crate::config::cores());
    allowed(&format!(" {devices} {precision:?} {cores} {machine}")) + ".json"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(number: usize) -> NonZeroUsize {
        NonZeroUsize::new(number).unwrap()
    }

    fn tuned() -> Tuned {
        Tuned {
            max_batch: number(3),
            max_wait: Duration::from_millis(7),
            instances: number(2),
            intra_threads: number(5),
            preprocess_threads: number(6),
            max_in_flight: number(11),
        }
    }

    #[test]
    fn what_is_configured_wins() {
        let mut config = WorkerConfig::default();
        tuned().fill_in(&mut config);
        assert_eq!(Tuned::of(&config, number(1)), tuned());

        let mut config = WorkerConfig::default();
        config.infer.max_batch = Some(number(9));
        config.infer.max_wait = Some(Duration::from_secs(1));
        config.preprocess.threads = Some(number(1));
        tuned().fill_in(&mut config);
        let found = Tuned::of(&config, number(1));
        assert_eq!((found.max_batch, found.instances), (number(9), number(2)));
        assert_eq!(found.max_wait, Duration::from_secs(1));
        assert_eq!(found.preprocess_threads, number(1));
        assert_eq!(config.preprocess.max_in_flight, None);

        // A size found for other sessions is meaningless.
        let mut config = WorkerConfig::default();
        config.infer.instances = Some(number(1));
        tuned().fill_in(&mut config);
        assert_eq!(
            (config.infer.max_batch, config.infer.intra_threads),
            (None, None)
        );
    }

    #[test]
    fn values_that_nobody_would_measure_are_named_with_their_range() {
        let profile = TunedProfile {
            model: "digits".to_owned(),
            model_version: "abc".to_owned(),
            objective: "most throughput".to_owned(),
            settings: tuned(),
        };
        let with = |key: &str, value: Value| {
            let mut profile = serde_json::to_value(&profile).unwrap();
            profile["settings"][key] = value;
            TunedProfile::read(profile.to_string().as_bytes(), "abc")
        };
        for (key, value, words) in [
            (
                "max-batch",
                0.into(),
                "max-batch is 0; give a number from 1 to 4096",
            ),
            ("max-batch", 4097.into(), "is 4097"),
            (
                "instances",
                10_000.into(),
                "is 10000; give a number from 1 to 1024",
            ),
            (
                "intra-threads",
                (-1).into(),
                "is -1; give a number from 1 to 1024",
            ),
            (
                "preprocess-threads",
                "4".into(),
                "is \"4\"; give a number from 1 to 1024",
            ),
            ("max-in-flight", 1e9.into(), "from 1 to 65536"),
            (
                "max-wait",
                "2h".into(),
                "is \"2h\"; give a time from \"0s\" to \"1m\"",
            ),
            ("max-wait", 5.into(), "is 5; give a time"),
            ("threads", 5.into(), "unknown field `threads`"),
        ] {
            let error = with(key, value).unwrap_err();
            assert!(
                error.contains(words) && error.contains(key),
                "{key}: {error}"
            );
        }
        assert_eq!(
            with("max-batch", 4096.into()).unwrap().settings.max_batch,
            number(4096)
        );
        let error = TunedProfile::read(&serde_json::to_vec(&profile).unwrap(), "def").unwrap_err();
        assert!(error.contains("abc") && error.contains("def"), "{error}");

        let folder = tempfile::tempdir().unwrap();
        let mut absurd = profile;
        absurd.settings.instances = number(1025);
        let path = folder.path().join("profile.json");
        let error = absurd.write(&path).unwrap_err();
        assert!(error.to_string().contains("settings.instances"), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn a_profile_is_found_again_for_its_model_unless_it_is_not_wanted() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = InferConfig {
            cache: Some(folder.path().to_owned()),
            ..InferConfig::default()
        };
        assert!(!TunedProfile::is_any(&config));
        let profile = TunedProfile {
            model: "digits".to_owned(),
            model_version: "abc".to_owned(),
            objective: "most throughput".to_owned(),
            settings: tuned(),
        };
        let path = TunedProfile::path(&config, "abc").unwrap();
        profile.write(&path).unwrap();
        assert!(TunedProfile::is_any(&config));
        assert_eq!(TunedProfile::recall(&config, "abc"), Some(profile));
        assert_eq!(TunedProfile::recall(&config, "other"), None);
        assert_eq!(config.tuned("abc").instances, Some(number(2)));
        fs::write(&path, "{}").unwrap();
        assert_eq!(config.tuned("abc"), config, "damage is not believed");
        config.profiles = false;
        assert_eq!(TunedProfile::recall(&config, "abc"), None);
    }
}
