//! The tasks of a run on many hosts: one encodes into the mirror, one uploads from there, one commits or waits for commits, one
//! watches the copies on other hosts, and one for each further tier fills it while this host leads.

use std::sync::Arc;

use tensorcask::{Error, Result};
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::JoinHandle;

use super::copy_watch::copy_watch_loop;
use super::host_commit::host_commit_loop;
use super::host_encode::host_encode_loop;
use super::host_upload::host_upload_loop;
use super::host_work::HostWork;
use super::run::Run;
use super::upload::upload_loop;
use crate::hosts::HostOptions;
use crate::memory::stores::{open_mirror, remove_interrupted_writes};
use crate::os::lock::try_lock_file;
use crate::run::host_notes::HostNotes;
use crate::run::hosts_option::HostsSpec;

/// Starts the tasks of a run on many hosts.
pub(super) fn spawn_host_tasks(run: &Arc<Run>, hosts: HostsSpec) -> Result<Vec<JoinHandle<()>>> {
    let store = run.encoder_store.clone().ok_or_else(|| Error::invalid("the run is not on many hosts"))?;
    let memory = open_mirror(&run.folder)?;
    // A trainer that holds the lock may be writing to the mirror.
    if let Some(_held) = try_lock_file(&run.folder.hosts_lock())? {
        remove_interrupted_writes(&run.folder)?;
    }
    let notes = HostNotes::read(&run.folder, hosts.session);
    let options = HostOptions {
        session: hosts.session,
        after: notes.after,
        position: hosts.position(),
        patience_ms: hosts.patience_ms,
        previous_writer: notes.led_as,
    };
    let (sender, receiver) = unbounded_channel();
    let work = Arc::new(HostWork::new(run.clone(), hosts, options, sender));
    let (encoded, waiting) = unbounded_channel();
    let mut tasks = vec![
        tokio::spawn(host_encode_loop(work.clone(), store, memory.clone(), encoded)),
        tokio::spawn(host_upload_loop(work.clone(), memory.clone(), waiting)),
        tokio::spawn(host_commit_loop(work.clone(), memory.clone(), receiver)),
    ];
    tasks.extend((1..run.tiers.len()).map(|tier| tokio::spawn(upload_loop(run.clone(), tier))));
    if let Some(peers) = run.spec.peers.clone().filter(|peers| peers.replicas > 0) {
        tasks.push(tokio::spawn(copy_watch_loop(work, peers, memory)));
    }
    Ok(tasks)
}
