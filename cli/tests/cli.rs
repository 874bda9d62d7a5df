//! The command line, run as a program.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder with a store `run` in it.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Arguments are split at spaces; `@` before a word stands for this folder.
    fn run(&self, arguments: &str) -> Output {
        let folder = format!("{}/", self.0.path().display());
        let words: Vec<String> = arguments.split_whitespace().map(|word| word.replacen('@', &folder, 1)).collect();
        self.run_words(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn run_words(&self, words: &[&str]) -> Output {
        command().args(words).stdin(Stdio::null()).output().unwrap()
    }

    /// Returns the JSON of a command that must succeed.
    fn json(&self, arguments: &str) -> Value {
        let output = self.run(&format!("{arguments} --json"));
        assert_eq!(output.status.code(), Some(0), "{arguments}: {}", stderr(&output));
        one_object(&output)
    }

    /// The exit code and the `error` object of a command that must fail.
    fn error(&self, arguments: &str) -> (i32, Value) {
        let output = self.run(&format!("{arguments} --json"));
        let report = one_object(&output);
        conforms("error", &report);
        assert!(stderr(&output).contains("error: "), "the text goes to stderr too: {arguments}");
        (output.status.code().unwrap(), report["error"].clone())
    }

    /// Three steps of real training: a base and two deltas.
    fn with_training() -> Self {
        let place = Self::new();
        for step in [1000, 1001, 1010] {
            let input = training_file(step);
            let arguments =
                format!("save @run --step {step} --policy intermittent --every 8 --user loss=2.5 --user note=warm {}", input.display());
            conforms("save", &place.json(&arguments));
        }
        place
    }

    fn write(&self, name: &str, tensors: &[(&str, Dtype, &[usize], &[u8])]) {
        let views = tensors.iter().map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        std::fs::write(self.path(name), serialize(views, Some(metadata)).unwrap()).unwrap();
    }

    fn casks(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.path("run/casks")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// Flips a bit in the first pages of step 1000; gives the damaged cask.
    fn damage(&self) -> PathBuf {
        let inspected = self.json("inspect @run --step 1000");
        let cask = self.path(&format!("run/casks/{}.cask", inspected["casks"][0]["id"].as_str().unwrap()));
        let mut bytes = std::fs::read(&cask).unwrap();
        bytes[4096] ^= 0x10;
        std::fs::write(&cask, bytes).unwrap();
        cask
    }

    /// Makes all objects of the store an hour old.
    fn age(&self) {
        let hour_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
        let mut folders = vec![self.path("run")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => folders.push(path),
                    false => std::fs::File::options().write(true).open(path).unwrap().set_modified(hour_ago).unwrap(),
                }
            }
        }
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_tensorcask"))
}

fn training_file(step: u64) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/data/step-{step}.safetensors")).canonicalize().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn one_object(output: &Output) -> Value {
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "one object on one line: {text}{}", stderr(output));
    serde_json::from_str(&text).unwrap()
}

/// Name, dtype, shape and bytes.
type Held = (String, Dtype, Vec<usize>, Vec<u8>);

/// The tensors by name, and the metadata, of a safetensors file.
fn content(path: &Path) -> (Vec<Held>, HashMap<String, String>) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<Held> =
        file.iter().map(|(name, view)| (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec())).collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let metadata = SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap_or_default();
    (tensors, metadata)
}

/// Compares a report with `schema.json`: exactly these keys, of these types.
fn conforms(name: &str, value: &Value) {
    let schemas: Value = serde_json::from_str(include_str!("schema.json")).unwrap();
    check(value, &schemas[name], &schemas, name);
}

