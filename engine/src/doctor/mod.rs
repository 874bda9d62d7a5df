//! `agent doctor`: looks at everything on a host that an agent needs, and says what to do about what is wrong.
//!
//! | module | has, or looks at |
//! |---|---|
//! | `checks` | options and results |
//! | `local` | the engine's folder, shared memory, limits of the process and of its cgroup |
//! | `network` | certificates, ports, clocks and versions of the peers |

pub(crate) mod cleaning;

mod checks;
mod local;
mod network;

use std::time::Duration;

use tensorcask::Result;

pub use checks::{Check, CheckState, DoctorOptions, DoctorPeers};

use crate::os::folders::EngineFolder;
use crate::os::runtime;
use crate::run::spec::RunSpec;

/// Looks at this host and at its peers. A failed check is no error.
///
/// ```
/// # let scratch = tempfile::tempdir().unwrap();
/// use tensorcask_engine::{DoctorOptions, run_doctor};
/// let folder = Some(scratch.path().join("engine"));
/// let checks = run_doctor(&DoctorOptions { folder, state_bytes: None, peers: None, wait: std::time::Duration::ZERO })?;
/// assert!(checks.iter().any(|check| check.subject == "shared memory"));
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn run_doctor(options: &DoctorOptions) -> Result<Vec<Check>> {
    let mut checks = local::check(options);
    let peers = match &options.peers {
        Some(given) => vec![given.clone()],
        None => peers_of_runs(options),
    };
    let runtime = runtime::build("tensorcask-doctor", 2)?;
    for peers in peers {
        checks.extend(runtime.block_on(network::check(&peers, options)));
    }
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(checks)
}

/// Peers of the runs that an agent has in the folder.
fn peers_of_runs(options: &DoctorOptions) -> Vec<DoctorPeers> {
    let Some(folder) = EngineFolder::find(options.folder.as_deref()) else { return Vec::new() };
    let specs = folder.runs().unwrap_or_default().into_iter().filter_map(|run| RunSpec::read(&run));
    let peers = specs.filter_map(|spec| Some(DoctorPeers { host: spec.hosts?.position(), peers: spec.peers?, run: spec.run }));
    peers.collect()
}
