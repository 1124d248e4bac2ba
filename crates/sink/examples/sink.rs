//! Measures how fast rows are committed to Parquet, and how soon a job of a billion rows resumes.
//!
//! `scripts/bench-sink.sh` runs it. Each command prints one JSON object:
//!
//! - `sink commit DIR` commits 1,000,000 rows with five labels each, in parts of 20,000.
//! - `sink simulate DIR` creates the remains of a job that committed 1,000,000,000 rows in 50,000
//!   parts. Every footer is real; pages are left out, because a resume does not read them.
//! - `sink resume DIR` opens that job again, in a separate process so that its memory can be
//!   measured.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use parquet::file::metadata::{
    FileMetaData, KeyValue, ParquetMetaData, ParquetMetaDataReader, ParquetMetaDataWriter,
};
use serde_json::{Value, json};
use trommel_sink::{Destination, Format, JobRecord, Opened, Output, ResultSink, Reuse};
use trommel_types::{
    Classification, Content, ImageRef, ImageSize, Lane, Outcome, Scores, TopLabel,
};

/// Rows in a part, the default.
const PART: u64 = 20_000;
/// Rows that are actually committed.
const ROWS: u64 = 1_000_000;
/// Parts of the simulated job.
const PARTS: u64 = 50_000;
/// Runs of consecutive indices in one part: images do not finish in listing order.
const RUNS: u64 = 20;
/// The name of the run.
const RUN: &str = "00000000";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(command), Some(dir)) = (args.next(), args.next()) else {
        return Err("usage: sink commit|simulate|resume DIR".into());
    };
    let dir = Path::new(&dir);
    let told = match command.as_str() {
        "commit" => commit(dir).await?,
        "simulate" => simulate(dir).await?,
        "resume" => resume(dir).await?,
        other => return Err(format!("no command {other}").into()),
    };
    std::io::stdout().write_all(format!("{told}\n").as_bytes())?;
    Ok(())
}

async fn commit(dir: &Path) -> Result<Value, Box<dyn Error>> {
    let mut sink = open(dir).await?;
    // Before the clock starts: the sink gets its rows from a queue.
    let labels = labels();
    let parts: Vec<Vec<_>> = (0..ROWS / PART)
        .map(|part| {
            (part * PART..(part + 1) * PART)
                .map(|index| Arc::new(row(index, &labels)))
                .collect()
        })
        .collect();
    let start = Instant::now();
    for rows in parts {
        sink.commit(rows).await?;
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(json!({ "rows": ROWS, "seconds": seconds, "rows_per_second": ROWS as f64 / seconds }))
}

async fn simulate(dir: &Path) -> Result<Value, Box<dyn Error>> {
    let labels = labels();
    let rows = (0..PART).map(|index| row(index, &labels).into()).collect();
    open(dir).await?.commit(rows).await?;
    let first = part(dir, 0);
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&File::open(&first)?)?;
    for number in 0..PARTS {
        let mut out = BufWriter::new(File::create(part(dir, number))?);
        out.write_all(b"PAR1")?;
        ParquetMetaDataWriter::new(&mut out, &with_ranges(&metadata, number)).finish()?;
        out.flush()?;
    }
    let footers = fs::metadata(&first)?.len();
    Ok(json!({ "rows": PARTS * PART, "parts": PARTS, "bytes_of_a_part": footers }))
}

async fn resume(dir: &Path) -> Result<Value, Box<dyn Error>> {
    let start = Instant::now();
    let sink = open(dir).await?;
    let check = sink.source_check();
    let seconds = start.elapsed().as_secs_f64();
    let rows = sink.committed().len();
    if !sink.is_resumed() || rows != PARTS * PART {
        return Err(format!("{rows} rows are known of {}", PARTS * PART).into());
    }
    drop(check);
    let bitmap = sink.committed().serialized_size();
    Ok(json!({ "rows": rows, "seconds": seconds, "peak_mb": peak_mb()?, "bitmap_bytes": bitmap }))
}

