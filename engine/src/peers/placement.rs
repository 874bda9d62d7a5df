//! Placement of replicas: the hosts that copy the snapshots of a host. Pure: every agent computes the same from the same list of hosts.
//!
//! Hosts are numbered from 0. A failure domain is a group of `jump` consecutive hosts, for example a rack. Host `n` is
//! copied to `n + jump`, `n + 2 * jump` and so on, around the ring of hosts. Two copies share a domain only if there are
//! too few domains. A host that is gone is passed over: the next in the same order takes its place, and nothing else
//! changes.
//!
//! NVRx, from which the jump is taken, forms closed groups of `n`, `n + jump`, ... that copy each other. With a ring, the
//! number of hosts need not be a multiple of the size of a group, and a host that is lost has a successor.
//!
//! ```text
//! 8 hosts, jump 2, 1 replica:   0 -> 2   1 -> 3   2 -> 4   ...   6 -> 0   7 -> 1
//! host 2 is gone:               0 -> 4   1 -> 3            ...   6 -> 0   7 -> 1
//! ```

use std::collections::{BTreeMap, BTreeSet};

use crate::run::peers_option::Peers;

/// Placement of replicas in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placement {
    /// Number of hosts.
    pub hosts: u32,
    /// Number of hosts that copy the snapshots of a host.
    pub replicas: u32,
    /// Number of hosts in a failure domain.
    pub jump: u32,
}

impl Placement {
    /// Placement of the replicas of a run.
    pub(crate) fn of(peers: &Peers) -> Self {
        Self { hosts: peers.addresses.len() as u32, replicas: peers.replicas, jump: peers.jump }
    }

    /// Hosts that copy the snapshots of `host`, nearest first. Fewer than `replicas` if too few hosts are left.
    pub(crate) fn holders(&self, host: u32, gone: &BTreeSet<u32>) -> Vec<u32> {
        let mut holders: Vec<u32> = Vec::new();
        let mut domains = BTreeSet::from([self.domain(host)]);
        let mut same_domain = Vec::new();
        for candidate in self.ring(host).filter(|candidate| !gone.contains(candidate)) {
            if holders.len() >= self.replicas as usize {
                return holders;
            }
            match domains.insert(self.domain(candidate)) {
                true => holders.push(candidate),
                false => same_domain.push(candidate),
            }
        }
        let missing = (self.replicas as usize).saturating_sub(holders.len());
        holders.extend(same_domain.into_iter().take(missing));
        holders
    }

    /// Hosts whose snapshots `host` copies, ascending.
    #[cfg(test)]
    fn sources(&self, host: u32, gone: &BTreeSet<u32>) -> Vec<u32> {
        (0..self.hosts).filter(|source| self.holders(*source, gone).contains(&host)).collect()
    }

    /// Hosts that copy the snapshots of `host` now, or would do so if up to `losses` hosts were gone; nearest first.
    pub(crate) fn possible_holders(&self, host: u32, losses: u32) -> Vec<u32> {
        let (mut found, mut gone_hosts): (Vec<u32>, _) = (Vec::new(), BTreeSet::from([BTreeSet::new()]));
        for _ in 0..=losses {
            let mut one_more = BTreeSet::new();
            // Only the loss of a holder changes the holders.
            for gone in gone_hosts {
                for holder in self.holders(host, &gone) {
                    one_more.insert(gone.iter().copied().chain([holder]).collect());
                    if !found.contains(&holder) {
                        found.push(holder);
                    }
                }
            }
            gone_hosts = one_more;
        }
        found
    }

    /// Hosts that `host` observes, ascending: those that it copies now, those that it would copy if up to `losses` hosts were
    /// gone, and the holders that it would follow.
    pub(crate) fn observed(&self, host: u32, losses: u32) -> Vec<u32> {
        self.observed_by_each(losses).remove(&host).unwrap_or_default().into_iter().collect()
    }

    /// For each host, the hosts that it observes: see [`observed`](Self::observed).
    pub(crate) fn observed_by_each(&self, losses: u32) -> BTreeMap<u32, BTreeSet<u32>> {
        let mut observed: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for source in 0..self.hosts {
            let holders = self.possible_holders(source, losses);
            for (position, holder) in holders.iter().enumerate() {
                observed.entry(*holder).or_default().extend(holders.iter().take(position).chain([&source]));
            }
        }
        observed
    }

    fn domain(&self, host: u32) -> u32 {
        host.checked_div(self.jump).unwrap_or(host)
    }

