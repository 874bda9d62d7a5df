//! `tc.predict`: the difference between a weight or second moment and a prediction of Adam's step from stored moments.
//!
//! Spec:   spec/codecs/predict.md
//! Input:  n f32 and n f32 of the base; for a master, both moments in both snapshots; for a second moment, the first
//!         moment in both snapshots
//! Output: four coefficients; the columns of `tc.ordered`, with the predictions as base
//! Errors: the errors of `tc.ordered`; `Corrupt` without the partners
//! Cost:   the cost of `tc.ordered`, and per element two roots and two divisions in binary64 (`step`) or seven
//!         multiplications (`moment`)
//! Source: ours: fit Adam's update rule (Kingma and Ba, arXiv 1412.6980) to each chunk by least squares, and store the
//!         residuals

use tensorcask_kernels::predict::{Moments, direction, moment, step, wide};
use tensorcask_kernels::spare::Spare;

use super::classes::TokenClasses;
use super::residual::{self, COLUMNS_OF_MOMENT, COLUMNS_OF_STEP};
use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, Need, Ordered, Partner, sample};
use crate::wire::{Cursor, Put};
use crate::{Dtype, Error, Result};

/// Stores the difference between each element and its prediction.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Partner, Predict}};
/// let f32s = |f: &dyn Fn(f32) -> f32| -> Vec<u8> { (1..5000).flat_map(|i| f(i as f32).to_le_bytes()).collect() };
/// let (m0, m1) = (f32s(&|i| i.sin()), f32s(&|i| 0.9 * i.sin() + 0.1 * i.cos()));
/// let v0 = f32s(&|i| 1.0 + i.cos().abs());
/// let v1 = f32s(&|i| 0.99 * (1.0 + i.cos().abs()) + 0.01 * i.cos() * i.cos());
/// let partners = [Partner { role: "exp_avg", dtype: Dtype::F32, data: &m1, base: Some(&m0), gradient: None }];
/// let chunk =
///     Chunk { role: "exp_avg_sq", base: Some(&v0), partners: &partners, ..Chunk::new(Dtype::F32, 4999, &v1) };
/// let bytes: usize = Predict.encode(&chunk)?.columns.iter().map(|(_, bytes)| bytes.len()).sum();
/// assert!(bytes < 4999 / 2, "a few bits for each element of 32");
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Predict;

const FIRST: &str = "exp_avg";
const SECOND: &str = "exp_avg_sq";
const NEEDS_OF_MASTER: &[Need] = &[Need::both(FIRST), Need::both(SECOND)];
const NEEDS_OF_SECOND: &[Need] = &[Need::both(FIRST)];

fn check_dtype(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 => Ok(()),
        _ => Err(Error::corrupt(format!("a prediction of {dtype}")).clause("predict 1")),
    }
}

/// Predicted quantity and the inputs of its prediction.
#[derive(Clone, Copy)]
enum Model<'a> {
    /// A weight, predicted from both moments.
    Step { first: Moments<'a>, second: Moments<'a> },
    /// A second moment, predicted from the first moment.
    Moment { first: Moments<'a> },
}

fn moments<'a>(partner: Option<&'a Partner<'a>>) -> Option<Moments<'a>> {
    let partner = partner.filter(|partner| partner.dtype == Dtype::F32)?;
    let before = partner.base.filter(|base| base.len() == partner.data.len())?;
    Some(Moments { before, now: partner.data })
}

impl<'a> Model<'a> {
    fn of(chunk: &'a Chunk<'_>) -> Option<(Self, &'a [u8])> {
        let base = chunk.base.filter(|base| base.len() == chunk.data.len() && chunk.dtype == Dtype::F32)?;
        let model = match chunk.role {
            "master" => Self::Step { first: moments(chunk.partner(FIRST))?, second: moments(chunk.partner(SECOND))? },
            SECOND => Self::Moment { first: moments(chunk.partner(FIRST))? },
            _ => return None,
        };
        Some((model, base))
    }

