//! The structure of the code: modules of the library and of the engine import only from modules declared before them, and files
//! of the engine and of the conformance suite import each other in no circle. For Python, see `python/tests/test_modules.py`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

type Names = Vec<String>;

/// Paths that a file names (`crate::a::B`, `super::C`), each from the crate's root, and the names that it re-exports with their origin.
#[derive(Default)]
struct Source {
    paths: BTreeSet<Names>,
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
        child if children.contains(child) => (module.to_vec(), path),
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
                String::new()
            }
            _ => String::new(),
        };
        let begins = matches!(text.as_str(), "crate" | "super" | "self") || children.contains(&text);
        if begins && last[1] != "pub" && last[1] != "mod" {
            let is_reexport = last[1] == "use" && last[0] != "use";
            let mut found = Vec::new();
            expand(&mut tokens, vec![], &mut found);
            for path in found.iter().filter_map(|path| absolute(module, children, path)) {
                if let Some(name) = path.last().filter(|_| is_reexport) {
                    source.reexports.insert(name.clone(), path.clone());
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

/// Files by the files that they import.
fn imports(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let sources = sources(root);
    let edges = |(module, source): (&Names, &Source)| {
        let targets = source.paths.iter().map(|path| file_of(&sources, path)).filter(|target| target != module);
        (module.join("::"), targets.map(|target| target.join("::")).collect())
    };
    sources.iter().map(edges).collect()
}

/// The nodes of a graph that lie on circles: those that remain when all without imports, or without importers, are taken away.
fn circles(mut graph: BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    loop {
        let imported: BTreeSet<String> = graph.values().flatten().cloned().collect();
        let before = graph.len();
        graph.retain(|node, imports| !imports.is_empty() && imported.contains(node));
        let left: BTreeSet<String> = graph.keys().cloned().collect();
        graph.values_mut().for_each(|imports| imports.retain(|node| left.contains(node)));
        if graph.len() == before {
            return left;
        }
    }
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
        let (from, to) = (names(from), names(to));
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
fn files_of_the_engine_and_the_conformance_suite_import_in_no_circle() {
    for crate_folder in ["engine/src", "conformance/src"] {
        let graph = imports(&folder(crate_folder));
        let on_circles = circles(graph.clone());
        let among = |(from, to): &(&String, &BTreeSet<String>)| on_circles.contains(*from) && !to.is_disjoint(&on_circles);
        assert!(on_circles.is_empty(), "{crate_folder}: {:#?}", graph.iter().filter(among).collect::<Vec<_>>());
    }
}
