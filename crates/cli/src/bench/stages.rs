//! Measures each stage alone, with the parallelism of the pipeline.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use trommel_infer::Model;
use trommel_preprocess::{Limits, Plan, Preparer};
use trommel_source::{FetchLimits, Source};
use trommel_types::{ImageRef, Lane, Mode, PreparedImage};

use super::measures::{BatchTime, StageTime};
use super::spread::Times;

/// Duration of the measurement of each batch size.
const MEASURED: Duration = Duration::from_millis(1200);
/// Longest duration of the measurement of preprocessing.
const PREPARED_FOR: Duration = Duration::from_secs(3);

/// The encoded sample.
pub(crate) struct Fetched {
    pub(crate) images: Vec<(ImageRef, Bytes)>,
    pub(crate) failed: usize,
    pub(crate) stage: StageTime,
}

/// Lists a sample and reads its images, `side_by_side` at once.
///
/// # Errors
/// If the source cannot be listed, or none of its images can be read.
pub(crate) async fn fetch(
    source: &dyn Source,
    limits: FetchLimits,
    side_by_side: usize,
) -> Result<Fetched> {
    let listed: Vec<_> = source.list().try_collect().await?;
    if listed.is_empty() {
        bail!("the source holds no images; nothing can be measured");
    }
    let references = listed.into_iter().zip(0..).map(|(found, index)| ImageRef {
        job: "bench".into(),
        index,
        lane: Lane::Normal,
        uri: found.uri,
        content: found.content,
        etag: found.etag,
        size: found.size,
        columns: Vec::new(),
    });
    let start = Instant::now();
    let mut read = stream::iter(references)
        .map(async |image| {
            let begun = Instant::now();
            let fetched = source.fetch_within(&image, limits).await;
            (image, fetched, begun.elapsed())
        })
        .buffer_unordered(side_by_side);
    let (mut times, mut images, mut failed, mut why) = (Times::default(), Vec::new(), 0, None);
    while let Some((image, fetched, took)) = read.next().await {
        match fetched {
            Ok(fetched) => {
                times.add(took);
                images.push((image, fetched.bytes));
            }
            Err(error) => {
                failed += 1;
                why = Some(error);
            }
        }
    }
    let wall = start.elapsed().as_secs_f64();
    if let (true, Some(error)) = (images.is_empty(), why) {
        return Err(error).context("no image of the sample could be read");
    }
    // In a fixed order, independent of when reads finish.
    images.sort_by_key(|(image, _)| image.index);
    let stage = StageTime {
        stage: "fetch".to_owned(),
        milliseconds: times.spread(),
        side_by_side,
        images_per_second: images.len() as f64 / wall,
    };
    Ok(Fetched {
        images,
        failed,
        stage,
    })
}

/// The result of preprocessing.
pub(super) struct Prepared {
    /// Decoding and resizing.
    pub(super) stages: [StageTime; 2],
    /// A tensor of the sample, to measure hops.
    pub(super) tensor: PreparedImage,
    pub(super) failed: usize,
    /// Images per second of both together, on all threads.
    pub(super) images_per_second: f64,
}

/// Decodes and resizes the sample on `threads` threads, repeatedly for some seconds, but at least
/// once.
///
/// # Errors
/// If no image can be decoded.
pub(super) fn prepare(
    images: &[(ImageRef, Bytes)],
    plan: &Arc<Plan>,
    limits: Limits,
    mode: Mode,
    threads: usize,
) -> Result<Prepared> {
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    let seen: Vec<Worked> = std::thread::scope(|scope| {
        let work = || {
            let preparer = Preparer::new(Arc::clone(plan), limits).with_mode(mode);
            Worked::of(images, preparer, &next, start)
        };
        let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .collect()
    });
    let wall = start.elapsed().as_secs_f64();
    let (mut decode, mut resize) = (Times::default(), Times::default());
    let (mut failed, mut tensor, mut why) = (Vec::new(), None, None);
    for worked in seen {
        decode.merge(&worked.decode);
        resize.merge(&worked.resize);
        failed.extend(worked.failed);
        tensor = tensor.or(worked.tensor);
        why = why.or(worked.why);
    }
    failed.sort_unstable();
    failed.dedup();
    let Some(tensor) = tensor else {
        let why = why.unwrap_or_else(|| "a thread panicked".to_owned());
        bail!("no image of the sample could be prepared: {why}");
    };
    let stage = |name: &str, times: &Times| {
        let milliseconds = times.spread();
        StageTime {
            stage: name.to_owned(),
            side_by_side: threads,
            images_per_second: threads as f64 * 1e3 / milliseconds.mean.max(1e-6),
            milliseconds,
        }
    };
    Ok(Prepared {
        stages: [stage("decode", &decode), stage("resize", &resize)],
        tensor,
        failed: failed.len(),
        images_per_second: decode.count() as f64 / wall,
    })
}

/// The work of a thread.
#[derive(Default)]
struct Worked {
    decode: Times,
    resize: Times,
    failed: Vec<usize>,
    tensor: Option<PreparedImage>,
    why: Option<String>,
}

impl Worked {
    fn of(
        images: &[(ImageRef, Bytes)],
        mut preparer: Preparer,
        next: &AtomicUsize,
        start: Instant,
    ) -> Self {
        let mut worked = Self::default();
        loop {
            let number = next.fetch_add(1, Relaxed);
            if number >= images.len() && start.elapsed() >= PREPARED_FOR {
                return worked;
            }
            let number = number % images.len();
            let (image, bytes) = &images[number];
            let begun = Instant::now();
            let decoded = preparer.decode(bytes);
            let between = Instant::now();
            let prepared = decoded.and_then(|()| preparer.resize());
            match prepared {
                Ok(prepared) => {
                    worked.resize.add(between.elapsed());
                    worked.decode.add(between - begun);
                    worked.tensor.get_or_insert_with(|| PreparedImage {
                        image: image.clone(),
                        model: "bench".into(),
                        model_version: "bench".into(),
                        pixels: prepared.pixels.into(),
                        shape: prepared.shape,
                        bytes: bytes.len() as u64,
                        original: prepared.original,
                        attempts: 1,
                        due_at: None,
                    });
                }
                Err(error) => {
                    worked.failed.push(number);
                    worked.why.get_or_insert_with(|| error.to_string());
                }
            }
        }
    }
}

/// Batches of each size in all sessions at once. A size that does not fit into the device's memory
/// ends the list.
///
/// # Errors
/// If the model fails on the smallest batch.
pub(super) fn compute(model: &Model, instances: usize, sizes: &[usize]) -> Result<Vec<BatchTime>> {
    let mut found: Vec<BatchTime> = Vec::new();
    for size in sizes {
        let rate = match model.rate_side_by_side(instances, *size, MEASURED) {
            Ok(rate) => rate,
            Err(error) if !found.is_empty() && !error.is_fatal() => {
                tracing::warn!("{error}; batches of {size} and more are not measured");
                break;
            }
            Err(error) => return Err(error.into()),
        };
        // A model with a fixed batch has only one size.
        if found.iter().all(|known| known.batch != rate.batch) {
            found.push(BatchTime {
                batch: rate.batch,
                milliseconds: rate.milliseconds,
                images_per_second: rate.images_per_second,
            });
        }
    }
    Ok(found)
}