    fn column(&self) -> &'static str {
        match self {
            Self::Step { .. } => "step",
            Self::Moment { .. } => "moment",
        }
    }

    fn predict(&self, base: &[u8], by: [f64; 4], out: &mut [u8]) {
        match *self {
            Self::Step { first, second } => step(base, first, second, by, out),
            Self::Moment { first } => moment(base, first, by, out),
        }
    }

    /// Applies [`Self::predict`] to a sample.
    fn predict_sample(&self, base: &[u8], by: [f64; 4]) -> Vec<u8> {
        let sampled = |moments: Moments<'a>| [sample(moments.before, 4), sample(moments.now, 4)];
        let base = sample(base, 4);
        let mut out = vec![0; base.len()];
        match *self {
            Self::Step { first, second } => {
                let ([before, now], [before2, now2]) = (sampled(first), sampled(second));
                let first = Moments { before: &before, now: &now };
                let second = Moments { before: &before2, now: &now2 };
                Model::Step { first, second }.predict(&base, by, &mut out);
            }
            Self::Moment { first } => {
                let [before, now] = sampled(first);
                Model::Moment { first: Moments { before: &before, now: &now } }.predict(&base, by, &mut out);
            }
        }
        out
    }
}

/// Number of elements in a fit of coefficients, in the search for epsilon, and in an estimate.
const FITTED: usize = 4096;
const SEARCHED: usize = 512;
const GLANCED: usize = 256;

/// Mean error in bits above which a prediction does not pay.
const HOPELESS: f64 = 17.0;

/// One element of a fit.
#[derive(Clone, Copy)]
struct Point {
    base: f64,
    target: f64,
    before: [f64; 2],
    now: [f64; 2],
}

/// Returns at most `most` elements at equal distances, without those that a fit cannot use.
fn points(model: Model<'_>, base: &[u8], data: &[u8], most: usize) -> Vec<Point> {
    let at = |bytes: &[u8], i: usize| bytes.as_chunks::<4>().0.get(i).map_or(0.0, |unit| wide(*unit));
    let units = data.len() / 4;
    let (first, second) = match model {
        Model::Step { first, second } => (first, Some(second)),
        Model::Moment { first } => (first, None),
    };
    let of_second = |i: usize| second.map_or([0.0; 2], |second| [at(second.before, i), at(second.now, i)]);
    let point = |i: usize| {
        let [v0, v1] = of_second(i);
        Point { base: at(base, i), target: at(data, i), before: [at(first.before, i), v0], now: [at(first.now, i), v1] }
    };
    let usable = |point: &Point| {
        let all = [point.base, point.target, point.before[0], point.before[1], point.now[0], point.now[1]];
        all.iter().all(|x| x.is_finite()) && point.target != 0.0
    };
    (0..units).step_by(units.div_ceil(most).max(1)).map(point).filter(usable).collect()
}

/// Returns the numbers of one element that the fit weighs, and the value that their weighted sum must match. The numbers
/// are Adam's new and old direction and the base of a master, or the base and products of the first moments.
fn features(point: &Point, epsilon: Option<f64>) -> ([f64; 4], f64) {
    match epsilon {
        Some(epsilon) => {
            let finite = |x: f64| if x.is_finite() { x } else { 0.0 };
            let newer = finite(direction(point.now[0], point.now[1], epsilon));
            let older = finite(direction(point.before[0], point.before[1], epsilon));
            ([newer, older, point.base, 0.0], point.target - point.base)
        }
        None => {
            let m0 = point.before[0];
            let m1 = point.now[0];
            ([point.base, m1 * m1, m0 * m0, m0 * m1], point.target)
        }
    }
}

/// Approximates the logarithm of a positive number within a tenth, linearly between powers of two. Unlike the logarithm
/// of a math library, this function is the same on every machine. Therefore every machine chooses the same fit.
pub(super) fn log2_about(x: f64) -> f64 {
    const ONE: u64 = 1 << 52;
    x.to_bits() as f64 / ONE as f64 - 1023.0
}

