//! Images a second on one core: decoding alone, resizing to 224 × 224 alone, and both.
//!
//! `prepare FOLDER` prints one JSON object with medians of five rounds, one after the other so that
//! all see the same machine. `scripts/bench-preprocess.sh` sets other programs beside it.

use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use trommel_preprocess::{
    Arithmetic, ChannelOrder, Limits, Mode, Plan, PrepareError, Preparer, Resample, Resize,
};
use trommel_types::Normalization;

/// Seconds that a round lasts at least.
const ROUND: f64 = 1.0;
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).ok_or("usage: prepare FOLDER")?;
    let mut files = Vec::new();
    for entry in Path::new(&folder).read_dir()?.take(40) {
        files.push(std::fs::read(entry?.path())?);
    }
    let plan = Arc::new(Plan {
        family: "bench".to_owned(),
        resize: Resize::Exact {
            height: 224,
            width: 224,
        },
        resample: Resample::Bicubic,
        arithmetic: Arithmetic::Pillow,
        crop: None,
        channel_order: ChannelOrder::Rgb,
        normalization: Normalization {
            scale: 1.0 / 255.0,
            mean: [0.5; 3],
            std: [0.5; 3],
        },
    });
    let preparer = |mode| Preparer::new(Arc::clone(&plan), Limits::default()).with_mode(mode);
    let (mut exact, mut fast) = (preparer(Mode::Exact), preparer(Mode::Fast));
    let mut rates = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        rates[0].push(rate(&files, |bytes| exact.decode(bytes))?);
        rates[1].push(rate(&files, |_| exact.resize().map(drop))?);
        rates[2].push(rate(&files, |bytes| exact.prepare(bytes).map(drop))?);
        rates[3].push(rate(&files, |bytes| fast.prepare(bytes).map(drop))?);
    }
    let [decode, resize, exact, fast] = rates.map(median);
    let told = format!(
        r#"{{"decode": {decode:.2}, "resize": {resize:.2}, "exact": {exact:.2}, "fast": {fast:.2}}}"#
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
