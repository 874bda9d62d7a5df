//! The manifest and the casks that a log entry holds, the manifest under its own seal and digest. The first byte says how
//! far the size in the entry is off; entries as a whole, such as the seeds, are taken from their first seal on.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tensorcask::wire::{Digest, Event, Id, InlineSnapshot, LogEntry, Manifest};
use tensorcask_fuzz::{fix_seal, small_limits};

const SEAL: &[u8] = b"\nsha256:";
const SEAL_BYTES: usize = 73; // with the line end before it

fn end_of_seal(data: &[u8]) -> Option<usize> {
    let at = data.windows(SEAL.len()).position(|window| window == SEAL)?;
    Some((at + SEAL_BYTES).min(data.len()))
}

fuzz_target!(|data: &[u8]| {
    let limits = small_limits();
    let Some((&off, rest)) = data.split_first() else { return };
    let _ = InlineSnapshot::decode(&Bytes::copy_from_slice(rest), 1, Digest([0; 32]), &limits);
    let held = end_of_seal(rest).map_or(rest, |end| &rest[end..]);
    let (manifest, casks) = held.split_at(end_of_seal(held).unwrap_or(held.len()));
    let manifest = fix_seal(manifest);
    let digest = Manifest::decode(&manifest, &limits).map_or(Digest([0; 32]), |(_, digest)| digest);
    let inline = Some((manifest.len() as u64).wrapping_add_signed(i64::from(off as i8)));
    let event = Event::Added { snapshot: Id([1; 16]), step: 1, parent: None, manifest: digest, inline, roles: None };
    let (mut entry, _) = LogEntry::new(1, None, Id([2; 16]), Id([3; 16]), 0, event).encode().unwrap();
    entry.extend(InlineSnapshot::encode(&manifest, [casks]));
    let entry = Bytes::from(entry);
    assert!(LogEntry::decode(&entry, 1, &limits).is_ok(), "what an entry holds does not concern the log");
    let Ok(found) = InlineSnapshot::decode(&entry, 1, digest, &limits) else { return };
    assert_eq!(off, 0);
    assert_eq!(found.casks.iter().map(Bytes::len).sum::<usize>(), casks.len());
    assert_eq!(found.casks.concat(), casks);
    let (again, bytes) = InlineSnapshot::decode_manifest(&entry, 1, digest, &limits).unwrap();
    assert_eq!((again, bytes), (found.manifest, found.manifest_bytes));
});
