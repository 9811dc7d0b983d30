"use strict";
// The page's own script: light or dark, and charts in the place of still figures. It reads numbers and names from the element
// "charts", and writes names as text alone. Without it, or where it fails, the still figures stand.
(() => {
  const root = document.documentElement, KEY = "fedfleet-theme", NS = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 3", "2 3", "7 3 2 3"], LEFT = 62, RIGHT = 14, TOP = 10, BOTTOM = 44;
  const stored = (value) => {
    try { return value === undefined ? localStorage.getItem(KEY) : localStorage.setItem(KEY, value); } catch { return null; }
  };
  const dress = (theme) => { if (theme === "light" || theme === "dark") root.dataset.theme = theme; };
  dress(stored());
  root.classList.add("script");

  const make = (tag, attributes, parent, text) => {
    const made = ["button", "div", "p", "span"].includes(tag) ? document.createElement(tag) : document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const short = (value, digits = 4) => {
    const size = Math.abs(value), [scale, prefix] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]].find(([s]) => size >= s) || [1, ""];
    return (size >= 1e4 ? value / (prefix === "k" ? 1e3 : scale) : value).toPrecision(digits).replace(/(\.\d*?)0+(e|$)/, "$1$2").replace(/\.(e|$)/, "$1") + (prefix && " " + prefix);
  };
  const ticks = (low, high, count, whole) => {
    const power = 10 ** Math.floor(Math.log10((high - low) / count)), least = (high - low) / count;
    let step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= least * 0.999);
    if (whole) step = Math.max(1, Math.ceil(step));
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
  };
  const nearest = (values, x) => {
    let low = 0, high = values.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (values[middle] <= x) low = middle; else high = middle; }
    return x - values[low] <= values[high] - x ? low : high;
  };

  function Chart(figure, chart, pool) {
    const box = make("div", { class: "sheet live" }), tools = make("div", { class: "tools" }, box);
    const svg = make("svg", { tabindex: 0, role: "img" }, box);
    const hidden = new Set(), title = figure.querySelector("h3").textContent, clip = "clip-" + figure.id;
    let axis = chart.axes[0], range = null, cursor = null, drag = null, plot = null;
    svg.setAttribute("aria-label", `${title}. ${figure.querySelector("figcaption").textContent} Arrow keys read values, plus and minus zoom, Escape shows all.`);

    const choices = chart.axes.length > 1 ? chart.axes.map((each) => {
      const button = make("button", { type: "button" }, tools, each.name.replace(" received by the server", " up"));
      button.onclick = () => { axis = each; range = cursor = null; draw(); };
      return button;
    }) : [];
    const whole = make("button", { type: "button" }, tools, "Show all");
    whole.onclick = () => { range = null; draw(); svg.focus(); };
    if (chart.labels.length > 1) {
      const keys = make("div", { class: "keys" }, box);
      chart.labels.forEach((label, i) => {
        const button = make("button", { type: "button", "aria-pressed": "true" }, keys);
        const key = make("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" }, button);
        make("path", { d: "M0 4H22", stroke: `var(--c${label.color})`, "stroke-width": 2.5, "stroke-dasharray": DASHES[label.dash] }, key);
        make("span", {}, button, label.name);
        button.onclick = () => { if (!hidden.delete(i)) hidden.add(i); button.setAttribute("aria-pressed", String(!hidden.has(i))); draw(); };
      });
    }
    const read = make("p", { class: "read", "aria-live": "polite" }, box);
    const shown = () => axis.lines.filter((line) => !hidden.has(line.label));
    const of = (line, name) => pool[line[name]];

    function draw() {
      const width = Math.max(280, box.clientWidth - 26), height = Math.min(340, Math.max(230, width * 0.55)), lines = shown();
      const ends = axis.lines.flatMap((line) => [of(line, "x")[0], of(line, "x").at(-1)]);
      const [x0, x1] = range || [Math.min(...ends), Math.max(...ends)];
      let low = Infinity, high = -Infinity;
      for (const line of lines) of(line, "x").forEach((x, i) => {
        if (x < x0 || x > x1) return;
        low = Math.min(low, of(line, line.low === undefined ? "y" : "low")[i]);
        high = Math.max(high, of(line, line.high === undefined ? "y" : "high")[i]);
      });
      if (low > high) [low, high] = [0, 1];
      const log = chart.log && low > 0, up = log ? Math.log10 : (v) => v, room = (up(high) - up(low)) * 0.05 || Math.abs(up(high)) * 0.05 || 1;
      const y0 = up(low) - room, y1 = up(high) + room;
      const X = (x) => LEFT + (x - x0) / (x1 - x0 || 1) * (width - LEFT - RIGHT), Y = (y) => height - BOTTOM - (up(y) - y0) / (y1 - y0) * (height - TOP - BOTTOM);
      plot = { x0, x1, X, Y, width, height, back: (px) => x0 + (px - LEFT) / (width - LEFT - RIGHT) * (x1 - x0) };
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      make("rect", { x: LEFT - 4, y: 0, width: width - LEFT - RIGHT + 8, height: height - BOTTOM + 4 }, make("clipPath", { id: clip }, make("defs", {}, svg)));
      const marks = log ? [] : ticks(y0, y1, 6);
      if (log) for (let p = Math.floor(y0); p <= y1; p++) for (const m of y1 - y0 > 2 ? [1] : [1, 2, 5]) marks.push(m * 10 ** p);
      for (const y of marks.filter((m) => up(m) >= y0 && up(m) <= y1)) {
        make("path", { d: `M${LEFT} ${Y(y)}H${width - RIGHT}`, stroke: "var(--grid)" }, svg);
        make("text", { x: LEFT - 8, y: Y(y) + 4, "text-anchor": "end" }, svg, short(y, 3));
      }
      for (const x of ticks(x0, x1, Math.max(3, width / 110), axis.whole)) {
        make("path", { d: `M${X(x)} ${height - BOTTOM}v5`, stroke: "var(--axis)" }, svg);
        make("text", { x: X(x), y: height - BOTTOM + 18, "text-anchor": "middle" }, svg, short(x, 3));
      }
      make("path", { d: `M${LEFT} ${TOP}V${height - BOTTOM}H${width - RIGHT}`, fill: "none", stroke: "var(--axis)" }, svg);
      make("text", { x: (LEFT + width - RIGHT) / 2, y: height - 6, "text-anchor": "middle" }, svg, axis.name);
      const body = make("g", { class: "lines", "clip-path": `url(#${clip})` }, svg);
      const path = (xs, ys) => xs.map((x, i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(ys[i]).toFixed(1)}`).join("");
      for (const line of lines) {
        const { color, dash } = chart.labels[line.label], stroke = `var(--c${color})`, x = of(line, "x"), y = of(line, "y");
        if (line.low !== undefined) make("path", { d: path(x.concat([...x].reverse()), of(line, "high").concat([...of(line, "low")].reverse())) + "Z", fill: stroke, opacity: 0.18 }, body);
        make("path", { d: path(x, y), stroke, "stroke-dasharray": DASHES[dash], "stroke-width": line.kind === "line" ? 2 : 1, opacity: line.kind === "pale" ? 0.4 : 1 }, body);
        if (x.length <= 15) x.forEach((at, i) => make("circle", { cx: X(at), cy: Y(y[i]), r: 3, fill: stroke }, body));
      }
      choices.forEach((button, i) => button.setAttribute("aria-pressed", String(chart.axes[i] === axis)));
      whole.hidden = !range;
      point();
    }

    function point() {
      svg.querySelectorAll(".cursor").forEach((each) => each.remove());
      const lines = shown().filter((line) => line.kind !== "pale" && line.kind !== "thin" || axis.lines.every((each) => each.kind !== "line"));
      if (cursor === null || !lines.length) { read.textContent = "Point at the chart for values; drag across it to zoom."; return; }
      const first = lines.reduce((a, b) => Math.abs(of(b, "x")[nearest(of(b, "x"), cursor)] - cursor) < Math.abs(of(a, "x")[nearest(of(a, "x"), cursor)] - cursor) ? b : a);
      cursor = of(first, "x")[nearest(of(first, "x"), cursor)];
      const layer = make("g", { class: "cursor", "clip-path": `url(#${clip})` }, svg);
      make("path", { d: `M${plot.X(cursor)} ${TOP}V${plot.height - BOTTOM}`, stroke: "var(--axis)", "stroke-dasharray": "3 3" }, layer);
      const told = lines.map((line) => {
        const i = nearest(of(line, "x"), cursor), y = of(line, "y")[i], label = chart.labels[line.label];
        make("circle", { cx: plot.X(of(line, "x")[i]), cy: plot.Y(y), r: 4.5, fill: `var(--c${label.color})`, stroke: "var(--sheet)", "stroke-width": 1.5 }, layer);
        const between = line.low === undefined ? "" : ` (${short(of(line, "low")[i])} to ${short(of(line, "high")[i])})`;
        return `${chart.labels.length > 1 ? label.name : chart.name} ${short(y)}${between}`;
      });
      read.textContent = `${axis.name} ${short(cursor)}: ${told.join("; ")}`;
    }

    const at = (event) => {
      const frame = svg.getBoundingClientRect();
      return plot.back(Math.min(Math.max((event.clientX - frame.left) * plot.width / frame.width, LEFT), plot.width - RIGHT));
    };
    const zoom = (from, to) => { if (to - from > (plot.x1 - plot.x0) * 0.02) { range = [from, to]; draw(); } };
    svg.onpointerdown = (event) => { drag = at(event); svg.setPointerCapture(event.pointerId); };
    svg.onpointermove = (event) => {
      cursor = at(event);
      point();
      svg.querySelector(".chosen")?.remove();
      if (drag !== null) {
        const [a, b] = [plot.X(drag), plot.X(at(event))].sort((p, q) => p - q);
        make("rect", { class: "chosen", x: a, y: TOP, width: b - a, height: plot.height - TOP - BOTTOM, fill: "var(--accent)", opacity: 0.2 }, svg);
      }
    };
    svg.onpointerup = (event) => { const from = drag; drag = null; svg.querySelector(".chosen")?.remove(); if (from !== null) zoom(Math.min(from, at(event)), Math.max(from, at(event))); };
    svg.onpointercancel = () => { drag = null; svg.querySelector(".chosen")?.remove(); };
    svg.onpointerleave = () => { if (drag === null) { cursor = null; point(); } };
    svg.ondblclick = () => { range = null; draw(); };
    svg.onkeydown = (event) => {
      const xs = shown().length ? of(shown().find((line) => line.kind !== "pale") || shown()[0], "x") : [0], half = (plot.x1 - plot.x0) / 2;
      const middle = cursor ?? plot.x0 + half, i = nearest(xs, middle);
      if (event.key === "ArrowRight" || event.key === "ArrowLeft") cursor = xs[Math.min(Math.max(cursor === null ? 0 : i + (event.key === "ArrowRight" ? 1 : -1), 0), xs.length - 1)];
      else if (event.key === "+" || event.key === "=") return zoom(Math.max(plot.x0, middle - half / 2), Math.min(plot.x1, middle + half / 2));
      else if (event.key === "-" || event.key === "Escape") { range = null; return draw(); }
      else return;
      event.preventDefault();
      if (cursor < plot.x0 || cursor > plot.x1) { range = null; draw(); } else point();
    };
    const still = figure.querySelector(".still");
    still.before(box);
    still.hidden = true;
    try { draw(); } catch (error) { box.remove(); still.hidden = false; throw error; }
    new ResizeObserver(() => { if (Math.abs(box.clientWidth - 26 - plot.width) > 1) draw(); }).observe(box);
  }

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme"), wanted = matchMedia("(prefers-color-scheme: dark)");
    const other = () => ((root.dataset.theme || (wanted.matches ? "dark" : "light")) === "dark" ? "light" : "dark");
    const name = () => { button.textContent = other() === "dark" ? "Dark" : "Light"; button.setAttribute("aria-label", `Show the page ${other()}`); };
    button.onclick = () => { dress(other()); stored(root.dataset.theme); name(); };
    wanted.addEventListener("change", name);
    button.hidden = false;
    name();
    const told = document.getElementById("charts");
    const { charts, pool } = told ? JSON.parse(told.textContent) : { charts: {}, pool: [] };
    for (const [id, chart] of Object.entries(charts)) Chart(document.getElementById(id), chart, pool);
  });
})();
