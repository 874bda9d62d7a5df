//! Checks settings of object stores before `object_store` sees them.
//!
//! `object_store` builds the URL and the headers of a request from settings, without a check, and panics if the result is no
//! URL or no header: an endpoint without `https://`, or a line break at the end of a key. So each setting that becomes a URL or
//! a header is checked here, whether it comes from the environment, from [`StoreOptions::config`](crate::StoreOptions::config)
//! or from a key file. The error names the setting. It never shows the value of a header, which may be a secret.

use std::str::FromStr;

use object_store::client::{HttpRequest, HttpRequestBody};

use super::Environment;
use crate::{Error, Result};

/// What a setting becomes in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// A URL with a scheme and a host.
    Url,
    /// The host of a URL with `http://`.
    Host,
    /// The path of a URL of this server.
    PathAt(&'static str),
    /// A part of this host name, before and after it.
    PartOfHost(&'static str, &'static str),
    /// The value of a header, or a part of one.
    Header,
    /// Name of a file whose content is the value of a header.
    HeaderFile,
    /// A key of Google Cloud as JSON, which may hold a URL.
    GoogleKey,
    /// Name of a file with a key of Google Cloud.
    GoogleKeyFile,
    /// None of these.
    Other,
}

/// A setting of one kind of store, and the name that the user knows it by.
#[derive(Debug)]
pub(super) struct Setting<K> {
    pub(super) key: K,
    name: String,
    pub(super) value: String,
}

/// Returns the settings in an environment that begin with `prefix`, and those of a config, which come last and win.
pub(super) fn all<'a, K: FromStr + PartialEq>(
    environment: &Environment,
    prefix: &str,
    config: impl Iterator<Item = (&'a String, &'a String)>,
    url: &str,
) -> Result<Vec<Setting<K>>> {
    let variables = environment.starting_with(prefix);
    let setting = |(name, value): (&str, &str)| {
        Some(Setting { key: name.to_ascii_lowercase().parse().ok()?, name: name.to_owned(), value: value.to_owned() })
    };
    let mut found: Vec<Setting<K>> = variables.filter_map(setting).collect();
    for (name, value) in config {
        let unknown = |_| Error::invalid(format!("`{}` is not a setting of this kind of store", name.escape_debug())).object(url);
        let key = name.parse().map_err(unknown)?;
        found.retain(|setting| setting.key != key);
        found.push(Setting { key, name: name.clone(), value: value.clone() });
    }
    Ok(found)
}

/// Checks all settings. `url` is the URL of the store.
pub(super) fn check<K>(settings: &[Setting<K>], form: impl Fn(&K) -> Form, url: &str) -> Result<()> {
    settings.iter().try_for_each(|setting| check_value(&setting.name, &setting.value, form(&setting.key), url))
}

/// Checks variables that are no settings: those of `environment`, and those that `object_store` reads by itself.
pub(super) fn check_variables(environment: &Environment, variables: &[(&str, Form)], url: &str) -> Result<()> {
    let value = |name: &str| environment.get(name).map(str::to_owned).or_else(|| std::env::var(name).ok());
    let found = variables.iter().filter_map(|(name, form)| Some((name, value(name)?, form)));
    found.into_iter().try_for_each(|(name, value, form)| check_value(name, &value, *form, url))
}

/// Names of settings, for errors.
pub(super) fn names<K>(settings: &[Setting<K>]) -> String {
    let names: Vec<&str> = settings.iter().map(|setting| setting.name.as_str()).collect();
    names.join(", ")
}

fn check_value(name: &str, value: &str, form: Form, url: &str) -> Result<()> {
    let bad = |what: String| Err(Error::invalid(format!("`{}`: {what}", name.escape_debug())).object(url));
    let checked = match form {
        Form::Url => return check_url(value).or_else(bad),
        Form::Host => is_url(&format!("http://{value}/")),
        Form::PathAt(server) => value.starts_with('/') && is_url(&format!("{server}{value}")),
        Form::PartOfHost(before, after) => is_url(&format!("https://{before}{value}{after}/")),
        Form::Header => return check_header(value).or_else(bad),
        Form::HeaderFile => {
            // A file that cannot be read is an error of the request that needs it.
            let Ok(content) = std::fs::read_to_string(value) else { return Ok(()) };
            return check_header(&content).or_else(|what| bad(format!("the file {value} {what}")));
        }
        Form::GoogleKey => return check_google_key(value).or_else(bad),
        Form::GoogleKeyFile => {
            let Ok(content) = std::fs::read_to_string(value) else { return Ok(()) };
            return check_google_key(&content).or_else(|what| bad(format!("the file {value}: {what}")));
        }
        Form::Other => true,
    };
    match (checked, form) {
        (true, _) => Ok(()),
        (false, Form::PathAt(_)) => bad(format!("`{value}` is not a path of a URL; write one that begins with a slash")),
        (false, _) => bad(format!("`{value}` cannot be part of a URL; look for blanks and quotes")),
    }
}

