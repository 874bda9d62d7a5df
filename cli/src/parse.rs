//! Parsers for values of arguments.

use std::time::Duration;

use serde_json::Value;
use tensorcask::codec::{CodecRules, ObjectiveSetting, Registry};
use tensorcask::{NamePatterns, Precision, Result, RoleRules, Slice, StepSelector};

/// Parses `N` or `latest`.
pub(crate) fn at(text: &str) -> Result<StepSelector, String> {
    match text {
        "latest" => Ok(StepSelector::Latest),
        _ => text.parse().map(StepSelector::Step).map_err(|_| "write a step number or `latest`".to_owned()),
    }
}

/// Parses `30s`, `5m`, `24h` or `7d`; also `0`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    tensorcask::parse_duration(text).map_err(|e| e.message().to_owned())
}

/// Parses `i/n`.
pub(crate) fn part(text: &str) -> Result<(u64, u64), String> {
    let numbers = text.split_once('/').and_then(|(part, of)| Some((part.parse().ok()?, of.parse().ok()?)));
    numbers.filter(|(part, of)| part < of).ok_or_else(|| "write i/n with i from 0 to n-1, such as 0/4".to_owned())
}

/// Parses `KEY=VALUE`. The value is a number, true or false if it reads as one, otherwise text. `nan` and `inf` are numbers.
pub(crate) fn user(text: &str) -> Result<(String, Value), String> {
    let (key, value) = pair(text)?;
    let is_word = !value.contains(|c: char| c.is_ascii_digit());
    if let Some(number) = value.parse().ok().filter(|_| is_word) {
        return Ok((key.to_owned(), tensorcask::fact_of(number)));
    }
    let parsed = serde_json::from_str(value).ok().filter(|parsed| match parsed {
        Value::Bool(_) => true,
        // An integer beyond 64 bits would lose digits as a float.
        Value::Number(number) => !number.is_f64() || value.contains(['.', 'e', 'E']),
        _ => false,
    });
    Ok((key.to_owned(), parsed.unwrap_or_else(|| Value::String(value.to_owned()))))
}

/// Parses `NAME=FILE`.
pub(crate) fn blob(text: &str) -> Result<(String, String), String> {
    let (name, file) = pair(text)?;
    Ok((name.to_owned(), file.to_owned()))
}

/// Parses `auto`, `smallest`, `balanced`, `fastest` or three weights.
pub(crate) fn objective(text: &str) -> Result<ObjectiveSetting, String> {
    ObjectiveSetting::from_name(text).map_err(|e| e.message().to_owned())
}

/// Checks `PATTERN=CODEC`.
pub(crate) fn codec(text: &str) -> Result<String, String> {
    let checked = CodecRules::parse([text]).and_then(|rules| rules.check(&Registry::default()));
    checked.map(|()| text.to_owned()).map_err(|e| e.message().to_owned())
}

/// Checks a profile or `PATTERN=SETTING`.
pub(crate) fn precision(text: &str) -> Result<String, String> {
    Precision::parse([text]).map(|_| text.to_owned()).map_err(|e| e.message().to_owned())
}

/// Parses a pattern of names.
pub(crate) fn names(text: &str) -> Result<NamePatterns, String> {
    NamePatterns::parse([text]).map_err(|e| e.message().to_owned())
}

/// Checks a pattern of names.
pub(crate) fn frozen(text: &str) -> Result<String, String> {
    names(text).map(|_| text.to_owned())
}

/// Checks `GLOB=ROLE` or `GLOB=ROLE:PARAM`.
pub(crate) fn role(text: &str) -> Result<String, String> {
    RoleRules::parse([text]).map(|_| text.to_owned()).map_err(|e| e.message().to_owned())
}

fn pair(text: &str) -> Result<(&str, &str), String> {
    text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(|| "write NAME=VALUE".to_owned())
}

/// Slice of a tensor with optional ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SliceArg {
    pub name: String,
    pub ranges: Ranges,
}

/// One range per leading dimension, with optional ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<(Option<u64>, Option<u64>)>);

/// Parses `NAME[a:b]` or `NAME[a:b,c:d]`. Both ends of a range are optional.
pub(crate) fn slice(text: &str) -> Result<SliceArg, String> {
    let bad = || "write NAME[a:b] or NAME[a:b,c:d]; a or b may be left out".to_owned();
    let parts = text.strip_suffix(']').and_then(|text| text.rsplit_once('['));
    let (name, ranges) = parts.filter(|(name, _)| !name.is_empty()).ok_or_else(bad)?;
    Ok(SliceArg { name: name.to_owned(), ranges: Ranges::parse(ranges, bad)? })
}

