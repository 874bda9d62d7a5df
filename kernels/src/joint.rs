//! The shortest gradient that leads from one state of a weight and its moments to the next, where moments have few bits.
//! Spec: `spec/codecs/joint.md`.
//!
//! A first moment of 8 bits tells a gradient to about 7 bits. The weight tells it to 12 to 16: the step adds
//! `s * m / (sqrt(v) / b + e)`, in which both unrounded moments depend on the gradient alone. Newton's method inverts
//! that. Each of weight and moments leaves an interval; the shortest number within all of them is nearly always the true
//! gradient divided by the clip factor. It is kept if it gives the first moment bit by bit.

use super::Level;
use super::environment::DefaultEnvironment;
use super::floats::unit;
use super::gradient::{Blend, First, NONE, Second, blended_number, shortest_between};
use super::replay::{Divisor, Square, Step, Update, combine_square, number, stepped, unit as result, with_fma};

/// One step of a weight and both moments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Joint {
    pub first: First,
    pub second: Second,
    pub step: Step,
}

/// Numbers of the parent, as f32.
#[derive(Debug, Clone, Copy)]
pub struct Before<'a> {
    pub weights: &'a [u8],
    pub first: &'a [u8],
    pub second: &'a [u8],
}

/// Numbers of both snapshots, as f32, and how many low bits of those of this snapshot are always zero.
#[derive(Debug, Clone, Copy)]
pub struct States<'a> {
    pub before: Before<'a>,
    pub weights: &'a [u8],
    pub first: &'a [u8],
    pub second: &'a [u8],
    pub weight_cut: u32,
    pub first_cut: u32,
    pub second_cut: u32,
}

/// Fills `out` with the weights, as f32, that gradients lead to. The step takes the moments as they are before they are
/// rounded to the type in which they are stored.
pub fn weights(before: Before<'_>, gradients: &[u8], by: Joint, out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    weights_at(Level::best(), before, gradients, by, out);
}

/// Fills `out` with the second moments, as f32, that gradients lead to.
pub fn squares(second: &[u8], gradients: &[u8], by: Second, out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    squares_at(Level::best(), second, gradients, by, out);
}

/// Rounds numbers to the nearest whose low bits are zero.
pub fn cut_all(bits: u32, numbers: &mut [u8]) {
    if bits > 0 {
        numbers.as_chunks_mut::<4>().0.iter_mut().for_each(|unit| *unit = result(cut(number(*unit), bits)));
    }
}

/// Fills `out` with the shortest quotient of gradient and clip factor that leads from one state to the next, or [`NONE`].
pub fn quotients(states: States<'_>, by: Joint, out: &mut [u8]) {
    let _environment = DefaultEnvironment::enter();
    quotients_at(Level::best(), states, by, out);
}

/// Rounds a number to the nearest whose low bits are zero, ties to even. Every NaN becomes the same.
#[inline(always)]
pub fn cut(x: f32, bits: u32) -> f32 {
    let odd = x.to_bits() >> bits & 1;
    let half = (1u32 << bits >> 1).wrapping_sub(1).wrapping_add(odd);
    let rounded = x.to_bits().wrapping_add(if bits == 0 { 0 } else { half }) & (u32::MAX << bits);
    f32::from_bits(if x.is_nan() { 0x7fc0_0000 } else { rounded })
}

