"""Tests of the page that `tensorcask report` writes, in headless Chromium.

    python tests/browser/report.py PROGRAM [FOLDER]      # FOLDER: where to store screenshots

`bash tests/browser/check_report` builds the program and runs this file.
"""

import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile

import stores
from chromium import launch, overflow, watch
from playwright.sync_api import Browser, Page, sync_playwright
from stores import HOSTILE, INFINITY_STEP, NAN_STEP, NAN_TENSOR, Cli

DATA = pathlib.Path(__file__).parents[1] / "data"
EMBEDDED = re.compile(r'(<script type="application/json" id="data">)(.*?)(</script>)', re.DOTALL)
ROWS = "[...document.querySelectorAll('#{id} tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
TRACES = "name => document.getElementById(name).data.map(({name, type, x, y, z}) => ({name, type, x, y, z}))"


class Opened:
    """A report in a browser. Closing it fails if anything went wrong in the page."""

    def __init__(self, browser: Browser, file: pathlib.Path, scheme: str = "light", width: int = 1280) -> None:
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        self.page: Page = self.context.new_page()
        self.faults = watch(self.page)
        self.requests: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.resolve().as_uri())
        self.page.wait_for_selector("body[data-ready=true]", timeout=120_000)
        self.data = json.loads(self.page.locator("#data").text_content() or "")

    def rows(self, table: str) -> list[list[str]]:
        """Cells of the rows of a table that are in the document."""
        return self.page.evaluate(ROWS.replace("{id}", table))

    def traces(self, chart: str) -> list[dict]:
        """What a chart shows."""
        return self.page.evaluate(TRACES, chart)

    def search(self, table: str, text: str) -> list[list[str]]:
        """Rows that a search finds."""
        self.page.locator(f"#{table} input").fill(text)
        return self.rows(table)

    def close(self) -> None:
        assert not self.faults, self.faults
        local = [url for url in self.requests if not url.startswith(("data:", "blob:"))]
        assert len(local) == 1 and local[0].startswith("file:"), f"requests: {local}"
        assert self.page.evaluate("window.hacked") is None
        assert not overflow(self.page), overflow(self.page)
        self.context.close()


def report(cli: Cli, store: pathlib.Path, *options: str, codes: tuple[int, ...] = (0,)) -> tuple[dict, pathlib.Path]:
    """Writes the report of a store beside the store."""
    page = store.with_suffix(".html")
    return cli.run("report", store, "-o", page, *options, codes=codes), page


