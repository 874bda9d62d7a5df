//! Copies of mirrors: complete, checked, bounded, and kept when the other host is gone.

use std::sync::Arc;

use tensorcask::maintain::{VerifyOptions, verify};
use tensorcask::session::SessionExchange;
use tensorcask::wire::SessionName;
use tensorcask::{ErrorKind, Store};

use super::hostile::{Hostile, Kind, Lie};
use super::session::*;
use super::support::*;
use crate::peers::certificates::tests::certificates;
use crate::peers::receipt_proof::CheckedPlace;
use crate::peers::union::{ListedPlace, Place, union_store};

#[tokio::test]
async fn a_lost_host_is_restored_from_a_replica_without_the_store() {
    let mut job = Job::begin().await;
    let made = certificates(&job.scratch.path().join("tls"), RUN);
    let server = job.hosts[0].host.serve(Some(tls(&made.hosts[0]))).await;
    let mut replica = job.replica(&server.peer(Some(tls(&made.hosts[1]))), 2);
    assert!(replica.pull().await.unwrap().newest.is_none(), "nothing is saved yet");
    for step in 1..=3 {
        job.commit(step).await;
        let report = replica.pull().await.unwrap();
        assert!(report.problem.is_none(), "{:?}", report.problem);
        assert_eq!((report.newest, report.newest_at_source, report.missing), (Some(at(step)), Some(at(step)), 0));
        assert_eq!(report.casks, u64::from(RANKS), "only new casks are copied");
        assert_eq!(replica.pull().await.unwrap().bytes, 0);
    }
    server.stop().await;
    std::fs::remove_dir_all(job.scratch.path().join("store")).unwrap();
    std::fs::remove_dir_all(job.hosts[0].host.folder.root()).unwrap();
    let union = job.without_host_0().await;
    assert_whole(&union, 3).await;
    assert!(verify(&union, &VerifyOptions::default()).await.unwrap().is_clean());
    union.forget(&[3]).await.unwrap();
    assert_whole(&job.without_host_0().await, 3).await;
}

#[tokio::test]
async fn parts_are_read_from_here_and_from_peers() {
    let mut job = Job::begin().await;
    for step in 1..=2 {
        job.commit(step).await;
    }
    let server = job.hosts[0].host.serve(None).await;
    let gone = job.hosts[0].host.serve(None).await;
    let dead = gone.peer(None);
    gone.stop().await;
    std::fs::remove_dir_all(job.scratch.path().join("store")).unwrap();
    let own = listed(local(&job.hosts[1].host.folder.mirror())).await;
    let alive = listed(server.peer(None).place("mirror")).await;
    // A peer that is gone since it was listed is passed over.
    let dead = ListedPlace { place: dead.place("mirror"), objects: alive.objects.clone() };
    let union = union_store(vec![dead.clone(), own.clone(), alive], u64::MAX);
    assert_whole(&union, 2).await;
    let alone = union_store(vec![own, dead.clone()], u64::MAX);
    let error = alone.snapshot(2).await.unwrap().read("model.w", &tensorcask::Slice::all()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Storage, "no place answers: {error}");
    let error = union_store(vec![dead], u64::MAX).snapshot(2).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Storage, "no place answers: {error}");
}

