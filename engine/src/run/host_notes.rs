//! Notes of this host about its session, in `session.json`: they outlive trainer and agent.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tensorcask::session::KnownLog;
use tensorcask::wire::Id;
use tensorcask::{Error, Result};

use crate::os::files::{read_file, replace_file};
use crate::os::folders::RunFolder;
use crate::os::lock::lock_beside;

/// Notes about the session that this host is in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostNotes {
    pub session: Id,
    /// Last log entry when the first host of the job started, as all hosts have agreed.
    pub after: Option<u64>,
    /// Ranks that have started in this session.
    pub started: Vec<u32>,
    /// Last writer id under which this host has opened the log, or tried to.
    pub led_as: Option<Id>,
    /// The log as this session knows it, if the session began while the store did not answer.
    #[serde(default)]
    pub known: Option<KnownLog>,
    /// Ranks that have started, and are not noted in the store yet, with the ids of their processes.
    #[serde(default)]
    pub unnoted: BTreeMap<u32, Id>,
    /// Whether the store has accepted a session that began without it.
    #[serde(default)]
    pub is_accepted: bool,
    /// Ranks that save no more.
    #[serde(default)]
    pub ended: BTreeSet<u32>,
}

impl HostNotes {
    /// The notes about this session. Notes that cannot be read count as none here, where nothing is written.
    pub(crate) fn read(folder: &RunFolder, session: Id) -> Self {
        Self::of_session(Self::find(folder).unwrap_or_default(), session)
    }

    fn of_session(found: Option<Self>, session: Id) -> Self {
        found.filter(|found| found.session == session).unwrap_or(Self {
            session,
            after: None,
            started: Vec::new(),
            led_as: None,
            known: None,
            unnoted: BTreeMap::new(),
            is_accepted: false,
            ended: BTreeSet::new(),
        })
    }

    fn find(folder: &RunFolder) -> Result<Option<Self>> {
        Ok(read_file(&folder.session_notes())?.and_then(|json| serde_json::from_slice(&json).ok()))
    }

    /// Whether the session began while the store did not answer, and the store has not accepted it yet.
    pub(crate) fn is_without_store(&self) -> bool {
        self.known.is_some() && !self.is_accepted
    }

    /// Changes the notes about this session. Trainers and the agent may do so at the same time. This is for trainers: it
    /// replaces notes about another session.
    pub(crate) fn update(folder: &RunFolder, session: Id, change: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let _held = lock_beside(&folder.session_notes())?;
        Self::of_session(Self::find(folder)?, session).change(folder, change)
    }

    /// The same for the agent, whose session may be over: if the notes are about another session, it changes nothing and
    /// returns `false`.
    pub(crate) fn update_current(folder: &RunFolder, session: Id, change: impl FnOnce(&mut Self)) -> Result<bool> {
        let _held = lock_beside(&folder.session_notes())?;
        let found = Self::find(folder)?;
        if found.as_ref().is_some_and(|found| found.session != session) {
            return Ok(false);
        }
        let change = |notes: &mut Self| {
            change(notes);
            Ok(())
        };
        Self::of_session(found, session).change(folder, change).map(|()| true)
    }

    fn change(self, folder: &RunFolder, change: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let mut notes = self.clone();
        change(&mut notes)?;
        if notes == self {
            return Ok(());
        }
        let json = serde_json::to_vec(&notes).map_err(|e| Error::invalid(format!("cannot encode the notes about the session: {e}")))?;
        replace_file(&folder.session_notes(), &json)
    }

    /// Notes whether a rank that has started saves no more, unless the session is over.
    pub(crate) fn note_end(folder: &RunFolder, session: Id, rank: u32, has_ended: bool) -> Result<()> {
        let note = |notes: &mut Self| match has_ended && notes.started.contains(&rank) {
            true => _ = notes.ended.insert(rank),
            false => _ = notes.ended.remove(&rank),
        };
        Self::update_current(folder, session, note).map(|_| ())
    }

    /// Notes that a rank starts. A rank starts once in a session: states from before and after a restart must not become one
    /// snapshot. `unnoted`: the id of the process, if it is not in the store yet.
    pub(crate) fn start_rank(folder: &RunFolder, session: Id, rank: u32, after: u64, unnoted: Option<Id>) -> Result<()> {
        Self::update(folder, session, |notes| {
            if notes.started.contains(&rank) {
                let message = format!(
                    "rank {rank} has started in this session before. Give each start of the job a session of its own, the same on all hosts"
                );
                return Err(Error::invalid(message));
            }
            notes.started.push(rank);
            notes.ended.remove(&rank);
            notes.unnoted.extend(unnoted.map(|process| (rank, process)));
            notes.after = Some(after);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use tensorcask::wire::Id;

    use super::HostNotes;
    use crate::os::folders::EngineFolder;

    #[test]
    fn a_rank_starts_once_in_a_session_and_late_news_of_an_older_one_change_nothing() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = EngineFolder::open(Some(&temporary.path().join("e"))).unwrap().run("0");
        folder.create().unwrap();
        let first = Id([1; 16]);
        let second = Id([2; 16]);
        HostNotes::start_rank(&folder, first, 1, 7, None).unwrap();
        HostNotes::start_rank(&folder, first, 0, 7, None).unwrap();
        assert!(HostNotes::start_rank(&folder, first, 1, 7, None).is_err());
        assert_eq!(HostNotes::read(&folder, first).after, Some(7));
        HostNotes::start_rank(&folder, second, 1, 9, None).unwrap();
        HostNotes::note_end(&folder, first, 0, true).unwrap();
        assert!(!HostNotes::update_current(&folder, first, |notes| notes.led_as = Some(first)).unwrap(), "that session is over");
        HostNotes::note_end(&folder, second, 1, true).unwrap();
        HostNotes::note_end(&folder, second, 0, true).unwrap();
        let notes = HostNotes::read(&folder, second);
        assert_eq!((notes.started, notes.ended), (vec![1], [1].into()), "rank 0 has not started");
        HostNotes::note_end(&folder, second, 1, false).unwrap();
        assert!(HostNotes::read(&folder, second).ended.is_empty());
    }
}
