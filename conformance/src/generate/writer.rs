//! Writes stores: a small writer with fixed ids and times. Each object may be edited before it is sealed.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::dtypes::{DTYPES, chunk_elements, unit};
use super::forge::{self, Blob, Cask, Chunk, Draft, Listed, Shard, Table, digest_of_cask, id};
use super::sketch::{Input, sorted};
use crate::failure::Failure;
use crate::files::hex;

/// A shard of a state, in one or more chunks.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub offset: Vec<u64>,
    pub shape: Vec<u64>,
    pub slot: u32,
    pub data: Vec<u8>,
}

/// A tensor of a state.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub name: String,
    pub dtype: u8,
    pub shape: Vec<u64>,
    pub role: &'static str,
    /// Parameter, if it differs from the name.
    pub param: Option<&'static str>,
    /// Row of the tensor that this one is tied to.
    pub alias_of: Option<u32>,
    pub parts: Vec<Part>,
}

impl Entry {
    /// Returns a whole tensor of rank 0.
    pub(crate) fn whole(name: &str, dtype: u8, shape: &[u64], role: &'static str, data: &[u8]) -> Self {
        let slot = if role == "model" { 0 } else { 1 };
        let part = Part { offset: vec![0; shape.len()], shape: shape.to_vec(), slot, data: data.to_vec() };
        Self { name: name.to_owned(), dtype, shape: shape.to_vec(), role, param: None, alias_of: None, parts: vec![part] }
    }

    fn param(&self) -> &str {
        self.param.unwrap_or(&self.name)
    }
}

/// Content of a snapshot.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub step: u64,
    pub id: [u8; 16],
    /// Tensors in ascending order of names.
    pub entries: Vec<Entry>,
    /// Blobs by the slot of their cask.
    pub blobs: Vec<(u32, Vec<Blob>)>,
    pub metadata: BTreeMap<String, String>,
    pub user: Map<String, Value>,
}

impl State {
    pub(crate) fn new(step: u64, entries: Vec<Entry>) -> Self {
        Self { step, id: id(step as u8), entries, blobs: vec![], metadata: BTreeMap::new(), user: Map::new() }
    }

    /// Returns the expected report of the step.
    pub(crate) fn expected(&self) -> Value {
        let tensors: Map<String, Value> = self
            .entries
            .iter()
            .map(|entry| {
                let stored = entry.alias_of.map_or(entry, |alias| &self.entries[alias as usize]);
                // Shards of these states split only the first dimension.
                let data: Vec<u8> = stored.parts.iter().flat_map(|part| part.data.iter().copied()).collect();
                let value = json!({
                    "dtype": DTYPES[usize::from(entry.dtype) - 1].0, "shape": entry.shape, "role": entry.role, "param": entry.param(),
                    "sha256": hex(&Sha256::digest(data)),
                });
                (entry.name.clone(), value)
            })
            .collect();
        let blobs: Vec<Value> = self
            .blobs
            .iter()
            .flat_map(|(_, blobs)| blobs)
            .map(|blob| json!({ "rank": blob.rank, "name": blob.name, "sha256": hex(&Sha256::digest(&blob.bytes)) }))
            .collect();
        json!({ "tensors": tensors, "blobs": blobs, "metadata": self.metadata, "user": self.user })
    }

    fn directory(&self) -> Table {
        let listed: Vec<Listed> = self
            .entries
            .iter()
            .map(|entry| Listed {
                name: entry.name.clone(),
                dtype: entry.dtype,
                shape: entry.shape.clone(),
                role: entry.role.into(),
                param: entry.param().to_owned(),
                alias_of: entry.alias_of,
                shards: entry.parts.iter().map(|part| (part.offset.clone(), part.shape.clone(), part.slot)).collect(),
            })
            .collect();
        forge::directory(&listed)
    }

    /// Returns the content digest of each role.
    fn content(&self) -> BTreeMap<String, String> {
        let mut roles: BTreeMap<&str, Vec<u8>> = BTreeMap::new();
        for entry in &self.entries {
            let bytes = roles.entry(entry.role).or_default();
            let text = |bytes: &mut Vec<u8>, text: &str| {
                bytes.extend(forge::u32s([text.len() as u32]));
                bytes.extend_from_slice(text.as_bytes());
            };
            text(bytes, &entry.name);
            if let Some(alias) = entry.alias_of {
                bytes.push(0);
                text(bytes, &self.entries[alias as usize].name);
                continue;
            }
            bytes.push(entry.dtype);
            bytes.extend(forge::u32s([entry.shape.len() as u32]));
            bytes.extend(forge::u64s(entry.shape.iter().copied()));
            bytes.extend(forge::u32s([entry.parts.len() as u32]));
            for part in &entry.parts {
                bytes.extend(forge::u64s(part.offset.iter().chain(&part.shape).copied()));
                bytes.extend(forge::u32s(chunks_of(entry.dtype, part).map(crc32fast::hash)));
            }
        }
        roles.into_iter().map(|(role, bytes)| (role.to_owned(), hex(&Sha256::digest(bytes)))).collect()
    }
}

