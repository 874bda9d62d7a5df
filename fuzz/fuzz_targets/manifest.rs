//! A manifest under a right seal: what decodes is encoded to what decodes to the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorcask::wire::Manifest;
use tensorcask_fuzz::{fix_seal, small_limits};

fuzz_target!(|data: &[u8]| {
    let limits = small_limits();
    let _ = Manifest::decode(data, &limits);
    let Ok((manifest, _)) = Manifest::decode(&fix_seal(data), &limits) else { return };
    let (bytes, digest) = manifest.encode().unwrap();
    let (again, found) = Manifest::decode(&bytes, &limits).unwrap();
    assert_eq!((again, found), (manifest, digest));
});
