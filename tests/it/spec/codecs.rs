//! Chunks of each codec.

use bytes::Bytes;
use serde::Deserialize;
use tensorcask::codec::{Chunk, CodecRef, Columns, Partner, Registry};
use tensorcask::{Dtype, Error};

use super::vectors::{Hex, Mismatches, vectors};

/// A chunk of another tensor of the same parameter.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PartnerVector {
    role: String,
    dtype: String,
    data: Hex,
    base: Option<Hex>,
    /// How the partner is stored, if it gives gradients.
    codec: Option<String>,
    #[serde(default)]
    columns: Vec<(String, Hex)>,
}

impl PartnerVector {
    fn dtype(&self) -> Dtype {
        Dtype::from_name(&self.dtype).unwrap()
    }

    fn base(&self) -> Option<&[u8]> {
        self.base.as_ref().map(|base| base.0.as_slice())
    }

    /// The gradients that the stored form of the partner holds.
    fn gradients(&self, elements: u64) -> Option<Vec<u8>> {
        let codec = Registry::default().get(self.codec.as_ref()?).unwrap().clone();
        let columns: Vec<(&str, Bytes)> = self.columns.iter().map(|(name, bytes)| (name.as_str(), bytes.0.clone().into())).collect();
        let mut out = vec![0; self.data.0.len()];
        let mut gradients = vec![0; 4 * elements as usize];
        let input = Columns { dtype: self.dtype(), element_count: elements, columns: &columns, base: self.base(), partners: &[] };
        codec.decode_gradient(&input, &mut out, &mut gradients).unwrap();
        assert_eq!(Hex(out), self.data);
        Some(gradients)
    }
}

fn model() -> String {
    "model".into()
}

fn borrowed<'a>(partners: &'a [PartnerVector], gradients: &'a [Option<Vec<u8>>]) -> Vec<Partner<'a>> {
    let borrow = |(partner, gradient): (&'a PartnerVector, &'a Option<Vec<u8>>)| {
        let gradient = gradient.as_deref();
        Partner { role: &partner.role, dtype: partner.dtype(), data: &partner.data.0, base: partner.base(), gradient }
    };
    partners.iter().zip(gradients).map(borrow).collect()
}

fn gradients(partners: &[PartnerVector], elements: u64) -> Vec<Option<Vec<u8>>> {
    partners.iter().map(|partner| partner.gradients(elements)).collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChunkVector {
    pub(crate) codec: String,
    pub(crate) version: u16,
    pub(crate) dtype: String,
    pub(crate) elements: u64,
    #[serde(default = "model")]
    pub(crate) role: String,
    pub(crate) base: Option<Hex>,
    #[serde(default)]
    pub(crate) partners: Vec<PartnerVector>,
    pub(crate) data: Hex,
    pub(crate) columns: Vec<(String, Hex)>,
    pub(crate) crc: u32,
}

/// A vector that must decode, although this library's writer stores the chunk in another form.
#[derive(Deserialize)]
pub(crate) struct ChunkDecode {
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) vector: ChunkVector,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChunkInvalid {
    pub(crate) name: String,
    pub(crate) codec: String,
    pub(crate) dtype: String,
    pub(crate) elements: u64,
    #[serde(rename = "role")]
    pub(crate) _role: Option<String>,
    pub(crate) base: Option<Hex>,
    #[serde(default)]
    pub(crate) partners: Vec<PartnerVector>,
    pub(crate) columns: Vec<(String, Hex)>,
    pub(crate) kind: String,
    pub(crate) clause: Option<String>,
}

pub(crate) fn decode_chunk(
    codec: &str,
    dtype: &str,
    elements: u64,
    base: Option<&Hex>,
    partners: &[PartnerVector],
    columns: &[(String, Hex)],
) -> Result<Vec<u8>, Error> {
    let columns: Vec<(&str, Bytes)> = columns.iter().map(|(name, bytes)| (name.as_str(), bytes.0.clone().into())).collect();
    let dtype = Dtype::from_name(dtype).unwrap();
    let mut out = vec![0; dtype.byte_count(elements).unwrap() as usize];
    let gradients = gradients(partners, elements);
    let partners = borrowed(partners, &gradients);
    let input =
        Columns { dtype, element_count: elements, columns: &columns, base: base.map(|base| base.0.as_slice()), partners: &partners };
    let registry = Registry::default();
    registry.get(codec).unwrap().decode(&input, &mut out)?;
    Ok(out)
}

#[test]
fn codecs() {
    let registry = Registry::default();
    for vector in vectors::<ChunkVector>("codecs.toml", "chunk") {
        let codec = registry.resolve(&CodecRef { id: vector.codec.clone(), version: vector.version }).unwrap();
        let gradients = gradients(&vector.partners, vector.elements);
        let partners = borrowed(&vector.partners, &gradients);
        let chunk = Chunk {
            role: &vector.role,
            base: vector.base.as_ref().map(|base| base.0.as_slice()),
            partners: &partners,
            ..Chunk::new(Dtype::from_name(&vector.dtype).unwrap(), vector.elements, &vector.data.0)
        };
        let encoded = codec.encode(&chunk).unwrap();
        let columns: Vec<(String, Hex)> = encoded.columns.into_iter().map(|(name, bytes)| (name.to_owned(), Hex(bytes))).collect();
        assert_eq!(
            (columns.as_slice(), encoded.uses_base),
            (vector.columns.as_slice(), vector.base.is_some()),
            "{} of {}",
            vector.codec,
            vector.dtype
        );
        let decoded =
            decode_chunk(&vector.codec, &vector.dtype, vector.elements, vector.base.as_ref(), &vector.partners, &vector.columns).unwrap();
        assert_eq!((Hex(decoded.clone()), crc32fast::hash(&decoded)), (vector.data, vector.crc));
    }
    for ChunkDecode { name, vector } in vectors::<ChunkDecode>("codecs.toml", "chunk_decode") {
        registry.resolve(&CodecRef { id: vector.codec.clone(), version: vector.version }).unwrap();
        let decoded = decode_chunk(&vector.codec, &vector.dtype, vector.elements, vector.base.as_ref(), &vector.partners, &vector.columns);
        let decoded = decoded.unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((crc32fast::hash(&decoded), Hex(decoded)), (vector.crc, vector.data), "{name}");
    }
    let mut mismatches = Mismatches::default();
    for vector in vectors::<ChunkInvalid>("codecs.toml", "chunk_invalid") {
        let result = decode_chunk(&vector.codec, &vector.dtype, vector.elements, vector.base.as_ref(), &vector.partners, &vector.columns);
        let name = format!("{}: {}", vector.codec, vector.name);
        mismatches.expect(&name, result, &vector.kind, vector.clause.as_deref());
    }
    mismatches.assert_none();
}
