//! Times of saves, as manifests record them. Spec: `spec/manifest.md`, clause 2.5.
//!
//! A manifest is written before its save ends. So each snapshot records how long its own encoding and upload took, and
//! the whole duration of the save before it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Times that a snapshot records, in milliseconds. `None`: unknown.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct SaveTimes {
    /// Clock of the writer when it wrote the manifest, after the uploads, in milliseconds since 1970. Unlike the time of
    /// the log entry, it stays as it is in a copy of the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_ms: Option<u64>,
    /// Time of encoding, with the reading of base chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encode_ms: Option<f64>,
    /// Time for which the save waited for uploads of casks beyond `encode_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload_ms: Option<f64>,
    /// Times of the newest earlier save of the same writer that was committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<PreviousSave>,
}

/// Times of an earlier save, in milliseconds. `None`: unknown.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct PreviousSave {
    /// Training step of the earlier save.
    pub step: u64,
    /// Time for which the save stopped the training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_ms: Option<f64>,
    /// Time of encoding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encode_ms: Option<f64>,
    /// Time of the upload to the first tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload_ms: Option<f64>,
    /// Time from the call to the commit, in the first tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub save_ms: Option<f64>,
}

/// All known times of the save of one step, in milliseconds. `None`: unknown.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct StepTimes {
    /// Time for which the save stopped the training.
    pub stall_ms: Option<f64>,
    /// Time of encoding.
    pub encode_ms: Option<f64>,
    /// Time of the upload.
    pub upload_ms: Option<f64>,
    /// Time from the call to the commit.
    pub save_ms: Option<f64>,
}

impl SaveTimes {
    /// Key under `user` of a manifest where a writer stores the times.
    pub const KEY: &str = "tc.times";

    /// Returns the times in the user metadata of a snapshot. `None` if there are none, or if they are not valid.
    pub fn of(user: &Map<String, Value>) -> Option<Self> {
        let times: Self = serde_json::from_value(user.get(Self::KEY)?.clone()).ok()?;
        let previous = times.previous.unwrap_or_default();
        let all = [times.encode_ms, times.upload_ms, previous.stall_ms, previous.encode_ms, previous.upload_ms, previous.save_ms];
        all.into_iter().flatten().all(|ms| ms.is_finite() && ms >= 0.0).then_some(times)
    }

    /// Joins the times that snapshots record about themselves with those that later snapshots record about them.
    /// `snapshots`: step and user metadata of each snapshot, in the order of the commits. A step without any time is left out.
    pub fn by_step<'a>(snapshots: impl IntoIterator<Item = (u64, &'a Map<String, Value>)>) -> BTreeMap<u64, StepTimes> {
        let mut found: BTreeMap<u64, StepTimes> = BTreeMap::new();
        for (step, user) in snapshots {
            let times = Self::of(user).unwrap_or_default();
            found.insert(step, StepTimes { encode_ms: times.encode_ms, upload_ms: times.upload_ms, ..StepTimes::default() });
            let Some(previous) = times.previous else { continue };
            // A step that is gone has no row of its own.
            let Some(row) = found.get_mut(&previous.step).filter(|_| previous.step != step) else { continue };
            row.stall_ms = previous.stall_ms.or(row.stall_ms);
            row.encode_ms = previous.encode_ms.or(row.encode_ms);
            row.upload_ms = previous.upload_ms.or(row.upload_ms);
            row.save_ms = previous.save_ms.or(row.save_ms);
        }
        found.retain(|_, times| *times != StepTimes::default());
        found
    }
}

/// Milliseconds of a time, to a microsecond.
pub(crate) fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// Whole microseconds of a time in milliseconds that is not negative.
pub(crate) fn whole_microseconds(ms: f64) -> u64 {
    (ms * 1e3).round() as u64
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::{SaveTimes, StepTimes};

    fn user(times: Value) -> Map<String, Value> {
        Map::from_iter([("loss".to_owned(), json!(2.5)), (SaveTimes::KEY.to_owned(), times)])
    }

    #[test]
    fn times_that_are_not_valid_are_ignored() {
        assert_eq!(SaveTimes::of(&Map::new()), None);
        let no_whole_number = json!({ "written_ms": 1.5 });
        let forms =
            [json!(3), json!("x"), json!({ "encode_ms": "x" }), json!({ "encode_ms": -1 }), json!({ "previous": { "save_ms": 1 } })];
        for bad in forms.into_iter().chain([no_whole_number]) {
            assert_eq!(SaveTimes::of(&user(bad)), None);
        }
        let times = SaveTimes::of(&user(json!({ "encode_ms": 1, "some_later_field": true }))).unwrap();
        assert_eq!((times.encode_ms, times.upload_ms, times.previous), (Some(1.0), None, None));
    }

    #[test]
    fn a_later_snapshot_completes_the_times_of_a_step() {
        let one = user(json!({ "encode_ms": 1.5, "upload_ms": 2 }));
        let two = user(json!({ "encode_ms": 3, "previous": { "step": 10, "save_ms": 4, "stall_ms": 0.5 } }));
        let gone = user(json!({ "previous": { "step": 15, "save_ms": 9 } }));
        let own = user(json!({ "previous": { "step": 40, "save_ms": 9 } }));
        let of_unmeasured = user(json!({ "previous": { "step": 50, "save_ms": 7 } }));
        let none = Map::new();
        let found = SaveTimes::by_step([(10, &one), (20, &two), (30, &gone), (40, &own), (50, &none), (60, &of_unmeasured), (70, &none)]);
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [10, 20, 50]);
        assert_eq!(found[&10], StepTimes { stall_ms: Some(0.5), encode_ms: Some(1.5), upload_ms: Some(2.0), save_ms: Some(4.0) });
        assert_eq!(found[&20], StepTimes { encode_ms: Some(3.0), ..StepTimes::default() });
        assert_eq!(found[&50], StepTimes { save_ms: Some(7.0), ..StepTimes::default() }, "it records none itself");
    }
}
