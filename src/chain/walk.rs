//! From a shard of a snapshot to the pages of its chain that rebuild a chunk. Spec: `spec/chain.md`, clause 3.

use super::Link;
use crate::codec::ChunkKind;
use crate::container::ChunkEntry;
use crate::tensor::ChunkGrid;
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
    /// Links that lack the shard, newest first: no walk crosses them.
    absent: Vec<usize>,
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
    /// Newest first; the last is absolute.
    pub steps: Vec<Step>,
    /// CRC-32 of the decoded bytes.
    pub crc: u32,
}

impl ShardPlan {
    /// Plans shard `shard` of tensor `tensor`, both numbers of the newest link's directory.
    pub(crate) fn new(links: &[impl AsRef<Link>], tensor: usize, shard: usize) -> Result<Self> {
        Self::at(links, 0, tensor, shard)
    }

    /// The same, by the directory of link `at`.
    pub(crate) fn at(links: &[impl AsRef<Link>], at: usize, tensor: usize, shard: usize) -> Result<Self> {
        let directory = links.get(at).map(|link| &link.as_ref().directory).ok_or_else(|| Error::invalid("no such link"))?;
        let (name, dtype) = (directory.name(tensor), directory.dtype(tensor));
        let rect = directory.shard(shard).rect;
        let shape = directory.shape(tensor);
        let (mut candidates, mut absent) = (Vec::new(), Vec::new());
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

    /// The role of its tensor in a link: another link may have given it another.
    pub(crate) fn role<'a>(&self, links: &'a [impl AsRef<Link>], link: usize) -> &'a str {
        let directory = links.get(link).map(|link| &link.as_ref().directory);
        directory.and_then(|directory| Some(directory.role(directory.find(&self.name)?))).unwrap_or_default()
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

    /// What rebuilds chunk `chunk`, its partners apart; `rows` is what [`rows`](Self::rows) gave.
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

    /// The stored form of chunk `chunk` as it is in link `from`: that link's, or the newest before. And the CRC-32 of the decoded
    /// bytes.
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
        let object = links.get(link).map(|link| link.as_ref().manifest.path()).unwrap_or_default();
        Error::corrupt(message).object(object).tensor(&self.name).clause(clause)
    }
}
