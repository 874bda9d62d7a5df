//! Codecs that were chosen for similar chunks before, so that not every chunk is estimated by every codec.
//!
//! Layers of a model are alike: the weights of `layers.3.mlp` and `layers.7.mlp` compress alike. A *family* is the role,
//! the parameter's name without its numbers, and whether the chunk has a base. The codec that won for one chunk of a family
//! is tried first for the next chunks, and kept if the result is about as small as expected. Every 16th chunk of a
//! family is estimated by all codecs again.
//!
//! Invariant: a choice is learned from whole windows, in the order of chunks, never from a chunk of the same window. So it
//! does not depend on the number of threads.

use std::collections::HashMap;

use crate::codec::{Chosen, ChosenBy, Preferred};

/// Every how many chunks of a family all codecs are tried.
const SAMPLED_EVERY: u64 = 16;
/// Smallest chunk from which choices are learned, in bytes. The sizes of smaller chunks are mostly padding.
const LEAST_BYTES: u64 = 4 << 10;

/// Chunks that are likely to compress alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ChunkFamily {
    role: String,
    /// Name of the parameter, with `#` for each number.
    param: String,
    has_base: bool,
}

impl ChunkFamily {
    pub(crate) fn new(role: &str, param: &str, has_base: bool) -> Self {
        let mut name = String::with_capacity(param.len());
        for letter in param.chars() {
            match letter.is_ascii_digit() {
                true if name.ends_with('#') => {}
                true => name.push('#'),
                false => name.push(letter),
            }
        }
        Self { role: role.to_owned(), param: name, has_base }
    }
}

/// Choices of one writer.
#[derive(Debug, Default)]
pub(crate) struct Choices {
    families: HashMap<ChunkFamily, Family>,
}

#[derive(Debug, Default)]
struct Family {
    preferred: Option<Preferred>,
    /// Number of chunks so far.
    chunks: u64,
}

impl Choices {
    /// The codec to try first for the next chunk of a family; `None` to try all.
    pub(crate) fn next(&mut self, family: &ChunkFamily) -> Option<Preferred> {
        if !self.families.contains_key(family) {
            self.families.insert(family.clone(), Family::default());
        }
        let family = self.families.get_mut(family)?;
        let number = family.chunks;
        family.chunks = number.wrapping_add(1);
        family.preferred.clone().filter(|_| !number.is_multiple_of(SAMPLED_EVERY))
    }

    /// Takes over the result of a chunk for which all codecs were tried.
    pub(crate) fn learn(&mut self, family: &ChunkFamily, decoded_bytes: u64, chosen: &Chosen) {
        let (ChosenBy::Estimate, Some(codec), true) = (chosen.by, &chosen.encoded.codec, decoded_bytes >= LEAST_BYTES) else { return };
        let stored_bytes = chosen.encoded.columns.iter().map(|(_, bytes)| bytes.len() as u64).fold(0, u64::saturating_add);
        if let Some(family) = self.families.get_mut(family) {
            family.preferred = Some(Preferred { codec: codec.id.clone(), decoded_bytes, stored_bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Choices, ChunkFamily};
    use crate::codec::{Chosen, ChosenBy, CodecRef, EncodedChunk, Preferred};

    fn chosen(by: ChosenBy) -> Chosen {
        let codec = Some(CodecRef { id: "tc.planes".into(), version: 1 });
        let columns = vec![("planes".to_owned(), vec![0; 5000].into())];
        Chosen { encoded: EncodedChunk { codec, columns, ..EncodedChunk::unchanged(0) }, decoded: None, by }
    }

    #[test]
    fn layers_of_a_model_are_one_family() {
        let family = |param: &str| ChunkFamily::new("model", param, false);
        assert_eq!(family("h.3.mlp.w"), family("h.27.mlp.w"));
        assert_ne!(family("h.3.mlp.w"), family("h.3.attn.w"));
        assert_ne!(family("h.3.mlp.w"), ChunkFamily::new("model", "h.3.mlp.w", true));
    }

    #[test]
    fn a_choice_holds_until_all_codecs_are_tried_again() {
        let (mut choices, family) = (Choices::default(), ChunkFamily::new("model", "w", false));
        assert_eq!(choices.next(&family), None);
        assert_eq!(choices.next(&family), None, "nothing is known before a chunk was encoded");
        choices.learn(&family, 10_000, &chosen(ChosenBy::Estimate));
        let preferred = Preferred { codec: "tc.planes".into(), decoded_bytes: 10_000, stored_bytes: 5000 };
        for _ in 2..16 {
            assert_eq!(choices.next(&family), Some(preferred.clone()));
        }
        assert_eq!(choices.next(&family), None, "the 17th chunk");
    }

    #[test]
    fn small_chunks_and_chunks_by_preference_teach_nothing() {
        let (mut choices, family) = (Choices::default(), ChunkFamily::new("model", "w", false));
        choices.next(&family);
        choices.learn(&family, 100, &chosen(ChosenBy::Estimate));
        choices.learn(&family, 10_000, &chosen(ChosenBy::Preference));
        assert_eq!(choices.next(&family), None);
    }
}