    /// All other hosts in the order of preference: by jumps around the ring, then, if these return to the host, from the next
    /// host on.
    fn ring(&self, host: u32) -> impl Iterator<Item = u32> {
        let hosts = u64::from(self.hosts.max(1));
        let jump = u64::from(self.jump.max(1));
        let cycle = hosts / greatest_common_divisor(hosts, jump);
        let start = u64::from(host);
        (0..hosts).filter_map(move |step| {
            // Each cycle of jumps visits `cycle` hosts; the next one begins one host further.
            let round = step / cycle;
            let jumps = step % cycle;
            let candidate = (start + round + jumps * jump) % hosts;
            u32::try_from(candidate).ok().filter(|candidate| u64::from(*candidate) != start)
        })
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    let mut a = a;
    let mut b = b;
    while let Some(rest) = a.checked_rem(b) {
        (a, b) = (b, rest);
    }
    a
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::Placement;

    fn gone(hosts: &[u32]) -> BTreeSet<u32> {
        hosts.iter().copied().collect()
    }

    #[test]
    fn hosts_are_copied_by_jumps() {
        let of = |hosts, replicas, jump| Placement { hosts, replicas, jump };
        assert_eq!(of(8, 2, 2).holders(0, &gone(&[])), [2, 4]);
        assert_eq!(of(8, 1, 2).holders(7, &gone(&[])), [1]);
        assert_eq!(of(8, 1, 2).holders(0, &gone(&[2])), [4]);
        assert_eq!(of(8, 1, 2).sources(4, &gone(&[2])), [0, 2], "the successor takes over, and host 2 may come back");
        assert_eq!(of(4, 3, 1).holders(2, &gone(&[])), [3, 0, 1]);
        // The jump leads back to the host itself: another host is taken.
        assert_eq!(of(4, 1, 4).holders(1, &gone(&[])), [2]);
        // Two racks of two: the second copy has to share a rack.
        assert_eq!(of(4, 2, 2).holders(0, &gone(&[])), [2, 1]);
        // With three hosts and racks of two, host 1 is not copied within its rack.
        assert_eq!(of(3, 1, 2).holders(1, &gone(&[])), [2]);
        assert_eq!(of(1, 2, 1).holders(0, &gone(&[])), Vec::<u32>::new());
        assert_eq!(of(5, 0, 1).sources(3, &gone(&[])), Vec::<u32>::new());
    }

    #[test]
    fn a_host_observes_what_it_may_take_over() {
        let placement = Placement { hosts: 8, replicas: 1, jump: 1 };
        assert_eq!(placement.observed(5, 0), [4]);
        assert_eq!(placement.observed(5, 2), [2, 3, 4]);
        assert_eq!(Placement { replicas: 0, ..placement }.observed(5, 2), Vec::<u32>::new());
    }

    proptest! {
        #[test]
        fn copies_are_on_distinct_living_hosts(
            hosts in 1u32..40, replicas in 0u32..5, jump in 1u32..12, dead in proptest::collection::btree_set(0u32..40, 0..10),
        ) {
            let placement = Placement { hosts, replicas, jump };
            let dead: BTreeSet<u32> = dead.into_iter().filter(|host| *host < hosts).collect();
            for host in 0..hosts {
                let holders = placement.holders(host, &dead);
                let distinct: BTreeSet<u32> = holders.iter().copied().collect();
                let alive = (0..hosts).filter(|other| *other != host && !dead.contains(other)).count();
                prop_assert_eq!(holders.len(), alive.min(replicas as usize));
                prop_assert_eq!(distinct.len(), holders.len());
                prop_assert!(!distinct.contains(&host) && distinct.is_disjoint(&dead));
                // No copy is in the host's own domain while another domain has a living host.
                let others = (0..hosts).any(|other| other / jump != host / jump && !dead.contains(&other));
                if others && replicas > 0 {
                    prop_assert!(holders[0] / jump != host / jump);
                }
                prop_assert!(holders.iter().all(|holder| placement.sources(*holder, &dead).contains(&host)));
            }
        }

        /// A host asks its possible holders for copies, because it does not observe which of them are gone.
        #[test]
        fn all_holders_are_possible_holders(
            hosts in 1u32..40, replicas in 0u32..5, jump in 1u32..12, dead in proptest::collection::btree_set(0u32..40, 0..3),
        ) {
            let placement = Placement { hosts, replicas, jump };
            for host in 0..hosts {
                let possible = placement.possible_holders(host, 2);
                prop_assert!(placement.holders(host, &dead).iter().all(|holder| possible.contains(holder)));
            }
        }

        /// While all hosts live, every host copies about as many hosts as the others.
        #[test]
        fn load_is_even(groups in 1u32..10, replicas in 1u32..3, jump in 1u32..6) {
            let placement = Placement { hosts: groups * jump * (replicas + 1), replicas, jump };
            for host in 0..placement.hosts {
                prop_assert_eq!(placement.sources(host, &BTreeSet::new()).len(), replicas as usize);
            }
        }

        /// A loss moves only the copies that the lost host had.
        #[test]
        fn a_loss_moves_no_other_copy(hosts in 3u32..40, jump in 1u32..8, lost in 0u32..40) {
            let placement = Placement { hosts, replicas: 1, jump };
            let lost = lost % hosts;
            for host in 0..hosts {
                let before = placement.holders(host, &BTreeSet::new());
                if !before.contains(&lost) {
                    prop_assert_eq!(placement.holders(host, &gone(&[lost])), before);
                }
            }
        }
    }
}
