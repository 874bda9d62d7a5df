//! Copies runs of elements, including packed elements.

use super::{Dtype, Run};

/// Copies the elements of a run between two row-major buffers of the same type.
pub(crate) fn copy_run(dtype: Dtype, run: Run, source: &[u8], destination: &mut [u8]) {
    let bits = dtype.bits();
    let from = run.source * bits;
    let to = run.destination * bits;
    let count = run.count * bits;
    if from.is_multiple_of(8) && to.is_multiple_of(8) && count.is_multiple_of(8) {
        let from = (from / 8) as usize;
        let to = (to / 8) as usize;
        let count = (count / 8) as usize;
        destination[to..to + count].copy_from_slice(&source[from..from + count]);
        return;
    }
    for bit in 0..count {
        let value = source[((from + bit) / 8) as usize] >> ((from + bit) % 8) & 1;
        let byte = &mut destination[((to + bit) / 8) as usize];
        let shift = (to + bit) % 8;
        *byte = *byte & !(1 << shift) | value << shift;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_runs_keep_their_neighbours() {
        // Source elements 0 to 5, of 4 bits each: 1 2 3 4 5 6.
        let source = [0x21, 0x43, 0x65];
        let mut destination = [0xff; 3];
        copy_run(Dtype::Int4, Run { source: 1, destination: 2, count: 3 }, &source, &mut destination);
        assert_eq!(destination, [0xff, 0x32, 0xf4]);
        copy_run(Dtype::Int4, Run { source: 2, destination: 0, count: 2 }, &source, &mut destination);
        assert_eq!(destination, [0x43, 0x32, 0xf4]);
    }
}
