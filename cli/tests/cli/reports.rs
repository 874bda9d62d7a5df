//! Reports about a store, as text and as JSON.

use serde_json::{Value, json};

use crate::place::{Place, conforms, content, one_object, stdout, training_file};

#[test]
fn every_report_has_the_documented_keys() {
    let place = Place::with_training();
    std::fs::write(place.path("state"), "x").unwrap();
    let last = training_file(1010);
    conforms("save", &place.json(&format!("save @run --step 1011 --blob rng=@state {}", last.display())));
    for (verb, arguments) in [
        ("restore", "restore @run -o @out --blobs @blobs"),
        ("verify", "verify @run --step 1001 --shard 0/1"),
        ("ls", "ls @run"),
        ("chain", "chain @run --step 1001"),
        ("inspect", "inspect @run --step 1001"),
        ("diff", "diff @run 1000 latest"),
        ("analyze", "analyze @run 1000 latest"),
        ("stat", "stat @run"),
        ("pin", "pin @run --step 1000"),
        ("pin", "pin @run --step 1000 --off"),
        ("compact", "compact @run --step 1001"),
        ("forget", "forget @run --keep-last 1 --dry-run"),
        ("forget", "forget @run --step 1001 --keep-role model"),
        ("forget", "forget @run --step 1001 1010"),
        ("gc", "gc @run"),
        ("gc", "gc @run --apply"),
        ("doctor", "doctor @run"),
        ("copy", "copy @run @copy"),
        ("fork", "fork @run @fork --step 1000"),
        ("consolidate", "consolidate @run @archive"),
        ("log", "log @run"),
    ] {
        conforms(verb, &place.json(arguments));
    }
    let cask = place.casks().pop().unwrap();
    conforms("inspect file", &place.json(&format!("inspect {}", cask.display())));
    place.damage();
    let broken = place.run("verify @run --json");
    conforms("verify", &one_object(&broken));
    for arguments in ["ls @nowhere", "ls", "restore @run --json", "nonsense"] {
        place.error(arguments);
    }
}

