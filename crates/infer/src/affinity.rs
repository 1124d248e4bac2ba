//! Assigns cores to the threads of instances: each instance has its own, one per thread, wrapping
//! around if there are too few.

use std::sync::OnceLock;

use core_affinity::CoreId;

use crate::{InferError, InferErrorKind};

/// Pins this thread to the first core of instance `number`, each of which has `threads` cores.
///
/// # Errors
/// [`Settings`](InferErrorKind::Settings) if the system cannot pin threads.
pub fn pin_thread(number: usize, threads: usize) -> Result<(), InferError> {
    let core = cores().and_then(|cores| share(cores, number, threads).next());
    if core.is_some_and(core_affinity::set_for_current) {
        return Ok(());
    }
    Err(InferError::new(
        InferErrorKind::Settings,
        "the system keeps no thread on a core; unset pin-threads",
    ))
}

/// The cores of the instance's other threads, in ONNX Runtime's notation; `None` if it has none.
pub(crate) fn of_inner_threads(number: usize, threads: usize) -> Option<String> {
    let cores = cores()?;
    let others: Vec<_> = share(cores, number, threads)
        .skip(1)
        .map(|core| (core.id + 1).to_string()) // it counts from 1
        .collect();
    (!others.is_empty()).then(|| others.join(";"))
}

/// The cores available to this process, determined once: a pinned thread only sees its own core.
fn cores() -> Option<&'static [CoreId]> {
    static CORES: OnceLock<Vec<CoreId>> = OnceLock::new();
    let cores = CORES.get_or_init(|| core_affinity::get_core_ids().unwrap_or_default());
    (!cores.is_empty()).then_some(cores)
}

fn share(cores: &[CoreId], number: usize, threads: usize) -> impl Iterator<Item = CoreId> {
    let all = cores.iter().copied().cycle();
    all.skip(number * threads % cores.len()).take(threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_have_cores_of_their_own_while_there_are_enough() {
        let cores: Vec<_> = [0, 2, 4, 6, 8].map(|id| CoreId { id }).into();
        let share = |number| -> Vec<_> { share(&cores, number, 2).map(|core| core.id).collect() };
        assert_eq!(share(0), [0, 2]);
        assert_eq!(share(1), [4, 6]);
        assert_eq!(share(2), [8, 0]);
    }

    #[test]
    fn a_pinned_thread_still_knows_the_cores_of_the_others() {
        let before = of_inner_threads(0, 3);
        std::thread::spawn(move || {
            pin_thread(0, 3).unwrap();
            assert_eq!(core_affinity::get_core_ids().unwrap().len(), 1);
            assert_eq!(of_inner_threads(0, 3), before);
        })
        .join()
        .unwrap();
    }
}