def a_run_with_a_nan(cli: Cli, browser: Browser, folder: pathlib.Path, screenshots: pathlib.Path | None) -> None:
    store = stores.training(cli, folder)
    outcome, file = report(cli, store)
    listed, measured = cli.run("ls", store)["snapshots"], cli.run("stats", store)["tensors"]
    assert (outcome["steps"], outcome["nonfinite"], outcome["damaged"]) == (len(listed), 2, [])
    opened = Opened(browser, file)
    data = opened.data

    live = {row["step"]: row for row in data["snapshots"] if row["status"] == "live"}
    for row in listed:
        shown = live[row["step"]]
        assert all(shown[key] == row[key] for key in ("snapshot", "kind", "tensor_bytes", "stored_bytes", "ratio", "pinned")), row
    # Each step shows the times that it recorded. Other programs saved the steps, so none knows how long a save took in all, and
    # none uploaded before its commit: the steps are small enough for the log.
    timed = {trace["name"]: trace for trace in opened.traces("chart-times")}
    assert set(timed) == {"encoding"} and timed["encoding"]["x"] == sorted(live), timed
    for step, shown in zip(timed["encoding"]["x"], timed["encoding"]["y"], strict=True):
        user = next(row["user"] for row in listed if row["step"] == step)
        assert math.isclose(shown, user["tc.times"]["encode_ms"] / 1000, rel_tol=1e-9)
    statuses = {row["status"] for row in data["snapshots"]}
    assert statuses == {"live", "forgotten", "superseded"} and [row["step"] for row in data["snapshots"] if row["pinned"]] == [500]
    names = {trace["name"] for trace in opened.traces("chart-timeline")}
    assert names >= {"base", "delta", "forgotten", "replaced", "pinned", "NaN or infinity"}, names

    newest = {row["tensor"]: row for row in measured if row["step"] == 1000}
    assert len(newest) == len(data["tensors"]) == data["all_tensors"]
    for tensor in data["tensors"]:
        row = newest.get(tensor["name"]) or next(row for name, row in newest.items() if name.startswith(tensor["name"][:-1]))
        same = ("role", "dtype", "numbers", "nan", "positive_infinity", "negative_infinity", "zero", "min", "max", "changed", "step")
        assert all(tensor[key] == row[key] for key in same), (tensor, row)
        assert tensor["norm"] == math.sqrt(row["sum_squares"])
        if row["change_squares"] is not None:
            assert math.isclose(tensor["update"], math.sqrt(row["change_squares"] / row["sum_squares"]), rel_tol=1e-12)
    cells = opened.search("table-tensors", NAN_TENSOR)
    assert len(cells) == 1 and cells[0][0] == NAN_TENSOR and str(NAN_STEP) in cells[0], cells
    assert f"{newest[NAN_TENSOR]['max']:.4e}" == re.sub(r"e([+-])(\d)$", r"e\g<1>0\2", cells[0][10]), cells

    # Norms and update ratios of the charts, from the rows of `stats`.
    for role in data["roles"]:
        for i, step in enumerate(data["steps"]):
            rows = [row for row in measured if row["step"] == step and row["role"] == role["name"]]
            assert math.isclose(role["norm"][i], math.sqrt(sum(row["sum_squares"] for row in rows)), rel_tol=1e-5)
            changed = [row for row in rows if row["change_squares"] is not None]
            assert (role["update"][i] is None) == (not changed)
            if changed:
                ratio = sum(row["change_squares"] for row in changed) / sum(row["sum_squares"] for row in changed)
                assert math.isclose(role["update"][i], math.sqrt(ratio), rel_tol=1e-5)
            exponents = [sum(counts) for counts in zip(*(row["exponents"] for row in rows), strict=True)]
            assert role["exponents"][i] == exponents

    # The NaN is marked at its step, in the chart, the heat map and the tables.
    bars = {trace["name"]: trace for trace in opened.traces("chart-nonfinite")}
    assert (bars["NaN"]["x"], bars["NaN"]["y"], bars["+infinity"]["y"]) == ([NAN_STEP, INFINITY_STEP], [1, 0], [0, 1])
    marks = opened.traces("chart-layers")[1]
    marked = {(marks["x"][column], row) for row, line in enumerate(marks["z"]) for column, mark in enumerate(line) if mark is not None}
    assert {step for step, _ in marked} == {str(NAN_STEP), str(INFINITY_STEP)} and len(marked) == 2, marked
    assert [row[:2] for row in opened.rows("table-nonfinite")] == [[str(NAN_STEP), NAN_TENSOR], [str(INFINITY_STEP), f"model.{HOSTILE[0]}"]]
    assert f"step {NAN_STEP}" in opened.page.locator("#summary").inner_text()

    # `bisect` finds the same step, and a guard refuses it.
    found = cli.run("bisect", store, "--first", "nan > 0")
    first = found["first"]
    assert (first["step"], [row["tensor"] for row in first["tensors"]], found["last_good"]) == (NAN_STEP, [NAN_TENSOR], NAN_STEP - 10)
    broken, guarded = folder / "broken.safetensors", folder / "guarded"
    cli.run("restore", store, "--step", NAN_STEP, "-o", broken)
    refusal = cli.run("save", guarded, "--step", NAN_STEP, "--check", "finite", broken, codes=(1,))["error"]
    assert refusal["tensor"] == NAN_TENSOR and "1 NaN" in refusal["message"], refusal

    # Hostile names are text.
    for name in HOSTILE:
        shown = f"model.{name}"
        shown = shown if len(shown) <= data["bounds"]["name"] else shown[: data["bounds"]["name"]] + "…"
        found = opened.search("table-tensors", shown.split()[0][:60])
        assert shown in [row[0] for row in found], (shown, found)
    assert opened.page.locator("img, a[href^=javascript], main script").count() == 0

    # Search, sort and pages.
    assert opened.search("table-tensors", "no such tensor") == []
    assert len(opened.search("table-tensors", "EXP_AVG h.1. attn")) == 1
    assert len(opened.search("table-tensors", "")) == 50
    opened.page.locator("#table-tensors button", has_text="Next").click()
    assert len(opened.rows("table-tensors")) == data["all_tensors"] - 50
    norms = sorted((math.sqrt(row["sum_squares"]) for row in newest.values()), reverse=True)
    for _ in range(2):
        opened.page.locator("#table-tensors th button", has_text=re.compile("^norm$")).click()
    assert [float(row[8]) for row in opened.rows("table-tensors")][:5] == [float(f"{norm:.4e}") for norm in norms[:5]]

    # Choices redraw the heat map.
    opened.page.select_option("#layers-role", label="exp_avg")
    opened.page.select_option("#layers-what", label="norm")
    first = opened.traces("chart-layers")[0]["z"]
    exp_avg = next(role for role in data["roles"] if role["name"] == "exp_avg")
    assert math.isclose(first[0][0], math.log10(exp_avg["layer_norm"][0][0]), rel_tol=1e-9)
    # So does a change of the colours.
    before = opened.page.evaluate("document.getElementById('chart-norm').layout.font.color")
    opened.page.emulate_media(color_scheme="dark")
    opened.page.wait_for_function("before => document.getElementById('chart-norm').layout.font.color !== before", arg=before)
    opened.close()

    for scheme in ("light", "dark"):
        for width in (1280, 390):
            opened = Opened(browser, file, scheme, width)
            if screenshots:
                opened.page.screenshot(path=screenshots / f"run-{scheme}-{width}.png", full_page=True)
            opened.close()


