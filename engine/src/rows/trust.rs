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

/// Last encoded save and trust of each rank of this host, by position. It lives as long as the process: it does not depend on a
/// writer.
#[derive(Debug, Default)]
pub(crate) struct RowTrust {
    first_rank: u32,
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
    /// For the ranks of a host, from this one on.
    pub(crate) fn of_ranks(first_rank: u32) -> Self {
        Self { first_rank, ranks: Vec::new() }
    }

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
                    rank = u64::from(self.first_rank).saturating_add(rank as u64),
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
    use std::collections::VecDeque;

    use tensorcask::{Dtype, Error, Rect, TensorView};

    use super::super::journal::{RowClaim, RowJournal, ShardOfState};
    use super::super::set::with_rows;
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

    const ROWS: usize = 30;

    /// A trainer with the versions of its rows, and the states that wait for the agent.
    #[derive(Default)]
    struct Trainer {
        session: u64,
        generation: u64,
        journal: RowJournal,
        versions: [u64; ROWS],
        waiting: VecDeque<(SaveOfRank, [u64; ROWS], RowClaim)>,
    }

    impl Trainer {
        /// Names rows that changed since the save before. `succeeds`: whether the state gets a slot.
        fn save(&mut self, rows: Option<&[u64]>, encoded: u64, succeeds: bool) {
            let rect = Rect::whole(&[ROWS as u64, 1]);
            let shard = ShardOfState { name: "table", rect: &rect, bytes: ROWS, rows, names_rows: true };
            let claim = self.journal.claims([shard].into_iter(), encoded).remove(0);
            if succeeds {
                self.generation += 1;
                self.journal.on_saved(self.generation);
                self.waiting.push_back((SaveOfRank { session: self.session, generation: self.generation }, self.versions, claim));
            }
        }
    }

    #[test]
    fn rows_that_are_taken_cover_all_changes_whatever_is_dropped_skipped_or_killed() {
        let data = [0; ROWS];
        let view = TensorView::new("table", Dtype::U8, &[ROWS as u64, 1], &data).unwrap();
        let mut taken = 0;
        for seed in 0..500u64 {
            let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut random = |n: u64| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (x >> 33) % n
            };
            let mut trainer = Trainer::default();
            let mut trust = RowTrust::default();
            // Versions that the writer compares with, and the newest encoded save, which the arena remembers.
            let mut base = [0; ROWS];
            let mut encoded = 0;
            for _ in 0..200 {
                match random(20) {
                    // A new trainer goes on from the newest encoded state. Its states in the arena may still be encoded.
                    0 => {
                        let (session, generation, waiting) =
                            (trainer.session + 1, trainer.generation, std::mem::take(&mut trainer.waiting));
                        trainer = Trainer { session, generation, versions: base, waiting, ..Trainer::default() };
                    }
                    1 => trust = RowTrust::default(),
                    // A state is dropped.
                    2..=4 => drop(trainer.waiting.pop_front()),
                    5..=11 => {
                        let rows: Vec<u64> = (0..random(4)).map(|_| random(ROWS as u64)).collect();
                        rows.iter().for_each(|row| trainer.versions[*row as usize] += 1 + random(1000));
                        trainer.save((random(15) > 0).then_some(&rows), encoded, random(6) > 0);
                    }
                    _ => {
                        let Some((save, versions, claim)) = trainer.waiting.pop_front() else { continue };
                        if let RowClaim::Since { save: since, rows } = &claim
                            && trust.accepts(0, save, *since)
                        {
                            let named = with_rows(view.clone(), rows.bytes()).unwrap();
                            let named = named.changed_rows().unwrap();
                            let is_covered = |row: usize| base[row] == versions[row] || named.contains(&(row as u64));
                            assert!((0..ROWS).all(is_covered), "seed {seed}: {save:?} since {since}: {named:?}");
                            taken += 1;
                        }
                        (base, encoded) = (versions, save.generation);
                        trust.on_encoded(&[save], &LeftOut::new());
                    }
                }
            }
        }
        assert!(taken > 5000, "{taken}");
    }
}
