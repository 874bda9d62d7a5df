//! The path of a request: which folder of the run, and which object in it. Everything else is refused, before any file is
//! looked at.

/// Place of a request, below the folder of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Resource {
    /// Names of folders and, at the end, of a file or folder. Empty for the run's folder itself.
    names: Vec<String>,
}

impl Resource {
    /// Parses the path of a request to the run with this key: `/<key>`, or `/<key>/<store>/...` with the store `mirror`,
    /// `memory-<n>` or `replica-<host>`, or `meeting` for the messages between hosts. Names consist of `[0-9a-z._-]` and do not
    /// begin with a dot: no other objects are in a store, so escapes such as `%2e` are refused with the rest.
    pub(super) fn parse(path: &str, key: &str) -> Option<Self> {
        if path.len() > MAX_PATH_BYTES {
            return None;
        }
        let mut names = path.strip_prefix('/')?.split('/');
        if names.next()? != key {
            return None;
        }
        let mut names: Vec<String> = names.map(str::to_owned).collect();
        // A folder may be named with a slash at the end.
        if names.last().is_some_and(String::is_empty) {
            names.pop();
        }
        let resource = Self { names };
        resource.is_served().then_some(resource)
    }

    fn is_served(&self) -> bool {
        let Some((store, inner)) = self.names.split_first() else { return true };
        let is_store = store == "mirror" || store == MEETING || is_numbered(store, "memory-") || is_numbered(store, "replica-");
        is_store && self.names.len() <= MAX_DEPTH && inner.iter().all(|name| is_object_name(name))
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether the resource is within a store, as opposed to the folder of stores.
    pub(super) fn is_in_store(&self) -> bool {
        !self.names.is_empty()
    }

    /// The entry of this name, if it is served.
    pub(super) fn child(&self, name: &str) -> Option<Self> {
        let child = Self { names: self.names.iter().cloned().chain([name.to_owned()]).collect() };
        child.is_served().then_some(child)
    }

    /// The path of a request for this resource.
    pub(super) fn to_path(&self, key: &str) -> String {
        [key].into_iter().chain(self.names.iter().map(String::as_str)).map(|name| format!("/{name}")).collect()
    }
}

/// Whether a name consists of a prefix and a number, written as we write it.
fn is_numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|digits| digits.parse::<u64>().is_ok_and(|number| number.to_string() == digits))
}

/// Whether a store may have an object or folder of this name.
fn is_object_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_digit() || byte.is_ascii_lowercase() || b"._-".contains(&byte))
}

/// Folder of the messages between hosts, beside the stores of a run.
pub(crate) const MEETING: &str = "meeting";
const MAX_PATH_BYTES: usize = 512;
const MAX_NAME_BYTES: usize = 200;
/// Names below the run's folder: a store, and at most four in the store.
const MAX_DEPTH: usize = 5;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Resource;

    #[test]
    fn only_objects_of_stores_are_served() {
        for path in [
            "/k",
            "/k/",
            "/k/memory-0",
            "/k/memory-12/log/00000000000000000001.json",
            "/k/replica-3/casks/7f.cask",
            "/k/mirror/receipts/a/b/0.json",
            "/k/meeting/5e/offers/job-7/0.json",
        ] {
            let parsed = Resource::parse(path, "k").unwrap_or_else(|| panic!("{path}"));
            assert_eq!(parsed.to_path("k"), path.trim_end_matches('/'));
        }
        let refused = [
            "",
            "/",
            "k",
            "/other/memory-0",
            "/k2",
            "/k/run.json",
            "/k/rank-0/arena",
            "/k/seen.json",
            "/k/memory-0/../run.json",
            "/k/..",
            "/k/memory-0/%2e%2e/run.json",
            "/k/memory-0/.hidden",
            "/k/memory-0//log",
            "/k/memory-00",
            "/k/memory--1",
            "/k/memory-0\\..",
            "/k/memory-0/A",
            "/k/memory-0/casks/x#1",
            "/k/mirrors/a",
            "/k/replica-x/casks",
            "/k/memory-0/a\0b",
            "//k",
        ];
        for path in refused {
            assert_eq!(Resource::parse(path, "k"), None, "{path}");
        }
        assert_eq!(Resource::parse(&format!("/k/memory-0{}", "/a".repeat(5)), "k"), None, "too deep");
        assert_eq!(Resource::parse(&format!("/k/memory-0/{}", "a".repeat(201)), "k"), None, "too long");
    }

    proptest! {
        /// Whatever is accepted stays below the run's folder.
        #[test]
        fn no_path_leads_outside(path in "/k(/(mirror|meeting|memory-[0-9]{1,2}|replica-[0-9]|[a-z.%/\\\\0-9#A-Z-]{0,12}|\\.\\.|.{0,6})){0,7}") {
            if let Some(resource) = Resource::parse(&path, "k") {
                let first = resource.names().first();
                let is_store = |first: &String| first.starts_with("memory-") || first.starts_with("replica-");
                prop_assert!(first.is_none_or(|first| is_store(first) || first == "mirror" || first == "meeting"));
                for name in resource.names() {
                    prop_assert!(!name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '%', '\0', '#']));
                }
                prop_assert_eq!(Resource::parse(&resource.to_path("k"), "k"), Some(resource));
            }
        }
    }
}
