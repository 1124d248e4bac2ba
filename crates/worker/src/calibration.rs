//! The fastest batch size: measured once per model and machine, and remembered. A measurement on a
//! busy machine says little, so it is repeated once the machine is quiet. What engines learn later
//! replaces it.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use trommel_infer::{Device, Engine, EngineOptions, InferError, Learning, LiveOptions, Model};

use crate::InferConfig;

/// The remembered result.
#[derive(Debug, Serialize, Deserialize)]
struct Measured {
    max_batch: usize,
    /// Whether the machine was otherwise idle during the measurement. If not, it is repeated on
    /// a quiet machine.
    quiet: bool,
}

/// Share of the CPUs that other programs may use on a machine that counts as idle.
const QUIET: f64 = 0.15;

/// How an engine runs a model: as configured, with the fastest batch size if none is configured.
/// Blocks while it is measured.
///
/// # Errors
/// As [`Model::best_batch`]. If the cache cannot be read or written, the size is measured again.
pub fn engine_options(model: &Model, config: &InferConfig) -> Result<EngineOptions, InferError> {
    let max_batch = match config.max_batch {
        Some(max_batch) => max_batch.get(),
        None => fastest(model, config)?.max_batch,
    };
    Ok(options(config, max_batch, LiveOptions::default()))
}

/// Starts a model as configured. If no batch size is configured, it starts with the fastest one
/// measured, continues to learn from its batches, and remembers the result.
///
/// # Errors
/// As [`Model::best_batch`] and [`Engine::start`].
pub fn start_engine(
    model: Model,
    config: &InferConfig,
    live: LiveOptions,
) -> Result<Engine, InferError> {
    if let Some(max_batch) = config.max_batch {
        return Engine::start(model, options(config, max_batch.get(), live));
    }
    let measured = fastest(&model, config)?;
    let (file, name) = (file(&model, config), model.name().clone());
    let learned = move |max_batch| {
        tracing::info!(model = %name, max_batch, "learned a faster size of batch");
        if let Some(file) = &file {
            remember(
                file,
                &Measured {
                    max_batch,
                    quiet: true,
                },
            );
        }
    };
    let learning = Learning {
        doubtful: !measured.quiet,
        learned: Box::new(learned),
    };
    Engine::start_learning(model, options(config, measured.max_batch, live), learning)
}

fn options(config: &InferConfig, max_batch: usize, live: LiveOptions) -> EngineOptions {
    EngineOptions {
        instances: config.instances(),
        max_batch,
        max_wait: config.max_wait(),
        run_timeout: EngineOptions::RUN_TIMEOUT,
        live,
    }
}

/// Where the size for a model on this machine is remembered, if at all.
fn file(model: &Model, config: &InferConfig) -> Option<PathBuf> {
    let cache = config.cache.as_ref()?;
    Some(cache.join("batches").join(name(model, config)))
}

fn fastest(model: &Model, config: &InferConfig) -> Result<Measured, InferError> {
    let file = file(model, config);
    let recall = |file| recall(file, is_busy);
    if let Some(measured) = file.as_deref().and_then(recall) {
        return Ok(measured);
    }
    let quiet = Quiet::begin();
    let max_batch = model.best_batch(config.instances())?;
    let others = quiet.others();
    let quiet = others <= QUIET;
    tracing::info!(model = %model.name(), max_batch, others, "measured the fastest size of batch");
    let measured = Measured { max_batch, quiet };
    if let Some(file) = file.as_deref() {
        remember(file, &measured);
    }
    Ok(measured)
}

/// How much of the machine other programs use, from creation on.
#[derive(Debug)]
pub struct Quiet(Option<CpuTime>);

impl Quiet {
    /// Starts observing.
    pub fn begin() -> Self {
        Self(CpuTime::now())
    }

    /// The share of the CPUs that other programs have used since then, 0 to 1; 0 if the system does
    /// not report it.
    pub fn others(&self) -> f64 {
        let since = self.0.as_ref().zip(CpuTime::now());
        since.map_or(0.0, |(before, after)| after.others_since(before))
    }
}

/// What a model runs on, as named by the system: the GPU, or the processor.
pub fn machine_name(model: &Model) -> String {
    machine_of(model.devices().first())
}

/// The device as named by the system: the GPU, or the processor.
pub(crate) fn machine_of(device: Device) -> String {
    gpu_name(device).unwrap_or_else(processor)
}

/// Time that the machine's CPUs have spent since it started, in ticks.
#[derive(Debug, PartialEq, Eq)]
struct CpuTime {
    /// Total.
    all: u64,
    /// Busy, for any program, or stolen by a hypervisor.
    busy: u64,
    /// Busy for this process.
    own: u64,
}

impl CpuTime {
    /// `None` if the system does not report it as Linux does.
    fn now() -> Option<Self> {
        let read = |path| fs::read_to_string(path).ok();
        Self::parse(&read("/proc/stat")?, &read("/proc/self/stat")?)
    }

    fn parse(machine: &str, process: &str) -> Option<Self> {
        // cpu user nice system idle iowait irq softirq steal; the following fields are parts of
        // these
        let fields = machine.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Option<Vec<u64>> = fields
            .split_whitespace()
            .take(8)
            .map(|field| field.parse().ok())
            .collect();
        let ticks = ticks.filter(|ticks| ticks.len() == 8)?;
        let all = ticks.iter().sum();
        // The name before it may contain anything.
        let (_, fields) = process.rsplit_once(") ")?;
        let own = fields.split(' ').skip(11).take(2);
        Some(Self {
            all,
            busy: all - ticks[3] - ticks[4],
            own: own.filter_map(|field| field.parse::<u64>().ok()).sum(),
        })
    }

