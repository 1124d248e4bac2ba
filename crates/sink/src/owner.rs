//! Whose the file at an output's name is.

/// Whose the file at an output's name is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Owner {
    /// There is none.
    Absent,
    /// It holds the rows of this job of Trommel's.
    Job(String),
    /// It is a result of Trommel's without a row, of which text formats do not tell the job.
    NoRows,
    /// It is anyone else's.
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
