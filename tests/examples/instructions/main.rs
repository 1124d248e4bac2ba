//! Does one piece of the work on an image a number of times, for `scripts/guard.sh`, which counts instructions.
//!
//! `instructions` lists the pieces, each with how often it is to be done for a count that is not lost in that of
//! the program's start. `instructions PIECE TIMES` does one. Inputs are the same in every run and do not depend on
//! TIMES, so the difference of two runs is the work alone.

mod inputs;

use std::error::Error;
use std::hint::black_box;
use std::io::Write;
use std::sync::Arc;

use trommel_infer::testsuite::Assembly;
use trommel_preprocess::{Limits, Plan, Preparer, Resample, Resize};
use trommel_types::{ImageRef, Message, Normalization, PreparedImage};

use crate::inputs::{BATCH, PART, SHAPE};

type Outcome = Result<(), Box<dyn Error>>;

/// A piece of work: its name, how often it is to be done, and what does it so often.
type Piece = (&'static str, u64, fn(u64) -> Outcome);

const PIECES: [Piece; 8] = [
    ("decode", 4, decode),
    ("resize", 8, resize),
    ("task encode", 1_000, encode_task),
    ("task decode", 1_000, decode_task),
    ("tensor encode", 100, encode_tensor),
    ("tensor decode", 100, decode_tensor),
    ("batch", 20, assemble),
    ("commit", COMMITS - 1, commit),
];
/// Parts for which there are rows.
const COMMITS: u64 = 5;

fn main() -> Outcome {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let [name, times] = &args[..] else {
        let lines = PIECES.map(|(name, times, _)| format!("{name} {times}\n"));
        return Ok(std::io::stdout().write_all(lines.concat().as_bytes())?);
    };
    let piece = PIECES.iter().find(|(known, ..)| known == name);
    let (.., work) = piece.ok_or_else(|| format!("no piece of work is called {name}"))?;
    work(times.parse()?)
}

/// A JPEG of 500 × 375 to its pixels, all of them.
fn decode(times: u64) -> Outcome {
    let (photo, mut preparer) = (inputs::photo()?, preparer());
    for _ in 0..times {
        preparer.decode(black_box(&photo))?;
    }
    Ok(())
}

/// Those pixels to 224 × 224, bicubic.
fn resize(times: u64) -> Outcome {
    let mut preparer = preparer();
    preparer.decode(&inputs::photo()?)?;
    for _ in 0..times {
        black_box(preparer.resize()?);
    }
    Ok(())
}

fn preparer() -> Preparer {
    let plan = Plan {
        resample: Resample::Bicubic,
        ..Plan::plain(Resize::Exact {
            height: SHAPE.height,
            width: SHAPE.width,
        })
    };
    Preparer::new(Arc::new(plan), Limits::default())
}

/// A task as ingest publishes it.
fn encode_task(times: u64) -> Outcome {
    let task = inputs::image(7);
    for _ in 0..times {
        black_box(black_box(&task).encode());
    }
    Ok(())
}

fn decode_task(times: u64) -> Outcome {
    let wire = inputs::image(7).encode();
    for _ in 0..times {
        black_box(ImageRef::decode(black_box(&wire))?);
    }
    Ok(())
}

/// A tensor of 224 × 224 as preprocess publishes it.
fn encode_tensor(times: u64) -> Outcome {
    let tensor = inputs::tensor();
    for _ in 0..times {
        black_box(black_box(&tensor).encode());
    }
    Ok(())
}

fn decode_tensor(times: u64) -> Outcome {
    let wire = inputs::tensor().encode();
    for _ in 0..times {
        black_box(PreparedImage::decode(black_box(&wire))?);
    }
    Ok(())
}

/// A batch of four images, formed and normalised into the model's input.
fn assemble(times: u64) -> Outcome {
    let pixels = inputs::tensor().pixels;
    let mut assembly = Assembly::new(SHAPE, &Normalization::default(), BATCH);
    for _ in 0..times {
        let full = (0..BATCH)
            .filter(|_| black_box(assembly.push(black_box(pixels.clone()))).is_some())
            .count();
        if full != 1 {
            return Err(format!("{BATCH} images gave {full} batches instead of one").into());
        }
    }
    Ok(())
}

/// A Parquet part of 1,000 rows, encoded and written to a folder; at most [`COMMITS`] of them.
fn commit(times: u64) -> Outcome {
    let folder = tempfile::tempdir()?;
    let parts = (0..COMMITS).map(|part| inputs::rows(part * PART..(part + 1) * PART));
    let parts: Vec<_> = parts.collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut sink = inputs::sink(folder.path()).await?;
        for rows in parts.into_iter().take(usize::try_from(times)?) {
            sink.commit(rows).await?;
        }
        Ok(())
    })
}
