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
fn counts_of_complex_tensors_cover_both_parts() {
    let place = Place::new();
    for (step, one) in [(1, 0.0f32), (2, 1.0)] {
        let numbers = [0.0, 0.0, one, one];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        place.write("state", &[("w", Dtype::C64, &[2], &bytes)]);
        place.json(&format!("save @run --step {step} --statistics --policy consecutive @state"));
    }
    let zero = place.json("stats @run --where zero");
    conforms("stats", &zero);
    let rows = zero["tensors"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| &row["step"]).collect::<Vec<_>>(), [1], "{zero}");
    assert_eq!((&rows[0]["elements"], &rows[0]["numbers"], &rows[0]["zero"]), (&2.into(), &4.into(), &4.into()));
    let text = stdout(&place.run("stats @run --step 2"));
    assert!(text.contains(" 50.00%"), "zero and changed: {text}");
    assert!(!text.contains("100") && !text.contains("200"), "{text}");
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

#[test]
fn bisect_names_the_first_step_its_tensors_and_the_last_good_step() {
    let place = with_nan();
    let found = place.json("bisect @run --first nan>0");
    conforms("bisect", &found);
    let first = &found["first"];
    assert_eq!((&first["step"], &found["last_good"], &found["certain"]), (&2.into(), &1.into(), &true.into()));
    let tensors = first["tensors"].as_array().unwrap();
    assert_eq!((tensors.len(), &tensors[0]["tensor"], &tensors[0]["nan"]), (1, &"layers.0.w".into(), &1.into()));
    assert_eq!(tensors[0]["first_chunk"]["chunk"], 0);
    let text = stdout(&place.run("bisect @run --first nan>0"));
    assert!(text.starts_with("step 2 is the first with nan > 0\n") && text.ends_with("\nlast good step: 1\n"), "{text}");

    let none = place.json("bisect @run --first nan>0 --tensor layers.1.*");
    conforms("bisect", &none);
    assert!(none["first"].is_null() && none["last_good"] == 2 && none["certain"] == true, "{none}");
    assert_eq!(stdout(&place.run("bisect @run --first nan>1")), "no match for nan > 1 in the statistics of 2 steps\n");
    // The change of a base is not known.
    let unchanged = place.json("bisect @run --first changed=0");
    assert_eq!((&unchanged["first"]["step"], &unchanged["without_statistics"][0]), (&2.into(), &1.into()));
    assert_eq!((&unchanged["certain"], &unchanged["last_good"]), (&false.into(), &serde_json::Value::Null));

    assert_eq!(place.run("bisect @run --first loss>3").status.code(), Some(2));
    assert_eq!(place.error("bisect @run --first nan>0 --tensor none.*").0, 10);
    assert_eq!(place.error("bisect @nowhere --first nan>0").0, 10);
}

#[test]
fn bisect_names_steps_that_it_cannot_judge() {
    let place = Place::new();
    let save = |step: u64, options: &str| {
        place.json(&format!("save @run --step {step} {options} --policy full {}", training_file(step).display()));
    };
    save(1000, "--statistics");
    let spared = place.casks();
    save(1001, "--statistics");
    damage_statistics(&place, &spared);
    save(1010, "");
    let output = place.run("--json bisect @run --first nan>0");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    conforms("bisect", &found);
    assert_eq!((output.status.code(), &found["certain"], &found["last_good"]), (Some(3), &false.into(), &1000.into()));
    assert_eq!((&found["unreadable"][0]["step"], &found["without_statistics"][0]), (&1001.into(), &1010.into()));
    let text = stdout(&place.run("bisect @run --first nan>0"));
    assert!(text.contains("not known for 1 step (1001): damaged") && text.contains("not known for 1 step (1010): no statistics"), "{text}");
}
