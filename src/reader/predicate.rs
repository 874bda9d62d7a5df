//! Conditions on the statistics of a tensor, such as `nan > 0 or norm > 1e4`.
//!
//! ```text
//! predicate   = conjunction { "or" conjunction }
//! conjunction = comparison { "and" comparison }
//! comparison  = COLUMN ( ">" | ">=" | "<" | "<=" | "=" | "==" | "!=" ) NUMBER
//! ```
//!
//! A comparison is true, false or not known, and `and` and `or` follow the logic of three values that SQL uses. So a
//! tensor whose change was not measured is not taken for a tensor that did not change. Counts are compared as binary64.

use std::fmt;

use super::TensorStatistics;
use crate::{Error, NamePatterns, Result};

/// Condition on the statistics of a tensor: comparisons of a column with a number, joined by `and` and `or`.
///
/// `and` binds tighter than `or`; there are no parentheses. Columns are those of the statistics (`nan`,
/// `positive_infinity`, `negative_infinity`, `zero`, `subnormal`, `min`, `max`, `sum`, `sum_squares`, `changed`,
/// `change_squares`, `change_ulps`, `elements`), and `inf` (infinities of either sign), `nonfinite` (NaN and infinities),
/// `norm` and `change_norm` (roots of the sums of squares).
///
/// ```
/// use tensorcask::Predicate;
/// assert_eq!(Predicate::parse("nan>0 or norm >= 1e4 and zero = 0")?.to_string(), "nan > 0 or norm >= 10000 and zero = 0");
/// assert!(Predicate::parse("nan > 0 or").is_err());
/// assert!(Predicate::parse("loss > 3").is_err());
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Predicate {
    /// Conjunctions of which one must hold.
    any_of: Vec<Vec<Comparison>>,
    /// Names of the tensors to look at; `None` for all.
    tensors: Option<NamePatterns>,
}

impl Predicate {
    /// Parses a predicate on all tensors.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |message: String| Error::invalid(format!("predicate `{}`: {message}", text.escape_debug()));
        let mut words = words(text).into_iter();
        let mut any_of = vec![Vec::new()];
        loop {
            let column = words.next().ok_or_else(|| bad("write COLUMN OPERATOR NUMBER, such as `nan > 0`".into()))?;
            let column = Column::from_name(column).ok_or_else(|| {
                let names: Vec<&str> = COLUMNS.iter().map(|(name, _)| *name).collect();
                bad(format!("`{}` is not a column. Use one of {}", column.escape_debug(), names.join(", ")))
            })?;
            let operator = words.next().unwrap_or_default();
            let operator = Operator::from_name(operator)
                .ok_or_else(|| bad(format!("write one of > >= < <= = != instead of `{}`", operator.escape_debug())))?;
            let number = words.next().unwrap_or_default();
            let number = number.parse().ok().filter(|number: &f64| number.is_finite());
            let number = number.ok_or_else(|| bad("a comparison ends with a finite number, such as `0` or `1e4`".into()))?;
            if let Some(all_of) = any_of.last_mut() {
                all_of.push(Comparison { column, operator, number });
            }
            match words.next() {
                None => return Ok(Self { any_of, tensors: None }),
                Some("and") => {}
                Some("or") => any_of.push(Vec::new()),
                Some(word) => return Err(bad(format!("write `and` or `or` instead of `{}`", word.escape_debug()))),
            }
        }
    }

    /// Restricts the predicate to tensors whose name matches one of these patterns.
    pub fn of_tensors(self, names: NamePatterns) -> Self {
        Self { tensors: Some(names), ..self }
    }

    /// Whether the predicate looks at a tensor of this name.
    pub(super) fn is_about(&self, tensor: &str) -> bool {
        self.tensors.as_ref().is_none_or(|names| names.matches(tensor))
    }

    /// Returns whether the predicate holds for a tensor; `None` if statistics that decide this are missing.
    pub fn holds(&self, tensor: &TensorStatistics) -> Option<bool> {
        self.holds_by(|comparison| comparison.holds(tensor))
    }

    /// Returns whether the predicate holds for a tensor of this many elements, of which `part` measures only some.
    pub(super) fn holds_with_part(&self, part: &TensorStatistics, elements: u64) -> Option<bool> {
        self.holds_by(|comparison| comparison.holds_with_part(part, elements))
    }

    fn holds_by(&self, holds: impl Fn(&Comparison) -> Option<bool>) -> Option<bool> {
        fold(self.any_of.iter().map(|all_of| fold(all_of.iter().map(&holds), false)), true)
    }
}

