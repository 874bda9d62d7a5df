//! From a shard of a snapshot to the pages of its chain that rebuild a chunk. Spec: `spec/chain.md`, clause 3.

use crate::chain::Link;
use crate::codec::ChunkKind;
use crate::container::ChunkEntry;
use crate::plan::ChunkGrid;
use crate::tensor::Rect;
use crate::{Dtype, Error, Result};

/// A shard of the newest link, and where the chain's casks may hold parts of it.
#[derive(Debug)]
pub(crate) struct ShardPlan {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub rect: Rect,
    pub grid: ChunkGrid,
    /// Links and casks that may hold it, newest first.
    candidates: Vec<(usize, usize)>,
    /// What ended the walk before the base: the next link lacks the shard.
    broken_at: Option<usize>,
}

/// One stored form of a chunk: a page for each column.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub link: usize,
    pub cask: usize,
    pub entry: ChunkEntry,
}

/// What rebuilds a chunk.
#[derive(Debug)]
pub(crate) struct ChunkPlan {
    pub chunk: u64,
    /// Newest first; the last is absolute.
    pub steps: Vec<Step>,
    /// CRC-32 of the decoded bytes.
    pub crc: u32,
}

impl ShardPlan {
    /// Plans shard `shard` of tensor `tensor`, both numbers of the newest link's directory.
    pub(crate) fn new(links: &[impl AsRef<Link>], tensor: usize, shard: usize) -> Result<Self> {
        let newest = links.first().map(AsRef::as_ref).ok_or_else(|| Error::invalid("an empty chain"))?;
        let (name, dtype) = (newest.directory.name(tensor), newest.directory.dtype(tensor));
        let rect = newest.directory.shard(shard).rect;
        let shape = newest.directory.shape(tensor);
        let mut candidates = Vec::new();
        let mut broken_at = None;
        for (at, link) in links.iter().enumerate() {
            match link.as_ref().find(name, dtype, &shape, &rect) {
                Some(Some((cask, _))) => candidates.push((at, cask)),
                Some(None) => {}
                None => {
                    broken_at = Some(at);
                    break;
                }
            }
        }
        Ok(Self { name: name.to_owned(), dtype, shape, grid: ChunkGrid::new(dtype, &rect.shape)?, rect, candidates, broken_at })
    }

    /// Links and casks whose index it needs.
    pub(crate) fn candidates(&self) -> &[(usize, usize)] {
        &self.candidates
    }

    /// Shard rows of the casks that hold it, newest first.
    pub(crate) fn rows(&self, links: &[impl AsRef<Link>]) -> Result<Vec<(usize, usize, usize)>> {
        let mut rows = Vec::new();
        for &(link, cask) in &self.candidates {
            let index = links.get(link).and_then(|link| link.as_ref().index(cask));
            let index = index.ok_or_else(|| Error::invalid("the index of a cask has not been read").tensor(&self.name))?;
            if let Some(row) = index.find_shard(&self.name, &self.rect) {
                let (_, dtype, shape) = index.tensor(index.tensor_of(row));
                if (dtype, &shape) != (self.dtype, &self.shape) {
                    let message = format!("its cask says {dtype} {shape:?}, the directory {} {:?}", self.dtype, self.shape);
                    return Err(self.fail(links, link, message, "chain 3.2"));
                }
                rows.push((link, cask, row));
            }
        }
        Ok(rows)
    }

    /// What rebuilds chunk `chunk`; `rows` is what [`rows`](Self::rows) gave.
    pub(crate) fn chunk(&self, links: &[impl AsRef<Link>], rows: &[(usize, usize, usize)], chunk: u64) -> Result<ChunkPlan> {
        let mut plan = ChunkPlan { chunk, steps: Vec::new(), crc: 0 };
        let base = links.len() - 1;
        for (nth, &(link, cask, row)) in rows.iter().enumerate() {
            let index = links.get(link).and_then(|link| link.as_ref().index(cask));
            let index = index.ok_or_else(|| Error::invalid("the index of a cask has not been read").tensor(&self.name))?;
            let entry = index.chunk(row, chunk)?;
            if nth == 0 {
                plan.crc = entry.crc;
            }
            if link == base && entry.kind != ChunkKind::Absolute {
                return Err(self
                    .fail(links, link, format!("a base holds a chunk that is {}", entry.kind.name()), "chain 3.3")
                    .chunk(chunk));
            }
            match entry.kind {
                ChunkKind::Unchanged => {}
                ChunkKind::Delta => plan.steps.push(Step { link, cask, entry }),
                ChunkKind::Absolute => {
                    plan.steps.push(Step { link, cask, entry });
                    return Ok(plan);
                }
            }
        }
        let link = self.broken_at.unwrap_or(base).min(base);
        Err(self.fail(links, link, "the chain ends without an absolute chunk".into(), "chain 3.1").chunk(chunk))
    }

    fn fail(&self, links: &[impl AsRef<Link>], link: usize, message: String, clause: &'static str) -> Error {
        let object = links.get(link).map(|link| link.as_ref().manifest.path()).unwrap_or_default();
        Error::corrupt(message).object(object).tensor(&self.name).clause(clause)
    }
}
