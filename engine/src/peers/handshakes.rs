//! Connections that have not shown a certificate yet. They have a limit of their own, so that a stranger who opens many
//! connections and sends nothing cannot keep the peers out.
//!
//! Beyond the limit, a new connection takes the place of the oldest one of the address that has the most. So an address that
//! floods the server pushes out its own connections, and those of others finish.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

/// Connections before or in their handshake, oldest first.
#[derive(Debug)]
pub(super) struct Handshakes {
    most: usize,
    pending: Mutex<Pending>,
}

#[derive(Debug, Default)]
struct Pending {
    next_number: u64,
    connections: BTreeMap<u64, Connection>,
    /// Time of the last warning of a flood.
    warned: Option<Instant>,
}

#[derive(Debug)]
struct Connection {
    network: IpAddr,
    /// `None` until the task was started.
    task: Option<AbortHandle>,
}

impl Handshakes {
    /// `most`: number of connections at once.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, pending: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection from an address. `spawn` starts its task, which drops the place once the connection is trusted.
    pub(super) fn begin(self: &Arc<Self>, address: IpAddr, spawn: impl FnOnce(HandshakePlace) -> AbortHandle) {
        let number = self.lock().add(network_of(address), self.most);
        let task = spawn(HandshakePlace { handshakes: self.clone(), number });
        // The task may have given its place back already.
        if let Some(connection) = self.lock().connections.get_mut(&number) {
            connection.task = Some(task);
        }
    }
}

impl Pending {
    /// Adds a connection, and ends others if there are too many; returns its number.
    fn add(&mut self, network: IpAddr, most: usize) -> u64 {
        while self.connections.len() >= most {
            let Some(oldest) = self.oldest_of_largest() else { break };
            let Some(pushed_out) = self.connections.remove(&oldest) else { break };
            self.warn(pushed_out.network, most);
            // The task drops its place later, when the lock is free.
            if let Some(task) = pushed_out.task {
                task.abort();
            }
        }
        let number = self.next_number;
        self.next_number = number.saturating_add(1);
        self.connections.insert(number, Connection { network, task: None });
        number
    }

    /// Logs that a connection was closed, from time to time: a flood must not fill the log.
    fn warn(&mut self, address: IpAddr, most: usize) {
        if self.warned.is_none_or(|warned| warned.elapsed() >= WARNING_INTERVAL) {
            self.warned = Some(Instant::now());
            tracing::warn!(%address, most, "too many connections without a certificate; the oldest ones of this address are closed");
        }
    }

    /// The oldest connection of the network that has the most.
    fn oldest_of_largest(&self) -> Option<u64> {
        let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
        self.connections.values().for_each(|connection| *counts.entry(connection.network).or_default() += 1);
        let largest = counts.into_iter().max_by_key(|(_, count)| *count)?.0;
        self.connections.iter().find(|(_, connection)| connection.network == largest).map(|(number, _)| *number)
    }
}

/// The place of a connection among the handshakes. Dropping it frees the place.
#[derive(Debug)]
pub(super) struct HandshakePlace {
    handshakes: Arc<Handshakes>,
    number: u64,
}

impl Drop for HandshakePlace {
    fn drop(&mut self) {
        self.handshakes.lock().connections.remove(&self.number);
    }
}

/// The address, or the network of 64 bits of an IPv6 address: one machine may have all addresses of such a network.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64))),
        address => address,
    }
}

const WARNING_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;

    use super::{Handshakes, network_of};

    #[tokio::test]
    async fn a_flood_pushes_out_its_own_connections() {
        let handshakes = Handshakes::new(4);
        let (stranger, peer): (IpAddr, IpAddr) = ("10.0.0.9".parse().unwrap(), "10.0.0.1".parse().unwrap());
        let begin = |address: IpAddr, handshakes: &Arc<Handshakes>| {
            let mut started = None;
            handshakes.begin(address, |place| {
                let task = tokio::spawn(async move {
                    let _place = place;
                    std::future::pending::<()>().await;
                });
                let abort = task.abort_handle();
                started = Some(task);
                abort
            });
            started.unwrap()
        };
        let ours = begin(peer, &handshakes);
        let flood: Vec<_> = (0..20).map(|_| begin(stranger, &handshakes)).collect();
        let mut flood = flood.into_iter();
        for pushed_out in flood.by_ref().take(17) {
            assert!(pushed_out.await.unwrap_err().is_cancelled());
        }
        assert!(!ours.is_finished() && flood.all(|task| !task.is_finished()));
        ours.abort();
        assert!(ours.await.unwrap_err().is_cancelled());
        assert_eq!(handshakes.lock().connections.len(), 3, "an ended task frees its place");
    }

    #[test]
    fn one_machine_is_one_network() {
        let network = |text: &str| network_of(text.parse().unwrap());
        assert_eq!(network("fd00::1"), network("fd00::2"));
        assert_ne!(network("fd00::1"), network("fd00:0:0:1::1"));
        assert_eq!(network("::ffff:10.0.0.1"), network("10.0.0.1"));
        assert_ne!(network("10.0.0.1"), network("10.0.0.2"));
    }
}
