"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const create = (tag, text = "", className = "") => Object.assign(document.createElement(tag), { textContent: text, className });
const inUnits = (ms) => (ms >= 1000 ? (ms / 1000).toPrecision(4) + " s" : ms >= 1 ? ms.toPrecision(4) + " ms" : (1000 * ms).toPrecision(4) + " µs");

// --- sections: a link opens the section that it leads to, and paper shows all of them -------------------------------
const reveal = (element) => {
  for (let around = element; around; around = around.parentElement?.closest("details")) if (around.tagName === "DETAILS") around.open = true;
};
const openTarget = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target) reveal(target);
  if (target) target.scrollIntoView();
};
addEventListener("hashchange", openTarget);
for (const link of all("nav a")) link.addEventListener("click", () => reveal(document.getElementById(link.hash.slice(1))));
addEventListener("beforeprint", () => all("details").forEach((element) => (element.open = true)));

// --- tables: sort, filter, save --------------------------------------------------------------------------------------
// The value of a number with all its digits; dashes are below all numbers.
const digitsOf = (cell) => cell.dataset.key ?? cell.textContent.replaceAll(",", "");
const numberOf = (cell) => (digitsOf(cell) === "-inf" ? -Infinity : Number(digitsOf(cell)));
const SELECTABLE = /^(rank|what|kind|group|pass|link|bound by|class|dtype)$/i;
const MOST_CHOICES = 64;
for (const scroll of all(".scroll")) {
  const table = scroll.querySelector("table"), tools = scroll.previousElementSibling, body = table.tBodies[0];
  const headings = all("th", table), titles = headings.map((heading) => heading.textContent.trim().toLowerCase());
  const rows = [...body.rows];
  headings.forEach((heading, column) =>
    heading.firstElementChild.addEventListener("click", () => {
      const numeric = heading.classList.contains("number");
      const previous = heading.getAttribute("aria-sort");
      const descending = previous === null ? numeric : previous === "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const order = numeric
        ? (a, b) => (numberOf(a.cells[column]) === numberOf(b.cells[column]) ? 0 : numberOf(a.cells[column]) - numberOf(b.cells[column]))
        : (a, b) => a.cells[column].textContent.localeCompare(b.cells[column].textContent, undefined, { numeric: true });
      body.append(...[...body.rows].sort((a, b) => (descending ? order(b, a) : order(a, b))));
    })
  );
  // Every word must occur in the row: anywhere, in a column ("kind:flash"), or as a bound on a number ("exposed>1").
  const parseWord = (word) => {
    const [, name, sign, value] = /^(.+?)([:<>])(.+)$/.exec(word) ?? [];
    const column = name ? titles.findIndex((title) => title.replaceAll(" ", "").startsWith(name)) : -1;
    if (column < 0) return (row) => row.textContent.toLowerCase().includes(word);
    const cell = (row) => row.cells[column];
    if (sign === ":") return (row) => (cell(row).classList.contains("number") ? cell(row).textContent === value : cell(row).textContent.toLowerCase().includes(value));
    return (row) => (sign === "<" ? numberOf(cell(row)) < Number(value) : numberOf(cell(row)) > Number(value));
  };
  const filter = tools.querySelector(".filter"), chosen = new Map();
  const apply = () => {
    const tests = (filter?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean).map(parseWord);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !tests.every((test) => test(row)) || ![...chosen].every(([column, value]) => !value || row.cells[column].textContent === value);
      shown += !row.hidden;
    }
    tools.querySelector(".count").textContent = shown === rows.length ? `${shown} row${shown === 1 ? "" : "s"}` : `${shown} of ${rows.length} rows`;
  };
  filter?.addEventListener("input", apply);
  table.showAll = () => {
    if (filter) filter.value = "";
    for (const select of all("select", tools)) select.value = "";
    chosen.clear();
    apply();
  };
  if (rows.length > 8)
    titles.forEach((title, column) => {
      if (!SELECTABLE.test(title)) return;
      const values = [...new Set(rows.map((row) => row.cells[column].textContent))];
      if (values.length < 2 || values.length > MOST_CHOICES) return;
      const select = create("select");
      select.setAttribute("aria-label", `Show one ${title}`);
      select.append(new Option(`${title}: all`, ""), ...values.sort((a, b) => a.localeCompare(b, undefined, { numeric: true })).map((value) => new Option(`${title}: ${value}`, value)));
      select.addEventListener("change", () => { chosen.set(column, select.value); apply(); });
      tools.insertBefore(select, tools.querySelector(".count"));
    });
  // Save the rows that are shown, in their order; numbers with all their digits. A cell that a spreadsheet would run as
  // a formula gets an apostrophe in front.
  tools.querySelector(".csv").addEventListener("click", () => {
    const cell = (element) => {
      const text = element.textContent.trim();
      const plain = element.tagName === "TD" && element.classList.contains("number") ? (text === "-" ? "" : digitsOf(element)) : text.replace(/^[=+\-@]/, "'$&");
      return /[",\n]/.test(plain) ? '"' + plain.replace(/"/g, '""') + '"' : plain;
    };
    const lines = all("tr", table).filter((row) => !row.hidden).map((row) => [...row.cells].map(cell).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
    link.download = (scroll.closest("[id]")?.id || "table") + ".csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

// --- figures: colours of text that suit the background ---------------------------------------------------------------
const dark = matchMedia("(prefers-color-scheme: dark)");
const INK = { false: "#555d66", true: "#a8b0b9" };
const TEXTS = ["text_color", "major_label_text_color", "axis_label_text_color", "label_text_color", "title_text_color"];
const paint = () => {
  for (const doc of Bokeh.documents)
    for (const model of doc.all_models)
      for (const name of TEXTS) if (model[name] === INK[!dark.matches]) model[name] = INK[dark.matches];
};

// --- timelines -------------------------------------------------------------------------------------------------------
const ZOOM_PER_STEP = 1.25, PAN_PER_STEP = 0.15, CLICK_PIXELS = 4;

class Timeline {
  constructor(figure) {
    this.figure = figure;
    this.section = figure.closest("details");
    this.panel = this.section.querySelector(".selected");
    const root = Bokeh.documents.flatMap((doc) => doc.roots()).find((model) => model.id === figure.querySelector("[data-root-id]").dataset.rootId);
    this.plots = (root.children ?? [root]).filter((plot) => plot.tags[0]?.timeline).map((plot) => this.plotOf(plot));
    this.range = this.plots[0].model.x_range;
    this.end = Math.max(...this.plots.map((plot) => plot.model.tags[0].end));
    this.pointer = null;
    this.listen();
  }

  plotOf(model) {
    const layers = model.renderers.filter((renderer) => renderer.data_source.data.kind).map((renderer) => {
      const data = renderer.data_source.data;
      return { renderer, data, label: renderer.name, colour: renderer.glyph.fill_color.value, count: data.left.length };
    });
    return { model, layers, texts: model.tags[0].texts, box: model.center.find((part) => part.name === "selection") };
  }

  // Return the plot and the position in its data below a point of the window; null beside all plots.
  at(event) {
    for (const plot of this.plots) {
      const view = Bokeh.index.find_one(plot.model);
      if (!view) continue;
      const around = view.el.getBoundingClientRect(), { left, top, width, height } = view.frame.bbox;
      const right = (event.clientX - around.left - left) / width, down = (event.clientY - around.top - top) / height;
      if (right < 0 || right > 1 || down < 0 || down > 1) continue;
      const { x_range: x, y_range: y } = plot.model;
      return { plot, x: x.start + right * (x.end - x.start), y: y.end - down * (y.end - y.start), pixel: (x.end - x.start) / width };
    }
    return null;
  }

  // The bar below a position; of several, the one that is drawn on top.
  barAt({ plot, x, y, pixel }) {
    for (const layer of [...plot.layers].reverse()) {
      if (!layer.renderer.visible) continue;
      const { left, right, y: row } = layer.data;
      for (let index = 0; index < layer.count; index++)
        if (Math.abs(row[index] - y) < 0.44 && left[index] - pixel <= x && x <= right[index] + pixel) return this.bar(plot, layer, index);
    }
    return null;
  }

  bar(plot, layer, index) {
    const { left, right, rank, stream, count, kind, step, sent, name } = layer.data, texts = plot.texts;
    return {
      plot, layer, index, from: left[index], to: right[index], rank: rank[index], stream: stream[index], count: count[index],
      kind: texts[kind[index]], step: texts[step[index]], sent: texts[sent[index]], name: texts[name[index]],
    };
  }

  describe(bar) {
    const idle = bar.stream < 0, lines = [`rank ${bar.rank}${idle ? "" : `, stream ${bar.stream}`}`];
    lines.push(idle ? `idle: ${bar.name}` : bar.kind === bar.layer.label ? bar.kind : `${bar.kind}, ${bar.layer.label}`);
    lines.push(`time: ${inUnits(bar.to - bar.from)}, start: ${bar.from.toFixed(3)} ms`);
    if (bar.step) lines.push(`step: ${bar.step}`);
    if (bar.sent) lines.push(`sent: ${bar.sent}`);
    if (!idle) lines.push(bar.count > 1 ? `${bar.name} and ${bar.count - 1} more` : bar.name);
    return lines;
  }

  zoom(factor, middle) {
    const { start, end } = this.range, around = middle ?? (start + end) / 2;
    this.show(around - (around - start) / factor, around + (end - around) / factor);
  }

  pan(share) {
    const { start, end } = this.range, by = share * (end - start);
    this.show(start + by, end + by);
  }

  // Show a span of time, moved and cut to what there is, and no shorter than 100 ns.
  show(start, end) {
    const length = Math.min(Math.max(end - start, 1e-4), this.end);
    const from = Math.min(Math.max(start, 0), this.end - length);
    this.range.setv({ start: from, end: from + length });
  }

  act(name) {
    if (name === "in") this.zoom(ZOOM_PER_STEP, this.pointer?.x);
    else if (name === "out") this.zoom(1 / ZOOM_PER_STEP, this.pointer?.x);
    else if (name === "left") this.pan(-PAN_PER_STEP);
    else if (name === "right") this.pan(PAN_PER_STEP);
    else if (name === "all") this.show(0, this.end);
    else if (name === "clear") this.clear();
  }

  listen() {
    const tip = document.querySelector(".tip"), figure = this.figure;
    // The wheel scrolls the page; with Ctrl (also a pinch on a touchpad) it zooms.
    figure.addEventListener("wheel", (event) => {
      const at = event.ctrlKey || event.metaKey ? this.at(event) : null;
      if (!at) return;
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 300), at.x);
    }, { passive: false, capture: true });
    let pressed = null;
    figure.addEventListener("pointerdown", (event) => {
      const at = event.button === 0 && event.pointerType !== "touch" ? this.at(event) : null;
      if (at) pressed = { at, x: event.clientX, y: event.clientY, start: this.range.start, end: this.range.end, dragged: false };
      if (at) figure.setPointerCapture(event.pointerId);
    });
    figure.addEventListener("pointermove", (event) => {
      const at = (this.pointer = this.at(event));
      if (pressed) pressed.dragged ||= Math.hypot(event.clientX - pressed.x, event.clientY - pressed.y) > CLICK_PIXELS;
      if (pressed?.dragged && event.shiftKey) {
        const by = (event.clientX - pressed.x) * pressed.at.pixel;
        this.show(pressed.start - by, pressed.end - by);
      } else if (pressed?.dragged && at?.plot === pressed.at.plot) this.drawBox(pressed.at, at);
      const bar = at && !pressed?.dragged ? this.barAt(at) : null;
      tip.hidden = !bar;
      if (!bar) return;
      tip.textContent = this.describe(bar).join("\n");
      // Beside the pointer, on the side with room.
      const { width, height } = tip.getBoundingClientRect();
      tip.style.left = Math.max(4, event.clientX + 16 + width < innerWidth ? event.clientX + 16 : event.clientX - 16 - width) + "px";
      tip.style.top = Math.max(4, Math.min(event.clientY + 16, innerHeight - height - 4)) + "px";
    });
    figure.addEventListener("pointerup", (event) => {
      if (!pressed) return;
      const { at: first, dragged } = pressed, last = this.at(event);
      pressed = null;
      if (dragged && event.shiftKey) return;
      if (dragged) return this.sum(first.plot);
      const bar = last && this.barAt(last);
      if (bar) this.choose(bar); else this.clear();
    });
    figure.addEventListener("pointerleave", () => { tip.hidden = true; this.pointer = null; });
    addEventListener("scroll", () => (tip.hidden = true), { passive: true });
    for (const button of all("[data-act]", this.section)) button.addEventListener("click", () => { this.pointer = null; this.act(button.dataset.act); });
    for (const button of all("[data-category]", this.section)) button.addEventListener("click", () => {
      const visible = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", visible);
      for (const layer of this.layers()) if (layer.label === button.dataset.category) layer.renderer.visible = visible;
    });
    const find = this.section.querySelector(".find");
    let match = -1;
    find.addEventListener("input", () => { match = -1; this.find(find.value.trim().toLowerCase()); });
    find.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !this.matches?.length) return;
      match = (match + (event.shiftKey ? -1 : 1) + this.matches.length) % this.matches.length;
      const bar = this.matches[match], length = Math.max(20 * (bar.to - bar.from), 1e-3);
      this.show((bar.from + bar.to - length) / 2, (bar.from + bar.to + length) / 2);
    });
  }

  layers() {
    return this.plots.flatMap((plot) => plot.layers);
  }

  drawBox(a, b) {
    a.plot.box.setv({ left: Math.min(a.x, b.x), right: Math.max(a.x, b.x), bottom: Math.min(a.y, b.y), top: Math.max(a.y, b.y), visible: true });
  }

  clear() {
    for (const plot of this.plots) plot.box.visible = false;
    for (const layer of this.layers()) layer.renderer.data_source.selected.indices = [];
    this.panel.replaceChildren(create("p", "Drag over an area to sum its time by kind; click a bar to see its details and its rows in the tables.", "note"));
  }

  // Highlight the bars for which a condition holds, and return them in order of start.
  select(condition) {
    const bars = [];
    for (const plot of this.plots)
      for (const layer of plot.layers) {
        const indices = [];
        for (let index = 0; index < layer.count; index++) {
          const bar = this.bar(plot, layer, index);
          if (condition(bar)) { indices.push(index); bars.push(bar); }
        }
        // An index that no bar has fades a layer of which nothing is selected.
        layer.renderer.data_source.selected.indices = indices.length ? indices : [-1];
      }
    return bars.sort((a, b) => a.from - b.from);
  }

  // Sum the time of all bars in the selected area, by category.
  sum(plot) {
    const { left, right, bottom, top } = plot.box, sums = new Map(), ranks = new Set();
    for (const layer of plot.layers) {
      if (!layer.renderer.visible) continue;
      const { left: from, right: to, y, rank, kind } = layer.data;
      for (let index = 0; index < layer.count; index++) {
        const time = Math.min(to[index], right) - Math.max(from[index], left);
        if (time <= 0 || y[index] < bottom || y[index] > top) continue;
        const text = plot.texts[kind[index]], label = text === layer.label ? text : `${text}, ${layer.label}`;
        const sum = sums.get(label) ?? { time: 0, count: 0, colour: layer.colour };
        sums.set(label, { ...sum, time: sum.time + time, count: sum.count + 1 });
        ranks.add(rank[index]);
      }
    }
    const length = right - left, table = create("table");
    for (const [label, { time, count, colour }] of [...sums].sort((a, b) => b[1].time - a[1].time)) {
      const row = table.insertRow(), swatch = create("i");
      swatch.style.background = colour;
      row.insertCell().append(swatch, label);
      for (const text of [inUnits(time), `${((100 * time) / (length * ranks.size)).toFixed(1)} % of the area`, `${count} bar${count === 1 ? "" : "s"}`]) row.insertCell().append(text);
    }
    const title = `${inUnits(length)} from ${left.toFixed(3)} ms on ${ranks.size} rank${ranks.size === 1 ? "" : "s"}`;
    this.panel.replaceChildren(create("p", title), table);
  }

  choose(bar) {
    this.select((other) => other.layer === bar.layer && other.index === bar.index && other.plot === bar.plot);
    const links = create("p");
    for (const [title, row] of this.rowsOf(bar)) {
      const button = create("button", `row in ${title}`, "go");
      button.type = "button";
      button.addEventListener("click", () => showRow(row));
      links.append(button);
    }
    this.panel.replaceChildren(...this.describe(bar).map((line) => create("p", line)), links);
  }

  // The rows of tables that a bar belongs to, with the title of each table's section.
  rowsOf(bar) {
    const middle = (bar.from + bar.to) / 2, found = [];
    for (const table of all("table[data-bars-by]")) {
      const by = table.dataset.barsBy, text = (row, column) => row.cells[column].textContent;
      const row = [...table.tBodies[0].rows].find((candidate) =>
        by === "span" ? Number(candidate.dataset.rank) === bar.rank && candidate.dataset.from <= middle && middle <= candidate.dataset.to
        : by === "name" ? text(candidate, 0) === bar.name && text(candidate, 1) === bar.kind
        : text(candidate, 0) === bar.kind);
      if (row) found.push([table.closest("details.section").querySelector("h2").textContent, row]);
    }
    return found;
  }

  find(text) {
    if (!text) return this.clear();
    this.matches = this.select((bar) => bar.name.toLowerCase().includes(text) || bar.kind.toLowerCase().includes(text));
    this.told(this.matches);
  }

  told(bars) {
    const sum = bars.reduce((total, bar) => total + bar.to - bar.from, 0);
    const joined = this.layers().some((layer) => layer.data.count.some((count) => count > 1));
    const none = joined ? "No bar: its activities are drawn as a part of longer bars." : "No bar.";
    this.panel.replaceChildren(create("p", bars.length ? `${bars.length} bar${bars.length === 1 ? "" : "s"}, ${inUnits(sum)} in all` : none));
  }

  // Show the bars that a row of a table is about.
  showBars(row, by) {
    reveal(this.section);
    const text = (column) => row.cells[column].textContent;
    if (by === "span") {
      const rank = Number(row.dataset.rank), from = Number(row.dataset.from), to = Number(row.dataset.to), margin = Math.max(0.25 * (to - from), 1e-3);
      this.show(from - margin, to + margin);
      this.told(this.select((bar) => bar.rank === rank && bar.from < to && bar.to > from));
    } else {
      const bars = this.select((bar) => (by === "name" ? bar.name === text(0) && bar.kind === text(1) : bar.kind === text(0)));
      if (bars.length) this.show(bars[0].from, Math.max(...bars.map((bar) => bar.to)));
      this.told(bars);
    }
    this.section.scrollIntoView({ block: "start" });
  }
}

