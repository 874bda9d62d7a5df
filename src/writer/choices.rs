//! Codecs that were chosen for similar chunks before, so that not every chunk is estimated by every codec.
//!
//! Layers of a model are alike: the weights of `layers.3.mlp` and `layers.7.mlp` compress alike. A *family* is the
//! role, the parameter's name without its numbers, and the distance in steps to the base. The codec that won for one
//! chunk of a family is tried first for the next chunks, and kept if the result is about as small as expected. Some
//! chunks of a family are estimated by all codecs: the first, the 17th, 33rd and 65th, and every 128th after that.
//!
//! A choice also says whether the codec took the base. Deltas gain little for most optimizer states several steps apart
//! (see [`spared`](super::spared)), and then the base of the next chunk need not be read. Distances count in powers of
//! two: a delta one step apart is of another family than a delta two steps apart, and replays of a step are found at
//! once when the distance becomes 1 again.
//!
//! Invariant: a choice is learned from whole windows, in the order of chunks, never from a chunk of the same window. So it
//! depends on the sizes of windows, which grow with the number of threads, but not on which thread is faster.

use std::collections::BTreeMap;

use super::spared::{FamilySizes, spare_bases};
use crate::codec::{Chosen, ChosenBy, ChunkKind, Preferred, Trial};

/// Greatest distance between two chunks of a family for which all codecs are tried.
const SAMPLED_EVERY: u64 = 128;
/// Least distance. It doubles up to the greatest.
const SAMPLED_FIRST: u64 = 16;
/// Smallest chunk from which choices are learned, in bytes. The sizes of smaller chunks are mostly padding.
const LEAST_BYTES: u64 = 4 << 10;

/// Chunks that are likely to compress alike.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChunkFamily {
    role: String,
    /// Name of the parameter, with `#` for each number.
    param: String,
    /// Number of bits of the distance in steps to the base; `None` without a base.
    distance_bits: Option<u32>,
}

impl ChunkFamily {
    /// The family of a parameter's chunks, whose base is `distance` steps away; `None` without a base.
    pub(crate) fn new(role: &str, param: &str, distance: Option<u64>) -> Self {
        let mut name = String::with_capacity(param.len());
        for letter in param.chars() {
            match letter.is_ascii_digit() {
                true if name.ends_with('#') => {}
                true => name.push('#'),
                false => name.push(letter),
            }
        }
        let distance_bits = distance.map(|steps| u64::BITS - steps.leading_zeros());
        Self { role: role.to_owned(), param: name, distance_bits }
    }
}

/// Choices of one writer.
#[derive(Debug, Default)]
pub(crate) struct Choices {
    families: BTreeMap<ChunkFamily, Family>,
}

#[derive(Debug, Default)]
struct Family {
    preferred: Option<Preferred>,
    /// Forms of a sampled chunk with and without its base, if a delta is smaller.
    sample: Option<SampledForms>,
    /// Whether chunks are stored without their bases although deltas are smaller.
    is_spared: bool,
    /// Number of chunks so far.
    chunks: u64,
    /// Decoded size of the chunks so far that differed from their bases.
    changed_bytes: u64,
    /// Whether the last chunk equalled its base.
    last_is_unchanged: bool,
}

/// Whether all codecs are tried for the chunk of this number in its family.
fn is_sampled(number: u64) -> bool {
    number.is_multiple_of(SAMPLED_EVERY) || (number >= SAMPLED_FIRST && number.is_power_of_two())
}

#[derive(Debug)]
struct SampledForms {
    delta_bytes: u64,
    absolute: Preferred,
}

impl Choices {
    /// The codecs to try for the next chunk of a family.
    pub(crate) fn next(&mut self, family: &ChunkFamily) -> Trial {
        if !self.families.contains_key(family) {
            self.families.insert(family.clone(), Family::default());
        }
        let Some(family) = self.families.get_mut(family) else { return Trial::All };
        let number = family.chunks;
        family.chunks = number.wrapping_add(1);
        if is_sampled(number) {
            return Trial::WithAndWithoutBase;
        }
        let absolute = family.sample.as_ref().filter(|_| family.is_spared).map(|sample| &sample.absolute);
        absolute.or(family.preferred.as_ref()).cloned().map_or(Trial::All, Trial::One)
    }

