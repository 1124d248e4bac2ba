//! The table of stages: the roles, and the streams between them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A part of the work that scales independently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Lists sources and answers the control API.
    Ingest,
    /// Fetches, decodes and resizes.
    Preprocess,
    /// Runs models.
    Infer,
    /// Commits rows.
    Sink,
    /// Answers requests for single images; not part of the flow of jobs.
    Serve,
}

/// A stream between stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stream {
    /// Jobs to be listed: `trommel.jobs.<lane>`.
    Jobs,
    /// Images to be prepared: `trommel.tasks.<lane>.<job>`.
    Tasks,
    /// Tensors to be classified: `trommel.tensors.<model@version>.<lane>.<job>`.
    Tensors,
    /// Rows to be stored: `trommel.results.<job>.<model>`.
    Results,
    /// Dead letters: `trommel.dead.<stage>.<job>`.
    Dead,
}

impl Role {
    /// The roles that a job's images go through, in flow order.
    pub const ALL: [Self; 4] = [Self::Ingest, Self::Preprocess, Self::Infer, Self::Sink];

    /// The name in subjects, metrics, arguments and screens.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ingest => "ingest",
            Self::Preprocess => "preprocess",
            Self::Infer => "infer",
            Self::Sink => "sink",
            Self::Serve => "serve",
        }
    }

    /// The stream that it consumes; `None` for a role outside the flow of jobs.
    pub fn input(self) -> Option<Stream> {
        match self {
            Self::Ingest => Some(Stream::Jobs),
            Self::Preprocess => Some(Stream::Tasks),
            Self::Infer => Some(Stream::Tensors),
            Self::Sink => Some(Stream::Results),
            Self::Serve => None,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Stream {
    /// All streams, in flow order.
    pub const ALL: [Self; 5] = [
        Self::Jobs,
        Self::Tasks,
        Self::Tensors,
        Self::Results,
        Self::Dead,
    ];

    /// The name in subjects: `tasks`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Jobs => "jobs",
            Self::Tasks => "tasks",
            Self::Tensors => "tensors",
            Self::Results => "results",
            Self::Dead => "dead",
        }
    }

    /// The publishing stage, as named in metrics.
    pub fn publisher(self) -> &'static str {
        match self {
            Self::Jobs => "submit",
            Self::Tasks => Role::Ingest.as_str(),
            Self::Tensors => Role::Preprocess.as_str(),
            Self::Results => Role::Infer.as_str(),
            Self::Dead => "dead",
        }
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_works_on_what_the_one_before_it_publishes() {
        for pair in Role::ALL.windows(2) {
            let input = pair[1].input().unwrap();
            assert_eq!(input.publisher(), pair[0].as_str());
        }
        assert_eq!(Role::Ingest.input().unwrap().publisher(), "submit");
        assert_eq!(Role::Serve.input(), None);
    }
}
