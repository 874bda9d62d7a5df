//! The agents of the other hosts of a run, as a rank reads from them.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::stream::{StreamExt, TryStreamExt};
use object_store::{Error as ObjectError, ObjectMeta};
use tensorcask::session::ReceiptProof;
use tensorcask::{Error, ErrorKind, Result};

use super::{CheckedPlace, MEETING, Peer, Place, Placement, ResponseLimits, TOLERATED_LOSSES, Tls, signed_receipts};
use crate::run::spec::RunSpec;

/// The other hosts of a run.
pub(crate) struct OtherHosts {
    /// Number of this host.
    pub own: u32,
    placement: Placement,
    peers: Vec<(u32, Peer)>,
    /// The same peers, for reading what they have listed.
    patient: Vec<(u32, Peer)>,
    /// Check of the receipts of other hosts; `None` without certificates.
    proof: Option<Arc<dyn ReceiptProof>>,
}

/// The objects of a folder of a host.
pub(crate) struct HostFolder {
    pub folder: String,
    pub objects: Vec<ObjectMeta>,
}

impl OtherHosts {
    /// `None` without peers. Sends no request.
    pub(crate) fn open(spec: &RunSpec) -> Result<Option<Self>> {
        let (Some(hosts), Some(peers)) = (&spec.hosts, &spec.peers) else { return Ok(None) };
        let own = hosts.position();
        let placement = Placement::of(peers);
        let tls = Tls::of_run(peers, &spec.key)?;
        let mut others = Vec::new();
        let mut patient = Vec::new();
        for (host, address) in (0u32..).zip(&peers.addresses).filter(|(host, _)| *host != own) {
            others.push((host, Peer::open(address, &spec.key, tls.clone(), ResponseLimits::default())?));
            patient.push((host, Peer::open(address, &spec.key, tls.clone(), ResponseLimits::patient())?));
        }
        Ok(Some(Self { own, placement, peers: others, patient, proof: signed_receipts(tls, hosts) }))
    }

    /// Numbers of the other hosts.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> {
        self.peers.iter().map(|(host, _)| *host)
    }

    fn peer(&self, host: u32) -> Option<&Peer> {
        find(&self.peers, host)
    }

    /// A folder of a host as a place of a union. Receipts must be signed by the hosts that saved them.
    pub(crate) fn place(&self, host: u32, folder: &str) -> Option<Place> {
        let place = find(&self.patient, host)?.place(folder);
        Some(match &self.proof {
            Some(proof) => Arc::new(CheckedPlace::new(place, proof.clone())),
            None => place,
        })
    }

    /// Lists all folders of these hosts, some at once. A host that does not answer has an error.
    pub(crate) async fn list(&self, hosts: Vec<u32>) -> Vec<(u32, Result<Vec<HostFolder>>)> {
        let mut observed = self.placement.observed_by_each(TOLERATED_LOSSES);
        let list = |host| {
            let sources = observed.remove(&host).unwrap_or_default();
            async move { (host, self.list_host(host, sources).await) }
        };
        futures::stream::iter(hosts).map(list).buffer_unordered(AT_ONCE).collect().await
    }

    async fn list_host(&self, host: u32, sources: BTreeSet<u32>) -> Result<Vec<HostFolder>> {
        let peer = self.peer(host).ok_or_else(|| Error::invalid(format!("there is no host {host}")))?;
        peer.answers().await?;
        let replicas = sources.into_iter().map(|source| format!("replica-{source}"));
        let mut found = Vec::new();
        for folder in ["mirror".to_owned(), MEETING.to_owned()].into_iter().chain(replicas) {
            let objects = list(&peer.place(&folder)).await.map_err(|error| error.object(peer.url()))?;
            found.push(HostFolder { folder, objects });
        }
        Ok(found)
    }

    /// Reads a message of a host; `None` if the host has none of this name.
    pub(crate) async fn read_message(&self, host: u32, name: &str) -> Result<Option<bytes::Bytes>> {
        match self.peer(host) {
            Some(peer) => read_message(&peer.place(MEETING), name).await,
            None => Ok(None),
        }
    }

    /// Reads messages of all these hosts, some at once.
    pub(crate) async fn read_messages(&self, wanted: Vec<(u32, String)>) -> Vec<Result<Option<bytes::Bytes>>> {
        let read = |(host, name): (u32, String)| async move { self.read_message(host, &name).await };
        futures::stream::iter(wanted).map(read).buffered(AT_ONCE).collect().await
    }
}

fn find(peers: &[(u32, Peer)], host: u32) -> Option<&Peer> {
    peers.iter().find(|(number, _)| *number == host).map(|(_, peer)| peer)
}

/// Lists a place; a folder that does not exist has no objects.
pub(crate) async fn list(place: &Place) -> Result<Vec<ObjectMeta>> {
    match place.list(None).try_collect().await {
        Ok(found) => Ok(found),
        Err(ObjectError::NotFound { .. }) => Ok(Vec::new()),
        Err(error) => Err(failed(error)),
    }
}

/// Reads a small object of a place; `None` if it does not exist.
pub(crate) async fn read_message(place: &Place, name: &str) -> Result<Option<bytes::Bytes>> {
    let found = match place.get_opts(&object_store::path::Path::from(name), Default::default()).await {
        Ok(found) => found,
        Err(ObjectError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    if found.meta.size > MOST_MESSAGE_BYTES {
        let message = format!("a message between hosts has {} bytes, over the limit of {MOST_MESSAGE_BYTES}", found.meta.size);
        return Err(Error::limit(message).object(name));
    }
    found.bytes().await.map(Some).map_err(failed)
}

fn failed(error: ObjectError) -> Error {
    Error::new(ErrorKind::Storage, error.to_string()).source(error)
}

/// Number of hosts that are asked at once.
const AT_ONCE: usize = 16;
const MOST_MESSAGE_BYTES: u64 = 4 << 20;