def a_store_without_statistics(cli: Cli, browser: Browser, folder: pathlib.Path) -> None:
    outcome, file = report(cli, stores.real(cli, folder, DATA))
    assert outcome["without_statistics"] == [1000, 1001, 1010]
    opened = Opened(browser, file)
    assert "tensorcask save --statistics" in opened.page.locator("#notices").inner_text()
    assert not opened.page.locator("#layers").is_visible() and opened.page.locator("#chart-bytes .bars").count() > 0
    opened.close()


def rounding_and_damage(cli: Cli, browser: Browser, folder: pathlib.Path) -> None:
    store = stores.real(cli, folder, DATA, "--statistics", "--precision", "near")
    opened = Opened(browser, report(cli, store, "--verify")[1])
    assert opened.data["verify"]["all_problems"] == 0 and "No problem" in opened.page.locator("#verify-verdict").inner_text()
    for row in opened.data["rounding"]:
        rows = [found for found in cli.run("inspect", store, "--step", row["step"])["rounding"] if found["role"] == row["role"]]
        assert row["max_relative"] == max(found["max_relative"] for found in rows)
    assert opened.page.locator("#chart-rounding .trace").count() > 0
    opened.close()

    # One step loses a cask; its delta is read on.
    casks = cli.run("inspect", store, "--step", 1001)["casks"]
    (store / "casks" / f"{casks[0]['id']}.cask").unlink()
    outcome, file = report(cli, store, "--verify=log", codes=(3,))
    assert [row["step"] for row in outcome["damaged"]] == [1001] and outcome["problems"] == 1, outcome
    opened = Opened(browser, file)
    assert "Step 1001 is damaged" in opened.page.locator("#notices").inner_text()
    assert [row[0] for row in opened.rows("table-problems")] == ["1001"]
    assert next(trace["x"] for trace in opened.traces("chart-timeline") if trace["name"] == "damaged") == [1001]
    assert [row["measured"] for row in opened.data["snapshots"]] == [True, None, True]
    opened.close()


def a_long_run(cli: Cli, browser: Browser, folder: pathlib.Path, count: int) -> None:
    opened = Opened(browser, report(cli, stores.many_snapshots(cli, folder, count))[1])
    data = opened.data
    assert (len(data["snapshots"]), data["live_steps"]) == (count, count)
    # The charts leave steps out, but not the one with the NaN.
    assert len(data["steps"]) <= data["bounds"]["steps"] < count and {1, count - 1, count} <= set(data["steps"])
    assert opened.rows("table-nonfinite") == [[str(count - 1), "model.h.0.w", "model", "1", "0", "0"]]
    assert f"Here: {len(data['steps'])} of {count}" in opened.page.locator("#bounds").inner_text()
    assert "500" in [row[0] for row in opened.search("table-snapshots", "500")]
    opened.close()


