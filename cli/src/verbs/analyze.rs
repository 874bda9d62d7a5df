//! `tensorcask analyze`: measures how two states differ, in numbers that predict compression.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;
use tensorcask::blocking::Store;
use tensorcask::interchange::safetensors::Files;
use tensorcask::{Dtype, Result};

use crate::analysis::{Analysis, Bin, Figures};
use crate::chart::{self, Band, Chart, MAX_BANDS, Series};
use crate::output::Outcome;
use crate::pair::{Described, Pair};
use crate::parse;
use crate::progress::Progress;
use crate::text::{Text, human_shape, percent};

#[derive(Debug, clap::Args)]
#[command(
    override_usage = "tensorcask analyze [OPTIONS] A.safetensors B.safetensors\n       tensorcask analyze [OPTIONS] STORE STEP STEP",
    after_help = "Compares two safetensors files, or two steps of a store (a number, or `latest`). Reports for each tensor, and for each
combination of role and type:
  changed      share of elements that changed
  rows         share of rows with a change
  bits         order-0 entropy of the byte planes of B, in bits per element
  bits of XOR  the same for the XOR of A and B
  median ulps  number of representable floats by which the median element moved
Also lists the share of elements in which each bit flipped.

Example:
  tensorcask analyze step-1000.safetensors step-1001.safetensors --png difference.png"
)]
pub(crate) struct Args {
    /// Two safetensors files, or a store and two steps
    #[arg(required = true, num_args = 2..=3, value_name = "INPUT")]
    inputs: Vec<String>,
    /// Also draw the result as a PNG
    #[arg(long, value_name = "FILE.png")]
    png: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    a: String,
    b: String,
    elements: u64,
    changed: u64,
    changed_share: Option<f64>,
    groups: Vec<Group>,
    tensors: Vec<Row>,
    left_out: Vec<LeftOut>,
}

/// Figures of all tensors of one role and type.
#[derive(Debug, Serialize)]
struct Group {
    role: String,
    dtype: &'static str,
    tensors: u64,
    #[serde(flatten)]
    figures: Figures,
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    role: String,
    dtype: &'static str,
    shape: Vec<u64>,
    #[serde(flatten)]
    figures: Figures,
}

/// Tensor that only one side has, or that has different types or shapes.
#[derive(Debug, Serialize)]
struct LeftOut {
    name: String,
    status: &'static str,
}

impl Args {
    pub(crate) fn check(&self) -> Result<(), String> {
        self.inputs.iter().skip(1).filter(|_| self.inputs.len() == 3).try_for_each(|step| parse::at(step).map(|_| ()))
    }
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let (report, bands) = match args.inputs.as_slice() {
        [store, a, b] => {
            let step = |text: &str| parse::at(text).map_err(tensorcask::Error::invalid);
            let opened = Store::open(store)?;
            let snapshots = [opened.snapshot(step(a)?)?, opened.snapshot(step(b)?)?];
            let _progress = Progress::start(&opened, "analyzing");
            let [a, b] = [&snapshots[0], &snapshots[1]].map(|snapshot| format!("{store}, step {}", snapshot.step()));
            analyze(&Pair::Snapshots([&snapshots[0], &snapshots[1]]), a, b)?
        }
        [a, b] => {
            let files = [Files::open(&[a])?, Files::open(&[b])?];
            analyze(&Pair::Views([files[0].tensors()?, files[1].tensors()?]), a.clone(), b.clone())?
        }
        _ => return Err(tensorcask::Error::invalid("give two safetensors files, or a store and two steps")),
    };
    if let Some(path) = &args.png {
        chart::write(path, &format!("{} to {}", report.a, report.b), &bands)?;
    }
    let text = report.describe();
    Outcome::new(&report, text)
}

/// Returns the report and the bands of the picture.
fn analyze(pair: &Pair<'_>, a: String, b: String) -> Result<(Report, Vec<Band>)> {
    let mut report = Report { a, b, elements: 0, changed: 0, changed_share: None, groups: vec![], tensors: vec![], left_out: vec![] };
    let mut groups: BTreeMap<(String, Dtype), (u64, Analysis)> = BTreeMap::new();
    for (tensor, status) in pair.tensors() {
        if let Some(status) = status {
            report.left_out.push(LeftOut { name: tensor.name, status });
            continue;
        }
        let mut found = Analysis::new(tensor.dtype, &tensor.shape);
        pair.each_window(&tensor, |elements, old, new| found.add(elements, old, new))?;
        report.elements = report.elements.saturating_add(found.elements());
        report.changed = report.changed.saturating_add(found.changed());
        let Described { name, role, dtype, shape } = tensor;
        let (count, total) = groups.entry((role.clone(), dtype)).or_insert_with(|| (0, Analysis::new(dtype, &[])));
        *count += 1;
        total.merge(&found);
        report.tensors.push(Row { name, role, dtype: dtype.name(), shape, figures: found.figures() });
    }
    report.changed_share = crate::text::share(report.changed, report.elements);
    for ((role, dtype), (tensors, total)) in groups {
        report.groups.push(Group { role, dtype: dtype.name(), tensors, figures: total.figures() });
    }
    let bands = report.groups.iter().take(MAX_BANDS).map(band).collect();
    Ok((report, bands))
}

