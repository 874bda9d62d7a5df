//! An index decoder that receives the end of a file in arbitrary pieces. The result equals that of a decoder that
//! receives the requested ranges.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tensorcask::container::{CaskIndex, IndexDecoder, Progress};
use tensorcask::{Error, Result};
use tensorcask_fuzz::{decode_index, fix_cask, id_of, load_parts, small_limits};

// Input: a number of pieces, the length of each in two bytes, and the file.
fuzz_target!(|data: &[u8]| {
    let Some((&count, rest)) = data.split_first() else { return };
    let (pieces, file) = rest.split_at(rest.len().min(2 * usize::from(count % 16)));
    let pieces: Vec<u16> = pieces.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
    let mut file = file.to_vec();
    fix_cask(&mut file);
    let file = Bytes::from(file);
    let whole = decode_index(&file, &small_limits());
    let split = in_pieces(&file, &pieces);
    assert_eq!(describe(&whole), describe(&split));
});

fn in_pieces(file: &Bytes, pieces: &[u16]) -> Result<CaskIndex> {
    let mut decoder = IndexDecoder::new(id_of(file), file.len() as u64, small_limits());
    let mut begin = file.len();
    let mut pieces = pieces.iter().map(|&piece| usize::from(piece)).chain(std::iter::repeat(257));
    loop {
        if let Progress::Done(index) = decoder.poll()? {
            load_parts(&index, file)?;
            return Ok(index);
        }
        assert!(begin > 0, "asks for more than the file");
        let start = begin.saturating_sub(pieces.next().unwrap_or(1));
        decoder.push(start as u64, file.slice(start..begin))?;
        begin = start;
    }
}

fn describe(result: &Result<CaskIndex>) -> String {
    match result {
        Err(e) => Error::to_string(e),
        Ok(index) => {
            let chunks: Vec<_> = (0..index.shard_count()).map(|shard| (index.rect(shard), index.chunk(shard, 0).ok())).collect();
            let blobs: Vec<_> = index.blobs().map(|blob| (blob.rank, blob.name.to_owned(), blob.page)).collect();
            format!("{} {} {chunks:?} {blobs:?}", index.file().digest, index.file().index_offset)
        }
    }
}
