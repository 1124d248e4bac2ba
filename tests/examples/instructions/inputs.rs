//! What the pieces of work are done on, made by arithmetic alone.

use std::error::Error;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use trommel_sink::{Destination, Format, JobRecord, Opened, Output, ResultSink, Reuse};
use trommel_types::{
    Classification, Content, ImageRef, ImageSize, Lane, Outcome, PreparedImage, Scores, Shape,
    TopLabel,
};
use turbojpeg::{Image, PixelFormat, Subsamp};

/// Images of a batch.
pub(crate) const BATCH: usize = 4;
/// Rows of a part.
pub(crate) const PART: u64 = 1_000;
/// What a model takes.
pub(crate) const SHAPE: Shape = Shape {
    height: 224,
    width: 224,
    channels: 3,
};
const PHOTO: ImageSize = ImageSize {
    width: 500,
    height: 375,
};
const JPEG_QUALITY: i32 = 90;

/// A JPEG of smooth colours and noise.
pub(crate) fn photo() -> Result<Vec<u8>, Box<dyn Error>> {
    let (width, height) = (PHOTO.width as usize, PHOTO.height as usize);
    let pixels = noise(width * height * 3, |at| {
        let (pixel, channel) = (at / 3, at % 3);
        (pixel % width * (channel + 1) + pixel / width * 2) / 8
    });
    let image = Image {
        pixels: &pixels[..],
        width,
        pitch: width * 3,
        height,
        format: PixelFormat::RGB,
    };
    Ok(turbojpeg::compress(image, JPEG_QUALITY, Subsamp::Sub2x2)?.to_vec())
}

/// `length` bytes: 16 levels of noise on what `smooth` says of each place.
fn noise(length: usize, smooth: impl Fn(usize) -> usize) -> Vec<u8> {
    let noise = |at: usize| (at as u32).wrapping_mul(2_654_435_761) >> 28;
    (0..length)
        .map(|at| (smooth(at) as u32 + noise(at)) as u8)
        .collect()
}

pub(crate) fn image(index: u64) -> ImageRef {
    ImageRef {
        job: "job".into(),
        index,
        lane: Lane::default(),
        uri: format!("s3://photos/2026/{index:09}.jpg"),
        content: Content::Whole,
        etag: Some(format!("{index:032x}")),
        size: Some(60_000 + index % 5_000),
        columns: Vec::new(),
    }
}

pub(crate) fn tensor() -> PreparedImage {
    PreparedImage {
        image: image(7),
        model: "mobilenet".into(),
        model_version: "0123456789ab".into(),
        pixels: Bytes::from(noise(SHAPE.len(), |at| at / 3 % 200)),
        shape: SHAPE,
        bytes: 60_007,
        original: PHOTO,
        attempts: 1,
        due_at: None,
    }
}

/// Rows of five labels each.
pub(crate) fn rows(indices: Range<u64>) -> Vec<Arc<Classification>> {
    indices.map(|index| Arc::new(row(index))).collect()
}

fn row(index: u64) -> Classification {
    let top = (0..5_u32).map(|rank| {
        let class = (index as u32 * 31 + rank * 97) % 1_000;
        TopLabel {
            label: format!("class {class}").into(),
            class,
            score: (class as f32).mul_add(-1e-5, 0.5) / (rank + 1) as f32,
        }
    });
    Classification {
        image: image(index),
        model: "mobilenet".into(),
        model_version: "0123456789ab".into(),
        bytes: Some(60_000 + index % 5_000),
        original: Some(PHOTO),
        outcome: Outcome::Ok(Scores {
            top: top.collect(),
            ..Scores::default()
        }),
        attempts: 1,
        finished_at: 1_700_000_000_000_000 + index as i64,
    }
}

/// A sink for a new job whose parts go to `folder`.
pub(crate) async fn sink(folder: &Path) -> Result<Box<dyn ResultSink>, Box<dyn Error>> {
    let folder = format!("{}/", folder.display());
    let destination = Destination::parse(&folder, Format::Parquet)?;
    let job = JobRecord {
        job_id: "job".to_owned(),
        source: "photos".to_owned(),
        model: "mobilenet".to_owned(),
        model_version: "0123456789ab".to_owned(),
        run: "00000000".to_owned(),
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
    let output = Output::from(destination);
    match output.open_alone(job, Reuse::Resume).await? {
        Opened::Ready(sink) => Ok(sink),
        Opened::Complete(_) => Err("a new folder holds a finished job".into()),
    }
}