const showRow = (row) => {
  reveal(row);
  row.closest("table").showAll();
  row.scrollIntoView({ block: "center" });
  row.classList.add("flash");
  setTimeout(() => row.classList.remove("flash"), 4000);
};

const KEYS = { w: "in", s: "out", a: "left", d: "right", Escape: "clear" };
const start = () => {
  paint();
  dark.addEventListener("change", paint);
  const timelines = all(".figure.timeline").map((figure) => new Timeline(figure));
  const visible = ({ figure }) => { const box = figure.getBoundingClientRect(); return box.bottom > 0 && box.top < innerHeight; };
  document.addEventListener("keydown", (event) => {
    const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const timeline = timelines.find((candidate) => candidate.pointer) ?? timelines.find(visible);
    timeline?.act(act);
  });
  if (!timelines.length) return;
  for (const table of all("table[data-bars-by]")) {
    const by = table.dataset.barsBy;
    const go = (row) => getSelection().isCollapsed && timelines[0].showBars(row, by);
    for (const row of table.tBodies[0].rows) row.tabIndex = 0;
    table.tBodies[0].addEventListener("click", (event) => go(event.target.closest("tr")));
    table.tBodies[0].addEventListener("keydown", (event) => event.key === "Enter" && go(event.target.closest("tr")));
  }
};
// Bokeh builds its views asynchronously.
const ready = () => {
  const figures = all("[data-root-id]");
  const built = window.Bokeh?.documents?.length && figures.every((figure) => Bokeh.index.find_one_by_id(figure.dataset.rootId));
  if (built) { start(); document.documentElement.dataset.ready = ""; } else requestAnimationFrame(ready);
};
if (all("[data-root-id]").length) ready();
else document.documentElement.dataset.ready = "";
openTarget();