#[tokio::test]
async fn steps_that_were_never_uploaded_are_copied_while_there_is_room() {
    let mut job = Job::begin().await;
    job.commit(1).await;
    let server = job.hosts[0].host.serve(None).await;
    let mut replica = job.replica(&server.peer(None), 2);
    // The store does not answer. The mirror keeps all steps, because another host may have saved fewer of them.
    for step in 2..=6 {
        job.save(step).await;
    }
    let report = replica.pull().await.unwrap();
    assert_eq!((report.newest, report.missing), (Some(at(6)), 0));
    assert_eq!(replica.steps().await.unwrap(), [at(4), at(5), at(6)], "the newest come first");
    for _ in 0..3 {
        replica.pull().await.unwrap();
    }
    assert_eq!(replica.steps().await.unwrap().len(), 6);
    let folder = job.hosts[1].host.folder.replica(0);
    let casks = || files_below(&folder).into_iter().filter(|file| file.starts_with("casks")).count() as u32;
    assert_eq!(casks(), 6 * RANKS);
    // Older steps give way if something else needs the memory, and do not come back.
    for room in [0, u64::MAX] {
        replica.set_room(room);
        replica.pull().await.unwrap();
        assert_eq!((replica.steps().await.unwrap(), casks()), (vec![at(5), at(6)], 3 * RANKS), "the base stays");
    }
    job.save(7).await;
    replica.pull().await.unwrap();
    assert_eq!(replica.steps().await.unwrap(), [at(5), at(6), at(7)]);
    // Without receipts the step does not count.
    let mut receipts = files_below(&job.hosts[0].host.folder.mirror()).into_iter().filter(|file| file.starts_with("receipts"));
    let newest = receipts.find(|file| file.ends_with("7/0-1.json")).unwrap();
    std::fs::remove_file(job.hosts[0].host.folder.mirror().join(newest)).unwrap();
    assert_eq!(replica.pull().await.unwrap().newest_at_source, Some(at(6)));
    assert_eq!(replica.steps().await.unwrap(), [at(5), at(6), at(7)], "the replica keeps what it has");
}

#[tokio::test]
async fn a_restart_interrupts_and_the_loss_of_the_other_host_costs_nothing() {
    let mut job = Job::begin().await;
    job.commit(1).await;
    let server = job.hosts[0].host.serve(None).await;
    let address = server.address;
    let mut replica = job.replica(&server.peer(None), 2);
    replica.pull().await.unwrap();
    server.stop().await;
    let error = replica.pull().await.unwrap_err();
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    job.commit(2).await;
    let server = job.hosts[0].host.serve_at(address, None).await;
    assert_eq!(replica.pull().await.unwrap().newest, Some(at(2)));

    // The host is replaced by an empty one at the same address.
    server.stop().await;
    let fresh = job.join(0).await;
    let server = fresh.host.serve_at(address, None).await;
    for _ in 0..2 {
        let report = replica.pull().await.unwrap();
        assert!(report.problem.is_none(), "{:?}", report.problem);
        assert_eq!(report.newest, Some(at(2)));
    }
    assert_whole(&job.without_host_0().await, 2).await;
    // It saves again, and the copies of before give way.
    job.hosts[0] = fresh;
    for step in 3..=4 {
        job.commit(step).await;
        let report = replica.pull().await.unwrap();
        assert!(report.problem.is_none(), "{:?}", report.problem);
    }
    assert_eq!(replica.steps().await.unwrap(), [at(3), at(4)]);
    assert_whole(&job.without_host_0().await, 4).await;
    drop(server);
}

#[tokio::test]
async fn a_hostile_peer_gives_an_error_and_never_a_step() {
    let mut job = Job::begin().await;
    job.commit(1).await;
    job.save(2).await;
    let root = job.hosts[0].host.folder.root().to_owned();
    let mut other = Job::begin().await;
    other.commit(1).await;
    other.save(2).await;
    let other = other.hosts[0].host.folder.mirror();
    let lies = [
        ("/casks/", Kind::FlippedByte),
        ("/casks/", Kind::Truncated),
        ("/casks/", Kind::Short),
        ("/casks/", Kind::Endless),
        ("/casks/", Kind::Huge),
        ("/casks/", Kind::OtherStore(other.clone())),
        ("/0-1.json", Kind::FlippedByte),
        ("/0-1.json", Kind::OtherStore(other.clone())),
        ("/0-1.json", Kind::OtherStep(1)),
        ("parent.json", Kind::FlippedByte),
        ("/receipts/", Kind::Endless),
        ("store.json", Kind::FlippedByte),
    ];
    for (number, (object, kind)) in lies.into_iter().enumerate() {
        let is_of_step_1 = matches!(kind, Kind::OtherStep(1));
        let hostile = Hostile::start(&root, Lie { object, kind }).await;
        let mut replica = job.replica(&hostile.peer(), 2);
        for _ in 0..2 {
            match replica.pull().await {
                Ok(report) => {
                    let problem = report.problem.unwrap_or_else(|| panic!("lie {number} about {object}: {:?}", report.newest));
                    let problem = problem.to_string();
                    assert!(problem.contains("casks") || problem.contains("receipts"), "lie {number} about {object}: {problem}");
                }
                Err(error) => assert!(error.object_name().is_some(), "lie {number} about {object}: {error}"),
            }
            let steps = replica.steps().await.unwrap();
            // The receipts of step 1 are right where they are; those of step 2 are not.
            assert!(steps.is_empty() || (steps == [at(1)] && is_of_step_1), "lie {number} about {object}: {steps:?}");
        }
        let folder = job.hosts[1].host.folder.replica(0);
        std::fs::remove_dir_all(&folder).unwrap_or_default();
    }
    // An honest peer after a hostile one: the replica becomes whole.
    let hostile = Hostile::start(&root, Lie { object: "/casks/", kind: Kind::FlippedByte }).await;
    assert!(job.replica(&hostile.peer(), 2).pull().await.unwrap().problem.is_some());
    let server = job.hosts[0].host.serve(None).await;
    let mut replica = job.replica(&server.peer(None), 2);
    assert!(replica.pull().await.unwrap().problem.is_none());
    assert_eq!(replica.steps().await.unwrap().last(), Some(&at(2)));
    assert_whole(&job.without_host_0().await, 1).await;
}

