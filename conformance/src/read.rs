//! Our own reader as an adapter: prints the content of a cask file or a store as JSON on stdout.

use std::io::Write;
use std::path::Path;

use bytes::Bytes;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tensorcask::blocking::{Store, maintain};
use tensorcask::codec::{BaseUse, ChunkKind, Columns, Registry};
use tensorcask::container::{BlobEntry, CaskIndex, IndexDecoder, PageEntry, Progress, TensorEntry};
use tensorcask::maintain::VerifyOptions;
use tensorcask::wire::{HEADER_BYTES, Header, Tree, TreeNode};
use tensorcask::{Error, ErrorKind, Limits, Result, Slice, StepSelector};

use crate::failure::Failure;
use crate::files::hex;

/// Reads a whole cask or store and prints its content. Returns whether it is acceptable.
pub(crate) fn read(path: &Path) -> std::result::Result<bool, Failure> {
    let found = match path.is_dir() {
        true => read_store(path.to_str().ok_or("a path that is not UTF-8")?),
        false => read_cask(std::fs::read(path)?.into()),
    };
    let mut out = std::io::stdout().lock();
    match found {
        Ok(value) => writeln!(out, "{value}")?,
        Err(e) => {
            // The library reports a missing `store.json` as `NotFound`, without a clause (log 2.1). Any other missing
            // object is corrupt.
            let clause = e.clause_name().or((e.kind() == ErrorKind::NotFound).then_some("log 2.1"));
            writeln!(out, "{}", json!({ "kind": kind_of(&e), "clause": clause, "message": e.to_string() }))?;
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the kind of an error in the words of the spec.
fn kind_of(error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::LimitExceeded => "limit",
        // The library distinguishes a place where nothing was ever saved. The spec does not.
        ErrorKind::NotFound => "corrupt",
        kind => kind.name(),
    }
}

/// Reads every live step after a full check.
fn read_store(path: &str) -> Result<Value> {
    let store = Store::open(path)?;
    let report = maintain::verify(&store, &VerifyOptions::default())?;
    // Readers skip a damaged catalog, because the log has all facts. An intact catalog must agree with the log (log
    // 6.4).
    let is_skipped = |e: &Error| e.object_name().is_some_and(|object| object.starts_with("catalog/")) && e.clause_name() != Some("log 6.4");
    if let Some(problem) = report.problems.into_iter().find(|problem| !is_skipped(&problem.error)) {
        return Err(problem.error);
    }
    let mut steps = Map::new();
    for info in store.snapshots()? {
        let snapshot = store.snapshot(info.record.step)?;
        let mut tensors = Map::new();
        for tensor in snapshot.tensors() {
            let data = snapshot.read(&tensor.name, &Slice::all())?.data;
            tensors.insert(
                tensor.name,
                json!({
                    "dtype": tensor.dtype.name(), "shape": tensor.shape, "role": tensor.role, "param": tensor.param,
                    "sha256": hex(&Sha256::digest(data)),
                }),
            );
        }
        let mut blobs = Vec::new();
        let mut trees = Vec::new();
        let names = snapshot.blobs()?;
        for (rank, name) in names.iter().cloned() {
            let data = snapshot.read_blob(rank, &name)?;
            if name == Tree::BLOB {
                trees.push((rank, Tree::decode(&data, &Limits::default())?));
            }
            blobs.push(json!({ "rank": rank, "name": name, "sha256": hex(&Sha256::digest(data)) }));
        }
        trees.iter().try_for_each(|(rank, tree)| names_lead_somewhere(tree, *rank, &tensors, &names))?;
        snapshot.rounding()?;
        snapshot.statistics()?;
        steps.insert(
            snapshot.step().to_string(),
            json!({ "tensors": tensors, "blobs": blobs, "metadata": snapshot.metadata(), "user": snapshot.user() }),
        );
    }
    // A reduced snapshot is never the latest.
    let latest = match store.snapshot(StepSelector::Latest) {
        Ok(snapshot) => Some(snapshot.step()),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Template) => None,
        Err(e) => return Err(e),
    };
    Ok(json!({ "latest": latest, "steps": steps }))
}

/// Checks that a snapshot has the tensors and blobs that a tree names.
fn names_lead_somewhere(tree: &Tree, rank: u32, tensors: &Map<String, Value>, blobs: &[(u32, String)]) -> Result<()> {
    for node in tree.nodes() {
        let (is_there, name) = match node {
            TreeNode::Tensor(name, _) => (tensors.contains_key(name), name),
            TreeNode::Bytes(name) | TreeNode::File(name) => (blobs.iter().any(|(of, blob)| (*of, blob) == (rank, name)), name),
            _ => continue,
        };
        if !is_there {
            return Err(Error::corrupt(format!("names `{}`, which is not there", name.escape_debug()))
                .object(Tree::BLOB)
                .clause("tree 2.7"));
        }
    }
    Ok(())
}

/// Reads every byte of one file.
fn read_cask(file: Bytes) -> Result<Value> {
    let bytes = file.len() as u64;
    let slice = |from: u64, to: u64| {
        let range = usize::try_from(from).ok().zip(usize::try_from(to).ok()).filter(|(from, to)| from <= to && *to <= file.len());
        range.map(|(from, to)| file.slice(from..to)).ok_or_else(|| Error::corrupt(format!("bytes {from}..{to} are not there")))
    };
    let short = |_| Error::corrupt(format!("{bytes} bytes are too few for a cask")).clause("container 1");
    let header = Header::decode(&slice(0, HEADER_BYTES).map_err(short)?)?;
    let mut decoder = IndexDecoder::new(header.id, bytes, Limits::default());
    let index = loop {
        match decoder.poll()? {
            Progress::Needs(range) => decoder.push(range.start, slice(range.start, range.end)?)?,
            Progress::Done(index) => break index,
        }
    };
    for (part, range) in index.missing_parts() {
        index.load_part(part, slice(range.start, range.end)?)?;
    }

    // Pages and blobs in file order, with the padding between them.
    let mut pages: Vec<PageEntry> = Vec::new();
    for shard in 0..index.shard_count() {
        for chunk in 0..index.grid(shard)?.chunk_count() {
            pages.extend(index.chunk(shard, chunk)?.pages);
        }
    }
    pages.extend(index.blobs().map(|blob| blob.page));
    let mut end = HEADER_BYTES;
    let is_padding = |from: u64, to: u64| match slice(from, to)?.iter().all(|&byte| byte == 0) {
        true => Ok(()),
        false => Err(Error::corrupt("padding is not zero").offset(from).clause("container 4.3")),
    };
    for page in &pages {
        is_padding(end, page.range.start)?;
        page.check(&slice(page.range.start, page.range.end)?)?;
        end = page.range.end;
    }
    is_padding(end, index.file().index_offset)?;

    let mut tensors = Map::new();
    for tensor in 0..index.tensor_count() {
        let TensorEntry { name, dtype, shape } = index.tensor(tensor);
        let mut shards = Vec::new();
        for shard in index.shards_of(tensor) {
            let rect = index.rect(shard);
            let content = match read_shard(&index, shard, &slice) {
                Ok(Some(digest)) => json!({ "sha256": digest }),
                Ok(None) => json!({ "sha256": null }),
                // An unknown codec affects only its own tensor.
                Err(e) if e.kind() == ErrorKind::Unsupported => json!({ "error": kind_of(&e) }),
                Err(e) => return Err(e.tensor(name)),
            };
            let mut entry = json!({ "offset": rect.offset, "shape": rect.shape });
            if let (Value::Object(entry), Value::Object(content)) = (&mut entry, content) {
                entry.extend(content);
            }
            shards.push(entry);
        }
        tensors.insert(name.to_owned(), json!({ "dtype": dtype.name(), "shape": shape, "shards": shards }));
    }
    let mut blobs = Vec::new();
    for BlobEntry { rank, name, page } in index.blobs() {
        let data = slice(page.range.start, page.range.end)?;
        blobs.push(json!({ "rank": rank, "name": name, "sha256": hex(&Sha256::digest(data)) }));
    }
    Ok(json!({ "id": header.id, "digest": index.file().digest, "tensors": tensors, "blobs": blobs }))
}

/// Returns the digest of a shard's elements, or `None` if a chunk needs the parent. Decodes the other chunks in any
/// case.
fn read_shard(index: &CaskIndex, shard: usize, slice: &impl Fn(u64, u64) -> Result<Bytes>) -> Result<Option<String>> {
    let registry = Registry::default();
    let grid = index.grid(shard)?;
    let mut hasher = Sha256::new();
    let mut whole = true;
    for number in 0..grid.chunk_count() {
        let chunk = index.chunk(shard, number)?;
        let Some(codec) = &chunk.codec else {
            whole = false;
            continue;
        };
        let codec = registry.resolve(codec)?;
        let delta = chunk.kind == ChunkKind::Delta;
        if matches!((codec.base_use(), delta), (BaseUse::Never, true) | (BaseUse::Always, false)) {
            return Err(Error::corrupt(format!("a chunk of codec `{}` that is {}", codec.id(), chunk.kind.name())).clause("codecs 3"));
        }
        if delta || !codec.is_standalone() {
            let names: Vec<&str> = chunk.pages.iter().map(|page| page.column.as_str()).collect();
            codec.check_columns(grid.dtype(), &names)?;
            whole = false;
            continue;
        }
        let mut columns: Vec<(&str, Bytes)> = Vec::new();
        for page in &chunk.pages {
            columns.push((&page.column, slice(page.range.start, page.range.end)?));
        }
        let elements = grid.elements(number);
        let bytes = grid.bytes(number);
        let length = usize::try_from(bytes.end - bytes.start).map_err(|_| Error::limit("a chunk beyond this machine's memory"))?;
        let mut out = vec![0; length];
        let input =
            Columns { dtype: grid.dtype(), element_count: elements.end - elements.start, columns: &columns, base: None, partners: &[] };
        codec.decode(&input, &mut out)?;
        if crc32fast::hash(&out) != chunk.crc {
            return Err(Error::corrupt("decoded bytes have another checksum").chunk(number).clause("container 5.4"));
        }
        hasher.update(&out);
    }
    Ok(whole.then(|| hex(&hasher.finalize())))
}
