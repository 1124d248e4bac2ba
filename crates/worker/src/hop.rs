//! Passes tensors from preprocess to infer: through a queue, or in memory.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use trommel_queue::Queue;
use trommel_types::PreparedImage;

use crate::fault::TaskError;
use crate::infer::Engines;
use crate::job::ModelId;
use crate::settle::{Settler, message_id};

/// Accepts tensors from preprocess.
#[async_trait]
pub(crate) trait TensorHop: Send + Sync {
    /// Hands a tensor on. When this returns, its result is durable, so its task may be settled.
    async fn hand_on(&self, tensor: PreparedImage, model: &ModelId) -> Result<(), TaskError>;

    /// Called when no more tensors follow for now.
    fn idle(&self) {}
}

/// Through a queue, to any infer process.
pub(crate) struct QueueHop(pub(crate) Arc<dyn Queue<PreparedImage>>);

#[async_trait]
impl TensorHop for QueueHop {
    async fn hand_on(&self, tensor: PreparedImage, _: &ModelId) -> Result<(), TaskError> {
        let id = message_id(&tensor.image, &tensor.model);
        self.0.publish(&id, tensor).await?; // returns once stored
        Ok(())
    }
}

/// In memory, to the engine in this process. The tensor is never stored: its task stays unsettled
/// until the answer is stored, so that a crash repeats the image.
pub(crate) struct LocalHop {
    pub(crate) engines: Arc<dyn Engines>,
    pub(crate) settler: Settler,
}

#[async_trait]
impl TensorHop for LocalHop {
    async fn hand_on(&self, tensor: PreparedImage, model: &ModelId) -> Result<(), TaskError> {
        let wanted = self.settler.jobs.rows(&tensor.image).await?;
        let engine = self.engines.engine(model, &wanted).await?;
        let asked = Instant::now();
        let answer = engine
            .answer(tensor.pixels.clone(), tensor.image.lane, &wanted)
            .await?;
        self.settler.progress.add_answer(asked.elapsed());
        self.settler
            .publish_answer(&tensor, 1, model, answer)
            .await?;
        Ok(())
    }

    fn idle(&self) {
        self.engines.flush();
    }
}
