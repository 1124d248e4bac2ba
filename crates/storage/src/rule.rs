use std::fmt;
use std::sync::Arc;

/// Which places may be read that the user has not named: targets of redirects, and matches of
/// patterns. By default all of them.
#[derive(Clone, Default)]
pub struct PlaceRule(Option<Arc<Rule>>);

type Rule = dyn Fn(&str) -> Result<(), String> + Send + Sync;

impl PlaceRule {
    /// Calls `rule` with the uri of each place; it returns the reason for a refusal.
    pub fn new(rule: impl Fn(&str) -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(rule)))
    }

    /// Checks the place at a uri.
    ///
    /// # Errors
    /// Why it may not be read.
    pub fn check(&self, uri: &str) -> Result<(), String> {
        self.0.as_ref().map_or(Ok(()), |rule| rule(uri))
    }
}

impl fmt::Debug for PlaceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Some" } else { "All" })
    }
}
