//! The owner of the file at an output's name.

/// The owner of the file at an output's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Owner {
    /// There is no file.
    Absent,
    /// It has rows of this job.
    Job(String),
    /// A result of Trommel without rows, which in text formats does not name its job.
    NoRows,
    /// A foreign file.
    Foreign,
}

impl Owner {
    /// Whether it is the result of this job.
    pub(crate) fn is_result_of(&self, job_id: &str) -> bool {
        match self {
            Self::Job(id) => id == job_id,
            Self::NoRows => true,
            Self::Absent | Self::Foreign => false,
        }
    }
}
