//! Local disk that fails: full, read-only, not a folder. Needs root for a small file system; without root, the tests
//! report that they did not run.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use crate::common::objects_of;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::VerifyOptions;
use tensorcask::{Dtype, ErrorKind, Metadata, Policy, Slice, TensorView, WriterOptions};

/// A mounted tmpfs of a few megabytes.
struct SmallDisk {
    folder: tempfile::TempDir,
}

impl SmallDisk {
    fn new(size: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = mount(&["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"], folder.path());
        if !mounted {
            eprintln!("NOT RUN: mounting a small file system needs root");
            return None;
        }
        Some(Self { folder })
    }

    fn remount(&self, options: &str) {
        assert!(mount(&["-o", &format!("remount,{options}"), "tmpfs"], self.folder.path()));
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.folder.path()).status();
    }
}

fn mount(arguments: &[&str], folder: &Path) -> bool {
    Command::new("mount").args(arguments).arg(folder).output().is_ok_and(|output| output.status.success())
}

fn save(writer: &mut tensorcask::blocking::Writer, step: u64, bytes: usize) -> tensorcask::Result<tensorcask::SavedSnapshot> {
    let data = pattern(step, bytes);
    writer.save(step, &[TensorView::new("w", Dtype::U8, &[bytes as u64], &data)?], &[], &Metadata::default())
}

fn pattern(step: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|i| ((i + step).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

fn assert_whole(store: &Store, steps: &[(u64, usize)]) {
    let listed: Vec<u64> = store.snapshots().unwrap().iter().map(|info| info.record.step).collect();
    assert_eq!(listed, steps.iter().map(|(step, _)| *step).collect::<Vec<_>>());
    for &(step, bytes) in steps {
        assert_eq!(store.snapshot(step).unwrap().read("w", &Slice::all()).unwrap().data, pattern(step, bytes));
    }
    let report = maintain::verify(store, &VerifyOptions::default()).unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
}

#[test]
fn a_full_disk_fails_the_save_and_nothing_else() {
    let Some(disk) = SmallDisk::new("3m") else { return };
    let url = disk.folder.path().join("run");
    let store = Store::open(url.to_str().unwrap()).unwrap();
    let mut writer = store.writer(Policy::Full).unwrap();
    save(&mut writer, 1, 1 << 20).unwrap();
    for step in [2, 3] {
        let error = save(&mut writer, step, 3 << 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Storage);
        assert!(error.to_string().contains("No space left"), "{error}");
        assert!(error.object_name().is_some_and(|name| name.starts_with("casks/")), "{error}");
    }
    assert_whole(&store, &[(1, 1 << 20)]);
    // The same writer continues once there is room.
    disk.remount("size=16m");
    save(&mut writer, 4, 3 << 20).unwrap();
    assert_whole(&store, &[(1, 1 << 20), (4, 3 << 20)]);
}

/// A large save that does not fit gives back all the space that it took, at once: the log must still be writable.
#[test]
fn a_failed_save_leaves_nothing_on_a_full_disk() {
    let Some(disk) = SmallDisk::new("40m") else { return };
    let url = disk.folder.path().join("run");
    let store = Store::open(url.to_str().unwrap()).unwrap();
    let options = WriterOptions { policy: Policy::Full, ..WriterOptions::default() };
    let mut writer = store.writer_with(options).unwrap();
    save(&mut writer, 1, 1 << 20).unwrap();
    let casks = || -> Vec<String> { objects_of(&url).into_iter().map(|(path, _)| path).filter(|path| path.contains("casks")).collect() };
    let before = casks();
    // The second tensor does not fit: its cask is unfinished, and that of the first is complete.
    for sizes in [vec![60 << 20], vec![20 << 20, 30 << 20]] {
        let data: Vec<Vec<u8>> = sizes.iter().map(|bytes| pattern(2, *bytes)).collect();
        let names = ["model.w", "optimizer.exp_avg.w"];
        let views = names.into_iter().zip(&data).map(|(name, data)| TensorView::new(name, Dtype::U8, &[data.len() as u64], data).unwrap());
        let error = writer.save(2, &views.collect::<Vec<_>>(), &[], &Metadata::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
        assert!(error.to_string().contains("No space left"), "{error}");
        assert_eq!(casks(), before);
        store.pin(1).unwrap();
    }
    assert_whole(&store, &[(1, 1 << 20)]);
}

/// The disk fills up at every possible amount of free space. Each save fails or is complete.
#[test]
fn a_disk_that_fills_at_any_point_leaves_the_store_as_it_was() {
    let Some(disk) = SmallDisk::new("4m") else { return };
    let url = disk.folder.path().join("run");
    let store = Store::open(url.to_str().unwrap()).unwrap();
    let mut steps = vec![(1u64, 100_000usize)];
    save(&mut store.writer(Policy::Full).unwrap(), 1, 100_000).unwrap();
    let filler = disk.folder.path().join("filler");
    let mut failed = 0;
    for pages in 0..40 {
        let _ = std::fs::remove_file(&filler);
        // Fills the disk, then frees `pages` pages.
        let mut file = std::fs::File::create(&filler).unwrap();
        let mut size = 0u64;
        while file.write_all(&[0; 4096]).is_ok() {
            size += 4096;
        }
        file.set_len(size.saturating_sub(pages * 4096)).unwrap();
        let step = pages + 10;
        let result = store.writer(Policy::Full).and_then(|mut writer| save(&mut writer, step, 20_000));
        std::fs::remove_file(&filler).unwrap();
        match result {
            Ok(_) => steps.push((step, 20_000)),
            Err(e) => {
                failed += 1;
                assert_eq!(e.kind(), ErrorKind::Storage, "{e}");
            }
        }
        assert_whole(&store, &steps);
    }
    assert!(failed > 3 && steps.len() > 3, "{failed} failed, {} saved", steps.len());
}

#[test]
fn a_read_only_folder_is_told_and_reads_on() {
    let Some(disk) = SmallDisk::new("8m") else { return };
    let url = disk.folder.path().join("run");
    let store = Store::open(url.to_str().unwrap()).unwrap();
    let mut writer = store.writer(Policy::Consecutive).unwrap();
    save(&mut writer, 1, 1000).unwrap();
    disk.remount("ro");
    let before = objects_of(&url);
    let error = save(&mut writer, 2, 1000).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Storage);
    assert!(error.to_string().to_lowercase().contains("read-only"), "{error}");
    assert_eq!(store.writer(Policy::Full).unwrap_err().kind(), ErrorKind::Storage);
    assert_whole(&store, &[(1, 1000)]);
    assert_eq!(objects_of(&url), before);
}

#[test]
fn a_store_that_is_not_there_or_not_a_store_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Store::open(folder.path().join("none").to_str().unwrap()).unwrap();
    let error = missing.snapshot(tensorcask::Latest).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("none"), "{error}");
    assert!(!folder.path().join("none").exists(), "reading creates nothing");
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    assert!(Store::open(file.to_str().unwrap()).unwrap().writer(Policy::Full).is_err());
}
