//! `tensorcask agent doctor`: looks at everything on this host and at its peers that an agent needs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use tensorcask::{Error, Result};
use tensorcask_engine::{Check, CheckState, DoctorOptions, DoctorPeers, PeerTls, Peers, run_doctor};

use crate::output::Outcome;
use crate::parse;
use crate::text::{Text, counted};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Checks the engine's folder, shared memory, the memory limit of the cgroup, `ulimit -n` and `-l`. For a run on many hosts also
certificates (their run, host, key and expiry), ports, and the clocks and versions of the other hosts. Without --peers, takes the
peers of the runs that an agent has here. If no agent runs, the doctor answers other hosts in its place for --wait: so start it on
all hosts at once. Exits with 1 if a check failed; warnings do not count.

Example:
  tensorcask agent doctor --state-bytes 40000000000
  srun --ntasks-per-node=1 tensorcask agent doctor --run s3://bucket/run42 --peers 'node{host}:7411' --tls tls/"
)]
pub(super) struct Args {
    /// Bytes of the states of all ranks on this host
    #[arg(long, value_name = "N")]
    state_bytes: Option<u64>,
    /// Name of the run: the engine's option `run`, or the URL of its store
    #[arg(long, value_name = "NAME", requires = "peers")]
    run: Option<String>,
    /// Addresses of the agents: a list, a pattern with {host}, or file:PATH
    #[arg(long, value_name = "ADDRESSES", requires = "run")]
    peers: Option<String>,
    /// Number of hosts [default: that of a list, else $SLURM_NNODES]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    hosts: Option<u32>,
    /// Number of this host, from 0 [default: $SLURM_NODEID]
    #[arg(long, value_name = "N")]
    host: Option<u32>,
    /// Address on which the agent of this host listens [default: the port of its address, on all interfaces with --tls]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Folder with the certificates, as `agent init-tls` writes it
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,
    /// Time to wait for hosts that do not answer
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse::duration)]
    wait: Duration,
}

#[derive(Debug, Serialize)]
struct Report {
    ok: bool,
    checks: Vec<Check>,
}

pub(super) fn run(args: &Args, folder: Option<&Path>) -> Result<Outcome> {
    let peers = match (&args.run, &args.peers) {
        (Some(run), Some(addresses)) => Some(peers(args, run, addresses)?),
        _ => None,
    };
    let options = DoctorOptions { folder: folder.map(Path::to_owned), state_bytes: args.state_bytes, peers, wait: args.wait };
    let checks = run_doctor(&options)?;
    let mut text = Text::default();
    for Check { subject, state, found, advice } in &checks {
        let state = match state {
            CheckState::Ok => "ok     ",
            CheckState::Warning => "warning",
            CheckState::Failed => "failed ",
        };
        text.line(format!("{state}  {subject}: {found}"));
        if let Some(advice) = advice {
            text.line(format!("         {advice}"));
        }
    }
    let count = |state| checks.iter().filter(|check| check.state == state).count() as u64;
    let failed = count(CheckState::Failed);
    let warnings = count(CheckState::Warning);
    text.line(match (failed, warnings) {
        (0, 0) => "all is well".to_owned(),
        _ => format!("{}, {}", counted(failed, "failure", "failures"), counted(warnings, "warning", "warnings")),
    });
    Ok(Outcome::new(&Report { ok: failed == 0, checks }, text)?.with_code(u8::from(failed > 0)))
}

fn peers(args: &Args, run: &str, addresses: &str) -> Result<DoctorPeers> {
    let missing = |what: &str| Error::invalid(format!("pass --{what}: without Slurm, nothing else tells it"));
    let variable = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u32>().ok());
    let hosts = args.hosts.or_else(|| hosts_of(addresses)).or_else(|| variable("SLURM_NNODES")).ok_or_else(|| missing("hosts"))?;
    let host = args.host.or_else(|| variable("SLURM_NODEID")).ok_or_else(|| missing("host"))?;
    let addresses = Peers::addresses(addresses, hosts)?;
    let port = addresses.get(host as usize).and_then(|own| own.rsplit_once(':')?.1.parse().ok());
    let port = port.ok_or_else(|| Error::invalid(format!("host {host} of {hosts} does not exist; hosts are numbered from 0")))?;
    let interface = if args.tls.is_some() { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST };
    let listen = args.listen.unwrap_or(SocketAddr::new(IpAddr::V4(interface), port));
    let tls = args.tls.as_ref().map(|folder| PeerTls::in_folder(folder, host));
    Ok(DoctorPeers { run: run.to_owned(), host, peers: Peers { tls, ..Peers::new(listen, addresses) } })
}

/// Number of addresses in a list; `None` for a pattern or a file.
fn hosts_of(addresses: &str) -> Option<u32> {
    let is_list = !addresses.contains("{host}") && !addresses.starts_with("file:");
    is_list.then(|| addresses.split(',').filter(|address| !address.trim().is_empty()).count() as u32)
}
