//! Any bytes: a tensor or an error. `scripts/fuzz.sh` runs it.

#![no_main]

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use trommel_preprocess::{Limits, Mode, Plan, Preparer, Reference};

thread_local! {
    /// Used for all inputs, as a worker's thread uses its own.
    static PREPARERS: RefCell<[Preparer; 2]> = RefCell::new([Mode::Exact, Mode::Fast].map(|mode| {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/configs/clip");
        let plan = Arc::new(Plan::load(&model, Reference::Auto).expect("a configuration of the tests"));
        let limits = Limits { max_pixels: 1 << 20, max_bytes: 1 << 20, ..Limits::default() };
        Preparer::new(plan, limits).with_mode(mode)
    }));
}

fuzz_target!(|data: &[u8]| {
    PREPARERS.with_borrow_mut(|preparers| {
        for preparer in preparers {
            if let Ok(tensor) = preparer.prepare(data) {
                assert_eq!(tensor.pixels.len(), tensor.shape.len());
            }
        }
    });
});
