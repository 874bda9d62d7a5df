//! Rules that assign codecs to tensors: they hold wherever the codec can encode a chunk, and never change what is restored.

use std::collections::BTreeMap;
use std::sync::Arc;

use object_store::memory::InMemory;
use tensorcask::codec::{CodecRules, Objective};
use tensorcask::interchange::safetensors::Files;
use tensorcask::maintain::{self, CompactOptions, VerifyOptions};
use tensorcask::{
    BaseKeeping, Dtype, Error, ErrorKind, Metadata, Policy, Precision, SavedSnapshot, Slice, Store, TensorView, WriterOptions,
};

use crate::common::{data, noise, wrap};

/// The recipe of BitSnap: masks for the model, clusters for the optimizer.
const BITSNAP: [&str; 4] = ["model=tc.bitmask", "master=tc.cluster", "exp_avg=tc.cluster", "exp_avg_sq=tc.cluster"];

fn memory() -> Store {
    wrap(Arc::new(InMemory::new()))
}

fn rules(words: &[&str]) -> WriterOptions {
    WriterOptions {
        codecs: CodecRules::parse(words.iter().copied()).unwrap(),
        policy: Policy::Consecutive,
        objective: Objective::SMALLEST.into(),
        ..WriterOptions::default()
    }
}

async fn save(store: &Store, options: WriterOptions, steps: &[u64]) -> Vec<SavedSnapshot> {
    let mut writer = store.writer_with(options).await.unwrap();
    let mut saved = Vec::new();
    for &step in steps {
        let files = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
        saved.push(writer.save(step, &files.tensors().unwrap(), &[], &Metadata::default()).await.unwrap());
    }
    saved
}

/// Number of chunks of a codec.
fn count(saved: &SavedSnapshot, codec: &str) -> u64 {
    saved.chunks.get(codec).copied().unwrap_or(0)
}

/// The error of a save of one tensor.
async fn refusal(options: WriterOptions, tensor: TensorView<'_>) -> Error {
    let store = memory();
    let mut writer = store.writer_with(options).await.unwrap();
    let error = writer.save(1, &[tensor], &[], &Metadata::default()).await.unwrap_err();
    assert!(store.snapshots().await.unwrap().is_empty(), "nothing is committed");
    error
}

#[tokio::test]
async fn a_rule_holds_in_every_chunk_that_its_codec_can_encode() {
    for base_cache in [BaseKeeping::Memory, BaseKeeping::Encoded, BaseKeeping::None] {
        let store = memory();
        let options = WriterOptions { base_cache, ..rules(&["model=tc.bitmask"]) };
        let saved = save(&store, options, &[1000, 1001, 1010]).await;
        let models = Files::open(&[data("step-1000.safetensors")]).unwrap();
        let models = models.tensors().unwrap().iter().filter(|tensor| tensor.role() == "model").count() as u64;
        let masks: Vec<u64> = saved.iter().map(|saved| count(saved, "tc.bitmask")).collect();
        assert_eq!(masks, [0, models, models], "a base has no base to compare with");
        for step in [1000, 1001, 1010] {
            let files = Files::open(&[data(&format!("step-{step}.safetensors"))]).unwrap();
            for tensor in files.tensors().unwrap() {
                let read = store.snapshot(step).await.unwrap().read(tensor.name(), &Slice::all()).await.unwrap();
                assert!(read.data == tensor.data(), "step {step}, {}", tensor.name());
            }
        }
        assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
        maintain::compact(&store, 1010, &CompactOptions::default()).await.unwrap();
        assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
    }
    let chosen = save(&memory(), rules(&[]), &[1000, 1001]).await;
    assert_eq!(count(&chosen[1], "tc.bitmask"), 0, "the objective prefers smaller codecs");
}

#[tokio::test]
async fn an_assigned_mask_may_take_more_bytes_than_the_tensor() {
    let [before, after] = [1, 2].map(|seed| noise(seed, 64 << 10));
    for policy in [Policy::Consecutive, Policy::Adaptive] {
        let store = memory();
        let mut writer = store.writer_with(WriterOptions { policy, ..rules(&["w=tc.bitmask"]) }).await.unwrap();
        let mut saved = Vec::new();
        for (step, bytes) in [(1, &before), (2, &after)] {
            let tensors = [TensorView::new("w", Dtype::U8, &[64 << 10], bytes).unwrap()];
            saved.push(writer.save(step, &tensors, &[], &Metadata::default()).await.unwrap());
            assert!(store.snapshot(step).await.unwrap().read("w", &Slice::all()).await.unwrap().data == *bytes);
        }
        match policy {
            Policy::Adaptive => assert_eq!(saved[1].decision.reason.name(), "large_delta", "the estimate follows the rule"),
            _ => assert!(count(&saved[1], "tc.bitmask") == 1 && saved[1].stored_bytes > 72 << 10, "{saved:?}"),
        }
    }
}