    /// The delta that was given up for the sake of its base. It is smaller, where the base is loaded in any case.
    pub(crate) fn spared_delta(&self, family: &ChunkFamily) -> Option<Preferred> {
        let family = self.families.get(family).filter(|family| family.is_spared && family.sample.is_some())?;
        family.preferred.clone()
    }

    /// Decides again which families are stored without their bases. To be called before each window.
    pub(crate) fn spare_bases(&mut self) {
        let mut families: Vec<(&ChunkFamily, &mut Family)> = self.families.iter_mut().collect();
        families.sort_by_key(|(family, _)| family.distance_bits);
        for snapshot in families.chunk_by_mut(|(a, _), (b, _)| a.distance_bits == b.distance_bits) {
            let sizes: Vec<FamilySizes> = snapshot.iter().map(|(_, family)| family.sizes()).collect();
            for ((_, family), is_spared) in snapshot.iter_mut().zip(spare_bases(&sizes)) {
                family.is_spared = is_spared;
            }
        }
    }

    /// Whether the next chunk of a family is likely to equal its base, as the last one did.
    pub(crate) fn expects_unchanged(&self, family: &ChunkFamily) -> bool {
        self.families.get(family).is_some_and(|family| family.last_is_unchanged)
    }

    /// Takes over the result of a chunk. A codec that a rule assigned says nothing about other chunks.
    pub(crate) fn learn(&mut self, family: &ChunkFamily, decoded_bytes: u64, chosen: &Chosen) {
        let Some(family) = self.families.get_mut(family) else { return };
        if chosen.by == ChosenBy::Rule {
            return;
        }
        let kind = chosen.encoded.kind;
        family.last_is_unchanged = kind == ChunkKind::Unchanged;
        if !family.last_is_unchanged {
            family.changed_bytes = family.changed_bytes.saturating_add(decoded_bytes);
        }
        let is_new = decoded_bytes >= LEAST_BYTES && chosen.by != ChosenBy::Preference;
        let Some(codec) = chosen.encoded.codec.as_ref().filter(|_| is_new) else { return };
        let stored_bytes = chosen.encoded.columns.iter().map(|(_, bytes)| bytes.len() as u64).fold(0, u64::saturating_add);
        family.preferred = Some(Preferred { codec: codec.id.clone(), kind, decoded_bytes, stored_bytes });
        match &chosen.absolute {
            Some(absolute) => family.sample = Some(SampledForms { delta_bytes: stored_bytes, absolute: absolute.clone() }),
            None if kind == ChunkKind::Absolute || chosen.by == ChosenBy::Fallback => family.sample = None,
            None => {}
        }
    }
}

