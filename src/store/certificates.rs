//! Certificates that a process trusts, for another process that works for it.
//!
//! The client of HTTP trusts the certificates of the system, or those that `SSL_CERT_FILE` and `SSL_CERT_DIR` name in the process that it
//! runs in. An agent opens the stores of many runs, so it reads what these variables name for each run ([`Environment`]), and trusts
//! that, too.

use std::path::PathBuf;

use object_store::{Certificate, ClientOptions};

use super::Environment;
use super::environment::{CERTIFICATE_FILE, CERTIFICATE_FOLDERS};

/// Certificates of authorities that a run trusts besides those that this process trusts.
#[derive(Debug, Clone, Default)]
pub(super) struct Certificates(Vec<Certificate>);

impl Certificates {
    /// Reads the files that the variables name. Leaves out, with a warning, what cannot be read: another server may need it.
    pub(super) fn of(environment: &Environment) -> Self {
        let mut found = Vec::new();
        // The client of this process reads its own files by itself.
        let other = |name| environment.get(name).filter(|theirs| std::env::var(name).ok().as_deref() != Some(*theirs));
        let file = other(CERTIFICATE_FILE).map(|path| (CERTIFICATE_FILE, PathBuf::from(path), true));
        let folders = other(CERTIFICATE_FOLDERS).into_iter().flat_map(std::env::split_paths).filter(|path| !path.as_os_str().is_empty());
        for (variable, path, is_file) in file.into_iter().chain(folders.map(|path| (CERTIFICATE_FOLDERS, path, false))) {
            let (file, folder) = if is_file { (Some(&*path), None) } else { (None, Some(&*path)) };
            let read = rustls_native_certs::load_certs_from_paths(file, folder);
            for error in read.errors {
                tracing::warn!(variable, path = %path.display(), %error, "certificates cannot be read; servers that need them are refused");
            }
            for certificate in read.certs {
                // With one that cannot be used, the client would trust none.
                let usable = rustls::RootCertStore::empty().add(certificate.clone()).map_err(|e| e.to_string());
                match usable.and_then(|()| Certificate::from_der(&certificate).map_err(|e| e.to_string())) {
                    Ok(certificate) => found.push(certificate),
                    Err(error) => tracing::warn!(variable, path = %path.display(), error, "a certificate cannot be used"),
                }
            }
        }
        Self(found)
    }

    pub(super) fn applied_to(&self, options: ClientOptions) -> ClientOptions {
        self.0.iter().cloned().fold(options, ClientOptions::with_root_certificate)
    }
}
