//! Comparisons of two steps or files.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use crate::place::{Place, conforms, content, one_object, stdout, training_file};

#[test]
fn a_step_that_was_replaced_is_compared_as_it_is_now() {
    let place = Place::with_training();
    let ids = |place: &Place| {
        let list = place.json("ls @run");
        let rows = list["snapshots"].as_array().unwrap().iter();
        rows.map(|row| (row["step"].as_u64().unwrap(), row["snapshot"].clone())).collect::<HashMap<_, _>>()
    };
    let before = ids(&place);
    place.json(&format!("save @run --step 1001 --replace {}", training_file(1010).display()));
    let after = ids(&place);
    assert_ne!(before[&1001], after[&1001]);
    let diff = place.json("diff @run 1001 1010");
    assert_eq!((&diff["a_snapshot"], &diff["b_snapshot"]), (&after[&1001], &after[&1010]), "the live ones");
    assert_eq!((&diff["changed"], diff["elements"].as_u64() > Some(0)), (&json!(0), true));
    assert!(diff["tensors"].as_array().unwrap().iter().all(|row| row["status"] == "same"), "{diff}");
    let text = stdout(&place.run("diff @run 1001 1010"));
    let shown = &after[&1001].as_str().unwrap()[..8];
    assert!(text.contains(&format!("step 1001 (snapshot {shown})")), "{text}");
}

#[test]
fn differences_are_counted() {
    let place = Place::new();
    let bf16 = |bits: [u16; 4]| bits.iter().flat_map(|bits| [*bits as u8, (*bits >> 8) as u8]).collect::<Vec<u8>>();
    let old = bf16([0x3f80, 0x0000, 0x3f80, 0x4000]);
    let new = bf16([0x3f83, 0x8000, 0x7fc0, 0x4000]);
    let zeros = [0u8; 4];
    let ones = [1u8; 4];
    let old: [(&str, Dtype, &[usize], &[u8]); 6] = [
        ("w", Dtype::BF16, &[2, 2], &old),
        ("gone", Dtype::U8, &[4], &zeros),
        ("grown", Dtype::U8, &[4], &zeros),
        ("int", Dtype::U8, &[4], &zeros),
        ("same", Dtype::F32, &[1], &zeros),
        ("typed", Dtype::U8, &[4], &zeros),
    ];
    let new: [(&str, Dtype, &[usize], &[u8]); 6] = [
        ("w", Dtype::BF16, &[2, 2], &new),
        ("new", Dtype::U8, &[4], &zeros),
        ("grown", Dtype::U8, &[2, 2], &zeros),
        ("int", Dtype::U8, &[4], &ones),
        ("same", Dtype::F32, &[1], &zeros),
        ("typed", Dtype::I8, &[4], &zeros),
    ];
    place.write("a", &old);
    place.write("b", &new);
    place.json("save @run --step 1 @a");
    place.json("save @run --step 2 @b");
    let diff = place.json("diff @run 1 2");
    let row = |name: &str| diff["tensors"].as_array().unwrap().iter().find(|row| row["name"] == name).unwrap().clone();
    let w = row("w");
    assert_eq!((&w["changed"], &w["max_ulps"], &w["nan_b"], &w["changed_share"]), (&json!(3), &json!(3), &json!(1), &json!(0.75)));
    let status = ["gone", "grown", "int", "new", "same", "typed", "w"].map(|name| row(name)["status"].as_str().unwrap().to_owned());
    assert_eq!(status, ["removed", "reshaped", "changed", "added", "same", "retyped", "changed"]);
    assert_eq!((&row("int")["changed"], &row("int")["max_ulps"]), (&json!(4), &Value::Null));
    assert_eq!((&diff["elements"], &diff["changed"], &diff["nan_b"]), (&json!(9), &json!(7), &json!(1)));

    // Real training, counted here once more.
    let place = Place::with_training();
    let pairs = content(&training_file(1000)).0.into_iter().zip(content(&training_file(1001)).0);
    let changed: usize = pairs
        .map(|(old, new)| old.3.chunks(old.1.bitsize() / 8).zip(new.3.chunks(old.1.bitsize() / 8)).filter(|(a, b)| a != b).count())
        .sum();
    assert_eq!(place.json("diff @run 1000 1001")["changed"], changed);
}

