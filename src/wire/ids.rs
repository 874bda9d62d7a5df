//! Random ids and SHA-256 digests, written as lower-case hex.

use sha2::{Digest as _, Sha256};

use crate::{Error, ErrorKind, Result};

macro_rules! hex_bytes {
    ($name:ident, $bytes:literal, $what:literal) => {
        impl $name {
            /// Returns the lower-case hex form.
            pub fn to_hex(&self) -> String {
                const DIGITS: &[u8; 16] = b"0123456789abcdef";
                let digit = |nibble: u8| DIGITS.get(usize::from(nibble)).copied().map_or('?', char::from);
                self.0.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
            }

            /// Parses the lower-case hex form, which must have the exact length.
            pub fn from_hex(text: &str) -> Result<Self> {
                let fail = || Error::corrupt(format!(concat!("`{}` is not ", $what, " (lower-case hex)"), text.escape_debug()));
                let digit = |byte: u8| match byte {
                    b'0'..=b'9' => Some(byte.wrapping_sub(b'0')),
                    b'a'..=b'f' => Some(byte.wrapping_sub(b'a').wrapping_add(10)),
                    _ => None,
                };
                let (pairs, rest) = text.as_bytes().as_chunks::<2>();
                let mut bytes = [0; $bytes];
                if pairs.len() != $bytes || !rest.is_empty() {
                    return Err(fail());
                }
                for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
                    let (Some(high), Some(low)) = (digit(*high), digit(*low)) else { return Err(fail()) };
                    *byte = high << 4 | low;
                }
                Ok(Self(bytes))
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.to_hex())
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.to_hex())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.to_hex())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                Self::from_hex(&text).map_err(|e| serde::de::Error::custom(e.message()))
            }
        }
    };
}

/// Random 128-bit id of a snapshot, cask, writer or run; also the token of a commit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub [u8; 16]);

hex_bytes!(Id, 16, "an id of 32 digits");

impl Id {
    /// Creates an id from the operating system's random source.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|e| Error::new(ErrorKind::Storage, format!("the system's random source failed: {e}")))?;
        Ok(Self(bytes))
    }
}

/// A SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

hex_bytes!(Digest, 32, "a SHA-256 of 64 digits");

impl Digest {
    /// Computes the digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self::of_parts([bytes])
    }

    /// Computes the digest of concatenated parts.
    pub fn of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hasher = Sha256::new();
        for part in parts {
            hasher.update(part);
        }
        Self(hasher.finalize().into())
    }
}
