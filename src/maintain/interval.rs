//! How often to save, if failures come at random: the formulas of Young and Daly.
//!
//! Training runs for a time tau, saves for a time delta, and so on. Failures come at random, on average once in a time M.
//! A failure loses what was trained since the last save, and a restart takes a time R. Short intervals waste time on
//! saves, long ones on repeated training. All times here are in seconds.
//!
//! Sources: J. W. Young, *A first order approximation to the optimum checkpoint interval*, Communications of the ACM
//! 17(9), 1974, pages 530-531. J. T. Daly, *A higher order estimate of the optimum checkpoint interval for restart
//! dumps*, Future Generation Computer Systems 22(3), 2006, pages 303-312.

/// Best interval between the end of a save and the start of the next one, by Young: sqrt(2 delta M).
pub fn young_interval(save_s: f64, mtbf_s: f64) -> f64 {
    (2.0 * save_s * mtbf_s).sqrt()
}

/// Best interval between the end of a save and the start of the next one, by Daly (2006):
///
/// ```text
/// sqrt(2 delta M) (1 + 1/3 sqrt(delta / 2M) + 1/9 delta / 2M) - delta    if delta < 2M
/// M                                                                      otherwise
/// ```
///
/// ```
/// use tensorcask::maintain::daly_interval;
/// // A save of 5 minutes, a failure a day: the paper's figure 3 gives 117 minutes.
/// assert_eq!((daly_interval(300.0, 86_400.0) / 60.0).round(), 117.0);
/// ```
pub fn daly_interval(save_s: f64, mtbf_s: f64) -> f64 {
    if save_s >= 2.0 * mtbf_s {
        return mtbf_s;
    }
    let ratio = save_s / (2.0 * mtbf_s);
    young_interval(save_s, mtbf_s) * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - save_s
}

/// Expected share of all time that is lost to saves, repeated training and restarts, from 0 to 1. By Daly's complete
/// model, in which a training of Ts seconds takes
///
/// ```text
/// M e^(R / M) (e^((tau + delta) / M) - 1) Ts / tau
/// ```
pub fn lost_share(interval_s: f64, save_s: f64, restart_s: f64, mtbf_s: f64) -> f64 {
    let whole = mtbf_s * (restart_s / mtbf_s).exp() * ((interval_s + save_s) / mtbf_s).exp_m1() / interval_s;
    // An interval of zero trains nothing; a sum beyond f64 is as good as infinite.
    if whole.is_finite() { 1.0 - 1.0 / whole.max(1.0) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::{daly_interval, lost_share, young_interval};

    const MINUTE: f64 = 60.0;
    const HOUR: f64 = 3600.0;

    #[test]
    fn intervals_are_those_of_the_figures_in_dalys_paper() {
        // Figures 3 to 5: a save takes 5 minutes.
        for (mtbf, minutes) in [(24.0 * HOUR, "117"), (6.0 * HOUR, "57"), (0.25 * HOUR, "9.1")] {
            let found = daly_interval(5.0 * MINUTE, mtbf) / MINUTE;
            let digits = minutes.split('.').nth(1).map_or(0, str::len);
            assert_eq!(format!("{found:.digits$}"), minutes);
        }
        assert_eq!(young_interval(5.0 * MINUTE, 24.0 * HOUR), 2.0 * HOUR);
        // Saves that take longer than twice the time between failures.
        assert_eq!(daly_interval(3.0 * HOUR, HOUR), HOUR);
    }

    #[test]
    fn no_interval_is_much_better_than_that_of_daly() {
        for save in [0.01, 1.0, 60.0, 600.0] {
            for mtbf in [0.5 * HOUR, 8.0 * HOUR, 1000.0 * HOUR] {
                let best = daly_interval(save, mtbf);
                let lost = |interval| lost_share(interval, save, 30.0, mtbf);
                let others = (1..=400).map(|at| lost(best * f64::from(at) / 100.0)).fold(1.0, f64::min);
                assert!(lost(best) <= others * 1.001, "save {save}, mtbf {mtbf}: {} and {others}", lost(best));
            }
        }
    }

    #[test]
    fn lost_time_adds_up() {
        // Rare failures: the saves, and half an interval and the restart for each failure.
        let interval = 1000.0;
        let save = 2.0;
        let restart = 20.0;
        let mtbf = 1e6;
        let expected = save / (interval + save) + (0.5 * interval + restart) / mtbf;
        assert!((lost_share(interval, save, restart, mtbf) - expected).abs() < 1e-5);
        assert_eq!(lost_share(1e9, 1.0, 1.0, 1.0), 1.0);
        assert_eq!(lost_share(0.0, 1.0, 1.0, 1.0), 1.0);
        assert!(lost_share(1.0, 0.0, 0.0, 1e12) < 1e-9);
    }
}
