//! The option `peers`: the address of this host's agent, its certificates, and the hosts whose memory it copies.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tensorcask::{Error, Result};

/// Replicas in the memory of other hosts: each agent serves its encoded snapshots to the other agents of the run, and
/// copies theirs.
///
/// ```
/// use tensorcask_engine::{PeerTls, Peers};
/// let peers = Peers {
///     tls: Some(PeerTls::in_folder("/etc/tensorcask/run42", 3)),
///     ..Peers::new("10.0.0.3:7411".parse()?, Peers::addresses("node{host}:7411", 8)?)
/// };
/// assert_eq!(peers.addresses[3], "node3:7411");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peers {
    /// Address to listen on. Without certificates, only an address of this machine (127.0.0.1 or ::1).
    pub listen: SocketAddr,
    /// Addresses (`name:port`) of the agents of all hosts, by host number. The list is the same on all hosts.
    pub addresses: Vec<String>,
    /// Certificates; `None` only if all agents run on one machine. Then every user of that machine can read the snapshots.
    pub tls: Option<PeerTls>,
    /// Number of hosts that copy the snapshots of a host. 0 turns replicas off.
    pub replicas: u32,
    /// Distance between a host and its replicas: host `n` is copied to `n + jump`, `n + 2 * jump`, and so on. Choose it so that
    /// these hosts do not fail together, for example the number of hosts in a rack.
    pub jump: u32,
    /// Number of steps to keep of each host, 1 or more, with the chain of the newest committed snapshot. Older steps that are not
    /// committed yet are kept, too, while memory has room.
    pub keep: u32,
    /// Bytes per second that this host sends for the run, to other hosts and to the tiers together; `None` for no limit. At
    /// least 1 MiB.
    pub bandwidth: Option<u64>,
}

/// Files of certificates, in PEM. They are read again when they change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerTls {
    /// Certificate of the run's authority. Peers with a certificate from another authority are refused.
    pub ca: PathBuf,
    /// Certificate of this host, and any intermediate ones. It names the run.
    pub certificate: PathBuf,
    /// Private key of this host.
    pub key: PathBuf,
}

impl PeerTls {
    /// The files that `tensorcask agent init-tls` writes for a host.
    pub fn in_folder(folder: impl AsRef<Path>, host: u32) -> Self {
        let folder = folder.as_ref();
        Self {
            ca: folder.join("ca.pem"),
            certificate: folder.join(format!("host-{host}.pem")),
            key: folder.join(format!("host-{host}-key.pem")),
        }
    }
}

impl Peers {
    /// One replica of each host on the next host, two snapshots each, without certificates and without a limit.
    pub fn new(listen: SocketAddr, addresses: Vec<String>) -> Self {
        Self { listen, addresses, tls: None, replicas: 1, jump: 1, keep: 2, bandwidth: None }
    }

    /// Addresses of the agents from a text: a list separated by commas (`node0:7411,node1:7411`), a pattern with `{host}` for
    /// the number of the host (`worker-{host}.train:7411`, as pods behind a headless service are named), or `file:PATH` with
    /// one address per line.
    ///
    /// ```
    /// use tensorcask_engine::Peers;
    /// assert_eq!(Peers::addresses("worker-{host}.train:7411", 2)?, ["worker-0.train:7411", "worker-1.train:7411"]);
    /// assert_eq!(Peers::addresses("a:1, b:1", 2)?, ["a:1", "b:1"]);
    /// assert!(Peers::addresses("a:1", 2).is_err());
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn addresses(text: &str, hosts: u32) -> Result<Vec<String>> {
        let list = |text: &str, separator: char| -> Vec<String> {
            text.split(separator).map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
        };
        let addresses = match text.strip_prefix("file:") {
            Some(path) => {
                let read = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
                list(&read, '\n')
            }
            None if text.contains("{host}") => (0..hosts).map(|host| text.replace("{host}", &host.to_string())).collect(),
            None => list(text, ','),
        };
        if addresses.len() != hosts as usize {
            let message = format!("`{text}` has {} addresses of agents for {hosts} hosts; give one per host", addresses.len());
            return Err(Error::invalid(message));
        }
        addresses.iter().try_for_each(|address| check_address(address))?;
        Ok(addresses)
    }

