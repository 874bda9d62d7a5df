//! Changed rows through the agent: taken if they count from a save that it has encoded, ignored otherwise. Every state comes
//! back bit for bit, whatever the trainer names.

use rustix::process::Signal;
use tensorcask::{Dtype, ErrorKind, Metadata, Rect, Slice, TensorView};
use tensorcask_engine::{BackPressure, Deferred, Encode, Engine, EngineOptions, Outcome, Until};

use super::host::*;
use super::hosts::{Job, RANKS, WORLD};

const ROWS: u64 = 4000;
const WIDTH: u64 = 64;
/// Rows that each save names although they never change. A delta has their bytes only if rows are taken without a comparison.
const NAMED: std::ops::Range<u64> = 2000..3000;
const NAMED_BYTES: u64 = (NAMED.end - NAMED.start) * WIDTH;

/// A table of incompressible rows.
#[derive(Clone)]
struct Table {
    versions: Vec<u64>,
    bytes: Vec<u8>,
}

impl Table {
    fn new() -> Self {
        let mut table = Self { versions: vec![0; ROWS as usize], bytes: vec![0; (ROWS * WIDTH) as usize] };
        table.change(&(0..ROWS).collect::<Vec<_>>());
        table
    }

    fn change(&mut self, rows: &[u64]) {
        for &row in rows {
            self.versions[row as usize] += 1;
            let new = noise(row << 20 | self.versions[row as usize], WIDTH as usize);
            self.bytes[(row * WIDTH) as usize..((row + 1) * WIDTH) as usize].copy_from_slice(&new);
        }
    }

    fn part(&self, rect: Rect) -> TensorView<'_> {
        let first = rect.offset[0];
        let count = rect.shape[0];
        let data = &self.bytes[(first * WIDTH) as usize..((first + count) * WIDTH) as usize];
        TensorView::shard("model.table", Dtype::U8, &[ROWS, WIDTH], rect, data).unwrap()
    }

    fn view(&self) -> TensorView<'_> {
        self.part(Rect::whole(&[ROWS, WIDTH]))
    }

    fn save(&self, engine: &mut Engine, step: u64, rows: &[u64]) -> Outcome {
        engine.save(step, &[self.view().with_changed_rows(&named(rows)).unwrap()], &[], &Metadata::default()).unwrap()
    }

    /// Changes rows, names them, and waits until the state is in the store.
    fn step(&mut self, engine: &mut Engine, step: u64, rows: &[u64]) {
        self.change(rows);
        self.save(engine, step, rows);
        wait(engine);
    }
}

/// These rows, and those that never change.
fn named(rows: &[u64]) -> Vec<u64> {
    NAMED.chain(rows.iter().copied()).collect()
}

fn without_base(host: &Host) -> EngineOptions {
    EngineOptions { keep_base_decoded: false, ..host.options() }
}

fn wait(engine: &mut Engine) {
    let waited = engine.wait(Until::Durable, LONG).unwrap();
    assert!(waited.reached && waited.failures.is_empty(), "{waited:?}");
}

/// Checks a step in the store, and whether its delta was made from named rows.
fn check(store: &tensorcask::blocking::Store, step: u64, table: &Table, takes_rows: bool) {
    let snapshot = store.snapshot(step).unwrap();
    assert!(snapshot.read("model.table", &Slice::all()).unwrap().data == table.bytes, "step {step}");
    let link = snapshot.inspect().chain().remove(0);
    assert_eq!(link.kind.name(), "delta", "step {step}");
    match takes_rows {
        true => assert!((NAMED_BYTES..2 * NAMED_BYTES).contains(&link.stored_bytes), "step {step}: {}", link.stored_bytes),
        false => assert!(link.stored_bytes < NAMED_BYTES / 2, "step {step}: {}", link.stored_bytes),
    }
}

#[test]
fn rows_are_taken_if_they_count_from_a_state_that_the_agent_has_encoded() {
    let host = Host::new();
    let mut engine = Engine::start(without_base(&host)).unwrap();
    let mut table = Table::new();
    table.step(&mut engine, 1, &[]);
    table.step(&mut engine, 2, &[3, 3999]);
    check(&host.store(), 2, &table, true);
    // The agent encodes step 3 against step 2, although the trainer counts from a save before.
    table.change(&[5]);
    table.save(&mut engine, 3, &[5]);
    table.step(&mut engine, 4, &[6, 7]);
    check(&host.store(), 4, &table, true);
    // Another agent has encoded nothing.
    host.kill_agent();
    table.step(&mut engine, 5, &[8]);
    check(&host.store(), 5, &table, false);
    table.step(&mut engine, 6, &[9]);
    check(&host.store(), 6, &table, true);
    // A state that waits for an agent has rows that the next one cannot take.
    host.signal_agent(Signal::STOP);
    table.change(&[10]);
    table.save(&mut engine, 7, &[10]);
    host.kill_agent();
    table.step(&mut engine, 8, &[11]);
    check(&host.store(), 8, &table, true);
    assert_eq!(host.stored_steps(), [1, 2, 3, 4, 5, 6, 7, 8]);
    // The new trainer does not know what changed since the last state of the old one.
    drop(engine);
    let mut engine = Engine::start(without_base(&host)).unwrap();
    table.change(&[12]);
    table.step(&mut engine, 9, &[]);
    check(&host.store(), 9, &table, false);
    table.step(&mut engine, 10, &[13]);
    check(&host.store(), 10, &table, true);
    assert!(!host.agent_log().contains("left out"), "{}", host.agent_log());
}

