//! Patterns such as `photos/**/*.jpg`.

use std::ffi::OsStr;
use std::path::PathBuf;

/// The part of a pattern after its base folder. `*`, `?` and `[a-z]` match within a name, `**`
/// matches any number of folders, and at the end everything in them.
#[derive(Debug, Clone)]
pub(super) struct Pattern {
    parts: Vec<Part>,
}

#[derive(Debug, Clone)]
enum Part {
    Name(glob::Pattern),
    AnyFolders,
}

/// The parts of a pattern that may match next, as positions; the number of parts means the end.
pub(super) type Reached = Vec<usize>;

impl Pattern {
    /// Matches all files below a folder.
    pub(super) fn everything() -> Self {
        Self {
            parts: vec![Part::AnyFolders],
        }
    }

    /// Whether a source that is not a path may be a pattern.
    pub(super) fn is_pattern(spec: &str) -> bool {
        spec.contains(WILD)
    }

    /// The part before the first wildcard.
    pub(super) fn before(spec: &str) -> &str {
        &spec[..spec.find(WILD).unwrap_or(spec.len())]
    }

    /// Splits off the folder before the first wildcard.
    ///
    /// # Errors
    /// The problem.
    pub(super) fn parse(spec: &str) -> Result<(PathBuf, Self), String> {
        let wild = spec.find(WILD).unwrap_or(spec.len());
        let begin = spec[..wild].rfind('/').map_or(0, |slash| slash + 1);
        let mut parts = Vec::new();
        for name in spec[begin..].split('/') {
            match name {
                "" | "." => {}
                "**" if matches!(parts.last(), Some(Part::AnyFolders)) => {}
                "**" => parts.push(Part::AnyFolders),
                ".." => return Err("`..` may stand only before the first wildcard".to_owned()),
                name => {
                    let name = glob::Pattern::new(name).map_err(|error| error.to_string())?;
                    parts.push(Part::Name(name));
                }
            }
        }
        Ok((PathBuf::from(&spec[..begin]), Self { parts }))
    }

    /// Whether the pattern itself selects file names: by a suffix or a whole name.
    pub(super) fn names_suffix(&self) -> bool {
        match self.parts.last() {
            Some(Part::Name(name)) => {
                let name = name.as_str();
                let suffix = name.rsplit_once('.').map_or(name, |(_, suffix)| suffix);
                !suffix.contains(WILD)
            }
            Some(Part::AnyFolders) | None => false,
        }
    }

    /// Whether the pattern names something hidden, such as `.cache/*`.
    pub(super) fn names_hidden(&self) -> bool {
        self.parts.iter().any(|part| match part {
            Part::Name(name) => name.as_str().starts_with('.') || name.as_str() == "__MACOSX",
            Part::AnyFolders => false,
        })
    }

    /// The initial state.
    pub(super) fn start(&self) -> Reached {
        let mut reached = Reached::new();
        self.reach(0, &mut reached);
        reached
    }

    /// The state after `name`; empty if it does not match. A name that is not UTF-8 matches by its
    /// readable characters.
    pub(super) fn step(&self, reached: &Reached, name: &OsStr) -> Reached {
        let name = name.to_string_lossy();
        let mut next = Reached::new();
        for position in reached {
            match self.parts.get(*position) {
                Some(Part::AnyFolders) => self.reach(*position, &mut next),
                Some(Part::Name(pattern)) if pattern.matches(&name) => {
                    self.reach(position + 1, &mut next);
                }
                Some(Part::Name(_)) | None => {}
            }
        }
        next
    }

    /// Whether a file may end here.
    pub(super) fn is_complete(&self, reached: &Reached) -> bool {
        reached.contains(&self.parts.len())
    }

    /// Whether files below a folder may match.
    pub(super) fn goes_on(&self, reached: &Reached) -> bool {
        reached.iter().any(|position| *position < self.parts.len())
    }

    /// Whether a whole path below the folder matches.
    pub(super) fn matches(&self, path: &str) -> bool {
        let mut reached = self.start();
        for name in path.split('/') {
            reached = self.step(&reached, OsStr::new(name));
        }
        self.is_complete(&reached)
    }

    fn reach(&self, position: usize, reached: &mut Reached) {
        if reached.contains(&position) {
            return;
        }
        reached.push(position);
        // `**` also matches no folder at all.
        if let Some(Part::AnyFolders) = self.parts.get(position) {
            self.reach(position + 1, reached);
        }
    }
}

const WILD: [char; 3] = ['*', '?', '['];

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn matches(spec: &str, path: &str) -> bool {
        let (root, pattern) = Pattern::parse(spec).unwrap();
        let Ok(below) = Path::new(path).strip_prefix(root) else {
            return false;
        };
        let mut reached = pattern.start();
        for name in below {
            reached = pattern.step(&reached, name);
        }
        pattern.is_complete(&reached)
    }

    #[test]
    fn wildcards_match_names_and_folders() {
        for (spec, path, expected) in [
            ("*.jpg", "a.jpg", true),
            ("*.jpg", "a/b.jpg", false),
            ("photos/**/*.jpg", "photos/a.jpg", true),
            ("photos/**/*.jpg", "photos/x/y/a.jpg", true),
            ("photos/**/*.jpg", "photos/x/y/a.png", false),
            ("photos/**/x/**/*.jpg", "photos/x/x/x/a.jpg", true),
            ("photos/**/x/**/*.jpg", "photos/y/a.jpg", false),
            ("photos/**", "photos/x/a", true),
            ("/d/*/[ab]?.png", "/d/e/b7.png", true),
            ("/d/*/[ab]?.png", "/d/e/c7.png", false),
            ("./a*/./b.jpg", "./a1/b.jpg", true),
        ] {
            assert_eq!(matches(spec, path), expected, "{spec} on {path}");
        }
    }

    #[test]
    fn malformed_patterns_are_refused() {
        for spec in ["a/[b/c.jpg", "a/b**/c.jpg", "a/*/../c.jpg"] {
            assert!(Pattern::parse(spec).is_err(), "{spec}");
        }
    }

    #[test]
    fn a_pattern_may_name_the_suffix() {
        let named = |spec| Pattern::parse(spec).unwrap().1.names_suffix();
        assert!(named("a/*.dat") && named("a/*/image"));
        assert!(!named("a/*") && !named("a/**") && !named("a/*.da?"));
    }
}
