//! A log entry, or `store.json`, under a right seal. If it decodes, encoding and decoding it again gives the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorcask::wire::{LogEntry, StoreFile};
use tensorcask_fuzz::{fix_seal, small_limits};

fuzz_target!(|data: &[u8]| {
    let limits = small_limits();
    let _ = LogEntry::decode(data, 1, &limits);
    let sealed = fix_seal(data);
    if let Ok(file) = StoreFile::decode(&sealed, &limits) {
        assert_eq!(StoreFile::decode(&file.encode().unwrap(), &limits).unwrap(), file);
    }
    let json: Option<serde_json::Value> = serde_json::Deserializer::from_slice(&sealed).into_iter().next().and_then(Result::ok);
    let sequence = json.and_then(|json| json.get("sequence")?.as_u64()).unwrap_or(1);
    let Ok((entry, _)) = LogEntry::decode(&sealed, sequence, &limits) else { return };
    let (bytes, digest) = entry.encode().unwrap();
    let (again, found) = LogEntry::decode(&bytes, sequence, &limits).unwrap();
    assert_eq!((again, found), (entry, digest));
});
