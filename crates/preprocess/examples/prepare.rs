//! Images per second on one core: decoding alone, resizing to 224 × 224 alone, and both; then
//! scaling the shorter side to 256 and cropping 224 × 224, of the whole image and of the required
//! region.
//!
//! `prepare FOLDER` prints one JSON object with medians of five rounds, one after another on the
//! same machine. `scripts/bench-preprocess.sh` compares other programs with it.

use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use trommel_preprocess::{
    Crop, Limits, Mode, Plan, PrepareError, Preparer, Resample, Resize, Rounding,
};

/// Minimum duration of a round in seconds.
const ROUND: f64 = 1.0;
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).ok_or("usage: prepare FOLDER")?;
    let mut files = Vec::new();
    for entry in Path::new(&folder).read_dir()?.take(40) {
        files.push(std::fs::read(entry?.path())?);
    }
    let plan = Arc::new(Plan {
        resample: Resample::Bicubic,
        ..Plan::plain(Resize::Exact {
            height: 224,
            width: 224,
        })
    });
    let crop = Arc::new(Plan {
        resize: Resize::ShortestEdge(256),
        crop: Some(Crop {
            height: 224,
            width: 224,
            rounding: Rounding::Transformers,
            fill: [0; 3],
        }),
        ..Plan::clone(&plan)
    });
    let preparer = |mode| Preparer::new(Arc::clone(&plan), Limits::default()).with_mode(mode);
    let (mut exact, mut fast) = (preparer(Mode::Exact), preparer(Mode::Fast));
    let mut cropped = Preparer::new(Arc::clone(&crop), Limits::default());
    let mut rates = [const { Vec::new() }; 6];
    for _ in 0..ROUNDS {
        rates[0].push(rate(&files, |bytes| exact.decode(bytes))?);
        rates[1].push(rate(&files, |_| exact.resize().map(drop))?);
        rates[2].push(rate(&files, |bytes| exact.prepare(bytes).map(drop))?);
        rates[3].push(rate(&files, |bytes| fast.prepare(bytes).map(drop))?);
        rates[4].push(rate(&files, |bytes| {
            let plans = [&*plan, &*crop]; // the first one takes the whole image
            exact.decode_for(bytes, plans)?;
            exact.resize_by(&crop).map(drop)
        })?);
        rates[5].push(rate(&files, |bytes| cropped.prepare(bytes).map(drop))?);
    }
    let [decode, resize, exact, fast, whole, cropped] = rates.map(median);
    let told = format!(
        r#"{{"decode": {decode:.2}, "resize": {resize:.2}, "exact": {exact:.2}, "fast": {fast:.2}, "whole": {whole:.2}, "cropped": {cropped:.2}}}"#
    ) + "\n";
    std::io::stdout().write_all(told.as_bytes())?;
    Ok(())
}

fn rate(
    files: &[Vec<u8>],
    mut work: impl FnMut(&[u8]) -> Result<(), PrepareError>,
) -> Result<f64, PrepareError> {
    let (start, mut images) = (Instant::now(), 0);
    while start.elapsed().as_secs_f64() < ROUND {
        for bytes in files {
            work(bytes)?;
            images += 1;
        }
    }
    Ok(f64::from(images) / start.elapsed().as_secs_f64())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}
