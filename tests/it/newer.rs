//! Stores that a newer version has written to: what this version cannot read is not damaged, and this version changes nothing.

use std::path::{Path, PathBuf};

use crate::common::{SmallState, copy_folder, objects_of, without_inline};
use tensorcask::wire::{Digest, Id};
use tensorcask::{ErrorKind, ExistingStep, Policy, Result, SavedSnapshot, Store, WriterOptions};

/// A copy of the store of a conformance case. Its step 10 cannot be read, or must not be written over.
fn store_of_case(case: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance/cases").join(case).join("input"), folder.path());
    folder
}

/// A store whose step 10 has a manifest with a feature that readers may ignore.
fn store_with_ignorable_manifest() -> tempfile::TempDir {
    let folder = store_of_case("invalid/version/manifest-must-understand");
    let edit = |path: PathBuf, from: &str, to: &str| {
        let text = std::fs::read_to_string(&path).unwrap();
        let (body, seal) = text.split_at(text.rfind("sha256:").unwrap());
        assert!(body.contains(from), "{body}");
        let body = body.replace(from, to);
        let digest = Digest::of(body.as_bytes()).to_string();
        std::fs::write(path, format!("{body}sha256:{digest}\n")).unwrap();
        (seal.trim().trim_start_matches("sha256:").to_owned(), digest)
    };
    let manifest = folder.path().join("snapshots/10-0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a.json");
    let both = ("\"must_understand\":[\"example\"],\"may_ignore\":[]", "\"must_understand\":[],\"may_ignore\":[\"example\"]");
    let (before, after) = edit(manifest, both.0, both.1);
    edit(folder.path().join("log/00000000000000000002.json"), &before, &after);
    folder
}

async fn save(store: &Store, step: u64, options: WriterOptions) -> Result<SavedSnapshot> {
    let state = SmallState::at(step);
    store.writer_with(options).await?.save(step, &state.tensors(), &state.blobs(), &SmallState::metadata(step)).await
}

#[tokio::test]
async fn a_step_of_a_newer_version_is_neither_replaced_nor_built_upon() {
    let cases = [
        ("manifest", store_of_case("invalid/version/manifest-must-understand"), true),
        ("directory", store_of_case("invalid/directory/must-understand"), true),
        ("ignorable", store_with_ignorable_manifest(), false),
    ];
    for (case, folder, is_unreadable) in cases {
        let store = without_inline().open(folder.path().to_str().unwrap()).unwrap();
        assert_eq!(store.snapshot(10).await.is_err(), is_unreadable, "{case}");
        // The same id as the last writer's: an entry `opened` is all that a refused save leaves.
        let options = |policy| WriterOptions { policy, id: Some(Id([0x5e; 16])), ..WriterOptions::default() };
        for (step, policy) in [(10, Policy::Full), (10, Policy::Consecutive), (11, Policy::Consecutive)] {
            let error = save(&store, step, options(policy)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{case}, step {step}: {error}");
            assert!(error.to_string().contains("upgrade tensorcask"), "{case}, step {step}: {error}");
            assert!(step != 10 || policy != Policy::Full || error.to_string().contains("ExistingStep::Replace"), "{case}: {error}");
        }
        assert_eq!(store.history().records().await.unwrap().len(), 1, "{case}");
        assert!(objects_of(folder.path()).iter().all(|(path, _)| !path.starts_with("casks/") || path.contains("0a0a0a")), "{case}");
        // The user's word counts.
        let replace = WriterOptions { existing_step: ExistingStep::Replace, ..options(Policy::Full) };
        save(&store, 10, replace).await.unwrap();
        store.snapshot(10).await.unwrap().verify().await.unwrap();
    }
}

/// A writer with larger limits has written it: that is no damage either.
#[tokio::test]
async fn a_step_beyond_the_limits_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().join("run");
    save(&without_inline().open(url.to_str().unwrap()).unwrap(), 1, WriterOptions::default()).await.unwrap();
    let mut options = without_inline();
    options.limits.max_manifest_bytes = 1000;
    let small = options.open(url.to_str().unwrap()).unwrap();
    let error = save(&small, 1, WriterOptions { policy: Policy::Full, ..WriterOptions::default() }).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
    assert_eq!(without_inline().open(url.to_str().unwrap()).unwrap().history().records().await.unwrap().len(), 1);
}
