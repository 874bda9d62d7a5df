//! `tensorcask agent`: runs the background process of the engine, or shows its status.

mod doctor;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use tensorcask::Result;
use tensorcask_engine::{
    AgentOptions, AgentStatus, Cleaning, Ended, HostsStatus, InitTls, LevelStatus, RunStatus, agent_metrics, agent_status, clean_runs,
    init_tls, run_agent, stop_agent,
};

use crate::output::Outcome;
use crate::parse;
use crate::text::{Text, human_bytes};

#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "The agent encodes, replicates and uploads the states that trainers put into shared memory. A trainer that uses the engine
starts an agent automatically. An agent that you start yourself continues with the states in shared memory.

The agent ends on SIGTERM, SIGINT or `agent stop`, after it has encoded and uploaded the waiting states. A second signal
ends it at once; the waiting states stay in shared memory for the next agent. Prometheus reads metrics from the socket:
  curl --unix-socket /dev/shm/tensorcask-$UID/agent.sock http://agent/metrics

Example:
  tensorcask agent --idle-exit 1h
  tensorcask agent status --watch"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Option<AgentVerb>,
    /// Folder of the engine in shared memory [default: $TENSORCASK_ENGINE_DIR, else /dev/shm/tensorcask-UID]
    #[arg(long, value_name = "DIR", global = true)]
    folder: Option<PathBuf>,
    /// Exit after this time without a trainer and without work, such as 15m; 0 means never
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse::duration)]
    idle_exit: Duration,
    /// Treat work without progress for this time as no work, such as uploads to a store that is gone; its states stay in shared memory
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse::duration)]
    abandon_after: Duration,
    /// After a signal to end, continue waiting work for at most this time
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse::duration)]
    drain: Duration,
    /// Nice value, 0 to 19; a higher value leaves more CPU time to the trainer
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(i32).range(0..20))]
    nice: i32,
    /// Detach from the session of the parent process
    #[arg(long)]
    detach: bool,
}

#[derive(Debug, clap::Subcommand)]
enum AgentVerb {
    /// Show the status of runs, saves and tiers
    Status(Status),
    /// Make the agent finish the waiting states and exit
    Stop,
    /// Print the Prometheus metrics
    Metrics,
    /// Check this host and its peers for everything that an agent needs
    Doctor(doctor::Args),
    /// Show the runs in shared memory that no process trains, and remove them with --apply
    Clean(CleanArgs),
    /// Make the certificates of a run on many hosts, or renew them
    InitTls(InitTlsArgs),
}

#[derive(Debug, clap::Args)]
struct CleanArgs {
    /// Name of the run: the engine's option `run`, or the URL of its store [default: all runs without a change for a day]
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// Remove the memory. Saves that the store does not have are lost
    #[arg(long)]
    apply: bool,
}

#[derive(Debug, clap::Args)]
struct InitTlsArgs {
    /// Folder for the certificates and keys; created if it is missing
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Name of the run: the engine's option `run`, or the URL of its store
    #[arg(long, value_name = "NAME")]
    run: String,
    /// Number of hosts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    hosts: u32,
    /// Days for which the certificates are valid
    #[arg(long, value_name = "N", default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..36500))]
    days: u32,
}

#[derive(Debug, clap::Args)]
struct Status {
    /// Refresh every second until the agent exits
    #[arg(long)]
    watch: bool,
}

pub(crate) fn run(args: &Args, json: bool) -> Result<Outcome> {
    let folder = args.folder.as_deref();
    match &args.verb {
        None => serve(args),
        Some(AgentVerb::Status(Status { watch: false })) => show(&agent_status(folder)?),
        Some(AgentVerb::Status(Status { watch: true })) => loop {
            let shown = show(&agent_status(folder)?)?;
            if shown.print(json) != 0 {
                return Ok(shown);
            }
            std::thread::sleep(Duration::from_secs(1));
        },
        Some(AgentVerb::Stop) => {
            let status = stop_agent(folder)?;
            let mut text = Text::default();
            text.line(format!("agent {} finishes the waiting states and exits", status.pid));
            Outcome::new(&status, text)
        }
        Some(AgentVerb::Doctor(args)) => doctor::run(args, folder),
        Some(AgentVerb::InitTls(init)) => make_certificates(init),
        Some(AgentVerb::Clean(clean)) => clean_up(clean, folder),
        Some(AgentVerb::Metrics) => {
            let metrics = agent_metrics(folder)?;
            let mut text = Text::default();
            metrics.lines().for_each(|line| text.line(line));
            Outcome::new(&serde_json::json!({ "metrics": metrics }), text)
        }
    }
}