impl Report {
    fn describe(&self) -> Text {
        let mut text = Text::default();
        let optional = |count: Option<f64>| count.map_or("-".to_owned(), |_| percent(count));
        let cells = |figures: &Figures| {
            let rows = optional(figures.rows_changed_share);
            let changed = percent(figures.changed_share);
            [changed, rows, format!("{:.2}", figures.bits_full), format!("{:.2}", figures.bits_xor), median(figures)]
        };
        let of_row = |row: &Row| {
            let names = [row.name.clone(), row.dtype.to_owned(), human_shape(&row.shape)];
            names.into_iter().chain(cells(&row.figures)).collect()
        };
        let rows: Vec<Vec<String>> = self.tensors.iter().map(of_row).collect();
        text.table(&["tensor", "dtype", "shape", ">changed", ">rows", ">bits", ">bits of XOR", ">median ulps"], &rows);
        let of_group = |group: &Group| {
            let names = [group.role.clone(), group.dtype.to_owned(), group.tensors.to_string(), group.figures.elements.to_string()];
            names.into_iter().chain(cells(&group.figures)).collect()
        };
        let groups: Vec<Vec<String>> = self.groups.iter().map(of_group).collect();
        text.line("");
        text.table(&["role", "dtype", ">tensors", ">elements", ">changed", ">rows", ">bits", ">bits of XOR", ">median ulps"], &groups);
        for Group { role, dtype, figures, .. } in &self.groups {
            text.line("");
            text.line(format!("{role}, {dtype}"));
            let planes = |planes: &[f64]| planes.iter().rev().map(|bits| format!("{bits:.2}")).collect::<Vec<_>>().join(" ");
            let flips: Vec<String> = figures.flips.iter().rev().map(|share| format!("{:.1}", share * 100.0)).collect();
            let mut fields = vec![
                ("  planes, high to low, bits", planes(&figures.planes_full)),
                ("  planes of the XOR", planes(&figures.planes_xor)),
                ("  bits flipped, high to low, %", flips.join(" ")),
            ];
            if let Some(bins) = &figures.ulps {
                let total = bins.iter().map(|bin| bin.elements).sum::<u64>().max(1);
                let of_all = |bin: &Bin| bin.elements as f64 / total as f64 * 100.0;
                // Leave out bins that would print as 0.0.
                let shown = bins.iter().filter(|bin| of_all(bin) >= 0.05).map(|bin| format!("{}: {:.1}", span(bin), of_all(bin)));
                fields.push(("  moved by ulps, %", shown.collect::<Vec<_>>().join("  ")));
            }
            text.fields(&fields);
        }
        text.line("");
        for left in &self.left_out {
            text.line(format!("{} was left out: {}", left.name, left.status));
        }
        text.line(format!("{} to {}: {} of {} elements changed", self.a, self.b, percent(self.changed_share), self.elements));
        text
    }
}

/// Range of a bin as text; large ranges as the power of two at which they begin.
fn span(bin: &Bin) -> String {
    match bin {
        Bin { from, to, .. } if from == to => from.to_string(),
        Bin { from: from @ ..1024, to, .. } => format!("{from}-{to}"),
        Bin { from, .. } => format!("2^{}", from.ilog2()),
    }
}

/// Bin of the median element.
fn median(figures: &Figures) -> String {
    let Some(bins) = &figures.ulps else { return "-".to_owned() };
    let total: u64 = bins.iter().map(|bin| bin.elements).sum();
    let mut seen = 0;
    let middle = bins.iter().find(|bin| {
        seen += bin.elements;
        2 * seen >= total && total > 0
    });
    middle.map_or("-".to_owned(), span)
}

/// Charts of a group.
fn band(group: &Group) -> Band {
    let Group { role, dtype, tensors, figures } = group;
    let most = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let as_percent = |share: f64| format!("{:.1}%", share * 100.0);
    let every = |count: usize| if count > 16 { 4 } else { 1 };
    let numbered = |at: usize, count: usize| if at.is_multiple_of(every(count)) { at.to_string() } else { String::new() };
    // Bits and planes are drawn as they are written: highest first.
    let flips: Vec<f64> = figures.flips.iter().rev().copied().collect();
    let count = flips.len();
    let mut charts = vec![
        Chart {
            title: "bits flipped, share of elements".to_owned(),
            top: most(&flips),
            top_label: as_percent(most(&flips)),
            labels: (0..count).rev().map(|bit| numbered(bit, count)).collect(),
            series: vec![Series { name: "flipped", values: flips }],
        },
        Chart {
            title: "order-0 entropy of byte planes, bits".to_owned(),
            top: 8.0,
            top_label: "8".to_owned(),
            labels: (0..figures.planes_full.len()).rev().map(|plane| format!("byte {plane}")).collect(),
            series: vec![
                Series { name: "B", values: figures.planes_full.iter().rev().copied().collect() },
                Series { name: "A xor B", values: figures.planes_xor.iter().rev().copied().collect() },
            ],
        },
    ];
    if let Some(bins) = &figures.ulps {
        let total = bins.iter().map(|bin| bin.elements).sum::<u64>().max(1);
        let values: Vec<f64> = bins.iter().map(|bin| bin.elements as f64 / total as f64).collect();
        let label = |(at, bin): (usize, &Bin)| match bin.from {
            0 | 1 => bin.from.to_string(),
            _ if at.is_multiple_of(if bins.len() > 12 { 4 } else { 2 }) => format!("2^{}", at - 1),
            _ => String::new(),
        };
        charts.push(Chart {
            title: "ulps moved (bins of powers of two), share".to_owned(),
            top: most(&values),
            top_label: as_percent(most(&values)),
            labels: bins.iter().enumerate().map(label).collect(),
            series: vec![Series { name: "moved", values }],
        });
    }
    let title = format!(
        "{role}, {dtype}: {tensors} tensors, {} of {} elements changed; {:.2} bits, XOR {:.2}",
        percent(figures.changed_share),
        figures.elements,
        figures.bits_full,
        figures.bits_xor
    );
    Band { title, charts }
}
