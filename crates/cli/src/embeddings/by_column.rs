//! New classes for stored embeddings, one row group at a time on all cores.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{available_parallelism, scope};

use anyhow::{Error, Result, anyhow};
use tokio::runtime::Runtime;
use trommel_infer::{Head, Labeller, Wanted};
use trommel_sink::{
    Answers, Classes, EncodedParts, RelabelError, RelabelledGroup, ResultSink, RowGroup, RowGroups,
    StoredColumns,
};
use trommel_storage::StorageError;
use trommel_types::ErrorKind;

use super::derived::other_model;
use super::{no_embedding, other_width};

/// Results that are read and written by column.
pub(crate) struct ByColumn {
    pub(crate) columns: StoredColumns,
    pub(crate) head: Arc<Head>,
    pub(crate) wanted: Wanted,
    /// The model of the embeddings as named in errors, and its version.
    pub(crate) model: Option<(String, String)>,
}

/// The result of a row group.
type Answer = Result<RelabelledGroup>;

/// A row group, and where to send its result.
type Task = (RowGroup, SyncSender<Answer>);

impl ByColumn {
    /// Commits the uncommitted rows, in parts. As many row groups as there are cores are processed
    /// concurrently, and committed in order, so that memory does not grow with their number.
    ///
    /// # Errors
    /// If the results cannot be read, or the output cannot be written; committed rows stay.
    pub(crate) fn commit(self, sink: &mut dyn ResultSink, runtime: &Runtime) -> Result<()> {
        let job = sink.job().clone();
        let threads = available_parallelism().map_or(1, Into::into);
        let groups = (self.columns).row_groups(&job.job_id, sink.committed().clone());
        let (tasks, taken) = sync_channel::<Task>(threads);
        let (answers, in_order) = sync_channel::<Result<Receiver<Answer>>>(2 * threads);
        let taken = Mutex::new(taken);
        let labellers: Vec<Labels> = (0..threads)
            .map(|_| Labels::new(&self.head, &self.wanted, self.model.as_ref()))
            .collect::<Result<_>>()?;
        scope(|scope| {
            scope.spawn(move || plan(groups, &tasks, &answers));
            for mut labels in labellers {
                let taken = &taken;
                scope.spawn(move || {
                    // The lock is held during the wait: the other threads wait for the same.
                    let next = || taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    while let Ok((group, answer)) = next() {
                        let relabelled = group.relabel(&mut labels);
                        // If another thread has failed, the result is not needed.
                        drop(answer.send(relabelled.map_err(|error| labels.explained(error))));
                    }
                });
            }
            let mut parts = EncodedParts::new(job);
            let mut commit = |part| runtime.block_on(sink.commit_encoded(part)).map(drop);
            // Dropped if one fails, which ends the other threads.
            for answer in in_order {
                let group = answer?.recv();
                let group = group.map_err(|_| anyhow!("the rows could not be made"))??;
                parts.add(group)?.map(&mut commit).transpose()?;
            }
            parts.finish()?.map(&mut commit).transpose()?;
            Ok(())
        })
    }
}

/// Distributes row groups, and sends their results in order.
fn plan(
    groups: RowGroups,
    tasks: &SyncSender<Task>,
    answers: &SyncSender<Result<Receiver<Answer>>>,
) {
    for group in groups {
        let (answer, receiver) = sync_channel(1);
        let group: Result<RowGroup, StorageError> = group;
        let sent = match group {
            Err(error) => {
                drop(answers.send(Err(error.into())));
                return;
            }
            Ok(group) => answers.send(Ok(receiver)).is_ok() && tasks.send((group, answer)).is_ok(),
        };
        if !sent {
            return; // the other side says why
        }
    }
}

/// The classifier of one thread.
struct Labels {
    labeller: Labeller,
    model: Option<(String, String)>,
}

impl Labels {
    fn new(head: &Arc<Head>, wanted: &Wanted, model: Option<&(String, String)>) -> Result<Self> {
        Ok(Self {
            labeller: Labeller::new(Arc::clone(head), wanted)?,
            model: model.cloned(),
        })
    }

    /// The same error as when rows are read one by one.
    fn explained(&self, error: RelabelError) -> Error {
        match error {
            RelabelError::Storage(error) => error.into(),
            RelabelError::NoEmbedding { uri } => no_embedding(&uri),
            RelabelError::Width { uri, width } => other_width(&uri, width, self.width()),
            RelabelError::OtherModel {
                uri,
                model,
                version,
            } => {
                let wanted = self.model.as_ref();
                let (name, wanted) = wanted.map_or(("", ""), |(name, version)| (name, version));
                other_model(&uri, (&model, &version), (name, wanted))
            }
        }
    }
}

impl Classes for Labels {
    fn labels(&self) -> &Arc<[Arc<str>]> {
        self.labeller.head().labels()
    }

    fn width(&self) -> usize {
        self.labeller.head().width()
    }

    fn version(&self) -> Option<&str> {
        self.model.as_ref().map(|(_, version)| &**version)
    }

    fn answer(&mut self, embeddings: &[f32], answers: &mut Answers) {
        self.labeller.rank(embeddings, |ranked| match ranked {
            Ok(ranked) => answers.push(ranked),
            Err(error) => answers.fail(ErrorKind::ModelFailed, error.to_string()),
        });
    }
}
