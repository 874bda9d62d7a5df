"use strict";
// Fills the page from its data. Plotly reads some markup in labels, so names pass through `plain`.

const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const COLORS = ["#2f80d0", "#e08a1e", "#2ca089", "#b0579e", "#8d6e4f", "#7a86c8", "#c0a000", "#5aa5c0", "#d2647a", "#6b9a3c", "#9b7fd1", "#888888"];
const live = data.snapshots.filter((row) => row.status === "live");
const liveAt = new Map(live.map((row) => [row.step, row]));
const damaged = data.snapshots.filter((row) => row.damage !== null);
const hasStatistics = data.snapshots.some((row) => row.measured && row.nan !== null);
const nonfiniteOf = (row) => (row.nan ?? 0) + (row.positive_infinity ?? 0) + (row.negative_infinity ?? 0);
const steps = data.steps.map(String);

/** Text that Plotly shows as it is. */
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const counted = (number, one, many) => `${number} ${number === 1 ? one : many}`;

// Charts ----------------------------------------------------------------------------------------------------------------------

/** Functions that draw a chart, by the id of its element. They run again when the colours change. */
const charts = new Map();

function draw(id) {
  const { traces, layout = {}, height = 300 } = charts.get(id)();
  const axis = { gridcolor: color("grid"), linecolor: color("line"), zerolinecolor: color("line"), automargin: true };
  const merged = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: color("panel"),
    font: { color: color("ink"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: color("paper"), bordercolor: color("line"), font: { color: color("ink") }, align: "left" },
    margin: { l: 60, r: 20, t: 10, b: 40 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    height,
    ...layout,
  };
  for (const name of ["xaxis", "yaxis", "yaxis2"]) {
    if (name !== "yaxis2" || layout.yaxis2) merged[name] = { ...axis, ...(layout[name] ?? {}) };
  }
  Plotly.react(at(id), traces, merged, { responsive: true, displaylogo: false });
}

function chart(id, build) {
  charts.set(id, build);
  draw(id);
}

const isNarrow = document.documentElement.clientWidth < 600;
const stepAxis = { type: "category", title: { text: "step" }, nticks: isNarrow ? 5 : 12, tickangle: 0 };

function hoverOf(row) {
  const lines = [`step ${row.step}: ${row.kind}, ${row.status}${row.pinned ? ", pinned" : ""}`, row.time];
  if (row.parent !== null) lines.push(`parent: step ${row.parent}`);
  if (row.stored_bytes !== null) lines.push(`${bytes(row.stored_bytes)} stored, ratio ${row.ratio ?? "-"}`);
  if (nonfiniteOf(row) > 0) lines.push(`${nonfiniteOf(row)} NaN or infinities`);
  if (row.damage !== null) lines.push("damaged");
  return lines.join("<br>");
}

function timeline() {
  const line = { x: [], y: [], mode: "lines", line: { color: color("faint"), width: 1 }, hoverinfo: "skip", showlegend: false };
  for (const row of data.snapshots.filter((row) => row.parent !== null)) {
    line.x.push(row.parent, row.step, null);
    line.y.push(row.depth - 1, row.depth, null);
  }
  const dots = (name, rows, marker) => ({
    name,
    x: rows.map((row) => row.step),
    y: rows.map((row) => row.depth),
    text: rows.map(hoverOf),
    hoverinfo: "text",
    mode: "markers",
    marker,
  });
  const groups = [
    ["base", (row) => row.kind === "base" && row.status === "live", { symbol: "square", size: 11, color: COLORS[0] }],
    ["delta", (row) => row.kind === "delta" && row.status === "live", { symbol: "circle", size: 9, color: COLORS[1] }],
    ["forgotten", (row) => row.status === "forgotten", { symbol: "circle-open", size: 9, color: color("faint") }],
    ["replaced", (row) => row.status === "superseded", { symbol: "diamond-open", size: 9, color: color("faint") }],
    ["collected", (row) => row.status === "collected", { symbol: "circle-open-dot", size: 7, color: color("line") }],
    ["pinned", (row) => row.pinned, { symbol: "circle-open", size: 18, color: color("marked"), line: { width: 2 } }],
    ["NaN or infinity", (row) => nonfiniteOf(row) > 0, { symbol: "x-thin-open", size: 10, color: color("bad"), line: { width: 2 } }],
    ["damaged", (row) => row.damage !== null, { symbol: "square-x-open", size: 16, color: color("bad"), line: { width: 2 } }],
  ];
  const deepest = extremes(data.snapshots.map((row) => row.depth))[1];
  const margin = 0.15 * Math.max(1, deepest);
  const shown = groups.map(([name, is, marker]) => dots(name, data.snapshots.filter(is), marker)).filter((trace) => trace.x.length);
  return {
    traces: [line, ...shown],
    layout: {
      xaxis: { title: { text: "step" } },
      yaxis: { title: { text: "links to the base" }, range: [-margin, deepest + margin], dtick: Math.ceil((deepest + 1) / 8), zeroline: false },
    },
  };
}

function storedBytes() {
  const bars = data.roles.map((role, nth) => ({
    type: "bar",
    name: plain(role.name),
    x: steps,
    y: role.stored_bytes,
    text: role.stored_bytes.map((stored, i) => plain(`${role.name}: ${bytes(stored)} of ${bytes(role.tensor_bytes[i])}`)),
    textposition: "none",
    hoverinfo: "text+x",
    marker: { color: COLORS[nth % COLORS.length] },
  }));
  const ratios = data.steps.map((step) => liveAt.get(step)?.ratio ?? null);
  const ratio = {
    name: "ratio", x: steps, y: ratios, yaxis: "y2", mode: "lines+markers", hoverinfo: "y+name",
    line: { color: color("ink"), width: 1.5 }, marker: { size: 4 },
  };
  return {
    traces: [...bars, ratio],
    layout: {
      barmode: "stack",
      bargap: 0.15,
      xaxis: stepAxis,
      yaxis: { title: { text: "bytes" }, tickformat: "~s" },
      yaxis2: { title: { text: "ratio" }, overlaying: "y", side: "right", rangemode: "tozero", showgrid: false },
      margin: { l: 60, r: 60, t: 10, b: 40 },
    },
  };
}

function gaps() {
  const rows = data.snapshots.slice(1).map((row, i) => ({ row, ms: row.time_ms - data.snapshots[i].time_ms }));
  const trace = {
    x: rows.map(({ row }) => row.step),
    y: rows.map(({ ms }) => ms / 1000),
    text: rows.map(({ row, ms }) => `step ${row.step}: ${duration(ms)} after the commit before`),
    hoverinfo: "text",
    mode: "lines+markers",
    line: { color: COLORS[2], width: 1 },
    marker: { size: 5 },
  };
  return { traces: [trace], layout: { xaxis: { title: { text: "step" } }, yaxis: { title: { text: "seconds" }, rangemode: "tozero" } }, height: 220 };
}

const TIMES = [["stall", "stall_ms"], ["encoding", "encode_ms"], ["upload", "upload_ms"], ["whole save", "save_ms"]];
const timed = TIMES.filter(([, key]) => live.some((row) => row[key] !== null));

function times() {
  const rows = [...live].sort((a, b) => a.step - b.step);
  const traces = timed.map(([name, key]) => ({
    name,
    x: rows.map((row) => row.step),
    y: rows.map((row) => (row[key] === null ? null : row[key] / 1000)),
    text: rows.map((row) => (row[key] === null ? "" : `step ${row.step}: ${name} ${duration(row[key])}`)),
    hoverinfo: "text",
    mode: "lines+markers",
    line: { color: COLORS[TIMES.findIndex(([other]) => other === name)], width: 1 },
    marker: { size: 5 },
  }));
  return { traces, layout: { xaxis: { title: { text: "step" } }, yaxis: { title: { text: "seconds" }, rangemode: "tozero" }, showlegend: true }, height: 260 };
}

function nonfinite() {
  const rows = live.filter((row) => nonfiniteOf(row) > 0).sort((a, b) => a.step - b.step);
  const kinds = [["NaN", "nan", "bad"], ["+infinity", "positive_infinity", "marked"], ["-infinity", "negative_infinity", "accent"]];
  const [first, last] = extremes(live.map((row) => row.step));
  const width = Math.max(0.8, (last - first) / 150);
  const traces = kinds.map(([name, key, tone]) => ({
    type: "bar", name, width, x: rows.map((row) => row.step), y: rows.map((row) => row[key]), marker: { color: color(tone) },
    hovertemplate: "step %{x}: %{y}",
  }));
  const xaxis = { title: { text: "step" }, range: [first - width, last + width] };
  return { traces, layout: { barmode: "stack", xaxis, yaxis: { title: { text: "elements" }, rangemode: "tozero" } }, height: 240 };
}

function lines(key, title) {
  const traces = data.roles.map((role, nth) => ({
    name: plain(role.name), x: steps, y: role[key], mode: "lines+markers", connectgaps: false,
    line: { color: COLORS[nth % COLORS.length], width: 1.5 }, marker: { size: 4 },
  }));
  const layout = { xaxis: stepAxis, yaxis: { title: { text: title }, type: "log", exponentformat: "power", nticks: 8 } };
  return { traces, layout, height: 260 };
}

/** A heat map of positive numbers on a log scale, with cells of `marks` in red. `z[row][column]`. */
function heat(names, z, texts, marks, title) {
  const logs = z.map((row) => row.map((value) => (value > 0 ? Math.log10(value) : null)));
  const known = logs.flat().filter((value) => value !== null);
  const [low, high] = [Math.floor(Math.min(...extremes(known))), Math.ceil(Math.max(...extremes(known)))];
  const every = Math.max(1, Math.ceil((high - low) / 8));
  const ticks = [];
  for (let power = low; power <= high; power += every) ticks.push(power);
  const rows = names.map((_, i) => i);
  const map = {
    type: "heatmap", x: steps, y: rows, z: logs, text: texts, hoverinfo: "text", colorscale: "Viridis", xgap: isNarrow || steps.length > 120 ? 0 : 1,
    ygap: names.length > 50 ? 0 : 1,
    colorbar: { title: { text: title, side: "right" }, tickvals: ticks, ticktext: ticks.map((power) => `10<sup>${power}</sup>`), thickness: 14, outlinewidth: 0 },
  };
  const red = color("bad");
  const marked = {
    type: "heatmap", x: steps, y: rows, z: marks, text: texts, hoverinfo: "text", showscale: false, colorscale: [[0, red], [1, red]],
    zmin: 0, zmax: 1, hoverongaps: false, xgap: map.xgap, ygap: map.ygap,
  };
  const height = Math.min(900, Math.max(200, 90 + names.length * 18));
  const shownEvery = Math.ceil((names.length * 13) / (height - 90));
  const labelled = rows.filter((row) => row % shownEvery === 0);
  const room = isNarrow ? 16 : 40;
  const label = (name) => (name.length > room ? `${name.slice(0, room - 1)}…` : name);
  return {
    traces: marks ? [map, marked] : [map],
    layout: {
      xaxis: stepAxis,
      yaxis: { tickvals: labelled, ticktext: labelled.map((row) => plain(label(names[row]))), autorange: "reversed", showgrid: false, zeroline: false },
      margin: { l: 80, r: 20, t: 10, b: 40 },
    },
    height,
  };
}

/** Least and greatest number; arguments of a call are limited in number. */
function extremes(numbers) {
  let [low, high] = [Infinity, -Infinity];
  for (const number of numbers) [low, high] = [Math.min(low, number), Math.max(high, number)];
  return low <= high ? [low, high] : [0, 1];
}

const LAYER_CHARTS = [["layer_update", "update ratio"], ["layer_norm", "norm"]];

function layers() {
  const role = data.roles[at("layers-role").value];
  const [key, title] = LAYER_CHARTS[at("layers-what").value];
  const has = (layer) => role[key].some((step, i) => step[layer] !== null && step[layer] !== undefined) || role.layer_nonfinite.some((step) => step[layer] > 0);
  const rows = data.layers.map((_, layer) => layer).filter(has);
  const cell = (layer) => role[key].map((step) => step[layer] ?? null);
  const bad = (layer) => role.layer_nonfinite.map((step) => step[layer] ?? 0);
  const texts = rows.map((layer) => {
    const [values, marks] = [cell(layer), bad(layer)];
    return steps.map((step, i) => {
      const lines = [`step ${step}`, plain(data.layers[layer]), `${title}: ${values[i] === null ? "not known" : float(values[i])}`];
      if (marks[i] > 0) lines.push(`${marks[i]} NaN or infinities`);
      return lines.join("<br>");
    });
  });
  const marks = rows.map((layer) => bad(layer).map((number) => (number > 0 ? 1 : null)));
  return heat(rows.map((layer) => data.layers[layer]), rows.map(cell), texts, marks, title);
}

function exponents() {
  const role = data.roles[at("exponents-role").value];
  const names = data.exponents.map((low, i) => {
    if (low === null) return `below 2^${data.exponents[1]}`;
    return i + 1 < data.exponents.length ? `2^${low} to 2^${data.exponents[i + 1]}` : `2^${low} and above`;
  });
  const sums = role.exponents.map((counts) => counts?.reduce((a, b) => a + b, 0) ?? 0);
  const value = (range, i) => (sums[i] > 0 ? role.exponents[i][range] / sums[i] : null);
  const rows = names.map((_, range) => range).filter((range) => role.exponents.some((counts) => counts?.[range] > 0)).reverse();
  const z = rows.map((range) => steps.map((_, i) => value(range, i)));
  const texts = rows.map((range) => steps.map((step, i) => `step ${step}<br>|x| ${names[range]}: ${share(value(range, i), 1)}`));
  return heat(rows.map((range) => names[range]), z, texts, null, "share");
}

function rounding() {
  const traces = data.roles
    .filter((role) => role.rounding.some(Boolean))
    .map((role) => ({
      name: plain(role.name), x: steps, y: role.rounding.map((error) => error?.mean_relative ?? null), mode: "lines+markers",
      line: { color: COLORS[data.roles.indexOf(role) % COLORS.length] },
    }));
  return { traces, layout: { xaxis: stepAxis, yaxis: { title: { text: "mean relative error" }, exponentformat: "power" }, showlegend: true }, height: 240 };
}

// Page ------------------------------------------------------------------------------------------------------------------------

function summary() {
  at("store").textContent = data.store;
  const stored = live.reduce((sum, row) => sum + (row.stored_bytes ?? 0), 0);
  const held = live.reduce((sum, row) => sum + (row.tensor_bytes ?? 0), 0);
  const first = live.filter((row) => nonfiniteOf(row) > 0).sort((a, b) => a.step - b.step)[0];
  const tiles = [
    ["live steps", count(data.live_steps)],
    ["snapshots ever", count(data.all_snapshots)],
    ["newest step", live.length ? count(live.at(-1).step) : "none"],
    ["stored", bytes(stored)],
    ["tensor bytes", bytes(held)],
    ["tensors", count(data.all_tensors)],
  ];
  if (hasStatistics) tiles.push(["first NaN or infinity", first ? `step ${first.step}` : "none", Boolean(first)]);
  if (damaged.length) tiles.push(["damaged steps", count(damaged.length), true]);
  for (const [name, value, bad] of tiles) {
    const tile = element("div", "", bad ? "bad" : "");
    tile.append(element("dt", name), element("dd", value));
    at("summary").append(tile);
  }
}

function notice(text, bad = false) {
  at("notices").append(element("div", text, bad ? "notice bad" : "notice"));
}

function notices() {
  for (const fault of data.faults) notice(`The list of snapshots is damaged: ${fault}`, true);
  for (const row of damaged.slice(0, 10)) notice(`Step ${row.step} is damaged: ${row.damage}`, true);
  if (damaged.length > 10) notice(`${damaged.length - 10} more steps are damaged: see the table of snapshots.`, true);
  const without = live.filter((row) => row.measured === false).length;
  if (!live.length) notice("The store has no snapshots that can be restored.");
  else if (without === live.length) {
    notice(
      "No step has statistics, so this page has no norms, NaN counts and exponents. Save with statistics to get them: " +
        "tensorcask save --statistics, or statistics=True in Python. Earlier steps stay without.",
    );
  } else if (without) notice(`${counted(without, "step has", "steps have")} no statistics: save with --statistics, or statistics=True in Python.`);
}

function choices(id, names, picked = 0) {
  names.forEach((name, i) => {
    const option = element("option", name);
    option.value = i;
    option.selected = i === picked;
    at(id).append(option);
  });
}

function snapshotTable() {
  const infinities = (row) => (row.nan === null ? null : row.positive_infinity + row.negative_infinity);
  table(at("table-snapshots"), {
    label: "snapshots",
    rows: data.snapshots,
    search: (row) => `${row.step} ${row.snapshot} ${row.kind} ${row.status} ${row.pinned ? "pinned" : ""} ${row.time} ${row.damage ?? ""}`,
    badRow: (row) => row.damage !== null,
    sort: { column: 0, direction: -1 },
    columns: [
      { title: "step", value: (row) => row.step, kind: "number" },
      { title: "kind", value: (row) => row.kind },
      { title: "status", value: (row) => (row.pinned ? `${row.status}, pinned` : row.status) },
      { title: "time", value: (row) => row.time },
      { title: "parent", value: (row) => row.parent, kind: "number" },
      { title: "links", value: (row) => row.depth, kind: "number" },
      { title: "tensors", value: (row) => row.tensor_bytes, text: (row) => bytes(row.tensor_bytes), kind: "number" },
      { title: "stored", value: (row) => row.stored_bytes, text: (row) => bytes(row.stored_bytes), kind: "number" },
      { title: "ratio", value: (row) => row.ratio, text: (row) => (row.ratio === null ? "" : `${row.ratio.toFixed(2)}x`), kind: "number" },
      { title: "NaN", value: (row) => row.nan, kind: "number", bad: (row) => row.nan > 0 },
      { title: "inf", value: infinities, kind: "number", bad: (row) => infinities(row) > 0 },
      { title: "damage", value: (row) => row.damage, kind: "wrap" },
    ],
  });
}

function tensorTable() {
  const infinities = (row) => (row.nan === null ? null : row.positive_infinity + row.negative_infinity);
  const number = (title, key) => ({ title, value: (row) => row[key], text: (row) => float(row[key]), kind: "number" });
  const shareOfNumbers = (title, key) => ({
    title,
    value: (row) => (row[key] === null ? null : row[key] / row.numbers),
    text: (row) => share(row[key], row.numbers),
    kind: "number",
  });
  const all = [
    { title: "tensor", value: (row) => row.name },
    { title: "role", value: (row) => row.role },
    { title: "dtype", value: (row) => row.dtype },
    { title: "shape", value: (row) => `[${row.shape.join(", ")}]` },
    { title: "stored", value: (row) => row.stored_bytes, text: (row) => bytes(row.stored_bytes), kind: "number" },
  ];
  const measured = [
    { title: "NaN", value: (row) => row.nan, kind: "number", bad: (row) => row.nan > 0 },
    { title: "inf", value: infinities, kind: "number", bad: (row) => infinities(row) > 0 },
    { title: "first NaN or inf", value: (row) => row.first_nonfinite, kind: "number", bad: (row) => row.first_nonfinite !== null },
    number("norm", "norm"),
    number("min", "min"),
    number("max", "max"),
    shareOfNumbers("zero", "zero"),
    shareOfNumbers("changed", "changed"),
    number("update ratio", "update"),
    { title: "numbers of step", value: (row) => row.step, kind: "number" },
  ];
  table(at("table-tensors"), {
    label: "tensors",
    rows: data.tensors,
    search: (row) => `${row.name} ${row.role} ${row.dtype}`,
    columns: hasStatistics ? [...all, ...measured] : all,
  });
  const of = data.tensors_of === null ? "No step can be read." : `Tensors of step ${data.tensors_of}. "stored" is their bytes in this step.`;
  const numbers = hasStatistics ? " The other numbers are those of the newest step with statistics of the tensor." : "";
  at("tensors-about").textContent = of + numbers;
}

function sections() {
  const keep = (id, shown) => (at(id).hidden = !shown);
  keep("gaps", data.snapshots.length > 1);
  keep("times", timed.length > 0);
  keep("rounding", data.rounding.length > 0);
  keep("verify", data.verify !== null);
  for (const section of document.querySelectorAll(".measured")) section.hidden = !hasStatistics;
  for (const id of ["timeline", "bytes", "tensors", "snapshots"]) keep(id, data.snapshots.length > 0);
}

function measured() {
  const found = live.some((row) => nonfiniteOf(row) > 0);
  at("nonfinite-verdict").textContent = found
    ? `${counted(data.all_nonfinite, "pair", "pairs")} of a tensor and a step with NaN or infinities.`
    : "No step with statistics has NaN or infinities.";
  at("chart-nonfinite").hidden = !found;
  if (found) {
    chart("chart-nonfinite", nonfinite);
    table(at("table-nonfinite"), {
      label: "tensors with NaN or infinities",
      rows: data.nonfinite,
      search: (row) => `${row.step} ${row.tensor} ${row.role}`,
      columns: [
        { title: "step", value: (row) => row.step, kind: "number" },
        { title: "tensor", value: (row) => row.tensor },
        { title: "role", value: (row) => row.role },
        { title: "NaN", value: (row) => row.nan, kind: "number" },
        { title: "+inf", value: (row) => row.positive_infinity, kind: "number" },
        { title: "-inf", value: (row) => row.negative_infinity, kind: "number" },
      ],
    });
  }
  chart("chart-norm", () => lines("norm", "norm"));
  const changes = data.roles.some((role) => role.update.some((value) => value !== null));
  at("chart-update").hidden = !changes;
  if (changes) chart("chart-update", () => lines("update", "update ratio"));
  const names = data.roles.map((role) => role.name);
  const first = Math.max(0, data.roles.findIndex((role) => role.name === "model"));
  choices("layers-role", names, first);
  choices("exponents-role", names, first);
  choices("layers-what", LAYER_CHARTS.map(([, title]) => title), changes ? 0 : 1);
  const grouped = data.all_layers + 1 > data.layers.length ? ` ${data.all_layers} layers: neighbours share a row.` : "";
  at("layers-about").textContent = `A layer is the name of a parameter up to its first number. Red cells have NaN or infinities.${grouped}`;
  chart("chart-layers", layers);
  chart("chart-exponents", exponents);
  for (const id of ["layers-role", "layers-what"]) at(id).addEventListener("change", () => draw("chart-layers"));
  at("exponents-role").addEventListener("change", () => draw("chart-exponents"));
}

function roundingErrors() {
  chart("chart-rounding", rounding);
  table(at("table-rounding"), {
    label: "rounding errors",
    rows: data.rounding,
    search: (row) => `${row.step} ${row.role}`,
    columns: [
      { title: "step", value: (row) => row.step, kind: "number" },
      { title: "role", value: (row) => row.role },
      { title: "mean relative", value: (row) => row.mean_relative, text: (row) => float(row.mean_relative), kind: "number" },
      { title: "max relative", value: (row) => row.max_relative, text: (row) => float(row.max_relative), kind: "number" },
      { title: "mean squared", value: (row) => row.mean_squared, text: (row) => float(row.mean_squared), kind: "number" },
      { title: "signs changed", value: (row) => row.sign_flips, kind: "number" },
      { title: "update error", value: (row) => row.update, text: (row) => float(row.update), kind: "number" },
    ],
  });
}

function verification() {
  const { verify } = data;
  const checked = `${counted(verify.casks, "cask", "casks")} and ${counted(verify.chunks, "chunk", "chunks")} checked to the depth ${verify.depth}`;
  at("verify-verdict").textContent = `${verify.all_problems ? counted(verify.all_problems, "problem", "problems") : "No problem"}: ${checked}.`;
  if (!verify.problems.length) return;
  table(at("table-problems"), {
    label: "problems",
    rows: verify.problems,
    search: (row) => `${row.step ?? ""} ${row.object} ${row.tensor} ${row.message}`,
    columns: [
      { title: "step", value: (row) => row.step, kind: "number" },
      { title: "object", value: (row) => row.object },
      { title: "tensor", value: (row) => row.tensor },
      { title: "problem", value: (row) => row.message, kind: "wrap" },
    ],
  });
}

function bounds() {
  const { bounds } = data;
  const cut = (all, shown) => (all > shown ? ` Here: ${shown} of ${all}.` : "");
  const lines = [
    `At most the ${bounds.snapshots} newest snapshots are listed, and their statistics read.${cut(data.all_snapshots, data.snapshots.length)}`,
    `Charts of roles and layers show at most ${bounds.steps} steps, evenly spaced, and the first step with a NaN or an infinity. ` +
      `NaN and infinities are counted in all listed steps.${cut(data.live_steps, data.steps.length)}`,
    `Heat maps have at most ${bounds.layers} rows; beyond that, neighbouring layers share a row.`,
    `Charts show at most ${bounds.roles} roles; others are added up as "other roles".`,
    `The table of tensors has at most ${bounds.tensors} rows.${cut(data.all_tensors, data.tensors.length)}`,
    `The tables of non-finite tensors, rounding errors and problems have at most ${bounds.rows} rows.` +
      cut(data.all_nonfinite, data.nonfinite.length) + cut(data.all_rounding, data.rounding.length),
    `Names are cut after ${bounds.name} characters.`,
    `Written by tensorcask ${data.version}. This file makes no requests.`,
  ];
  at("bounds").append(...lines.map((line) => element("li", line)));
}

sections();
summary();
notices();
if (data.snapshots.length) {
  chart("chart-timeline", timeline);
  if (data.snapshots.length > 1) chart("chart-gaps", gaps);
  if (timed.length) chart("chart-times", times);
  if (data.steps.length) chart("chart-bytes", storedBytes);
  if (hasStatistics) measured();
  if (data.rounding.length) roundingErrors();
  tensorTable();
  snapshotTable();
}
if (data.verify) verification();
bounds();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => [...charts.keys()].forEach(draw));
document.body.dataset.ready = "true";
