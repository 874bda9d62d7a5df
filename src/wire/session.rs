//! Messages of the hosts of a session, and their places in the store. Spec: `spec/manifest.md`, clauses 6.2 to 6.5.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Id, seal};
use crate::version::FormatVersion;
use crate::{Limits, Result};

/// Name of a session: one start of a job on all its hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionName {
    /// Id of the training run, as in `store.json`.
    pub run: Id,
    /// Id of the session.
    pub session: Id,
}

/// A step of a session. The states of all ranks with the same step and attempt are parts of one snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionStep {
    /// How often the job has returned to an older step in this session.
    pub attempt: u64,
    /// Training step.
    pub step: u64,
}

/// Consecutive ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankRange {
    /// First rank.
    pub first: u32,
    /// Last rank.
    pub last: u32,
}

/// Name of the object with the parent of a step, in the folder of the step.
pub(crate) const PARENT_OBJECT: &str = "parent.json";

/// The parent that the ranks of a session use for their deltas at one step. Spec: `spec/manifest.md`, clause 6.3.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SharedParent {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    /// The parent; `None` for a base.
    pub parent: Option<Id>,
}

/// The beginning of a session. Spec: `spec/manifest.md`, clause 6.4.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionBeginning {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    /// Last log entry when the first host started; 0 for an empty log.
    pub after: u64,
}

/// The start of a rank of a session. Spec: `spec/manifest.md`, clause 6.4.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RankStart {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    /// A random id of the process.
    pub process: Id,
}

/// The end of some ranks of a session. Spec: `spec/manifest.md`, clause 6.5.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RanksEnded {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
}

/// A sealed message of a session.
pub(crate) trait SessionMessage: Serialize + DeserializeOwned {
    /// Its field `format`.
    const FORMAT: &'static str;

    fn encode(&self) -> Result<Vec<u8>> {
        seal::seal(self)
    }

    fn decode(bytes: &[u8], limits: &Limits) -> Result<Self> {
        let (json, _) = seal::open_seal(bytes, limits.max_entry_bytes)?;
        seal::check_preamble(json, Self::FORMAT)?;
        seal::parse(json)
    }
}

impl SessionMessage for SharedParent {
    const FORMAT: &'static str = "tensorcask-parent";
}

impl SessionMessage for SessionBeginning {
    const FORMAT: &'static str = "tensorcask-beginning";
}

impl SessionMessage for RankStart {
    const FORMAT: &'static str = "tensorcask-start";
}

impl SessionMessage for RanksEnded {
    const FORMAT: &'static str = "tensorcask-ended";
}

impl SharedParent {
    pub(crate) fn new(parent: Option<Id>) -> Self {
        let format = Self::FORMAT.to_owned();
        let version = FormatVersion::CURRENT.to_string();
        Self { format, version, must_understand: vec![], may_ignore: vec![], parent }
    }
}

impl SessionBeginning {
    pub(crate) fn new(after: u64) -> Self {
        let format = Self::FORMAT.to_owned();
        let version = FormatVersion::CURRENT.to_string();
        Self { format, version, must_understand: vec![], may_ignore: vec![], after }
    }
}

impl RankStart {
    pub(crate) fn new(process: Id) -> Self {
        let format = Self::FORMAT.to_owned();
        let version = FormatVersion::CURRENT.to_string();
        Self { format, version, must_understand: vec![], may_ignore: vec![], process }
    }
}

impl RanksEnded {
    pub(crate) fn new() -> Self {
        let format = Self::FORMAT.to_owned();
        let version = FormatVersion::CURRENT.to_string();
        Self { format, version, must_understand: vec![], may_ignore: vec![] }
    }
}

impl RankRange {
    /// Parses the name of an object with messages of these ranks.
    pub fn from_object(name: &str) -> Option<Self> {
        let (first, last) = name.strip_suffix(".json")?.split_once('-')?;
        let found = Self { first: first.parse().ok()?, last: last.parse().ok()? };
        (found.object() == name && found.first <= found.last).then_some(found)
    }

    /// Name of such an object.
    pub(crate) fn object(self) -> String {
        format!("{}-{}.json", self.first, self.last)
    }
}

impl SessionStep {
    /// Name of the folder with the messages of this step. Names sort as steps do.
    pub(crate) fn folder(self) -> String {
        format!("{:020}-{:020}", self.attempt, self.step)
    }