#[tokio::test]
async fn an_equal_chunk_takes_no_bytes_and_named_rows_do_not_hide_the_base() {
    let store = memory();
    let mut bytes = noise(1, 64 << 10);
    let options = WriterOptions { base_cache: BaseKeeping::None, ..rules(&["*=tc.bitmask"]) };
    let mut writer = store.writer_with(options).await.unwrap();
    let mut saved = Vec::new();
    for (step, rows) in [(1, vec![]), (2, vec![]), (3, vec![7])] {
        rows.iter().for_each(|row: &u64| bytes[*row as usize * 64] ^= 1);
        let tensor = TensorView::new("w", Dtype::U8, &[1024, 64], &bytes).unwrap().with_changed_rows(&rows).unwrap();
        saved.push(writer.save(step, &[tensor], &[], &Metadata::default()).await.unwrap());
    }
    let kinds: Vec<&str> = saved.iter().flat_map(|saved| saved.chunks.keys().map(String::as_str)).collect();
    assert_eq!(kinds, ["tc.raw", "unchanged", "tc.bitmask"]);
    assert!(store.snapshot(3).await.unwrap().read("w", &Slice::all()).await.unwrap().data == bytes);
}

#[tokio::test]
async fn the_recipe_of_a_paper_is_stored_as_it_is() {
    let precision = || Precision::parse(["master=cluster", "exp_avg=cluster", "exp_avg_sq=cluster"]).unwrap();
    let store = memory();
    let saved = save(&store, WriterOptions { precision: precision(), ..rules(&BITSNAP) }, &[1000, 1001]).await;
    let free = save(&memory(), WriterOptions { precision: precision(), ..rules(&[]) }, &[1000, 1001]).await;
    // Six parameters: the model is masked, master and moments are rounded.
    assert_eq!(saved[1].chunks, BTreeMap::from([("tc.bitmask".to_owned(), 6), ("tc.cluster".to_owned(), 18)]));
    assert!(count(&free[1], "tc.cluster") < 18, "other codecs store some of the rounded numbers in fewer bytes: {:?}", free[1].chunks);
    assert_eq!(saved[1].rounding, free[1].rounding);
    assert!(maintain::verify(&store, &VerifyOptions::default()).await.unwrap().is_clean());
}

#[tokio::test]
async fn a_codec_that_can_never_store_a_tensor_is_refused_by_name() {
    let store = memory();
    let error = store.writer_with(rules(&["model=tc.bitmsk"])).await.unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("`model=tc.bitmsk`"), "{error}");
    assert!(error.message().contains("tc.bitmask"), "{error}");
    let bytes = vec![0; 64];
    let tensor = |role: &'static str, dtype| TensorView::new("w", dtype, &[16], &bytes).unwrap().with_role(role, "w");
    for (rule, tensor, cause) in [
        ("*=tc.ordered", TensorView::new("w", Dtype::I64, &[8], &bytes).unwrap(), "cannot store i64 of role `model`"),
        ("w=tc.remainder", tensor("exp_avg", Dtype::F32), "cannot store f32 of role `exp_avg`"),
        ("exp_avg=tc.cluster", tensor("exp_avg", Dtype::F32), "set its precision to `cluster`, too"),
    ] {
        let error = refusal(rules(&[rule]), tensor).await;
        assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains(cause), "{error}");
        assert_eq!(error.tensor_name(), Some("w"));
    }
    for word in ["tc.bitmask", "=tc.bitmask", "model=", "[=tc.raw"] {
        assert_eq!(CodecRules::parse([word]).unwrap_err().kind(), ErrorKind::InvalidArgument, "{word}");
    }
    let rules = CodecRules::parse(["*.a=b=tc.raw", "model=tc.bitmask"]).unwrap();
    assert_eq!((rules.of("master", "x.a=b"), rules.words()), (Some("tc.raw"), vec!["*.a=b=tc.raw".to_owned(), "model=tc.bitmask".into()]));
}
