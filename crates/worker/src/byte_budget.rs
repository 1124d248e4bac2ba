use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes per permit, so that any budget fits a semaphore.
const UNIT: u64 = 1 << 10;
/// Assumed bytes of an image of unknown size.
const GUESS: u64 = 1 << 20;

/// Limits the bytes of encoded images held at once.
pub(crate) struct ByteBudget {
    units: Arc<Semaphore>,
    all: u32,
}

/// Bytes are held while this lives.
pub(crate) struct HeldBytes {
    permit: OwnedSemaphorePermit,
    all: u32,
}

impl ByteBudget {
    pub(crate) fn new(bytes: u64) -> Self {
        let all = units(bytes, u32::MAX);
        let permits = usize::try_from(all).unwrap_or(usize::MAX);
        Self {
            units: Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS))),
            all,
        }
    }

    /// Waits until there is room for an image; the whole budget is enough for any image.
    pub(crate) async fn hold(&self, size: Option<u64>) -> HeldBytes {
        let wanted = units(size.unwrap_or(GUESS), self.all);
        let permit = Arc::clone(&self.units).acquire_many_owned(wanted).await;
        HeldBytes {
            permit: permit.expect("the semaphore of a budget is never closed"),
            all: self.all,
        }
    }
}

impl HeldBytes {
    /// Corrects the reserved bytes to the actual size. It does not wait for more: all holders might
    /// wait for each other.
    pub(crate) fn correct(&mut self, size: u64) {
        let wanted = units(size, self.all) as usize;
        let held = self.permit.num_permits();
        if held > wanted {
            drop(self.permit.split(held - wanted));
            return;
        }
        let semaphore = Arc::clone(self.permit.semaphore());
        let more = (wanted - held).min(semaphore.available_permits());
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        if let Ok(more) = semaphore.try_acquire_many_owned(more) {
            self.permit.merge(more);
        }
    }
}

fn units(bytes: u64, most: u32) -> u32 {
    let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
    units.clamp(1, most.max(1))
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;

    /// R20: images are bounded by their bytes, not only by their number.
    #[tokio::test]
    async fn images_wait_until_their_bytes_have_room() {
        let budget = ByteBudget::new(10 * UNIT);
        let mut first = budget.hold(Some(6 * UNIT)).await;
        let second = budget.hold(Some(5 * UNIT));
        tokio::pin!(second);
        assert!(poll!(&mut second).is_pending());
        first.correct(5 * UNIT);
        let second = second.await;
        drop((first, second));
        // Larger than the whole budget: admitted alone.
        let large = budget.hold(Some(u64::MAX)).await;
        assert_eq!(budget.units.available_permits(), 0);
        drop(large);
        assert_eq!(budget.units.available_permits(), 10);
    }

    #[tokio::test]
    async fn an_image_that_is_larger_than_thought_takes_what_is_free() {
        let budget = ByteBudget::new(10 * UNIT);
        let (mut one, other) = (budget.hold(Some(UNIT)).await, budget.hold(Some(UNIT)).await);
        one.correct(100 * UNIT);
        assert_eq!(budget.units.available_permits(), 0);
        one.correct(2 * UNIT);
        assert_eq!(budget.units.available_permits(), 7);
        drop((one, other));
        assert_eq!(budget.units.available_permits(), 10);
    }
}