#[test]
fn differences_are_analyzed() {
    let place = Place::with_training();
    let [old, new] = [training_file(1000), training_file(1001)];
    let of_files = place.run_words(&["analyze", old.to_str().unwrap(), new.to_str().unwrap(), "--json"]);
    let of_files = one_object(&of_files);
    conforms("analyze", &of_files);
    let of_store = place.json(&format!("analyze @run 1000 1001 --png {}", place.path("a.png").display()));
    for part in ["elements", "changed", "groups", "tensors", "left_out"] {
        assert_eq!(of_files[part], of_store[part], "{part}: files and steps are the same state");
    }
    assert_eq!(of_files["changed"], place.json("diff @run 1000 1001")["changed"]);

    // One tensor of bf16, counted here once more.
    let name = "model.h.2.attn_proj.weight";
    let bits = |path: &Path| -> Vec<u16> {
        let tensor = content(path).0.into_iter().find(|tensor| tensor.0 == name).unwrap();
        assert_eq!((tensor.1, tensor.2.len()), (Dtype::BF16, 2));
        tensor.3.chunks(2).map(|pair| u16::from(pair[0]) | u16::from(pair[1]) << 8).collect()
    };
    let a = bits(&old);
    let b = bits(&new);
    let row = of_files["tensors"].as_array().unwrap().iter().find(|row| row["name"] == name).unwrap();
    let columns = row["shape"][1].as_u64().unwrap() as usize;
    let rows_changed = a.chunks(columns).zip(b.chunks(columns)).filter(|(a, b)| a != b).count();
    assert_eq!((&row["rows"], &row["rows_changed"]), (&json!(a.len() / columns), &json!(rows_changed)));
    for bit in 0..16 {
        let flipped = a.iter().zip(&b).filter(|(a, b)| (**a ^ **b) >> bit & 1 == 1).count();
        assert_eq!(row["flips"][bit], flipped as f64 / a.len() as f64, "bit {bit}");
    }
    let ordered = |bits: u16| if bits < 0x8000 { i64::from(bits) } else { -i64::from(bits & 0x7fff) };
    let distances: Vec<u64> = a.iter().zip(&b).map(|(a, b)| ordered(*a).abs_diff(ordered(*b))).collect();
    for bin in row["ulps"].as_array().unwrap() {
        let from = bin["from"].as_u64().unwrap();
        let to = bin["to"].as_u64().unwrap();
        assert_eq!(bin["elements"], distances.iter().filter(|ulps| (from..=to).contains(*ulps)).count(), "{from} to {to}");
    }
    let entropy = |bytes: Vec<u8>| {
        let mut counts = [0f64; 256];
        bytes.iter().for_each(|byte| counts[usize::from(*byte)] += 1.0);
        counts.iter().filter(|n| **n > 0.0).map(|n| -n / bytes.len() as f64 * (n / bytes.len() as f64).log2()).sum::<f64>()
    };
    let high: Vec<u8> = a.iter().zip(&b).map(|(a, b)| ((a ^ b) >> 8) as u8).collect();
    let low: Vec<u8> = b.iter().map(|b| *b as u8).collect();
    assert!((row["planes_xor"][1].as_f64().unwrap() - entropy(high)).abs() < 1e-9);
    assert!((row["planes_full"][0].as_f64().unwrap() - entropy(low)).abs() < 1e-9);

    // Model, master and both moments: a band of the picture each.
    assert_eq!(of_store["groups"].as_array().unwrap().len(), 4);
    let picture = png::Decoder::new(std::io::BufReader::new(std::fs::File::open(place.path("a.png")).unwrap()));
    let mut picture = picture.read_info().unwrap();
    let mut pixels = vec![0; picture.output_buffer_size().unwrap()];
    let frame = picture.next_frame(&mut pixels).unwrap();
    assert_eq!((frame.width, frame.height), (1200, 26 + 4 * 216));
    let red = pixels.chunks(3).filter(|pixel| *pixel == [0xc1, 0x12, 0x1f]).count();
    assert!(red > 10_000, "bars are drawn: {red}");
    let text = stdout(&place.run("analyze @run 1000 1001"));
    assert!(text.contains("exp_avg_sq, f32") && text.contains("elements changed"), "{text}");
}

#[test]
fn states_that_differ_in_tensors_are_analyzed_as_far_as_they_go() {
    let place = Place::new();
    let old: [(&str, Dtype, &[usize], &[u8]); 4] = [
        ("gone", Dtype::U8, &[1], &[0]),
        ("kept", Dtype::U8, &[2], &[1, 2]),
        ("typed", Dtype::U8, &[1], &[0]),
        ("e", Dtype::F32, &[0], &[]),
    ];
    let new: [(&str, Dtype, &[usize], &[u8]); 4] = [
        ("come", Dtype::U8, &[1], &[0]),
        ("kept", Dtype::U8, &[2], &[1, 3]),
        ("typed", Dtype::I8, &[1], &[0]),
        ("e", Dtype::F32, &[0], &[]),
    ];
    place.write("a", &old);
    place.write("b", &new);
    let report = place.json("analyze @a @b --png @c.png");
    let left: Vec<_> = report["left_out"].as_array().unwrap().iter().map(|left| [&left["name"], &left["status"]]).collect();
    assert_eq!(json!(left), json!([["come", "added"], ["gone", "removed"], ["typed", "retyped"]]));
    assert_eq!((&report["elements"], &report["changed_share"]), (&json!(2), &json!(0.5)));

    let before = place.names();
    assert_eq!(place.error("analyze @a @b --png @nowhere/c.png").0, 10);
    assert_eq!(place.error("analyze @a @missing").0, 10);
    assert_eq!(place.error("analyze @a").0, 2);
    assert_eq!(place.error("analyze @a 1 x").0, 2);
    std::fs::write(place.path("bad"), "no safetensors").unwrap();
    assert_eq!(place.error("analyze @a @bad").1["kind"], "invalid_argument");
    std::fs::remove_file(place.path("bad")).unwrap();
    assert_eq!(place.names(), before, "no half a picture is left");
}

#[test]
fn a_delta_without_changes_is_counted_too() {
    let place = Place::new();
    place.write("a", &[("w", Dtype::U8, &[4], &[1, 2, 3, 4])]);
    place.json("save @run --step 1 --policy consecutive @a");
    let saved = place.json("save @run --step 2 --policy consecutive @a");
    assert_eq!((&saved["kind"], &saved["chunks"], &saved["parent_step"]), (&json!("delta"), &json!({"unchanged": 1}), &json!(1)));
    assert_eq!((&saved["stored_bytes"], &saved["ratio"]), (&json!(0), &Value::Null));
    let unchanged = json!({"chunks": 1, "decoded_bytes": 4, "saved_bytes": 4, "stored_bytes": 0});
    assert_eq!(place.json("stat @run")["codecs"]["unchanged"], unchanged);
    assert_eq!(place.json("verify @run")["clean"], true);
    let full = place.json("save @run --step 3 --policy full --no-verify-after-encode @a");
    assert_eq!((&full["kind"], &full["parent_step"]), (&json!("base"), &Value::Null));
}
