use std::fmt;

/// A server's version, without the part after the third number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ServerVersion {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    patch: u32,
}

impl ServerVersion {
    /// The oldest server that is safe with one replica.
    pub(crate) const OLDEST: Self = Self::new(2, 10);
    /// The oldest server that does not lose publishes to a full, replicated stream.
    pub(crate) const OLDEST_REPLICATED: Self = Self::new(2, 12);

    const fn new(major: u32, minor: u32) -> Self {
        Self {
            major,
            minor,
            patch: 0,
        }
    }

    /// Parses `2.10.27`, `v2.12.1`, `2.14.0-RC.3`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let text = text.trim().trim_start_matches('v');
        let numbers = text
            .split_once(['-', '+'])
            .map_or(text, |(numbers, _)| numbers);
        let mut parts = numbers.split('.').map(|part| part.parse().ok());
        Some(Self {
            major: parts.next()??,
            minor: parts.next()??,
            patch: parts.next().unwrap_or(Some(0))?,
        })
    }
}

impl fmt::Display for ServerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared_by_number() {
        let read = |text| ServerVersion::parse(text).unwrap();
        assert_eq!(read("2.10.27").to_string(), "2.10.27");
        assert_eq!(read("v2.14.0-RC.3"), read("2.14.0"));
        assert!(read("2.9.10") < ServerVersion::OLDEST);
        assert!(read("2.10.0") >= ServerVersion::OLDEST);
        assert!(read("2.11.9") < ServerVersion::OLDEST_REPLICATED);
        assert!(read("3.0.0") > ServerVersion::OLDEST_REPLICATED);
        for text in ["", "dev", "2", "2.x.1"] {
            assert_eq!(ServerVersion::parse(text), None, "{text}");
        }
    }
}
