//! The mirror of host 0: the other hosts read there which parent host 0 has chosen for a step.
//!
//! While the store does not answer, all hosts make their deltas against the parent that host 0 notes in its mirror: their own
//! mirrors may differ by the last entries of the log. A host that cannot read the parent writes whole chunks, which agree
//! with any parent.

use std::time::Duration;

use tensorcask::session::{Mirror, SessionExchange};
use tensorcask::wire::{Id, SessionName, SessionStep};
use tensorcask::{Error, ErrorKind, Result, Store};

use super::host_work::HostWork;
use super::run::Run;
use crate::peers::{Peer, ResponseLimits, Tls};

/// The mirror of host 0, for the other hosts of a run with peers.
#[derive(Debug)]
pub(super) struct FirstHost {
    mirror: Store,
}

impl FirstHost {
    /// `None` on host 0, and without peers. Sends no request.
    pub(super) fn open(work: &HostWork) -> Result<Option<Self>> {
        let spec = &work.run.spec;
        let Some(peers) = spec.peers.as_ref().filter(|_| work.hosts.position() > 0) else { return Ok(None) };
        let Some(address) = peers.addresses.first() else { return Ok(None) };
        let peer = Peer::open(address, &spec.key, Tls::of_run(peers, &spec.key)?, ResponseLimits::default())?;
        Ok(Some(Self { mirror: peer.store("mirror") }))
    }

    /// The parent that host 0 has noted for a step; `None` if it has noted none, or does not answer.
    pub(super) async fn parent(&self, session: SessionName, at: SessionStep) -> Option<Option<Id>> {
        match tokio::time::timeout(PATIENCE, SessionExchange::new(&self.mirror, session).parent(at)).await {
            Ok(Ok(noted)) => noted,
            Ok(Err(error)) => {
                tracing::debug!(step = at.step, %error, "host 0 does not tell the parent of a step");
                None
            }
            Err(_) => None,
        }
    }

    /// Waits a while until host 0 has noted the parent of a step.
    pub(super) async fn await_parent(&self, run: &Run, session: SessionName, at: SessionStep) -> Option<Option<Id>> {
        let noted = async {
            loop {
                if let Some(parent) = self.parent(session, at).await {
                    return parent;
                }
                tokio::time::sleep(POLL).await;
            }
        };
        run.wakes.encoder_timeout(PATIENCE, noted).await
    }

    /// Copies log entries that this host's mirror lacks from the mirror of host 0; returns whether there were any.
    pub(super) async fn copy_log(&self, memory: &Store) -> Result<bool> {
        let late = || Error::new(ErrorKind::Storage, format!("host 0 does not answer within {PATIENCE:?}"));
        tokio::time::timeout(PATIENCE, Mirror::learn(&self.mirror, memory)).await.map_err(|_| late())?
    }

    /// Whether the parts of this host and of host 0 can become one snapshot; `None` while host 0 has no part of the step.
    pub(super) async fn agrees(&self, mirror: &Mirror, session: SessionName, at: SessionStep) -> Result<Option<bool>> {
        mirror.fits(&self.mirror, session, at).await
    }
}

/// Time between questions to host 0.
const POLL: Duration = Duration::from_millis(50);
/// Time to wait for host 0, which may begin with a step later than other hosts.
const PATIENCE: Duration = Duration::from_secs(10);
