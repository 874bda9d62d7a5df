//! `save --check`, and `forget` that keeps the last finite step.

use safetensors::tensor::Dtype;

use crate::place::{Place, conforms, stdout};

fn write(place: &Place, number: f32) {
    let bytes: Vec<u8> = [number].into_iter().flat_map(f32::to_le_bytes).collect();
    place.write("state", &[("model.w", Dtype::F32, &[1], &bytes), ("optimizer.exp_avg.w", Dtype::F32, &[1], &[0; 4])]);
}

#[test]
fn a_state_with_nan_is_refused_or_marked() {
    let place = Place::new();
    write(&place, f32::NAN);
    let (code, error) = place.error("save @run --step 1 --check finite @state");
    assert_eq!((code, &error["kind"], &error["tensor"]), (1, &"invalid_argument".into(), &"model.w".into()));
    let saved = place.json("save @run --step 1 --check tag @state");
    conforms("save", &saved);
    assert_eq!(saved["finite"], false);
    assert!(stdout(&place.run("save @run --step 2 --check tag @state")).contains("no: NaN or infinities"));
    assert!(place.json("save @run --step 3 @state")["finite"].is_null());
    assert_eq!(place.run("save @run --step 3 --check all @state").status.code(), Some(2));
}

#[test]
fn forget_says_which_finite_step_stays() {
    let place = Place::new();
    for (step, number) in [(1, 1.0), (2, 2.0), (3, f32::NAN), (4, f32::NAN)] {
        write(&place, number);
        place.json(&format!("save @run --step {step} --check tag --policy full @state"));
    }
    let told = place.json("forget @run --keep-last 2 --dry-run");
    conforms("forget", &told);
    assert_eq!((&told["forgotten"][0]["step"], &told["kept_finite"]), (&1.into(), &2.into()));
    let text = stdout(&place.run("forget @run --keep-last 2"));
    assert!(text.contains("step 1 is forgotten\n") && text.contains("step 2 stays: it is the newest finite step"), "{text}");
    write(&place, 5.0);
    place.json("save @run --step 5 --check tag --policy full @state");
    let done = place.json("forget @run --keep-last 1 --keep-weights-every 2");
    conforms("forget", &done);
    assert!(done["kept_finite"].is_null(), "{done}");
    let steps = |rows: &serde_json::Value| rows.as_array().unwrap().iter().map(|row| row["step"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!((steps(&done["forgotten"]), steps(&done["reduced"])), (vec![3], vec![4, 2]));
}

#[test]
fn a_save_compares_its_parameters_with_the_steps_before() {
    let place = Place::new();
    let save = |step: u64, options: &str| {
        write(&place, 0.5);
        place.run(&format!("save @run --step {step} {options} @state"))
    };
    for step in [1, 2] {
        assert!(save(step, "").stderr.is_empty());
    }
    let warned = save(3, "");
    let warning = String::from_utf8(warned.stderr).unwrap();
    assert!(warned.status.success() && warning.contains("tensor `model.w` has not changed since step 1"), "{warning}");
    assert!(save(4, "--frozen model.*").stderr.is_empty());
    let saved = place.json("save @run --step 5 @state");
    conforms("save", &saved);
    assert_eq!((&saved["unchanged"][0]["tensor"], &saved["unchanged"][0]["since_step"]), (&"model.w".into(), &3.into()));
    assert_eq!(save(6, "--frozen [").status.code(), Some(2));
}
