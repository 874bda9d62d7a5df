//! Memory-maps a raw tensor in local storage, without copying or decoding.

use bytes::Bytes;

use super::Snapshot;
use crate::chain::ShardPlan;
use crate::codec::{ChunkKind, Raw};
use crate::kernels::map::map_file;
use crate::limits::to_usize;
use crate::store::Medium;
use crate::{Error, Result};

impl Snapshot {
    /// Maps the bytes of a whole tensor from its cask and compares the checksums. A cask in a log entry is in memory
    /// already. The store must be a local folder, and the tensor must be stored raw in one shard of this snapshot.
    ///
    /// Any other tensor is an `Unsupported` error: use [`read`](Self::read).
    pub async fn view(&self, name: &str) -> Result<Bytes> {
        let unsupported = |message: &str| Error::unsupported(format!("no view: {message}; use read")).tensor(name);
        let Medium::Local(root) = self.chain.store.objects().medium() else { return Err(unsupported("the store is not a local folder")) };
        let directory = &self.chain.newest().directory;
        let tensor = self.chain.find(name)?;
        let tensor = directory.alias_of(tensor).unwrap_or(tensor);
        let mut shards = directory.shards_of(tensor);
        let (Some(shard), None) = (shards.next(), shards.next()) else {
            return Err(unsupported("the tensor has several shards"));
        };
        let plan = ShardPlan::new(&self.chain.links, tensor, shard)?;
        self.chain.load_indexes(plan.candidates()).await?;
        let rows = plan.rows(&self.chain.links)?;
        let parts = rows.iter().filter_map(|&(link, cask, row)| {
            let (part, range) = self.chain.links[link].0.index(cask)?.missing_part(row)?;
            Some((link, cask, part, range))
        });
        self.chain.load_parts(parts.collect()).await?;

        let mut file: Option<(usize, usize)> = None;
        let mut pages = Vec::new();
        for chunk in 0..plan.grid.chunk_count() {
            let rebuilt = plan.chunk(&self.chain.links, &rows, chunk)?;
            let (Some(step), 1) = (rebuilt.steps.first(), rebuilt.steps.len()) else {
                return Err(unsupported("a chunk of it is a delta"));
            };
            if let Some(codec) = &step.entry.codec {
                self.chain.store.registry().resolve(codec).map_err(|e| e.tensor(name).chunk(chunk))?;
            }
            let bytes = plan.grid.bytes(chunk);
            let one_page = matches!(step.entry.pages.as_slice(), [page]
                if page.column == "values" && page.range.end - page.range.start == bytes.end - bytes.start);
            if !one_page {
                return Err(unsupported("a chunk of it is not one page of its size"));
            }
            let raw = step.entry.kind == ChunkKind::Absolute && step.entry.codec.as_ref().is_some_and(|codec| codec.id == Raw::ID);
            let adjacent = pages.last().is_none_or(|(_, page, _): &(u64, crate::container::PageEntry, u32)| {
                step.entry.pages.first().is_some_and(|next| next.range.start == page.range.end)
            });
            if !raw || !adjacent || *file.get_or_insert((step.link, step.cask)) != (step.link, step.cask) {
                return Err(unsupported("not all of it is stored raw and in one place"));
            }
            pages.extend(step.entry.pages.iter().map(|page| (chunk, page.clone(), rebuilt.crc)));
        }
        let (Some((link, cask)), Some((_, first, _)), Some((_, last, _))) = (file, pages.first(), pages.last()) else {
            return Ok(Bytes::new());
        };
        let source = self.chain.source(link, cask);
        let mapped = match source.whole() {
            Some(bytes) => bytes.clone(),
            None => map_file(&root.join(source.path()))?,
        };
        let slice = |start: u64, end: u64| {
            let (start, end) = (to_usize(start, "a cask")?, to_usize(end, "a cask")?);
            if end > mapped.len() {
                return Err(source.locate(Error::corrupt("the cask is truncated")));
            }
            Ok(mapped.slice(start..end))
        };
        for (chunk, page, crc) in &pages {
            let bytes = slice(page.range.start, page.range.end)?;
            let locate = |e: Error| source.locate(e).tensor(name).chunk(*chunk);
            page.check(&bytes).map_err(locate)?;
            if crc32fast::hash(&bytes) != *crc {
                return Err(locate(
                    Error::corrupt("decoded bytes do not have the checksum that they had when they were saved").clause("chain 3.4"),
                ));
            }
        }
        slice(first.range.start, last.range.end)
    }
}
