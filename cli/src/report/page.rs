//! Writes the data of a report as an HTML page that needs no other file.
//!
//! Data are one JSON object in an element that is not executed, with every character escaped that could end the element.
//! A content security policy forbids requests.

use std::fmt::Write as _;

use tensorcask::{Error, Result};

use super::Data;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const TABLES: &str = include_str!("tables.js");
const CHARTS: &str = include_str!("charts.js");

/// Returns the page.
pub(crate) fn render(data: &Data) -> Result<String> {
    let json = serde_json::to_string(data).map_err(|e| Error::invalid(format!("cannot write the report as JSON: {e}")))?;
    let json = inert(&json);
    let library = chart_library();
    let parts = [("STYLE", STYLE), ("DATA", &json), ("PLOTLY", &library), ("TABLES", TABLES), ("CHARTS", CHARTS)];
    let mut page = String::with_capacity(library.len() + json.len() + (64 << 10));
    let mut rest = TEMPLATE;
    for (name, part) in parts {
        let mark = format!("{{{{{name}}}}}");
        let (before, after) = rest.split_once(&mark).ok_or_else(|| Error::invalid(format!("the template of the page lacks {mark}")))?;
        page.push_str(before);
        page.push_str(part);
        rest = after;
    }
    page.push_str(rest);
    Ok(page)
}

/// Plotly.js, without the library for formulas that `plotly` adds after it.
fn chart_library() -> String {
    let sources = plotly::Plot::offline_js_sources();
    let code = sources.split_once('>').and_then(|(_, rest)| rest.split_once("</script>"));
    code.map(|(code, _)| code.to_owned()).unwrap_or_default()
}

/// Escapes JSON so that no markup can be found in it. All these characters occur only in strings.
fn inert(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\u{7f}'..='\u{9f}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_holds_no_markup() {
        let text = "</script><!--\u{2028}\u{85}&amp;\"'é";
        let json = inert(&serde_json::to_string(text).unwrap_or_default());
        assert_eq!(json, "\"\\u003c/script\\u003e\\u003c!--\\u2028\\u0085\\u0026amp;\\\"'é\"");
        assert_eq!(serde_json::from_str::<String>(&json).ok().as_deref(), Some(text));
    }

    #[test]
    fn the_chart_library_is_whole_and_alone() {
        let library = chart_library();
        assert!(library.contains("plotly.js v") && library.len() > 1_000_000, "{}", library.len());
        assert!(!library.contains("<script") && !library.contains("MathJax.loader"));
    }
}
