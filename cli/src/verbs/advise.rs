//! `tensorcask advise`: how often to save, and how many steps to keep.

use std::time::Duration;

use serde::Serialize;
use tensorcask::Result;
use tensorcask::blocking::{Store, maintain};
use tensorcask::maintain::{Advice, TimeEstimate, TimeOverrides};

use crate::output::Outcome;
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, human_seconds};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Saves record how long they took. From these times and the mean time between failures, `advise` computes the interval
that loses the least time to saves, repeated training and restarts, by the formula of Daly. The table names the origin of
each time: measured, given or assumed. The comparison is with `torch.save` every 1,000 steps.

Example:
  tensorcask advise runs/a --mtbf 8h --measure-restore"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Mean time between failures of the whole job: 30m, 8h, 7d
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    mtbf: Duration,
    /// Time of a restore [default: as long as a save]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    restore: Option<Duration>,
    /// Measure the time of a restore now: read, decode and check the newest step
    #[arg(long, conflicts_with = "restore")]
    measure_restore: bool,
    /// Time for which a save stops the training [default: as recorded by saves]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    stall: Option<Duration>,
    /// Time of a training step [default: from the times between saves]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    step_time: Option<Duration>,
    /// Time of torch.save, for the comparison [default: all tensors at 1 GB/s]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    torch_save: Option<Duration>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    store: &'a str,
    mtbf_s: f64,
    /// Time of training between two saves.
    interval_s: f64,
    interval_steps: Option<u64>,
    /// Whether saves that follow each other faster would not be written in time.
    limited_by_saves: bool,
    /// Expected share of all time that is lost, from 0 to 1.
    lost_share: f64,
    torch_save_lost_share: Option<f64>,
    keep_last: u64,
    keep_every: Option<u64>,
    times: Times<'a>,
}

#[derive(Debug, Serialize)]
struct Times<'a> {
    stall: TimeJson<'a>,
    save: TimeJson<'a>,
    stage: TimeJson<'a>,
    restore: TimeJson<'a>,
    step: Option<TimeJson<'a>>,
    torch_save: TimeJson<'a>,
}

#[derive(Debug, Serialize)]
struct TimeJson<'a> {
    seconds: f64,
    /// `measured`, `given` or `assumed`.
    origin: &'static str,
    how: &'a str,
}

impl<'a> TimeJson<'a> {
    fn of(time: &'a TimeEstimate) -> Self {
        Self { seconds: time.seconds, origin: time.origin.name(), how: &time.how }
    }
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let given = TimeOverrides { stall: args.stall, restore: args.restore, step: args.step_time, torch_save: args.torch_save };
    let mut times = maintain::measure(&store.snapshots()?, given)?;
    if args.measure_restore {
        let progress = Progress::start(&store, "measuring a restore");
        times.restore = maintain::measured_restore(&store)?;
        drop(progress);
    }
    let advice = maintain::advise(times, args.mtbf)?;
    let text = describe(&advice);
    let times = &advice.times;
    let report = Report {
        store: &args.store,
        mtbf_s: advice.mtbf_s,
        interval_s: advice.interval_s,
        interval_steps: advice.interval_steps,
        limited_by_saves: advice.is_limited_by_saves,
        lost_share: advice.lost_share,
        torch_save_lost_share: advice.torch_lost_share,
        keep_last: advice.keep_last,
        keep_every: advice.keep_every,
        times: Times {
            stall: TimeJson::of(&times.stall),
            save: TimeJson::of(&times.save),
            stage: TimeJson::of(&times.stage),
            restore: TimeJson::of(&times.restore),
            step: times.step.as_ref().map(TimeJson::of),
            torch_save: TimeJson::of(&times.torch_save),
        },
    };
    Outcome::new(&report, text)
}

fn describe(advice: &Advice) -> Text {
    let mut text = Text::default();
    let interval = human_seconds(advice.interval_s);
    let save = match advice.interval_steps {
        Some(1) => format!("after every step ({interval} of training)"),
        Some(steps) => format!("every {steps} steps ({interval} of training)"),
        None => format!("after every {interval} of training; give --step-time to see it in steps"),
    };
    let keep = match advice.keep_every {
        Some(every) => format!("the last {}, and every step that is a multiple of {every}", advice.keep_last),
        None => format!("the last {}, and one in {}", advice.keep_last, human_seconds(advice.mtbf_s)),
    };
    let mut lines = vec![("save", save), ("keep", keep), ("lost time", lost(advice.lost_share))];
    if let Some(share) = advice.torch_lost_share {
        lines.push(("with torch.save", format!("{}, every 1,000 steps", lost(share))));
    }
    text.fields(&lines);
    if advice.is_limited_by_saves {
        text.line("A shorter interval would lose less time, but saves take longer than that interval to write.");
    }
    text.line("");
    let times = &advice.times;
    let mut rows = vec![vec!["between failures".to_owned(), human_seconds(advice.mtbf_s), "given".to_owned(), "as given".to_owned()]];
    let known = [
        ("stall of a save", Some(&times.stall)),
        ("whole save", Some(&times.save)),
        ("slowest stage", Some(&times.stage)),
        ("restore", Some(&times.restore)),
        ("training step", times.step.as_ref()),
        ("torch.save", Some(&times.torch_save)),
    ];
    for (name, time) in known {
        rows.push(match time {
            Some(time) => vec![name.to_owned(), human_seconds(time.seconds), time.origin.name().to_owned(), time.how.clone()],
            None => vec![name.to_owned(), "-".to_owned(), "unknown".to_owned(), "needs two saves".to_owned()],
        });
    }
    text.table(&["time", ">", "origin", "how"], &rows);
    text
}

/// A share of time, in per cent and per day.
fn lost(share: f64) -> String {
    let percent = share * 100.0;
    let digits = if percent < 1.0 { 2 } else { 1 };
    format!("{percent:.digits$} %, {} a day", human_seconds(share * 86_400.0))
}