/// Joins truths of three values. `decisive` decides whatever the others are: `true` for `or`, `false` for `and`.
fn fold(truths: impl Iterator<Item = Option<bool>>, decisive: bool) -> Option<bool> {
    let mut joined = Some(!decisive);
    for truth in truths {
        match truth {
            Some(known) if known == decisive => return truth,
            Some(_) => {}
            None => joined = None,
        }
    }
    joined
}

/// Splits a predicate into names, numbers and operators.
fn words(text: &str) -> Vec<&str> {
    let is_operator = |letter: char| matches!(letter, '<' | '>' | '=' | '!');
    text.split_whitespace()
        .flat_map(|word| {
            let mut parts = Vec::new();
            let mut rest = word;
            while let Some(first) = rest.chars().next() {
                let end = rest.find(|letter| is_operator(letter) != is_operator(first)).unwrap_or(rest.len());
                let (part, tail) = rest.split_at(end);
                parts.push(part);
                rest = tail;
            }
            parts
        })
        .collect()
}

impl fmt::Display for Predicate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, all_of) in self.any_of.iter().enumerate() {
            f.write_str(if number == 0 { "" } else { " or " })?;
            for (number, comparison) in all_of.iter().enumerate() {
                f.write_str(if number == 0 { "" } else { " and " })?;
                let Comparison { column, operator, number } = comparison;
                write!(f, "{} {} {number}", column.name(), operator.name())?;
            }
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
struct Comparison {
    column: Column,
    operator: Operator,
    number: f64,
}

impl Comparison {
    fn holds(&self, tensor: &TensorStatistics) -> Option<bool> {
        match self.column.of(tensor) {
            Cell::Number(number) => Some(self.compare(number)),
            Cell::None => Some(false),
            Cell::Unknown => None,
        }
    }

    /// The other elements can only add to counts and norms, raise `max` and lower `min`.
    fn holds_with_part(&self, part: &TensorStatistics, elements: u64) -> Option<bool> {
        let is_lasting = match self.column {
            Column::Elements => return Some(self.compare(elements as f64)),
            Column::Sum => false,
            Column::Min => matches!(self.operator, Operator::Less | Operator::AtMost),
            _ => matches!(self.operator, Operator::Greater | Operator::AtLeast),
        };
        match self.column.of(part) {
            Cell::Number(number) => (is_lasting && self.compare(number)).then_some(true),
            // Elements of the type have no such value.
            Cell::None if part.values.is_none() => Some(false),
            Cell::None | Cell::Unknown => None,
        }
    }