with_fma!(fn weights_at = weights_any(before: Before<'_>, gradients: &[u8], by: Joint, out: &mut [u8]));
with_fma!(fn squares_at = squares_any(second: &[u8], gradients: &[u8], by: Second, out: &mut [u8]));
with_fma!(fn quotients_at = quotients_any(states: States<'_>, by: Joint, out: &mut [u8]));

/// The weight that a gradient leads to.
#[inline(always)]
fn weight<const HARD: bool>(w: f32, m: f32, v: f32, g: f32, by: Joint) -> f32 {
    let m = blended_number::<HARD>(by.first, m, g);
    let v = combine_square::<HARD>(by.second.square, by.second.decay, by.second.share, v, g);
    stepped::<HARD>(w, m, v, by.step)
}

#[inline(always)]
fn weights_any<const HARD: bool>(before: Before<'_>, gradients: &[u8], by: Joint, out: &mut [u8]) {
    let Before { weights, first, second } = before;
    let moments = first.as_chunks::<4>().0.iter().zip(second.as_chunks::<4>().0);
    let units = weights.as_chunks::<4>().0.iter().zip(moments).zip(gradients.as_chunks::<4>().0);
    for (((&w, (&m, &v)), &g), out) in units.zip(out.as_chunks_mut::<4>().0) {
        *out = result(weight::<HARD>(number(w), number(m), number(v), number(g), by));
    }
}

#[inline(always)]
fn squares_any<const HARD: bool>(second: &[u8], gradients: &[u8], by: Second, out: &mut [u8]) {
    let units = second.as_chunks::<4>().0.iter().zip(gradients.as_chunks::<4>().0);
    for ((&v, &g), out) in units.zip(out.as_chunks_mut::<4>().0) {
        *out = result(combine_square::<HARD>(by.square, by.decay, by.share, number(v), number(g)));
    }
}

/// Constants of a step in binary64.
#[derive(Clone, Copy)]
struct Inverse {
    decay: f64,
    weight: f64,
    second_decay: f64,
    share: f64,
    inverse_weight: f64,
    inverse_share: f64,
    loss: f64,
    inverse_scale: f64,
    inverse_correction: f64,
    epsilon: f64,
    inverse_clip: f64,
}

impl Inverse {
    fn of(by: Joint) -> Self {
        let correction = f64::from(by.step.correction);
        let weight = f64::from(by.first.weight);
        let share = f64::from(by.second.share);
        Self {
            decay: f64::from(by.first.decay),
            weight,
            second_decay: f64::from(by.second.decay),
            share,
            inverse_weight: 1.0 / weight,
            inverse_share: 1.0 / share,
            loss: f64::from(by.step.decay) - if by.step.update.takes_loss() { 0.0 } else { 1.0 },
            inverse_scale: 1.0 / f64::from(by.step.scale),
            inverse_correction: if by.step.divisor == Divisor::Divided { 1.0 / correction } else { correction },
            epsilon: f64::from(by.step.epsilon),
            inverse_clip: 1.0 / f64::from(by.first.clip),
        }
    }
}

/// The gradient that a weight and its moments lead to, and how sure it is.
#[derive(Debug, Clone, Copy)]
pub struct Solved {
    /// The gradient that the weight tells.
    pub gradient: f64,
    /// Half of the interval that the weight's rounding leaves open.
    pub width: f64,
    /// Relative change of the gradient over that of the scale.
    pub by_scale: f64,
    /// Relative change of the gradient over the change of the decay.
    pub by_decay: f64,
}

/// Half a unit in the last place of a number whose low bits are cut.
#[inline(always)]
fn half_ulp(x: f32, bits: u32) -> f64 {
    let exponent = (x.to_bits() >> 23 & 255).max(1);
    f64::from_bits(u64::from(exponent.wrapping_add(872).wrapping_add(bits)) << 52)
}

#[inline(always)]
fn solve(w: [f32; 2], m: [f32; 2], v: f32, weight_cut: u32, by: Inverse) -> Solved {
    let [w0, w1] = w.map(f64::from);
    let [m0, m1] = m.map(f64::from);
    let v = f64::from(v) * by.second_decay;
    let ratio = ((w1 - w0) - w0 * by.loss) * by.inverse_scale;
    let mut g = (m1 - by.decay * m0) * by.inverse_weight;
    let mut slope = 0.0;
    let mut divisor = 0.0;
    for _ in 0..4 {
        let root = (v + by.share * g * g).sqrt();
        divisor = root * by.inverse_correction + by.epsilon;
        slope = by.weight - ratio * by.inverse_correction * by.share * g / root;
        g -= (by.decay * m0 + by.weight * g - ratio * divisor) / slope;
    }
    let per_ratio = divisor / slope;
    Solved {
        gradient: g,
        width: (half_ulp(w[1], weight_cut) * by.inverse_scale * per_ratio).abs(),
        by_scale: 0.0 - ratio * per_ratio / g,
        by_decay: 0.0 - w0 * by.inverse_scale * per_ratio / g,
    }
}

/// Solves a step for the gradients of a few elements.
pub fn solve_all(states: States<'_>, by: Joint) -> Vec<Solved> {
    let inverse = Inverse::of(by);
    each(states).map(|(w, m, v, _)| solve(w, m, v, states.weight_cut, inverse)).collect()
}

/// Weights, first moments, second moment before and after.
type Element = ([f32; 2], [f32; 2], f32, f32);

#[inline(always)]
fn each(states: States<'_>) -> impl Iterator<Item = Element> + '_ {
    let units = |data| <[u8]>::as_chunks::<4>(data).0.iter();
    let weights = units(states.before.weights).zip(units(states.weights));
    let firsts = units(states.before.first).zip(units(states.first));
    let seconds = units(states.before.second).zip(units(states.second));
    weights
        .zip(firsts)
        .zip(seconds)
        .map(|(((&w0, &w1), (&m0, &m1)), (&v0, &v1))| ([number(w0), number(w1)], [number(m0), number(m1)], number(v0), number(v1)))
}

/// Widths of the interval, in parts of the one that the weight leaves open, in the order of trial.
const PARTS: [f64; 6] = [2.0, 1.3, 1.0, 0.7, 0.3, 0.0];

/// Returns the shortest quotient in what all intervals have in common, or in that of the first moment. The weight tells the
/// gradient to a width. Without branches, so that a loop over elements becomes vectors.
#[inline(always)]
fn candidate((_, [m0, m1], v0, v1): Element, gradient: f64, width: f64, cuts: [u32; 2], by: Inverse) -> f32 {
    let [first_cut, second_cut] = cuts;
    let middle = (f64::from(m1) - by.decay * f64::from(m0)) * by.inverse_weight;
    let half = half_ulp(m1, first_cut) * by.inverse_weight;
    // Sizes: a gradient has the sign that the first moment tells.
    let (size, sized) = if middle < 0.0 { (0.0 - middle, 0.0 - gradient) } else { (middle, gradient) };
    let narrowed = |[low, high]: [f64; 2], [a, b]: [f64; 2]| {
        let below = if a > low { a } else { low };
        let above = if b < high { b } else { high };
        let is_common = below <= above;
        [if is_common { below } else { low }, if is_common { above } else { high }]
    };
    let square = f64::from(v1) - by.second_decay * f64::from(v0);
    let open = half_ulp(v1, second_cut);
    let root = |x: f64| (if x > 0.0 { x } else { 0.0 } * by.inverse_share).sqrt();
    let told = narrowed([size - half, size + half], [sized - width, sized + width]);
    let [low, high] = narrowed(told, [root(square - open), root(square + open)]);
    let short = shortest_between(low * by.inverse_clip, high * by.inverse_clip);
    let short = if low > 0.0 { short } else { 0.0 };
    (if middle < 0.0 { 0.0 - short } else { short }) as f32
}

/// Score of a quotient: 0 if it does not give the first moment. Otherwise 1, 2 more if it gives the weight, and 1 more if it gives
/// the second moment.
#[inline(always)]
fn explained<const HARD: bool>(states: States<'_>, element: Element, quotient: f32, by: Joint) -> u32 {
    let ([w0, w1], [m0, m1], v0, v1) = element;
    let g = by.first.gradient(quotient);
    let m = blended_number::<HARD>(by.first, m0, g);
    let v = combine_square::<HARD>(by.second.square, by.second.decay, by.second.share, v0, g);
    let w = stepped::<HARD>(w0, m, v, by.step);
    let same = |x: f32, bits: u32, y: f32| u32::from(cut(x, bits).to_bits() == y.to_bits());
    let first = same(m, states.first_cut, m1) & u32::from(!quotient.is_nan());
    first * (1 + 2 * same(w, states.weight_cut, w1) + same(v, states.second_cut, v1))
}

/// Number of elements per pass, so that the numbers between stay in the first-level cache.
const BLOCK: usize = 256;

/// Numbers of a block, one after the other.
type Lane<T> = [T; BLOCK];

#[inline(always)]
fn load(data: &[u8]) -> Lane<f32> {
    let mut lane = [0.0; BLOCK];
    lane.iter_mut().zip(data.as_chunks::<4>().0).for_each(|(slot, &unit)| *slot = number(unit));
    lane
}

/// A block of both states.
struct Block {
    weights: [Lane<f32>; 2],
    firsts: [Lane<f32>; 2],
    seconds: [Lane<f32>; 2],
}

impl Block {
    #[inline(always)]
    fn element(&self, at: usize) -> Element {
        let pair = |[before, now]: &[Lane<f32>; 2]| [before[at], now[at]];
        let [v0, v1] = pair(&self.seconds);
        (pair(&self.weights), pair(&self.firsts), v0, v1)
    }
}

/// Solves a block as [`solve`] does: each iteration for all elements, so that it becomes vectors.
#[inline(always)]
fn solve_block(block: &Block, weight_cut: u32, by: Inverse, gradients: &mut Lane<f64>, widths: &mut Lane<f64>) {
    let [mut rest, mut second, mut ratio] = [[0.0f64; BLOCK]; 3];
    for at in 0..BLOCK {
        let [w0, w1] = [block.weights[0][at], block.weights[1][at]].map(f64::from);
        rest[at] = by.decay * f64::from(block.firsts[0][at]);
        second[at] = by.second_decay * f64::from(block.seconds[0][at]);
        ratio[at] = ((w1 - w0) - w0 * by.loss) * by.inverse_scale;
        gradients[at] = (f64::from(block.firsts[1][at]) - rest[at]) * by.inverse_weight;
    }
    for _ in 0..4 {
        for at in 0..BLOCK {
            let g = gradients[at];
            let root = (second[at] + by.share * g * g).sqrt();
            let divisor = root * by.inverse_correction + by.epsilon;
            let slope = by.weight - ratio[at] * by.inverse_correction * by.share * g / root;
            gradients[at] = g - (rest[at] + by.weight * g - ratio[at] * divisor) / slope;
            widths[at] = divisor / slope;
        }
    }
    for (width, now) in widths.iter_mut().zip(&block.weights[1]) {
        *width = (half_ulp(*now, weight_cut) * by.inverse_scale * *width).abs();
    }
}

/// Fills `explained` with the score of each quotient, as [`explained`] does: form by form, so that each loop becomes
/// vectors.
#[inline(always)]
fn explain_block<const HARD: bool>(states: States<'_>, block: &Block, quotients: &Lane<f32>, by: Joint, explained: &mut Lane<u32>) {
    let [mut g, mut m, mut v, mut w] = [[0.0f32; BLOCK]; 4];
    for at in 0..BLOCK {
        g[at] = by.first.gradient(quotients[at]);
    }
    blend_block::<HARD>(&block.firsts[0], &g, by.first, &mut m);
    square_block::<HARD>(&block.seconds[0], &g, by.second, &mut v);
    step_block::<HARD>(&block.weights[0], &m, &v, by.step, &mut w);
    for at in 0..BLOCK {
        let same = |x: f32, bits: u32, y: f32| u32::from(cut(x, bits).to_bits() == y.to_bits());
        let first = same(m[at], states.first_cut, block.firsts[1][at]) & u32::from(!quotients[at].is_nan());
        let weight = same(w[at], states.weight_cut, block.weights[1][at]);
        explained[at] = first * (1 + 2 * weight + same(v[at], states.second_cut, block.seconds[1][at]));
    }
}

/// Applies a function of two numbers to each of a block.
#[inline(always)]
fn each_of(a: &Lane<f32>, b: &Lane<f32>, out: &mut Lane<f32>, by: impl Fn(f32, f32) -> f32) {
    for at in 0..BLOCK {
        out[at] = by(a[at], b[at]);
    }
}

#[inline(always)]
fn blend_block<const HARD: bool>(m: &Lane<f32>, g: &Lane<f32>, by: First, out: &mut Lane<f32>) {
    match by.blend {
        Blend::Fused => each_of(m, g, out, |m, g| blended_number::<HARD>(First { blend: Blend::Fused, ..by }, m, g)),
        _ => each_of(m, g, out, |m, g| blended_number::<HARD>(by, m, g)),
    }
}

#[inline(always)]
fn square_block<const HARD: bool>(v: &Lane<f32>, g: &Lane<f32>, by: Second, out: &mut Lane<f32>) {
    match by.square {
        Square::Fused => each_of(v, g, out, |v, g| combine_square::<HARD>(Square::Fused, by.decay, by.share, v, g)),
        _ => each_of(v, g, out, |v, g| combine_square::<HARD>(by.square, by.decay, by.share, v, g)),
    }
}

#[inline(always)]
fn step_block<const HARD: bool>(w: &Lane<f32>, m: &Lane<f32>, v: &Lane<f32>, by: Step, out: &mut Lane<f32>) {
    let is_usual = by.update == Update::ScaleFirst && by.divisor == Divisor::Divided;
    let usual = Step { update: Update::ScaleFirst, divisor: Divisor::Divided, ..by };
    if is_usual {
        for at in 0..BLOCK {
            out[at] = stepped::<HARD>(w[at], m[at], v[at], usual);
        }
    } else {
        for at in 0..BLOCK {
            out[at] = stepped::<HARD>(w[at], m[at], v[at], by);
        }
    }
}

#[inline(always)]
fn quotients_any<const HARD: bool>(states: States<'_>, by: Joint, out: &mut [u8]) {
    let inverse = Inverse::of(by);
    let cuts = [states.first_cut, states.second_cut];
    let lanes = |data| <[u8]>::chunks(data, 4 * BLOCK).map(load);
    let weights = lanes(states.before.weights).zip(lanes(states.weights));
    let firsts = lanes(states.before.first).zip(lanes(states.first));
    let seconds = lanes(states.before.second).zip(lanes(states.second));
    let blocks = weights.zip(firsts).zip(seconds).map(|(((w0, w1), (m0, m1)), (v0, v1))| Block {
        weights: [w0, w1],
        firsts: [m0, m1],
        seconds: [v0, v1],
    });
    let [mut gradients, mut widths] = [[0.0f64; BLOCK]; 2];
    let mut quotients = [0.0f32; BLOCK];
    let mut most = [0u32; BLOCK];
    for (block, out) in blocks.zip(out.chunks_mut(4 * BLOCK)) {
        solve_block(&block, states.weight_cut, inverse, &mut gradients, &mut widths);
        for at in 0..BLOCK {
            quotients[at] = candidate(block.element(at), gradients[at], PARTS[0] * widths[at], cuts, inverse);
        }
        explain_block::<HARD>(states, &block, &quotients, by, &mut most);
        for (at, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            if most[at] < 4 {
                let element = block.element(at);
                if most[at] == 0 {
                    quotients[at] = f32::from_bits(NONE);
                }
                let mut attempt = |gradient: f64, width: f64| {
                    let quotient = candidate(element, gradient, width, cuts, inverse);
                    let explained = explained::<HARD>(states, element, quotient, by);
                    if explained > most[at] {
                        (quotients[at], most[at]) = (quotient, explained);
                    }
                    most[at] == 4
                };
                if !PARTS.into_iter().skip(1).any(|part| attempt(gradients[at], part * widths[at])) {
                    // Moments alone.
                    attempt(f64::NAN, 0.0);
                }
            }
            *out = unit(quotients[at]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Before, First, Joint, Level, Second, States, Step, cut, quotients_at, squares_at, weights_at};
    use crate::floats::{floats, odd_numbers, to_bytes};
    use crate::gradient::{Blend, NONE, Scale};
    use crate::replay::{Divisor, Square, Update};

    fn steps() -> impl Iterator<Item = Joint> {
        let of = |update: Update, divisor: Divisor| {
            let decay = if update.takes_loss() { -6e-5 } else { 0.999_94 };
            let step = Step { update, divisor, decay, scale: -6e-4, correction: 0.9, epsilon: 1e-8 };
            let first = First { blend: Blend::Fused, decay: 0.9, weight: 0.1, scale: Scale::None, clip: 1.3 };
            Joint { first, second: Second { square: Square::Fused, decay: 0.95, share: 0.05 }, step }
        };
        let forms = Update::ALL.into_iter().flat_map(move |update| Divisor::ALL.map(|divisor| of(update, divisor)));
        let blends = Blend::ALL.into_iter().zip(Square::ALL).map(move |(blend, square)| {
            let by = of(Update::ScaleFirst, Divisor::Divided);
            Joint { first: First { blend, ..by.first }, second: Second { square, ..by.second }, ..by }
        });
        forms.chain(blends)
    }

    #[test]
    fn all_levels_agree_to_the_bit() {
        for count in [1, 8, 1000, 4099] {
            let numbers = [1, 2, 3, 4, 5, 6].map(|seed| to_bytes(&odd_numbers(seed, count)));
            let [w0, w1, m0, m1, v0, v1] = numbers.each_ref().map(Vec::as_slice);
            let before = Before { weights: w0, first: m0, second: v0 };
            let states = States { before, weights: w1, first: m1, second: v1, weight_cut: 0, first_cut: 16, second_cut: 16 };
            for by in steps() {
                let at = |level: Level| {
                    let [mut weights, mut squares, mut quotients] = [1, 2, 3].map(|fill| vec![fill; 4 * count]);
                    weights_at(level, before, m1, by, &mut weights);
                    squares_at(level, v0, m1, by.second, &mut squares);
                    quotients_at(level, states, by, &mut quotients);
                    // Which NaN stands for no quotient does not matter.
                    let quotients: Vec<u32> = floats(&quotients).map(|x| if x.is_nan() { NONE } else { x.to_bits() }).collect();
                    (weights, squares, quotients)
                };
                let expected = at(Level::Scalar);
                for level in Level::available() {
                    assert!(at(level) == expected, "{level:?}, {by:?}, {count}");
                }
            }
        }
    }

    #[test]
    fn numbers_are_cut_to_the_nearest_even() {
        for (bits, expected) in
            [(0x3f80_8000, 0x3f80_0000), (0x3f81_8000, 0x3f82_0000), (0x3f80_8001, 0x3f81_0000), (0x7f7f_ffff, 0x7f80_0000)]
        {
            assert_eq!(cut(f32::from_bits(bits), 16).to_bits(), expected, "{bits:x}");
        }
        assert_eq!(cut(f32::from_bits(0xffff_0001), 16).to_bits(), 0x7fc0_0000, "every NaN becomes the same");
        assert_eq!(cut(-1.5, 0), -1.5);
    }

    /// Gradients of a few bits come back, although the stored moments have eight.
    #[test]
    fn the_true_gradient_is_found() {
        let by = steps().next().unwrap();
        let random = |seed: u64, scale: f32| -> Vec<f32> {
            odd_numbers(seed, 3000).iter().map(|x| scale * (1.0 + (x.to_bits() % 1000) as f32 / 500.0)).collect()
        };
        let round = |numbers: &[f32]| to_bytes(&numbers.iter().map(|x| cut(*x, 16)).collect::<Vec<f32>>());
        let w0 = to_bytes(&random(1, 0.02));
        let m0 = round(&random(2, 1e-3));
        let v0 = round(&random(3, 1e-6));
        let gradients: Vec<f32> = (0..3000).map(|i| ((i * 37 % 255) as f32 - 127.0) * 1e-5 * 1.3).map(|g| cut(g / 1.3, 16) * 1.3).collect();
        let bytes = to_bytes(&gradients);
        let before = Before { weights: &w0, first: &m0, second: &v0 };
        let mut w1 = vec![0; w0.len()];
        super::weights(before, &bytes, by, &mut w1);
        let first: Vec<f32> = floats(&m0).zip(&gradients).map(|(m, g)| 0.1f32.mul_add(g - m, m)).collect();
        let mut v1 = vec![0; v0.len()];
        super::squares(&v0, &bytes, by.second, &mut v1);
        let m1 = round(&first);
        let v1 = round(&floats(&v1).collect::<Vec<f32>>());
        let states = States { before, weights: &w1, first: &m1, second: &v1, weight_cut: 0, first_cut: 16, second_cut: 16 };
        let mut found = vec![0; w0.len()];
        super::quotients(states, by, &mut found);
        let same = floats(&found).zip(&gradients).filter(|(q, g)| (q * 1.3).to_bits() == g.to_bits()).count();
        assert!(same > 2700, "{same} of 3000");
    }
}
