//! Saves a real checkpoint each second, and resumes from the last one when it is started again.
//!
//! ```sh
//! cargo run -p tensorcask-engine --example trainer -- STORE FOLDER-OF-step-*.safetensors [STEPS [SECONDS-PER-STEP]]
//! ```
#![allow(missing_docs, reason = "an example")]

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    match train() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

#[cfg(target_os = "linux")]
fn train() -> tensorcask::Result<()> {
    use std::io::Write;
    use std::time::{Duration, Instant};

    use tensorcask::interchange::safetensors::Files;
    use tensorcask::{ErrorKind, Latest, Metadata, Policy};
    use tensorcask_engine::{Engine, EngineOptions};

    let begun = Instant::now();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [store, folder, rest @ ..] = arguments.as_slice() else {
        eprintln!("usage: trainer STORE FOLDER [STEPS [SECONDS-PER-STEP]]");
        std::process::exit(2)
    };
    let number = |at: usize, default: f64| rest.get(at).and_then(|text: &String| text.parse().ok()).unwrap_or(default);
    let steps = number(0, 1e9) as u64;
    let pause = Duration::from_secs_f64(number(1, 1.0));

    // Stands in for training: the state of each step is read from a file.
    let files = [1000, 1001, 1010].map(|step| Files::open(&[format!("{folder}/step-{step}.safetensors")]));
    let files = files.into_iter().collect::<tensorcask::Result<Vec<_>>>()?;
    let state = |step: u64| files[(step % 3) as usize].tensors();

    let mut engine = Engine::start(EngineOptions { policy: Policy::Consecutive, ..EngineOptions::new(store.as_str()) })?;
    let mut step = match engine.restore(Latest) {
        Ok(found) => {
            let expected = state(found.step)?;
            let same = |name: &str| expected.iter().find(|view| view.name() == name).map(|view| view.data());
            assert!(found.tensors.iter().all(|tensor| same(&tensor.name) == Some(&*tensor.data)), "restored another state than was saved");
            println!(
                "resumed from step {} out of {} in {:.3} s ({:.3} s since the process began); every bit compared",
                found.step,
                found.source,
                found.seconds,
                begun.elapsed().as_secs_f64()
            );
            found.step
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            println!("nothing to resume from: beginning at step 0");
            0
        }
        Err(e) => return Err(e),
    };
    while step < steps {
        step += 1;
        let saved = engine.save(step, &state(step)?, &[], &Metadata::default())?;
        println!("step {step}: saved, training went on after {:.1} ms", saved.stall.as_secs_f64() * 1e3);
        // A reader of the output sees every line, even if this process is killed next.
        let _ = std::io::stdout().flush();
        std::thread::sleep(pause);
    }
    engine.finish()
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("the engine needs Linux");
}
