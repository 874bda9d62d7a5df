//! Checks every byte of a cask, window by window, in the order of the file. The caller reads the windows.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;

use crate::codec::ChunkKind;
use crate::container::{CaskIndex, PageEntry, padding_is_zero};
use crate::limits::to_usize;
use crate::wire::{CaskRef, HEADER_BYTES, Header};
use crate::{Error, Result};

/// Size of a window. A page that is larger has a larger window.
pub(super) const WINDOW_BYTES: u64 = 8 << 20;

/// The check of all bytes before the index: header, pages, and the padding between them. The index was checked when it was
/// decoded.
pub(super) struct CaskCheck<'a> {
    cask: &'a CaskRef,
    pages: VecDeque<Page>,
    /// First byte that was not checked yet.
    position: u64,
    index_offset: u64,
}

struct Page {
    tensor: String,
    chunk: u64,
    entry: PageEntry,
}

impl<'a> CaskCheck<'a> {
    /// Begins the check of a cask of a base or a delta. All parts of the index are loaded. Fails if the index describes chunks
    /// that a base cannot have.
    pub(super) fn new(cask: &'a CaskRef, index: &CaskIndex, of_base: bool) -> Result<Self> {
        let mut pages = VecDeque::new();
        for shard in 0..index.shard_count() {
            let tensor = index.tensor(index.tensor_of(shard)).name;
            for chunk in 0..index.grid(shard)?.chunk_count() {
                let entry = index.chunk(shard, chunk)?;
                if of_base && entry.kind != ChunkKind::Absolute {
                    let message = format!("a base holds a chunk that is {}", entry.kind.name());
                    return Err(Error::corrupt(message).tensor(tensor).chunk(chunk).clause("chain 3.3"));
                }
                pages.extend(entry.pages.into_iter().map(|entry| Page { tensor: tensor.to_owned(), chunk, entry }));
            }
        }
        pages.extend(index.blobs().map(|blob| Page { tensor: blob.name.to_owned(), chunk: 0, entry: blob.page }));
        Ok(Self { cask, pages, position: 0, index_offset: index.file().index_offset })
    }

    /// Ranges to read and to check, in this order: whole pages and the padding before them.
    pub(super) fn windows(&self) -> Vec<Range<u64>> {
        let mut windows = Vec::new();
        let mut begin = self.position;
        let mut pages = self.pages.iter().map(|page| page.entry.range.end).peekable();
        while begin < self.index_offset {
            let full = begin.saturating_add(WINDOW_BYTES);
            // A larger page is a window by itself.
            let mut end = pages.next().unwrap_or(begin).max(begin);
            // A page may be empty, but a window is not.
            while let Some(more) = pages.next_if(|more| *more <= full || end == begin) {
                end = end.max(more);
            }
            if pages.peek().is_none() {
                end = end.max(full);
            }
            let window = begin..end.clamp(begin + 1, self.index_offset);
            begin = window.end;
            windows.push(window);
        }
        windows
    }

    /// Checks the bytes of the next window.
    pub(super) fn check(&mut self, window: &Bytes) -> Result<()> {
        let begin = self.position;
        let end = self.position.saturating_add(window.len() as u64);
        let slice = |range: Range<u64>| {
            let at = |offset: u64| to_usize(offset.checked_sub(begin).unwrap_or(u64::MAX), "a page");
            let start = at(range.start)?;
            let stop = at(range.end)?;
            if start > stop || stop > window.len() {
                return Err(Error::corrupt("a page lies outside of the bytes that were read").offset(range.start));
            }
            Ok(window.slice(start..stop))
        };
        if begin == 0 {
            if Header::decode(&slice(0..HEADER_BYTES)?)?.id != self.cask.id {
                return Err(Error::corrupt("holds a cask whose id differs from the name of the file").clause("container 2.4"));
            }
            self.position = HEADER_BYTES;
        }
        while self.pages.front().is_some_and(|page| page.entry.range.end <= end)
            && let Some(page) = self.pages.pop_front()
        {
            let range = page.entry.range.clone();
            padding_is_zero(&slice(self.position..range.start)?, self.position)?;
            page.entry.check(&slice(range.clone())?).map_err(|e| e.tensor(page.tensor).chunk(page.chunk))?;
            self.position = range.end;
        }
        padding_is_zero(&slice(self.position..end)?, self.position)?;
        self.position = end;
        match self.pages.front() {
            Some(page) if end >= self.index_offset => {
                let message = "a page lies outside of the pages of the file, or before the page in front of it";
                Err(Error::corrupt(message).tensor(&page.tensor).chunk(page.chunk).offset(page.entry.range.start).clause("container 4.3"))
            }
            _ => Ok(()),
        }
    }
}
