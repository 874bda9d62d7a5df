//! What the searches for a step of Adam share: samples, and betas.

/// Returns the elements of a search: stretches of one cache line at equal distances.
pub(super) fn glance(data: &[u8], stretches: usize) -> Vec<u8> {
    const BYTES: usize = 64;
    if data.len() <= 2 * stretches * BYTES {
        return data.to_vec();
    }
    let step = (data.len() - BYTES) / (stretches - 1) / BYTES * BYTES;
    let mut some = Vec::with_capacity(stretches * BYTES);
    (0..stretches).for_each(|i| some.extend_from_slice(data.get(i * step..i * step + BYTES).unwrap_or_default()));
    some
}

/// Returns the second beta that explains second moments best, by least squares: `v1 - g^2 = beta * (v0 - g^2)`. A point
/// is `v0`, `v1` and `g`.
pub(super) fn second_beta(points: impl Iterator<Item = [f64; 3]>) -> Option<f64> {
    let mut xx = 0.0;
    let mut xy = 0.0;
    for [v0, v1, gradient] in points {
        let square = gradient * gradient;
        let x = (v0 - square) / v1;
        let y = (v1 - square) / v1;
        if x.is_finite() && y.is_finite() {
            (xx, xy) = (xx + x * x, xy + x * y);
        }
    }
    let beta = xy / xx;
    (beta > 0.0 && beta < 1.0).then_some(beta)
}

/// Returns the shortest decimal near a fitted beta, and the beta itself.
pub(super) fn candidates(beta: f64) -> [f64; 2] {
    let mut scale = 10.0f64;
    for _ in 0..6 {
        let short = (beta * scale).round() / scale;
        if (short - beta).abs() < 2e-3 * (1.0 - beta) {
            return [short, beta];
        }
        scale *= 10.0;
    }
    [beta, beta]
}
