//! The version handshake of peers: every request and every response names the version of the protocol.

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};

/// Version of the protocol between agents: paths, listings, receipts and their signatures. Raise it with every change that an
/// older agent would take for damage.
const PROTOCOL: u32 = 1;

/// Header with the version of the protocol and of tensorcask, such as `1 0.4.0`.
pub(super) const HEADER: HeaderName = HeaderName::from_static("tensorcask-peers");

/// The version that the other side names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Spoken {
    /// The same version as ours.
    Ours,
    /// Another version: its header.
    Other(String),
    /// No version.
    Nothing,
}

impl Spoken {
    pub(super) fn read(headers: &HeaderMap) -> Self {
        let Some(text) = headers.get(HEADER) else { return Self::Nothing };
        let text: String = text.to_str().unwrap_or("unreadable").chars().take(MOST_CHARACTERS).collect();
        match text.split(' ').next().and_then(|number| number.parse::<u32>().ok()) {
            Some(PROTOCOL) => Self::Ours,
            _ => Self::Other(text),
        }
    }

    /// Says why the two sides do not talk; `None` if they do.
    pub(super) fn refusal(&self) -> Option<String> {
        let ours = env!("CARGO_PKG_VERSION");
        match self {
            Self::Ours => None,
            Self::Other(text) => {
                let (number, release) = text.split_once(' ').unwrap_or((text, "an unknown version"));
                let number = number.escape_debug();
                let release = release.escape_debug();
                Some(format!(
                    "it speaks version {number} of the protocol of agents (tensorcask {release}), and this host speaks version {PROTOCOL} \
                     (tensorcask {ours}): install the same tensorcask on all hosts, and start the agents again"
                ))
            }
            Self::Nothing => Some("it does not name its version: what listens there is no agent of tensorcask".to_owned()),
        }
    }
}

/// The header of this version.
pub(super) fn ours() -> HeaderValue {
    HeaderValue::from_str(&format!("{PROTOCOL} {}", env!("CARGO_PKG_VERSION"))).unwrap_or(HeaderValue::from_static("1"))
}

/// Length of a header that is read.
const MOST_CHARACTERS: usize = 64;

#[cfg(test)]
mod tests {
    use hyper::HeaderMap;
    use hyper::header::HeaderValue;

    use super::{HEADER, Spoken, ours};

    #[test]
    fn other_versions_are_named() {
        let spoken = |text: &str| Spoken::read(&HeaderMap::from_iter([(HEADER, HeaderValue::from_str(text).unwrap())]));
        assert_eq!(Spoken::read(&HeaderMap::from_iter([(HEADER, ours())])), Spoken::Ours);
        assert_eq!((spoken("1 9.9.9"), spoken("1").refusal()), (Spoken::Ours, None), "the release alone does not matter");
        let refusal = spoken("7 9.9.9").refusal().unwrap();
        assert!(refusal.contains("version 7") && refusal.contains("tensorcask 9.9.9") && refusal.contains("same tensorcask"), "{refusal}");
        assert!(spoken(&"x".repeat(1000)).refusal().unwrap().len() < 400);
        assert!(Spoken::read(&HeaderMap::new()).refusal().unwrap().contains("no agent"));
    }
}
