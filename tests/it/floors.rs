//! The structure of the code: modules of the library and of the engine import only from modules declared before them, and the
//! files of the library, its kernels, the engine and the conformance suite import each other in no circle. For Python, see
//! `python/tests/test_modules.py`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

type Names = Vec<String>;

/// Paths that a file names (`crate::a::B`, `super::C`), each from the crate's root.
#[derive(Default)]
struct Source {
    /// All paths.
    paths: BTreeSet<Names>,
    /// Paths without those that a module only shows, by a `pub use` beside its submodules.
    needed: BTreeSet<Names>,
    /// Names that other files can reach through this one, with their origin.
    reexports: BTreeMap<String, Names>,
}

/// Reads one path, with nested braces: its names one by one, until something else follows.
fn expand(tokens: &mut std::iter::Peekable<proc_macro2::token_stream::IntoIter>, mut prefix: Names, out: &mut Vec<Names>) {
    loop {
        match tokens.peek().cloned() {
            Some(TokenTree::Ident(name)) => prefix.push(name.to_string()),
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace && !prefix.is_empty() => {
                let mut inner = group.stream().into_iter().peekable();
                while inner.peek().is_some() {
                    expand(&mut inner, prefix.clone(), out);
                    // To the comma: `as Name` and the like say nothing of where a name comes from.
                    while inner.next().is_some_and(|token| !matches!(&token, TokenTree::Punct(mark) if mark.as_char() == ',')) {}
                }
                return;
            }
            _ => return out.push(prefix),
        }
        tokens.next();
        let mut ahead = tokens.clone();
        let is_colon = |token: Option<TokenTree>| matches!(token, Some(TokenTree::Punct(mark)) if mark.as_char() == ':');
        if !(is_colon(ahead.next()) && is_colon(ahead.next())) {
            return out.push(prefix);
        }
        tokens.next();
        tokens.next();
    }
}

/// From `super::X` in `module` to the names from the root; none for a path that does not begin at a module of the crate.
fn absolute(module: &[String], children: &BTreeSet<String>, path: &[String]) -> Option<Names> {
    // `pub(crate)`, `pub(super)` and `self.field` import nothing.
    if let [only] = path
        && matches!(only.as_str(), "crate" | "super" | "self")
    {
        return None;
    }
    let (mut at, mut rest) = match path.first()?.as_str() {
        "crate" => (vec![], &path[1..]),
        "super" | "self" => (module.to_vec(), path),
        // One name alone is a field or a variable that is called like a module.
        child if children.contains(child) && path.len() > 1 => (module.to_vec(), path),
        _ => return None,
    };
    while let Some("super" | "self") = rest.first().map(String::as_str) {
        if rest[0] == "super" {
            at.pop();
        }
        rest = &rest[1..];
    }
    at.extend(rest.iter().cloned());
    Some(at)
}

fn scan(tokens: TokenStream, module: &[String], children: &BTreeSet<String>, source: &mut Source) {
    let mut tokens = tokens.into_iter().peekable();
    let mut last = [String::new(), String::new()];
    while let Some(token) = tokens.peek() {
        let text = match token {
            TokenTree::Ident(name) => name.to_string(),
            TokenTree::Group(group) => {
                let inner = match last[0].as_str() {
                    "mod" if last[1] == "tests" => None,
                    "mod" => Some([module, std::slice::from_ref(&last[1])].concat()),
                    _ => Some(module.to_vec()),
                };
                if let Some(inner) = inner {
                    scan(group.stream(), &inner, children, source);
                }
                // `pub(crate)` is like `pub`.
                if last[1] == "pub" { last[1].clone() } else { String::new() }
            }
            _ => String::new(),
        };
        let begins = matches!(text.as_str(), "crate" | "super" | "self") || children.contains(&text);
        if begins && last[1] != "pub" && last[1] != "mod" {
            let is_use = last[1] == "use";
            let is_reexport = is_use && last[0] == "pub";
            let mut found = Vec::new();
            expand(&mut tokens, vec![], &mut found);
            for path in found.iter().filter_map(|path| absolute(module, children, path)) {
                // Submodules also reach what a module imports for itself.
                if let Some(name) = path.last().filter(|_| is_use) {
                    source.reexports.insert(name.clone(), path.clone());
                }
                if !is_reexport || children.is_empty() {
                    source.needed.insert(path.clone());
                }
                source.paths.insert(path);
            }
            last = Default::default();
            continue;
        }
        last = [std::mem::take(&mut last[1]), text];
        tokens.next();
    }
}

