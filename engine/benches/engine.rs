//! Benchmarks of the engine: stall of a save, duration of a restore from each source, and memory use.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark ends where something fails")]

#[cfg(target_os = "linux")]
#[path = "../../benches/common/mod.rs"]
mod common;

#[cfg(target_os = "linux")]
mod host;

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(target_os = "linux")]
mod linux {
    use std::path::{Path, PathBuf};
    use std::time::{Duration, Instant};

    use serde_json::json;
    use tensorcask::{Latest, Metadata, Policy};
    use tensorcask_engine::{Destination, Encode, Engine, EngineOptions, Restored, RestoredTensor, Source, Until, agent_status};

    use crate::common::{Arguments, Memcpy, Owned, Table, bytes_of, fail, median, report, seconds, synthetic};
    use crate::host::{Host, LONG, copy_seconds, views};

    pub(super) fn main() {
        let arguments = Arguments::parse(&["mib", "rounds", "saves", "small-mib", "folder", "tables"]);
        let bytes = (arguments.number("mib", 1024.0) * (1u64 << 20) as f64) as u64;
        let small = (arguments.number("small-mib", 128.0) * (1u64 << 20) as f64) as u64;
        let rounds = arguments.number("rounds", 7.0) as usize;
        let saves = arguments.number("saves", 60.0) as u64;
        let data = match arguments.text("data") {
            Some(folder) => PathBuf::from(folder),
            None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data"),
        };
        let states = |bytes: u64| [1000, 1001].map(|step| synthetic(bytes, &data.join(format!("step-{step}.safetensors"))));
        let folder = arguments.text("folder");
        let names = arguments.text("tables").unwrap_or("stall,restore,run,memory,bases");
        let tables = names.split(',').map(|name| match name {
            "stall" => stall(&states(bytes), rounds, folder),
            "restore" => restore(&states(bytes), rounds, folder),
            "run" => run(&states(small), saves, folder),
            "memory" => memory(&states(small), folder),
            "bases" => bases(&states(small), rounds, folder),
            _ => fail(&format!("there is no table `{name}`")),
        });
        report("engine", &tables.collect::<Vec<_>>(), arguments.json);
    }

    /// First saves of runs whose arena is there: prepared before the save, or left by an earlier process.
    fn first_saves(state: &[Owned], rounds: usize, folder: Option<&str>) -> [f64; 3] {
        let mut fresh = Vec::new();
        let mut prepared = Vec::new();
        let mut restarted = Vec::new();
        let save =
            |engine: &mut Engine, step: u64| engine.save(step, &views(state), &[], &Metadata::default()).unwrap().stall.as_secs_f64();
        for _ in 0..rounds.min(3) {
            let host = Host::new(folder);
            let mut engine = Engine::start(host.options()).unwrap();
            fresh.push(save(&mut engine, 1));
            engine.finish().unwrap();
            let host = Host::new(folder);
            let mut engine = Engine::start(host.options()).unwrap();
            engine.prepare(bytes_of(state)).unwrap();
            wait_for_memory(&host);
            prepared.push(save(&mut engine, 1));
            assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
            drop(engine);
            let mut engine = Engine::start(host.options()).unwrap();
            restarted.push(save(&mut engine, 2));
            engine.finish().unwrap();
        }
        [fresh, prepared, restarted].map(median)
    }

