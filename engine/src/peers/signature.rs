//! Signatures with the keys of certificates: a host signs bytes, and any host of the run checks who has signed them.

use rustls::SignatureScheme;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use serde::{Deserialize, Serialize};
use tensorcask::{Error, Result};

use super::tls::{Tls, explain};

/// A signature, and the certificates that say whose it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Signature {
    /// Certificate of the host, and any intermediate ones, in DER.
    certificates: Vec<Vec<u8>>,
    /// Number of the scheme in TLS.
    scheme: u16,
    signature: Vec<u8>,
}

impl Signature {
    /// Signs bytes with the key of this host.
    pub(super) fn make(tls: &Tls, message: &[u8]) -> Result<Self> {
        let identity = tls.identity();
        let fail = |e: &dyn std::fmt::Display| Error::invalid(format!("the key of this host cannot sign: {e}"));
        let signer = identity.key.choose_scheme(&SCHEMES).ok_or_else(|| fail(&"it is of an unknown kind"))?;
        let signature = signer.sign(message).map_err(|e| fail(&e))?;
        let certificates = identity.chain.iter().map(|certificate| certificate.to_vec()).collect();
        Ok(Self { certificates, scheme: signer.scheme().into(), signature })
    }

    /// Checks that a host of this run has signed these bytes; otherwise says why not.
    pub(super) fn check(&self, tls: &Tls, host: u32, message: &[u8]) -> Result<(), String> {
        let (identity, refuse) =
            (tls.identity(), |e: rustls::Error| format!("the certificate of the signature is refused: {}", explain(&e)));
        let certificates: Vec<CertificateDer<'_>> =
            self.certificates.iter().take(MOST_CERTIFICATES).map(|der| der.as_slice().into()).collect();
        let (own, intermediates) = certificates.split_first().ok_or("the signature has no certificate")?;
        identity.verifier.verify_client_cert(own, intermediates, UnixTime::now()).map_err(refuse)?;
        let name = ServerName::try_from(tls.host_name(host)).map_err(|e| e.to_string())?;
        let parsed = ParsedCertificate::try_from(own).map_err(refuse)?;
        verify_server_name(&parsed, &name).map_err(|_| format!("another host than host {host} has signed them"))?;
        let certificate = webpki::EndEntityCert::try_from(own).map_err(|e| e.to_string())?;
        let scheme = SignatureScheme::from(self.scheme);
        let algorithms = identity.provider.signature_verification_algorithms.mapping.iter().find(|(known, _)| *known == scheme);
        let (_, algorithms) = algorithms.filter(|_| SCHEMES.contains(&scheme)).ok_or("the signature is of an unknown kind")?;
        match algorithms.iter().any(|algorithm| certificate.verify_signature(*algorithm, message, &self.signature).is_ok()) {
            true => Ok(()),
            false => Err("the signature is of other bytes".to_owned()),
        }
    }
}

/// Schemes of signatures, the preferred ones first.
const SCHEMES: [SignatureScheme; 6] = [
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ED25519,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
];
const MOST_CERTIFICATES: usize = 8;
