use tokio::sync::{Semaphore, SemaphorePermit};

/// Bytes per permit, so that any limit fits a semaphore.
const UNIT: u64 = 1 << 10;

/// Room for messages, limited by number and bytes.
pub(crate) struct Room {
    messages: Semaphore,
    bytes: Semaphore,
    all: u32,
}

/// Room for one message, released when dropped unless it is kept.
pub(crate) struct Taken<'a> {
    message: SemaphorePermit<'a>,
    bytes: SemaphorePermit<'a>,
}

/// The share of bytes that a message takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Units(u32);

impl Room {
    pub(crate) fn new(messages: usize, bytes: u64) -> Self {
        let all = u32::try_from(bytes / UNIT).unwrap_or(u32::MAX).max(1);
        Self {
            messages: Semaphore::new(messages.max(1)),
            bytes: Semaphore::new(all as usize),
            all,
        }
    }

    /// The size of a message of `bytes`: at most everything, so that one larger than the limit fits
    /// alone.
    pub(crate) fn units(&self, bytes: usize) -> Units {
        let units = (bytes as u64).div_ceil(UNIT);
        Units(u32::try_from(units).unwrap_or(u32::MAX).clamp(1, self.all))
    }

    pub(crate) fn try_take(&self, units: Units) -> Option<Taken<'_>> {
        Some(Taken {
            message: self.messages.try_acquire().ok()?,
            bytes: self.bytes.try_acquire_many(units.0).ok()?,
        })
    }

    /// Waits for room. Cancel-safe: dropping the future takes nothing.
    pub(crate) async fn take(&self, units: Units) -> Taken<'_> {
        const OPEN: &str = "the semaphores of a queue are never closed";
        Taken {
            message: self.messages.acquire().await.expect(OPEN),
            bytes: self.bytes.acquire_many(units.0).await.expect(OPEN),
        }
    }

    pub(crate) fn give_back(&self, units: Units) {
        self.messages.add_permits(1);
        self.bytes.add_permits(units.0 as usize);
    }
}

impl Taken<'_> {
    /// Keeps the room until [`Room::give_back`].
    pub(crate) fn keep(self) {
        self.message.forget();
        self.bytes.forget();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_needs_room_by_number_and_by_bytes() {
        let room = Room::new(2, 10 * UNIT);
        let large = room.units(9 * UNIT as usize);
        room.try_take(large).unwrap().keep();
        assert!(room.try_take(room.units(2 * UNIT as usize)).is_none());
        room.try_take(room.units(0)).unwrap().keep();
        room.give_back(large);
        let third = room.try_take(room.units(1)).unwrap();
        assert!(room.try_take(room.units(1)).is_none(), "two messages");
        drop(third);
        room.give_back(room.units(0));
        // Larger than the limit: admitted alone.
        room.try_take(room.units(usize::MAX)).unwrap().keep();
        assert!(room.try_take(room.units(0)).is_none());
    }
}
