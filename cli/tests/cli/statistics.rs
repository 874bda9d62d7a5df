//! `tensorcask stats` on the states of a small training run.

use std::path::PathBuf;

use safetensors::tensor::Dtype;

use crate::place::{Place, conforms, stdout, training_file};

/// A store with two steps; the second has one NaN.
fn with_nan() -> Place {
    let place = Place::new();
    let mut values = [0.5f32; 1000];
    for step in [1, 2] {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        place.write("state", &[("layers.0.w", Dtype::F32, &[1000], &bytes), ("layers.1.w", Dtype::F32, &[10], &bytes[..40])]);
        conforms("save", &place.json(&format!("save @run --step {step} --statistics --policy consecutive @state")));
        values[700] = f32::NAN;
    }
    place
}

#[test]
fn a_nan_is_found() {
    let place = with_nan();
    let found = place.json("stats @run --where nan");
    conforms("stats", &found);
    let row = &found["tensors"][0];
    assert_eq!((found["tensors"].as_array().unwrap().len(), &row["step"], &row["tensor"]), (1, &2.into(), &"layers.0.w".into()));
    assert_eq!((&row["nan"], &row["max"], &row["sum"]), (&1.into(), &0.5.into(), &499.5.into()));
    assert_eq!((&row["reference_step"], &row["changed"]), (&1.into(), &1.into()));
    let text = stdout(&place.run("stats @run --where nan"));
    assert!(text.lines().count() == 2 && text.contains("layers.0.w"), "{text}");

    let all = place.json("stats @run");
    conforms("stats", &all);
    assert_eq!(all["tensors"].as_array().unwrap().len(), 4);
    let unchanged = place.json("stats @run --step latest --where unchanged --tensor layers.*");
    assert_eq!(unchanged["tensors"][0]["tensor"], "layers.1.w");
    let exported = place.json("stats @run --tensor layers.1.* --parquet @stats.parquet");
    conforms("stats", &exported);
    assert!(std::fs::read(place.path("stats.parquet")).unwrap().starts_with(b"PAR1"));
}

#[test]
fn steps_without_statistics_are_named() {
    let place = Place::with_training();
    let found = place.json("stats @run");
    assert_eq!((found["tensors"].as_array().unwrap().len(), &found["steps"]), (0, &3.into()));
    let text = stdout(&place.run("stats @run"));
    assert!(text.contains("--statistics"), "{text}");
}

/// Flips a byte in the statistics of each cask that is not in `spared`. Returns the damaged casks.
fn damage_statistics(place: &Place, spared: &[PathBuf]) -> Vec<PathBuf> {
    let mut damaged = Vec::new();
    for cask in place.casks().into_iter().filter(|cask| !spared.contains(cask)) {
        let mut bytes = std::fs::read(&cask).unwrap();
        let Some(start) = bytes.windows(4).position(|window| window == b"PAR1") else { continue };
        bytes[start + 100] ^= 1;
        std::fs::write(&cask, bytes).unwrap();
        damaged.push(cask);
    }
    damaged
}

#[test]
fn damaged_statistics_name_the_object_and_leave_the_tensors_alone() {
    let place = Place::new();
    place.json(&format!("save @run --step 1000 --statistics {}", training_file(1000).display()));
    let damaged = damage_statistics(&place, &[]);
    assert_eq!(damaged.len(), 1);
    let (code, error) = place.error("stats @run --step 1000 --where nan");
    assert_eq!((code, &error["kind"]), (3, &"corrupt".into()));
    let object = error["object"].as_str().unwrap();
    assert!(object.contains(damaged[0].file_name().unwrap().to_str().unwrap()), "{object}");
    assert!(error["message"].as_str().unwrap().contains("tensorcask verify"), "{error}");
    place.json("restore @run -o @out");
    assert_eq!(place.run("stats @run --where nonsense").status.code(), Some(2));
    assert_eq!(place.error("stats @nowhere").0, 10);
}

#[test]
fn a_damaged_step_leaves_the_statistics_of_other_steps_alone() {
    let place = Place::new();
    let save = |step: u64| place.json(&format!("save @run --step {step} --statistics --policy full {}", training_file(step).display()));
    save(1000);
    let spared = place.casks();
    save(1001);
    assert_eq!(damage_statistics(&place, &spared).len(), 1);
    let output = place.run("stats @run");
    assert_eq!(output.status.code(), Some(3));
    let warnings = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(warnings.contains("step=1001") && warnings.contains("left out"), "{warnings}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\n1000  ") && !text.contains("\n1001  ") && text.contains("1 step is damaged and left out"), "{text}");

    let output = place.run("--json stats @run");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    conforms("stats", &found);
    assert_eq!((output.status.code(), &found["steps"]), (Some(3), &1.into()));
    assert_eq!((&found["unreadable"][0]["step"], &found["unreadable"][0]["kind"]), (&1001.into(), &"corrupt".into()));
    assert!(found["tensors"].as_array().unwrap().iter().all(|row| row["step"] == 1000));
}