/// The host was replaced by an empty one before its snapshots were copied. Its next step is a delta on a snapshot whose casks
/// are only in the store.
#[tokio::test]
async fn a_delta_without_its_base_does_not_count() {
    let mut job = Job::begin().await;
    job.commit(1).await;
    let before = job.hosts[0].host.folder.mirror();
    let fresh = job.join(0).await;
    let former = std::mem::replace(&mut job.hosts[0], fresh);
    job.commit(2).await;
    let server = job.hosts[0].host.serve(None).await;
    let mut replica = job.replica(&server.peer(None), 2);
    for _ in 0..2 {
        let report = replica.pull().await.unwrap();
        assert_eq!((report.newest, report.newest_at_source, report.missing), (None, Some(at(2)), 1));
        let problem = report.problem.unwrap().to_string();
        assert!(problem.contains("step 2") && problem.contains("parent") && problem.contains("casks/"), "{problem}");
    }
    assert_eq!(replica.steps().await.unwrap(), [at(2)], "the part that could be copied is kept");
    // The missing casks come back.
    let casks = job.hosts[0].host.folder.mirror().join("casks");
    for entry in std::fs::read_dir(before.join("casks")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), casks.join(entry.file_name())).unwrap();
    }
    let report = replica.pull().await.unwrap();
    assert!(report.problem.is_none(), "{:?}", report.problem);
    assert_eq!((report.newest, report.missing), (Some(at(2)), 0));
    // Another agent checks the casks again before the step counts.
    let mut again = job.replica(&server.peer(None), 2);
    assert_eq!(again.pull().await.unwrap().newest, Some(at(2)));
    drop(former);
}

/// The newest snapshot does not need step 2, and step 4 does, which is neither committed nor given up.
#[tokio::test]
async fn the_parent_of_an_undecided_step_is_kept() {
    let mut job = Job::begin().await;
    let server = job.hosts[0].host.serve(None).await;
    let mut replica = job.replica(&server.peer(None), 2);
    job.commit(1).await;
    job.save(2).await;
    job.save(3).await;
    job.finish(2).await;
    job.save(4).await;
    replica.pull().await.unwrap();
    job.finish(3).await;
    for pull in [replica.pull().await.unwrap(), job.replica(&server.peer(None), 2).pull().await.unwrap()] {
        assert!(pull.problem.is_none(), "{:?}", pull.problem);
        assert_eq!((pull.newest, pull.missing), (Some(at(4)), 0));
    }
    job.finish(4).await;
    let store = job.without_host_0().await;
    assert_whole(&store, 4).await;
    assert_eq!(store.snapshot(4).await.unwrap().record().parent, Some(job.store.snapshot(2).await.unwrap().record().id));
    // Then nothing needs the third.
    job.commit(5).await;
    job.commit(6).await;
    let casks = files_below(&job.hosts[0].host.folder.mirror()).into_iter().filter(|file| file.starts_with("casks")).count() as u32;
    assert_eq!(casks, 5 * RANKS, "steps 1, 2, 4, 5 and 6");
}

