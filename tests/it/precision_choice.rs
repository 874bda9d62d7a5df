//! Rules that allow several settings: the weights of size, speed and precision choose between them (BitSnap, equation 5).

use std::sync::Arc;

use object_store::memory::InMemory;
use tensorcask::codec::{CodecRules, Objective};
use tensorcask::interchange::safetensors::Files;
use tensorcask::{Dtype, ErrorKind, Metadata, Policy, Precision, Slice, Store, TensorRounding, TensorView, WriterOptions};

use crate::common::{data, wrap};

const ALTERNATIVES: &str = "master=cluster|blockwise8|loguniform:16";
const MASTER: &str = "optimizer.master.h.2.attn_proj.weight";

fn weighted(precision: &str, weights: &str) -> WriterOptions {
    WriterOptions {
        precision: Precision::parse([precision]).unwrap(),
        objective: Objective::from_name(weights).unwrap().into(),
        policy: Policy::Full,
        ..WriterOptions::default()
    }
}

/// Saves a real state; returns the rounding of a master and the stored bytes of the state.
async fn save_master(options: WriterOptions) -> (TensorRounding, u64) {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer_with(options).await.unwrap();
    let files = Files::open(&[data("step-1000.safetensors")]).unwrap();
    let saved = writer.save(1000, &files.tensors().unwrap(), &[], &Metadata::default()).await.unwrap();
    let rounding = store.snapshot(1000).await.unwrap().rounding().await.unwrap();
    (rounding.into_iter().find(|tensor| tensor.name == MASTER).unwrap(), saved.stored_bytes)
}

/// The table of docs/src/papers.md.
#[tokio::test]
async fn three_weightings_choose_three_settings() {
    let mut errors = Vec::new();
    for (weights, setting) in [("1,0,0", "blockwise8"), ("0.6,0.4,0", "loguniform:16"), ("0.4,0.2,0.4", "cluster:16:sample:linear")] {
        let (rounding, _) = save_master(weighted(ALTERNATIVES, weights)).await;
        assert_eq!(rounding.setting, setting, "{weights}");
        errors.push(rounding.total.mean_squared());
    }
    assert!(errors[2] < errors[0] && errors[0] < errors[1], "{errors:?}");
    let [size, precision] = ["1,0,0", "0.6,0,0.4"].map(|weights| save_master(weighted(ALTERNATIVES, weights)));
    let size = size.await;
    let precision = precision.await;
    assert_eq!(precision.0.setting, "cluster:16:sample:linear", "the third weight alone made the difference");
    assert!(size.1 < precision.1, "{size:?} {precision:?}");
}

#[tokio::test]
async fn precision_alone_loses_nothing_if_a_rule_allows_it() {
    let store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer_with(weighted("*=cluster|lossless", "0,0,1")).await.unwrap();
    let files = Files::open(&[data("step-1000.safetensors")]).unwrap();
    let saved = writer.save(1, &files.tensors().unwrap(), &[], &Metadata::default()).await.unwrap();
    assert_eq!(saved.rounding, None);
    let read = store.snapshot(1).await.unwrap().read(MASTER, &Slice::all()).await.unwrap();
    assert!(files.tensors().unwrap().iter().any(|tensor| tensor.name() == MASTER && tensor.data() == read.data));
}

/// Settings of two saves: of real numbers, then of zeros, for which all settings are as good.
async fn settings_of(policy: Policy) -> Vec<String> {
    let store: Store = wrap(Arc::new(InMemory::new()));
    let mut writer = store.writer_with(WriterOptions { policy, ..weighted(ALTERNATIVES, "1,0,0") }).await.unwrap();
    let files = Files::open(&[data("step-1000.safetensors")]).unwrap();
    let tensors = files.tensors().unwrap();
    let master = tensors.iter().find(|tensor| tensor.name() == MASTER).unwrap();
    let zeros = vec![0; master.data().len()];
    let mut settings = Vec::new();
    for (step, bytes) in [(1, master.data()), (2, &zeros)] {
        let tensor = TensorView::new("optim.master.w", Dtype::F32, master.shape(), bytes).unwrap();
        writer.save(step, &[tensor], &[], &Metadata::default()).await.unwrap();
        settings.extend(store.snapshot(step).await.unwrap().rounding().await.unwrap().into_iter().map(|tensor| tensor.setting));
    }
    settings
}

#[tokio::test]
async fn a_choice_is_kept_for_deltas_and_made_again_for_a_base() {
    assert_eq!(settings_of(Policy::Consecutive).await, ["blockwise8", "blockwise8"]);
    assert_eq!(settings_of(Policy::Full).await, ["blockwise8", "cluster:16:sample:linear"]);
}

#[tokio::test]
async fn an_assigned_codec_limits_the_choice() {
    let codecs = CodecRules::parse(["master=tc.cluster"]).unwrap();
    let options = WriterOptions { codecs, ..weighted("master=cluster|loguniform:16", "0.6,0.4,0") };
    assert_eq!(save_master(options).await.0.setting, "cluster:16:sample:linear");
}

#[test]
fn rules_with_several_settings_are_read_and_written() {
    let precision = Precision::parse(["near", "exp_avg=cluster:16|blockwise8|lossless<=0.05"]).unwrap();
    let words = precision.words();
    assert_eq!(words.last().unwrap(), "exp_avg=cluster:16:sample:linear|blockwise8|lossless<=0.05");
    assert_eq!(Precision::parse(words.iter().map(String::as_str)).unwrap(), precision);
    assert!(!precision.is_lossless() && Precision::parse(["*=lossless|lossless"]).unwrap().is_lossless());
    for wrong in ["exp_avg=cluster|", "exp_avg=|cluster", "exp_avg=cluster|near", "exp_avg=cluster<=0.1|blockwise8"] {
        assert_eq!(Precision::parse([wrong]).unwrap_err().kind(), ErrorKind::InvalidArgument, "{wrong}");
    }
    assert!(Precision::default().with_any("exp_avg", &[], None).is_err());
}
