//! Facts: the values of users about a snapshot, and their types in tables. Spec: `spec/log.md`, clause 6.5.
//!
//! A manifest holds facts as JSON, which has no NaN and no infinities: they are the texts `nan`, `inf` and `-inf`. A table has
//! a column for each key, whose type follows from all its values. So one NaN among losses stays a number.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, BooleanArray, Float64Array, Int64Array, StringArray, UInt64Array};
use serde_json::Value;

/// Returns the JSON of a number: a text, if it is NaN or infinite.
///
/// ```
/// use serde_json::json;
/// use tensorcask::fact_of;
/// assert_eq!([fact_of(0.5), fact_of(f64::NAN), fact_of(f64::NEG_INFINITY)], [json!(0.5), json!("nan"), json!("-inf")]);
/// ```
pub fn fact_of(number: f64) -> Value {
    let is_it = |value: f64| value == number || (value.is_nan() && number.is_nan());
    NOT_FINITE.iter().find(|(_, value)| is_it(*value)).map_or_else(|| number.into(), |(text, _)| (*text).into())
}

/// Builds the column of one key. `None` and null are no value.
pub(crate) fn fact_column(values: &[Option<Value>]) -> ArrayRef {
    let values: Vec<Option<&Value>> = values.iter().map(|value| value.as_ref().filter(|value| !value.is_null())).collect();
    let all = |is: fn(&Value) -> bool| values.iter().flatten().all(|value| is(value));
    if all(Value::is_boolean) && values.iter().any(Option::is_some) {
        return Arc::new(BooleanArray::from_iter(values.iter().map(|value| value.and_then(Value::as_bool))));
    }
    if all(Value::is_i64) && values.iter().any(Option::is_some) {
        return Arc::new(Int64Array::from_iter(values.iter().map(|value| value.and_then(Value::as_i64))));
    }
    if all(Value::is_u64) && values.iter().any(Option::is_some) {
        return Arc::new(UInt64Array::from_iter(values.iter().map(|value| value.and_then(Value::as_u64))));
    }
    if all(|value| float_of(value).is_some()) {
        return Arc::new(Float64Array::from_iter(values.iter().map(|value| value.and_then(float_of))));
    }
    let are_texts = all(Value::is_string);
    Arc::new(StringArray::from_iter(values.iter().map(|value| match value.as_ref()?.as_str() {
        Some(text) if are_texts => Some(text.to_owned()),
        _ => value.map(Value::to_string),
    })))
}

/// Whether a column may hold NaN, which readers of Parquet look for in vain if the file has extremes of the column.
pub(crate) fn may_hold_nan(column: &ArrayRef) -> bool {
    column.as_any().is::<Float64Array>()
}

fn float_of(value: &Value) -> Option<f64> {
    match value {
        Value::String(text) => NOT_FINITE.iter().find(|(name, _)| name == text).map(|(_, number)| *number),
        _ => value.as_f64(),
    }
}

const NOT_FINITE: [(&str, f64); 3] = [("nan", f64::NAN), ("inf", f64::INFINITY), ("-inf", f64::NEG_INFINITY)];

#[cfg(test)]
mod tests {
    use arrow_array::Array;
    use arrow_array::cast::AsArray;
    use arrow_array::types::{Float64Type, Int64Type, UInt64Type};
    use arrow_schema::DataType;
    use serde_json::{Value, json};

    use super::fact_column;

    fn column(values: Vec<Value>) -> arrow_array::ArrayRef {
        fact_column(&values.into_iter().map(Some).chain([None]).collect::<Vec<_>>())
    }

    #[test]
    fn facts_keep_their_types() {
        let of = |values| column(values).data_type().clone();
        assert_eq!(of(vec![json!(1), json!(-1), Value::Null]), DataType::Int64);
        assert_eq!(of(vec![json!(1), json!(u64::MAX)]), DataType::UInt64);
        assert_eq!(of(vec![json!(-1), json!(u64::MAX)]), DataType::Float64);
        assert_eq!(of(vec![json!(1), json!(0.5)]), DataType::Float64);
        assert_eq!(of(vec![json!("nan"), json!(0.5)]), DataType::Float64);
        assert_eq!(of(vec![json!("nan"), json!("inf")]), DataType::Float64);
        assert_eq!(of(vec![Value::Null]), DataType::Float64);
        assert_eq!(of(vec![json!(true), Value::Null]), DataType::Boolean);
        for text in [vec![json!("a"), json!("nan")], vec![json!("NaN")], vec![json!(1), json!(true)], vec![json!([1])]] {
            assert_eq!(of(text), DataType::Utf8);
        }
    }

    #[test]
    fn facts_keep_their_values() {
        let found = column(vec![json!(u64::MAX), json!(u64::MAX - 1)]);
        let numbers = found.as_primitive::<UInt64Type>();
        assert_eq!((numbers.value(0), numbers.value(1), numbers.is_null(2)), (u64::MAX, u64::MAX - 1, true));
        assert_eq!(column(vec![json!(i64::MIN)]).as_primitive::<Int64Type>().value(0), i64::MIN);
        let found = column(vec![json!(10.5), json!("nan"), json!("-inf")]);
        let numbers = found.as_primitive::<Float64Type>();
        assert!(numbers.value(0) == 10.5 && numbers.value(1).is_nan() && numbers.value(2) == f64::NEG_INFINITY);
        let found = column(vec![json!("a"), json!(0.5), json!([null])]);
        let texts: Vec<_> = found.as_string::<i32>().iter().collect();
        assert_eq!(texts, [Some("\"a\""), Some("0.5"), Some("[null]"), None]);
    }
}