/// Returns the chunks of a shard.
fn chunks_of(dtype: u8, part: &Part) -> impl Iterator<Item = &[u8]> {
    let bits = DTYPES[usize::from(dtype) - 1].1;
    part.data.chunks(chunk_elements(dtype, &part.shape) * bits / 8)
}

/// Content of `snapshots/<step>-<id>.json`, with its fields in the order of the spec.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Manifest {
    pub format: String,
    pub version: String,
    pub must_understand: Vec<String>,
    pub may_ignore: Vec<String>,
    pub id: String,
    pub step: u64,
    pub kind: String,
    pub parent: Option<Parent>,
    pub directory: String,
    pub content: BTreeMap<String, String>,
    pub casks: Vec<CaskRef>,
    pub tensor_bytes: u64,
    pub time_ms: u64,
    pub metadata: BTreeMap<String, String>,
    pub user: Map<String, Value>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Parent {
    pub snapshot: String,
    pub content: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct CaskRef {
    pub slot: u32,
    pub id: String,
    pub bytes: u64,
    pub index_offset: u64,
    pub root_offset: u64,
    pub digest: String,
}

/// Entry of the log.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct LogEntry {
    pub format: String,
    pub version: String,
    pub must_understand: Vec<String>,
    pub may_ignore: Vec<String>,
    pub sequence: u64,
    pub previous: Option<String>,
    pub token: String,
    pub writer: String,
    pub time_ms: u64,
    pub event: Value,
}

/// A snapshot before its objects are sealed.
pub(crate) struct Unsealed {
    pub step: u64,
    pub casks: Vec<(u32, Cask)>,
    pub directory: Table,
    manifest: Manifest,
}

/// A snapshot whose casks and directory are written.
pub(crate) struct Sealed {
    pub step: u64,
    /// Finished casks by id.
    pub casks: Vec<(String, Vec<u8>)>,
    pub directory: Vec<u8>,
    pub manifest: Manifest,
}

impl Unsealed {
    pub(crate) fn seal(self) -> Sealed {
        self.seal_with(|_, _| {})
    }

    /// Seals the objects after an edit of the cask drafts.
    pub(crate) fn seal_with(self, edit: impl Fn(u32, &mut Draft)) -> Sealed {
        let Self { step, casks, directory, mut manifest } = self;
        let directory = directory.bytes();
        manifest.directory = hex(&Sha256::digest(&directory));
        let mut files = Vec::new();
        for (slot, cask) in casks {
            let mut draft = cask.draft();
            edit(slot, &mut draft);
            let (bytes, places) = draft.finish();
            manifest.casks.push(CaskRef {
                slot,
                id: hex(&cask.id),
                bytes: bytes.len() as u64,
                index_offset: places.index_offset as u64,
                root_offset: places.root_offset as u64,
                digest: hex(&digest_of_cask(&bytes, places.root_offset)),
            });
            files.push((hex(&cask.id), bytes));
        }
        Sealed { step, casks: files, directory, manifest }
    }
}

/// A store that is being written.
pub(crate) struct Store {
    pub objects: BTreeMap<String, Vec<u8>>,
    sequence: u64,
    previous: Option<String>,
    /// Author of the next entries.
    pub writer: [u8; 16],
    states: BTreeMap<u64, State>,
    /// Live steps with their expected reports.
    expected: BTreeMap<u64, Value>,
    /// Latest step that a reader finds.
    pub latest: Option<u64>,
    /// Number of snapshots that got another manifest.
    compacted: u8,
}

const WRITER: u8 = 0x5e;
const TIME_MS: u64 = 1_767_225_600_000;

impl Store {
    /// Returns a store that a writer has opened.
    pub(crate) fn new() -> Result<Self, Failure> {
        let mut store = Self {
            objects: BTreeMap::new(),
            sequence: 0,
            previous: None,
            writer: id(WRITER),
            states: BTreeMap::new(),
            expected: BTreeMap::new(),
            latest: None,
            compacted: 0,
        };
        let file =
            json!({ "format": "tensorcask-store", "version": "1.0", "must_understand": [], "may_ignore": [], "run": hex(&id(0x40)) });
        store.objects.insert("store.json".into(), seal(&sorted(&file).to_string()));
        store.append(json!({ "kind": "opened" }))?;
        Ok(store)
    }