def a_wide_state(cli: Cli, browser: Browser, folder: pathlib.Path, count: int) -> pathlib.Path:
    file = report(cli, stores.many_tensors(cli, folder, count))[1]
    opened = Opened(browser, file)
    assert (len(opened.data["tensors"]), opened.data["all_layers"]) == (count, count)
    assert len(opened.data["layers"]) == opened.data["bounds"]["layers"] + 1
    assert len(opened.rows("table-tensors")) == 50, "one page of rows is in the document"
    assert [row[0] for row in opened.search("table-tensors", f"h.{count - 1}.w")] == [f"model.h.{count - 1}.w"]
    opened.close()
    return file


def the_largest_page(browser: Browser, wide: pathlib.Path, snapshots: int) -> None:
    """A page with as much of everything as the bounds allow, made from the data of another page."""
    text = wide.read_text()
    data = json.loads(EMBEDDED.search(text)[2])
    bounds, layers = data["bounds"], len(data["layers"])
    row, tensor, role = data["snapshots"][0], data["tensors"][0], data["roles"][0]
    data["snapshots"] = [{**row, "step": step, "time_ms": row["time_ms"] + 1000 * step} for step in range(snapshots)]
    data["steps"] = list(range(0, snapshots, math.ceil(snapshots / bounds["steps"])))
    data["tensors"] = [{**tensor, "name": f"model.h.{i}.w", "norm": float(i)} for i in range(bounds["tensors"])]
    series = {key: [role[key][0]] * len(data["steps"]) for key in role if key != "name"}
    grid = [[1e-3 * (i + 1) for i in range(layers)] for _ in data["steps"]]
    full = {**series, "layer_norm": grid, "layer_update": grid, "layer_nonfinite": [[1] * layers for _ in data["steps"]]}
    data["roles"] = [{**full, "name": f"role {i}"} for i in range(bounds["roles"])]
    data["nonfinite"] = [{"step": i, "tensor": "w", "role": "model", "nan": 1, "positive_infinity": 0, "negative_infinity": 0} for i in range(bounds["rows"])]
    largest = wide.with_name("largest.html")
    inert = json.dumps(data).replace("<", "\\u003c")
    largest.write_text(EMBEDDED.sub(lambda found: found[1] + inert + found[3], text))
    opened = Opened(browser, largest)
    assert len(opened.search("table-tensors", "h.19999.")) == 1
    opened.page.select_option("#layers-role", label="role 11")
    assert len(opened.traces("chart-layers")[0]["z"]) == layers
    opened.close()


def a_served_report(cli: Cli, browser: Browser, folder: pathlib.Path) -> None:
    """The page of `--serve` loads itself again, and then shows a step that was saved meanwhile."""
    store = stores.real(cli, folder, DATA)
    server = subprocess.Popen([cli.program, "report", store, "--serve=0", "--json"], stdout=subprocess.PIPE, text=True)
    try:
        address = json.loads(server.stdout.readline())["address"]
        context = browser.new_context()
        page = context.new_page()
        faults, requests = watch(page), []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.wait_for_selector("body[data-ready=true]")
        assert "1010" in page.locator("#summary").inner_text()
        cli.run("save", store, "--step", 1011, DATA / "step-1010.safetensors")
        page.locator("#summary dd", has_text="1011").wait_for(timeout=120_000)
        assert not faults and {url.rstrip("/") for url in requests if not url.startswith(("data:", "blob:"))} == {address}, (faults, requests)
        context.close()
    finally:
        server.kill()
        server.wait()


def main() -> int:
    cli = Cli(sys.argv[1])
    screenshots = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    if screenshots:
        screenshots.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        browser = launch(playwright)
        folders = {name: pathlib.Path(scratch) / name for name in ("run", "plain", "damage", "served", "long", "wide")}
        for folder in folders.values():
            folder.mkdir()
        a_run_with_a_nan(cli, browser, folders["run"], screenshots)
        a_store_without_statistics(cli, browser, folders["plain"])
        rounding_and_damage(cli, browser, folders["damage"])
        a_served_report(cli, browser, folders["served"])
        a_long_run(cli, browser, folders["long"], 1000)
        wide = a_wide_state(cli, browser, folders["wide"], 10_000)
        the_largest_page(browser, wide, 2000)
        browser.close()
    print("report: the page shows the numbers of `stats` and `ls`, in light and dark, up to its bounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
