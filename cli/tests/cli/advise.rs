//! `tensorcask advise`: its outcome and the origin of each time.

use crate::place::{Place, conforms, stdout};

#[test]
fn advice_names_the_origin_of_each_time() {
    let place = Place::with_training();
    let found = place.json("advise @run --mtbf 8h --stall 500ms --step-time 2s --torch-save 2m");
    conforms("advise", &found);
    let origin = |name: &str| found["times"][name]["origin"].as_str().unwrap().to_owned();
    assert_eq!(["stall", "step", "torch_save"].map(origin), ["given"; 3]);
    assert_eq!(["save", "restore"].map(origin), ["measured", "assumed"]);
    // sqrt(2 * 0.5 * 28800) seconds.
    assert_eq!((&found["interval_steps"], &found["interval_s"]), (&85.into(), &170.0.into()));
    assert_eq!(&found["limited_by_saves"], false);
    assert!(found["lost_share"].as_f64().unwrap() < found["torch_save_lost_share"].as_f64().unwrap());

    let measured = place.json("advise @run --mtbf 8h --measure-restore");
    conforms("advise", &measured);
    assert_eq!((&measured["times"]["restore"]["origin"], &measured["times"]["stall"]["origin"]), (&"measured".into(), &"measured".into()));

    let text = stdout(&place.run("advise @run --mtbf 8h --stall 500ms --step-time 2s"));
    for part in ["every 85 steps (2 min 50 s of training)", "torch.save", "between failures", "8 h", "assumed"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn advice_needs_steps_and_times() {
    let place = Place::new();
    assert_eq!(place.error("advise @nowhere --mtbf 8h").0, 10);
    let place = Place::with_training();
    assert_eq!(place.error("advise @run --mtbf 0").0, 1);
    assert!(!place.run("advise @run").status.success(), "no time between failures");
    assert!(!place.run("advise @run --mtbf 8h --restore 3s --measure-restore").status.success());
}
