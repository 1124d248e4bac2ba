//! The files of the demo, as they are shipped in `models/digits`.

/// A file's path in the demo's folder, and its content.
pub(super) type File = (&'static str, &'static [u8]);

macro_rules! files {
    ($from:literal => $to:literal: $($name:literal)*) => {
        &[$((
            concat!($to, "/", $name),
            include_bytes!(concat!("../../../../models/digits/", $from, $name)),
        )),*]
    };
}

/// The model's folder.
pub(super) const MODEL: &[File] = files!("" => "model":
    "config.json" "preprocessor_config.json" "model.onnx");

/// Two held-out examples of each digit, in one folder per digit.
pub(super) const DIGITS: &[File] = files!("examples/" => "images":
    "0/0009.jpg" "0/0060.png"
    "1/0019.jpg" "1/0198.png"
    "2/0010.png" "2/0073.jpg"
    "3/0011.jpg" "3/0070.png"
    "4/0000.png" "4/0047.jpg"
    "5/0014.png" "5/0021.jpg"
    "6/0006.png" "6/0187.jpg"
    "7/0008.png" "7/0059.jpg"
    "8/0022.png" "8/0025.jpg"
    "9/0001.jpg" "9/0050.png");
