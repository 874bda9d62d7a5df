//! Groups and restores whole vectors.

use std::arch::x86_64::*;

use crate::VECTOR_BYTES;
use crate::ordered::MAX_CLASSES;

/// Number of vectors whose matches fit the bytes of a vector.
const MOST: usize = 255;

/// Counts the members of classes in whole vectors. Returns the number of symbols counted.
#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn members(classes: &[u8], count: usize, members: &mut [usize; MAX_CLASSES]) -> usize {
    let vectors = classes.as_chunks::<VECTOR_BYTES>().0;
    let one = _mm512_set1_epi8(1);
    for some in vectors.chunks(MOST) {
        for (class, sum) in (0i8..).zip(members.iter_mut().take(count)) {
            let class = _mm512_set1_epi8(class);
            let mut matches = _mm512_setzero_si512();
            for vector in some {
                // SAFETY: a load of 64 bytes from an array of 64.
                let vector = unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) };
                matches = _mm512_mask_add_epi8(matches, _mm512_cmpeq_epi8_mask(vector, class), matches, one);
            }
            let matches = _mm512_sad_epu8(matches, _mm512_setzero_si512());
            *sum = sum.wrapping_add(_mm512_reduce_add_epi64(matches) as usize);
        }
    }
    vectors.len() * VECTOR_BYTES
}

/// Groups whole vectors by class. Returns the number of symbols grouped.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
pub(super) fn part(classes: &[u8], symbols: &[u8], count: usize, next: &mut [usize; MAX_CLASSES], out: &mut [u8]) -> usize {
    let (groups, _) = classes.as_chunks::<VECTOR_BYTES>();
    let mut done = 0;
    for (class_group, symbol_group) in groups.iter().zip(symbols.as_chunks::<VECTOR_BYTES>().0) {
        // SAFETY: loads of 64 bytes from arrays of 64.
        let (c, s) = unsafe { (_mm512_loadu_si512(class_group.as_ptr().cast()), _mm512_loadu_si512(symbol_group.as_ptr().cast())) };
        for (class, next) in (0i8..).zip(next.iter_mut().take(count)) {
            let mask = _mm512_cmpeq_epi8_mask(c, _mm512_set1_epi8(class));
            if let Some(room) = out.get_mut(*next..).and_then(|room| room.first_chunk_mut::<VECTOR_BYTES>()) {
                // SAFETY: a store of 64 bytes to an array of 64.
                unsafe { _mm512_storeu_si512(room.as_mut_ptr().cast(), _mm512_maskz_compress_epi8(mask, s)) };
            }
            *next = next.wrapping_add(mask.count_ones() as usize);
        }
        done += VECTOR_BYTES;
    }
    done
}

/// Counts the members of classes in whole vectors. Returns the number of symbols counted.
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn members_avx2(classes: &[u8], count: usize, members: &mut [usize; MAX_CLASSES]) -> usize {
    let vectors = classes.as_chunks::<32>().0;
    for some in vectors.chunks(MOST) {
        for (class, sum) in (0i8..).zip(members.iter_mut().take(count)) {
            let class = _mm256_set1_epi8(class);
            let mut matches = _mm256_setzero_si256();
            for vector in some {
                // SAFETY: a load of 32 bytes from an array of 32.
                let vector = unsafe { _mm256_loadu_si256(vector.as_ptr().cast()) };
                // A match is -1.
                matches = _mm256_sub_epi8(matches, _mm256_cmpeq_epi8(vector, class));
            }
            let mut quarters = [0u64; 4];
            // SAFETY: a store of 32 bytes to an array of 32.
            unsafe { _mm256_storeu_si256(quarters.as_mut_ptr().cast(), _mm256_sad_epu8(matches, _mm256_setzero_si256())) };
            *sum = quarters.iter().fold(*sum, |sum, &n| sum.wrapping_add(n as usize));
        }
    }
    vectors.len() * 32
}

/// Joins whole vectors. Returns the number of symbols joined.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
pub(super) fn join(classes: &[u8], parted: &[u8], count: usize, next: &mut [usize; MAX_CLASSES], out: &mut [u8]) -> usize {
    let (groups, _) = classes.as_chunks::<VECTOR_BYTES>();
    let mut done = 0;
    for (class_group, out) in groups.iter().zip(out.as_chunks_mut::<VECTOR_BYTES>().0) {
        // SAFETY: a load of 64 bytes from an array of 64.
        let c = unsafe { _mm512_loadu_si512(class_group.as_ptr().cast()) };
        let mut symbols = _mm512_setzero_si512();
        for (class, next) in (0i8..).zip(next.iter_mut().take(count)) {
            let mask = _mm512_cmpeq_epi8_mask(c, _mm512_set1_epi8(class));
            if let Some(some) = parted.get(*next..).and_then(|rest| rest.first_chunk::<VECTOR_BYTES>()) {
                // SAFETY: a load of 64 bytes from an array of 64.
                let some = unsafe { _mm512_loadu_si512(some.as_ptr().cast()) };
                symbols = _mm512_mask_expand_epi8(symbols, mask, some);
            }
            *next = next.wrapping_add(mask.count_ones() as usize);
        }
        // SAFETY: a store of 64 bytes to an array of 64.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), symbols) };
        done += VECTOR_BYTES;
    }
    done
}
