//! Logs of arbitrary events under right seals, compared with a small model of the spec. The library rejects the same
//! logs and sees the same live steps as the model. It resolves any chain without an endless loop or a panic.
#![no_main]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use tensorcask::maintain::{self, VerifyDepth, VerifyOptions};
use tensorcask::wire::{Digest, Event, Id, LogEntry, StoreFile};
use tensorcask::{ErrorKind, Store, StoreOptions};

#[derive(Debug, Arbitrary)]
enum Step {
    Opened,
    Added { id: u8, step: u8, parent: Option<u8>, roles: Option<Vec<u8>> },
    Forgotten(Vec<u8>),
    Pinned(u8, bool),
    Compacted { id: u8, parent: Option<u8>, roles: Option<Vec<u8>> },
    Collecting(Vec<u8>),
    Upgraded(bool),
}

#[derive(Debug, Arbitrary)]
struct Input {
    steps: Vec<(Step, u8)>,
}

#[derive(Debug, Clone)]
struct Known {
    step: u64,
    parent: Option<u8>,
    roles: Option<Vec<u8>>,
    live: bool,
    collected: bool,
}

const MOST: usize = 40;

fuzz_target!(|input: Input| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(run(input));
});

fn id(number: u8) -> Id {
    Id([number % 8; 16])
}

fn names(roles: &[u8]) -> Vec<String> {
    roles.iter().map(|role| format!("r{}", role % 4)).collect()
}

/// Roles as numbers, if a snapshot may be reduced to them: some, strictly ascending.
fn reduction(roles: &[u8]) -> Option<Vec<u8>> {
    let roles: Vec<u8> = roles.iter().map(|role| role % 4).collect();
    (!roles.is_empty() && roles.is_sorted_by(|a, b| a < b)).then_some(roles)
}

fn event(step: &Step) -> Event {
    let ids = |numbers: &[u8]| numbers.iter().map(|&number| id(number)).collect();
    match step {
        Step::Opened => Event::Opened { leader: None },
        Step::Added { id: number, step, parent, roles } => {
            let snapshot = id(*number);
            let step = u64::from(step % 4);
            let parent = parent.map(id);
            Event::Added { snapshot, step, parent, manifest: Digest([1; 32]), inline: None, roles: roles.as_deref().map(names) }
        }
        Step::Forgotten(numbers) => Event::Forgotten { snapshots: ids(numbers) },
        Step::Pinned(number, pinned) => Event::Pinned { snapshot: id(*number), pinned: *pinned },
        Step::Compacted { id: number, parent, roles } => {
            let roles = roles.as_deref().map(names);
            Event::Compacted { snapshot: id(*number), parent: parent.map(id), manifest: Digest([2; 32]), roles }
        }
        Step::Collecting(numbers) => Event::Collecting { snapshots: ids(numbers) },
        Step::Upgraded(readers) => {
            let features = |on: bool| if on { vec!["example".to_owned()] } else { vec![] };
            Event::Upgraded { must_understand: features(*readers), may_ignore: features(!readers) }
        }
    }
}

/// Checks clauses 3.4 to 3.6 and 4 of the log's page. Returns `None` if an entry violates them, and `Some(false)` if an
/// entry requires an unknown feature.
fn apply(known: &mut BTreeMap<u8, Known>, step: &Step) -> Option<bool> {
    let at = |number: &u8| number % 8;
    match step {
        Step::Opened => {}
        Step::Added { id, step, parent, roles } => {
            if known.contains_key(&at(id)) || parent.as_ref().is_some_and(|parent| !known.contains_key(&at(parent))) {
                return None;
            }
            let step = u64::from(step % 4);
            known.values_mut().filter(|other| other.step == step).for_each(|other| other.live = false);
            let parent = parent.as_ref().map(at);
            let roles = match roles {
                Some(roles) => Some(reduction(roles)?),
                None => None,
            };
            known.insert(at(id), Known { step, parent, roles, live: true, collected: false });
        }
        Step::Forgotten(ids) | Step::Collecting(ids) => {
            for id in ids {
                let found = known.get_mut(&at(id))?;
                found.live = false;
                found.collected |= matches!(step, Step::Collecting(_));
            }
        }
        Step::Pinned(id, _) => _ = known.get(&at(id))?,
        Step::Compacted { id, parent, roles } => {
            let found = known.get_mut(&at(id))?;
            let parent = parent.as_ref().map(at);
            if parent.is_some() && parent != found.parent {
                return None;
            }
            if let Some(roles) = roles {
                let roles = reduction(roles)?;
                let had = |role: &u8| found.roles.as_ref().is_none_or(|had| had.contains(role));
                if !roles.iter().all(had) {
                    return None;
                }
                found.roles = Some(roles);
            }
            found.parent = parent;
        }
        Step::Upgraded(readers) => return Some(!readers),
    }
    Some(true)
}

async fn run(input: Input) {
    let memory = InMemory::new();
    memory.put(&"store.json".into(), StoreFile::new(Id([1; 16])).encode().unwrap().into()).await.unwrap();
    let mut previous = None;
    let mut known = BTreeMap::new();
    let mut verdict = Some(true);
    for (sequence, (step, flaw)) in (1u64..).zip(input.steps.iter().take(MOST)) {
        let named = if *flaw == 1 { Some(Digest([7; 32])) } else { previous };
        let entry = LogEntry::new(sequence, named, Id([sequence as u8; 16]), Id([9; 16]), 0, event(step));
        let Ok((bytes, digest)) = entry.encode() else { return };
        memory.put(&LogEntry::path_of(sequence).into(), bytes.into()).await.unwrap();
        previous = Some(digest);
        if verdict == Some(true) {
            verdict = if *flaw == 1 { None } else { apply(&mut known, step) };
        }
    }
    let store = Store::with_object_store(Arc::new(memory), Default::default(), StoreOptions::default());
    let report = maintain::verify(&store, &VerifyOptions { depth: VerifyDepth::Log, ..Default::default() }).await.unwrap();
    let of_log = report.problems.iter().find(|problem| problem.step.is_none()).map(|problem| problem.error.kind());
    let wanted = match verdict {
        None => Some(ErrorKind::Corrupt),
        Some(false) => Some(ErrorKind::Unsupported),
        Some(true) => None,
    };
    assert_eq!(of_log, wanted, "{:?}", report.problems);
    if wanted.is_some() {
        assert!(store.snapshots().await.is_err());
        return;
    }
    // The store has no manifests, so every live step is a problem. No step that live steps do not need may be one.
    let mut needed = BTreeSet::new();
    for (number, found) in known.iter().filter(|(_, found)| found.live) {
        assert!(report.problems.iter().any(|problem| problem.step == Some(found.step)), "{number}: {:?}", report.problems);
        let mut link = Some(*number);
        while let Some(at) = link {
            needed.insert(known[&at].step);
            link = known[&at].parent;
        }
    }
    assert!(report.problems.iter().all(|problem| problem.step.is_some_and(|step| needed.contains(&step))));
}
