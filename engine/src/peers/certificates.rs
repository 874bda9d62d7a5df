//! Makes the certificates of a run: an authority, and one certificate per host that names the run.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PublicKeyData,
};
use tensorcask::wire::Digest;
use tensorcask::{Error, Result};

use super::tls::{certificate_name, host_certificate_name};
use crate::run::peers_option::PeerTls;
use crate::run::spec::run_key;

/// Options of [`init_tls`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InitTls {
    /// Name of the run: [`EngineOptions::run`](crate::EngineOptions::run), or the URL of its store.
    pub run: String,
    /// Number of hosts.
    pub hosts: u32,
    /// Time for which the certificates are valid, from now on.
    pub valid: Duration,
}

/// Files that [`init_tls`] wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// Private key of the authority. No host needs it; keep it where certificates are renewed.
    pub ca_key: PathBuf,
    /// Files of each host, by host number.
    pub hosts: Vec<PeerTls>,
}

/// Makes an authority for a run, and a certificate and a private key for each of its hosts, in a folder. If the folder has the
/// authority already, renews all certificates under the same authority: agents that have the old files go on talking to
/// agents that have the new ones.
///
/// ```
/// # let scratch = tempfile::tempdir().unwrap();
/// use std::time::Duration;
/// use tensorcask_engine::{InitTls, init_tls};
/// let folder = scratch.path().join("tls");
/// let options = InitTls { run: "run42".into(), hosts: 2, valid: Duration::from_secs(90 * 24 * 3600) };
/// let made = init_tls(&folder, &options)?;
/// assert!(made.hosts[1].certificate.ends_with("tls/host-1.pem") && made.hosts[1].key.exists());
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn init_tls(folder: &Path, options: &InitTls) -> Result<CertificateFiles> {
    let now = SystemTime::now();
    let end = now.checked_add(options.valid).ok_or_else(|| Error::invalid("the certificates would never expire"))?;
    // Clocks of hosts may differ a little.
    issue(folder, options, now.checked_sub(CLOCK_SKEW).unwrap_or(now), end)
}

fn issue(folder: &Path, options: &InitTls, begin: SystemTime, end: SystemTime) -> Result<CertificateFiles> {
    if options.hosts == 0 || options.run.is_empty() {
        return Err(Error::invalid("certificates are for a run with a name and one host or more"));
    }
    let created = std::fs::DirBuilder::new().mode(0o700).recursive(true).create(folder);
    created.map_err(|e| Error::io(folder.display().to_string(), e))?;
    check_run(&folder.join("run"), &options.run)?;
    let ca_key = folder.join("ca-key.pem");
    let authority_key = match std::fs::read_to_string(&ca_key) {
        Ok(pem) => KeyPair::from_pem(&pem).map_err(|e| failed(&ca_key, &e))?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let made = KeyPair::generate().map_err(|e| failed(&ca_key, &e))?;
            replace(&ca_key, made.serialize_pem().as_bytes())?;
            made
        }
        Err(e) => return Err(Error::io(ca_key.display().to_string(), e)),
    };
    let mut authority = CertificateParams::default();
    // Authorities with different keys have different names, so that a foreign certificate is recognised as such.
    let fingerprint = Digest::of(&authority_key.subject_public_key_info()).to_hex();
    authority.distinguished_name = named(&format!("tensorcask authority {}", fingerprint.get(..16).unwrap_or_default()));
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    (authority.not_before, authority.not_after) = (begin.into(), end.into());
    let ca = folder.join("ca.pem");
    let signed = authority.self_signed(&authority_key).map_err(|e| failed(&ca, &e))?;
    let issuer = Issuer::new(authority, authority_key);
    let mut hosts = Vec::new();
    for host in 0..options.hosts {
        let files = PeerTls::in_folder(folder, host);
        let key = run_key(&options.run);
        let names = vec![certificate_name(&key), host_certificate_name(&key, host)];
        let mut params = CertificateParams::new(names).map_err(|e| failed(&files.certificate, &e))?;
        params.distinguished_name = named(&format!("tensorcask host {host}"));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = (begin.into(), end.into());
        let key = KeyPair::generate().map_err(|e| failed(&files.key, &e))?;
        let certificate = params.signed_by(&key, &issuer).map_err(|e| failed(&files.certificate, &e))?;
        replace(&files.key, key.serialize_pem().as_bytes())?;
        replace(&files.certificate, certificate.pem().as_bytes())?;
        hosts.push(files);
    }
    replace(&ca, signed.pem().as_bytes())?;
    Ok(CertificateFiles { ca_key, hosts })
}

/// Notes the run in the folder, or compares it with the note.
fn check_run(note: &Path, run: &str) -> Result<()> {
    match std::fs::read_to_string(note) {
        Ok(found) if found == run => Ok(()),
        Ok(found) => {
            let message = format!(
                "the folder has the certificates of run `{}`; take another folder for run `{}`",
                found.escape_debug(),
                run.escape_debug()
            );
            Err(Error::invalid(message).object(note.display().to_string()))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => replace(note, run.as_bytes()),
        Err(e) => Err(Error::io(note.display().to_string(), e)),
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

/// Replaces a file that only this user may read.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let fail = |e: std::io::Error| Error::io(path.display().to_string(), e);
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new).map_err(fail)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(fail)?;
    std::fs::rename(&new, path).map_err(fail)
}

fn failed(path: &Path, error: &rcgen::Error) -> Error {
    Error::invalid(format!("the certificate or key cannot be made: {error}")).object(path.display().to_string())
}

const CLOCK_SKEW: Duration = Duration::from_secs(3600);

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::time::{Duration, SystemTime};

    use super::{CertificateFiles, InitTls, init_tls, issue};

    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// Certificates of a run, for two hosts.
    pub(in crate::peers) fn certificates(folder: &Path, run: &str) -> CertificateFiles {
        init_tls(folder, &InitTls { run: run.to_owned(), hosts: 2, valid: DAY }).unwrap()
    }

    /// Certificates under the authority of the folder, if it has one, that expired a day ago.
    pub(in crate::peers) fn expired(folder: &Path, run: &str) -> CertificateFiles {
        let options = InitTls { run: run.to_owned(), hosts: 2, valid: DAY };
        issue(folder, &options, SystemTime::now() - 2 * DAY, SystemTime::now() - DAY).unwrap()
    }

    /// Certificates that are valid from this time on, for a day.
    pub(in crate::peers) fn valid_from(folder: &Path, run: &str, begin: SystemTime) -> CertificateFiles {
        issue(folder, &InitTls { run: run.to_owned(), hosts: 2, valid: DAY }, begin, begin + DAY).unwrap()
    }

    #[test]
    fn keys_are_private_and_a_folder_is_for_one_run() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("a/tls");
        let made = certificates(&folder, "run");
        for path in [&made.ca_key, &made.hosts[0].key, &made.hosts[1].key] {
            assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600, "{path:?}");
        }
        let key = std::fs::read(&made.ca_key).unwrap();
        certificates(&folder, "run");
        assert_eq!(std::fs::read(&made.ca_key).unwrap(), key, "the authority stays");
        let other = init_tls(&folder, &InitTls { run: "other".into(), hosts: 2, valid: DAY }).unwrap_err();
        assert!(other.to_string().contains("another folder"), "{other}");
        assert!(init_tls(&folder, &InitTls { run: "run".into(), hosts: 0, valid: DAY }).is_err());
    }
}
