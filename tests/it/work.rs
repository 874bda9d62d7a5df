//! The work that operations plan and count, for progress bars.

use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::{CompactOptions, GcOptions, VerifyDepth, VerifyOptions};
use tensorcask::{Dtype, Metadata, Policy, TensorView};

const BYTES: usize = 3 << 20;

/// Work that was planned since the last call. All of it must be done.
fn planned(store: &Store, before: &mut u64) -> u64 {
    let io = store.inner().io();
    assert_eq!(io.work_done, io.work_planned);
    let planned = io.work_planned - *before;
    *before = io.work_planned;
    planned
}

#[test]
fn saves_verifications_compactions_and_collections_plan_their_work() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("run").to_str().unwrap()).unwrap();
    let mut writer = store.writer(Policy::Consecutive).unwrap();
    let mut before = 0;
    let mut data: Vec<u8> = (0..BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
    let mut stored = 0;
    for step in 1..=3 {
        data[step as usize * 1000] ^= 1;
        let saved = writer.save(step, &[TensorView::new("w", Dtype::U8, &[BYTES as u64], &data).unwrap()], &[], &Metadata::default());
        stored += saved.unwrap().stored_bytes;
        assert_eq!(planned(&store, &mut before), BYTES as u64);
    }

    for (depth, is_enough) in [(VerifyDepth::Log, 0), (VerifyDepth::Pages, BYTES as u64 / 2), (VerifyDepth::Full, 3 * BYTES as u64)] {
        let report = maintain::verify(&store, &VerifyOptions { depth, ..VerifyOptions::default() }).unwrap();
        assert!(report.is_clean());
        let planned = planned(&store, &mut before);
        assert!(planned >= is_enough && planned <= 4 * stored, "{depth:?}: {planned} of {stored} stored bytes");
        assert_eq!(planned == 0, depth == VerifyDepth::Log);
    }

    maintain::compact(&store, 3, &CompactOptions::default()).unwrap();
    assert_eq!(planned(&store, &mut before), BYTES as u64);

    store.forget(&[1, 2]).unwrap();
    let options = GcOptions { apply: true, age_floor: std::time::Duration::ZERO, ..GcOptions::default() };
    let deleted = maintain::gc(&store, &options).unwrap().deleted.len() as u64;
    assert!(deleted > 0);
    assert_eq!(planned(&store, &mut before), deleted);

    // A save that is refused gives its work up.
    let other = [TensorView::new("v", Dtype::U8, &[4], &[1; 4]).unwrap()];
    assert!(writer.save(3, &other, &[], &Metadata::default()).is_err());
    planned(&store, &mut before);
}
