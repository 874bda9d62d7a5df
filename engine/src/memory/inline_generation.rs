//! Generations of saves that the trainer encodes itself. Without an arena to number them, they are positions in the
//! memory tier.

/// Position of a snapshot in the memory tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InlineGeneration {
    /// Number of the store in memory.
    pub epoch: u64,
    /// Log entry of the snapshot.
    pub sequence: u64,
}

impl InlineGeneration {
    /// Packs the position into a generation: the epoch in the upper half, the log entry in the lower half.
    pub(crate) fn to_generation(self) -> u64 {
        self.epoch << SEQUENCE_BITS | self.sequence
    }

    /// Unpacks a generation.
    pub(crate) fn from_generation(generation: u64) -> Self {
        Self { epoch: generation >> SEQUENCE_BITS, sequence: generation & ((1 << SEQUENCE_BITS) - 1) }
    }

    /// The log entry of a generation if it belongs to this epoch, else 0.
    pub(crate) fn sequence_in(generation: u64, epoch: u64) -> u64 {
        let position = Self::from_generation(generation);
        if position.epoch == epoch { position.sequence } else { 0 }
    }
}

const SEQUENCE_BITS: u32 = 32;
