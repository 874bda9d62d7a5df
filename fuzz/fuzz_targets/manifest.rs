//! A manifest, or a receipt, under a right seal. If it decodes, encoding and decoding it again gives the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorcask::wire::{Manifest, Receipt};
use tensorcask_fuzz::{fix_seal, small_limits};

fuzz_target!(|data: &[u8]| {
    let limits = small_limits();
    let _ = Manifest::decode(data, &limits);
    let sealed = fix_seal(data);
    if let Ok(receipt) = Receipt::decode(&sealed, &limits) {
        assert_eq!(Receipt::decode(&receipt.encode().unwrap(), &limits).unwrap(), receipt);
    }
    let Ok((manifest, _)) = Manifest::decode(&sealed, &limits) else { return };
    let (bytes, digest) = manifest.encode().unwrap();
    let (again, found) = Manifest::decode(&bytes, &limits).unwrap();
    assert_eq!((again, found), (manifest, digest));
});
