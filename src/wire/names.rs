//! Names of the objects of a store. Spec: `spec/README.md`, clause 2.

use super::session::{ENDED_FOLDER, PARENT_OBJECT};
use super::{Digest, Id, LogEntry, RankRange, STORE_FILE, SessionStep};

/// Whether an object of a store may have this path below the root. Anything else that lies there is none of its objects.
/// Leaves out `probe/clock`, which stays for ever and is never garbage.
pub(crate) fn is_object(path: &str) -> bool {
    let Some((folder, name)) = path.split_once('/') else { return path == STORE_FILE };
    match folder {
        "log" => LogEntry::is_path(path),
        "catalog" => catalog_of(path).is_some(),
        "snapshots" => snapshot_of(path).is_some(),
        "directories" => is_digest(name),
        "casks" => name.strip_suffix(".cask").is_some_and(is_id),
        "receipts" => is_receipt(name),
        "offers" => is_offer(name),
        "probe" => match name.split_once('-') {
            Some(("clock", id)) => is_id(id),
            Some((run, round)) => is_id(run) && is_number(round),
            None => is_id(name),
        },
        _ => false,
    }
}

/// Number of the entry and digest in the path of a catalog; `None` for any other path.
pub(crate) fn catalog_of(path: &str) -> Option<(u64, Digest)> {
    let (sequence, digest) = path.strip_prefix("catalog/")?.strip_suffix(".parquet")?.split_once('-')?;
    let number: u64 = sequence.parse().ok()?;
    // The upper limit leaves room for additions; no log is that long.
    (format!("{number:020}") == sequence && (1..1 << 62).contains(&number)).then_some(())?;
    Some((number, Digest::from_hex(digest).ok()?))
}

/// Id of the snapshot in the path of a manifest; `None` for any other path.
pub(crate) fn snapshot_of(path: &str) -> Option<Id> {
    let (step, rest) = path.strip_prefix("snapshots/")?.strip_suffix(".json")?.split_once('-')?;
    let (id, digest) = rest.split_once('-').map_or((rest, None), |(id, digest)| (id, Some(digest)));
    (is_number(step) && digest.is_none_or(is_digest)).then(|| Id::from_hex(id).ok())?
}

/// A message of a rank or of the ranks of a host, or the proof of one.
fn is_receipt(name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    let of_rank = |name: &str| name.strip_suffix(".json").is_some_and(is_number);
    match parts.as_slice() {
        [save, message] => match save.strip_suffix("-start") {
            Some(session) => is_id(session) && (*message == "beginning.json" || of_rank(message)),
            None => save.split_once('-').is_some_and(|(step, attempt)| is_number(step) && is_number(attempt)) && of_rank(message),
        },
        [session, ENDED_FOLDER, message] => is_id(session) && RankRange::from_object(message).is_some(),
        [session, step, message] => {
            let is_message = *message == PARENT_OBJECT
                || RankRange::from_object(message).is_some()
                || message.strip_suffix(".proof").is_some_and(is_digest);
            is_id(session) && SessionStep::from_folder(step).is_some() && is_message
        }
        _ => false,
    }
}

/// `<round>/<rank>.json`.
fn is_offer(name: &str) -> bool {
    let Some((round, rank)) = name.split_once('/') else { return false };
    is_round(round) && rank.strip_suffix(".json").is_some_and(is_number)
}

/// Whether this may name one agreement of ranks.
pub(crate) fn is_round(round: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    !round.is_empty() && round.len() <= 128 && round.chars().all(is_plain)
}

fn is_id(text: &str) -> bool {
    Id::from_hex(text).is_ok()
}

fn is_digest(text: &str) -> bool {
    Digest::from_hex(text).is_ok()
}

/// Decimal without leading zeros.
fn is_number(text: &str) -> bool {
    text.parse::<u64>().is_ok_and(|number| number.to_string() == text)
}

#[cfg(test)]
mod tests {
    use super::is_object;

    #[test]
    fn only_names_of_the_spec_are_objects() {
        let id = "0123456789abcdef".repeat(2);
        let digest = "0123456789abcdef".repeat(4);
        let fill = |path: &str| path.replace("ID", &id).replace("DIGEST", &digest).replace("SEQ", &"0".repeat(19));
        let objects = [
            "store.json",
            "log/SEQ7.json",
            "catalog/SEQ7-DIGEST.parquet",
            "snapshots/0-ID.json",
            "snapshots/1200-ID-DIGEST.json",
            "directories/DIGEST",
            "casks/ID.cask",
            "receipts/100-0/3.json",
            "receipts/ID/SEQ0-SEQ7/0-3.json",
            "receipts/ID/SEQ0-SEQ7/parent.json",
            "receipts/ID/SEQ0-SEQ7/DIGEST.proof",
            "receipts/ID/ended/4-7.json",
            "receipts/ID-start/beginning.json",
            "receipts/ID-start/12.json",
            "offers/start_1-a/0.json",
            "probe/ID",
            "probe/ID-19",
            "probe/clock-ID",
        ];
        for path in objects {
            assert!(is_object(&fill(path)), "{path}");
        }
        let others = [
            "",
            "notes.txt",
            "log/7.json",
            "log/SEQ0.json",
            "log/SEQ7.json#1",
            "log/old/SEQ7.json",
            "catalog/SEQ7.parquet",
            "snapshots/01-ID.json",
            "snapshots/1-ID-ID.json",
            "snapshots/1-ID.json.bak",
            "directories/ID",
            "casks/notes.txt",
            "casks/ID.cask#1",
            "casks/ID",
            "casks/sub/ID.cask",
            "receipts/100-0/x.json",
            "receipts/100/3.json",
            "receipts/ID/SEQ0-SEQ7/3-0.json",
            "receipts/ID/SEQ0-SEQ7/sub/0-3.json",
            "offers/a/b/0.json",
            "offers/A/0.json",
            "probe/notes",
            "run/casks/ID.cask",
        ];
        for path in others {
            assert!(!is_object(&fill(path)), "{path}");
        }
    }
}
