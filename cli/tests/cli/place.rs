//! A folder with a store, the program, and checks of its output.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::Value;
use tempfile::TempDir;

/// A folder with a store `run` in it.
pub(crate) struct Place(pub TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Arguments are split at spaces; `@` before a word stands for this folder.
    pub(crate) fn run(&self, arguments: &str) -> Output {
        let folder = format!("{}/", self.0.path().display());
        let words: Vec<String> = arguments.split_whitespace().map(|word| word.replacen('@', &folder, 1)).collect();
        self.run_words(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    pub(crate) fn run_words(&self, words: &[&str]) -> Output {
        command().args(words).stdin(Stdio::null()).output().unwrap()
    }

    /// Returns the JSON of a command that must succeed.
    pub(crate) fn json(&self, arguments: &str) -> Value {
        let output = self.run(&format!("{arguments} --json"));
        assert_eq!(output.status.code(), Some(0), "{arguments}: {}", stderr(&output));
        one_object(&output)
    }

    /// The exit code and the `error` object of a command that must fail.
    pub(crate) fn error(&self, arguments: &str) -> (i32, Value) {
        let output = self.run(&format!("{arguments} --json"));
        let report = one_object(&output);
        conforms("error", &report);
        assert!(stderr(&output).contains("error: "), "the text goes to stderr too: {arguments}");
        (output.status.code().unwrap(), report["error"].clone())
    }

    /// Three steps of real training: a base and two deltas.
    pub(crate) fn with_training() -> Self {
        let place = Self::new();
        for step in [1000, 1001, 1010] {
            let input = training_file(step);
            let arguments =
                format!("save @run --step {step} --policy intermittent --every 8 --user loss=2.5 --user note=warm {}", input.display());
            conforms("save", &place.json(&arguments));
        }
        place
    }

    pub(crate) fn write(&self, name: &str, tensors: &[(&str, Dtype, &[usize], &[u8])]) {
        let views = tensors.iter().map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        std::fs::write(self.path(name), serialize(views, Some(metadata)).unwrap()).unwrap();
    }

    pub(crate) fn casks(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.path("run/casks")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// Flips a bit in the first pages of step 1000; gives the damaged cask.
    pub(crate) fn damage(&self) -> PathBuf {
        let inspected = self.json("inspect @run --step 1000");
        let cask = self.path(&format!("run/casks/{}.cask", inspected["casks"][0]["id"].as_str().unwrap()));
        let mut bytes = std::fs::read(&cask).unwrap();
        bytes[4096] ^= 0x10;
        std::fs::write(&cask, bytes).unwrap();
        cask
    }

    /// Makes all objects of the store an hour old.
    pub(crate) fn age(&self) {
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

    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

pub(crate) fn command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_tensorcask"))
}

pub(crate) fn training_file(step: u64) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/data/step-{step}.safetensors")).canonicalize().unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn one_object(output: &Output) -> Value {
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "one object on one line: {text}{}", stderr(output));
    serde_json::from_str(&text).unwrap()
}

/// Name, dtype, shape and bytes.
pub(crate) type Held = (String, Dtype, Vec<usize>, Vec<u8>);

/// The tensors by name, and the metadata, of a safetensors file.
pub(crate) fn content(path: &Path) -> (Vec<Held>, HashMap<String, String>) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<Held> =
        file.iter().map(|(name, view)| (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec())).collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let metadata = SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap_or_default();
    (tensors, metadata)
}

/// Compares a report with `schema.json`: exactly these keys, of these types.
pub(crate) fn conforms(name: &str, value: &Value) {
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
                "uints" => value.as_array().is_some_and(|all| all.iter().all(Value::is_u64)),
                "any" => true,
                other => panic!("{at}: no such type: {other}"),
            };
            assert!(fits || (kind.ends_with('?') && value.is_null()), "{at}: {value} is no {kind}");
        }
        other => panic!("{at}: {other}"),
    }
}
