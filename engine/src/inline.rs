//! Generations of saves that the trainer encodes itself: there is no arena to count them, so they are places in the memory tier.

/// A generation is the epoch above so many bits of the log entry.
const EPOCH_SHIFT: u32 = 32;

/// The generation of a snapshot in memory.
pub(crate) fn generation(epoch: u64, sequence: u64) -> u64 {
    epoch << EPOCH_SHIFT | sequence
}

/// Its epoch.
pub(crate) fn epoch(generation: u64) -> u64 {
    generation >> EPOCH_SHIFT
}

/// Its log entry.
pub(crate) fn entry(generation: u64) -> u64 {
    generation & ((1 << EPOCH_SHIFT) - 1)
}

/// The log entry that a generation tells of, if it is one of this epoch; else none of it.
pub(crate) fn entry_of(generation: u64, epoch: u64) -> u64 {
    if self::epoch(generation) == epoch { entry(generation) } else { 0 }
}