fn check(value: &Value, schema: &Value, schemas: &Value, at: &str) {
    match schema {
        Value::Object(keys) => {
            let object = value.as_object().unwrap_or_else(|| panic!("{at}: {value}"));
            if let Some(each) = keys.get("*") {
                object.iter().for_each(|(key, value)| check(value, each, schemas, &format!("{at}.{key}")));
                return;
            }
            let names = |map: &serde_json::Map<String, Value>| map.keys().cloned().collect::<std::collections::BTreeSet<_>>();
            assert_eq!(names(object), names(keys), "{at}");
            keys.iter().for_each(|(key, schema)| check(&object[key], schema, schemas, &format!("{at}.{key}")));
        }
        Value::Array(each) => {
            let array = value.as_array().unwrap_or_else(|| panic!("{at}: {value}"));
            array.iter().for_each(|value| check(value, &each[0], schemas, &format!("{at}[]")));
        }
        Value::String(kind) if kind.starts_with('$') => match kind.strip_suffix('?') {
            Some(_) if value.is_null() => {}
            Some(kind) => check(value, &schemas[kind], schemas, at),
            None => check(value, &schemas[kind.as_str()], schemas, at),
        },
        Value::String(kind) => {
            let hex = |text: &str| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let fits = match kind.trim_end_matches('?') {
                "uint" => value.is_u64(),
                "number" => value.is_number(),
                "bool" => value.is_boolean(),
                "string" => value.is_string(),
                "id" => value.as_str().is_some_and(hex),
                "time" => value.as_str().is_some_and(|text| text.len() == 24 && text.starts_with("20") && text.ends_with('Z')),
                "strings" => value.as_array().is_some_and(|all| all.iter().all(Value::is_string)),
                "any" => true,
                other => panic!("{at}: no such type: {other}"),
            };
            assert!(fits || (kind.ends_with('?') && value.is_null()), "{at}: {value} is no {kind}");
        }
        other => panic!("{at}: {other}"),
    }
}

