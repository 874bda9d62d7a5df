//! Verdicts that a case allows.

use serde::Deserialize;

/// What a reader must do with the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Expect {
    Accept,
    Reject,
    /// The spec leaves it to the reader; what it says has to be right all the same.
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