#[derive(Debug, Serialize)]
struct EndReport {
    ended: &'static str,
    waiting: u64,
}

fn serve(args: &Args) -> Result<Outcome> {
    let options = AgentOptions {
        folder: args.folder.clone(),
        idle_exit: Some(args.idle_exit).filter(|idle| !idle.is_zero()),
        abandon_after: args.abandon_after,
        drain: args.drain,
        nice: args.nice,
        detach: args.detach,
    };
    let (ended, waiting, line) = match run_agent(&options)? {
        Ended::AnotherRuns => ("another_runs", 0, "another agent is running".to_owned()),
        Ended::Drained => ("drained", 0, "no state is waiting".to_owned()),
        Ended::Waiting(waiting) => ("waiting", waiting, format!("{waiting} states wait in shared memory for the next agent")),
    };
    let mut text = Text::default();
    text.line(line);
    Outcome::new(&EndReport { ended, waiting }, text)
}

fn make_certificates(args: &InitTlsArgs) -> Result<Outcome> {
    let valid = Duration::from_secs(u64::from(args.days) * 24 * 3600);
    let made = init_tls(&args.dir, &InitTls { run: args.run.clone(), hosts: args.hosts, valid })?;
    let mut text = Text::default();
    text.line(format!("certificates of {} hosts are in {}, valid for {} days", made.hosts.len(), args.dir.display(), args.days));
    text.line("Copy ca.pem, host-N.pem and host-N-key.pem to host N. Keep ca-key.pem where you renew them.");
    let hosts: Vec<_> = made.hosts.iter().map(|host| serde_json::json!({ "certificate": host.certificate, "key": host.key })).collect();
    let ca = made.ca_key.with_file_name("ca.pem");
    Outcome::new(&serde_json::json!({ "ca": ca, "ca_key": made.ca_key, "hosts": hosts }), text)
}

fn clean_up(args: &CleanArgs, folder: Option<&Path>) -> Result<Outcome> {
    let found = clean_runs(folder, args.run.as_deref(), if args.apply { Cleaning::Apply } else { Cleaning::Show })?;
    let mut text = Text::default();
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|run| vec![run.run.clone(), human_bytes(run.bytes), human_seconds(run.seconds_since_change), run.result.describe().to_owned()])
        .collect();
    match rows.is_empty() {
        true => text.line("no run is in shared memory"),
        false => text.table(&["run", ">memory", ">unchanged for", "result"], &rows),
    }
    let runs: Vec<_> = found
        .iter()
        .map(|run| {
            serde_json::json!({
                "run": run.run, "bytes": run.bytes, "seconds_since_change": run.seconds_since_change, "result": run.result.name(),
            })
        })
        .collect();
    Outcome::new(&serde_json::json!({ "runs": runs }), text)
}

fn show(status: &AgentStatus) -> Result<Outcome> {
    let mut text = Text::default();
    text.line(format!(
        "agent {}, up {}, {} of host memory, {} of them its own{}",
        status.pid,
        human_seconds(status.uptime_s),
        human_bytes(status.host_memory_bytes()),
        human_bytes(status.private_bytes),
        if status.draining { ", ending" } else { "" }
    ));
    status.runs.iter().for_each(|run| describe(run, &mut text));
    Outcome::new(status, text)
}

/// The newest step of each level.
fn levels(levels: &LevelStatus) -> String {
    let level = |name: &str, step: Option<u64>| format!("{name} {}", step.map_or_else(|| "none".to_owned(), |step| step.to_string()));
    let replicated = levels.replicated.map(|step| level("replicated", Some(step)));
    let other = [level("copied", levels.copied), level("encoded", levels.encoded)].into_iter().chain(replicated);
    other.chain([level("durable", levels.durable)]).collect::<Vec<_>>().join(", ")
}

