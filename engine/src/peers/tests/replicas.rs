//! Copies of mirrors: complete, checked, bounded, and kept when the other host is gone.

use tensorcask::ErrorKind;
use tensorcask::maintain::{VerifyOptions, verify};

use super::hostile::{Hostile, Kind, Lie};
use super::session::*;
use super::support::*;
use crate::peers::certificates::tests::certificates;
use crate::peers::union::{ListedPlace, union_store};

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
async fn a_step_that_was_never_uploaded_is_copied_and_memory_is_bounded() {
    let mut job = Job::begin().await;
    job.commit(1).await;
    let server = job.hosts[0].host.serve(None).await;
    let mut replica = job.replica(&server.peer(None), 2);
    // The store does not answer: the mirror grows, the replica does not.
    for step in 2..=6 {
        job.save(step).await;
    }
    let report = replica.pull().await.unwrap();
    assert_eq!((report.newest, report.missing), (Some(at(6)), 0));
    assert_eq!(replica.steps().await.unwrap(), [at(5), at(6)]);
    let folder = job.hosts[1].host.folder.replica(0);
    let casks = || files_below(&folder).into_iter().filter(|file| file.starts_with("casks")).count() as u32;
    assert_eq!(casks(), 3 * RANKS, "steps 5 and 6, and the base");
    job.save(7).await;
    replica.pull().await.unwrap();
    assert_eq!((replica.steps().await.unwrap(), casks()), (vec![at(6), at(7)], 3 * RANKS));
    // Without receipts the step does not count.
    let mut receipts = files_below(&job.hosts[0].host.folder.mirror()).into_iter().filter(|file| file.starts_with("receipts"));
    let newest = receipts.find(|file| file.ends_with("7/0-1.json")).unwrap();
    std::fs::remove_file(job.hosts[0].host.folder.mirror().join(newest)).unwrap();
    assert_eq!(replica.pull().await.unwrap().newest_at_source, Some(at(6)));
    assert_eq!(replica.steps().await.unwrap(), [at(6), at(7)], "the replica keeps what it has");
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
