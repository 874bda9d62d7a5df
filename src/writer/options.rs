//! Options of a writer.

use std::time::Duration;

use super::FiniteCheck;
use crate::chain::Policy;
use crate::codec::{CodecRules, ObjectiveSetting};
use crate::commit::DEFAULT_AGE_FLOOR;
use crate::precision::PrecisionDecision;
use crate::wire::Id;
use crate::{Precision, Retention, RoleRules};

/// Options of a writer.
#[derive(Debug, Clone, PartialEq)]
pub struct WriterOptions {
    /// When to write a base, and which snapshot deltas are made against.
    pub policy: Policy,
    /// How the base of the next delta is kept between saves.
    pub base_cache: BaseKeeping,
    /// Goal of the choice of codecs: weights of size and speed, or the least time until the save is durable.
    pub objective: ObjectiveSetting,
    /// Codecs that are assigned to tensors. By default the objective chooses the codecs of all tensors.
    pub codecs: CodecRules,
    /// Roles of tensors whose names tell no role, or a wrong one. By default roles are those of [`TensorView::role`](crate::TensorView::role).
    pub roles: RoleRules,
    /// Which tensors are rounded before they are stored, and how far. By default no tensor is rounded. [`Precision::auto`]
    /// is for saves of whole states: a commit of receipts takes the decision from the receipt of the only rank.
    pub precision: Precision,
    /// Step and decision of the newest snapshot with [`Precision::auto`] in another store of the same training. A save decides
    /// by it while this store has no snapshot with a decision. For programs that begin a new store.
    pub earlier_precision: Option<(u64, PrecisionDecision)>,
    /// Whether each chunk is decoded again before it is uploaded.
    pub verify_after_encode: bool,
    /// Whether the snapshot gets statistics of each chunk, which
    /// [`Inspection::statistics`](crate::Inspection::statistics) returns. Off by default.
    pub statistics: bool,
    /// How to treat a state whose parameters or moments hold NaN or infinities. Not checked by default.
    pub check: FiniteCheck,
    /// Steps to keep: after each commit, the writer forgets the others as [`Store::retain`](crate::Store::retain) does. If
    /// forgetting fails, the writer warns, the snapshot stays saved, and the next save tries again. By default all steps are
    /// kept. The writer does not reduce steps of `keep_weights_every`; [`maintain::apply_retention`](crate::maintain::apply_retention()) does.
    pub retention: Option<Retention>,
    /// Patterns of names of parameters that are not trained, as for [`NamePatterns`](crate::NamePatterns).
    /// [`SavedSnapshot::unchanged`](crate::SavedSnapshot::unchanged) does not name them.
    pub frozen: Vec<String>,
    /// Whether the first save of this writer is compared with the two newest stored snapshots before it, for
    /// [`SavedSnapshot::unchanged`](crate::SavedSnapshot::unchanged). For programs that save once. Reads the
    /// indexes of these snapshots, unless their chains have more than 16 links. Off by default: then a writer remembers its own
    /// saves only.
    pub recall: bool,
    /// Page alignment: pages begin at multiples of two to the power of this, 6 to 12.
    pub alignment_exponent: u8,
    /// How to treat a live snapshot of the same step with other content.
    pub existing_step: ExistingStep,
    /// Id that the log names with each commit. Writers with the same id belong to one job and do not fence each other.
    /// By default each writer gets a random id.
    pub id: Option<Id>,
    /// How the writer claims the store.
    pub claim: Claim,
    /// Smallest age floor that garbage collection of this store runs with. A save that takes longer than half of this
    /// time is refused, because garbage collection could take its casks for leftovers.
    pub age_floor: Duration,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            base_cache: BaseKeeping::default(),
            objective: ObjectiveSetting::default(),
            codecs: CodecRules::default(),
            roles: RoleRules::default(),
            precision: Precision::default(),
            earlier_precision: None,
            verify_after_encode: true,
            statistics: false,
            check: FiniteCheck::Off,
            retention: None,
            frozen: vec![],
            recall: false,
            alignment_exponent: 6,
            existing_step: ExistingStep::default(),
            id: None,
            claim: Claim::default(),
            age_floor: DEFAULT_AGE_FLOOR,
        }
    }
}

/// How a save treats a live snapshot of the same step. Saving the same tensors and blobs again is never an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExistingStep {
    /// A save with other content fails with `Conflict`.
    #[default]
    Refuse,
    /// The new snapshot supersedes the old one.
    Replace,
}

/// How a writer keeps the base that the next delta needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BaseKeeping {
    /// In memory, decoded. Takes as much memory as the state.
    #[default]
    Memory,
    /// In memory, encoded. Takes as much memory as a base takes in the store. Each chunk is decoded when a delta needs
    /// it.
    Encoded,
    /// In a private file of this folder, decoded. Takes as much local disk as the state, and twice as much while a base
    /// is saved. If the file cannot be written, the writer warns and reads the base back from the store.
    Disk(std::path::PathBuf),
    /// Not kept. Chunks of the base are read back from the store, one window at a time.
    None,
}

/// How a writer claims a store, which has one writer at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Claim {
    /// For a job that goes on saving. It takes the store over from any other writer, so a job that starts again needs no permission.
    #[default]
    Job,
    /// For one save by hand. Refused with `Conflict` if the last writer is a job.
    Once,
    /// For one save by hand that takes the store over from a job: the next save of that job fails with `Fenced`.
    OnceTakingOver,
}
