//! Exit codes, damage, and output that is not a terminal.

use std::process::Stdio;

use safetensors::tensor::Dtype;
use serde_json::json;

use crate::place::{Place, command, conforms, content, one_object, stderr, stdout, training_file};

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
    let report = one_object(&place.run("verify @run --json"));
    assert_eq!(report["problems"].as_array().map(Vec::len), Some(1), "three steps need the cask: {report}");
    let stat = place.run("stat @run --json");
    assert_eq!(stat.status.code(), Some(3));
    let report = one_object(&stat);
    conforms("stat", &report);
    assert_eq!((&report["snapshots"], &report["unreadable"][0]["step"]), (&json!(3), &json!(1000)));
    assert_eq!(report["decisions"].as_array().map(Vec::len), Some(3), "the reasons are in the manifests");
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
    let newest = cask(1010, 1);
    let before = cask(1001, 0);
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
fn nothing_reaches_a_terminal_raw() {
    let place = Place::new();
    place.write("a", &[("\u{1b}[31mred\u{202e}\n", Dtype::U8, &[1], &[1])]);
    place.write("b", &[("\u{1b}[31mred\u{202e}\n", Dtype::U8, &[1], &[2])]);
    let run = place.path("run");
    let a = place.path("a");
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