/// Fits coefficients by least squares of relative errors. Returns them and the mean error in bits of an f32.
fn fit(points: &[Point], epsilon: Option<f64>) -> ([f64; 4], f64) {
    let rows: Vec<([f64; 4], f64)> = points
        .iter()
        .map(|point| {
            let (features, target) = features(point, epsilon);
            let weight = 1.0 / point.target.abs();
            (features.map(|x| x * weight), target * weight)
        })
        .collect();
    let mut scale = [0.0f64; 4];
    for (features, _) in &rows {
        for (sum, x) in scale.iter_mut().zip(features) {
            *sum += x * x;
        }
    }
    let scale = scale.map(|sum| if sum > 0.0 { 1.0 / sum.sqrt() } else { 0.0 });
    let mut coefficients = [0.0f64; 4];
    let rest = |coefficients: &[f64; 4], features: &[f64; 4], target: f64| {
        target - features.iter().zip(coefficients).map(|(x, c)| x * c).sum::<f64>()
    };
    // The second round corrects the rounding errors of the first.
    for _ in 0..2 {
        let mut matrix = [[0.0f64; 4]; 4];
        let mut right = [0.0f64; 4];
        for (features, target) in &rows {
            let residual = rest(&coefficients, features, *target);
            let scaled: [f64; 4] = std::array::from_fn(|i| features[i] * scale[i]);
            for (i, &x) in scaled.iter().enumerate() {
                right[i] += x * residual;
                for (j, &y) in scaled.iter().enumerate() {
                    matrix[i][j] += x * y;
                }
            }
        }
        for (c, (x, s)) in coefficients.iter_mut().zip(solve(matrix, right).into_iter().zip(scale)) {
            *c += x * s;
        }
    }
    if coefficients.iter().any(|c| !c.is_finite()) {
        return ([0.0; 4], f64::INFINITY);
    }
    let bits = rows.iter().map(|(features, target)| log2_about(1.0 + rest(&coefficients, features, *target).abs() * (1u64 << 24) as f64));
    (coefficients, bits.sum::<f64>() / rows.len().max(1) as f64)
}

/// Solves a positive semidefinite system by Cholesky's method. An unknown that depends on earlier ones becomes 0.
fn solve(matrix: [[f64; 4]; 4], right: [f64; 4]) -> [f64; 4] {
    const LEAST_PIVOT: f64 = 1e-13;
    let mut lower = [[0.0f64; 4]; 4];
    let divided = |x: f64, pivot: f64| if pivot > 0.0 { x / pivot } else { 0.0 };
    for i in 0..4 {
        for j in 0..=i {
            let rest = matrix[i][j] - (0..j).map(|k| lower[i][k] * lower[j][k]).sum::<f64>();
            lower[i][j] = match i == j {
                true if rest > LEAST_PIVOT => rest.sqrt(),
                true => 0.0,
                false => divided(rest, lower[j][j]),
            };
        }
    }
    let mut solution = right;
    for i in 0..4 {
        let known: f64 = (0..i).map(|k| lower[i][k] * solution[k]).sum();
        solution[i] = divided(solution[i] - known, lower[i][i]);
    }
    for i in (0..4).rev() {
        let known: f64 = (i + 1..4).map(|k| lower[k][i] * solution[k]).sum();
        solution[i] = divided(solution[i] - known, lower[i][i]);
    }
    solution
}

/// First candidates for epsilon. The search then refines around the best candidate.
const EPSILONS: [f64; 9] = [1e-8, 0.0, 1e-6, 1e-7, 1e-9, 1e-10, 1e-12, 1e-15, 1e-5];

/// Returns the best epsilon and its mean error in bits.
fn epsilon(points: &[Point], refine: bool) -> (f64, f64) {
    let score = |epsilon: f64| (fit(points, Some(epsilon)).1, epsilon);
    let better = |a: (f64, f64), b: (f64, f64)| if b.0 < a.0 { b } else { a };
    let mut best = EPSILONS.into_iter().map(score).reduce(better).unwrap_or((f64::INFINITY, 0.0));
    // Adam's bias correction scales epsilon by the root of 1 - beta^step.
    let mut width = 2.0f64;
    while refine && best.1 > 0.0 && width > 1.01 {
        best = [best.1 / width, best.1 * width].into_iter().map(score).fold(best, better);
        width = width.sqrt();
    }
    (best.1, best.0)
}