#[test]
fn a_run_is_saved_listed_verified_and_restored() {
    let place = Place::with_training();
    let list = place.json("ls @run");
    let of = |key: &str| list["snapshots"].as_array().unwrap().iter().map(|row| row[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("step"), [1000, 1001, 1010]);
    assert_eq!(of("kind"), ["base", "delta", "delta"]);
    assert_eq!(of("user")[0], json!({"loss": 2.5, "note": "warm"}));
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
fn an_output_into_a_missing_folder_names_the_folder() {
    let place = Place::with_training();
    let (code, error) = place.error("restore @run -o @missing/out.safetensors");
    let folder = place.path("missing").display().to_string();
    assert_eq!((code, &error["kind"], &error["object"]), (10, &json!("not_found"), &json!(folder)));
    assert!(error["message"].as_str().unwrap().contains("the folder does not exist"), "{error}");
    assert!(!place.path("missing").exists());
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
fn pinned_steps_are_not_forgotten() {
    let place = Place::with_training();
    assert_eq!(place.json("pin @run --step 1001")["pinned"], true);
    let (code, error) = place.error("forget @run --step 1000 1001");
    assert_eq!((code, error["message"].as_str().unwrap().contains("pinned")), (1, true));
    assert_eq!(place.json("ls @run")["snapshots"].as_array().unwrap().len(), 3, "all or none");
    assert_eq!(place.json("pin @run --step 1001 --off")["pinned"], false);
    place.json("forget @run --step 1000,1001");
    assert_eq!(place.json("ls @run")["snapshots"].as_array().unwrap().len(), 1);
    place.json("restore @run -o @out");
    assert_eq!(content(&place.path("out")), content(&training_file(1010)), "its base stays");
}

#[test]
fn old_steps_are_folded_forgotten_and_collected() {
    let place = Place::with_training();
    let bytes = |place: &Place| place.casks().iter().map(|cask| cask.metadata().unwrap().len()).sum::<u64>();
    let before = bytes(&place);
    assert_eq!(place.json("forget @run --keep-last 1")["forgotten"].as_array().unwrap().len(), 2);
    let told = place.json("gc @run --age-floor 0");
    assert_eq!((&told["collected"][0]["step"], &told["held"][0]["step"]), (&json!(1001), &json!(1000)), "1010 needs 1000");
    assert!(told["held_bytes"].as_u64() > Some(0));
    let folded = place.json("compact @run");
    assert_eq!((&folded["compacted"][0]["links"], &folded["compacted"][0]["changed"]), (&json!(2), &json!(true)));
    assert_eq!(place.json("gc @run --apply")["freed_bytes"], 0, "not before the floor");
    place.age();
    let freed = place.json("gc @run --apply --age-floor 0");
    assert!(freed["freed_bytes"].as_u64() > Some(before), "all three steps were stored before");
    assert_eq!(place.casks().len(), 2);
    place.json("restore @run -o @out");
    assert_eq!(content(&place.path("out")), content(&training_file(1010)));
    assert_eq!(place.json("verify @run")["clean"], true);
}

#[test]
fn old_steps_are_reduced_to_their_weights() {
    let place = Place::with_training();
    place.json("compact @run");
    let reduced = place.json("forget @run --keep-last 1 --keep-role model");
    let steps: Vec<_> = reduced["reduced"].as_array().unwrap().iter().map(|row| (row["step"].as_u64(), &row["held"])).collect();
    assert_eq!(steps, [(Some(1001), &Value::Null), (Some(1000), &Value::Null)]);
    place.age();
    assert!(place.json("gc @run --apply --age-floor 0")["freed_bytes"].as_u64() > Some(0));
    assert_eq!(place.json("ls @run")["snapshots"][0]["roles"], json!(["model"]));
    place.json("restore @run --step 1001 -o @out");
    let (weights, _) = content(&place.path("out"));
    let (whole, _) = content(&training_file(1001));
    assert_eq!(weights, whole.into_iter().filter(|held| held.0.starts_with("model.")).collect::<Vec<_>>());
    assert!(!weights.is_empty());
    assert_eq!(place.json("verify @run")["clean"], true);
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
    let (known, unknown) = (b"\"optimizer.master.", b"\"fp32_main_copies.");
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
    let (alone, paired) = (saved("alone", "--role fp32_main_copies.*=master"), saved("paired", "--role fp32_main_copies.*=master:*"));
    assert!(alone["chunks"].get("tc.remainder").is_none());
    assert_eq!(paired["chunks"]["tc.remainder"], smallest["chunks"]["tc.remainder"]);
    for wrong in ["fp32*.*=master:*", "x=:y", "x=y:", "=y"] {
        assert_eq!(place.run(&format!("save @x --step 1 {} --role {wrong}", other.display())).status.code(), Some(2), "{wrong}");
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
fn a_copy_holds_what_is_live_and_can_be_made_again() {
    let place = Place::with_training();
    place.json("forget @run --step 1001");
    place.json("compact @run");
    let copied = place.json("copy @run @copy");
    assert_eq!((&copied["snapshots"], &copied["present"]), (&json!(2), &json!(0)), "1000 and 1010");
    for store in ["run", "copy"] {
        place.json(&format!("restore @{store} -o @{store}.out"));
        assert_eq!(content(&place.path(&format!("{store}.out"))), content(&training_file(1010)));
    }
    assert_eq!(place.json("verify @copy")["clean"], true);
    let again = place.json("copy @run @copy");
    assert_eq!((&again["snapshots"], &again["objects"], &again["present"]), (&json!(0), &json!(0), &json!(2)));
    let input = training_file(1001);
    place.json(&format!("save @run --step 1020 {}", input.display()));
    assert_eq!(place.json("copy @run @copy")["snapshots"], 1);
    assert_eq!(place.json("ls @copy")["snapshots"].as_array().unwrap().len(), 3);
    place.json("copy @run @one --step 1020");
    assert_eq!(place.json("ls @one")["snapshots"].as_array().unwrap().len(), 1);
    assert_eq!(place.error("copy @run @one").1["kind"], "invalid_argument", "older steps cannot follow newer ones");
    place.json(&format!("save @other --step 1 {}", input.display()));
    assert_eq!(place.error("copy @run @other").1["kind"], "invalid_argument", "another run");
}

#[test]
fn a_copy_of_some_steps_keeps_the_steps_it_has() {
    let place = Place::with_training();
    assert_eq!(place.json("copy @run @copy --step 1000")["snapshots"], 1);
    let steps = |expected: &[u64]| {
        let shown = place.json("ls @copy");
        let mut steps: Vec<_> = shown["snapshots"].as_array().unwrap().iter().map(|row| row["step"].as_u64().unwrap()).collect();
        steps.sort_unstable();
        assert_eq!(steps, expected);
    };
    place.json("copy @run @copy --step 1010");
    steps(&[1000, 1010]);
    place.json("copy @run @two --step 1001,1010");
    let shown = place.json("ls @two");
    assert_eq!(shown["snapshots"].as_array().unwrap().len(), 2, "their base alone is no step of the copy");
    assert_eq!(place.error("copy @run @copy --step 1010 9").0, 10);
}

#[test]
fn the_doctor_finds_leftovers_and_broken_links() {
    let place = Place::with_training();
    std::fs::write(place.path("run/casks/00000000000000000000000000000000.cask"), b"left over").unwrap();
    std::fs::write(place.path("run/casks/11111111111111111111111111111111.cask#1"), b"half").unwrap();
    let names = |report: &Value, key: &str| {
        report[key].as_array().unwrap().iter().map(|object| object["object"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let young = place.json("doctor @run --apply");
    assert_eq!((names(&young, "orphans").len(), names(&young, "staging").len(), names(&young, "young").len()), (0, 0, 1));
    place.age();
    for arguments in ["doctor @run --age-floor 0", "doctor @run --age-floor 0 --apply"] {
        let found = place.json(arguments);
        assert_eq!(names(&found, "orphans"), ["casks/00000000000000000000000000000000.cask"]);
        assert_eq!(names(&found, "staging"), ["casks/11111111111111111111111111111111.cask#1"]);
        assert_eq!((&found["healthy"], &found["probe_rounds"]), (&json!(true), &json!(20)));
    }
    let clean = place.json("doctor @run --age-floor 0");
    assert_eq!((names(&clean, "orphans").len(), names(&clean, "staging").len()), (0, 0));
    let cask = place.casks().pop().unwrap();
    std::fs::remove_file(&cask).unwrap();
    let broken = place.run("doctor @run --json --apply --age-floor 0");
    assert_eq!(broken.status.code(), Some(3));
    let broken = one_object(&broken);
    conforms("doctor", &broken);
    assert_eq!(broken["problems"][0]["object"], format!("casks/{}", cask.file_name().unwrap().to_str().unwrap()));
}

#[test]
fn exit_codes() {
    let place = Place::with_training();
    std::fs::create_dir(place.path("empty")).unwrap();
    for verb in
        ["ls", "log", "stat", "chain", "verify", "inspect", "pin --step 1", "forget --step 1", "restore -o @x", "diff 1 2", "analyze 1 2"]
    {
        for store in ["@nowhere", "@empty"] {
            let (verb, rest) = verb.split_once(' ').unwrap_or((verb, ""));
            let (code, error) = place.error(&format!("{verb} {store} {rest}"));
            assert_eq!((code, &error["kind"]), (10, &json!("not_found")), "{verb} {store}");
        }
    }
    for arguments in ["chain @run --step", "restore @run -o @x --step", "verify @run --step", "diff @run 1000", "pin @run --step"] {
        assert_eq!(place.error(&format!("{arguments} 7")).0, 10, "{arguments}");
    }
    let file = training_file(1000);
    for arguments in [
        "restore @run",
        "verify @run --shard 2/2",
        "verify @run --depth deep",
        "restore @run -o @x --slice w[1]",
        "pin @run --step latest",
        "forget @run",
        "save @run --step 1",
        &format!("save @run --step 1 --policy full --every 4 {}", file.display()),
        &format!("save @run --step 1 --every 0 {}", file.display()),
        &format!("save @run --step 1 --user a=1 --user a=2 {}", file.display()),
    ] {
        let (code, error) = place.error(arguments);
        assert_eq!((code, &error["kind"]), (2, &json!("usage")), "{arguments}");
    }
    let (code, error) = place.error(&format!("save @new --step 1 {0} {0}", file.display()));
    assert_eq!((code, &error["kind"], error["tensor"].is_string()), (1, &json!("invalid_argument"), true), "equal names");
    assert!(!place.path("new").exists(), "wrong input creates no store");
    assert_eq!(place.error("save @new --step 1 @missing.safetensors").0, 10);
    std::fs::write(place.path("bad.safetensors"), "text").unwrap();
    assert_eq!(place.error("save @new --step 1 @bad.safetensors").0, 1);
    assert_eq!(place.run("--version").status.code(), Some(0));
    assert_eq!(place.run("").status.code(), Some(2));
}

#[test]
fn damage_is_found_and_leaves_the_output_alone() {
    let place = Place::with_training();
    let damaged = place.damage();
    let found = place.run("verify @run");
    assert_eq!(found.status.code(), Some(3));
    assert!(stdout(&found).contains("page checksum mismatch"), "{}", stdout(&found));
    assert_eq!(place.run("verify @run --depth log").status.code(), Some(0), "the log is whole");

    std::fs::write(place.path("out"), "precious").unwrap();
    let before = place.names();
    let (code, error) = place.error("restore @run --step 1000 -o @out");
    assert_eq!((code, &error["kind"], error["clause"].is_string()), (3, &json!("corrupt"), true));
    assert_eq!(std::fs::read(place.path("out")).unwrap(), b"precious");
    assert_eq!(place.names(), before, "no temporary file is left");
    assert_eq!(place.error("restore @run -o @run").1["kind"], "invalid_argument", "a folder is not replaced");

    // Deltas read from their base only what they need of it: moments not the weights, which are damaged.
    assert_eq!(place.run("restore @run --step 1010 -o @out --tensor optimizer.exp_avg*").status.code(), Some(0));

    std::fs::remove_file(damaged).unwrap();
    assert_eq!(place.run("verify @run --depth log").status.code(), Some(3));
}

#[test]
fn the_newest_step_falls_back_over_damage_and_says_so() {
    let place = Place::new();
    for step in [1000, 1001, 1010] {
        place.json(&format!("save @run --step {step} --policy full {}", training_file(step).display()));
    }
    let cask = |step: u64, nth: usize| {
        let inspected = place.json(&format!("inspect @run --step {step}"));
        place.path(&format!("run/casks/{}.cask", inspected["casks"][nth]["id"].as_str().unwrap()))
    };
    // The newest lacks the end of a cask; the one before has a damaged page, which only reading finds.
    let (newest, before) = (cask(1010, 1), cask(1001, 0));
    let bytes = std::fs::read(&newest).unwrap();
    std::fs::write(&newest, &bytes[..bytes.len() / 2]).unwrap();
    let restored = place.run("restore @run -o @out --json");
    assert_eq!(restored.status.code(), Some(0), "{}", stderr(&restored));
    let report = one_object(&restored);
    conforms("restore", &report);
    assert_eq!((&report["step"], &report["skipped"][0]["step"]), (&json!(1001), &json!(1010)));
    let name = newest.file_name().unwrap().to_str().unwrap();
    assert!(report["skipped"][0]["object"].as_str().unwrap().contains(name), "{report}");
    assert!(stderr(&restored).contains("warning: step 1010") && stderr(&restored).contains(name), "{}", stderr(&restored));
    assert_eq!(content(&place.path("out")), content(&training_file(1001)));

    let mut bytes = std::fs::read(&before).unwrap();
    bytes[4096] ^= 1;
    std::fs::write(&before, bytes).unwrap();
    let report = place.json("restore @run -o @out");
    assert_eq!((&report["step"], report["skipped"].as_array().unwrap().len()), (&json!(1000), 2));
    assert_eq!(content(&place.path("out")), content(&training_file(1000)));

    // Strict, or by number: no other step is taken.
    assert_eq!(place.error("restore @run -o @out --strict").0, 3);
    assert_eq!(place.error("restore @run --step 1001 -o @out").0, 3);
    std::fs::remove_file(cask(1000, 0)).unwrap();
    assert_eq!(place.error("restore @run -o @out").0, 3, "nothing is left to fall back to");
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
    assert!(stdout(&place.run("inspect @run --step 1001")).contains("tc.ordered"));

    let truncated = std::fs::read(place.path(&format!("run/casks/{id}.cask"))).unwrap();
    std::fs::write(place.path("short.cask"), &truncated[..truncated.len() - 1]).unwrap();
    assert_eq!(place.error("inspect @short.cask").0, 3);
    std::fs::write(place.path("empty.cask"), "").unwrap();
    assert_eq!(place.error("inspect @empty.cask").0, 3);
}

/// The page of the spec that shows a whole cask is what `inspect --hex` says of the vector.
#[test]
fn the_annotated_dump_of_the_spec_is_ours() {
    let vectors = include_str!("../../spec/vectors/container.toml");
    let small = vectors.split_once("name = \"small\"").unwrap().1.split_once("hex = \"\"\"").unwrap().1.split_once("\"\"\"").unwrap().0;
    let digits: String = small.split_whitespace().collect();
    let bytes: Vec<u8> = (0..digits.len() / 2).map(|i| u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).unwrap()).collect();
    let place = Place::new();
    std::fs::write(place.path("small.cask"), &bytes).unwrap();
    let dump = stdout(&place.run("inspect --hex @small.cask"));
    let page = include_str!("../../spec/example.md");
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
fn import_and_export_name_the_python_package() {
    let place = Place::new();
    for (verb, instead) in [("import", "`tensorcask save`"), ("export", "`tensorcask restore`")] {
        for rest in ["", "@model.pt @run --step 1", "--help"] {
            let (code, said) = place.error(&format!("{verb} {rest}"));
            let said = said.to_string();
            assert!(code == 1 && said.contains("pip install tensorcask") && said.contains(instead), "{said}");
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

#[test]
fn differences_are_counted() {
    let place = Place::new();
    let bf16 = |bits: [u16; 4]| bits.iter().flat_map(|bits| [*bits as u8, (*bits >> 8) as u8]).collect::<Vec<u8>>();
    let old = bf16([0x3f80, 0x0000, 0x3f80, 0x4000]);
    let new = bf16([0x3f83, 0x8000, 0x7fc0, 0x4000]);
    let (zeros, ones) = ([0u8; 4], [1u8; 4]);
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
    let (a, b) = (bits(&old), bits(&new));
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
        let (from, to) = (bin["from"].as_u64().unwrap(), bin["to"].as_u64().unwrap());
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

#[test]
fn nothing_reaches_a_terminal_raw() {
    let place = Place::new();
    place.write("a", &[("\u{1b}[31mred\u{202e}\n", Dtype::U8, &[1], &[1])]);
    place.write("b", &[("\u{1b}[31mred\u{202e}\n", Dtype::U8, &[1], &[2])]);
    let (run, a) = (place.path("run"), place.path("a"));
    let saved = place.run_words(&["save", run.to_str().unwrap(), "--step", "1", "--user", "k=\u{1b}c", a.to_str().unwrap()]);
    assert!(saved.status.success());
    place.json("save @run --step 2 @b");
    for arguments in
        ["ls @run", "inspect @run", "diff @run 1 2", "analyze @run 1 2", "analyze @a @b", "stat @run", "log @run", "save @x --step 1 @a @b"]
    {
        for arguments in [arguments.to_owned(), format!("{arguments} --json")] {
            let output = place.run(&arguments);
            let text = stdout(&output) + &stderr(&output);
            assert!(!text.contains(['\u{1b}', '\u{202e}']), "{arguments}: {text:?}");
        }
    }
}

#[test]
fn a_closed_pipe_is_no_error() {
    let place = Place::with_training();
    let folder = place.path("run");
    for arguments in [&["ls"][..], &["log", "--json"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command().args(arguments).arg(&folder).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    }
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
        "consolidate",
        "doctor",
    ] {
        assert!(help.contains(&format!("  {verb}")), "{verb}");
        let help = stdout(&place.run(&format!("{verb} --help")));
        assert!(help.contains(&format!("Example:\n  tensorcask {verb} ")), "{help}");
    }
}
