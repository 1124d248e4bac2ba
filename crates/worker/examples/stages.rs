//! What the bare stages can do on all cores: decoding and resizing alone, and the model alone.
//!
//! `cargo run --release -p trommel-worker --example stages -- MODEL_DIR IMAGE_DIR` prints one JSON
//! object with medians of three runs, in images/s over all cores. Each stage keeps every core
//! busy: a core alone is faster than it is next to the others, with which it shares caches, memory
//! and, on many rented machines, its execution units.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use trommel_infer::{Engine, EngineOptions, LiveOptions, Model, ModelOptions, Runtime, Wanted};
use trommel_preprocess::{Limits, Plan, Preparer, Reference};
use trommel_types::Lane;

/// Images that a run takes.
const IMAGES: usize = 600;
/// Batch sizes that the model is tried with.
const BATCHES: [usize; 4] = [1, 4, 8, 32];

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(model), Some(images)) = (args.next(), args.next()) else {
        return Err("usage: stages MODEL_DIR IMAGE_DIR".into());
    };
    let plan = Arc::new(Plan::load(Path::new(&model), Reference::Auto)?);
    let mut files = Vec::new();
    for entry in Path::new(&images).read_dir()?.take(IMAGES) {
        files.push(std::fs::read(entry?.path())?);
    }

    let cores = std::thread::available_parallelism()?.get();
    let prepare = median(|| {
        let start = Instant::now();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..cores)
                .map(|_| scope.spawn(|| prepare_all(&plan, &files)))
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().expect("prepare does not panic"))
        })?;
        Ok((cores * files.len()) as f64 / start.elapsed().as_secs_f64())
    })?;

    let runtime = Runtime::load(None)?;
    let shape = plan
        .shape()
        .ok_or("the plan gives tensors of different sizes")?;
    let open = || {
        let options = ModelOptions::default();
        Model::open(
            &runtime,
            Path::new(&model),
            plan.normalization(),
            shape,
            &options,
        )
    };
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let wanted = Arc::new(Wanted::default());
    let mut infer = Vec::new();
    for max_batch in BATCHES {
        let max_wait = Duration::from_millis(20);
        let engine = Engine::start(
            open()?,
            EngineOptions {
                instances: cores,
                max_batch,
                max_wait,
                run_timeout: EngineOptions::RUN_TIMEOUT,
                live: LiveOptions::default(),
            },
        )?;
        infer.push(median(|| {
            let images = cores * IMAGES / 2;
            let start = Instant::now();
            tokio.block_on(async {
                let calls = (0..images)
                    .map(|_| engine.classify(vec![127; shape.len()], Lane::Normal, &wanted));
                futures::future::join_all(calls)
                    .await
                    .into_iter()
                    .collect::<Result<Vec<_>, _>>()
            })?;
            Ok(images as f64 / start.elapsed().as_secs_f64())
        })?);
    }

    let by_batch: serde_json::Map<_, _> = BATCHES
        .iter()
        .zip(&infer)
        .map(|(batch, rate)| (batch.to_string(), (*rate).into()))
        .collect();
    let report = serde_json::json!({ "prepare": prepare, "infer": by_batch });
    std::io::Write::write_all(&mut std::io::stdout(), format!("{report}\n").as_bytes())?;
    Ok(())
}

fn prepare_all(
    plan: &Arc<Plan>,
    files: &[Vec<u8>],
) -> Result<(), trommel_preprocess::PrepareError> {
    let mut preparer = Preparer::new(Arc::clone(plan), Limits::default());
    files
        .iter()
        .try_for_each(|file| preparer.prepare(file).map(drop))
}

/// The median of three runs.
fn median(mut run: impl FnMut() -> Result<f64, Box<dyn Error>>) -> Result<f64, Box<dyn Error>> {
    let mut rates = [run()?, run()?, run()?];
    rates.sort_by(f64::total_cmp);
    Ok(rates[1])
}
