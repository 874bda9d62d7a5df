//! Proofs of receipts: signatures of the host that has saved a step.
//!
//! Checksums do not convict a peer that forges casks *and* the receipts that name them. So a host signs its receipts with the
//! key of its certificate before it publishes them in its mirror, and the signature travels with every copy. Whoever reads
//! receipts from a peer checks that the host with these ranks has signed exactly these bytes. The receipts name the casks by
//! their digests.
//!
//! Why signatures, and not digests that each host tells all others at save time: messages to all others grow with the square
//! of the number of hosts, and a host that replaces a lost one was not there when they were sent. A signature says the same to
//! every host, at any time, with the store down, at the price of one small file per host and step.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error as ObjectError, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as ObjectResult,
};
use tensorcask::session::{MAX_RECEIPT_PROOF_BYTES, ReceiptProof, receipt_proof_path};
use tensorcask::wire::{Digest, RankRange};
use tensorcask::{Error, Limits, Result};

use super::signature::Signature;
use super::tls::Tls;
use super::union::Place;
use crate::run::hosts_option::HostsSpec;

/// Signs the receipts of this host, and checks those of others.
#[derive(Debug)]
pub(super) struct SignedReceipts {
    tls: Arc<Tls>,
    /// Number of the host of each rank.
    hosts: HostsSpec,
}

impl SignedReceipts {
    pub(super) fn new(tls: Arc<Tls>, hosts: HostsSpec) -> Self {
        Self { tls, hosts }
    }

    /// Number of the host with these ranks.
    fn host_of(&self, ranks: RankRange) -> Option<u32> {
        let host = self.hosts.host_of(ranks.first);
        (self.hosts.host_of(ranks.last) == host).then_some(host)
    }
}

/// Signs and checks the receipts of a run; `None` without certificates.
pub(crate) fn signed_receipts(tls: Option<Arc<Tls>>, hosts: &HostsSpec) -> Option<Arc<dyn ReceiptProof>> {
    Some(Arc::new(SignedReceipts::new(tls?, hosts.clone())))
}

impl ReceiptProof for SignedReceipts {
    fn prove(&self, receipts: &[u8]) -> Result<Vec<u8>> {
        let signature = Signature::make(&self.tls, &message(receipts))?;
        serde_json::to_vec(&signature).map_err(|e| Error::invalid(format!("a signature cannot be encoded: {e}")))
    }

    fn check(&self, ranks: RankRange, receipts: &[u8], proof: Option<&[u8]>) -> Result<()> {
        let of_ranks = || format!("the receipts of ranks {} to {}", ranks.first, ranks.last);
        let forged = |why: &str| Error::corrupt(format!("{} are not those that their host has saved: {why}", of_ranks()));
        let Some(host) = self.host_of(ranks) else { return Err(forged("no host has just these ranks")) };
        let proof = proof.ok_or_else(|| forged("the signature of the host is missing"))?;
        let signature: Signature = serde_json::from_slice(proof).map_err(|_| forged("the signature cannot be read"))?;
        signature.check(&self.tls, host, &message(receipts)).map_err(|why| forged(&why))
    }
}

/// The bytes that are signed: a name of their purpose, and the digest of the receipts.
fn message(receipts: &[u8]) -> Vec<u8> {
    [&b"tensorcask receipts\0"[..], &Digest::of(receipts).0].concat()
}

/// A place of a union whose receipts are checked. Receipts that fail count as a failure of the place, so another place answers.
#[derive(Debug)]
pub(crate) struct CheckedPlace {
    inner: Place,
    proof: Arc<dyn ReceiptProof>,
}

impl CheckedPlace {
    pub(crate) fn new(inner: Place, proof: Arc<dyn ReceiptProof>) -> Self {
        Self { inner, proof }
    }

    /// Reads and checks receipts.
    async fn receipts(&self, location: &Path, ranks: RankRange, options: GetOptions) -> ObjectResult<GetResult> {
        let found = self.inner.get_opts(location, GetOptions { range: None, ..options }).await?;
        self.limit(location, found.meta.size, Limits::default().max_manifest_bytes)?;
        let meta = found.meta.clone();
        let attributes = found.attributes.clone();
        let extensions = found.extensions.clone();
        let bytes = found.bytes().await?;
        let proof = match self.inner.get(&Path::from(receipt_proof_path(location.as_ref(), &bytes))).await {
            Ok(proof) => {
                self.limit(location, proof.meta.size, MAX_RECEIPT_PROOF_BYTES)?;
                Some(proof.bytes().await?)
            }
            Err(ObjectError::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        if let Err(error) = self.proof.check(ranks, &bytes, proof.as_deref()) {
            return Err(self.refuse(location, error.message()));
        }
        let range = 0..bytes.len() as u64;
        let payload = GetResultPayload::Stream(Box::pin(futures::stream::once(futures::future::ready(Ok(bytes)))));
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    fn limit(&self, location: &Path, bytes: u64, most: u64) -> ObjectResult<()> {
        if bytes <= most {
            return Ok(());
        }
        Err(self.refuse(location, &format!("{bytes} bytes are more than the limit of {most}")))
    }

    fn refuse(&self, location: &Path, why: &str) -> ObjectError {
        ObjectError::Generic { store: "peer", source: format!("{}, {location}: {why}", self.inner).into() }
    }
}

/// Ranks of the receipts at this path; `None` for another object.
fn ranks_of(location: &Path) -> Option<RankRange> {
    let mut parts = location.parts();
    let (folder, _, _, object, end) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?, parts.next());
    if folder.as_ref() != "receipts" || end.is_some() {
        return None;
    }
    RankRange::from_object(object.as_ref())
}

impl fmt::Display for CheckedPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for CheckedPlace {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> ObjectResult<GetResult> {
        match ranks_of(location) {
            Some(ranks) if !options.head => self.receipts(location, ranks, options).await,
            _ => self.inner.get_opts(location, options).await,
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, ObjectResult<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> ObjectResult<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> ObjectResult<PutResult> {
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(&self, location: &Path, options: PutMultipartOptions) -> ObjectResult<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, ObjectResult<Path>>) -> BoxStream<'static, ObjectResult<Path>> {
        self.inner.delete_stream(locations)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> ObjectResult<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
