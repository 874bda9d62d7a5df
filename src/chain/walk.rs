//! Walks down a chain to the pages that rebuild a chunk of a shard. Spec: `spec/chain.md`, clause 3.

use super::Link;
use crate::codec::ChunkKind;
use crate::container::{ChunkEntry, TensorEntry};
use crate::tensor::ChunkGrid;
use crate::tensor::Rect;
use crate::{Dtype, Error, Result};

/// A shard of the newest link, and the casks of the chain that may hold parts of it.
#[derive(Debug)]
pub(crate) struct ShardPlan {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub rect: Rect,
    pub grid: ChunkGrid,
    /// Links and casks that may hold the shard, newest first.
    candidates: Vec<(usize, usize)>,
    /// Links that lack the shard, newest first. No walk crosses them.
    absent: Vec<usize>,
}

/// One stored form of a chunk, with one page per column.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub link: usize,
    pub cask: usize,
    pub entry: ChunkEntry,
}

/// Steps that rebuild a chunk.
#[derive(Debug)]
pub(crate) struct ChunkPlan {
    /// Steps, newest first; the last is absolute.
    pub steps: Vec<Step>,
    /// CRC-32 of the decoded bytes.
    pub crc: u32,
}

impl ShardPlan {
    /// Plans shard `shard` of tensor `tensor`, numbered as in the newest link's directory.
    pub(crate) fn new(links: &[impl AsRef<Link>], tensor: usize, shard: usize) -> Result<Self> {
        Self::at(links, 0, tensor, shard)
    }

    /// Does the same as [`new`](Self::new), numbered as in the directory of link `at`.
    pub(crate) fn at(links: &[impl AsRef<Link>], at: usize, tensor: usize, shard: usize) -> Result<Self> {
        let directory = links.get(at).map(|link| &link.as_ref().directory).ok_or_else(|| Error::invalid("no such link"))?;
        let name = directory.name(tensor);
        let dtype = directory.dtype(tensor);
        let rect = directory.shard(shard).rect;
        let shape = directory.shape(tensor);
        let mut candidates = Vec::new();
        let mut absent = Vec::new();
        for (at, link) in links.iter().enumerate() {
            match link.as_ref().find(name, dtype, &shape, &rect) {
                Some(Some((cask, _))) => candidates.push((at, cask)),
                Some(None) => {}
                None => absent.push(at),
            }
        }
        let grid = ChunkGrid::new(dtype, &rect.shape)?;
        Ok(Self { name: name.to_owned(), dtype, shape, grid, rect, candidates, absent })
    }

    /// Returns the role of the shard's tensor in a link. Roles may differ between links.
    pub(crate) fn role<'a>(&self, links: &'a [impl AsRef<Link>], link: usize) -> &'a str {
        let directory = links.get(link).map(|link| &link.as_ref().directory);
        directory.and_then(|directory| Some(directory.role(directory.find(&self.name)?))).unwrap_or_default()
    }

    /// Returns the links and casks whose index the shard needs.
    pub(crate) fn candidates(&self) -> &[(usize, usize)] {
        &self.candidates
    }

    /// Returns the shard rows of the casks that hold the shard, newest first.
    pub(crate) fn rows(&self, links: &[impl AsRef<Link>]) -> Result<Vec<(usize, usize, usize)>> {
        let mut rows = Vec::new();
        for &(link, cask) in &self.candidates {
            let index = links.get(link).and_then(|link| link.as_ref().index(cask));
            let index = index.ok_or_else(|| Error::invalid("the index of a cask has not been read").tensor(&self.name))?;
            if let Some(row) = index.find_shard(&self.name, &self.rect) {
                let TensorEntry { dtype, shape, .. } = index.tensor(index.tensor_of(row));
                if (dtype, &shape) != (self.dtype, &self.shape) {
                    let message = format!("its cask says {dtype} {shape:?}, the directory {} {:?}", self.dtype, self.shape);
                    return Err(self.fail(links, link, message, "chain 3.2"));
                }
                rows.push((link, cask, row));
            }
        }
        Ok(rows)
    }

    /// Returns the steps that rebuild chunk `chunk`, without its partners. `rows` is the result of
    /// [`rows`](Self::rows).
    pub(crate) fn chunk(&self, links: &[impl AsRef<Link>], rows: &[(usize, usize, usize)], chunk: u64) -> Result<ChunkPlan> {
        let (mut step, crc) = self.stored(links, rows, chunk, 0)?;
        let mut steps = Vec::new();
        while step.entry.kind != ChunkKind::Absolute {
            let next = self.stored(links, rows, chunk, step.link + 1)?.0;
            steps.push(std::mem::replace(&mut step, next));
        }
        steps.push(step);
        Ok(ChunkPlan { steps, crc })
    }

    /// Returns the stored form of chunk `chunk` in link `from`, or in the newest older link that has one. Also returns
    /// the CRC-32 of the decoded bytes.
    pub(crate) fn stored(
        &self,
        links: &[impl AsRef<Link>],
        rows: &[(usize, usize, usize)],
        chunk: u64,
        from: usize,
    ) -> Result<(Step, u32)> {
        let base = links.len().saturating_sub(1);
        let end = self.absent.iter().copied().find(|&link| link >= from);
        let mut crc = None;
        for &(link, cask, row) in rows.iter().filter(|row| row.0 >= from && end.is_none_or(|end| row.0 < end)) {
            let index = links.get(link).and_then(|link| link.as_ref().index(cask));
            let index = index.ok_or_else(|| Error::invalid("the index of a cask has not been read").tensor(&self.name))?;
            let entry = index.chunk(row, chunk)?;
            if link == base && entry.kind != ChunkKind::Absolute {
                return Err(self
                    .fail(links, link, format!("a base holds a chunk that is {}", entry.kind.name()), "chain 3.3")
                    .chunk(chunk));
            }
            let crc = *crc.get_or_insert(entry.crc);
            if entry.kind != ChunkKind::Unchanged {
                return Ok((Step { link, cask, entry }, crc));
            }
        }
        let link = end.unwrap_or(base).min(base);
        Err(self.fail(links, link, "the chain ends without an absolute chunk".into(), "chain 3.1").chunk(chunk))
    }

    fn fail(&self, links: &[impl AsRef<Link>], link: usize, message: String, clause: &'static str) -> Error {
        let object = links.get(link).map(|link| link.as_ref().record.manifest_path()).unwrap_or_default();
        Error::corrupt(message).object(object).tensor(&self.name).clause(clause)
    }
}