    /// Waits until the memory of the whole arena is present.
    fn wait_for_memory(host: &Host) {
        use std::os::unix::fs::MetadataExt;
        let arena = arena_of(host);
        while std::fs::metadata(&arena).is_ok_and(|found| found.blocks() * 512 < found.len()) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn stall(states: &[Vec<Owned>; 2], rounds: usize, folder: Option<&str>) -> Table {
        let [fresh, prepared, restarted] = first_saves(&states[0], rounds, folder);
        let host = Host::new(folder);
        let size = bytes_of(&states[0]);
        let mut memcpy = Memcpy::new(size as usize);
        let mut engine = Engine::start(EngineOptions { policy: Policy::Consecutive, slots: 3, ..host.options() }).unwrap();
        let mut step = 0;
        let mut save = |engine: &mut Engine| {
            step += 1;
            let views = views(&states[step as usize % 2]);
            engine.save(step, &views, &[], &Metadata::default()).unwrap().stall.as_secs_f64()
        };
        save(&mut engine);
        let mut copies = Vec::new();
        let mut idle = Vec::new();
        let mut busy = Vec::new();
        for _ in 0..rounds {
            assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
            copies.push(copy_seconds(&states[0], &mut memcpy));
            idle.push(save(&mut engine));
            // The agent is encoding now.
            std::thread::sleep(Duration::from_millis(200));
            assert!(host.status().0.queue_depth > 0, "the agent was faster; use a larger state");
            busy.push(save(&mut engine));
        }
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
        let run = host.status().0;
        let encode = median(run.saves.iter().skip(1).filter_map(|save| save.encode_ms).map(|ms| ms / 1e3).collect());
        let upload = median(run.saves.iter().skip(1).filter_map(|save| save.upload_ms).map(|ms| ms / 1e3).collect());
        engine.finish().unwrap();
        let copy = median(copies);
        let title = format!(
            "How long a save of {:.2} GB in {} tensors stops the trainer, median of {rounds}. The targets are 1.2 and 2.0 times memcpy (one thread)",
            size as f64 / 1e9,
            states[0].len()
        );
        let mut table = Table::new(title, &crate::common::SPEED);
        table.speed("memcpy", size, copy, copy);
        table.speed("first save of a run", size, fresh, copy);
        table.speed("first save after `prepare`", size, prepared, copy);
        table.speed("first save of a trainer that was started again", size, restarted, copy);
        table.speed("save", size, median(idle), copy);
        table.speed("save while the agent encodes", size, median(busy), copy);
        table.speed("agent: encode a delta, nobody waits", size, encode, copy);
        table.speed("agent: commit in the store (fsync), nobody waits", size, upload, copy);
        table
    }

    /// Buffers of a trainer, in the order of its tensors, and the index of each tensor in the restored state.
    struct Buffers<'s> {
        state: &'s [Owned],
        memory: Vec<Vec<u8>>,
        places: Vec<usize>,
    }

    impl Destination for Buffers<'_> {
        fn prepare(&mut self, found: &Restored<'_>) -> tensorcask::Result<()> {
            let place = |tensor: &RestoredTensor<'_>| self.state.iter().position(|known| known.name == tensor.name).unwrap();
            self.places = found.tensors.iter().map(place).collect();
            Ok(())
        }

