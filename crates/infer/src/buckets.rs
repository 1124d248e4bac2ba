/// The batch sizes that a device sees: a batch is padded to the next one. Few shapes mean few CUDA
/// graphs and one profile for TensorRT.
///
/// Powers of two, and the largest size itself; for a model with a fixed batch only that one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Buckets {
    sizes: Vec<usize>,
}

impl Buckets {
    /// For batches of up to `largest` images, at least 1.
    pub(crate) fn new(largest: usize, fixed: Option<usize>) -> Self {
        if let Some(fixed) = fixed {
            return Self { sizes: vec![fixed] };
        }
        let powers = (0..usize::BITS).map(|power| 1 << power);
        let mut sizes: Vec<_> = powers.take_while(|size| *size < largest).collect();
        sizes.push(largest);
        Self { sizes }
    }

    /// The smallest size for `images`, or `images` itself if none is large enough.
    pub(crate) fn of(&self, images: usize) -> usize {
        let place = self.sizes.partition_point(|size| *size < images);
        self.sizes.get(place).copied().unwrap_or(images)
    }

    /// The sizes for batches of up to `images`, in rising order.
    pub(crate) fn up_to(&self, images: usize) -> impl Iterator<Item = usize> + use<> {
        let last = self.of(images);
        let sizes = self.sizes.clone().into_iter();
        sizes.take_while(move |size| *size <= last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_and_the_largest() {
        for (largest, sizes) in [
            (1, &[1][..]),
            (2, &[1, 2]),
            (8, &[1, 2, 4, 8]),
            (48, &[1, 2, 4, 8, 16, 32, 48]),
        ] {
            let buckets = Buckets::new(largest, None);
            assert_eq!(buckets.up_to(largest).collect::<Vec<_>>(), sizes);
        }
    }

    #[test]
    fn a_batch_goes_into_the_smallest_that_holds_it() {
        let buckets = Buckets::new(48, None);
        for (images, size) in [(1, 1), (3, 4), (4, 4), (33, 48), (48, 48), (49, 49)] {
            assert_eq!(buckets.of(images), size, "{images}");
        }
        assert_eq!(buckets.up_to(5).collect::<Vec<_>>(), [1, 2, 4, 8]);
    }

    #[test]
    fn a_fixed_batch_is_the_only_one() {
        let buckets = Buckets::new(32, Some(4));
        assert_eq!(buckets.of(1), 4);
        assert_eq!(buckets.up_to(4).collect::<Vec<_>>(), [4]);
    }
}
