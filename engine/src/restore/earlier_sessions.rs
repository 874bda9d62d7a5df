//! Sessions that began while the store did not answer, as the hosts have them in memory.
//!
//! Such a session is not in the log of the store until the store answers. If the job starts again before, its steps are
//! found by these records.

use serde::{Deserialize, Serialize};
use tensorcask::session::KnownLog;
use tensorcask::wire::Id;
use tensorcask::{Error, Result};

use super::hosts_survey::HostsSurvey;
use crate::os::files::{list_folders, remove_folder};
use crate::os::folders::RunFolder;
use crate::peers::other_hosts::{OtherHosts, read_message};
use crate::run::host_notes::HostNotes;

/// A session that began while the store did not answer. Each host keeps this in its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Beginning {
    pub session: Id,
    /// Number among the sessions that began after the same entry, from 1.
    pub number: u64,
    pub known: KnownLog,
}

impl Beginning {
    /// Name of the message.
    pub(crate) fn name_of(session: Id) -> String {
        format!("{session}/{NAME}")
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|e| Error::invalid(format!("cannot encode the beginning of a session: {e}")))
    }

    pub(crate) fn decode(bytes: &[u8], session: Id) -> Result<Self> {
        let wrong = |message: String| Error::corrupt(message).object(Self::name_of(session));
        let found: Self = serde_json::from_slice(bytes).map_err(|e| wrong(format!("not the beginning of a session: {e}")))?;
        match found.session == session {
            true => Ok(found),
            false => Err(wrong(format!("the beginning of session {} in the place of another", found.session))),
        }
    }
}

/// The sessions that began while the store did not answer, as the hosts have them in memory, without this one.
pub(crate) async fn beginnings(run: &RunFolder, others: &OtherHosts, survey: &HostsSurvey, own: Id) -> Vec<Beginning> {
    let mut found: Vec<Beginning> = Vec::new();
    for (place, name) in survey.messages(run, others, NAME).unwrap_or_default().into_iter().take(MOST_BEGINNINGS) {
        let Some(session) = name.split('/').next().and_then(|id| Id::from_hex(id).ok()).filter(|session| *session != own) else { continue };
        if found.iter().any(|known| known.session == session) {
            continue;
        }
        match read_message(&place, &name).await.and_then(|bytes| bytes.map(|bytes| Beginning::decode(&bytes, session)).transpose()) {
            Ok(beginning) => found.extend(beginning),
            Err(error) => tracing::warn!(%place, name, %error, "the beginning of an earlier session cannot be read"),
        }
    }
    found
}

/// Removes the messages of other sessions, except of those that began while the store did not answer: their steps may be the
/// newest until a later session has committed one.
pub(crate) fn remove_messages(run: &RunFolder, own: Id) -> Result<()> {
    remove_folders(run, |session, beginning| session != own && beginning.is_none())
}

/// Removes the messages of the sessions that began before this one, while the store did not answer. Call it once this session has
/// committed a step. `since`: the first log entry of this session.
pub(crate) fn remove_passed(run: &RunFolder, own: Id, since: u64) -> Result<()> {
    if HostNotes::read(run, own).after.is_none() {
        // The job has started again, with another session.
        return Ok(());
    }
    remove_folders(run, |session, beginning| session != own && beginning.is_some_and(|beginning| beginning.known.sequence < since))
}

/// Removes the messages of some sessions.
fn remove_folders(run: &RunFolder, is_old: impl Fn(Id, Option<Beginning>) -> bool) -> Result<()> {
    for folder in list_folders(&run.meeting())? {
        let Some(session) = folder.file_name().and_then(|name| Id::from_hex(name.to_str()?).ok()) else { continue };
        let beginning = std::fs::read(folder.join(NAME)).ok().and_then(|json| serde_json::from_slice(&json).ok());
        if is_old(session, beginning) {
            remove_folder(&folder)?;
        }
    }
    Ok(())
}

const NAME: &str = "beginning.json";
const MOST_BEGINNINGS: usize = 1000;
