"use strict";
// Draws the charts of the page from the data in it, and makes its tables sort and filter. The
// charts are drawn at the width they have, again whenever that changes, so that text keeps its
// size on a phone and on paper. Everything a chart shows is in the table below it as well.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const tip = document.getElementById("tip");
  const live = document.getElementById("live");

  const el = (name, attributes, parent, text) => {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  };
  const cut = (value, digits) => String(Number(value.toPrecision(digits)));
  const scaled = (value, steps) => {
    let [unit, size] = steps[0];
    for (const [name, from] of steps) if (Math.abs(value) >= from * 0.99995) [unit, size] = [name, from];
    return `${cut(value / size, 3)} ${unit}`;
  };
  const BYTES = [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12], ["PB", 1e15]];
  const TIMES = [["ms", 1e-3], ["s", 1], ["min", 60], ["h", 3600]];
  const FORMATS = {
    bytes: (v) => (v === 0 ? "0" : scaled(v, BYTES)),
    seconds: (v) => (v === 0 ? "0" : scaled(v, TIMES)),
    number: (v) => cut(v, 4),
  };
  const percent = (share) =>
    share <= 0 ? "0 %" : share >= 1 ? "100 %" : share < 1e-4 ? "<0.01 %" : `${cut(share * 100, 3)} %`;

  let shownAt = 0; // where the page was scrolled to
  function showTip(text, x, y) {
    shownAt = scrollY;
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(6, x + 14), innerWidth - box.width - 6);
    const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  // Axis marks at 1, 2 or 5 times a power of ten.
  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const marks = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) marks.push(Number(v.toPrecision(12)));
    return marks;
  }
  function logTicks(low, high) {
    const marks = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += 1) marks.push(10 ** p);
    const within = (v) => v >= low * 0.999 && v <= high * 1.001;
    let inside = marks.filter(within);
    if (inside.length < 3) inside = marks.flatMap((v) => [v, 2 * v, 5 * v]).filter(within);
    const every = Math.ceil(inside.length / 5);
    return inside.filter((_, i) => i % every === 0);
  }

  // A cursor that pointer and arrow keys move; `place(event)` and `at(index)` are the chart's.
  function interactive(svg, chart) {
    let index = -1;
    const show = (next, x, y) => {
      index = next;
      const box = svg.getBoundingClientRect();
      const shown = chart.at(index);
      if (!shown) return;
      showTip(shown.text, x ?? box.left + shown.x, y ?? box.top + shown.y);
    };
    const leave = () => { hideTip(); chart.clear(); };
    svg.addEventListener("pointermove", (event) => {
      const next = chart.place(event);
      if (next === null) leave(); else show(next, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerdown", (event) => {
      const next = chart.place(event);
      if (next !== null) show(next, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { leave(); return; }
      const next = chart.move(index, event.key);
      if (next === null) return;
      event.preventDefault();
      show(next);
      live.textContent = tip.textContent;
    });
  }

  function lineChart(figure, spec) {
    const width = figure.clientWidth, height = 220;
    if (width < 160) return; // not laid out
    const format = FORMATS[spec.unit];
    const shown = spec.series.filter((s) => s.values.some((v) => v !== null));
    const all = shown.flatMap((s) => s.values).filter((v) => v !== null && (!spec.log || v > 0));
    const old = figure.querySelector("svg");
    if (old) old.remove();
    if (!all.length) return;
    let low = Math.min(...all), high = Math.max(...all);
    const log = spec.log && high / low > 20;
    if (log) { low /= 1.3; high *= 1.3; } else {
      if (spec.unit !== "number") low = 0;
      if (high === low) { high += Math.abs(high) || 1; if (spec.unit === "number") low -= Math.abs(low) || 1; }
      high += (high - low) * 0.06;
    }
    const m = { left: 64, right: 10, top: 10, bottom: 38 };
    const inner = { w: width - m.left - m.right, h: height - m.top - m.bottom };
    const first = spec.x[0], last = spec.x[spec.x.length - 1];
    const px = (v) => m.left + (last === first ? 0.5 : (v - first) / (last - first)) * inner.w;
    const py = (v) => {
      const t = log ? (Math.log(Math.max(v, low)) - Math.log(low)) / (Math.log(high) - Math.log(low)) : (v - low) / (high - low);
      return m.top + (1 - t) * inner.h;
    };
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img",
      "aria-label": `${spec.title}. Arrow keys move through the steps; the table below has all values.` });
    for (const v of log ? logTicks(low, high) : ticks(low, high, 4)) {
      el("line", { x1: m.left, x2: width - m.right, y1: py(v), y2: py(v), stroke: "var(--grid)" }, svg);
      el("text", { x: m.left - 8, y: py(v) + 4, "text-anchor": "end" }, svg, format(v));
    }
    for (const v of ticks(first, last === first ? first + 1 : last, Math.max(2, Math.floor(inner.w / 90)))) {
      if (v > last) continue;
      const edge = px(v) > width - 26 ? "end" : "middle";
      el("text", { x: Math.min(px(v), width - 2), y: height - 20, "text-anchor": edge }, svg, cut(v, 6));
    }
    el("text", { x: m.left + inner.w / 2, y: height - 4, "text-anchor": "middle" }, svg, "step");
    el("line", { x1: m.left, x2: width - m.right, y1: m.top + inner.h, y2: m.top + inner.h, stroke: "var(--line)" }, svg);
    shown.forEach((series) => {
      const color = `var(--s${series.color})`;
      let path = "", pen = false;
      const lonely = [];
      series.values.forEach((v, i) => {
        const there = v !== null && (!log || v > 0);
        if (there) {
          path += `${pen ? "L" : "M"}${px(spec.x[i]).toFixed(1)} ${py(v).toFixed(1)}`;
          if (spec.x.length <= 40) lonely.push(i);
        }
        pen = there;
      });
      el("path", { d: path, fill: "none", stroke: color, "stroke-width": 1.8, "stroke-linejoin": "round",
        ...(series.dash ? { "stroke-dasharray": "5 4" } : {}) }, svg);
      for (const i of lonely) el("circle", { cx: px(spec.x[i]), cy: py(series.values[i]), r: 2.6, fill: color }, svg);
    });
    const cursor = el("g", { visibility: "hidden" }, svg);
    const rule = el("line", { y1: m.top, y2: m.top + inner.h, stroke: "var(--muted)" }, cursor);
    const dots = shown.map((s) => el("circle", { r: 4, fill: `var(--s${s.color})`, stroke: "var(--bg)" }, cursor));
    interactive(svg, {
      place(event) {
        const x = event.clientX - svg.getBoundingClientRect().left;
        if (x < m.left - 12 || x > width) return null;
        let best = 0;
        spec.x.forEach((v, i) => { if (Math.abs(px(v) - x) < Math.abs(px(spec.x[best]) - x)) best = i; });
        return best;
      },
      at(i) {
        const x = px(spec.x[i]);
        cursor.setAttribute("visibility", "visible");
        rule.setAttribute("x1", x);
        rule.setAttribute("x2", x);
        const lines = [`step ${spec.x[i]}${spec.labels ? ` ${spec.labels[i]}` : ""}`];
        shown.forEach((s, k) => {
          const v = s.values[i];
          dots[k].setAttribute("visibility", v === null ? "hidden" : "inherit");
          if (v === null) return;
          dots[k].setAttribute("cx", x);
          dots[k].setAttribute("cy", py(v));
          lines.push(`${s.name}: ${format(v)}`);
        });
        return { text: lines.join("\n"), x, y: m.top + 10 };
      },
      move(i, key) {
        const jump = { ArrowRight: 1, ArrowLeft: -1, PageUp: -10, PageDown: 10 }[key];
        if (key === "Home") return 0;
        if (key === "End") return spec.x.length - 1;
        if (!jump) return null;
        return Math.min(spec.x.length - 1, Math.max(0, i < 0 ? 0 : i + jump));
      },
      clear() { cursor.setAttribute("visibility", "hidden"); },
    });
    figure.appendChild(svg);
  }

  function shorten(name, room) {
    const most = Math.max(6, Math.floor(room / 6.6));
    return name.length <= most ? name : `\u2026${name.slice(name.length - most + 1)}`;
  }

  function heatMap(figure, spec) {
    if (figure.clientWidth < 160) return; // not laid out
    const old = figure.querySelector("svg");
    const filter = figure.querySelector("input").value.toLowerCase();
    const order = figure.querySelector("select.order").value;
    const chosen = figure.querySelector("select.what");
    const what = chosen ? chosen.value : "share";
    const values = spec[what];
    let rows = spec.rows.map((_, i) => i).filter((i) => spec.rows[i].toLowerCase().includes(filter));
    const mean = (i) => {
      const there = values[i].filter((v) => v !== null);
      return there.length ? there.reduce((a, b) => a + b, 0) / there.length : -1;
    };
    if (order === "most") rows = rows.sort((a, b) => mean(b) - mean(a));
    figure.querySelector(".count").textContent = `${rows.length} of ${spec.rows.length} modules`;
    if (old) old.remove();
    if (!rows.length) return;
    const top = what === "share" ? 1 : Math.max(...values.flat().filter((v) => v !== null), 1e-12);
    const level = (v) => (what === "share" ? Math.sqrt(v) : v > 0 ? Math.max(0.03, 1 + Math.log10(v / top) / 4) : 0);
    const say = (v) => (v === null ? "nothing to compare with" : what === "share" ? `${percent(v)} changed` : `update ${cut(v, 3)}`);
    figure.querySelector(".scale .low").textContent = what === "share" ? "0 %" : cut(top / 1e4, 2);
    figure.querySelector(".scale .high").textContent = what === "share" ? "100 %" : cut(top, 2);
    const width = figure.clientWidth;
    const longest = Math.max(...rows.map((i) => spec.rows[i].length));
    const gutter = Math.min(longest * 6.9 + 14, width * (width < 600 ? 0.36 : 0.3));
    const size = width < 600 ? 14 : 16, head = 6, foot = 36;
    const height = head + rows.length * size + foot;
    const inner = width - gutter - 6, cell = inner / spec.columns.length;
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img",
      "aria-label": "Heat-map of modules by steps. Arrow keys move through the cells; the table below has the figures." });
    const hatch = el("pattern", { id: `hatch-${figure.dataset.chart}`, width: 5, height: 5, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" }, el("defs", {}, svg));
    el("line", { x1: 0, x2: 0, y1: 0, y2: 5, stroke: "var(--muted)", "stroke-opacity": 0.55, "stroke-width": 1.5 }, hatch);
    rows.forEach((row, r) => {
      const y = head + r * size;
      el("text", { x: gutter - 8, y: y + size - 4, "text-anchor": "end" }, svg, shorten(spec.rows[row], gutter - 14));
      let start = 0;
      const of = (c) => { const v = values[row][c]; return v === null ? -1 : v <= 0 ? 0 : Math.max(1, Math.round(level(v) * 24)); };
      for (let c = 1; c <= spec.columns.length; c += 1) {
        if (c < spec.columns.length && of(c) === of(start)) continue;
        const v = of(start);
        if (v < 0) el("rect", { x: (gutter + start * cell).toFixed(2), y: y + 1, height: size - 2,
          width: ((c - start) * cell).toFixed(2), class: "cell", fill: `url(#${hatch.id})` }, svg);
        else el("rect", { x: (gutter + start * cell).toFixed(2), y: y + 1, height: size - 2,
          width: ((c - start) * cell + (v > 0 ? 0.3 : 0)).toFixed(2), class: "cell",
          fill: v ? "var(--heat)" : "var(--panel)", "fill-opacity": v ? (0.1 + 0.9 * v / 24).toFixed(3) : 1 }, svg);
        start = c;
      }
    });
    const labels = Math.max(2, Math.floor(inner / 80));
    const every = Math.max(1, Math.ceil(spec.columns.length / labels));
    for (let c = 0; c < spec.columns.length; c += every) {
      el("text", { x: gutter + (c + 0.5) * cell, y: height - foot + 16, "text-anchor": c ? "middle" : "start" }, svg, spec.columns[c][0]);
    }
    el("text", { x: gutter + inner / 2, y: height - 4, "text-anchor": "middle" }, svg, "step");
    const mark = el("rect", { width: Math.max(3, cell), height: size, fill: "none", stroke: "var(--s1)", "stroke-width": 2, visibility: "hidden" }, svg);
    const count = spec.columns.length;
    interactive(svg, {
      place(event) {
        const box = svg.getBoundingClientRect();
        const c = Math.floor((event.clientX - box.left - gutter) / cell);
        const r = Math.floor((event.clientY - box.top - head) / size);
        if (r < 0 || r >= rows.length || c >= count) return null;
        return r * count + Math.max(0, c);
      },
      at(i) {
        const r = Math.floor(i / count), c = i % count;
        const x = gutter + c * cell, y = head + r * size;
        mark.setAttribute("x", x);
        mark.setAttribute("y", y);
        mark.setAttribute("visibility", "visible");
        const [from, to] = spec.columns[c];
        const steps = from === to ? `step ${from}` : `steps ${from} to ${to} (mean)`;
        return { text: `${spec.rows[rows[r]]}\n${steps}: ${say(values[rows[r]][c])}`, x: x + cell, y };
      },
      move(i, key) {
        if (i < 0) return key.startsWith("Arrow") ? 0 : null;
        let r = Math.floor(i / count), c = i % count;
        if (key === "ArrowRight") c += 1;
        else if (key === "ArrowLeft") c -= 1;
        else if (key === "ArrowDown") r += 1;
        else if (key === "ArrowUp") r -= 1;
        else if (key === "Home") c = 0;
        else if (key === "End") c = count - 1;
        else return null;
        r = Math.min(rows.length - 1, Math.max(0, r));
        c = Math.min(count - 1, Math.max(0, c));
        return r * count + c;
      },
      clear() { mark.setAttribute("visibility", "hidden"); },
    });
    figure.appendChild(svg);
  }

  const charts = [];
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const spec = data[figure.dataset.chart];
    const draw = () => (spec.kind === "heat" ? heatMap : lineChart)(figure, spec);
    for (const control of figure.querySelectorAll("input, select")) control.addEventListener("input", draw);
    charts.push(draw);
    draw();
  }
  const redraw = () => { hideTip(); for (const draw of charts) draw(); };
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  addEventListener("beforeprint", redraw);
  addEventListener("afterprint", redraw);
  addEventListener("scroll", () => { if (Math.abs(scrollY - shownAt) > 2) hideTip(); }, { passive: true });

  // Tables: a click (or Enter) on a column's name sorts by it, again the other way round.
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const number = head.classList.contains("n");
        const now = head.getAttribute("aria-sort");
        const down = now ? now === "ascending" : number;
        const key = (row) => {
          const cell = row.cells[column];
          return number ? Number(cell.dataset.v ?? "-Infinity") : cell.textContent;
        };
        const sign = down ? -1 : 1;
        const rows = [...body.rows].map((row) => [key(row), row]);
        rows.sort(([a], [b]) => sign * (number ? a - b : a.localeCompare(b, "en", { numeric: true })));
        body.append(...rows.map(([, row]) => row));
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
      });
    });
  }
  for (const input of document.querySelectorAll("input[data-filters]")) {
    const body = document.getElementById(input.dataset.filters).tBodies[0];
    const shown = input.parentElement.parentElement.querySelector(".count");
    const apply = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        count += row.hidden ? 0 : 1;
      }
      shown.textContent = `${count} of ${body.rows.length} rows`;
    };
    input.addEventListener("input", apply);
    apply();
  }

  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  let theme = 0;
  button.addEventListener("click", () => {
    theme = (theme + 1) % themes.length;
    if (theme) document.documentElement.dataset.theme = themes[theme];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${themes[theme]}`;
  });
  document.documentElement.dataset.ready = "yes";
})();