#[tokio::test]
async fn copies_stay_within_their_room() {
    let mut job = Job::begin().await;
    job.commit(1).await;
    job.save(2).await;
    job.save(3).await;
    let server = job.hosts[0].host.serve(None).await;
    let mut replica = job.replica(&server.peer(None), 2);
    replica.set_room(0);
    let report = replica.pull().await.unwrap();
    let problem = report.problem.unwrap().to_string();
    assert!(problem.contains("no room") && report.bytes == 0 && report.newest.is_none(), "{problem}");
    replica.set_room(u64::MAX);
    let report = replica.pull().await.unwrap();
    assert_eq!((report.newest, replica.steps().await.unwrap()), (Some(at(3)), vec![at(1), at(2), at(3)]));
    // Room for three steps and not for four: the oldest step gives way before the new one comes.
    let casks = job.hosts[1].host.folder.replica(0).join("casks");
    let size = || std::fs::read_dir(&casks).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>();
    let limit = size() + 4096;
    for step in 4..=9 {
        job.save(step).await;
        replica.set_room(limit - size());
        let report = replica.pull().await.unwrap();
        assert!(report.problem.is_none(), "{:?}", report.problem);
        assert_eq!((report.newest, report.missing), (Some(at(step)), 0));
        assert!(size() <= limit, "{} > {limit}", size());
    }
}

#[tokio::test]
async fn the_log_in_the_mirror_is_shortened_and_still_read() {
    let mut job = Job::begin().await;
    let server = job.hosts[0].host.serve(None).await;
    let mut replica = job.replica(&server.peer(None), 2);
    job.commit(1).await;
    replica.pull().await.unwrap();
    let log = job.hosts[0].host.folder.mirror().join("log");
    let entries = || std::fs::read_dir(&log).unwrap().count() as u64;
    let most = tensorcask::session::Mirror::KEPT_ENTRIES;
    let mut longest = 0u64;
    for step in 2..=most + 70 {
        // Too large for a log entry.
        job.commit_noise(step, 20_000).await;
        job.hosts[0].mirror.shorten_log().await.unwrap();
        job.hosts[1].mirror.shorten_log().await.unwrap();
        longest = longest.max(entries());
    }
    assert!(longest <= most + 64 && entries() < most, "{longest} entries, {} at the end", entries());
    // A reader that has not followed the log meanwhile goes on, and memory alone has all that a restore needs.
    let report = replica.pull().await.unwrap();
    assert!(report.problem.is_none(), "{:?}", report.problem);
    assert_eq!(report.newest, Some(at(most + 70)));
    let union = job.without_host_0().await;
    assert_eq!(union.snapshot(tensorcask::Latest).await.unwrap().step(), most + 70);
}