fn describe_hosts(hosts: &HostsStatus) -> String {
    let last = hosts.first_rank.saturating_add(hosts.ranks).saturating_sub(1);
    let leader = match &hosts.leader {
        _ if hosts.is_without_store => "began from memory, because the store does not answer; nothing is committed".to_owned(),
        None => "not begun".to_owned(),
        Some(leader) => {
            let place = if leader.is_this_host { "this host" } else { "another host" };
            format!("{place} leads, term {}, attempt {}, writer {}", leader.term, leader.attempt, leader.writer)
        }
    };
    format!("ranks {} to {last} here, session {}: {leader}", hosts.first_rank, hosts.session)
}

fn describe(run: &RunStatus, text: &mut Text) {
    text.line("");
    text.line(format!("run {}", run.run));
    let list = |steps: &[u64]| steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let commit = match (run.last_commit_step, run.seconds_since_commit) {
        (Some(step), Some(seconds)) => format!("step {step}, {} ago", human_seconds(seconds)),
        _ => "none by this agent".to_owned(),
    };
    let memory = format!(
        "{} of {}, steps {}, chain of {}",
        human_bytes(run.memory_bytes),
        human_bytes(run.memory_cap_bytes),
        if run.memory_steps.is_empty() { "none".to_owned() } else { list(&run.memory_steps) },
        run.chain_depth
    );
    let mut fields = vec![
        ("last commit", commit),
        ("queue", run.queue_depth.to_string()),
        ("failed saves", run.failed_saves.to_string()),
        ("memory", memory),
        ("newest step", levels(&run.levels)),
    ];
    fields.extend(run.hosts.iter().map(|hosts| ("hosts", describe_hosts(hosts))));
    fields.extend(run.problem.iter().map(|problem| ("problem", problem.clone())));
    fields.extend(run.stopped.iter().map(|why| ("stopped", why.clone())));
    for rank in &run.ranks {
        let slots = rank.slots.iter().map(|slot| match slot.step {
            Some(step) => format!("{} {step}", slot.state),
            None => slot.state.clone(),
        });
        let trainer = rank.trainer.map_or("no trainer".to_owned(), |pid| format!("trainer {pid}"));
        let slots: Vec<String> = slots.collect();
        fields.push(("rank", format!("{}: {trainer}, arena of {} [{}]", rank.rank, human_bytes(rank.arena_bytes), slots.join(", "))));
    }
    for tier in &run.tiers {
        let last = tier.last_step.map_or("nothing yet".to_owned(), |step| format!("step {step}"));
        let problem = tier.problem.as_ref().map_or(String::new(), |problem| format!("; {problem}"));
        fields.push(("tier", format!("{}: {last}, {} pending{problem}", tier.url, tier.pending)));
    }
    fields.extend(run.peers_problem.iter().map(|problem| ("peers", problem.clone())));
    for replica in run.replicas.iter().filter(|replica| replica.is_held || replica.problem.is_some()) {
        let last = replica.last_step.map_or("nothing yet".to_owned(), |step| format!("step {step}"));
        let problem = replica.problem.as_ref().map_or(String::new(), |problem| format!("; {problem}"));
        let size = human_bytes(replica.bytes);
        fields.push((
            "replica",
            format!("host {} at {}: {last}, {} pending, {size}{problem}", replica.host, replica.address, replica.pending),
        ));
    }
    text.fields(&fields);
    let millis = |time: Option<f64>| time.map_or("-".to_owned(), |time| format!("{time:.1}"));
    let rows: Vec<Vec<String>> = run
        .saves
        .iter()
        .rev()
        .take(8)
        .rev()
        .map(|save| {
            vec![
                save.step.to_string(),
                save.kind.clone().unwrap_or_default(),
                millis(Some(save.stall_ms)),
                millis(Some(save.copy_ms)),
                millis(save.encode_ms),
                millis(save.upload_ms),
                millis(save.commit_ms),
                human_bytes(save.bytes_in),
                save.bytes_out.map_or("-".to_owned(), human_bytes),
                save.queue_depth.to_string(),
                save.error.clone().unwrap_or_default(),
            ]
        })
        .collect();
    if !rows.is_empty() {
        text.table(&[">step", "kind", ">stall ms", ">copy", ">encode", ">upload", ">commit", ">in", ">out", ">queue", "error"], &rows);
    }
}

fn human_seconds(seconds: f64) -> String {
    match seconds {
        s if s < 60.0 => format!("{s:.1} s"),
        s if s < 3600.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