    /// Parses the name of such a folder.
    pub(crate) fn from_folder(name: &str) -> Option<Self> {
        let (attempt, step) = name.split_once('-')?;
        let found = Self { attempt: attempt.parse().ok()?, step: step.parse().ok()? };
        (found.folder() == name).then_some(found)
    }
}

impl SessionName {
    /// Folder of the messages of the session.
    pub(crate) fn folder(self) -> String {
        folder_of(self.session)
    }

    /// Path of the receipts of some ranks.
    pub(crate) fn receipts_path(self, at: SessionStep, ranks: RankRange) -> String {
        format!("{}/{}/{}", self.folder(), at.folder(), ranks.object())
    }

    /// Path of the shared parent of a step.
    pub(crate) fn parent_path(self, at: SessionStep) -> String {
        format!("{}/{}/{PARENT_OBJECT}", self.folder(), at.folder())
    }
}

/// Path of the beginning of a session. Not in its folder, which the leader lists again and again.
pub(crate) fn beginning_path(session: Id) -> String {
    format!("{}-start/beginning.json", folder_of(session))
}

/// Path of the start of a rank.
pub(crate) fn start_path(session: Id, rank: u32) -> String {
    format!("{}-start/{rank}.json", folder_of(session))
}

/// Folders of the messages of a session that count as long as it lasts.
pub(crate) fn lasting_folders(session: Id) -> [String; 2] {
    [format!("{}-start/", folder_of(session)), format!("{}/{ENDED_FOLDER}/", folder_of(session))]
}

/// Path of the note that some ranks have ended.
pub(crate) fn ended_path(session: Id, ranks: RankRange) -> String {
    format!("{}/{ENDED_FOLDER}/{}", folder_of(session), ranks.object())
}

fn folder_of(session: Id) -> String {
    format!("receipts/{session}")
}

/// Folder of the notes that ranks have ended. It sorts after all steps.
pub(crate) const ENDED_FOLDER: &str = "ended";

#[cfg(test)]
mod tests {
    use super::{
        RankRange, RankStart, RanksEnded, SessionBeginning, SessionMessage, SessionName, SessionStep, SharedParent, beginning_path,
        ended_path, start_path,
    };
    use crate::Limits;
    use crate::wire::Id;

    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Vectors {
        receipts: Vec<Receipts>,
        message: Vec<Message>,
    }

    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Receipts {
        session: Id,
        attempt: u64,
        step: u64,
        first: u32,
        last: u32,
        path: String,
    }

    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Message {
        name: String,
        path: String,
        text: String,
    }

    fn check<T: SessionMessage + PartialEq + std::fmt::Debug>(vector: &Message, path: String, message: T) {
        assert_eq!(vector.path, path, "{}", vector.name);
        assert_eq!(vector.text.as_bytes(), message.encode().unwrap(), "{}", vector.name);
        assert_eq!(T::decode(vector.text.as_bytes(), &Limits::default()).unwrap(), message, "{}", vector.name);
    }

    #[test]
    fn messages_are_those_of_the_spec() {
        let vectors: Vectors = toml::from_str(include_str!("../../spec/vectors/session.toml")).unwrap();
        let name = |session: Id| SessionName { run: Id([0; 16]), session };
        for Receipts { session, attempt, step, first, last, path } in vectors.receipts {
            let at = SessionStep { attempt, step };
            assert_eq!(name(session).receipts_path(at, RankRange { first, last }), path);
        }
        let session = Id([0x5e; 16]);
        let at = SessionStep { attempt: 1, step: 300 };
        for vector in &vectors.message {
            match vector.name.as_str() {
                "parent" => check(vector, name(session).parent_path(at), SharedParent::new(Some(Id([0x14; 16])))),
                "parent of a base" => check(vector, name(session).parent_path(at), SharedParent::new(None)),
                "beginning" => check(vector, beginning_path(session), SessionBeginning::new(8)),
                "start" => check(vector, start_path(session, 3), RankStart::new(Id([0x0a; 16]))),
                "ended" => check(vector, ended_path(session, RankRange { first: 2, last: 3 }), RanksEnded::new()),
                other => panic!("unknown vector {other}"),
            }
        }
        assert_eq!(vectors.message.len(), 5);
    }
}