impl Family {
    fn sizes(&self) -> FamilySizes {
        let decoded = self.changed_bytes;
        match (&self.sample, &self.preferred) {
            (Some(SampledForms { delta_bytes: best, absolute }), _) => {
                FamilySizes { decoded, sample: absolute.decoded_bytes, best: *best, absolute: Some(absolute.stored_bytes) }
            }
            (None, Some(Preferred { decoded_bytes: sample, stored_bytes: best, .. })) => {
                FamilySizes { decoded, sample: *sample, best: *best, absolute: None }
            }
            (None, None) => FamilySizes { decoded: 0, sample: 0, best: 0, absolute: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Choices, ChunkFamily};
    use crate::codec::{Chosen, ChosenBy, ChunkKind, CodecRef, EncodedChunk, Preferred, Trial};

    fn chosen(by: ChosenBy) -> Chosen {
        let codec = Some(CodecRef { id: "tc.planes".into(), version: 1 });
        let columns = vec![("planes".to_owned(), vec![0; 5000].into())];
        Chosen {
            encoded: EncodedChunk { kind: ChunkKind::Absolute, codec, columns, crc: 0 },
            decoded: None,
            by,
            absolute: None,
            levels: None,
        }
    }

    #[test]
    fn layers_of_a_model_are_one_family() {
        let family = |param: &str| ChunkFamily::new("model", param, None);
        assert_eq!(family("h.3.mlp.w"), family("h.27.mlp.w"));
        assert_ne!(family("h.3.mlp.w"), family("h.3.attn.w"));
        assert_ne!(family("h.3.mlp.w"), ChunkFamily::new("model", "h.3.mlp.w", Some(1)));
    }

    #[test]
    fn a_choice_holds_until_all_codecs_are_tried_again() {
        let mut choices = Choices::default();
        let family = ChunkFamily::new("model", "w", None);
        assert_eq!(choices.next(&family), Trial::WithAndWithoutBase);
        assert_eq!(choices.next(&family), Trial::All, "nothing is known before a chunk was encoded");
        choices.learn(&family, 10_000, &chosen(ChosenBy::Estimate));
        let preferred = Preferred { codec: "tc.planes".into(), kind: ChunkKind::Absolute, decoded_bytes: 10_000, stored_bytes: 5000 };
        for _ in 2..16 {
            assert_eq!(choices.next(&family), Trial::One(preferred.clone()));
        }
        assert_eq!(choices.next(&family), Trial::WithAndWithoutBase, "the 17th chunk");
        let sampled: Vec<u64> = (0..600).filter(|&number| super::is_sampled(number)).collect();
        assert_eq!(sampled, [0, 16, 32, 64, 128, 256, 384, 512]);
    }

    #[test]
    fn small_chunks_and_chunks_by_preference_teach_nothing() {
        let mut choices = Choices::default();
        let family = ChunkFamily::new("model", "w", None);
        choices.next(&family);
        choices.learn(&family, 100, &chosen(ChosenBy::Estimate));
        choices.learn(&family, 10_000, &chosen(ChosenBy::Preference));
        assert_eq!(choices.next(&family), Trial::All);
    }

    #[test]
    fn one_step_and_several_steps_are_different_families() {
        let family = |steps| ChunkFamily::new("master", "w", Some(steps));
        assert_ne!(family(1), family(2));
        assert_eq!(family(2), family(3));
        assert_ne!(family(0), family(1));
        assert_ne!(family(2048), family(4096), "steps that count tokens");
    }

    #[test]
    fn a_family_expects_unchanged_chunks_until_one_changes() {
        let mut choices = Choices::default();
        let family = ChunkFamily::new("model", "w", Some(1));
        choices.next(&family);
        assert!(!choices.expects_unchanged(&family));
        let unchanged = Chosen { encoded: EncodedChunk::unchanged(0), ..chosen(ChosenBy::Estimate) };
        choices.learn(&family, 100, &unchanged);
        assert!(choices.expects_unchanged(&family));
        choices.learn(&family, 100, &chosen(ChosenBy::Preference));
        assert!(!choices.expects_unchanged(&family));
    }

    #[test]
    fn chunks_whose_deltas_save_little_are_tried_without_base() {
        let family = |role| ChunkFamily::new(role, "w", Some(10));
        let mut choices = Choices::default();
        let second = family("exp_avg_sq");
        let model = family("model");
        let form = |stored_bytes| Preferred { codec: "tc.raw".into(), kind: ChunkKind::Absolute, decoded_bytes: 10_000, stored_bytes };
        for (family, absolute_bytes) in [(&second, 5020), (&model, 9000)] {
            assert_eq!(choices.next(family), Trial::WithAndWithoutBase);
            let delta = chosen(ChosenBy::Estimate);
            let encoded = EncodedChunk { kind: ChunkKind::Delta, ..delta.encoded };
            choices.learn(family, 10_000, &Chosen { encoded, absolute: Some(form(absolute_bytes)), ..delta });
        }
        choices.spare_bases();
        assert_eq!(choices.next(&second), Trial::One(form(5020)));
        assert_eq!(choices.spared_delta(&second).unwrap().kind, ChunkKind::Delta);
        assert_eq!(choices.spared_delta(&model), None);
        assert!(matches!(choices.next(&model), Trial::One(Preferred { kind: ChunkKind::Delta, .. })));
    }
}
