//! Mutual TLS between the agents of a run: certificates from files, read again when they change.
//!
//! Both sides check that the certificate of the other is signed by the authority of the run, that it is valid now, and that
//! it names the run. The name is that of the run and not of a host, because hosts change their names. Sessions are not
//! resumed: a resumed session would skip these checks.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::client::{Resumption, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::SigningKey;
use rustls::{AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig};
use rustls::{SignatureScheme, version};
use tensorcask::{Error, Result};

use crate::run::peers_option::{PeerTls, Peers};

/// Certificates of this host, and what the other side must show.
#[derive(Debug)]
pub(crate) struct Tls {
    files: PeerTls,
    key: String,
    name: ServerName<'static>,
    loaded: Mutex<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    /// Files that are in use.
    stamps: Option<[Stamp; 3]>,
    configs: Configs,
    /// Changed files that could not be used, and when they were read.
    failed: Option<(Option<[Stamp; 3]>, Instant)>,
}

#[derive(Debug, Clone)]
struct Configs {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    identity: Identity,
}

/// Key and certificates that a host signs with, and the verifier of the certificates of others.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    pub chain: Vec<CertificateDer<'static>>,
    pub key: Arc<dyn SigningKey>,
    pub verifier: Arc<dyn ClientCertVerifier>,
    pub provider: Arc<CryptoProvider>,
}

/// Identity of a file's content.
type Stamp = (u64, u64, i64, i64);

/// Time after which changed files that could not be used are read again.
const READ_AGAIN: Duration = Duration::from_secs(5);

/// Name in the certificates of a run.
pub(super) fn certificate_name(run_key: &str) -> String {
    format!("{run_key}.tensorcask")
}

/// Name in the certificate of one host of a run.
pub(super) fn host_certificate_name(run_key: &str, host: u32) -> String {
    format!("host-{host}.{}", certificate_name(run_key))
}

impl Tls {
    /// Reads the files, and checks that the certificate is one of this run.
    pub(crate) fn open(files: &PeerTls, run_key: &str) -> Result<Self> {
        let name = ServerName::try_from(certificate_name(run_key));
        let name = name.map_err(|e| Error::invalid(format!("the key of the run is no name for a certificate: {e}")))?;
        let stamps = stamps(files);
        let configs = Configs::read(files, &name, OwnCheck::Required(UnixTime::now()))?;
        Ok(Self { files: files.clone(), key: run_key.to_owned(), name, loaded: Mutex::new(Loaded { stamps, configs, failed: None }) })
    }

    /// The certificates of this host in a run; `None` if the run has none.
    pub(crate) fn of_run(peers: &Peers, run_key: &str) -> Result<Option<Arc<Self>>> {
        peers.tls.as_ref().map(|files| Self::open(files, run_key).map(Arc::new)).transpose()
    }

    /// A host whose clock is wrong, so that it takes its expired certificate for a valid one.
    #[cfg(test)]
    pub(super) fn open_unchecked(files: &PeerTls, run_key: &str) -> Self {
        let name = ServerName::try_from(certificate_name(run_key)).unwrap();
        let configs = Configs::read(files, &name, OwnCheck::Skipped).unwrap();
        Self {
            files: files.clone(),
            key: run_key.to_owned(),
            name,
            loaded: Mutex::new(Loaded { stamps: stamps(files), configs, failed: None }),
        }
    }

