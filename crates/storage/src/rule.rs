use std::fmt;
use std::sync::Arc;

/// Which places may be read that nobody has named: those that redirects lead to and patterns match.
/// By default all of them.
#[derive(Clone, Default)]
pub struct PlaceRule(Option<Arc<Rule>>);

type Rule = dyn Fn(&str) -> Result<(), String> + Send + Sync;

impl PlaceRule {
    /// Asks `rule` about the uri of each place; it gives the reason why one is refused.
    pub fn new(rule: impl Fn(&str) -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(rule)))
    }

    /// Asks about the place at a uri.
    ///
    /// # Errors
    /// The reason why it may not be read.
    pub fn check(&self, uri: &str) -> Result<(), String> {
        self.0.as_ref().map_or(Ok(()), |rule| rule(uri))
    }
}

impl fmt::Debug for PlaceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Some" } else { "All" })
    }
}
