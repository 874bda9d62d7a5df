//! Checks of the peers: certificates, ports, clocks and versions.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tensorcask::Bandwidth;
use tokio::time::Instant;

use super::checks::{Check, DoctorOptions, DoctorPeers};
use crate::os::folders::EngineFolder;
use crate::peers::{PeerServer, ResponseLimits, Tls, probe_peer};

pub(super) async fn check(peers: &DoctorPeers, options: &DoctorOptions) -> Vec<Check> {
    let mut checks = Vec::new();
    if peers.host as usize >= peers.peers.addresses.len() {
        let found = format!("host {} of {} does not exist", peers.host, peers.peers.addresses.len());
        return vec![Check::failed("peers", found, "hosts are numbered from 0, one address each")];
    }
    let (tls, certificate) = check_certificates(peers);
    checks.extend(certificate);
    let tls = match (tls, peers.peers.tls.is_some()) {
        (None, true) => return checks,
        (tls, _) => tls,
    };
    let (serving, listening) = listen(peers, options, tls.clone()).await;
    checks.push(listening);
    let until = Instant::now() + options.wait;
    let others = (0u32..).zip(&peers.peers.addresses).filter(|(host, _)| *host != peers.host);
    let looks = others.map(|(host, address)| check_peer(host, address, peers, tls.clone(), until));
    checks.extend(futures::future::join_all(looks).await);
    if let Some(serving) = serving {
        // Other hosts may still look at this one.
        tokio::time::sleep_until(until).await;
        serving.abort();
    }
    checks
}

/// Checks the certificates of this host; returns them if they can be used.
fn check_certificates(peers: &DoctorPeers) -> (Option<Arc<Tls>>, Vec<Check>) {
    let Some(files) = &peers.peers.tls else {
        return match peers.peers.listen.ip().is_loopback() {
            true => (None, vec![Check::ok("certificates", "none: this machine only")]),
            false => {
                let found = format!("none, and {} can be reached from other machines", peers.peers.listen);
                (None, vec![Check::failed("certificates", found, "make them with `tensorcask agent init-tls`")])
            }
        };
    };
    let tls = match Tls::open(files, &peers.key()) {
        Ok(tls) => Arc::new(tls),
        Err(error) => {
            let advice = format!(
                "make or renew them with `tensorcask agent init-tls DIR --run '{}' --hosts {}`, and copy ca.pem, host-{host}.pem and \
                 host-{host}-key.pem here",
                peers.run,
                peers.peers.addresses.len(),
                host = peers.host
            );
            return (None, vec![Check::failed("certificates", error.to_string(), advice)]);
        }
    };
    let name = files.certificate.display();
    let renew = "run `tensorcask agent init-tls` again, and copy the files to the hosts: agents read them without a restart";
    let check = match EXPIRY_DAYS.iter().find(|days| !tls.is_valid_in(Duration::from_secs(*days * 24 * 3600))) {
        Some(days) => Check::warning("certificates", format!("{name} is valid for this run, and expires within {days} days"), renew),
        None => Check::ok("certificates", format!("{name} is valid for this run, and its key matches")),
    };
    let mut checks = vec![check];
    if !tls.names_host(peers.host) {
        let found = format!("{name} does not name host {}", peers.host);
        checks.push(Check::failed(
            "certificates",
            found,
            "give each host its own files: the number of the host is part of the certificate",
        ));
    }
    (Some(tls), checks)
}

/// Serves other hosts in the place of an agent, if none does.
async fn listen(peers: &DoctorPeers, options: &DoctorOptions, tls: Option<Arc<Tls>>) -> (Option<tokio::task::JoinHandle<()>>, Check) {
    let listen = peers.peers.listen;
    let key = peers.key();
    let root = match EngineFolder::open(options.folder.as_deref()) {
        Ok(folder) => folder.run(&key).root().to_owned(),
        Err(error) => return (None, Check::failed("port", error.to_string(), "see the folder")),
    };
    match PeerServer::bind(listen, root, &key, tls.clone(), Bandwidth::default(), 0).await {
        Ok(server) => {
            let found = format!("{listen} is free; no agent of this run listens there");
            (Some(tokio::spawn(server.serve())), Check::ok("port", found))
        }
        Err(error) => {
            let local = match listen.ip().is_unspecified() {
                true => format!("127.0.0.1:{}", listen.port()),
                false => listen.to_string(),
            };
            match probe_peer(&local, &key, tls, ResponseLimits::default()).await {
                Ok(_) => (None, Check::ok("port", format!("an agent of this run listens on {listen}"))),
                Err(answer) => {
                    let found = format!("{error}, and what listens there is no agent of this run: {answer}");
                    (None, Check::failed("port", found, "end that process, or choose another port for the agents of this run"))
                }
            }
        }
    }
}

/// Waits until a peer answers, and compares clock and version.
async fn check_peer(host: u32, address: &str, peers: &DoctorPeers, tls: Option<Arc<Tls>>, until: Instant) -> Check {
    let subject = format!("peer {host}");
    let key = peers.key();
    let facts = loop {
        match probe_peer(address, &key, tls.clone(), ResponseLimits::default()).await {
            Ok(facts) => break facts,
            Err(error) if Instant::now() >= until => {
                let advice = "check that an agent or the doctor runs there, that the port is open in firewalls and network policies, that the \
                              name resolves (`getent hosts NAME`), and that both hosts have certificates of one authority";
                return Check::failed(subject, error.to_string(), advice);
            }
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    };
    let Some(theirs) = facts.date else {
        return Check::warning(subject, format!("{address} answers, and does not tell its time"), "compare the clocks by hand");
    };
    // The header has whole seconds, and the answer was under way.
    let ours = SystemTime::now();
    let difference = ours.duration_since(theirs).or_else(|_| theirs.duration_since(ours)).unwrap_or_default();
    let difference = difference.saturating_sub(facts.round_trip).saturating_sub(Duration::from_secs(1));
    match difference > MOST_SKEW {
        true => {
            let found = format!("{address} answers; its clock differs from ours by {} s", difference.as_secs());
            Check::warning(
                subject,
                found,
                "run an NTP service (chrony) on all hosts: certificates and the order of histories need the same time",
            )
        }
        false => Check::ok(subject, format!("{address} answers within {} ms, with the same time", facts.round_trip.as_millis())),
    }
}

/// Days before the end of a certificate at which to warn, soonest first.
const EXPIRY_DAYS: [u64; 3] = [1, 7, 14];
const MOST_SKEW: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(300);