    /// The same options for the agent, which has another working directory.
    pub(crate) fn with_absolute_paths(&self) -> Result<Self> {
        let absolute = |path: &PathBuf| std::path::absolute(path).map_err(|e| Error::io(path.display().to_string(), e));
        let files = |tls: &PeerTls| -> Result<PeerTls> {
            Ok(PeerTls { ca: absolute(&tls.ca)?, certificate: absolute(&tls.certificate)?, key: absolute(&tls.key)? })
        };
        Ok(Self { tls: self.tls.as_ref().map(files).transpose()?, ..self.clone() })
    }

    /// Checks the options of a host in a run of this many hosts.
    pub(crate) fn check(&self, hosts: u32) -> Result<()> {
        if self.addresses.len() != hosts as usize {
            let message =
                format!("peers have {} addresses for {hosts} hosts; give one per host, in the order of hosts", self.addresses.len());
            return Err(Error::invalid(message));
        }
        self.addresses.iter().try_for_each(|address| check_address(address))?;
        if self.keep == 0 || self.jump == 0 {
            return Err(Error::invalid("`keep` and `jump` of peers must be 1 or more"));
        }
        if self.bandwidth.is_some_and(|limit| limit < LEAST_BANDWIDTH) {
            return Err(Error::invalid(format!("`bandwidth` of peers must be {LEAST_BANDWIDTH} bytes per second or more")));
        }
        if self.tls.is_none() && !self.listen.ip().is_loopback() {
            let message = format!(
                "{} can be reached from other machines, and peers have no certificates. Make them with `tensorcask agent init-tls`, or \
                 listen on 127.0.0.1",
                self.listen
            );
            return Err(Error::invalid(message));
        }
        Ok(())
    }
}

/// Checks the form `name:port`.
fn check_address(address: &str) -> Result<()> {
    let is_name = |name: &str| {
        let plain = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        !plain.is_empty() && plain.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_:".contains(&byte))
    };
    let parts = address.rsplit_once(':');
    match parts.filter(|(name, port)| is_name(name) && (name.starts_with('[') || !name.contains(':')) && port.parse::<u16>().is_ok()) {
        Some(_) => Ok(()),
        None => Err(Error::invalid(format!("`{}` is not the address of an agent; write name:port", address.escape_debug()))),
    }
}

/// Least bandwidth in bytes per second: below it, requests would run into their time limits.
const LEAST_BANDWIDTH: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::{PeerTls, Peers};

    #[test]
    fn addresses_are_checked() {
        assert!(Peers::addresses("a:1,b", 2).is_err() && Peers::addresses("a:1,b:70000", 2).is_err());
        assert!(Peers::addresses("http://a:1,b:1", 2).is_err() && Peers::addresses("::1:7411", 1).is_err());
        assert_eq!(Peers::addresses("[::1]:7411", 1).unwrap(), ["[::1]:7411"]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# hosts\nn0:1\n\nn1:1\n").unwrap();
        assert_eq!(Peers::addresses(&format!("file:{}", file.path().display()), 2).unwrap(), ["n0:1", "n1:1"]);
        assert!(Peers::addresses("file:/no/such", 2).is_err());
    }

    #[test]
    fn the_agent_gets_absolute_paths() {
        let peers = Peers::new("127.0.0.1:0".parse().unwrap(), Peers::addresses("n{host}:7411", 4).unwrap());
        assert_eq!(peers.with_absolute_paths().unwrap(), peers);
        let relative = Peers { tls: Some(PeerTls::in_folder("tls", 3)), ..peers.clone() };
        let folder = std::env::current_dir().unwrap().join("tls");
        assert_eq!(relative.with_absolute_paths().unwrap(), Peers { tls: Some(PeerTls::in_folder(folder, 3)), ..peers });
    }

    #[test]
    fn an_open_port_needs_certificates() {
        let addresses = Peers::addresses("n{host}:7411", 4).unwrap();
        let local = Peers::new("127.0.0.1:0".parse().unwrap(), addresses.clone());
        local.check(4).unwrap();
        assert!(local.check(3).is_err(), "an address too many");
        let open = Peers::new("0.0.0.0:7411".parse().unwrap(), addresses);
        assert!(open.check(4).unwrap_err().to_string().contains("no certificates"));
        Peers { tls: Some(PeerTls::in_folder("/tls", 0)), ..open.clone() }.check(4).unwrap();
        assert!(Peers { keep: 0, ..local.clone() }.check(4).is_err() && Peers { jump: 0, ..local.clone() }.check(4).is_err());
        assert!(Peers { bandwidth: Some(1000), ..local }.check(4).is_err());
    }
}