    /// Commits an event.
    pub(crate) fn append(&mut self, event: Value) -> Result<(), Failure> {
        self.append_with(event, |_| {}, |json| json)
    }

    /// Commits an event after edits of the entry and of its JSON.
    pub(crate) fn append_with(
        &mut self,
        event: Value,
        edit: impl Fn(&mut LogEntry),
        edit_json: impl Fn(String) -> String,
    ) -> Result<(), Failure> {
        self.sequence += 1;
        let mut entry = LogEntry {
            format: "tensorcask-log".into(),
            version: "1.0".into(),
            must_understand: vec![],
            may_ignore: vec![],
            sequence: self.sequence,
            previous: self.previous.clone(),
            token: format!("70{:030x}", self.sequence),
            writer: hex(&self.writer),
            time_ms: TIME_MS + self.sequence,
            event: sorted(&event),
        };
        edit(&mut entry);
        let bytes = seal(&edit_json(serde_json::to_string(&entry)?));
        self.previous = Some(digest_of(&bytes));
        self.objects.insert(format!("log/{:020}.json", self.sequence), bytes);
        Ok(())
    }

    /// Drafts the save of a state: a base, or a delta against the snapshot of an earlier step.
    pub(crate) fn draft(&mut self, state: State, parent: Option<u64>) -> Unsealed {
        self.latest = Some(state.step);
        self.draft_of(state, parent, 0)
    }

    /// Drafts the compaction of a snapshot: the state again, in casks with other names.
    pub(crate) fn redraft(&mut self, state: State, parent: Option<u64>) -> Unsealed {
        self.compacted += 1;
        self.draft_of(state, parent, self.compacted)
    }

    fn draft_of(&mut self, state: State, parent: Option<u64>, compacted: u8) -> Unsealed {
        let parent = parent.and_then(|step| self.states.get(&step));
        let mut casks: BTreeMap<u32, Cask> = BTreeMap::new();
        let cask_id = |slot: u32| {
            let mut id = state.id;
            (id[13], id[14], id[15]) = (id[13] ^ compacted, 0xca, slot as u8);
            id
        };
        for entry in &state.entries {
            let mut shards: BTreeMap<u32, Vec<Shard>> = BTreeMap::new();
            for part in &entry.parts {
                let base = parent.and_then(|parent| find(parent, entry, part));
                if base.is_some_and(|base| base.data == part.data) && !part.data.is_empty() {
                    continue;
                }
                let mut old = base.map(|base| chunks_of(entry.dtype, base));
                let chunks =
                    chunks_of(entry.dtype, part).map(|new| encode(old.as_mut().and_then(Iterator::next), new, unit(entry.dtype))).collect();
                let shard = Shard { offset: part.offset.clone(), shape: part.shape.clone(), chunks };
                shards.entry(part.slot).or_default().push(shard);
            }
            for (slot, shards) in shards {
                let tensor = forge::Tensor { name: entry.name.clone(), dtype: entry.dtype, shape: entry.shape.clone(), shards };
                casks.entry(slot).or_insert_with(|| Cask::new(cask_id(slot), vec![])).tensors.push(tensor);
            }
        }
        for (slot, blobs) in &state.blobs {
            casks.entry(*slot).or_insert_with(|| Cask::new(cask_id(*slot), vec![])).blobs.clone_from(blobs);
        }
        let tensor_bytes = |entry: &Entry| {
            let elements: u64 = if entry.shape.contains(&0) { 0 } else { entry.shape.iter().product() };
            (elements * DTYPES[usize::from(entry.dtype) - 1].1 as u64).div_ceil(8)
        };
        let manifest = Manifest {
            format: "tensorcask-snapshot".into(),
            version: "1.0".into(),
            must_understand: vec![],
            may_ignore: vec![],
            id: hex(&state.id),
            step: state.step,
            kind: if parent.is_some() { "delta" } else { "base" }.into(),
            parent: parent.map(|parent| Parent { snapshot: hex(&parent.id), content: parent.content() }),
            directory: String::new(),
            content: state.content(),
            casks: vec![],
            tensor_bytes: state.entries.iter().filter(|entry| entry.alias_of.is_none()).map(tensor_bytes).sum(),
            time_ms: TIME_MS,
            metadata: state.metadata.clone(),
            user: state.user.iter().collect::<BTreeMap<_, _>>().into_iter().map(|(key, value)| (key.clone(), sorted(value))).collect(),
        };
        let unsealed = Unsealed { step: state.step, casks: casks.into_iter().collect(), directory: state.directory(), manifest };
        self.expected.insert(state.step, state.expected());
        self.states.insert(state.step, state);
        unsealed
    }