/// Text of all files below a crate's `src`, by module path.
fn texts(root: &Path) -> BTreeMap<Names, String> {
    let mut files: BTreeMap<Names, String> = BTreeMap::new();
    let mut folders = vec![(root.to_owned(), Names::new())];
    while let Some((folder, module)) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let own = [module.as_slice(), std::slice::from_ref(&name)].concat();
            if path.is_dir() {
                folders.push((path, own));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let own = if matches!(name.as_str(), "lib" | "main" | "mod") { module.clone() } else { own };
                files.insert(own, std::fs::read_to_string(path).unwrap());
            }
        }
    }
    files
}

/// Names in all files below a crate's `src`, by module path.
fn sources(root: &Path) -> BTreeMap<Names, Source> {
    let files = texts(root);
    let children = |module: &Names| {
        let below = files.keys().filter(|key| key.len() == module.len() + 1 && key.starts_with(module));
        below.filter_map(|key| key.last().cloned()).collect::<BTreeSet<String>>()
    };
    let read = |(module, text): (&Names, &String)| {
        let mut source = Source::default();
        scan(text.parse().unwrap(), module, &children(module), &mut source);
        (module.clone(), source)
    };
    files.iter().map(read).collect()
}

/// The file that a path leads to, through re-exports.
fn file_of(sources: &BTreeMap<Names, Source>, path: &[String]) -> Names {
    let mut path = path.to_vec();
    for _ in 0..16 {
        let depth = (0..=path.len()).rev().find(|&depth| sources.contains_key(&path[..depth])).unwrap_or(0);
        let next = path.get(depth).and_then(|name| sources[&path[..depth]].reexports.get(name));
        match next {
            Some(origin) if *origin != path => path = origin.iter().chain(&path[depth + 1..]).cloned().collect(),
            _ => return path[..depth].to_vec(),
        }
    }
    path
}

/// Files by the files that they name, all paths or those that `paths` chooses.
fn graph(sources: &BTreeMap<Names, Source>, paths: fn(&Source) -> &BTreeSet<Names>) -> BTreeMap<String, BTreeSet<String>> {
    let edges = |(module, source): (&Names, &Source)| {
        let targets = paths(source).iter().map(|path| file_of(sources, path)).filter(|target| target != module);
        (module.join("::"), targets.map(|target| target.join("::")).collect())
    };
    sources.iter().map(edges).collect()
}

/// Files by the files that they import or re-export.
fn imports(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    graph(&sources(root), |source| &source.paths)
}

/// Files by the files that they need. A `pub use` in the file of a module with submodules (`mod.rs`, `lib.rs`) does not count: it
/// shows names of other files and needs none of them.
fn needs(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    graph(&sources(root), |source| &source.needed)
}

/// All files that a file leads to in a graph; itself only if it lies on a circle.
fn reached<'g>(graph: &'g BTreeMap<String, BTreeSet<String>>, file: &str) -> BTreeSet<&'g str> {
    let of = |file: &str| graph.get(file).into_iter().flatten().map(String::as_str);
    let mut reached: BTreeSet<&str> = BTreeSet::new();
    let mut next: Vec<&str> = of(file).collect();
    while let Some(file) = next.pop() {
        if reached.insert(file) {
            next.extend(of(file));
        }
    }
    reached
}

/// The edges of a graph that lie on circles: the end leads back to the start.
fn circles(graph: &BTreeMap<String, BTreeSet<String>>) -> BTreeMap<&str, Vec<&str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> = graph.keys().map(|file| (file.as_str(), reached(graph, file))).collect();
    let back = |from: &str, to: &str| reached.get(to).is_some_and(|files| files.contains(from));
    let edges =
        graph.iter().map(|(from, to)| (from.as_str(), to.iter().map(String::as_str).filter(|to| back(from, to)).collect::<Vec<_>>()));
    edges.filter(|(_, to)| !to.is_empty()).collect()
}

