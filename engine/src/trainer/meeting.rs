//! Messages to other hosts through the memory of this host's agent, which serves the folder `meeting`, and the agreement on
//! a step that the ranks reach with such messages.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tensorcask::session::{RankExchange, RankOffer};
use tensorcask::{Error, Result};

use crate::os::files::replace_file;
use crate::os::folders::{RunFolder, publish};
use crate::os::lock::wait_for_lock;
use crate::peers::other_hosts::OtherHosts;
use crate::run::hosts_option::HostsSpec;
use crate::run::spec::RunSpec;

/// The offers of all ranks of a round.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offers {
    ranks: Vec<RankOffer>,
}

/// Exchanges the offers of all ranks, through the agents. One rank of each host asks for all.
pub(crate) async fn exchange_offers(
    run: &RunFolder,
    hosts: &HostsSpec,
    others: &OtherHosts,
    round: &Round<'_>,
    offer: &RankOffer,
    timeout: Duration,
) -> Result<Vec<RankOffer>> {
    let folder = format!("{}/offers/{}", hosts.session, round.checked_name()?);
    let json = serde_json::to_vec(offer).map_err(|e| Error::invalid(format!("an offer: {e}")))?;
    publish(run, &format!("{folder}/{}.json", round.rank), &json)?;
    let agreed = run.meeting().join(&folder).join(AGREED);
    let begun = Instant::now();
    let _held = wait_for_lock(&run.agreement_lock()).await?;
    if let Some(found) = std::fs::read(&agreed).ok().and_then(|json| serde_json::from_slice::<Offers>(&json).ok()) {
        return Ok(found.ranks);
    }
    let mut offers: BTreeMap<u32, RankOffer> = BTreeMap::new();
    loop {
        let mut problem = None;
        let missing = (0..round.world).filter(|rank| !offers.contains_key(rank));
        let wanted: Vec<u32> = missing.collect();
        let name_of = |rank: u32| format!("{folder}/{rank}.json");
        let host_of = |rank: &u32| hosts.host_of(*rank);
        let (own, remote): (Vec<u32>, Vec<u32>) = wanted.into_iter().partition(|rank| host_of(rank) == others.own);
        for rank in own {
            if let Ok(json) = std::fs::read(run.meeting().join(name_of(rank))) {
                offers.insert(rank, decode(&json, rank)?);
            }
        }
        let answers = others.read_messages(remote.iter().map(|rank| (host_of(rank), name_of(*rank))).collect()).await;
        for (rank, answer) in remote.into_iter().zip(answers) {
            match answer {
                Ok(Some(json)) => _ = offers.insert(rank, decode(&json, rank)?),
                Ok(None) => {}
                Err(error) => problem = Some(error),
            }
        }
        if offers.len() == round.world as usize {
            break;
        }
        if begun.elapsed() > timeout {
            let missing: Vec<String> = (0..round.world).filter(|rank| !offers.contains_key(rank)).map(|rank| rank.to_string()).collect();
            let why = problem.map_or_else(String::new, |error| format!("; {error}"));
            return Err(Error::not_found(format!("rank {} has not listed its steps within {timeout:?}{why}", missing.join(", "))));
        }
        tokio::time::sleep(RETRY).await;
    }
    let offers = Offers { ranks: offers.into_values().collect() };
    let json = serde_json::to_vec(&offers).map_err(|e| Error::invalid(format!("an offer: {e}")))?;
    replace_file(&agreed, &json)?;
    Ok(offers.ranks)
}

/// Exchanges the offers of all ranks, through the first tier.
pub(crate) async fn exchange_by_store(
    spec: &RunSpec,
    rank: u32,
    round: &str,
    offer: &RankOffer,
    timeout: Duration,
) -> Result<Vec<RankOffer>> {
    let stores = spec.stores()?;
    let begun = Instant::now();
    let first = stores.first().ok_or_else(|| Error::invalid("the run has no store"))?;
    let exchange = RankExchange::new(first);
    exchange.put_offer(round, rank, offer).await?;
    loop {
        let offers = exchange.offers(round, spec.world).await?;
        let missing: Vec<String> =
            (0..).zip(&offers).filter(|(_, offer)| offer.is_none()).map(|(rank, _): (u32, _)| rank.to_string()).collect();
        if missing.is_empty() {
            return Ok(offers.into_iter().flatten().collect());
        }
        if begun.elapsed() > timeout {
            let message = format!("rank {} has not listed its steps within {timeout:?}", missing.join(", "));
            return Err(Error::not_found(message).object(first.url()));
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// A round of an agreement, and a rank in it.
pub(crate) struct Round<'a> {
    pub name: &'a str,
    pub rank: u32,
    pub world: u32,
}

impl Round<'_> {
    fn checked_name(&self) -> Result<&str> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        if self.name.is_empty() || self.name.len() > 128 || !self.name.chars().all(plain) {
            return Err(Error::invalid(format!("round `{}`: use lower-case letters, digits, - and _", self.name.escape_debug())));
        }
        Ok(self.name)
    }
}

fn decode(json: &[u8], rank: u32) -> Result<RankOffer> {
    serde_json::from_slice(json).map_err(|e| Error::corrupt(format!("rank {rank} sent no offer: {e}")))
}

/// Name of the file in which a rank shares all lists with the other ranks of its host.
const AGREED: &str = "all";
/// Time between questions to hosts.
const RETRY: Duration = Duration::from_millis(100);