    pub(super) fn name(&self) -> ServerName<'static> {
        self.name.clone()
    }

    /// Name in the certificate of a host.
    pub(super) fn host_name(&self, host: u32) -> String {
        host_certificate_name(&self.key, host)
    }

    /// Whether the certificate of this host names this host.
    pub(crate) fn names_host(&self, host: u32) -> bool {
        let identity = self.identity();
        let name = ServerName::try_from(self.host_name(host));
        let parsed = identity.chain.first().map(ParsedCertificate::try_from);
        matches!((parsed, name), (Some(Ok(parsed)), Ok(name)) if verify_server_name(&parsed, &name).is_ok())
    }

    /// Whether the certificate of this host will be valid after some time.
    pub(crate) fn is_valid_in(&self, time: Duration) -> bool {
        let identity = self.identity();
        let then = UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs()).saturating_add(time));
        let own = identity.chain.split_first();
        own.is_some_and(|(own, intermediates)| identity.verifier.verify_client_cert(own, intermediates, then).is_ok())
    }

    /// Key, certificates and verifier of this host, as the files have them now.
    pub(super) fn identity(&self) -> Identity {
        self.current(Instant::now(), UnixTime::now()).identity
    }

    /// Configuration for a connection from a peer.
    pub(super) fn server(&self) -> Arc<ServerConfig> {
        self.current(Instant::now(), UnixTime::now()).server
    }

    /// Configuration for a connection to a peer.
    pub(super) fn client(&self) -> Arc<ClientConfig> {
        self.current(Instant::now(), UnixTime::now()).client
    }

    /// Reads the files again if they have changed. Keeps the previous ones while the new ones cannot be used, for example
    /// because only one of them was written so far, or because they are not valid yet: then tries again from time to time.
    fn current(&self, now: Instant, time: UnixTime) -> Configs {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let stamps = stamps(&self.files);
        let has_just_failed = loaded.failed.is_some_and(|(failed, at)| failed == stamps && now.saturating_duration_since(at) < READ_AGAIN);
        if stamps == loaded.stamps || has_just_failed {
            return loaded.configs.clone();
        }
        match Configs::read(&self.files, &self.name, OwnCheck::Required(time)) {
            Ok(configs) => {
                (loaded.configs, loaded.stamps, loaded.failed) = (configs, stamps, None);
                tracing::info!(certificate = %self.files.certificate.display(), "certificates were renewed");
            }
            Err(error) => {
                tracing::warn!(%error, "changed certificates cannot be used; the previous ones stay in use");
                loaded.failed = Some((stamps, now));
            }
        }
        loaded.configs.clone()
    }
}

/// Whether a host checks its own certificate as its peers will.
#[derive(Debug, Clone, Copy)]
enum OwnCheck {
    Required(UnixTime),
    #[cfg(test)]
    Skipped,
}

impl Configs {
    fn read(files: &PeerTls, name: &ServerName<'static>, own_check: OwnCheck) -> Result<Self> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        for root in certificates(&files.ca)? {
            roots.add(root).map_err(|e| unusable(&files.ca, &e))?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(&files.certificate)?;
        let key = || PrivateKeyDer::from_pem_file(&files.key).map_err(|e| unreadable(&files.key, &e));
        let clients = RunVerifier::new(roots.clone(), &provider, name).map_err(|e| unusable(&files.ca, &e))?;
        let Some((own, intermediates)) = chain.split_first() else { return Err(no_certificate(&files.certificate)) };
        // The clock decides whether a certificate is valid, here as at the other side.
        let checked = match own_check {
            OwnCheck::Required(time) => clients.verify_client_cert(own, intermediates, time).map(|_| ()),
            #[cfg(test)]
            OwnCheck::Skipped => Ok(()),
        };
        checked.map_err(|e| {
            Error::invalid(format!("the certificate of this host cannot be used: {}", explain(&e))).object(display(&files.certificate))
        })?;
        let clients: Arc<dyn ClientCertVerifier> = Arc::new(clients);
        let signing = provider.key_provider.load_private_key(key()?).map_err(|e| unusable(&files.key, &e))?;
        let identity = Identity { chain: chain.clone(), key: signing, verifier: clients.clone(), provider: provider.clone() };
        let versions = [&version::TLS13];
        let fail = |e: rustls::Error| unusable(&files.certificate, &e);
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&versions)
            .map_err(fail)?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain.clone(), key()?)
            .map_err(fail)?;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let servers = WebPkiServerVerifier::builder_with_provider(roots, provider.clone()).build().map_err(|e| unusable(&files.ca, &e))?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(fail)?
            .with_webpki_verifier(servers)
            .with_client_auth_cert(chain, key()?)
            .map_err(fail)?;
        client.resumption = Resumption::disabled();
        Ok(Self { server: Arc::new(server), client: Arc::new(client), identity })
    }
}

