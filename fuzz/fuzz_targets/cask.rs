//! A whole cask under right checksums. Whatever the tables contain, reading ends in an error or in chunks.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tensorcask::codec::{ChunkKind, Columns, Registry};
use tensorcask::container::BlobEntry;
use tensorcask::wire::Header;
use tensorcask_fuzz::{decode_index, fix_cask, small_limits};

/// Limit on the bytes decoded from one input, because constants are cheap to store.
const MOST_BYTES: u64 = 16 << 20;

fuzz_target!(|data: &[u8]| {
    let mut file = data.to_vec();
    fix_cask(&mut file);
    let file = Bytes::from(file);
    let _ = Header::decode(file.get(..32).unwrap_or_default());
    let Ok(index) = decode_index(&file, &small_limits()) else { return };
    let registry = Registry::default();
    let slice = |range: &std::ops::Range<u64>| file.slice(range.start as usize..range.end as usize);
    let mut end = 32;
    let mut decoded = 0;
    for shard in 0..index.shard_count() {
        let name = index.tensor(index.tensor_of(shard)).name;
        assert_eq!(index.find_shard(name, &index.rect(shard)), Some(shard));
        let grid = index.grid(shard).unwrap();
        for number in 0..grid.chunk_count() {
            let chunk = index.chunk(shard, number).unwrap();
            assert_eq!(chunk.codec.is_none(), chunk.kind == ChunkKind::Unchanged);
            for page in &chunk.pages {
                assert!(end <= page.range.start && page.range.end <= index.file().index_offset, "pages overlap");
                end = page.range.end;
                let _ = page.check(&slice(&page.range));
            }
            let Some(Ok(codec)) = chunk.codec.as_ref().map(|codec| registry.resolve(codec)) else { continue };
            let bytes = grid.bytes(number);
            decoded += bytes.end - bytes.start;
            if decoded > MOST_BYTES {
                return;
            }
            let mut out = vec![0; (bytes.end - bytes.start) as usize];
            let base = vec![0; out.len()];
            let columns: Vec<(&str, Bytes)> = chunk.pages.iter().map(|page| (page.column.as_str(), slice(&page.range))).collect();
            let elements = grid.elements(number);
            let base = (chunk.kind == ChunkKind::Delta).then_some(base.as_slice());
            let input =
                Columns { dtype: grid.dtype(), element_count: elements.end - elements.start, columns: &columns, base, partners: &[] };
            let _ = codec.decode(&input, &mut out);
        }
    }
    for BlobEntry { page, .. } in index.blobs() {
        assert!(end <= page.range.start && page.range.end <= index.file().index_offset, "blobs overlap");
        end = page.range.end;
        let _ = page.check(&slice(&page.range));
    }
    index.tables().tensors().unwrap();
    index.tables().shards().unwrap();
    index.tables().blobs().unwrap();
});
