//! The description of a run: the options that the agent needs, as sent by the trainer and stored in `run.json`.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Deserializer, Serialize};
use tensorcask::codec::{CodecRules, Objective, ObjectiveSetting};
use tensorcask::wire::Digest;
use tensorcask::{
    Bandwidth, BaseKeeping, Environment, Error, ExistingStep, FiniteCheck, Policy, Precision, Result, Retention, RoleRules, Store,
    StoreOptions, WriterOptions, is_credential,
};

use super::hosts_option::HostsSpec;
use super::peers_option::Peers;
use crate::os::files::replace_file;
use crate::os::folders::{EngineFolder, RunFolder};

/// The description of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunSpec {
    /// Name of the run's folder.
    pub key: String,
    pub run: String,
    pub tiers: Vec<String>,
    pub config: BTreeMap<String, String>,
    /// Variables of the trainer that decide about the tiers. `None` in the description of an older trainer: those of the agent.
    #[serde(default)]
    pub environment: Option<Environment>,
    pub fsync: bool,
    pub world: u32,
    pub keep: u32,
    pub memory_cap: Option<u64>,
    pub policy: String,
    pub every: Option<u64>,
    #[serde(deserialize_with = "objective_text")]
    pub objective: String,
    /// Rules that assign codecs to tensors.
    #[serde(default)]
    pub codecs: Vec<String>,
    /// Rules that state roles of tensors.
    #[serde(default)]
    pub roles: Vec<String>,
    pub precision: Vec<String>,
    /// Whether snapshots get statistics.
    #[serde(default)]
    pub statistics: bool,
    /// Name of the check for finite values; `None` for no check.
    #[serde(default)]
    pub check: Option<String>,
    /// `keep_last`, `keep_every` and `keep_weights_every` of the tiers; `None` to keep all steps.
    #[serde(default)]
    pub retention: Option<Retention>,
    pub keep_base_decoded: bool,
    pub inline: bool,
    /// The session and the ranks of this host, if the run is on many hosts.
    #[serde(default)]
    pub hosts: Option<HostsSpec>,
    /// Peers on other hosts, and this host's address for them.
    #[serde(default)]
    pub peers: Option<Peers>,
}

impl RunSpec {
    /// Reads the description that an agent stored in the folder of a run; `None` if there is no valid one.
    pub(crate) fn read(folder: &RunFolder) -> Option<Self> {
        std::fs::read(folder.spec()).ok().and_then(|json| serde_json::from_slice(&json).ok())
    }

    /// Names the first option that differs from another description.
    pub(crate) fn difference(&self, other: &Self) -> String {
        let fields = |spec: &Self| serde_json::to_value(spec).ok().and_then(|value| value.as_object().cloned()).unwrap_or_default();
        let ours = fields(self);
        let theirs = fields(other);
        let differs = ours.iter().find(|(name, value)| theirs.get(*name) != Some(*value));
        differs.map_or_else(|| "description".to_owned(), |(name, _)| format!("`{name}`"))
    }

    /// Whether another description means the same run with the same options. Its credentials may be newer.
    pub(crate) fn is_same_run(&self, other: &Self) -> bool {
        let plain = |spec: &Self| {
            let mut spec = spec.clone();
            spec.config.retain(|name, _| !is_credential(name));
            spec.environment = spec.environment.as_ref().map(Environment::without_credentials);
            spec
        };
        plain(self) == plain(other)
    }

    /// Stores the description for later agents, in a file that only this user can read: it may hold credentials.
    pub(crate) fn write(&self, folder: &RunFolder) -> Result<()> {
        let json = serde_json::to_vec(self).map_err(|e| Error::invalid(format!("cannot encode the description of a run: {e}")))?;
        replace_file(&folder.spec(), &json)
    }

    /// Ranks on this host.
    pub(crate) fn local_ranks(&self) -> Range<u32> {
        match &self.hosts {
            Some(hosts) => hosts.first_rank..hosts.first_rank.saturating_add(hosts.ranks).min(self.world),
            None => 0..self.world,
        }
    }

    /// Opens all tiers without sending a request.
    pub(crate) fn stores(&self) -> Result<Vec<Store>> {
        self.stores_within(&Bandwidth::default())
    }

    /// Opens all tiers, whose uploads share a limit.
    pub(crate) fn stores_within(&self, bandwidth: &Bandwidth) -> Result<Vec<Store>> {
        self.tiers.iter().map(|url| self.store_options(bandwidth, self.config.clone()).open(url)).collect()
    }

    /// Opens the first tier for the encoder of a host. The encoder can save without the store, so its timeouts are short, unless the
    /// config of the store sets them.
    pub(crate) fn store_for_encoder(&self) -> Result<Store> {
        let first = self.tiers.first().ok_or_else(|| Error::invalid("the run has no store"))?;
        self.options_for_encoder().open(first)
    }

    fn options_for_encoder(&self) -> StoreOptions {
        let mut config = self.config.clone();
        for (key, time) in ENCODER_TIMEOUTS {
            config.entry(key.to_owned()).or_insert_with(|| time.to_owned());
        }
        self.store_options(&Bandwidth::default(), config)
    }

