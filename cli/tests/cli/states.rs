//! Saving, restoring and importing states.

use std::path::PathBuf;

use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use crate::place::{Place, conforms, content, stderr, stdout, training_file};

#[test]
fn a_run_is_saved_listed_verified_and_restored() {
    let place = Place::with_training();
    let list = place.json("ls @run");
    let of = |key: &str| list["snapshots"].as_array().unwrap().iter().map(|row| row[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("step"), [1000, 1001, 1010]);
    assert_eq!(of("kind"), ["base", "delta", "delta"]);
    let why = json!({"reason": "first", "since_base": 0, "estimate": null});
    let mut user = of("user")[0].clone();
    let times = user.as_object_mut().unwrap().remove("tc.times").unwrap();
    assert!(times["encode_ms"].is_number() && times["upload_ms"].is_number(), "{times}");
    assert_eq!(user, json!({"loss": 2.5, "note": "warm", "tc.policy": why}));
    assert!(!stdout(&place.run("ls @run")).contains("tc.policy"), "`stat` shows it");
    let bytes = |path: PathBuf| std::fs::metadata(path).unwrap().len();
    let on_disk: u64 = place.casks().into_iter().map(bytes).sum();
    assert_eq!(of("stored_bytes").iter().filter_map(Value::as_u64).sum::<u64>(), on_disk);

    for depth in ["log", "pages", "full"] {
        let verified = place.json(&format!("verify @run --depth {depth}"));
        assert_eq!((&verified["clean"], &verified["problems"]), (&json!(true), &json!([])));
    }
    let parts: u64 = ["0/2", "1/2"].map(|part| place.json(&format!("verify @run --shard {part}"))["casks"].as_u64().unwrap()).iter().sum();
    assert_eq!(parts, place.json("verify @run")["casks"].as_u64().unwrap(), "two parts check every cask once");

    for step in [1000, 1001, 1010] {
        let restored = place.json(&format!("restore @run --step {step} -o @out.safetensors"));
        assert_eq!(content(&place.path("out.safetensors")), content(&training_file(step)));
        assert_eq!(restored["bytes"], bytes(place.path("out.safetensors")));
        assert!(restored["chunks_read"].as_u64() <= restored["chunks_needed"].as_u64());
    }
    place.json("restore @run --strict -o @out.safetensors");
    assert_eq!(content(&place.path("out.safetensors")), content(&training_file(1010)), "the latest");
}

#[test]
fn slices_and_globs() {
    let place = Place::with_training();
    let (whole, _) = content(&training_file(1001));
    let (name, _, shape, data) = whole.iter().find(|(_, _, shape, _)| shape.len() == 2).unwrap();
    let row_bytes = data.len() / shape[0];
    let restored = place.json(&format!("restore @run --step 1001 -o @rows.safetensors --slice {name}[10:20]"));
    let (rows, _) = content(&place.path("rows.safetensors"));
    assert_eq!((rows.len(), &rows[0].0, &rows[0].2), (1, name, &vec![10, shape[1]]));
    assert_eq!(rows[0].3, data[10 * row_bytes..20 * row_bytes]);
    assert!(restored["chunks_read"].as_u64() <= restored["chunks_needed"].as_u64());

    place.json(&format!("restore @run --step 1001 -o @rows.safetensors --slice {name}[:3,2:]"));
    assert_eq!(content(&place.path("rows.safetensors")).0[0].2, [3, shape[1] - 2]);
    let master = name.replace("model.", "optimizer.master.");
    let restored = place.json(&format!("restore @run --step 1001 -o @tail --tensor model.* --slice {master}[5:]"));
    let models = whole.iter().filter(|(name, ..)| name.starts_with("model.")).count();
    assert_eq!(restored["tensors"], models + 1);

    for arguments in [format!("--slice {name}[0:1] --slice {name}[1:2]"), format!("--tensor * --slice {name}[0:1]")] {
        assert_eq!(place.error(&format!("restore @run -o @x {arguments}")).1["kind"], "invalid_argument");
    }
    assert_eq!(place.error(&format!("restore @run -o @x --slice {name}[0:1000000]")).1["kind"], "invalid_argument");
    assert_eq!(place.error("restore @run -o @x --tensor no*").0, 10);
    assert_eq!(place.error("restore @run -o @x --slice no[1:2]").0, 10);
}

#[test]
fn an_output_into_a_missing_folder_names_the_folder() {
    let place = Place::with_training();
    let (code, error) = place.error("restore @run -o @missing/out.safetensors");
    let folder = place.path("missing").display().to_string();
    assert_eq!((code, &error["kind"], &error["object"]), (10, &json!("not_found"), &json!(folder)));
    assert!(error["message"].as_str().unwrap().contains("the folder does not exist"), "{error}");
    assert!(!place.path("missing").exists());
}

#[test]
fn codecs_serve_an_objective_and_roles_may_be_told() {
    let place = Place::with_training();
    let input = training_file(1000);
    let saved = |arguments: &str| place.json(&format!("save @{arguments} --policy full --step 1 {}", input.display()));
    let [smallest, fastest] = ["smallest", "fastest"].map(|name| saved(&format!("{name} --objective {name}")));
    assert!(smallest["stored_bytes"].as_u64() < fastest["stored_bytes"].as_u64(), "{smallest} {fastest}");
    let weighed = saved("weighed --objective 1,0,0");
    assert_eq!(weighed["stored_bytes"], smallest["stored_bytes"]);
    assert_ne!(place.run(&format!("save @x --step 1 --objective 1,1,1 {}", input.display())).status.code(), Some(0));

    // Without its role, a master has no partner.
    let renamed = saved("renamed --objective smallest --role optimizer.master.*=other");
    assert!(renamed["chunks"].get("tc.remainder").is_none() && smallest["chunks"].get("tc.remainder").is_some());
    for store in ["smallest", "fastest", "weighed", "renamed"] {
        place.json(&format!("restore @{store} -o @{store}.out"));
        assert_eq!(content(&place.path(&format!("{store}.out"))), content(&input), "{store}");
    }

    // Under a name that nobody knows, it has one again once it is told what it is, and of what.
    let mut bytes = std::fs::read(&input).unwrap();
    let known = b"\"optimizer.master.";
    let unknown = b"\"fp32_main_copies.";
    for at in 0..bytes.len() - known.len() {
        if bytes[at..].starts_with(known) {
            bytes[at..at + unknown.len()].copy_from_slice(unknown);
        }
    }
    let other = place.path("other.safetensors");
    std::fs::write(&other, bytes).unwrap();
    let saved = |name: &str, role: &str| {
        place.json(&format!("save @{name} --policy full --step 1 --objective smallest {} {role}", other.display()))
    };
    let alone = saved("alone", "--role fp32_main_copies.*=master");
    let paired = saved("paired", "--role fp32_main_copies.*=master:*");
    assert!(alone["chunks"].get("tc.remainder").is_none());
    assert_eq!(paired["chunks"]["tc.remainder"], smallest["chunks"]["tc.remainder"]);
    for wrong in ["fp32*.*=master:*", "x=:y", "x=y:", "=y"] {
        assert_eq!(place.run(&format!("save @x --step 1 {} --role {wrong}", other.display())).status.code(), Some(2), "{wrong}");
    }
}

#[test]
fn a_codec_is_assigned_by_role_or_name() {
    let place = Place::new();
    for step in [1000, 1001] {
        let input = training_file(step);
        let saved = place.json(&format!("save @run --policy consecutive --step {step} --codec model=tc.bitmask {}", input.display()));
        conforms("save", &saved);
        assert_eq!(saved["chunks"].get("tc.bitmask"), (step == 1001).then_some(&json!(6)), "a base has no base to compare with: {saved}");
        place.json("restore @run -o @out.safetensors");
        assert_eq!(content(&place.path("out.safetensors")), content(&input));
    }
    let other = |rules: &str| format!("save @other --step 1 {rules} {}", training_file(1000).display());
    let (code, error) = place.error(&other("--codec *=tc.raw --codec *.ln_1.bias=tc.ordered --codec model=tc.remainder"));
    assert_eq!((code, &error["kind"]), (1, &json!("invalid_argument")), "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("tc.remainder") && message.contains("cannot store bf16 of role `model`"), "{error}");
    for (wrong, cause) in [("model=tc.bitmsk", "unknown codec"), ("tc.raw", "PATTERN=CODEC")] {
        let output = place.run(&other(&format!("--codec {wrong}")));
        assert_eq!(output.status.code(), Some(2), "{wrong}");
        assert!(stderr(&output).contains(cause), "{}", stderr(&output));
    }
}

#[test]
fn what_is_rounded_is_told_by_every_verb() {
    let place = Place::new();
    let input = training_file(1000);
    let saved = place.json(&format!("save @run --step 1 --precision near --precision exp_avg_sq=loguniform:8<=0.044 {}", input.display()));
    conforms("save", &saved);
    let greatest = saved["rounding"]["max_relative"].as_f64().unwrap();
    assert!((0.02..0.044).contains(&greatest), "{greatest}");
    let stat = place.json("stat @run");
    conforms("stat", &stat);
    let roles: Vec<&String> = stat["rounding"].as_object().unwrap().keys().collect();
    assert_eq!(roles, ["exp_avg", "exp_avg_sq", "master"]);
    assert!(stat["rounding"]["exp_avg_sq"]["update"].as_f64().unwrap() < 0.03);
    let inspected = place.json("inspect @run --tensor optimizer.exp_avg_sq.h.2.ln_1.bias");
    conforms("inspect", &inspected);
    assert_eq!(inspected["rounding"][0]["setting"], "loguniform:8");
    let verified = place.json("verify @run");
    conforms("verify", &verified);
    assert_eq!(verified["rounding"]["max_relative"], saved["rounding"]["max_relative"]);
    // A bound of the reader's own.
    assert_eq!(place.run("verify @run --max-error 0.05").status.code(), Some(0));
    let refused = place.run("verify @run --max-error 0.001");
    assert_eq!(refused.status.code(), Some(1));
    assert!(stdout(&refused).contains("was saved with loguniform:"), "{}", stdout(&refused));
    for wrong in ["almost", "exp_avg=loguniform:5", "exp_avg=cluster<=many"] {
        let output = place.run(&format!("save @other --step 1 --precision {wrong} {}", input.display()));
        assert_eq!(output.status.code(), Some(2), "{wrong}");
        assert!(stderr(&output).contains("loguniform:STEPS"), "{}", stderr(&output));
    }
    assert!(!place.path("other").exists());
}

#[test]
fn the_profile_that_auto_chooses_is_told_with_its_reason() {
    let place = Place::new();
    let save = |step: u64, precision: &str| {
        // Each weight moves by a thousandth in each step, up or down.
        let sign = |at: u64| if at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 0 { 1.0 } else { -1.0 };
        let numbers = (0..4096u64).map(|at| (at as f32 / 977.0).sin() + sign(at) * 1e-3 * step as f32);
        let bytes: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
        place.write("state.safetensors", &[("optim.master.w", Dtype::F32, &[64, 64], &bytes)]);
        place.json(&format!("save @run --step {step} --precision {precision} @state.safetensors"))
    };
    let saved: Vec<Value> = (1..9).map(|step| save(step, "auto")).collect();
    saved.iter().for_each(|saved| conforms("save", saved));
    let of = |key: &str| saved.iter().map(|saved| saved["precision"][key].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(of("profile"), ["lossless", "lossless", "lossless", "near", "near", "near", "compact", "compact"]);
    assert_eq!(of("reason"), ["first", "waiting", "waiting", "waiting", "waiting", "waiting", "stable", "stable"]);
    assert!((0.0005..0.003).contains(&saved[7]["precision"]["change"].as_f64().unwrap()), "{}", saved[7]);
    let release = save(9, "lossless");
    assert!(release["precision"].is_null() && release["rounding"].is_null());

    let stat = place.json("stat @run");
    conforms("stat", &stat);
    let rows = stat["precisions"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(rows[7]["precision"], saved[7]["precision"]);
    let table = stdout(&place.run("stat @run"));
    assert!(table.contains("compact    stable"), "{table}");
    conforms("inspect", &place.json("inspect @run --step 8"));
    let told = stdout(&place.run("inspect @run --step 8"));
    assert!(told.contains("precision: auto: compact: stable; weights changed by"), "{told}");
    assert!(!stdout(&place.run("inspect @run")).contains("precision:"), "the release has no decision");
}

#[test]
fn verbs_of_the_python_package_name_it() {
    let place = Place::new();
    let verbs =
        [("import", "[torch]", "`tensorcask save`"), ("export", "[torch]", "`tensorcask restore`"), ("sql", "[sql]", "`tensorcask stats")];
    for (verb, extra, instead) in verbs {
        for rest in ["", "@model.pt @run --step 1", "--help"] {
            let (code, said) = place.error(&format!("{verb} {rest}"));
            let said = said.to_string();
            assert!(code == 1 && said.contains(&format!("pip install './python{extra}'")) && said.contains(instead), "{said}");
        }
    }
}

#[test]
fn a_sharded_model_is_imported_by_its_index() {
    let place = Place::new();
    place.write("model-1.safetensors", &[("a", Dtype::U8, &[2], &[1, 2])]);
    place.write("model-2.safetensors", &[("b", Dtype::U8, &[3], &[3, 4, 5])]);
    place.write("both.safetensors", &[("a", Dtype::U8, &[2], &[1, 2]), ("b", Dtype::U8, &[3], &[3, 4, 5])]);
    let index =
        |map: Value| std::fs::write(place.path("model.safetensors.index.json"), json!({ "metadata": {}, "weight_map": map }).to_string());
    index(json!({ "a": "model-1.safetensors", "b": "model-2.safetensors" })).unwrap();
    place.json("save @run --step 1 @model.safetensors.index.json");
    place.json("restore @run -o @out.safetensors");
    assert_eq!(content(&place.path("out.safetensors")), content(&place.path("both.safetensors")));

    let refused = |map: Value, words: &str| {
        index(map).unwrap();
        let (_, said) = place.error("save @run --step 2 @model.safetensors.index.json");
        assert!(said.to_string().contains(words), "{said}");
    };
    refused(json!({ "a": "model-1.safetensors", "c": "model-2.safetensors" }), "is named by the index, and no file has it");
    refused(json!({ "a": "../model-1.safetensors" }), "outside of its folder");
    refused(json!({ "a": "" }), "outside of its folder");
    refused(json!({ "a": "model-3.safetensors" }), "model-3.safetensors");
    refused(json!(["a"]), "not the index of a sharded model");
    assert_eq!(place.json("ls @run")["snapshots"].as_array().unwrap().len(), 1);
}

#[test]
fn blobs_with_hostile_names_stay_in_their_folder() {
    let place = Place::new();
    place.write("a.safetensors", &[("w", Dtype::U8, &[1], &[1])]);
    let names = ["../../x", "/etc/x", "..", ".", "a b\n", "rng"];
    let mut words = vec!["save".to_owned(), place.path("run").display().to_string(), "--step".into(), "1".into()];
    for (at, name) in names.iter().enumerate() {
        let file = place.path(&format!("blob{at}"));
        std::fs::write(&file, format!("blob {at}")).unwrap();
        words.extend(["--blob".to_owned(), format!("{name}={}", file.display())]);
    }
    words.push(place.path("a.safetensors").display().to_string());
    let saved = place.run_words(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(saved.status.success(), "{}", stderr(&saved));
    let before = place.names();
    std::fs::create_dir(place.path("deep")).unwrap();
    assert_eq!(place.json("restore @run -o @deep/out --blobs @deep/blobs")["blobs"], names.len());
    let expected = ["0-..%2F..%2Fx", "0-%2Fetc%2Fx", "0-..", "0-.", "0-a%20b%0A", "0-rng"];
    for (at, name) in expected.iter().enumerate() {
        assert_eq!(std::fs::read_to_string(place.path("deep/blobs").join(name)).unwrap(), format!("blob {at}"));
    }
    assert_eq!(std::fs::read_dir(place.path("deep/blobs")).unwrap().count(), names.len());
    assert_eq!(std::fs::read_dir(place.path("deep")).unwrap().count(), 2);
    assert_eq!(place.names().len(), before.len() + 1);
}