    /// Writes the objects of a snapshot and commits the snapshot.
    pub(crate) fn commit(&mut self, snapshot: Sealed) -> Result<(), Failure> {
        self.commit_with(snapshot, |_| {}, |json| json)
    }

    /// Writes the objects of a snapshot and commits the snapshot, after edits of the entry's event and of the
    /// manifest's JSON.
    pub(crate) fn commit_with(
        &mut self,
        snapshot: Sealed,
        edit_event: impl Fn(&mut Value),
        edit_json: impl Fn(String) -> String,
    ) -> Result<(), Failure> {
        let Sealed { step, casks, directory, manifest } = snapshot;
        for (id, bytes) in casks {
            self.objects.insert(format!("casks/{id}.cask"), bytes);
        }
        self.objects.insert(format!("directories/{}", hex(&Sha256::digest(&directory))), directory);
        let state = self.states.get(&step).ok_or("a snapshot without a state")?;
        let id = hex(&state.id);
        let parent = manifest.parent.as_ref().map(|parent| parent.snapshot.clone());
        let bytes = seal(&edit_json(serde_json::to_string(&manifest)?));
        let mut event = json!({ "kind": "added", "snapshot": id, "step": step, "parent": parent, "manifest": digest_of(&bytes) });
        edit_event(&mut event);
        self.objects.insert(format!("snapshots/{step}-{id}.json"), bytes);
        self.append(event)
    }

    /// Writes the objects of a compacted snapshot and commits them, after an edit of the entry's event.
    pub(crate) fn commit_compacted(
        &mut self,
        snapshot: Sealed,
        roles: Option<&[&str]>,
        edit_event: impl Fn(&mut Value),
    ) -> Result<(), Failure> {
        let Sealed { step, casks, directory, manifest } = snapshot;
        for (id, bytes) in casks {
            self.objects.insert(format!("casks/{id}.cask"), bytes);
        }
        self.objects.insert(format!("directories/{}", hex(&Sha256::digest(&directory))), directory);
        let id = self.id_of(step);
        let parent = manifest.parent.as_ref().map(|parent| parent.snapshot.clone());
        let bytes = seal(&serde_json::to_string(&manifest)?);
        let digest = digest_of(&bytes);
        let mut event = json!({ "kind": "compacted", "snapshot": id, "parent": parent, "manifest": digest, "roles": roles });
        edit_event(&mut event);
        self.objects.insert(format!("snapshots/{step}-{id}-{digest}.json"), bytes);
        self.append(event)
    }

    /// Compacts a snapshot correctly: into a base, or with its current parent.
    pub(crate) fn compact(&mut self, step: u64, parent: Option<u64>) -> Result<(), Failure> {
        let state = self.states.get(&step).ok_or("a step that was not saved")?.clone();
        let snapshot = self.redraft(state, parent);
        self.commit_compacted(snapshot.seal(), None, |_| {})
    }

    /// Drops all roles of a base except `roles`.
    pub(crate) fn reduce(&mut self, step: u64, roles: &[&str]) -> Result<(), Failure> {
        self.reduce_with(step, roles, |_| {})
    }

    /// Drops roles after an edit of the entry's event.
    pub(crate) fn reduce_with(&mut self, step: u64, roles: &[&str], edit_event: impl Fn(&mut Value)) -> Result<(), Failure> {
        let mut state = self.states.get(&step).ok_or("a step that was not saved")?.clone();
        state.entries.retain(|entry| roles.contains(&entry.role));
        let snapshot = self.redraft(state, None);
        self.commit_compacted(snapshot.seal(), Some(roles), edit_event)
    }

    /// Forgets steps.
    pub(crate) fn forget(&mut self, steps: &[u64], latest: u64) -> Result<(), Failure> {
        let ids: Vec<String> = steps.iter().map(|&step| self.id_of(step)).collect();
        steps.iter().for_each(|&step| self.drop_expected(step, latest));
        self.append(json!({ "kind": "forgotten", "snapshots": ids }))
    }