/// Returns the best coefficients of a model.
fn coefficients(model: Model<'_>, base: &[u8], data: &[u8]) -> [f64; 4] {
    let points = points(model, base, data, FITTED);
    match model {
        Model::Moment { .. } => fit(&points, None).0,
        Model::Step { .. } => {
            let few: Vec<Point> = points.iter().step_by(points.len().div_ceil(SEARCHED).max(1)).copied().collect();
            let epsilon = epsilon(&few, true).0;
            let [a, b, c, _] = fit(&points, Some(epsilon)).0;
            [epsilon, a, b, c]
        }
    }
}

/// Fits coefficients to a few elements. Returns `None` if the prediction does not pay.
fn glance(model: Model<'_>, base: &[u8], data: &[u8]) -> Option<[f64; 4]> {
    let points = points(model, base, data, GLANCED);
    let hopeless = |epsilon| fit(&points, epsilon).1 > HOPELESS;
    match model {
        Model::Moment { .. } if hopeless(None) => None,
        Model::Moment { .. } => Some(fit(&points, None).0),
        Model::Step { .. } if hopeless(Some(1e-8)) && hopeless(Some(0.0)) => None,
        Model::Step { .. } => {
            let epsilon = epsilon(&points, false).0;
            let [a, b, c, _] = fit(&points, Some(epsilon)).0;
            Some([epsilon, a, b, c])
        }
    }
}

impl Codec for Predict {
    fn id(&self) -> &str {
        "tc.predict"
    }

    fn supports(&self, dtype: Dtype, role: &str) -> bool {
        dtype == Dtype::F32 && ["master", SECOND].contains(&role)
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Always
    }

    fn needs(&self, role: &str) -> &'static [Need] {
        match role {
            "master" => NEEDS_OF_MASTER,
            SECOND => NEEDS_OF_SECOND,
            _ => &[],
        }
    }

    fn is_standalone(&self) -> bool {
        false
    }

    fn cost(&self) -> Cost {
        let Cost { encode, decode } = Ordered.cost();
        Cost { encode: encode + 8.0, decode: decode + 4.0 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        Ordered.max_encoded_bytes(dtype, element_count).saturating_add(32)
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        let (model, base) = Model::of(chunk)?;
        let by = glance(model, base, chunk.data)?;
        residual::estimate(chunk, 32, &model.predict_sample(base, by))
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let (model, base) = Model::of(chunk).ok_or_else(|| Error::invalid("needs f32, a base, and moments with their bases"))?;
        let by = coefficients(model, base, chunk.data);
        let mut predicted = Spare::new(base.len(), "predictions")?;
        model.predict(base, by, &mut predicted);
        let mut column = Vec::with_capacity(32);
        by.iter().for_each(|c| column.put_u64(c.to_bits()));
        residual::encode(chunk, (model.column(), column), &predicted, TokenClasses::ByExponent)
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        check_dtype(dtype)?;
        residual::check_columns(names)
    }

    fn check_role(&self, role: &str, names: &[&str]) -> Result<()> {
        let other = if role == "master" { COLUMNS_OF_MOMENT[0] } else { COLUMNS_OF_STEP[0] };
        residual::check_role(role, names, other, "predict 2")
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        check_dtype(columns.dtype)?;
        let base = columns.base(out.len())?;
        let of = |role: &str| -> Result<Moments<'_>> {
            let found = moments(Some(columns.partner(role)?));
            found.ok_or_else(|| Error::corrupt(format!("the partner of role `{role}` is not f32 in both snapshots")).clause("predict 1"))
        };
        let ([by, rest @ ..], model) = match columns.columns {
            [("step", _), ..] => (columns.exactly(COLUMNS_OF_STEP)?, Model::Step { first: of(FIRST)?, second: of(SECOND)? }),
            _ => (columns.exactly(COLUMNS_OF_MOMENT)?, Model::Moment { first: of(FIRST)? }),
        };
        let read = || -> Result<[f64; 4]> {
            let mut cursor = Cursor::new(by, "coefficients");
            let by = [cursor.u64()?, cursor.u64()?, cursor.u64()?, cursor.u64()?];
            cursor.finish()?;
            Ok(by.map(f64::from_bits))
        };
        let by = read().map_err(|e| e.clause("predict 2"))?;
        model.predict(base, by, out);
        residual::decode(rest, out)
    }
}
