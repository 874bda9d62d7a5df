//! Verdicts that a case allows.

use serde::Deserialize;

/// Required reaction of a reader to the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Expect {
    Accept,
    Reject,
    /// Acceptance or rejection: the spec leaves the choice to the reader. An accepting reader must report the right
    /// content.
    Either,
}

impl Expect {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Reject => "reject",
            Self::Either => "either",
        }
    }
}
