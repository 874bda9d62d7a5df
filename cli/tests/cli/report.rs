//! `tensorcask report`: its outcome. `tests/browser/` tests the page.
#![cfg(feature = "report")]

use crate::place::{Place, conforms, one_object, stdout};

#[test]
fn a_report_is_written_even_if_a_step_is_damaged() {
    let place = Place::with_training();
    let report = place.json("report @run -o @run.html");
    conforms("report", &report);
    assert_eq!((&report["steps"], &report["without_statistics"][0]), (&3.into(), &1000.into()));
    assert!(std::fs::read_to_string(place.path("run.html")).unwrap().contains("Content-Security-Policy"));
    assert!(stdout(&place.run("report @run -o @run.html")).contains("--statistics"));

    std::fs::remove_file(place.damage()).unwrap();
    let damaged = place.run("report @run -o @run.html --json");
    assert_eq!(damaged.status.code(), Some(3));
    let report = one_object(&damaged);
    conforms("report", &report);
    assert_eq!(report["damaged"][0]["step"], 1000);
    assert_eq!(place.error("report @nowhere -o @x.html").0, 10);
}
