//! Retention, compaction, garbage collection, copies and repair.

use serde_json::{Value, json};
use tensorcask::blocking::Store;
use tensorcask::{Dtype, ErrorKind, Metadata, Policy, TensorView};

use crate::place::{Place, conforms, content, one_object, stderr, stdout, training_file};

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

/// This process is the job.
#[test]
fn a_save_by_hand_ends_no_running_job() {
    let place = Place::with_training();
    let store = Store::open(place.path("run").to_str().unwrap()).unwrap();
    let mut job = store.writer(Policy::Full).unwrap();
    let input = training_file(1000);
    let save = format!("save @run --step 2000 {}", input.display());
    place.json(&format!("save @other --step 1 {}", input.display()));
    let (code, error) = place.error(&save);
    assert_eq!((code, &error["kind"]), (11, &json!("conflict")), "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(&format!("process {} on host", std::process::id())) && message.contains("--take-over"), "{message}");
    assert_eq!(place.error("copy @run @run").0, 11);
    let state = [TensorView::new("w", Dtype::U8, &[1], &[7]).unwrap()];
    job.save(1500, &state, &[], &Metadata::default()).unwrap();
    place.json(&format!("{save} --take-over"));
    assert_eq!(job.save(1501, &state, &[], &Metadata::default()).unwrap_err().kind(), ErrorKind::Fenced);
    assert!(stdout(&place.run("log @run")).contains(&format!("by process {} on", std::process::id())));
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
    assert_eq!(told["held_by"].as_array().unwrap().iter().map(|row| row["step"].as_u64()).collect::<Vec<_>>(), [Some(1010)]);
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
fn a_copy_in_shards_is_the_same_copy() {
    let place = Place::with_training();
    let whole = place.json("copy @run @whole");
    let parts: Vec<Value> = (0..3).map(|part| place.json(&format!("copy @run @parts --shard {part}/3"))).collect();
    assert_eq!(parts[2]["shard"], "2/3");
    assert!(parts.iter().all(|part| part["snapshots"] == 0), "a part commits nothing");
    assert_eq!(place.json("log @parts")["entries"], json!([]));
    // A part that is run again finds what it has copied.
    assert_eq!(place.json("copy @run @parts --shard 1/3")["objects"], 0);
    let committed = place.json("copy @run @parts");
    assert_eq!((&committed["snapshots"], &committed["shard"]), (&whole["snapshots"], &Value::Null));
    for count in ["objects", "bytes"] {
        let of_parts: u64 = parts.iter().map(|part| part[count].as_u64().unwrap()).sum();
        assert!(of_parts > 0);
        assert_eq!(of_parts + committed[count].as_u64().unwrap(), whole[count].as_u64().unwrap(), "{count}");
    }
    assert_eq!(place.json("verify @parts")["clean"], true);
    assert_eq!(place.json("copy @run @parts --shard 0/3")["present"], 3);
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
fn the_doctor_tests_a_storage_before_the_first_save() {
    let place = Place::new();
    let found = place.run("doctor @new/run --json");
    assert_eq!(found.status.code(), Some(10), "there is no store");
    let found = one_object(&found);
    conforms("doctor", &found);
    let facts = ["has_store", "healthy", "probe_rounds", "problems"].map(|name| found[name].clone());
    assert_eq!(facts, [json!(false), json!(false), json!(20), json!([])]);
    assert!(!place.path("new").exists(), "the disk is as it was");
    assert!(stdout(&place.run("doctor @new/run")).contains("a store can be created here"));

    std::fs::write(place.path("file"), b"").unwrap();
    let refused = place.run("doctor @file/run --json");
    assert_eq!(refused.status.code(), Some(1), "no store can be there");
    let refused = one_object(&refused);
    assert_eq!(refused["error"]["kind"], "storage");
    assert!(refused["error"]["object"].as_str().unwrap().ends_with("file/run"), "{refused}");
}

/// The mounts of two hosts are two paths of one storage. Each alone may be safe.
#[test]
fn the_doctor_races_two_ways_to_one_storage() {
    let place = Place::new();
    std::fs::create_dir_all(place.path("disk")).unwrap();
    std::os::unix::fs::symlink(place.path("disk"), place.path("same")).unwrap();
    let shared = one_object(&place.run("doctor @disk/run --second @same/run --json"));
    conforms("doctor", &shared);
    assert_eq!((&shared["probe_rounds"], &shared["second_rounds"]), (&json!(20), &json!(200)), "{shared}");
    assert!(!place.path("disk/run").exists(), "the disk is as it was");

    let other = place.run("doctor @disk/run --second @other/run --json");
    assert_eq!(other.status.code(), Some(1), "not 10, as a place in which all is well and no store");
    let other = one_object(&other);
    assert_eq!((&other["second_rounds"], &other["problems"][0]["kind"]), (&Value::Null, &json!("unsafe_store")), "{other}");
    let text = stdout(&place.run("doctor @disk/run --second @other/run"));
    assert!(text.contains("it is not safe together with") && text.contains("is not seen both"), "{text}");
    place.write("state", &[]);
    place.json("save @disk/run --step 1 @state");
    assert_eq!(place.run("doctor @disk/run --second @other/run").status.code(), Some(1));
}

/// Texts of users may have any length. The width of a format specification does not.
#[test]
fn long_facts_are_listed() {
    let place = Place::new();
    let long = "x".repeat(70_000);
    place.json(&format!("save @run --step 1 --user note={long} {}", training_file(1000).display()));
    assert!(stdout(&place.run("ls @run")).contains(&long));
    assert_eq!(place.json("ls @run")["snapshots"][0]["user"]["note"], long);
}

#[test]
fn completions_and_man_pages_know_every_verb() {
    let place = Place::new();
    let help = String::from_utf8(place.run("--help").stdout).unwrap();
    let verbs = help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1).take_while(|line| !line.is_empty());
    let verbs: Vec<&str> = verbs.filter_map(|line| line.split_whitespace().next()).filter(|verb| *verb != "help").collect();
    assert!(verbs.contains(&"save") && verbs.contains(&"man"), "{verbs:?}");
    for shell in ["bash", "zsh", "fish"] {
        let script = place.json(&format!("completions {shell}"));
        conforms("completions", &script);
        let script = script["script"].as_str().unwrap();
        assert!(verbs.iter().all(|verb| script.contains(verb)), "{shell}");
        assert_eq!(place.run(&format!("completions {shell}")).stdout, script.as_bytes(), "{shell}");
    }
    let pages = place.json("man @man1");
    conforms("man", &pages);
    for verb in verbs {
        let page = std::fs::read_to_string(place.path(&format!("man1/tensorcask-{verb}.1"))).unwrap();
        assert!(page.contains(".TH") && page.contains("SYNOPSIS"), "{verb}");
    }
}

/// bash itself reads the script, and completes a verb and an option.
#[test]
fn bash_completes_verbs_and_options() {
    let place = Place::new();
    std::fs::write(place.path("script"), place.run("completions bash").stdout).unwrap();
    let complete = |words: &[&str]| {
        let program = "source \"$0\"; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _tensorcask tensorcask \"${COMP_WORDS[COMP_CWORD]}\" \"\"; \
                       echo \"${COMPREPLY[@]}\"";
        let output = std::process::Command::new("bash").arg("-c").arg(program).arg(place.path("script")).args(words).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(complete(&["tensorcask", "rest"]).trim(), "restore");
    assert!(complete(&["tensorcask", "save", "--pol"]).contains("--policy"));
}

/// A full disk refuses every byte, but not deletions. A limit on the size of files has the same effect.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_can_be_freed() {
    let place = Place::with_training();
    place.json("compact @run");
    place.json("forget @run --keep-last 1");
    let full = |arguments: &str| {
        let program =
            format!("ulimit -f 0; trap '' XFSZ; exec \"$0\" {}", arguments.replace('@', &format!("{}/", place.0.path().display())));
        std::process::Command::new("sh").args(["-c", &program, env!("CARGO_BIN_EXE_tensorcask")]).output().unwrap()
    };
    // Nothing was given up yet, and the entry that does so finds no room.
    let output = full("gc @run --apply --age-floor 0 --json");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("nothing was committed"), "{}", stderr(&output));
    // Objects that an earlier collection has marked are deleted.
    place.json("gc @run --apply");
    let before = place.casks().len();
    std::fs::write(place.path("run/casks").join(format!("{}.cask#1", "7".repeat(32))), [0; 4096]).unwrap();
    let output = full("gc @run --apply --age-floor 0 --json");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report = one_object(&output);
    assert!(report["freed_bytes"].as_u64() > Some(4096) && place.casks().len() < before, "{report}");
    assert!(place.casks().iter().all(|cask| cask.extension().is_some_and(|kind| kind == "cask")));
    // The doctor says that nothing can be written, and removes leftovers nevertheless.
    let orphan = place.path("run/casks").join(format!("{}.cask", "7".repeat(32)));
    std::fs::write(&orphan, [0; 4096]).unwrap();
    let output = full("doctor @run --apply --age-floor 0 --json");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(!orphan.exists(), "{}", stdout(&output));
    place.json("restore @run -o @out");
    assert_eq!(content(&place.path("out")), content(&training_file(1010)));
    assert_eq!(place.json("verify @run")["clean"], true);
}

#[test]
fn a_lost_log_is_told_by_every_verb() {
    let place = Place::with_training();
    let entry = |sequence: u64| place.path(&format!("run/log/{sequence:020}.json"));
    std::fs::rename(entry(2), place.path("aside")).unwrap();
    for verb in ["log @run", "gc @run --apply", "forget @run --keep-last 1"] {
        let (code, error) = place.error(verb);
        assert_eq!((code, &error["object"]), (3, &json!("log/00000000000000000002.json")), "{verb}: {error}");
    }
    std::fs::rename(place.path("aside"), entry(2)).unwrap();
    std::fs::rename(place.path("run/log"), place.path("aside")).unwrap();
    for verb in ["ls @run", "log @run", "gc @run", "stat @run", "copy @run @copy", "restore @run -o @out"] {
        let (code, error) = place.error(verb);
        assert_eq!((code, &error["object"]), (3, &json!("log/00000000000000000001.json")), "{verb}: {error}");
    }
    for verb in ["verify @run", "doctor @run --apply --age-floor 0"] {
        let output = place.run(&format!("{verb} --json"));
        assert_eq!(output.status.code(), Some(3), "{verb}: {}", stderr(&output));
    }
    std::fs::rename(place.path("aside"), place.path("run/log")).unwrap();
    assert_eq!(place.json("verify @run")["clean"], true);
}
