//! Tensors as Trommel makes them, for comparison with other programs.
//!
//! `tensor MODEL_DIR FILE...` writes, for each file, height and width (`u32`, little endian) and the
//! pixels (`HWC u8`, not normalised) to standard output. `bench/exactness.py` reads them.

use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use trommel_preprocess::{Limits, Plan, Preparer, Reference};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("usage: tensor MODEL_DIR FILE...")?;
    let plan = Arc::new(Plan::load(Path::new(&model), Reference::Auto)?);
    let mut preparer = Preparer::new(plan, Limits::default());
    let mut out = std::io::stdout().lock();
    for file in args {
        let tensor = preparer
            .prepare(&std::fs::read(&file)?)
            .map_err(|error| format!("{file}: {error}"))?;
        out.write_all(&tensor.shape.height.to_le_bytes())?;
        out.write_all(&tensor.shape.width.to_le_bytes())?;
        out.write_all(&tensor.pixels)?;
    }
    Ok(())
}
