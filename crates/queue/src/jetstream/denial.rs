use std::collections::VecDeque;

use crate::{QueueError, QueueErrorKind};

/// Remembered denials. Beyond this number a request may have to be repeated.
const REMEMBERED: usize = 64;
/// Prefix of all reply subjects of the client.
const INBOX: &str = "_INBOX.";

/// A permission that the server denies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Denial {
    verb: Verb,
    pub(super) subject: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Publish,
    Subscribe,
}

impl Denial {
    /// Parses `Permissions Violation for Publish to "a.b"`, as reported by the server.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix("Permissions Violation for ")?;
        let verb = match text {
            _ if text.starts_with("Publish") => Verb::Publish,
            _ if text.starts_with("Subscription") => Verb::Subscribe,
            _ => return None,
        };
        let (_, quoted) = text.split_once('"')?;
        let (subject, _) = quoted.split_once('"')?;
        Some(Self {
            verb,
            subject: subject.to_owned(),
        })
    }

    /// Whether no request of this connection can be answered.
    fn is_of_inbox(&self) -> bool {
        self.verb == Verb::Subscribe && self.subject.starts_with(INBOX)
    }

    pub(super) fn error(&self) -> QueueError {
        let (verb, list) = match self.verb {
            Verb::Publish => ("publish to", "publish"),
            Verb::Subscribe => ("subscribe to", "subscribe"),
        };
        let subject = match &self.subject {
            _ if self.is_of_inbox() => "_INBOX.>",
            subject => subject,
        };
        QueueError::new(
            QueueErrorKind::Forbidden,
            format!(
                "the broker does not permit this user to {verb} {subject}: add it to the user's \
                 permissions ({list}: allow)"
            ),
        )
    }
}

/// The newest denials of a connection.
#[derive(Debug, Default)]
pub(super) struct Denials {
    count: u64,
    recent: VecDeque<Denial>,
    inbox: Option<Denial>,
}

impl Denials {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn add(&mut self, denial: Denial) {
        self.count += 1;
        if denial.is_of_inbox() {
            self.inbox = Some(denial.clone());
        }
        self.recent.push_back(denial);
        if self.recent.len() > REMEMBERED {
            self.recent.pop_front();
        }
    }

    /// A new connection may have other permissions.
    pub(super) fn forget(&mut self) {
        self.recent.clear();
        self.inbox = None;
    }

    /// The first one that `concerns` an operation which began after `count` denials.
    pub(super) fn since(&self, count: u64, concerns: impl Fn(&Denial) -> bool) -> Option<&Denial> {
        let new = usize::try_from(self.count - count).unwrap_or(usize::MAX);
        let old = self.recent.len().saturating_sub(new);
        let mut new = self.recent.iter().skip(old);
        self.inbox.as_ref().or_else(|| new.find(|it| concerns(it)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish(subject: &str) -> Denial {
        Denial::parse(&format!(
            r#"Permissions Violation for Publish to "{subject}""#
        ))
        .unwrap()
    }

    /// R57: the error names subject and permission.
    #[test]
    fn a_violation_names_subject_and_permission() {
        let error = publish("trommel.tasks.a").error();
        assert_eq!(error.kind(), QueueErrorKind::Forbidden);
        let text = error.to_string();
        assert!(text.contains("publish to trommel.tasks.a:"), "{text}");
        let text = r#"Permissions Violation for Subscription to "a.*" using queue "q""#;
        let denial = Denial::parse(text).unwrap();
        assert_eq!((denial.verb, &*denial.subject), (Verb::Subscribe, "a.*"));
        for other in ["Slow Consumer", "Permissions Violation for Tea"] {
            assert_eq!(Denial::parse(other), None);
        }
    }

    #[test]
    fn an_operation_sees_only_the_denials_of_its_time() {
        let mut denials = Denials::default();
        denials.add(publish("a"));
        let begun = denials.count();
        let is_a = |denial: &Denial| denial.subject == "a";
        assert_eq!(denials.since(begun, is_a), None);
        denials.add(publish("b"));
        assert_eq!(denials.since(begun, is_a), None);
        denials.add(publish("a"));
        assert_eq!(denials.since(begun, is_a), Some(&publish("a")));
        for _ in 0..100 {
            denials.add(publish("c"));
        }
        assert_eq!(denials.since(begun, is_a), None);
    }

    #[test]
    fn without_an_inbox_every_operation_is_denied() {
        let mut denials = Denials::default();
        let text = r#"Permissions Violation for Subscription to "_INBOX.x.*""#;
        denials.add(Denial::parse(text).unwrap());
        let begun = denials.count();
        let denied = denials.since(begun, |_| false).unwrap().error();
        assert!(denied.to_string().contains("subscribe to _INBOX.>"));
        denials.forget();
        assert_eq!(denials.since(begun, |_| false), None);
    }
}
