//! Interleaved rANS: states of 31 bits, words of 16, probabilities of 12. After Duda (arXiv 1311.2540) and Giesen's
//! interleaving (arXiv 1402.3392); division by multiplication after Alverson.

/// States that take turns.
pub(crate) const LANES: usize = 16;
/// Bits of a probability.
pub(crate) const SCALE_BITS: u32 = 12;
/// What frequencies add up to.
pub(crate) const SCALE: u32 = 1 << SCALE_BITS;
/// The least state.
const LEAST: u32 = 1 << 15;

/// Whether a stored state is one that an encoder can end in.
pub(crate) fn is_state(state: u32) -> bool {
    (LEAST..1 << 31).contains(&state)
}

#[derive(Debug, Clone, Copy, Default)]
struct Symbol {
    most: u32,
    reciprocal: u32,
    shift: u32,
    bias: u32,
    complement: u32,
}

/// What encoding a symbol takes.
#[derive(Debug, Clone)]
pub(crate) struct Encoder([Symbol; 256]);

impl Encoder {
    /// From frequencies that add up to [`SCALE`].
    pub(crate) fn new(frequencies: &[u16; 256]) -> Box<Self> {
        let mut symbols = [Symbol::default(); 256];
        let mut start = 0u32;
        for (symbol, &frequency) in symbols.iter_mut().zip(frequencies) {
            let frequency = u32::from(frequency);
            if frequency > 0 {
                let (shift, reciprocal, bias) = if frequency < 2 {
                    (0, u32::MAX, start + SCALE - 1)
                } else {
                    let shift = u32::BITS - (frequency - 1).leading_zeros();
                    let reciprocal = (1u64 << (shift + 31)).div_ceil(u64::from(frequency));
                    (shift - 1, reciprocal as u32, start)
                };
                *symbol = Symbol { most: frequency << 19, reciprocal, shift, bias, complement: SCALE - frequency };
            }
            start += frequency;
        }
        Box::new(Self(symbols))
    }
}

/// Final states, and the words in the order in which they were made: a decoder reads them from the end.
pub(crate) fn encode(symbols: &[u8], encoder: &Encoder) -> ([u32; LANES], Vec<u16>) {
    let mut states = [LEAST; LANES];
    let mut words = Vec::with_capacity(symbols.len() / 8 + LANES);
    let mut step = |state: &mut u32, symbol: u8| {
        let code = &encoder.0[usize::from(symbol)];
        let mut x = *state;
        if x >= code.most {
            words.push(x as u16);
            x >>= 16;
        }
        let quotient = ((u64::from(x) * u64::from(code.reciprocal)) >> 32) as u32 >> code.shift;
        *state = x.wrapping_add(code.bias).wrapping_add(quotient.wrapping_mul(code.complement));
    };
    let (groups, rest) = symbols.as_chunks::<LANES>();
    for (state, &symbol) in states.iter_mut().zip(rest).rev() {
        step(state, symbol);
    }
    for group in groups.iter().rev() {
        for (state, &symbol) in states.iter_mut().zip(group).rev() {
            step(state, symbol);
        }
    }
    (states, words)
}

/// Symbol, frequency - 1, and distance from the symbol's first slot, for each slot.
#[derive(Debug, Clone)]
pub(crate) struct Decoder([u32; SCALE as usize]);

impl Decoder {
    /// From frequencies that add up to [`SCALE`].
    pub(crate) fn new(frequencies: &[u16; 256]) -> Box<Self> {
        let mut slots = Box::new(Self([0; SCALE as usize]));
        let mut at = 0usize;
        for (symbol, &frequency) in (0u32..).zip(frequencies) {
            for i in 0..u32::from(frequency) {
                if let Some(slot) = slots.0.get_mut(at) {
                    *slot = symbol | (u32::from(frequency) - 1) << 8 | i << 20;
                }
                at += 1;
            }
        }
        slots
    }
}

/// Fills `out`; false if words are missing or left over, or a state does not end where every encoder begins.
pub(crate) fn decode(words: &[u8], mut states: [u32; LANES], decoder: &Decoder, out: &mut [u8]) -> bool {
    let words = words.as_chunks::<2>().0;
    let mut at = 0usize;
    let mut missing = false;
    let mut step = |state: &mut u32, out: &mut u8, words: &[[u8; 2]]| {
        let slot = decoder.0[(*state & (SCALE - 1)) as usize];
        *out = slot as u8;
        let frequency = (slot >> 8 & (SCALE - 1)) + 1;
        let mut x = frequency.wrapping_mul(*state >> SCALE_BITS).wrapping_add(slot >> 20);
        if x < LEAST {
            match words.get(at) {
                Some(&[low, high]) => x = x << 16 | u32::from(high) << 8 | u32::from(low),
                None => missing = true,
            }
            at += 1;
        }
        *state = x;
    };
    let (groups, rest) = out.as_chunks_mut::<LANES>();
    for group in groups {
        for (state, slot) in states.iter_mut().zip(group) {
            step(state, slot, words);
        }
    }
    for (state, slot) in states.iter_mut().zip(rest) {
        step(state, slot, words);
    }
    !missing && at == words.len() && states.iter().all(|&state| state == LEAST)
}