    fn compare(&self, number: f64) -> bool {
        match self.operator {
            Operator::Greater => number > self.number,
            Operator::AtLeast => number >= self.number,
            Operator::Less => number < self.number,
            Operator::AtMost => number <= self.number,
            Operator::Equal => number == self.number,
            Operator::Differs => number != self.number,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operator {
    Greater,
    AtLeast,
    Less,
    AtMost,
    Equal,
    Differs,
}

/// Operators by name. The first name of an operator is the one that is shown.
const OPERATORS: [(&str, Operator); 7] = [
    (">", Operator::Greater),
    (">=", Operator::AtLeast),
    ("<", Operator::Less),
    ("<=", Operator::AtMost),
    ("=", Operator::Equal),
    ("==", Operator::Equal),
    ("!=", Operator::Differs),
];

impl Operator {
    fn from_name(text: &str) -> Option<Self> {
        OPERATORS.iter().find(|(name, _)| *name == text).map(|(_, operator)| *operator)
    }

    fn name(self) -> &'static str {
        OPERATORS.iter().find(|(_, operator)| *operator == self).map_or("", |(name, _)| name)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    Elements,
    Nan,
    PositiveInfinity,
    NegativeInfinity,
    Infinity,
    NonFinite,
    Zero,
    Subnormal,
    Min,
    Max,
    Sum,
    SumSquares,
    Norm,
    Changed,
    ChangeSquares,
    ChangeNorm,
    ChangeUlps,
}

const COLUMNS: [(&str, Column); 17] = [
    ("elements", Column::Elements),
    ("nan", Column::Nan),
    ("positive_infinity", Column::PositiveInfinity),
    ("negative_infinity", Column::NegativeInfinity),
    ("inf", Column::Infinity),
    ("nonfinite", Column::NonFinite),
    ("zero", Column::Zero),
    ("subnormal", Column::Subnormal),
    ("min", Column::Min),
    ("max", Column::Max),
    ("sum", Column::Sum),
    ("sum_squares", Column::SumSquares),
    ("norm", Column::Norm),
    ("changed", Column::Changed),
    ("change_squares", Column::ChangeSquares),
    ("change_norm", Column::ChangeNorm),
    ("change_ulps", Column::ChangeUlps),
];

/// Value of a column for a tensor.
enum Cell {
    Number(f64),
    /// The tensor has no such value: its elements are integers or Booleans, or none of them is finite.
    None,
    /// The tensor has such a value, but it was not measured or exceeds binary64.
    Unknown,
}

impl Column {
    fn from_name(text: &str) -> Option<Self> {
        COLUMNS.iter().find(|(name, _)| *name == text).map(|(_, column)| *column)
    }

    fn name(self) -> &'static str {
        COLUMNS.iter().find(|(_, column)| *column == self).map_or("", |(name, _)| name)
    }

    fn of(self, tensor: &TensorStatistics) -> Cell {
        let count = |count: u64| Cell::Number(count as f64);
        let or_unknown = |number: Option<f64>| number.map_or(Cell::Unknown, Cell::Number);
        let values = tensor.values;
        let change = tensor.change;
        match self {
            Self::Elements => return count(tensor.elements),
            Self::Changed => return change.map_or(Cell::Unknown, |change| count(change.changed)),
            Self::ChangeSquares => return or_unknown(change.and_then(|change| change.squares)),
            Self::ChangeNorm => return or_unknown(change.and_then(|change| change.squares).map(f64::sqrt)),
            Self::ChangeUlps => return change.map_or(Cell::Unknown, |change| count(change.ulps)),
            _ => {}
        }
        let Some(values) = values else {
            let is_about_special =
                matches!(self, Self::Nan | Self::PositiveInfinity | Self::NegativeInfinity | Self::Infinity | Self::NonFinite);
            return match tensor.dtype.is_float() {
                true if tensor.dtype.is_packed() && is_about_special => count(0),
                true => Cell::Unknown,
                false => Cell::None,
            };
        };
        let infinities = values.positive_infinity.saturating_add(values.negative_infinity);
        match self {
            Self::Nan => count(values.nan),
            Self::PositiveInfinity => count(values.positive_infinity),
            Self::NegativeInfinity => count(values.negative_infinity),
            Self::Infinity => count(infinities),
            Self::NonFinite => count(infinities.saturating_add(values.nan)),
            Self::Zero => count(values.zero),
            Self::Subnormal => count(values.subnormal),
            Self::Min => values.min.map_or(Cell::None, Cell::Number),
            Self::Max => values.max.map_or(Cell::None, Cell::Number),
            Self::Sum => or_unknown(values.sum),
            Self::SumSquares => or_unknown(values.squares),
            Self::Norm => or_unknown(values.squares.map(f64::sqrt)),
            Self::Elements | Self::Changed | Self::ChangeSquares | Self::ChangeNorm | Self::ChangeUlps => Cell::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Predicate;
    use crate::reader::TensorStatistics;
    use crate::{Dtype, ValueStatistics};

    fn tensor() -> TensorStatistics {
        let values = ValueStatistics { nan: 2, negative_infinity: 1, sum: Some(-3.0), squares: Some(9.0), ..ValueStatistics::default() };
        TensorStatistics {
            tensor: "w".into(),
            role: "model".into(),
            dtype: Dtype::F32,
            elements: 10,
            values: Some(values),
            change: None,
            reference_step: None,
        }
    }

    #[test]
    fn comparisons_follow_the_logic_of_three_values() {
        let cases = [
            ("nan > 0", Some(true)),
            ("nan>2", Some(false)),
            ("nan >= 2 and inf == 1", Some(true)),
            ("nonfinite=3", Some(true)),
            ("norm = 3 and sum = -3 and sum_squares <= 9", Some(true)),
            // No element is finite, so there is no minimum.
            ("min < 0", Some(false)),
            ("changed = 0", None),
            ("changed = 0 or nan > 0", Some(true)),
            ("changed = 0 or nan > 9", None),
            ("changed = 0 and nan > 0", None),
            ("changed = 0 and nan > 9", Some(false)),
            ("zero > 0 and nan > 0 or elements != 9", Some(true)),
            ("elements != 9 or nan > 0 and zero > 0", Some(true)),
        ];
        for (text, expected) in cases {
            assert_eq!(Predicate::parse(text).unwrap().holds(&tensor()), expected, "{text}");
        }
        for (dtype, expected) in [(Dtype::I64, Some(false)), (Dtype::Bool, Some(false)), (Dtype::C64, None), (Dtype::F8E4M3, None)] {
            let tensor = TensorStatistics { dtype, values: None, ..tensor() };
            assert_eq!(Predicate::parse("zero >= 0").unwrap().holds(&tensor), expected, "{dtype}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "nan",
            "nan >",
            "nan > x",
            "nan > nan",
            "nan > inf",
            "nan => 0",
            "> 0",
            "nan > 0 nan",
            "nan > 0 or",
            "nan > 0 and and",
            "é > 0",
            "(nan > 0)",
        ] {
            let error = Predicate::parse(text).unwrap_err();
            assert!(error.message().starts_with("predicate `"), "{error}");
        }
    }
}
