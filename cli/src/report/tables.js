"use strict";
// Tables that can be searched, sorted and paged. Cells are filled by textContent, so names stay text.

const PAGE_ROWS = 50;

/** Returns a new element with a text and a class. */
function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

const count = (number) => (number === null ? "" : String(number));
const float = (number) => (number === null ? "" : number === 0 ? "0" : number.toExponential(4));
const share = (part, all) => (part === null || !all ? "" : `${((100 * part) / all).toFixed(2)}%`);

/** Number of bytes with a unit. */
function bytes(number) {
  if (number === null) return "";
  let [value, unit] = [number, 0];
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  while (value >= 1024 && unit + 1 < units.length) [value, unit] = [value / 1024, unit + 1];
  return unit === 0 ? `${number} B` : `${value.toFixed(1)} ${units[unit]}`;
}

/** Duration in milliseconds with a unit. */
function duration(ms) {
  const size = Math.abs(ms);
  if (size < 1000) return `${Number(ms.toPrecision(3))} ms`;
  if (size < 120e3) return `${(ms / 1000).toFixed(1)} s`;
  if (size < 7200e3) return `${(ms / 60e3).toFixed(1)} min`;
  return `${(ms / 3600e3).toFixed(1)} h`;
}

/** Compares two cells: numbers by value, names by their numbers and letters, missing values last. */
function compare(a, b, direction) {
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
  if (b === null || b === undefined) return -1;
  const order = typeof a === "number" ? a - b : natural.compare(a, b);
  return direction * order;
}
const natural = new Intl.Collator("en", { numeric: true });

/**
 * Fills `place` with a table. A column has `title`, `value(row)` to sort by, and may have `text(row)`, `kind` (a class of its
 * cells) and `bad(row)`. `search(row)` is the text to search in. Only one page of rows is in the document.
 */
function table(place, { rows, columns, search, badRow = () => false, sort = null, label }) {
  const texts = rows.map((row) => search(row).toLowerCase());
  const state = { query: "", column: sort?.column ?? null, direction: sort?.direction ?? 1, page: 0 };
  const controls = element("p", "", "controls");
  const input = element("input");
  input.type = "search";
  input.placeholder = "Search";
  input.setAttribute("aria-label", `Search ${label}`);
  const [before, after, position] = [element("button", "Previous"), element("button", "Next"), element("span")];
  controls.append(input, before, after, position);
  const [scroll, grid, head, body] = [element("div", "", "scroll"), element("table"), element("thead"), element("tbody")];
  grid.append(head, body);
  scroll.append(grid);
  place.replaceChildren(controls, scroll);

  const headings = element("tr");
  columns.forEach((column, at) => {
    const [cell, button] = [element("th", "", column.kind ?? ""), element("button", column.title)];
    button.addEventListener("click", () => {
      state.direction = state.column === at ? -state.direction : 1;
      state.column = at;
      state.page = 0;
      show();
    });
    cell.append(button);
    headings.append(cell);
  });
  head.append(headings);

  function show() {
    const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
    let found = rows.map((_, at) => at).filter((at) => words.every((word) => texts[at].includes(word)));
    if (state.column !== null) {
      const { value } = columns[state.column];
      found = found.sort((a, b) => compare(value(rows[a]), value(rows[b]), state.direction) || a - b);
    }
    [...headings.children].forEach((cell, at) => {
      const order = state.direction > 0 ? "ascending" : "descending";
      if (at === state.column) cell.setAttribute("aria-sort", order);
      else cell.removeAttribute("aria-sort");
    });
    const first = state.page * PAGE_ROWS;
    const shown = found.slice(first, first + PAGE_ROWS).map((at) => {
      const [row, line] = [rows[at], element("tr", "", badRow(rows[at]) ? "bad" : "")];
      for (const column of columns) {
        const text = column.text ? column.text(row) : (column.value(row) ?? "");
        const cell = element("td", String(text), column.kind ?? "");
        if (column.bad?.(row)) cell.classList.add("bad");
        if (String(text).length > 40) cell.title = text;
        line.append(cell);
      }
      return line;
    });
    body.replaceChildren(...shown);
    position.textContent = found.length ? `${first + 1} to ${first + shown.length} of ${found.length}` : "nothing found";
    before.disabled = state.page === 0;
    after.disabled = first + PAGE_ROWS >= found.length;
    before.hidden = after.hidden = found.length <= PAGE_ROWS;
  }
  const turn = (pages) => () => {
    state.page += pages;
    show();
  };
  before.addEventListener("click", turn(-1));
  after.addEventListener("click", turn(1));
  input.addEventListener("input", () => {
    [state.query, state.page] = [input.value, 0];
    show();
  });
  show();
}