async fn open(dir: &Path) -> Result<Box<dyn ResultSink>, Box<dyn Error>> {
    let destination = Destination::parse(&format!("{}/", dir.display()), Format::Parquet)?;
    let job = JobRecord {
        job_id: "job".to_owned(),
        source: "photos".to_owned(),
        model: "mobilenet".to_owned(),
        model_version: "0123456789ab".to_owned(),
        run: RUN.to_owned(),
        spec_hash: String::new(),
        options: [("top-k".to_owned(), "5".to_owned())].into(),
        format: Format::Parquet,
        columns: Vec::new(),
        logits: false,
        embedding: false,
        embedding_type: Default::default(),
        escape_formulas: false,
        retry: None,
        created_at: 1_700_000_000_000_000,
    };
    match Output::from(destination)
        .open_alone(job, Reuse::Resume)
        .await?
    {
        Opened::Ready(sink) => Ok(sink),
        Opened::Complete(_) => Err("the job is finished".into()),
    }
}

fn part(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("part-{number:08}-{RUN}.parquet"))
}

/// The footer of a part that commits every second run of a window; its neighbour commits the
/// others.
fn with_ranges(metadata: &ParquetMetaData, number: u64) -> ParquetMetaData {
    let length = PART / RUNS;
    let window = (number / 2) * 2 * PART + (number % 2) * length;
    let runs: Vec<_> = (0..RUNS)
        .map(|run| window + run * 2 * length)
        .map(|start| {
            let hash = format!("{:016x}", start.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            json!({ "start": start, "end": start + length - 1, "hash": hash })
        })
        .collect();
    let file = metadata.file_metadata();
    let mut pairs = file.key_value_metadata().cloned().unwrap_or_default();
    pairs.retain(|pair| pair.key != "trommel.ranges");
    pairs.push(KeyValue::new(
        "trommel.ranges".to_owned(),
        Value::from(runs).to_string(),
    ));
    let file = FileMetaData::new(
        file.version(),
        file.num_rows(),
        file.created_by().map(str::to_owned),
        Some(pairs),
        file.schema_descr_ptr(),
        file.column_orders().cloned(),
    );
    ParquetMetaData::new(file, metadata.row_groups().to_vec())
}

fn labels() -> Vec<Arc<str>> {
    (0..1000)
        .map(|class| format!("class {class}").into())
        .collect()
}

fn row(index: u64, labels: &[Arc<str>]) -> Classification {
    let top = (0..5_u32)
        .map(|rank| {
            let class = (index as u32)
                .wrapping_mul(2_654_435_761)
                .wrapping_add(rank * 97)
                % 1000;
            TopLabel {
                label: Arc::clone(&labels[class as usize]),
                class,
                score: (class as f32).mul_add(-1e-5, 0.5) / (rank + 1) as f32,
            }
        })
        .collect();
    Classification {
        image: ImageRef {
            job: "job".into(),
            index,
            lane: Lane::default(),
            uri: format!("s3://photos/2026/{:05}/{index:09}.jpg", index / 1000),
            content: Content::Whole,
            etag: Some(format!(
                "{:032x}",
                u128::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            )),
            size: Some(100_000 + index % 5000),
            columns: Vec::new(),
        },
        model: "mobilenet".into(),
        model_version: "0123456789ab".into(),
        bytes: Some(100_000 + index % 5000),
        original: Some(ImageSize {
            width: 500,
            height: 375,
        }),
        outcome: Outcome::Ok(Scores {
            top,
            ..Scores::default()
        }),
        attempts: 1,
        finished_at: 1_700_000_000_000_000 + index as i64,
    }
}

/// Peak memory of this process, as counted by the kernel.
fn peak_mb() -> Result<u64, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line
        .and_then(|line| line.split_whitespace().nth(1))
        .ok_or("no VmHWM")?;
    Ok(kib.parse::<u64>()? / 1024)
}