    /// The share of the CPUs that other programs have used since then, 0 to 1.
    fn others_since(&self, before: &Self) -> f64 {
        let since = |of: fn(&Self) -> u64| of(self).saturating_sub(of(before)) as f64;
        let others = since(|time| time.busy) - since(|time| time.own);
        others.max(0.0) / since(|time| time.all).max(1.0)
    }
}

/// The file name for a model on this machine, with everything that the speed depends on.
fn name(model: &Model, config: &InferConfig) -> String {
    let (instances, threads) = (config.instances(), config.intra_threads());
    let (version, devices) = (model.version(), model.devices());
    let place = if model.is_fused() { "fused " } else { "" };
    let machine = machine_name(model);
    let precision = config.precision;
    let name = format!("{version} {devices} {precision:?} {place}{instances}x{threads} {machine}");
    format!("{}.json", allowed(&name))
}

/// A text for use in a file name.
pub(crate) fn allowed(text: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    text.chars().map(allowed).collect()
}

/// The GPU as named by its driver, if the device is one.
fn gpu_name(device: Device) -> Option<String> {
    match device {
        Device::Cpu => None,
        Device::Cuda(number) | Device::TensorRt(number) => trommel_infer::gpu_name(number),
    }
}

/// The processor as named by Linux.
fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| Some(line.split_once(':')?.1.trim()));
    name.unwrap_or("processor").to_owned()
}

/// The remembered measurement, unless a better one is possible now.
fn recall(file: &Path, is_busy: impl FnOnce() -> bool) -> Option<Measured> {
    let measured: Measured = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    (measured.max_batch > 0 && (measured.quiet || is_busy())).then_some(measured)
}

/// Whether other programs are running now, as far as the system tells.
fn is_busy() -> bool {
    let cores = std::thread::available_parallelism().map_or(1, Into::into);
    let running = fs::read_to_string("/proc/loadavg").ok();
    running.is_some_and(|text| others_run(&text, cores))
}

/// Whether more threads run than this one and the few of a quiet machine.
fn others_run(loadavg: &str, cores: usize) -> bool {
    // Three averages, then RUNNING/ALL threads.
    let threads = loadavg.split(' ').nth(3).and_then(|it| it.split_once('/'));
    let running: Option<f64> = threads.and_then(|(running, _)| running.parse().ok());
    running.is_some_and(|running| running - 1.0 > QUIET * cores as f64)
}

/// Remembers a size, if the folder can be written.
fn remember(file: &Path, measured: &Measured) {
    if let Err(error) = write(file, measured) {
        tracing::info!(%error, file = %file.display(), "it will be measured again");
    }
}

fn write(file: &Path, measured: &Measured) -> io::Result<()> {
    write_whole(file, &serde_json::to_vec(measured)?)
}

/// Writes a file atomically, and creates its folder if necessary.
pub(crate) fn write_whole(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut new = tempfile::NamedTempFile::new_in(folder)?;
    new.write_all(bytes)?;
    new.persist(file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_remembered_and_damage_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("batches/any.json");
        let recall = || recall(&file, || false);
        assert!(recall().is_none());
        let measured = |max_batch| Measured {
            max_batch,
            quiet: true,
        };
        write(&file, &measured(4)).unwrap();
        remember(&file, &measured(2));
        assert_eq!(recall().unwrap().max_batch, 2);
        let zero = r#"{"max_batch":0,"quiet":true}"#;
        for text in ["", zero, "{\"max_batch\":"] {
            fs::write(&file, text).unwrap();
            assert!(recall().is_none(), "{text}");
        }
    }

    /// N9: what was measured next to another load was remembered forever. Measured at each start, it cost a
    /// busy machine most of a short run.
    #[test]
    fn what_was_measured_on_a_busy_machine_holds_while_it_is_busy() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("any.json");
        fs::write(&file, r#"{"max_batch":2}"#).unwrap();
        assert!(recall(&file, || true).is_none(), "of an earlier release");
        let measured = Measured {
            max_batch: 2,
            quiet: false,
        };
        write(&file, &measured).unwrap();
        assert!(recall(&file, || false).is_none());
        let held = recall(&file, || true).unwrap();
        assert!(held.max_batch == 2 && !held.quiet, "{held:?}");
    }

    #[test]
    fn a_machine_is_busy_while_others_run_on_it() {
        let busy =
            |running: &str, cores| others_run(&format!("9.50 8.00 7.00 {running} 77\n"), cores);
        assert!(!busy("1/300", 4));
        assert!(busy("2/300", 4));
        assert!(!busy("8/300", 64));
        assert!(busy("12/300", 64));
        assert!(!others_run("", 4));
    }

    #[test]
    fn the_share_that_others_take_is_told_from_our_own() {
        let at = |user: u64, idle: u64, own: u64| {
            let machine = format!("cpu  {user} 0 10 {idle} 5 0 0 0 0 0\ncpu0 1 2\n");
            let process = format!("7 (a) b (c) R 1 1 1 0 -1 0 0 0 0 0 {own} 3 0 0");
            CpuTime::parse(&machine, &process).unwrap()
        };
        let before = at(100, 1000, 20);
        assert_eq!((before.all, before.busy, before.own), (1115, 110, 23));
        // 100 ticks: 60 at work, 20 of them ours.
        assert_eq!(at(160, 1040, 40).others_since(&before), 0.4);
        assert_eq!(at(160, 1040, 80).others_since(&before), 0.0);
        assert!(CpuTime::parse("", "").is_none());
        assert!(CpuTime::now().is_some());
    }
}
