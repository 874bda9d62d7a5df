"""What notebooks show: tables of stores and snapshots; the notebooks of the book."""

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import tensorcask

ROOT = Path(__file__).parents[2]
HOSTILE = [
    "<script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "</td></table></div><b>bold</b>",
    "&lt;i&gt; & more",
    "right\u202eto\u2066left\x1b[31mred\nline\x00",
    "long." * 800,
]
TAGS = {"div", "strong", "br", "table", "thead", "tbody", "tr", "th", "td"}


class Page(HTMLParser):
    """Cells of a table, with a check that nothing else is there."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.rows, self.open = [], []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS and attributes == []
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data


def test_a_store_shows_its_newest_steps(memory):
    store = tensorcask.Store(memory)
    for step in range(30):
        store.save({"w": np.arange(3000, dtype=np.float32) + step}, step=step, policy="consecutive", user={"loss": 1 / (step + 1)})
    store.pin(29)
    page = Page(store._repr_html_())
    assert page.rows[0] == ["step", "kind", "parent", "tensors", "stored", "saved (UTC)", "loss"]
    assert [row[0] for row in page.rows[1:]] == [str(step) for step in range(29, 19, -1)]
    newest = page.rows[1]
    assert newest[1:4] == ["delta, pinned", "28", "11.7 KiB"] and newest[-1] == "0.0333333"
    assert "30 live steps" in page.text and "the newest 10 are shown" in page.text and "tc." not in page.text


def test_a_store_that_is_empty_absent_or_damaged_says_so(url):
    assert "no store here" in Page(tensorcask.Store(url)._repr_html_()).text
    store = tensorcask.Store(url)
    store.save({"w": np.ones(3, np.float32)}, step=1)
    store.forget([1])
    assert "no steps" in Page(store._repr_html_()).text
    for entry in (Path(url) / "log").iterdir():
        entry.write_bytes(b"<script>")
    assert "cannot be read" in Page(tensorcask.Store(url)._repr_html_()).text


def test_a_snapshot_shows_its_tensors(memory):
    store = tensorcask.Store(memory)
    tied = np.zeros((2, 3), np.float32)
    store.save({"a": tied, "b": tied, "c": np.ones((), np.int64)}, step=1)
    store.save({"a": tied, "b": tied, "c": np.zeros((), np.int64)}, step=2, policy="consecutive")
    page = Page(store.snapshot()._repr_html_())
    assert page.rows == [
        ["tensor", "dtype", "shape", "role", "tied to"],
        ["a", "f32", "[2, 3]", "model", ""],
        ["b", "f32", "[2, 3]", "model", "a"],
        ["c", "i64", "[]", "model", ""],
    ]
    assert "Snapshot of step 2" in page.text and "3 tensors; chain: 1 (base) ← 2 (delta)" in page.text
    store.save({f"t{i:03}": np.zeros(1, np.float32) for i in range(50)}, step=3)
    assert len(Page(store.snapshot(3)._repr_html_()).rows) == 11


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_escaped(name, tmp_path):
    store = tensorcask.Store(tmp_path / "<b>store</b>")
    store.save({name: np.ones(3, np.float32)}, step=1, user={name: name})
    for shown in (store._repr_html_(), store.snapshot()._repr_html_()):
        page = Page(shown)
        assert all(c.isprintable() or c == "\n" for c in shown) and "\n" not in "".join(map("".join, page.rows))
        assert all(len(cell) < 1300 for row in page.rows for cell in row)
        assert any(name.split("\u202e")[0][:150] in cell for row in page.rows for cell in row)
    assert "<b>store</b>" in Page(store._repr_html_()).text


def notebooks():
    """The program that writes notebooks as pages."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_measures(page):
    """A page without what differs from run to run and from processor to processor: times, sizes, fractions."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[\d.]+ (B|KiB|MiB)\b|\d+\.\d+", "#", page)


@pytest.mark.parametrize("notebook", notebooks().PAGES, ids=lambda notebook: notebook.stem)
def test_notebooks_give_the_pages_of_the_book(notebook, tmp_path):
    made = notebooks()
    page = made.page_of(notebook, tmp_path)
    assert without_measures(page) == without_measures(made.PAGES[notebook].read_text()), "run: python docs/notebooks/build.py"
    assert '"outputs": []' in notebook.read_text() and '"execution_count": 1' not in notebook.read_text()


def test_the_notebook_finds_the_element_that_it_broke():
    """By SQL, by bisect, in the report and by a guard."""
    page = (ROOT / "docs" / "src" / "guides" / "notebook.md").read_text()
    assert "model[2].weight[5, 7] = math.nan" in page and "if step == 60" in page
    assert "<td>60</td><td>model.2.weight</td><td>model.2</td><td>1</td><td>1024</td>" in page
    assert "(60, 'model.2.weight')" in page and "chunks with a NaN: 0" in page
    assert "first bad step 60: model.2.weight; last good step 59" in page
    assert re.search(r"{'step': 60,\s+'tensor': 'model.2.weight',\s+'role': 'model',\s+'nan': 1,", page)
    assert "tensor `model.2.weight`, chunk 0: this chunk holds 1 NaN among 1024 elements" in page