    /// Collects steps and deletes the objects that only they needed.
    pub(crate) fn collect(&mut self, steps: &[u64]) -> Result<(), Failure> {
        let ids: Vec<String> = steps.iter().map(|&step| self.id_of(step)).collect();
        for id in &ids {
            self.objects.retain(|path, _| !(path.starts_with("snapshots/") && path.contains(id.as_str())));
            self.objects.retain(|path, _| !path.starts_with(&format!("casks/{}", &id[..26])));
        }
        self.append(json!({ "kind": "collecting", "snapshots": ids }))
    }

    /// Deletes the objects whose path contains `text`.
    pub(crate) fn delete(&mut self, text: &str) {
        self.objects.retain(|path, _| !path.contains(text));
    }

    /// Saves a state correctly.
    pub(crate) fn save(&mut self, state: State, parent: Option<u64>) -> Result<(), Failure> {
        let snapshot = self.draft(state, parent);
        self.commit(snapshot.seal())
    }

    /// Marks a step as no longer live.
    pub(crate) fn drop_expected(&mut self, step: u64, latest: u64) {
        self.expected.remove(&step);
        self.latest = Some(latest);
    }

    /// Returns the snapshot id of a step.
    pub(crate) fn id_of(&self, step: u64) -> String {
        self.states.get(&step).map(|state| hex(&state.id)).unwrap_or_default()
    }

    /// Returns the expected report of the store.
    pub(crate) fn expected(&self) -> Value {
        let steps: Map<String, Value> = self.expected.iter().map(|(step, value)| (step.to_string(), value.clone())).collect();
        json!({ "latest": self.latest, "steps": steps })
    }

    /// Returns the path of the `nth` object in a folder, ordered by name.
    pub(crate) fn path(&self, folder: &str, nth: usize) -> Result<String, Failure> {
        let found = self.objects.keys().filter(|path| path.starts_with(folder)).nth(nth);
        Ok(found.ok_or_else(|| format!("no object {nth} in {folder}"))?.clone())
    }
}

/// Commits a snapshot inside its log entry, after an edit of the event and of the bytes that follow the seal: the
/// manifest and the casks.
pub(crate) fn commit_inline(store: &mut Store, snapshot: Sealed, edit: impl Fn(&mut Value, &mut Vec<u8>)) -> Result<(), Failure> {
    let Sealed { step, casks, directory, manifest } = snapshot;
    store.objects.insert(format!("directories/{}", hex(&Sha256::digest(&directory))), directory);
    let parent = manifest.parent.as_ref().map(|parent| parent.snapshot.clone());
    let mut held = seal(&serde_json::to_string(&manifest)?);
    let mut event = json!({
        "kind": "added", "snapshot": store.id_of(step), "step": step, "parent": parent, "manifest": digest_of(&held), "inline": held.len(),
    });
    casks.into_iter().for_each(|(_, bytes)| held.extend(bytes));
    edit(&mut event, &mut held);
    store.append(event)?;
    let entry = store.objects.get_mut(&format!("log/{:020}.json", store.sequence)).ok_or("no entry")?;
    entry.extend(held);
    Ok(())
}

/// Saves a state inside its log entry.
pub(crate) fn save_inline(store: &mut Store, state: State, parent: Option<u64>) -> Result<(), Failure> {
    let snapshot = store.draft(state, parent);
    commit_inline(store, snapshot.seal(), |_, _| {})
}

impl From<Store> for Input {
    fn from(store: Store) -> Self {
        Self::Store(store.objects)
    }
}

/// Returns the parent's shard that a delta is made against.
fn find<'a>(parent: &'a State, entry: &Entry, part: &Part) -> Option<&'a Part> {
    let same = parent.entries.iter().find(|e| e.name == entry.name && e.dtype == entry.dtype && e.shape == entry.shape)?;
    same.parts.iter().find(|p| p.offset == part.offset && p.shape == part.shape)
}

fn encode(old: Option<&[u8]>, new: &[u8], unit: usize) -> Chunk {
    match old {
        Some(old) if old == new => Chunk::unchanged(crc32fast::hash(new)),
        Some(old) => Chunk::bitmask(old, new, unit),
        None if new.len() > unit && new.chunks(unit).all(|other| other == &new[..unit]) => Chunk::constant(&new[..unit], new.len()),
        None => Chunk::raw(new),
    }
}

/// Seals JSON.
pub(crate) fn seal(json: &str) -> Vec<u8> {
    let body = format!("{json}\n");
    let digest = hex(&Sha256::digest(&body));
    format!("{body}sha256:{digest}\n").into_bytes()
}

/// Returns the digest of a sealed object.
pub(crate) fn digest_of(sealed: &[u8]) -> String {
    const SEAL_BYTES: usize = 72;
    hex(&Sha256::digest(&sealed[..sealed.len() - SEAL_BYTES]))
}