#[test]
fn rows_of_dropped_and_skipped_states_are_not_lost() {
    for back_pressure in [BackPressure::DropOldestUncommitted, BackPressure::Skip] {
        let host = Host::new();
        let mut engine = Engine::start(EngineOptions { back_pressure, ..without_base(&host) }).unwrap();
        let mut table = Table::new();
        table.step(&mut engine, 1, &[]);
        host.signal_agent(Signal::STOP);
        let mut lost = 0;
        let mut states = Vec::new();
        for step in 2..=8 {
            table.change(&[step, 100 * step]);
            let outcome = table.save(&mut engine, step, &[step, 100 * step]);
            lost += u64::from(outcome.dropped.is_some() || outcome.generation.is_none());
            states.push((step, table.clone()));
        }
        assert_eq!(lost, 5, "two slots hold two of seven states");
        host.signal_agent(Signal::CONT);
        wait(&mut engine);
        table.step(&mut engine, 9, &[9]);
        states.push((9, table));
        let stored = host.stored_steps();
        assert_eq!(stored.len(), 4, "{stored:?}");
        for (step, table) in states.iter().filter(|(step, _)| stored.contains(step)) {
            check(&host.store(), *step, table, true);
        }
        assert!(!host.agent_log().contains("left out"), "{}", host.agent_log());
    }
}

#[test]
fn rows_of_a_save_that_fails_are_not_lost() {
    for encode in [Encode::Agent, Encode::Inline] {
        let host = Host::new();
        let mut engine = Engine::start(EngineOptions { encode, ..without_base(&host) }).unwrap();
        let mut table = Table::new();
        table.step(&mut engine, 1, &[]);
        table.change(&[5]);
        let mut refused = Metadata::default();
        refused.user.insert("tc.reserved".into(), 1.into());
        let view = || table.view().with_changed_rows(&[5]).unwrap();
        assert_eq!(engine.save(2, &[view()], &[], &refused).unwrap_err().kind(), ErrorKind::InvalidArgument);
        table.step(&mut engine, 2, &[6]);
        check(&host.store(), 2, &table, true);
    }
}

#[test]
fn a_row_that_is_left_out_costs_a_comparison_and_the_trust_of_the_session() {
    for keep_base_decoded in [true, false] {
        let host = Host::new();
        let options = EngineOptions { keep_base_decoded, ..host.options() };
        let mut engine = Engine::start(options.clone()).unwrap();
        let mut table = Table::new();
        table.step(&mut engine, 1, &[]);
        table.change(&[70]);
        table.step(&mut engine, 2, &[71]);
        check(&host.store(), 2, &table, false);
        let log = host.agent_log();
        assert!(log.contains("left out") && log.contains("row 70") && log.contains("model.table"), "{log}");
        table.change(&[72]);
        table.step(&mut engine, 3, &[]);
        check(&host.store(), 3, &table, false);
        drop(engine);
        let mut engine = Engine::start(options).unwrap();
        table.step(&mut engine, 4, &[]);
        table.step(&mut engine, 5, &[73]);
        check(&host.store(), 5, &table, !keep_base_decoded);
        assert_eq!(host.agent_log().matches("left out").count(), 1);
    }
}

#[test]
fn tables_that_a_save_does_not_name_are_compared() {
    let host = Host::new();
    let mut engine = Engine::start(without_base(&host)).unwrap();
    let mut table = Table::new();
    // The first save only announces that later ones name rows.
    engine.save(1, &[table.view().with_row_hashes()], &[], &Metadata::default()).unwrap();
    table.step(&mut engine, 2, &[1]);
    check(&host.store(), 2, &table, true);
    table.change(&[2]);
    engine.save(3, &[table.view()], &[], &Metadata::default()).unwrap();
    wait(&mut engine);
    check(&host.store(), 3, &table, false);
    table.step(&mut engine, 4, &[3]);
    check(&host.store(), 4, &table, false);
    table.step(&mut engine, 5, &[4]);
    check(&host.store(), 5, &table, true);
}

