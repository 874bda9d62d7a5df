//! `tensorcask gradient`: reads the gradient of a step from the chunks that store it.

use std::path::PathBuf;

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::interchange::safetensors;
use tensorcask::{Result, Slice, StepGradient, StepSelector};

use crate::atomic::AtomicFile;
use crate::output::Outcome;
use crate::parse::{self, Ranges};
use crate::progress::Progress;
use crate::text::{Text, human_shape};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The gradient is the one that the optimizer added to its first moment or momentum: after clipping. A step holds it if it was
saved with the policy `consecutive` one step after the step before, and its moment is stored by the codec tc.gradient or
tc.joint. `tensorcask inspect` shows the codecs of a step. Other steps are an error (exit code 10).

If `longest bits` is at most 8, every gradient is a bf16 number times one factor per chunk: that of the optimizer, unless it is
less than a thousandth of its moment. `decay` must be beta1 of the optimizer, or its momentum, and `weight` 1 - beta1, or
1 - dampening.

Example:
  tensorcask gradient runs/a model.wte.weight --step 1000
  tensorcask gradient runs/a model.wte.weight --slice 0:128 -o gradient.safetensors"
)]
pub(crate) struct Args {
    /// Path or URL of the store
    store: String,
    /// Name of a weight, or of its first moment or momentum
    name: String,
    /// Step number or `latest`
    #[arg(long, value_name = "N", default_value = "latest", value_parser = parse::at)]
    step: StepSelector,
    /// Part of the tensor: one range per leading dimension; a or b may be left out
    #[arg(long, value_name = "a:b,c:d", value_parser = parse::ranges)]
    slice: Option<Ranges>,
    /// Output file with the gradient as f32, replaced if it exists; its folder must exist
    #[arg(short, long, alias = "out", value_name = "OUT.safetensors")]
    output: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    step: u64,
    tensor: &'a str,
    /// Tensor that stores the gradient.
    moment: String,
    shape: Vec<u64>,
    /// Root of the sum of squares; null if it exceeds binary64.
    norm: Option<f64>,
    min: Option<f64>,
    max: Option<f64>,
    /// Elements that are NaN or infinite.
    nonfinite: u64,
    rules: Vec<Rule>,
    longest_bits: u32,
    mean_bits: f64,
    estimated_elements: u64,
    output: Option<String>,
}

/// How the gradient gives the moment: `decay * moment + weight * gradient`.
#[derive(Debug, Serialize)]
struct Rule {
    decay: f32,
    weight: f32,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let store = Store::open(&args.store)?;
    let progress = Progress::start(&store, "reading");
    let snapshot = store.snapshot(args.step)?;
    let slice = match &args.slice {
        Some(ranges) => ranges.of(&snapshot.tensor(&args.name)?.shape),
        None => Slice::all(),
    };
    let gradient = snapshot.gradient(&args.name, &slice)?;
    drop(progress);
    if let Some(path) = &args.output {
        let output = AtomicFile::create(path)?;
        safetensors::write_tensor(&gradient.tensor, &mut output.file())?;
        output.commit()?;
    }
    let report = Report::of(args, snapshot.step(), gradient);
    let text = report.describe();
    Outcome::new(&report, text)
}

impl<'a> Report<'a> {
    fn of(args: &'a Args, step: u64, gradient: StepGradient) -> Self {
        let found = gradient.statistics();
        Self {
            step,
            tensor: &args.name,
            moment: gradient.moment,
            shape: gradient.tensor.shape,
            norm: found.squares.map(f64::sqrt),
            min: found.min,
            max: found.max,
            nonfinite: found.nan.saturating_add(found.positive_infinity).saturating_add(found.negative_infinity),
            rules: gradient.rules.iter().map(|rule| Rule { decay: rule.decay, weight: rule.weight }).collect(),
            longest_bits: gradient.longest_bits,
            mean_bits: gradient.mean_bits,
            estimated_elements: gradient.estimated_elements,
            output: args.output.as_ref().map(|path| path.display().to_string()),
        }
    }

    fn describe(&self) -> Text {
        let number = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), |number| format!("{number:.6e}"));
        let rules: Vec<String> = self.rules.iter().map(|rule| format!("decay {}, weight {}", rule.decay, rule.weight)).collect();
        let mut fields = vec![
            ("step", self.step.to_string()),
            ("stored with", self.moment.clone()),
            ("shape", human_shape(&self.shape)),
            ("norm", number(self.norm)),
            ("min", number(self.min)),
            ("max", number(self.max)),
            ("nonfinite", self.nonfinite.to_string()),
            ("added with", rules.join("; ")),
            ("longest bits", format!("{} (mean {:.1})", self.longest_bits, self.mean_bits)),
            ("estimated", self.estimated_elements.to_string()),
        ];
        fields.extend(self.output.iter().map(|path| ("output", path.clone())));
        let mut text = Text::default();
        text.fields(&fields);
        text
    }
}
