//! Rows of the heat maps: the layers of a model, in natural order.

use std::collections::BTreeSet;

/// Layers of the tensors of a snapshot. If there are too many, a row stands for a run of neighbours.
#[derive(Debug, Default)]
pub(crate) struct Layers {
    sorted: Vec<Natural>,
    per_row: usize,
}

impl Layers {
    /// Takes the parameters of all tensors, and the number of rows.
    pub(crate) fn of<'p>(params: impl Iterator<Item = &'p str>, max_rows: usize) -> Self {
        let layers: BTreeSet<Natural> = params.map(|param| Natural(layer_of(param).to_owned())).collect();
        let per_row = layers.len().div_ceil(max_rows.max(1)).max(1);
        Self { sorted: layers.into_iter().collect(), per_row }
    }

    pub(crate) fn count(&self) -> usize {
        self.sorted.len()
    }

    /// Number of rows, with the last one for parameters that the snapshot lacks.
    pub(crate) fn rows(&self) -> usize {
        self.sorted.len().div_ceil(self.per_row.max(1)) + 1
    }

    /// Row of a parameter.
    pub(crate) fn row_of(&self, param: &str) -> usize {
        let layer = Natural(layer_of(param).to_owned());
        self.sorted.binary_search(&layer).map_or(self.rows() - 1, |at| at / self.per_row.max(1))
    }

    /// Names of the rows.
    pub(crate) fn names(&self, shorten: impl Fn(&str) -> String) -> Vec<String> {
        let name = |layers: &[Natural]| match layers {
            [] => String::new(),
            [only] => shorten(&only.0),
            [first, .., last] => format!("{} to {}", shorten(&first.0), shorten(&last.0)),
        };
        let rows = self.sorted.chunks(self.per_row.max(1)).map(name);
        rows.chain(["layers that the newest step lacks".to_owned()]).collect()
    }
}

/// The layer of a parameter: its name up to the first number, else without the last part.
fn layer_of(param: &str) -> &str {
    let mut end = 0;
    for part in param.split('.') {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return param.get(..end).unwrap_or(param);
        }
        end += 1;
    }
    param.rsplit_once('.').map_or(param, |(layer, _)| layer)
}

/// A name whose numbers are ordered by value.
#[derive(Debug, PartialEq, Eq)]
struct Natural(String);

impl Natural {
    fn key(&self) -> impl Iterator<Item = (Option<u128>, &str)> {
        self.0.split('.').map(|part| (part.parse().ok(), part))
    }
}

impl Ord for Natural {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(other.key())
    }
}

impl PartialOrd for Natural {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::Layers;

    #[test]
    fn layers_in_natural_order() {
        let params = ["h.10.mlp.weight", "h.9.mlp.weight", "h.9.attn.bias", "wte.weight", "scale"];
        let layers = Layers::of(params.into_iter(), 100);
        assert_eq!(layers.names(str::to_owned), ["h.9", "h.10", "scale", "wte", "layers that the newest step lacks"]);
        assert_eq!(["h.9.x", "h.10", "wte.bias", "scale", "h.11.x"].map(|param| layers.row_of(param)), [0, 1, 3, 2, 4]);
    }

    #[test]
    fn many_layers_share_rows() {
        let params: Vec<String> = (0..1001).map(|layer| format!("h.{layer}.w")).collect();
        let layers = Layers::of(params.iter().map(String::as_str), 100);
        assert_eq!((layers.count(), layers.rows()), (1001, 92));
        assert_eq!(layers.names(str::to_owned)[0], "h.0 to h.10");
        assert_eq!(
            params.iter().map(|param| layers.row_of(param)).collect::<Vec<_>>(),
            (0..1001).map(|layer| layer / 11).collect::<Vec<_>>()
        );
        let none = Layers::of(std::iter::empty(), 100);
        assert_eq!((none.rows(), none.row_of("h.1.w")), (1, 0));
    }
}
