//! `tensorcask gradient` on two steps of a first moment.

use safetensors::tensor::{Dtype, SafeTensors};

use crate::place::{Place, conforms, stdout};

const ROWS: usize = 90;
const COLUMNS: usize = 100;

fn bytes(numbers: impl Iterator<Item = f32>) -> Vec<u8> {
    numbers.flat_map(f32::to_le_bytes).collect()
}

/// Gradient of bf16 numbers.
fn gradient(at: usize) -> f32 {
    (at * 97 % 255) as f32 - 127.0
}

/// A store with a weight and its first moment at steps 1, 2 and 4.
fn trained() -> Place {
    let place = Place::new();
    let mut moment: Vec<f32> = (0..ROWS * COLUMNS).map(|at| (at as f32).sin()).collect();
    for step in [1, 2, 4] {
        let weight = bytes((0..ROWS * COLUMNS).map(|at| (at * step) as f32));
        let stored = bytes(moment.iter().copied());
        let shape = [ROWS, COLUMNS];
        place.write("state", &[("model.w", Dtype::F32, &shape, &weight), ("exp_avg.w", Dtype::F32, &shape, &stored)]);
        conforms("save", &place.json(&format!("save @run --step {step} --policy consecutive @state")));
        moment.iter_mut().enumerate().for_each(|(at, m)| *m = 0.1f32.mul_add(gradient(at) - *m, *m));
    }
    place
}

#[test]
fn a_gradient_is_written_and_summed_up() {
    let place = trained();
    let found = place.json("gradient @run model.w --step 2 -o @out");
    conforms("gradient", &found);
    assert_eq!((&found["moment"], &found["shape"]), (&"exp_avg.w".into(), &serde_json::json!([ROWS, COLUMNS])));
    assert_eq!((&found["min"], &found["max"], &found["nonfinite"]), (&(-127.0).into(), &127.0.into(), &0.into()));
    assert!(found["longest_bits"].as_u64().unwrap() <= 8, "{found}");
    let squares: f64 = (0..ROWS * COLUMNS).map(|at| f64::from(gradient(at)).powi(2)).sum();
    assert!((found["norm"].as_f64().unwrap() / squares.sqrt() - 1.0).abs() < 1e-9, "{found}");
    let file = std::fs::read(place.path("out")).unwrap();
    let written = SafeTensors::deserialize(&file).unwrap();
    let tensor = written.tensor("model.w").unwrap();
    assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[ROWS, COLUMNS][..]));
    assert!(tensor.data() == bytes((0..ROWS * COLUMNS).map(gradient)));

    let part = place.json("gradient @run exp_avg.w --step 2 --slice 3:5,:7 --out @part");
    conforms("gradient", &part);
    assert_eq!(part["shape"], serde_json::json!([2, 7]));
    let file = std::fs::read(place.path("part")).unwrap();
    let expected = bytes((3..5).flat_map(|row| (0..7).map(move |column| gradient(row * COLUMNS + column))));
    assert!(SafeTensors::deserialize(&file).unwrap().tensor("exp_avg.w").unwrap().data() == expected);
    let text = stdout(&place.run("gradient @run model.w --step 2"));
    assert!(text.contains("norm") && text.contains("exp_avg.w"), "{text}");
}

#[test]
fn a_step_without_its_gradient_is_an_error() {
    let place = trained();
    for (arguments, words) in [
        ("model.w --step 1", "is stored as a base"),
        ("model.w", "a delta against step 2, which is not the step before"),
        ("model.x --step 2", "no tensor of this name"),
    ] {
        let (code, error) = place.error(&format!("gradient @run {arguments} -o @out"));
        assert_eq!(code, 10, "{error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    assert!(!place.path("out").exists());
    assert_eq!(place.run("gradient @run model.w --step 2 --slice 5").status.code(), Some(2));
    assert_eq!(place.error("gradient @run model.w --step 2 --slice 0:91").1["kind"], "invalid_argument");
}