        fn buffers(&mut self) -> tensorcask::Result<Vec<Option<&mut [u8]>>> {
            let mut memory: Vec<Option<&mut [u8]>> = self.memory.iter_mut().map(|bytes| Some(bytes.as_mut_slice())).collect();
            Ok(self.places.iter().map(|place| memory[*place].take()).collect())
        }
    }

    /// Measures a restore from a source, either into new memory or into existing buffers of the trainer.
    fn timed(engine: &Engine, source: fn(&Source) -> bool, state: &[Owned], into: bool) -> f64 {
        if !into {
            let (took, found) = seconds(|| engine.restore(Latest).unwrap());
            assert!(source(&found.source), "restored from {}", found.source);
            assert_same(&found, state);
            return took;
        }
        let memory = state.iter().map(|tensor| vec![1; tensor.data.len()]).collect();
        let mut own = Buffers { state, memory, places: Vec::new() };
        let (took, found) = seconds(|| engine.restore_into(Latest, None, &mut own).unwrap().source);
        assert!(source(&found), "restored from {found}");
        assert!(own.memory.iter().zip(state).all(|(own, tensor)| *own == tensor.data), "it came back otherwise");
        took
    }

    fn assert_same(found: &Restored<'_>, state: &[Owned]) {
        for tensor in &found.tensors {
            let expected = state.iter().find(|known| known.name == tensor.name).unwrap();
            assert!(*tensor.data == *expected.data, "{} came back otherwise", tensor.name);
        }
    }

    fn restore(states: &[Vec<Owned>; 2], rounds: usize, folder: Option<&str>) -> Table {
        let host = Host::new(folder);
        let size = bytes_of(&states[0]);
        let options = EngineOptions { policy: Policy::Consecutive, ..host.options() };
        let mut engine = Engine::start(options.clone()).unwrap();
        for step in 0..2u64 {
            engine.save(step, &views(&states[step as usize]), &[], &Metadata::default()).unwrap();
            assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
        }
        drop(engine);
        let newest = &states[1];
        let mut times: [Vec<f64>; 8] = Default::default();
        let arena = arena_of(&host);
        let elsewhere = Host::new(folder);
        let from_disk = EngineOptions { folder: elsewhere.options().folder, ..options.clone() };
        let is_tier = |source: &Source| matches!(source, Source::Tier(..));
        let time = |times: &mut Vec<f64>, engine: &Engine, source: fn(&Source) -> bool, into: bool| {
            times.push(timed(engine, source, newest, into));
        };
        for round in 0..rounds.min(6) {
            let engine = Engine::start(options.clone()).unwrap();
            time(&mut times[0], &engine, |source| *source == Source::Slot, false);
            time(&mut times[1], &engine, |source| *source == Source::Slot, true);
            drop(engine);
            // The first restore touches memory that later ones reuse, so each kind comes first in turn.
            let from_memory = |times: &mut [Vec<f64>; 8]| {
                let kept = arena.with_extension("kept");
                std::fs::rename(&arena, &kept).unwrap();
                let engine = Engine::start(options.clone()).unwrap();
                time(&mut times[2], &engine, |source| *source == Source::Memory, false);
                time(&mut times[3], &engine, |source| *source == Source::Memory, true);
                drop(engine);
                std::fs::rename(&kept, &arena).unwrap();
            };
            if round % 2 == 0 {
                from_memory(&mut times);
            }
            let engine = Engine::start(from_disk.clone()).unwrap();
            time(&mut times[4], &engine, is_tier, false);
            time(&mut times[5], &engine, is_tier, true);
            for into in [false, true] {
                if drop_caches() {
                    time(&mut times[6 + usize::from(into)], &engine, is_tier, into);
                }
            }
            drop(engine);
            // The engine with the other folder has taken the store over. Take it back.
            drop(Engine::start(options.clone()).unwrap());
            if round % 2 == 1 {
                from_memory(&mut times);
            }
        }
        let times = times.map(median);
        let cold = times[6];
        let title = format!(
            "Restoring {:.2} GB, a delta of one step, every byte checked, median of {}. The targets: raw at least 3 times faster than a cold disk, \
             encoded memory no slower than a warm one",
            size as f64 / 1e9,
            rounds.min(6)
        );
        let mut table = Table::new(title, &["s", "GB/s", "x cold disk"]);
        let names = [
            "raw slot, borrowed",
            "raw slot, into the trainer's memory",
            "encoded memory",
            "encoded memory, into the trainer's memory",
            "local disk, warm",
            "local disk, warm, into the trainer's memory",
            "local disk, cold",
            "local disk, cold, into the trainer's memory",
        ];
        for (name, seconds) in names.into_iter().zip(times) {
            let rate = size as f64 / seconds / 1e9;
            let cells = vec![format!("{seconds:.3}"), format!("{rate:.2}"), format!("{:.2}", seconds / cold)];
            table.row(name, cells, json!({ "seconds": seconds, "gb_per_s": rate, "times_cold_disk": seconds / cold }));
        }
        table
    }

    fn arena_of(host: &Host) -> PathBuf {
        host.memory.path().join("engine").join(host.status().0.key).join("rank-0/arena")
    }

    /// Drops the page cache; returns `false` without root.
    fn drop_caches() -> bool {
        std::process::Command::new("sync").status().is_ok_and(|status| status.success())
            && std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
    }

    fn run(states: &[Vec<Owned>; 2], saves: u64, folder: Option<&str>) -> Table {
        let host = Host::new(folder);
        let size = bytes_of(&states[0]);
        let cap = size * 2;
        let mut engine = Engine::start(EngineOptions { memory_cap: Some(cap), ..host.options() }).unwrap();
        let mut stalls = Vec::new();
        let mut most_memory = 0;
        let mut most_resident = 0;
        let begun = Instant::now();
        for step in 1..=saves {
            stalls.push(engine.save(step, &views(&states[step as usize % 2]), &[], &Metadata::default()).unwrap().stall.as_secs_f64());
            let (run, resident) = host.status();
            (most_memory, most_resident) = (run.memory_bytes.max(most_memory), resident.max(most_resident));
            std::thread::sleep(Duration::from_secs(step).saturating_sub(begun.elapsed()));
        }
        assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
        let (run, _) = host.status();
        engine.finish().unwrap();
        let worst = stalls.iter().copied().fold(0.0, f64::max);
        let title = format!(
            "{saves} saves of {:.2} GB, one each second, adaptive policy, keep 2, cap {:.2} GB",
            size as f64 / 1e9,
            cap as f64 / 1e9
        );
        let mut table = Table::new(title, &["value"]);
        let gb = |bytes: u64| format!("{:.3} GB", bytes as f64 / 1e9);
        for (name, cell, value) in [
            ("stall, median", format!("{:.1} ms", median(stalls.clone()) * 1e3), json!(median(stalls))),
            ("stall, longest (the first makes the arena)", format!("{:.1} ms", worst * 1e3), json!(worst)),
            ("encoded snapshots in memory, most", gb(most_memory), json!(most_memory)),
            ("resident memory of the agent, most", gb(most_resident), json!(most_resident)),
            ("saves in the store", run.last_commit_step.unwrap_or(0).to_string(), json!(run.last_commit_step)),
            ("failed saves", run.failed_saves.to_string(), json!(run.failed_saves)),
        ] {
            table.row(name, vec![cell], value);
        }
        table
    }

    /// Memory that the engine takes on this host after the last save, and the most while the saves are encoded.
    fn memory(states: &[Vec<Owned>; 2], folder: Option<&str>) -> Table {
        let size = bytes_of(&states[0]);
        let title = format!(
            "Host memory per byte of a state of {:.2} GB: after {MEMORY_SAVES} saves one step apart, and the most while one of them is encoded",
            size as f64 / 1e9
        );
        let mut table = Table::new(title, &["encoded", "arena", "agent", "trainer", "all", "most"]);
        let low = |host: &Host| EngineOptions { slots: 1, keep: 1, keep_base_decoded: false, policy: Policy::Adaptive, ..host.options() };
        let consecutive = |host: &Host, keep| EngineOptions { keep, policy: Policy::Consecutive, ..host.options() };
        type Options<'o> = &'o dyn Fn(&Host) -> EngineOptions;
        let rows: [(&str, Options<'_>); 8] = [
            ("adaptive, keep 1, encoded by the trainer", &|host| EngineOptions { encode: Encode::Inline, ..low(host) }),
            ("adaptive, keep 1, 1 slot, base not kept decoded", &low),
            ("adaptive, keep 1, 1 slot", &|host| EngineOptions { keep_base_decoded: true, ..low(host) }),
            ("adaptive, keep 2 (default)", &|host| host.options()),
            ("consecutive, keep 1, 1 slot, base not kept decoded", &|host| EngineOptions { policy: Policy::Consecutive, ..low(host) }),
            ("consecutive, keep 1", &|host| consecutive(host, 1)),
            ("consecutive, keep 2", &|host| consecutive(host, 2)),
            ("consecutive, keep 4", &|host| consecutive(host, 4)),
        ];
        for (name, options) in rows {
            let host = Host::new(folder);
            let before = private_bytes(std::process::id());
            let mut engine = Engine::start(options(&host)).unwrap();
            let own = || private_bytes(std::process::id()).saturating_sub(before);
            let mut most = 0;
            for step in 1..=MEMORY_SAVES {
                engine.save(step, &views(&states[step as usize % 2]), &[], &Metadata::default()).unwrap();
                while !engine.wait(Until::Durable, Duration::from_millis(20)).unwrap().reached {
                    // The first save is a base.
                    most = most.max((host.agent().host_memory_bytes() + own()) * u64::from(step > 1));
                }
            }
            // Until the allocator of the agent has returned what is free.
            std::thread::sleep(Duration::from_millis(500));
            let agent = host.agent();
            let run = &agent.runs[0];
            let arena = run.ranks.first().map_or(0, |rank| rank.arena_present_bytes);
            let bytes = [run.memory_bytes, arena, agent.private_bytes, own(), agent.host_memory_bytes() + own(), most];
            let ratios = bytes.map(|bytes| bytes as f64 / size as f64);
            let [encoded, arena, own, trainer, all, most] = ratios;
            let values = json!({ "encoded": encoded, "arena": arena, "agent": own, "trainer": trainer, "all": all, "most": most });
            table.row(name, ratios.map(|ratio| format!("{ratio:.2}")).to_vec(), values);
            engine.finish().unwrap();
        }
        table
    }

    /// Saves of the table of memory: a base and deltas.
    const MEMORY_SAVES: u64 = 6;

    /// CPU and private memory of the agent, by the form in which it keeps the base.
    fn bases(states: &[Vec<Owned>; 2], rounds: usize, folder: Option<&str>) -> Table {
        let size = bytes_of(&states[0]);
        let title = format!(
            "Agent of a run of {:.2} GB, by policy and form of the base; a delta of one step, median of {rounds}",
            size as f64 / 1e9
        );
        let mut table = Table::new(title, &["CPU-s per delta (user)", "private memory, x state", "delta, x state"]);
        for policy in [Policy::Adaptive, Policy::Consecutive] {
            for keep_base_decoded in [true, false] {
                let host = Host::new(folder);
                let mut engine = Engine::start(EngineOptions { policy, keep_base_decoded, ..host.options() }).unwrap();
                let agent = agent_status(Some(&host.memory.path().join("engine"))).unwrap().pid;
                let mut save = |step: u64| {
                    let before = user_seconds(agent);
                    engine.save(step, &views(&states[step as usize % 2]), &[], &Metadata::default()).unwrap();
                    assert!(engine.wait(Until::Durable, LONG).unwrap().reached);
                    user_seconds(agent) - before
                };
                save(0);
                // Each delta is of one step.
                let deltas = (1..=rounds as u64).map(&mut save).collect();
                let cpu = median(deltas);
                let private = private_bytes(agent) as f64 / size as f64;
                let stored = host.status().0.saves.iter().rev().find_map(|save| save.bytes_out).unwrap_or(0) as f64 / size as f64;
                let form = if keep_base_decoded { "decoded" } else { "encoded" };
                let cells = vec![format!("{cpu:.3}"), format!("{private:.2}"), format!("{stored:.3}")];
                let values = json!({ "cpu_seconds": cpu, "private": private, "stored": stored });
                table.row(&format!("{}, base {form}", policy.name()), cells, values);
                engine.finish().unwrap();
            }
        }
        table
    }

    /// User time of a process so far, in seconds.
    fn user_seconds(pid: u32) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        // Clock ticks are 1/100 s on Linux, whatever the kernel's own clock is.
        after_name.split_whitespace().nth(11).unwrap().parse::<f64>().unwrap() / 100.0
    }

    /// Memory of a process that no file backs.
    fn private_bytes(pid: u32) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}