#[test]
fn the_log_the_chain_and_the_totals() {
    let place = Place::with_training();
    place.json("pin @run --step 1001");
    place.json("forget @run --step 1000");
    let log = place.json("log @run");
    let kinds: Vec<&str> = log["entries"].as_array().unwrap().iter().map(|entry| entry["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["opened", "added", "opened", "added", "opened", "added", "pinned", "forgotten"]);
    assert_eq!(log["entries"][5]["what"], "step 1010, a delta on step 1000");
    assert!(stdout(&place.run("log @run")).contains("encode "));
    let times = |entry: usize| &log["entries"][entry]["times"];
    assert!(times(5)["encode_ms"].as_f64() > Some(0.0) && times(5)["save_ms"].is_null());
    assert!(times(1).is_null() && times(6).is_null(), "a forgotten snapshot, and an entry that saves nothing");
    assert_eq!((&log["entries"][7]["steps"], &log["entries"][6]["steps"]), (&json!([1000]), &json!([1001])));

    let chain = place.json("chain @run");
    let links: Vec<(u64, &str)> =
        chain["links"].as_array().unwrap().iter().map(|link| (link["step"].as_u64().unwrap(), link["status"].as_str().unwrap())).collect();
    assert_eq!(links, [(1010, "live"), (1000, "forgotten")]);

    let stat = place.json("stat @run");
    assert_eq!((&stat["snapshots"], &stat["bases"], &stat["deltas"]), (&json!(2), &json!(0), &json!(2)));
    assert_eq!((&stat["kept_snapshots"], stat["kept_bytes"].as_u64() > Some(0)), (&json!(1), true));
    let sum = |table: &str, key: &str| stat[table].as_object().unwrap().values().map(|row| row[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!(stat["tensor_bytes"], sum("codecs", "decoded_bytes"), "every chunk is counted");
    assert_eq!(stat["tensor_bytes"], sum("roles", "tensor_bytes"));
    let stored = sum("codecs", "stored_bytes");
    assert_eq!(stored, sum("roles", "stored_bytes"));
    assert_eq!(stat["stored_bytes"], stored + stat["blob_bytes"].as_u64().unwrap() + stat["overhead_bytes"].as_u64().unwrap());
    let roles: Vec<&String> = stat["roles"].as_object().unwrap().keys().collect();
    assert_eq!(roles, ["exp_avg", "exp_avg_sq", "master", "model"]);
}

#[test]
fn an_unchanged_state_stores_metadata_only() {
    let place = Place::with_training();
    let input = training_file(1010);
    let arguments = format!("save @run --step 1011 --policy consecutive {}", input.display());
    let text = stdout(&place.run(&arguments));
    let stored = text.lines().find(|line| line.starts_with("stored")).unwrap();
    assert!(stored.contains(" 0 B (") && stored.ends_with(" with metadata)"), "{stored}");
    assert!(text.contains("rounding  none (lossless)"), "{text}");
    let saved = place.json(&arguments.replace("1011", "1012"));
    assert_eq!(saved["stored_bytes"], 0);
    assert!(saved["written_bytes"].as_u64() > Some(0), "{saved}");
    let saved = place.json(&format!("save @run --step 1013 {}", training_file(1001).display()));
    assert!(saved["written_bytes"].as_u64() > saved["stored_bytes"].as_u64(), "{saved}");
}

#[test]
fn casks_are_inspected() {
    let place = Place::with_training();
    let store = place.json("inspect @run --step 1000");
    let casks = store["casks"].as_array().unwrap();
    let tensors: usize = casks.iter().map(|cask| cask["tensors"].as_array().unwrap().len()).sum();
    assert_eq!((tensors, &store["kind"]), (content(&training_file(1000)).0.len(), &json!("base")));
    assert_eq!(store["tensors"].as_array().unwrap().len(), tensors);

    let id = casks[0]["id"].as_str().unwrap();
    let file = place.json(&format!("inspect @run/casks/{id}.cask"));
    let mut same = casks[0].clone();
    same["slot"] = Value::Null;
    assert_eq!(file["cask"], same);
    let name = casks[0]["tensors"][0]["name"].as_str().unwrap();
    assert_eq!(place.json(&format!("inspect @run/casks/{id}.cask --tensor {name}"))["cask"]["tensors"].as_array().unwrap().len(), 1);
    assert_eq!(place.json(&format!("inspect @run --tensor {name}"))["tensors"][0]["name"], name);
    assert_eq!(place.error(&format!("inspect @run/casks/{id}.cask --tensor nothing")).0, 10);
    assert_eq!(place.error("inspect @run --tensor nothing").0, 10);
    let text = stdout(&place.run("inspect @run --step 1001"));
    assert!(text.contains("tc.ordered") && text.contains("why: policy; snapshot 1 after the last base"), "{text}");

    let truncated = std::fs::read(place.path(&format!("run/casks/{id}.cask"))).unwrap();
    std::fs::write(place.path("short.cask"), &truncated[..truncated.len() - 1]).unwrap();
    assert_eq!(place.error("inspect @short.cask").0, 3);
    std::fs::write(place.path("empty.cask"), "").unwrap();
    assert_eq!(place.error("inspect @empty.cask").0, 3);
}

/// The page of the spec that shows a whole cask is what `inspect --hex` says of the vector.
#[test]
fn the_annotated_dump_of_the_spec_is_ours() {
    let vectors = include_str!("../../../spec/vectors/container.toml");
    let small = vectors.split_once("name = \"small\"").unwrap().1.split_once("hex = \"\"\"").unwrap().1.split_once("\"\"\"").unwrap().0;
    let digits: String = small.split_whitespace().collect();
    let bytes: Vec<u8> = (0..digits.len() / 2).map(|i| u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).unwrap()).collect();
    let place = Place::new();
    std::fs::write(place.path("small.cask"), &bytes).unwrap();
    let dump = stdout(&place.run("inspect --hex @small.cask"));
    let page = include_str!("../../../spec/example.md");
    let shown = page.split_once("```dump\n").unwrap().1.split_once("```").unwrap().0;
    assert!(dump == shown, "{dump}");

    // Every byte belongs to one region.
    let report = place.json("inspect --hex @small.cask");
    conforms("inspect hex", &report);
    let mut end = 0;
    for region in report["regions"].as_array().unwrap() {
        assert_eq!(region["offset"], json!(end));
        end += region["bytes"].as_u64().unwrap();
    }
    assert_eq!(end, bytes.len() as u64);
    assert_eq!(place.error("inspect --hex @").0, 1);
}

#[test]
fn every_verb_explains_itself() {
    let place = Place::new();
    let help = stdout(&place.run("--help"));
    for verb in [
        "save",
        "restore",
        "verify",
        "ls",
        "chain",
        "log",
        "inspect",
        "diff",
        "analyze",
        "stat",
        "pin",
        "forget",
        "compact",
        "gc",
        "copy",
        "fork",
        "consolidate",
        "doctor",
    ] {
        assert!(help.contains(&format!("  {verb}")), "{verb}");
        let help = stdout(&place.run(&format!("{verb} --help")));
        assert!(help.contains(&format!("Example:\n  tensorcask {verb} ")), "{help}");
    }
}