/// Refuses a text that is no absolute URL, and says what to write.
fn check_url(value: &str) -> Result<(), String> {
    if is_url(value) {
        return Ok(());
    }
    let guess = value.trim().trim_matches(['"', '\'']);
    Err(match guess.contains("://") {
        _ if guess.is_empty() => "is empty; write a URL such as https://host:9000, or unset it".to_owned(),
        true if guess != value && is_url(guess) => format!("`{value}` has blanks or quotes around the URL; write {guess}"),
        false if is_url(&format!("https://{guess}")) => {
            format!("`{value}` is not an absolute URL; write https://{guess}, or http://{guess} for a server without TLS")
        }
        _ => format!("`{value}` is not an absolute URL; write one such as https://host:9000"),
    })
}

/// Whether a text is an absolute URL, for each of the two parsers that a request goes through.
fn is_url(text: &str) -> bool {
    let mut request = HttpRequest::new(HttpRequestBody::empty());
    let has_host = text.parse().is_ok_and(|uri| {
        *request.uri_mut() = uri;
        request.uri().authority().is_some()
    });
    let parsed = url::Url::parse(text).ok();
    has_host && parsed.is_some_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

/// Refuses a text that cannot be the value of a header. Does not show the text.
fn check_header(value: &str) -> Result<(), String> {
    let is_wrong = |c: char| !c.is_ascii() || c.is_ascii_control();
    if value.trim() == value && !value.contains(is_wrong) {
        return Ok(());
    }
    let found = value.chars().enumerate().find(|(_, c)| is_wrong(*c));
    Err(match found {
        Some((at, c)) if value.trim().contains(is_wrong) => {
            format!("has the character {} at place {}, which no header of a request can hold; set it again", c.escape_unicode(), at + 1)
        }
        _ => "has blanks or line breaks around its value; remove them".to_owned(),
    })
}

/// Refuses a key of Google Cloud that names a server by what is no URL. Other faults of a key are errors of `object_store`.
fn check_google_key(json: &str) -> Result<(), String> {
    let key: serde_json::Value = serde_json::from_str(json).unwrap_or_default();
    match key.get("gcs_base_url").and_then(serde_json::Value::as_str) {
        Some(url) => check_url(url).map_err(|what| format!("`gcs_base_url`: {what}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Form, check_value};

    fn refusal(value: &str, form: Form) -> Option<String> {
        check_value("NAME", value, form, "s3://bucket").err().map(|e| e.message().to_owned())
    }

    #[test]
    fn what_becomes_a_url_is_absolute() {
        for right in ["http://localhost:9000", "https://s3.example.com/", "http://[::1]:9000/path", "https://user:pass@host"] {
            assert_eq!(refusal(right, Form::Url), None, "{right}");
        }
        for (wrong, says) in [
            ("", "is empty"),
            ("localhost:9000", "write https://localhost:9000, or http://localhost:9000"),
            ("s3.example.com", "write https://s3.example.com"),
            (" http://host", "write http://host"),
            ("\"http://host\"", "write http://host"),
            ("http:localhost:9000", "not an absolute URL"),
            ("http://", "not an absolute URL"),
            ("http://host:999999", "not an absolute URL"),
            ("http://ho st", "not an absolute URL"),
            ("http://h\u{f6}st", "not an absolute URL"),
            ("ftp://host", "not an absolute URL"),
            ("/path", "not an absolute URL"),
        ] {
            let refusal = refusal(wrong, Form::Url);
            assert!(refusal.as_ref().is_some_and(|message| message.contains(says) && message.contains("`NAME`")), "{wrong}: {refusal:?}");
        }
        assert_eq!(refusal("us-east-1", Form::PartOfHost("s3.", ".amazonaws.com")), None);
        assert!(refusal("us east", Form::PartOfHost("s3.", ".amazonaws.com")).is_some());
        assert_eq!(refusal("/v2/credentials/1", Form::PathAt("http://169.254.170.2")), None);
        assert!(refusal("v2", Form::PathAt("http://169.254.170.2")).is_some());
        assert!(refusal("a b", Form::Host).is_some() && refusal("169.254.169.254:80", Form::Host).is_none());
    }

    #[test]
    fn what_becomes_a_header_can_be_one_and_stays_secret() {
        assert_eq!(refusal("AKIA/+=", Form::Header), None);
        for wrong in ["secret\n", " secret", "sec\nret", "s\u{e9}cret", "secret\u{200b}", "secret\0"] {
            let message = refusal(wrong, Form::Header).unwrap_or_else(|| panic!("{wrong:?} is accepted"));
            assert!(message.contains("`NAME`") && !message.contains("ret"), "{message}");
        }
    }

    #[test]
    fn urls_in_key_files_are_checked() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        std::fs::write(path, r#"{"gcs_base_url": "localhost:4443"}"#).unwrap();
        let message = refusal(path, Form::GoogleKeyFile).unwrap();
        assert!(message.contains(path) && message.contains("gcs_base_url") && message.contains("https://localhost:4443"), "{message}");
        std::fs::write(path, "token\n").unwrap();
        assert!(refusal(path, Form::HeaderFile).unwrap().contains("line breaks"));
        assert_eq!(refusal("/no/such/file", Form::HeaderFile), None);
        assert_eq!(refusal("no JSON", Form::GoogleKey), None);
    }
}