    /// Opens no store again, but sends all later requests of these stores with the credentials of this description.
    pub(crate) fn renew(&self, tiers: &[Store], encoder: Option<&Store>) -> Result<()> {
        tiers.iter().try_for_each(|store| store.renew(&self.store_options(&Bandwidth::default(), self.config.clone())))?;
        encoder.map_or(Ok(()), |store| store.renew(&self.options_for_encoder()))
    }

    fn store_options(&self, bandwidth: &Bandwidth, config: BTreeMap<String, String>) -> StoreOptions {
        let environment = self.environment.clone();
        StoreOptions { config, environment, fsync: self.fsync, bandwidth: bandwidth.clone(), ..StoreOptions::default() }
    }

    /// Bytes of shared memory that encoded snapshots may use.
    pub(crate) fn cap(&self, folder: &EngineFolder) -> Result<u64> {
        self.memory_cap.map_or_else(|| Ok(folder.capacity_bytes()? / 2), Ok)
    }

    /// Options of the writer that encodes into memory.
    pub(crate) fn writer_options(&self) -> Result<WriterOptions> {
        Ok(WriterOptions {
            policy: Policy::from_name(&self.policy, self.every)?,
            base_cache: if self.keep_base_decoded { BaseKeeping::Memory } else { BaseKeeping::None },
            objective: ObjectiveSetting::from_name(&self.objective)?,
            codecs: CodecRules::parse(self.codecs.iter().map(String::as_str))?,
            roles: RoleRules::parse(self.roles.iter().map(String::as_str))?,
            precision: Precision::parse(self.precision.iter().map(String::as_str))?,
            statistics: self.statistics,
            check: self.check.as_deref().map_or(Ok(FiniteCheck::Off), FiniteCheck::from_name)?,
            // A trainer that resumes from an older step saves the steps after it again.
            existing_step: ExistingStep::Replace,
            ..WriterOptions::default()
        })
    }
}

/// Reads an objective as a text. An older agent has stored three weights, in thousandths: the snapshots in its memory
/// must not be left behind.
fn objective_text<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Stored {
        Text(String),
        Weights([u16; 3]),
    }
    Ok(match Stored::deserialize(deserializer)? {
        Stored::Text(text) => text,
        Stored::Weights([size, speed, precision]) => Objective { size, speed, precision }.to_string(),
    })
}

/// Variables of this process that decide about these tiers. Folders need none.
pub(crate) fn environment_of(tiers: &[String]) -> Environment {
    if tiers.iter().all(|tier| is_local(tier)) { Environment::default() } else { Environment::of_process() }
}

/// Whether a tier is a folder, or memory of this process.
pub(crate) fn is_local(url: &str) -> bool {
    url.split_once("://").is_none_or(|(scheme, _)| matches!(scheme, "file" | "memory"))
}

/// The folder name of a run: a hash, because the run's name may contain any character.
pub(crate) fn run_key(run: &str) -> String {
    let mut digest = Digest::of(run.as_bytes()).to_hex();
    digest.truncate(16);
    digest
}

/// Settings of the encoder's store: the timeout of one request, and of its retries.
const ENCODER_TIMEOUTS: [(&str, &str); 2] = [("timeout", "10s"), ("retry_timeout", "5s")];

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tensorcask::Environment;
    use tensorcask::codec::{Objective, ObjectiveSetting};

    use super::super::options::EngineOptions;
    use super::RunSpec;

    #[test]
    fn renewed_credentials_are_no_other_options() {
        let variables = |region: &str, token: &str| {
            let variable = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
            Environment::from_iter([("AWS_REGION", region), ("AWS_SESSION_TOKEN", token)].map(variable))
        };
        let spec = RunSpec { environment: Some(variables("eu", "first")), ..EngineOptions::new("s3://b/run").spec().unwrap() };
        let renewed = RunSpec { environment: Some(variables("eu", "second")), ..spec.clone() };
        assert!(spec.is_same_run(&renewed) && spec != renewed);
        assert!(!spec.is_same_run(&RunSpec { environment: Some(variables("us", "first")), ..spec.clone() }));
        assert!(!format!("{spec:?}").contains("first"));
    }

    #[test]
    fn the_description_of_an_older_agent_is_read() {
        let spec = EngineOptions::new("/tmp/run").spec().unwrap();
        let mut stored = serde_json::to_value(&spec).unwrap();
        assert_eq!(serde_json::from_value::<RunSpec>(stored.clone()).unwrap(), spec);
        for newer in ["statistics", "check", "retention", "codecs", "roles", "environment"] {
            stored.as_object_mut().unwrap().remove(newer);
        }
        let fastest = Objective::FASTEST;
        for (weights, name) in [([600, 400, 0], "0.6,0.4,0"), ([fastest.size, fastest.speed, fastest.precision], "fastest")] {
            stored["objective"] = json!(weights);
            let read: RunSpec = serde_json::from_value(stored.clone()).unwrap();
            assert_eq!(read.environment, None);
            assert_eq!((read.objective.as_str(), read.statistics), (name, false));
            assert!(ObjectiveSetting::from_name(&read.objective).is_ok());
        }
        stored["objective"] = Value::Null;
        assert!(serde_json::from_value::<RunSpec>(stored).is_err());
    }
}