/// Casks and receipts that fit together, and whose checksums are all right. Whoever made them is in the run, and is not host 0.
#[tokio::test]
async fn forged_casks_with_forged_receipts_are_refused() {
    let mut job = Job::begin().await;
    let made = certificates(&job.scratch.path().join("tls"), RUN);
    let foreign = certificates(&job.scratch.path().join("foreign"), RUN);
    job.sign(&made);
    job.commit(1).await;
    job.save(2).await;
    let check = || Some(proof(&made.hosts[1]));
    for (signed, reason) in [
        (None, "the signature of the host is missing"),
        (Some(&made.hosts[1]), "another host than host 0 has signed them"),
        (Some(&foreign.hosts[0]), "signed by another authority"),
    ] {
        let forger = job.forge(3, signed).await;
        let server = forger.serve(Some(tls(&made.hosts[1]))).await;
        let peer = server.peer(Some(tls(&made.hosts[1])));
        let mut replica = job.replica(&peer, 2);
        replica.require_proof(check());
        let report = replica.pull().await.unwrap();
        let problem = report.problem.unwrap();
        let text = problem.to_string();
        assert!(text.contains(reason), "{text}");
        for named in [&server.address.to_string(), "step 3", "ranks 0 to 1", "0-1.json"] {
            assert!(text.contains(named), "{named}: {text}");
        }
        assert_eq!((problem.kind(), report.newest, report.bytes), (ErrorKind::Corrupt, None, 0));
        // Checksums alone do not tell.
        let mut trusting = job.replica(&peer, 2);
        assert_eq!(trusting.pull().await.unwrap().newest, Some(at(3)), "{reason}");
        std::fs::remove_dir_all(job.hosts[1].host.folder.replica(0)).unwrap();
    }

    // A restore passes the forger over, and reads what host 0 has saved.
    job.save(3).await;
    let forger = job.forge(3, Some(&made.hosts[1])).await;
    let place = |server: &Server| -> Place { Arc::new(CheckedPlace::new(server.peer(None).place("mirror"), proof(&made.hosts[1]))) };
    let lying = forger.serve(None).await;
    let honest = job.hosts[0].host.serve(None).await;
    let union = union_store(vec![listed(place(&lying)).await, listed(place(&honest)).await], u64::MAX);
    let session = SessionName { run: job.store.history().run().await.unwrap(), session: job.id };
    let saved = |store: &Store| {
        let exchange = SessionExchange::new(store, session);
        async move {
            let ranks = exchange.survey(None).await.unwrap().steps.remove(&at(3)).unwrap();
            exchange.receipts(at(3), &ranks).await
        }
    };
    let ours = saved(job.hosts[0].mirror.memory()).await.unwrap();
    assert_eq!(saved(&union).await.unwrap(), ours);
    let alone = saved(&union_store(vec![listed(place(&lying)).await], u64::MAX)).await.unwrap_err().to_string();
    assert!(alone.contains("another host than host 0") && alone.contains("0-1.json"), "{alone}");
}

#[tokio::test]
async fn signed_steps_are_copied_with_their_signatures_and_from_copy_to_copy() {
    let mut job = Job::begin().await;
    let made = certificates(&job.scratch.path().join("tls"), RUN);
    job.sign(&made);
    job.commit(1).await;
    job.save(2).await;
    let server = job.hosts[0].host.serve(None).await;
    let mut replica = job.replica(&server.peer(None), 2);
    replica.require_proof(Some(proof(&made.hosts[1])));
    let report = replica.pull().await.unwrap();
    assert!(report.problem.is_none(), "{:?}", report.problem);
    assert_eq!(report.newest, Some(at(2)));
    // Host 0 is lost, and its successor reads the copy on host 1 with the certificate of its own.
    server.stop().await;
    let holder = job.hosts[1].host.serve(None).await;
    let place: Place = Arc::new(CheckedPlace::new(holder.peer(None).place("replica-0"), proof(&made.hosts[0])));
    let union = union_store(vec![listed(local(&job.hosts[1].host.folder.mirror())).await, listed(place).await], u64::MAX);
    let session = SessionName { run: job.store.history().run().await.unwrap(), session: job.id };
    let exchange = SessionExchange::new(&union, session);
    let ranks = exchange.survey(None).await.unwrap().steps.remove(&at(2)).unwrap();
    assert_eq!(exchange.receipts(at(2), &ranks).await.unwrap().len(), WORLD as usize);

    // Lies about the signatures.
    let root = job.hosts[0].host.folder.root().to_owned();
    for kind in [Kind::FlippedByte, Kind::Truncated, Kind::Endless, Kind::Huge, Kind::Slow] {
        std::fs::remove_dir_all(job.hosts[1].host.folder.replica(0)).unwrap_or_default();
        let hostile = Hostile::start(&root, Lie { object: ".proof", kind }).await;
        let mut replica = job.replica(&hostile.peer(), 2);
        replica.require_proof(Some(proof(&made.hosts[1])));
        let report = replica.pull().await.unwrap();
        assert!(report.newest.is_none() && replica.steps().await.unwrap().is_empty());
        let problem = report.problem.unwrap().to_string();
        assert!(problem.contains("receipts/"), "{problem}");
    }
}
