//! Proxies of a process that another one works for.
//!
//! `reqwest`, below `object_store`, takes proxies from the variables of the process that it runs in. An agent opens the stores of
//! many runs, each with the variables of its trainer ([`Environment`]). [`Proxies`] reads the same variables from these instead,
//! with the same meaning as in `reqwest` and curl:
//!
//! | variable | for requests |
//! |---|---|
//! | `HTTPS_PROXY`, `https_proxy` | to `https://` |
//! | `HTTP_PROXY`, `http_proxy` | to `http://` |
//! | `ALL_PROXY`, `all_proxy` | to both, unless there is one of the above |
//! | `NO_PROXY`, `no_proxy` | servers without a proxy |

use object_store::{ClientConfigKey, ClientOptions};

use super::Environment;
use super::environment::PROXIES;

/// Proxies of a run, one for each scheme of URLs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Proxies {
    pub(super) http: Proxy,
    pub(super) https: Proxy,
}

/// The proxy for requests of one scheme. The debug output has no URL, because it may hold a password.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Proxy {
    url: Option<String>,
    excludes: String,
}

impl Proxies {
    pub(super) fn of(environment: &Environment) -> Self {
        let [https, http, all, excludes] = PROXIES.map(|names| names.into_iter().find_map(|name| environment.get(name)));
        let excludes = excludes.unwrap_or_default().to_owned();
        let proxy = |url: Option<&str>| Proxy { url: url.and_then(usable).or_else(|| all.and_then(usable)), excludes: excludes.clone() };
        Self { http: proxy(http), https: proxy(https) }
    }
}

impl Proxy {
    /// Returns the options with this proxy, or with none at all. A proxy in the config of the store stays.
    pub(super) fn applied_to(&self, options: &ClientOptions) -> ClientOptions {
        if options.get_config_value(&ClientConfigKey::ProxyUrl).is_some() {
            return options.clone();
        }
        match &self.url {
            Some(url) => options.clone().with_proxy_url(url).with_proxy_excludes(&self.excludes),
            // A client without a proxy of its own would take that of this process.
            None => options.clone().with_proxy_url(UNUSED).with_proxy_excludes(ALL_SERVERS),
        }
    }
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxy").field("is_set", &self.url.is_some()).field("excludes", &self.excludes).finish()
    }
}

/// A proxy as a URL. `reqwest` ignores a variable without one, and takes a host without a scheme for one of HTTP.
fn usable(value: &str) -> Option<String> {
    let value = if value.contains("://") { value.to_owned() } else { format!("http://{value}") };
    let is_usable = |url: &url::Url| url.has_host() && SCHEMES.contains(&url.scheme());
    url::Url::parse(&value).ok().filter(is_usable).map(|_| value)
}

const SCHEMES: [&str; 6] = ["http", "https", "socks4", "socks4a", "socks5", "socks5h"];

/// URL of a proxy that no request goes to.
const UNUSED: &str = "http://127.0.0.1:9";
/// All names and all addresses. In `reqwest`, the star stands for names alone.
const ALL_SERVERS: &str = "*, 0.0.0.0/0, ::/0";

#[cfg(test)]
mod tests {
    use object_store::{ClientConfigKey as Key, ClientOptions};

    use super::{Proxies, Proxy};
    use crate::Environment;

    fn proxies(variables: &[(&str, &str)]) -> Proxies {
        Proxies::of(&variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect::<Environment>())
    }

    fn settings(proxy: &Proxy) -> [Option<String>; 2] {
        let options = proxy.applied_to(&ClientOptions::new());
        [Key::ProxyUrl, Key::ProxyExcludes].map(|key| options.get_config_value(&key))
    }

    #[test]
    fn each_scheme_has_the_proxy_of_its_variable() {
        let found = proxies(&[("https_proxy", "http://secure:1"), ("ALL_PROXY", "all:2"), ("NO_PROXY", "a, b"), ("no_proxy", "c")]);
        assert_eq!(settings(&found.https), [Some("http://secure:1".to_owned()), Some("a, b".to_owned())]);
        assert_eq!(settings(&found.http), [Some("http://all:2".to_owned()), Some("a, b".to_owned())]);
    }

    #[test]
    fn without_variables_there_is_no_proxy() {
        for found in [proxies(&[]), proxies(&[("HTTP_PROXY", ""), ("https_proxy", "not a URL"), ("all_proxy", "ftp://host")])] {
            for proxy in [&found.http, &found.https] {
                assert_eq!(settings(proxy)[1].as_deref(), Some(super::ALL_SERVERS));
            }
        }
    }

    #[test]
    fn the_config_of_a_store_wins_and_passwords_are_not_shown() {
        let found = proxies(&[("HTTP_PROXY", "http://user:word@host:1")]);
        assert!(!format!("{found:?}").contains("word"));
        let options = found.http.applied_to(&ClientOptions::new().with_proxy_url("http://own:2"));
        assert_eq!(options.get_config_value(&Key::ProxyUrl).as_deref(), Some("http://own:2"));
    }
}