#[test]
fn the_inline_encoder_takes_rows_and_compares_when_one_is_left_out() {
    let host = Host::new();
    let options = EngineOptions { encode: Encode::Inline, ..without_base(&host) };
    let mut engine = Engine::start(options).unwrap();
    let mut table = Table::new();
    table.step(&mut engine, 1, &[]);
    for step in 2..=4 {
        table.step(&mut engine, step, &[step]);
        check(&host.store(), step, &table, true);
    }
    table.change(&[50]);
    table.step(&mut engine, 5, &[51]);
    check(&host.store(), 5, &table, false);
    table.step(&mut engine, 6, &[52]);
    check(&host.store(), 6, &table, false);
}

#[test]
fn deferred_tensors_name_rows() {
    let host = Host::new();
    let mut engine = Engine::start(without_base(&host)).unwrap();
    let mut table = Table::new();
    for step in 1..=3 {
        table.change(&[step]);
        let deferred = Deferred::new("model.table", Dtype::U8, &[ROWS, WIDTH], Rect::whole(&[ROWS, WIDTH])).unwrap();
        let deferred = if step == 1 { deferred.with_row_hashes() } else { deferred.with_changed_rows(&named(&[step])).unwrap() };
        let mut saving = engine.begin_save(step, &[], &[deferred], &[], &Metadata::default()).unwrap();
        saving.buffers().unwrap()[0].copy_from_slice(&table.bytes);
        engine.finish_save(saving).unwrap();
        wait(&mut engine);
        if step > 1 {
            check(&host.store(), step, &table, true);
        }
    }
}

/// The part of a table that one of several ranks has.
fn shard(rank: u32, ranks: u32) -> Rect {
    let rows = ROWS / u64::from(ranks);
    Rect { offset: vec![u64::from(rank) * rows, 0], shape: vec![rows, WIDTH] }
}

#[test]
fn each_rank_names_the_rows_of_its_shard() {
    let host = Host::new();
    let start = |rank| Engine::start(EngineOptions { rank, world: 2, ..without_base(&host) }).unwrap();
    let mut engines = [start(0), start(1)];
    let mut table = Table::new();
    let mut step = |step: u64, changed: &[u64], rows: &[u64]| {
        table.change(changed);
        for (rank, engine) in (0..).zip(&mut engines) {
            let view = table.part(shard(rank, 2)).with_changed_rows(&named(rows)).unwrap();
            engine.save(step, &[view], &[], &Metadata::default()).unwrap();
        }
        engines.iter_mut().for_each(wait);
        table.clone()
    };
    step(1, &[], &[]);
    let table = step(2, &[7, 3500], &[7, 3500]);
    check(&host.store(), 2, &table, true);
    // Rank 0 has no named row that stays the same, so the bytes tell of rank 1 only.
    let table = step(3, &[8, 9], &[9]);
    check(&host.store(), 3, &table, true);
    assert!(host.agent_log().contains("row 8"), "{}", host.agent_log());
    let table = step(4, &[10, 3501], &[10]);
    check(&host.store(), 4, &table, false);
    let table = step(5, &[11, 3502], &[]);
    check(&host.store(), 5, &table, false);
    assert_eq!(host.agent_log().matches("left out").count(), 2);
}

#[test]
fn many_hosts_take_the_rows_of_their_ranks() {
    let job = Job::new();
    let start = |rank| Engine::start(EngineOptions { keep_base_decoded: false, ..job.options(rank, "start-1") }).unwrap();
    let mut engines: Vec<Engine> = (0..WORLD).map(start).collect();
    let mut table = Table::new();
    // The table is divided among the ranks of the first hosts; the last one has other tensors.
    let ranks = WORLD - RANKS;
    for step in 1..=4 {
        let changed = [step, 1500 + step, 3900 + step];
        table.change(&changed);
        let rows = if step == 4 { named(&changed[..2]) } else { named(&changed) };
        for (rank, engine) in (0..).zip(&mut engines) {
            let views = match rank < ranks {
                true => vec![table.part(shard(rank, ranks)).with_changed_rows(&rows).unwrap()],
                false => Vec::new(),
            };
            engine.save(step, &views, &[], &Metadata::default()).unwrap();
        }
        engines.iter_mut().for_each(wait);
        if step > 1 {
            // At step 4, the second host leaves out a row. It compares all its ranks, which have the rows that never change.
            check(&job.store(), step, &table, step < 4);
        }
    }
    let logs: Vec<bool> = job.hosts.iter().map(|host| host.agent_log().contains("left out")).collect();
    assert_eq!(logs, [false, true, false], "only the second host has the row that was left out");
}