/// Parses `a:b` or `a:b,c:d`. Both ends of a range are optional.
pub(crate) fn ranges(text: &str) -> Result<Ranges, String> {
    Ranges::parse(text, || "write a:b or a:b,c:d; a or b may be left out".to_owned())
}

impl Ranges {
    fn parse(text: &str, bad: impl Fn() -> String) -> Result<Self, String> {
        let end = |text: &str| match text.trim() {
            "" => Ok(None),
            number if number.starts_with('-') => Err(format!("`{number}`: negative numbers are not supported; count from the start")),
            number => number.parse().map(Some).map_err(|_| format!("`{}` is not a number: {}", number.escape_debug(), bad())),
        };
        let range = |text: &str| match text.split(':').collect::<Vec<_>>()[..] {
            [from, to] => Ok((end(from)?, end(to)?)),
            [single] => match single.trim().parse::<u64>() {
                Ok(index) => Err(format!("`{single}`: a single index is not supported; write {index}:{}", index.saturating_add(1))),
                Err(_) => Err(bad()),
            },
            _ => Err(format!("`{}`: a slice has no step; write a:b", text.escape_debug())),
        };
        Ok(Self(text.split(',').map(range).collect::<Result<_, String>>()?))
    }

    /// Slice of a tensor of this shape. The library checks the bounds.
    pub(crate) fn of(&self, shape: &[u64]) -> Slice {
        let extent = |dimension: usize| shape.get(dimension).copied().unwrap_or(0);
        let ranges = self.0.iter().enumerate();
        Slice::ranges(ranges.map(|(at, (from, to))| from.unwrap_or(0)..to.unwrap_or_else(|| extent(at))).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read() {
        assert!(matches!((at("latest"), at("7"), at("-1")), (Ok(StepSelector::Latest), Ok(StepSelector::Step(7)), Err(_))));
        assert_eq!(part("1/2"), Ok((1, 2)));
        for text in ["2/2", "0/0", "1", "a/b", "-1/2"] {
            assert!(part(text).is_err(), "{text}");
        }
        let value = |text: &str| user(text).map(|(_, value)| value.to_string());
        assert_eq!(value("loss=2.5"), Ok("2.5".into()));
        assert_eq!(value("done=true"), Ok("true".into()));
        assert_eq!(
            ["loss=NaN", "loss=-Infinity", "loss=inf", "loss=1e400"].map(|text| value(text).unwrap()),
            ["\"nan\"", "\"-inf\"", "\"inf\"", "\"1e400\""]
        );
        assert_eq!(value("hash=123456789012345678901234"), Ok("\"123456789012345678901234\"".into()));
        assert_eq!(value("none=null"), Ok("\"null\"".into()));
        assert_eq!(value("a=b=c"), Ok("\"b=c\"".into()));
        assert!(value("=1").is_err() && value("x").is_err());
    }

    #[test]
    fn durations_are_read() {
        let seconds = |text: &str| duration(text).map(|time| time.as_secs());
        assert_eq!([seconds("0"), seconds("90s"), seconds("5m"), seconds("24h")], [Ok(0), Ok(90), Ok(300), Ok(86_400)]);
        assert_eq!([seconds("1h 30m"), seconds("1w")], [Ok(5_400), Ok(604_800)]);
        for text in ["", "5", "h", "-1h", "99999999999999999999d", "1 fortnight"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn slices_are_read() {
        let of = |text: &str| slice(text).map(|slice| (slice.name.clone(), slice.ranges.of(&[100, 8])));
        assert_eq!(of("w[5:7]"), Ok(("w".into(), Slice::rows(5..7))));
        assert_eq!(of("w[5:]"), Ok(("w".into(), Slice::rows(5..100))));
        assert_eq!(of("a[0].w[:7, 2:4]"), Ok(("a[0].w".into(), Slice::ranges([0..7, 2..4]))));
        assert_eq!(of("w[:]"), Ok(("w".into(), Slice::rows(0..100))));
        for text in ["w", "[1:2]", "w[1]", "w[1:2", "w[]", "w[1:2,]", "w[-1:2]", "w[a:b]", "w[1:2:3]"] {
            assert!(slice(text).is_err(), "{text}");
        }
        for (text, cause) in [("w[5]", "write 5:6"), ("w[0:10:2]", "no step"), ("w[-3:]", "negative"), ("w[a:b]", "`a` is not a number")] {
            assert!(slice(text).unwrap_err().contains(cause), "{text}");
        }
    }
}
