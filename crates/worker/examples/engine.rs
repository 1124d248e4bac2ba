//! How fast an engine classifies while images always wait for it.
//!
//! `cargo run --release -p trommel-worker --example engine -- MODEL_DIR SECONDS [INSTANCES
//! INTRA_THREADS MAX_BATCH [DEVICE [PRECISION]]]` prints one JSON object: images/s, the mean fill of the batches, and the
//! time between batches as a share of the time spent on them. Settings that are not given are the
//! defaults.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use trommel_infer::{Capacity, Engine, Model, Precision, Runtime, Wanted};
use trommel_preprocess::{Plan, Reference};
use trommel_types::Lane;
use trommel_worker::{InferConfig, engine_options};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(model), Some(seconds)) = (args.next(), args.next()) else {
        return Err("usage: engine MODEL_DIR SECONDS".into());
    };
    let (model, time) = (Path::new(&model), Duration::from_secs_f64(seconds.parse()?));
    let plan = Plan::load(model, Reference::Auto)?;
    let shape = plan
        .shape()
        .ok_or("the plan gives tensors of different sizes")?;
    let mut config = InferConfig {
        cache: Some(std::env::temp_dir().join("trommel-engines")),
        ..InferConfig::default()
    };
    let args: Vec<_> = args.collect();
    if let [instances, intra_threads, max_batch, place @ ..] = &args[..] {
        config.instances = Some(instances.parse()?);
        config.intra_threads = Some(intra_threads.parse()?);
        config.max_batch = Some(max_batch.parse()?);
        if let [device, precision @ ..] = place {
            config.device.clone_from(device);
            // `fused` is for a processor what a GPU does anyway.
            match precision.first().map(String::as_str) {
                Some("fp16") => config.precision = Precision::Fp16,
                Some("int8") => config.precision = Precision::Int8,
                Some("fused") => config.fused = Some(true),
                None | Some("model") => {}
                Some(other) => return Err(format!("no precision {other}").into()),
            }
        }
    }
    let options = config.model_options(Capacity::default())?;
    let runtime = Runtime::load(None)?;
    let model = Model::open(&runtime, model, plan.normalization(), shape, &options)?;
    let options = engine_options(&model, &config)?;
    // As many as the engine holds, and another batch that waits outside.
    let waiting = options.max_batch * (2 * options.instances + 2);
    let engine = Engine::start(model, options)?;
    let wanted = Arc::new(Wanted::default());
    let pixels = Bytes::from(vec![127; shape.len()]);

    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (images, took) = tokio.block_on(async {
        let start = Instant::now();
        let mut calls: FuturesUnordered<_> = (0..waiting)
            .map(|_| engine.classify(pixels.clone(), Lane::Normal, &wanted))
            .collect();
        let mut images = 0_u32;
        while start.elapsed() < time {
            if let Some(scores) = calls.next().await {
                scores?;
                images += 1;
            }
            calls.push(engine.classify(pixels.clone(), Lane::Normal, &wanted));
        }
        Ok::<_, trommel_infer::InferError>((images, start.elapsed()))
    })?;
    let stats = engine.stats();
    let report = serde_json::json!({
        "images_per_second": f64::from(images) / took.as_secs_f64(),
        "batch": stats.max_batch,
        "fill": stats.fill,
        "gaps": stats.gaps.as_secs_f64() / stats.compute.as_secs_f64(),
    });
    std::io::Write::write_all(&mut std::io::stdout(), format!("{report}\n").as_bytes())?;
    Ok(())
}
