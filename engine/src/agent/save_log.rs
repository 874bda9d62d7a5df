//! The recent saves of a run, for status reports. Follows the saves of rank 0.

use std::collections::{BTreeMap, VecDeque};

use tensorcask::PreviousSave;

use crate::ipc::messages::SaveNote;
use crate::run::status::SaveStatus;

/// The recent saves of a run.
#[derive(Debug, Clone, Default)]
pub(super) struct SaveLog {
    saves: VecDeque<SaveStatus>,
    /// Measurements of saves that the trainer has not reported yet. An agent that starts anew may find a state in shared memory,
    /// and encode it, before the trainer's report of the save arrives.
    early: BTreeMap<u64, SaveStatus>,
    /// Start of the call of each save that is not committed yet, in milliseconds since 1970.
    begun_ms: BTreeMap<u64, u64>,
    /// Number of saves that failed for good.
    pub failed: u64,
    /// Newest commit in the first tier.
    pub last_commit: Option<Commit>,
}

/// A commit in the first tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Commit {
    pub step: u64,
    pub time_ms: u64,
}

/// Measurements of an encoded save.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Encoding {
    pub encode_ms: f64,
    pub stored_bytes: u64,
    /// `base` or `delta`.
    pub kind: String,
}

/// Measurements of an upload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct UploadTimes {
    pub upload_ms: f64,
    /// Bytes sent while the state was being encoded.
    pub ahead_bytes: u64,
    /// End of the upload, in milliseconds since 1970.
    pub time_ms: u64,
}

impl SaveLog {
    /// The last saves.
    pub(super) fn saves(&self) -> impl Iterator<Item = &SaveStatus> {
        self.saves.iter().skip(self.saves.len().saturating_sub(MAX_SAVES))
    }

    /// Times of the newest save that is committed in the first tier.
    pub(super) fn last_committed(&self) -> Option<PreviousSave> {
        let save = self.saves.iter().rev().find(|save| save.commit_ms.is_some())?;
        let &SaveStatus { step, stall_ms, encode_ms, upload_ms, commit_ms, .. } = save;
        Some(PreviousSave { step, stall_ms: Some(stall_ms), encode_ms, upload_ms, save_ms: commit_ms })
    }

    pub(super) fn on_saved(&mut self, note: &SaveNote, queue_depth: u64) {
        let early = self.early.remove(&note.generation).unwrap_or_default();
        if early.upload_ms.is_none() {
            self.begun_ms.insert(note.generation, note.time_ms);
        }
        self.saves.push_back(SaveStatus {
            step: note.step,
            generation: note.generation,
            stall_ms: note.stall_ms,
            copy_ms: note.copy_ms,
            bytes_in: note.bytes,
            queue_depth,
            ..early
        });
        let has_ended = |save: &SaveStatus| save.upload_ms.is_some() || save.error.is_some();
        while self.saves.len() > MAX_SAVES && (self.saves.len() > MAX_WAITING || self.saves.front().is_some_and(has_ended)) {
            self.saves.pop_front();
        }
    }

    pub(super) fn on_encoded(&mut self, generation: u64, encoding: Encoding) {
        let save = self.find_or_note(generation);
        (save.encode_ms, save.bytes_out) = (Some(encoding.encode_ms), Some(encoding.stored_bytes));
        save.kind = Some(encoding.kind);
    }

    pub(super) fn on_failed(&mut self, generation: u64, why: &str) {
        self.find_or_note(generation).error = Some(why.to_owned());
    }

    /// Notes that a save is committed in the first tier; returns its status, if its note has arrived.
    pub(super) fn on_committed(&mut self, generation: u64, times: UploadTimes) -> Option<SaveStatus> {
        let begun = self.begun_ms.remove(&generation);
        let save = self.find_or_note(generation);
        (save.upload_ms, save.ahead_bytes) = (Some(times.upload_ms), Some(times.ahead_bytes));
        save.commit_ms = begun.map(|begun| times.time_ms.saturating_sub(begun) as f64);
        self.find(generation).cloned()
    }

    /// Forgets the start of saves up to this generation, which may never have been encoded.
    pub(super) fn forget_starts(&mut self, durable: u64) {
        self.begun_ms.retain(|generation, _| *generation > durable);
    }

    fn find(&mut self, generation: u64) -> Option<&mut SaveStatus> {
        self.saves.iter_mut().rfind(|save| save.generation == generation)
    }

    /// The status of a save, or a place for what happens before its note arrives.
    fn find_or_note(&mut self, generation: u64) -> &mut SaveStatus {
        if let Some(at) = self.saves.iter().rposition(|save| save.generation == generation)
            && let Some(save) = self.saves.get_mut(at)
        {
            return save;
        }
        while self.early.len() >= MAX_SAVES {
            self.early.pop_first();
        }
        self.early.entry(generation).or_default()
    }
}

/// Number of saves in a status report.
const MAX_SAVES: usize = 64;
/// Number of saves to remember while they wait for their commit: the histograms need them.
const MAX_WAITING: usize = 4096;

#[cfg(test)]
mod tests {
    use super::{Encoding, SaveLog, UploadTimes};
    use crate::ipc::messages::SaveNote;

    /// A new agent may find a state in shared memory before the trainer has told it of the save.
    #[test]
    fn a_save_may_be_encoded_before_its_note_arrives() {
        let mut log = SaveLog::default();
        let note = |generation| SaveNote { generation, step: generation * 10, stall_ms: 0.0, copy_ms: 0.0, bytes: 0, time_ms: 0 };
        let encoding = || Encoding { encode_ms: 1.0, stored_bytes: 5, kind: "base".into() };
        log.on_encoded(1, encoding());
        assert_eq!(log.saves().count(), 0);
        log.on_saved(&note(1), 0);
        assert_eq!(log.on_committed(1, UploadTimes { upload_ms: 1.0, ahead_bytes: 0, time_ms: 9 }).unwrap().kind.as_deref(), Some("base"));
        // Committed before the note, too.
        log.on_encoded(2, encoding());
        assert_eq!(log.on_committed(2, UploadTimes { upload_ms: 2.0, ahead_bytes: 0, time_ms: 9 }), None);
        log.on_saved(&note(2), 0);
        let save = log.saves().last().unwrap();
        assert_eq!((save.step, save.bytes_out, save.upload_ms), (20, Some(5), Some(2.0)));
        // Saves of which no note comes take no more and more memory.
        (10..1000).for_each(|generation| log.on_failed(generation, "damaged"));
        assert_eq!(log.early.len(), super::MAX_SAVES);
    }
}