fn folder(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Names of the modules that a file declares, in their order.
fn declared(text: &str) -> Vec<String> {
    let module = |line: &str| {
        let line = line.trim_start_matches("pub ").trim_start_matches("pub(crate) ");
        line.strip_prefix("mod ")?.strip_suffix(';').map(str::to_owned)
    };
    text.lines().filter_map(module).collect()
}

/// Imports that go up: the importing file, and the module beside it, or beside one that it is in, that is declared later.
fn upward(root: &Path) -> BTreeSet<(String, String)> {
    let order: BTreeMap<Names, Vec<String>> = texts(root).into_iter().map(|(module, text)| (module, declared(&text))).collect();
    let names = |file: &str| file.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect::<Names>();
    let goes_up = |from: &str, to: &str| {
        let from = names(from);
        let to = names(to);
        let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
        let floor = |path: &Names| order[&path[..shared]].iter().position(|name| Some(name) == path.get(shared));
        (floor(&to) > floor(&from) && floor(&from).is_some()).then(|| to[..=shared].join("::"))
    };
    let graph = imports(root);
    let edges = graph.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
    edges.filter_map(|(from, to)| goes_up(from, to).map(|above| (from.clone(), above))).collect()
}

#[test]
fn modules_of_the_library_import_only_from_modules_declared_before_them() {
    let graph = imports(&folder("src"));
    assert!(
        graph["writer::save"].contains("chain::decision") && graph["chain::walk"].contains("tensor::grid"),
        "imports are not found: {graph:#?}"
    );
    let among_top = upward(&folder("src")).into_iter().filter(|(_, above)| !above.contains("::")).collect::<Vec<_>>();
    assert_eq!(among_top, []);
}

#[test]
fn modules_of_the_engine_import_only_from_modules_declared_before_them() {
    assert_eq!(upward(&folder("engine/src")), BTreeSet::new());
}

#[test]
fn an_import_that_goes_up_is_found() {
    let scratch = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(scratch.path().join(name), text).unwrap();
    write("lib.rs", "mod low;\nmod high;\npub use high::Thing;\n");
    write("high.rs", "use crate::low;\npub struct Thing;\n");
    let expected = BTreeSet::from([("low".to_owned(), "high".to_owned())]);
    for text in [
        "use crate::high;",
        "use crate::{high::{self, Thing}};",
        "use crate::Thing;",
        "fn f() { crate::high::g() }",
        "mod inner { use super::super::Thing; }",
    ] {
        write("low.rs", text);
        assert_eq!(upward(scratch.path()), expected, "{text}");
    }
    write("low.rs", "#[cfg(test)] mod tests { use crate::high::Thing; } // crate::high");
    assert_eq!(upward(scratch.path()), BTreeSet::new());
}

/// Rust files below a folder.
fn rust_files(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

/// A file names each import, so that a reader can tell where a name comes from. Test modules, which are indented, may import their parent.
#[test]
fn only_tests_import_all_names_of_their_parent() {
    for path in rust_files(&folder("src")) {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.lines().any(|line| line.starts_with("use super::*")), "{} imports all names of its parent", path.display());
    }
}

#[test]
fn files_of_the_library_the_engine_and_the_conformance_suite_import_in_no_circle() {
    for crate_folder in ["kernels/src", "src", "engine/src", "conformance/src"] {
        let needs = needs(&folder(crate_folder));
        let found = circles(&needs);
        assert!(found.is_empty(), "files of {crate_folder} import each other in a circle: {found:#?}");
    }
}

#[test]
fn a_circle_of_files_is_found() {
    let scratch = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(scratch.path().join(name), text).unwrap();
    std::fs::create_dir(scratch.path().join("module")).unwrap();
    write("lib.rs", "mod module;\npub use module::Thing;\n");
    write("module/helper.rs", "pub struct Helper;\n");
    // The parent shows both files. Only what it needs itself makes a circle.
    let shown = "mod helper;\nmod thing;\npub(crate) use helper::Helper;\npub use thing::Thing;\n";
    for (text, expected) in [("", vec![]), ("use thing::Thing;\npub struct Shared(Thing);\n", vec!["module", "module::thing"])] {
        write("module/mod.rs", &format!("{shown}{text}"));
        write("module/thing.rs", "use super::{Helper, Shared};\npub struct Thing;\n");
        assert_eq!(circles(&needs(scratch.path())).into_keys().collect::<Vec<_>>(), expected, "{text}");
    }
    write("module/mod.rs", shown);
    write("module/helper.rs", "pub struct Helper(super::Thing);\n");
    assert_eq!(circles(&needs(scratch.path())).into_keys().collect::<Vec<_>>(), ["module::helper", "module::thing"]);
}
