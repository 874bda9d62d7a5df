//! The headers `Range` of requests and `Content-Range` of responses: one range of bytes with both ends.

use std::ops::Range;

/// Range that a request asks for, in bytes of the object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Asked {
    /// The whole object.
    Whole,
    /// A part of the object. Not empty.
    Part(Range<u64>),
}

/// Parses the header `Range`: `bytes=<first>-<last>`. Returns `None` for any other form, such as several ranges: no client
/// of ours sends one.
pub(super) fn parse_range(header: Option<&str>) -> Option<Asked> {
    let Some(header) = header else { return Some(Asked::Whole) };
    let (first, last) = header.strip_prefix("bytes=")?.split_once('-')?;
    let first = parse_number(first)?;
    let last = parse_number(last)?;
    let end = last.checked_add(1)?;
    (first < end).then_some(Asked::Part(first..end))
}

impl Asked {
    /// The bytes to send of an object of this size; `None` if the range begins behind the end.
    pub(super) fn within(&self, object_bytes: u64) -> Option<Range<u64>> {
        match self {
            Self::Whole => Some(0..object_bytes),
            Self::Part(range) if range.start < object_bytes => Some(range.start..range.end.min(object_bytes)),
            Self::Part(_) => None,
        }
    }
}

/// Range and size of an object, as a response declares them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sent {
    pub range: Range<u64>,
    pub object_bytes: u64,
}

impl Sent {
    /// Parses the header `Content-Range`: `bytes <first>-<last>/<size>`. The range lies within the object.
    pub(super) fn parse(header: &str) -> Option<Self> {
        let (range, size) = header.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let first = parse_number(first)?;
        let last = parse_number(last)?;
        let object_bytes = parse_number(size)?;
        let end = last.checked_add(1)?;
        (first < end && end <= object_bytes).then_some(Self { range: first..end, object_bytes })
    }

    pub(super) fn to_header(&self) -> String {
        format!("bytes {}-{}/{}", self.range.start, self.range.end.saturating_sub(1), self.object_bytes)
    }
}

/// Parses digits alone; `u64::from_str` accepts a sign.
fn parse_number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Asked, Sent, parse_range};

    #[test]
    fn one_range_with_both_ends() {
        assert_eq!(parse_range(None), Some(Asked::Whole));
        assert_eq!(parse_range(Some("bytes=0-9")), Some(Asked::Part(0..10)));
        for other in
            ["", "bytes=", "bytes=1-0", "bytes=-5", "bytes=5-", "bytes=0-1,3-4", "bytes=+1-2", "items=0-1", "bytes=0-18446744073709551615"]
        {
            assert_eq!(parse_range(Some(other)), None, "{other}");
        }
        assert_eq!(Asked::Part(5..10).within(7), Some(5..7));
        assert_eq!(Asked::Part(7..10).within(7), None);
        assert_eq!(Asked::Whole.within(0), Some(0..0));
        for lie in ["bytes 0-18446744073709551615/9", "bytes 0-9/9", "bytes 5-4/9", "bytes */9", "bytes 0-8/*", "bytes  0-8/9", "0-8/9"] {
            assert_eq!(Sent::parse(lie), None, "{lie}");
        }
    }

    proptest! {
        #[test]
        fn ranges_stay_within_the_object(text in "(bytes[= ])?[0-9 +*-]{0,24}(/[0-9*]{0,21})?", size in any::<u64>()) {
            if let Some(asked) = parse_range(Some(&text)) && let Some(range) = asked.within(size) {
                prop_assert!(range.start < range.end && range.end <= size);
            }
            if let Some(sent) = Sent::parse(&text) {
                prop_assert!(sent.range.start < sent.range.end && sent.range.end <= sent.object_bytes);
            }
        }

        #[test]
        fn a_range_that_was_sent_is_read_back(start in 0u64..1 << 40, bytes in 1u64..1 << 40, more in 0u64..1 << 40) {
            let sent = Sent { range: start..start + bytes, object_bytes: start + bytes + more };
            prop_assert_eq!(Sent::parse(&sent.to_header()), Some(sent.clone()));
            let header = format!("bytes={}-{}", start, start + bytes - 1);
            prop_assert_eq!(parse_range(Some(&header)), Some(Asked::Part(sent.range)));
        }
    }
}
