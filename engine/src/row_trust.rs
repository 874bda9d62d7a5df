//! The encoder's decision which changed rows it takes.
//!
//! Rows that count from a save say nothing of changes before that save. A writer compares with the last save that it has encoded,
//! so it takes rows only if they count from that save or an earlier one, of the same session. Otherwise it compares all rows, as it
//! does for any other tensor.
//!
//! The writer checks every row that it takes for equal. If a row was left out, the state is encoded again without rows, and
//! this rank's rows are ignored for the rest of the session. So wrong rows never make a wrong snapshot, and fail no save.

use std::collections::BTreeMap;

use tensorcask::{Error, ErrorKind, TensorView};

/// A save of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SaveOfRank {
    /// Session (start of the job) of the save.
    pub session: u64,
    /// Number of the save.
    pub generation: u64,
}

/// What is known of the ranks of this host, by position. Keep it as long as the process: it does not depend on a writer.
#[derive(Debug, Default)]
pub(crate) struct RowTrust {
    ranks: Vec<TrustOfRank>,
}

#[derive(Debug, Clone, Copy, Default)]
struct TrustOfRank {
    /// Last save that this process has encoded.
    encoded: Option<SaveOfRank>,
    /// Session in which a save left out a row.
    distrusted: Option<u64>,
}

/// Errors of saves that left out a changed row, by position of the rank.
pub(crate) type LeftOut = BTreeMap<usize, Error>;

impl RowTrust {
    /// Whether the encoder may take the rows of a save that count from the save `since`.
    pub(crate) fn accepts(&self, rank: usize, save: SaveOfRank, since: u64) -> bool {
        let known = self.ranks.get(rank).copied().unwrap_or_default();
        let is_covered = |encoded: SaveOfRank| encoded.session == save.session && (since..=save.generation).contains(&encoded.generation);
        known.encoded.is_some_and(is_covered) && known.distrusted != Some(save.session)
    }

    /// Notes that the saves of all ranks are encoded, and which of them left out rows.
    pub(crate) fn on_encoded(&mut self, saves: &[SaveOfRank], left_out: &LeftOut) {
        self.ranks.resize(saves.len(), TrustOfRank::default());
        for (rank, (known, save)) in self.ranks.iter_mut().zip(saves).enumerate() {
            known.encoded = Some(*save);
            if let Some(error) = left_out.get(&rank) {
                known.distrusted = Some(save.session);
                tracing::warn!(
                    rank,
                    %error,
                    "a changed row was left out, so this save compared all rows, and so do the later saves of this rank in this session"
                );
            }
        }
    }
}

/// The tensors to encode again, without rows, after an encoder has refused them: `None` if rows cannot be the cause.
pub(crate) fn without_rows<'a>(tensors: &[TensorView<'a>], error: &Error) -> Option<Vec<TensorView<'a>>> {
    let may_be_cause = error.kind() == ErrorKind::InvalidArgument && tensors.iter().any(|tensor| tensor.changed_rows().is_some());
    may_be_cause.then(|| tensors.iter().cloned().map(TensorView::without_changed_rows).collect())
}

#[cfg(test)]
mod tests {
    use tensorcask::Error;

    use super::{LeftOut, RowTrust, SaveOfRank};

    fn save(session: u64, generation: u64) -> SaveOfRank {
        SaveOfRank { session, generation }
    }

    #[test]
    fn rows_count_only_from_a_save_that_is_encoded() {
        let mut trust = RowTrust::default();
        assert!(!trust.accepts(0, save(1, 2), 1), "this process has encoded nothing");
        trust.on_encoded(&[save(1, 5), save(1, 9)], &LeftOut::new());
        assert!(trust.accepts(0, save(1, 6), 5) && trust.accepts(0, save(1, 6), 3) && trust.accepts(1, save(1, 12), 9));
        assert!(!trust.accepts(0, save(1, 7), 6), "save 6 was dropped");
        assert!(!trust.accepts(0, save(2, 6), 5), "another start of the job");
        assert!(!trust.accepts(0, save(1, 4), 3), "a state that is older than the encoded one");
        assert!(!trust.accepts(2, save(1, 4), 3));
    }

    #[test]
    fn a_rank_that_left_out_a_row_is_not_trusted_until_the_job_starts_again() {
        let mut trust = RowTrust::default();
        trust.on_encoded(&[save(1, 5), save(1, 5)], &LeftOut::from([(1, Error::invalid("row 3"))]));
        trust.on_encoded(&[save(1, 6), save(1, 6)], &LeftOut::new());
        assert!(trust.accepts(0, save(1, 7), 6) && !trust.accepts(1, save(1, 7), 6));
        trust.on_encoded(&[save(2, 7), save(2, 7)], &LeftOut::new());
        assert!(trust.accepts(1, save(2, 8), 7));
    }
}