/// Checks the certificate of a client: its authority, its time, and the name of the run. The checks of `webpki` for clients
/// look at no name.
#[derive(Debug)]
struct RunVerifier {
    authority: Arc<dyn ClientCertVerifier>,
    name: ServerName<'static>,
}

impl RunVerifier {
    fn new(
        roots: Arc<RootCertStore>,
        provider: &Arc<CryptoProvider>,
        name: &ServerName<'static>,
    ) -> Result<Self, rustls::server::VerifierBuilderError> {
        let authority = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build()?;
        Ok(Self { authority, name: name.clone() })
    }
}

impl ClientCertVerifier for RunVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.authority.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.authority.verify_client_cert(certificate, intermediates, now)?;
        verify_server_name(&ParsedCertificate::try_from(certificate)?, &self.name)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        self.authority.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        self.authority.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authority.supported_verify_schemes()
    }
}

/// Says why a connection was refused, in words for the user.
pub(super) fn explain(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(reason) => match reason {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "it has expired; renew it with `tensorcask agent init-tls`".to_owned()
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "it is not valid yet; compare the clocks of the hosts".to_owned()
            }
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "it is signed by another authority than that of this run".to_owned()
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => "it is of another run".to_owned(),
            other => format!("{other}"),
        },
        rustls::Error::NoCertificatesPresented => "it is missing".to_owned(),
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateRequired => "the peer asks for a certificate, and this host has none".to_owned(),
            AlertDescription::CertificateExpired => {
                "the peer refuses the certificate of this host: it has expired; renew it with `tensorcask agent init-tls`".to_owned()
            }
            AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                "the peer refuses the certificate of this host: it is signed by another authority than that of the peer's run".to_owned()
            }
            AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
                "the peer refuses the certificate of this host: it is of another run".to_owned()
            }
            other => format!("the peer refuses the connection: {other:?}"),
        },
        other => other.to_string(),
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).map_err(|e| unreadable(path, &e))?;
    let found = read.collect::<Result<Vec<_>, _>>().map_err(|e| unreadable(path, &e))?;
    if found.is_empty() { Err(no_certificate(path)) } else { Ok(found) }
}

fn no_certificate(path: &Path) -> Error {
    Error::invalid("the file has no certificate").object(display(path))
}

fn unreadable(path: &Path, error: &rustls::pki_types::pem::Error) -> Error {
    Error::invalid(format!("a certificate or key in PEM cannot be read: {error}")).object(display(path))
}

fn unusable(path: &Path, error: &dyn std::error::Error) -> Error {
    Error::invalid(format!("the certificate or its key cannot be used: {error}")).object(display(path))
}

fn display(path: &Path) -> String {
    path.display().to_string()
}

/// Stamps of the three files; `None` while one is missing.
fn stamps(files: &PeerTls) -> Option<[Stamp; 3]> {
    let stamp = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.ino(), found.size(), found.mtime(), found.mtime_nsec()));
    Some([stamp(&files.ca)?, stamp(&files.certificate)?, stamp(&files.key)?])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant, SystemTime};

    use rustls::pki_types::UnixTime;

    use super::{READ_AGAIN, Tls};
    use crate::peers::certificates::tests::{certificates, valid_from};
    use crate::run::spec::run_key;

    #[test]
    fn renewed_certificates_are_tried_until_they_are_valid() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("tls");
        let tls = Tls::open(&certificates(&folder, "run").hosts[0], &run_key("run")).unwrap();
        let begun = Instant::now();
        let seconds = UnixTime::now().as_secs();
        let current = |after: u64| {
            let after = Duration::from_secs(after);
            tls.current(begun + after, UnixTime::since_unix_epoch(Duration::from_secs(seconds) + after)).server
        };
        let first = current(0);
        // This host's clock is an hour behind that of the host that made the certificates.
        valid_from(&folder, "run", SystemTime::now() + Duration::from_secs(3600));
        for after in [1, 2, 1000, 1000 + READ_AGAIN.as_secs()] {
            assert!(Arc::ptr_eq(&first, &current(after)), "the previous ones stay");
        }
        let second = current(3700);
        assert!(!Arc::ptr_eq(&first, &second), "the same files are read again");
        assert!(Arc::ptr_eq(&second, &current(8000)), "and not again once they are in use");
    }
}
