"use strict";
// Draws the charts that the page describes; drawn again when the reader changes an axis, the smoothing or the colour scheme,
// and on a served page when the run has gone on. uPlot has axes, curves and zoom; bars and heat maps are painted in its hook.
let data = JSON.parse(document.getElementById("data").textContent);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const chosen = (name, otherwise) => document.querySelector(`input[name=${name}]:checked`)?.value || otherwise;
const FONT = "11px " + getComputedStyle(document.body).fontFamily, DASHES = { dash: [7, 5], dot: [2, 4] };
const ruler = document.createElement("canvas").getContext("2d");
ruler.font = FONT;

// -- numbers

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const digits = (count) => new Intl.NumberFormat("en", { minimumFractionDigits: count, maximumFractionDigits: count });
const significant = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

// A value as a reader sees it: of a kind that the chart names.
function formatValue(value, kind) {
  if (kind === "share") { return digits(2).format(100 * value) + " %"; }
  if (kind === "whole") { return digits(0).format(value); }
  return kind === "scientific" || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : significant.format(value);
}

// The marks of a linear axis that are `step` apart.
function ticks(values, step, kind) {
  const places = (unit) => {
    let count = 0;
    while (count < 8 && Math.abs(step * unit * 10 ** count - Math.round(step * unit * 10 ** count)) > 1e-6) { count++; }
    return count;
  };
  if (kind === "share") { return values.map((value) => digits(places(100)).format(100 * value) + " %"); }
  if (kind === "compact") { return values.map((value) => compact.format(value)); }
  return values.map((value) => places(1) > 4 ? (value ? value.toExponential(1) : "0") : digits(places(1)).format(value));
}

// Where marks of a logarithmic axis are: fewer in a decade, the more decades there are.
function decades(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), many = Math.log10(high / low), found = [];
  const every = Math.ceil(many / 6), leading = many < 0.7 ? [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : many < 2 ? [1, 2, 5] : [1];
  for (let power = from; power <= to; power += every) { found.push(...leading.map((lead) => lead * 10 ** power)); }
  return found.filter((value) => value >= low && value <= high);
}
const logTick = (value) => value >= 0.01 && value < 1000 ? significant.format(value) : value.toExponential().replace("+", "");

// -- one plot

const plots = new Map();  // of uPlot, by the id of its place in the page

// Draw into a place, and keep the reader's zoom if the plot was there with the same `view`. `read(u)` tells what is under the
// cursor: a title, and [colour, label, value] of each line; null for nothing.
function plot(id, view, { x, y, axes, read, click, start, ...options }, columns) {
  const place = document.getElementById(id), before = plots.get(id);
  if (!place.clientWidth) { return; }
  const { min, max } = before?.scales.x || {}, began = before?.start?.min === min && before?.start?.max === max;
  const range = before?.zoomed && before.view === view && !began ? { min, max } : start;
  clear(place);
  const [first, last] = [columns[0][0], columns[0].at(-1)];
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  tip.setAttribute("role", "status");
  const look = { font: FONT, labelFont: FONT, stroke: color("faint"), ticks: { show: false }, gap: 6, labelSize: 16, labelGap: 0 };
  const u = new uPlot({
    width: place.clientWidth, height: place.clientHeight, legend: { show: false }, padding: [8, 10, 0, 4],
    // Nothing is cut off: all of it, with a margin. Between: what was chosen.
    scales: { x: { time: false, range: (self, low, high) => {
      self.zoomed = low > first || high < last;
      return self.zoomed ? [low, high] : x;
    } }, y },
    axes: [
      { ...look, grid: { show: false }, size: 24, border: { show: true, stroke: color("line"), width: 1 }, ...axes[0] },
      { ...look, grid: { stroke: color("grid"), width: 1 }, space: 32, ...axes[1],
        size: (self, marks) => 10 + Math.max(16, ...(marks || []).map((mark) => ruler.measureText(mark).width)) },
    ],
    ...options,
    cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false }, ...options.cursor },
    hooks: { ...options.hooks, setCursor: [(self) => { tell(self, tip, read); }] },
  }, columns, place);
  u.over.append(tip);
  if (click) { u.over.onclick = () => { click(u); }; }
  plots.set(id, Object.assign(u, { view, start }));
  if (range) { u.setScale("x", range); }
  // Arrows move the cursor, as a mouse does.
  place.onkeydown = (event) => {
    const [right, down] = { ArrowLeft: [-8, 0], ArrowRight: [8, 0], ArrowUp: [0, -8], ArrowDown: [0, 8] }[event.key] || [0, 0];
    if (!right && !down) { return; }
    event.preventDefault();
    const within = (at, most) => Math.min(Math.max(at, 0), most);
    const { left, top } = u.cursor, { clientWidth, clientHeight } = u.over;
    u.setCursor(left < 0 || left === undefined ? { left: clientWidth / 2, top: clientHeight / 2 }
      : { left: within(left + right, clientWidth), top: within(top + down, clientHeight) });
  };
  place.onblur = () => { u.setCursor({ left: -10, top: -10 }); };
}

function tell(u, tip, read) {
  const found = u.cursor.left >= 0 ? read(u) : null;
  tip.hidden = !found;
  if (!found) { return; }
  const line = ([tone, label, value]) => {
    const row = document.createElement("div"), mark = document.createElement("i");
    mark.style.background = tone;
    row.append(mark, label, Object.assign(document.createElement("b"), { textContent: value }));
    return row;
  };
  tip.replaceChildren(found.title, ...found.lines.map(line));
  const { left } = u.cursor, right = left > u.over.clientWidth / 2;
  tip.style.left = right ? "" : left + 12 + "px";
  tip.style.right = right ? u.over.clientWidth - left + 12 + "px" : "";
}

// Remove the plots of a part of the page.
function clear(part) {
  for (const place of [part, ...part.querySelectorAll(".plot")]) {
    plots.get(place.id)?.destroy();
    plots.delete(place.id);
    if (place.matches(".plot")) { place.replaceChildren(); }
  }
}

// Paint on a plot, within its axes.
function paint(u, brush) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  brush(ctx, (value) => u.valToPos(value, "x", true), (value) => u.valToPos(value, "y", true));
  ctx.restore();
}

function draw() {
  data.charts.forEach(drawChart);
  data.maps.forEach(drawMap);
  drawAges();
  drawTimeline();
  document.querySelectorAll("details.group[open]").forEach(drawGroup);
}

// Charts of a folded group have no size until it is opened.
function drawGroup(group) {
  for (const chart of data.more) {
    if (group.querySelector("#" + chart.id)) { drawChart(chart); }
  }
}

// -- curves

const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((power) => [1, 2, 5].map((lead) => lead * power));

// What curves are drawn over: the unit of the values, and of the axis all of them from the first to the last.
function axis() {
  const name = chosen("axis", "step"), columns = Object.keys(data.series).filter((key) => key.endsWith("x/" + name));
  let low = Infinity, high = -Infinity;
  for (const key of columns) {
    for (const value of data.series[key]) {
      if (typeof value === "number") { low = Math.min(low, value); high = Math.max(high, value); }
    }
  }
  if (low > high) { low = high = 0; }
  const [per, unit] = name !== "time" || high < 180 ? [1, " s"] : high < 10800 ? [60, " min"] : [3600, " h"];
  const margin = low === high ? 0.5 : (high - low) / 60;
  return { name, per, range: [(low - margin) / per, (high + margin) / per],
    title: { step: "step", time: "time since the start", tokens: "trained tokens" }[name],
    ticks: {
      step: { incrs: WHOLE, values: (_, marks) => marks.map((mark) => mark.toLocaleString("en")) },
      time: { values: (_, marks, __, ___, step) => ticks(marks, step, "").map((text) => text + unit) },
      tokens: { values: (_, marks, __, ___, step) => ticks(marks, step, "compact") },
    }[name],
    read: (x) => ({
      step: `step ${x.toLocaleString("en")}`, time: digits(2).format(x) + unit, tokens: compact.format(x) + " tokens",
    }[name]) };
}
// A column that depends on the axis has its name behind it.
const column = (name, now) => data.series[name + "@" + now.name] || data.series[name];

// Means of the values on both sides, weighted by how near they are; `share` of all values, and at least 5, weigh most of it. So
// no curve lags behind what it smooths.
function smoothed(values, share) {
  const kept = values.filter((value) => value !== null).length, keep = 1 - 2 / Math.max(5, share * kept);
  const sums = values.map(() => 0), weights = values.map(() => 0);
  for (const order of [[...values.keys()], [...values.keys()].reverse()]) {
    let sum = 0, weight = 0;
    for (const at of order) {
      if (values[at] === null) { continue; }
      sums[at] += keep * sum;
      weights[at] += keep * weight;
      sum = keep * sum + values[at];
      weight = keep * weight + 1;
    }
  }
  return values.map((value, at) => value === null ? null : (sums[at] + value) / (weights[at] + 1));
}

function drawChart(chart) {
  const now = axis(), share = Number(chosen("smooth", "0")), series = [{}], tables = [], errors = [];
  // The values of a line, with its own positions: those of all lines are joined into one table.
  const add = (line, values, more) => {
    const over = data.series[line.x + "x/" + now.name] || [], at = [...over.keys()].filter((i) => typeof over[i] === "number");
    tables.push([at.map((i) => over[i] / now.per), at.map((i) => values[i])]);
    series.push({ stroke: color(line.color), width: line.dash ? 1.5 : 2, dash: DASHES[line.dash], points: { show: false },
      steps: new Map(at.map((i) => [over[i] / now.per, data.series[line.x + "x/step"][i]])), ...more });
    return series.length - 1;
  };
  for (const line of chart.lines) {
    const y = column(line.metric, now), tone = color(line.color);
    const isDotted = line.points || line.marks || alone(y).length > y.filter((value) => value !== null).length / 2;
    const soft = share > 0 && !isDotted && y.length > 20;
    add(line, y, {
      label: line.label, auto: !line.points, paths: line.points ? () => null : undefined, tone,
      // A value between two gaps is no line, and would not show.
      points: { show: true, size: line.marks ? 7 : 4, fill: tone, width: 0,
        filter: (u, of) => line.points || line.marks ? null : alone(u.data[of]) },
      ...soft && { alpha: 0.4, width: 1, dash: undefined },
    });
    if (line.error) { errors.push([line, y, tone]); }
    if (soft) { add(line, smoothed(y, share), {}); }
  }
  const columns = uPlot.join(tables);
  if (!columns[0].length) { return; }
  const hooks = { draw: [(u) => paint(u, (ctx, left, top) => {
    if (chart.bound !== null) {
      ctx.setLineDash([7 * uPlot.pxRatio, 5 * uPlot.pxRatio]);
      stroke(ctx, color("red"), 1.5, [u.bbox.left, top(chart.bound)], [u.bbox.left + u.bbox.width, top(chart.bound)]);
      ctx.setLineDash([]);
    }
    for (const [line, y, tone] of errors) {
      const over = data.series[line.x + "x/" + now.name] || [], far = data.series[line.error];
      y.forEach((value, i) => {
        if (typeof far[i] !== "number" || typeof value !== "number") { return; }
        const [x, low, high] = [left(over[i] / now.per), top(value - far[i]), top(value + far[i])], half = 2 * uPlot.pxRatio;
        stroke(ctx, tone, 1, [x, low], [x, high]);
        for (const end of [low, high]) { stroke(ctx, tone, 1, [x - half, end], [x + half, end]); }
      });
    }
  })] };
  const frame = chart.range && (chart.log ? chart.range.map((power) => 10 ** power) : chart.range);
  const padded = (low, high) => {
    const margin = 0.06 * (high - low || Math.abs(high) || 1);
    return chart.log ? [low / 1.2, high * 1.2] : [low - margin, high + margin];
  };
  plot(chart.id, now.name, {
    x: now.range, series, hooks,
    y: { distr: chart.log ? 3 : 1, range: (u, low, high) => {
      if (low === null) { return frame || [0, 1]; }
      return frame && !u.zoomed ? frame : padded(low, high);
    } },
    axes: [{ label: now.title, ...now.ticks }, chart.log
      ? { splits: (_, __, low, high) => decades(low, high), values: (_, marks) => marks.map(logTick), filter: (_, marks) => marks }
      : { values: (_, marks, __, ___, step) => ticks(marks, step, chart.ticks) }],
    cursor: { dataIdx: (u, of, at) => of && !series[of].label ? null : nearest(u, u.data[of], at) },
    click: (u) => {
      const x = u.data[0][u.cursor.idx], line = series.find((each) => each.label && each.steps.has(x));
      if (line) { pointed(line.steps.get(x)); }
    },
    read: (u) => {
      const unit = chart.unit && " " + chart.unit, lines = [];
      series.forEach((line, of) => {
        const value = u.data[of][u.cursor.idxs[of]];
        const isKnown = line.label && typeof value === "number";
        if (isKnown) { lines.unshift([line.tone, line.label, formatValue(value, chart.format) + unit]); }
      });
      return lines.length ? { title: now.read(u.data[0][u.cursor.idx]), lines } : null;
    },
  }, columns);
}

// Positions of the values that have no neighbour.
function alone(values) {
  const known = [...values.keys()].filter((at) => values[at] !== undefined);
  const isGap = (i) => (values[known[i]] ?? null) === null;
  return known.filter((_, i) => !isGap(i) && isGap(i - 1) && isGap(i + 1));
}

function stroke(ctx, tone, width, from, to) {
  ctx.strokeStyle = tone;
  ctx.lineWidth = width * uPlot.pxRatio;
  ctx.beginPath();
  ctx.moveTo(...from);
  ctx.lineTo(...to);
  ctx.stroke();
}

// The position of the value that is nearest to the cursor, if one is near.
function nearest(u, values, at) {
  const isNear = (i) => i === at || (i in u.data[0] && Math.abs(u.valToPos(u.data[0][i], "x") - u.cursor.left) < 24);
  for (let away = 0; away < values.length; away++) {
    const around = [at - away, at + away].filter(isNear), found = around.find((i) => typeof values[i] === "number");
    if (found !== undefined || !around.length) { return found ?? null; }
  }
  return null;
}

// What a click on a point of that step does: nothing in a file.
let pointed = () => {};

// -- what is no curve

function drawAges() {
  const ages = data.ages;
  if (!ages) { return; }
  const beyond = (age) => ages.bound !== null && age > ages.bound, paths = uPlot.paths.bars({ size: [0.6, 120] });
  const bars = (name, wanted) => [{ paths, fill: color(name), stroke: color(name), width: 0, points: { show: false } },
    ages.x.map((age, i) => beyond(age) === wanted ? ages.y[i] : null)];
  const [inside, outside] = [bars("blue", false), bars("red", true)];
  plot(ages.id, "", {
    x: [ages.x[0] - 0.6, ages.x.at(-1) + 0.6], y: { range: [0, Math.max(...ages.y) * 1.08] },
    series: [{}, inside[0], outside[0]],
    axes: [{ label: "versions", incrs: WHOLE }, { values: (_, marks, __, ___, step) => ticks(marks, step, "share") }],
    cursor: { x: false, points: { show: false } },
    read: (u) => {
      const at = u.cursor.idx, age = ages.x[at], tone = color(beyond(age) ? "red" : "blue");
      return at === null ? null : { title: `age ${age}`, lines: [[tone, "", formatValue(ages.y[at], "share")]] };
    },
  }, [ages.x, inside[1], outside[1]]);
}

function drawTimeline() {
  const timeline = data.timeline;
  if (!timeline) { return; }
  const { lanes, bars } = timeline, half = (bar) => bar.color.endsWith("soft") ? 0.4 : 0.275;
  const number = new Map(lanes.map((lane, i) => [lane, i + 0.5])), end = timeline.range[1];
  const [low, high] = timeline.range;
  plot(timeline.id, "", {
    x: [0, end], start: low > 0 ? { min: low, max: high } : undefined, y: { range: [0, lanes.length] },
    series: [{}, { show: false }],
    axes: [
      { label: "seconds since the first of these",
        values: (_, marks, __, ___, step) => ticks(marks, step, "").map((text) => text + " s") },
      { grid: { show: false }, stroke: color("soft"), splits: () => lanes.map((_, i) => i + 0.5), values: () => lanes,
        filter: (_, marks) => marks },
    ],
    hooks: { draw: [(u) => paint(u, (ctx, left, top) => {
      for (const bar of bars) {
        ctx.fillStyle = color(bar.color);
        bar.start.forEach((start, i) => {
          const [from, to] = [left(start), left(start + bar.seconds[i])], above = top(number.get(bar.lane[i]) + half(bar));
          ctx.fillRect(from, above, Math.max(to - from, 1), top(number.get(bar.lane[i]) - half(bar)) - above);
        });
      }
    })] },
    read: (u) => {
      const at = u.posToVal(u.cursor.left, "x"), lane = lanes[Math.floor(u.posToVal(u.cursor.top, "y"))];
      const slack = (u.scales.x.max - u.scales.x.min) / u.over.clientWidth;
      const lines = bars.flatMap((bar) => bar.start.flatMap((start, i) =>
        bar.lane[i] === lane && at >= start - slack && at <= start + bar.seconds[i] + slack
          ? [[color(bar.color), bar.label + bar.step[i], digits(3).format(bar.seconds[i]) + " s"]] : []));
      return lines.length ? { title: lane, lines: lines.slice(-4) } : null;
    },
  }, [[0, end], [null, null]]);
}

function drawMap(map) {
  // Marks at the middles of some cells.
  const middle = (values) => ({
    splits: (_, of, low, high) => {
      const inside = [...values.keys()].map((at) => at + 0.5).filter((at) => at >= low && at <= high);
      return inside.filter((_, i) => i % Math.ceil(inside.length / (of ? 8 : 10)) === 0);
    },
    values: (_, marks) => marks.map((mark) => String(values[Math.floor(mark)])), filter: (_, marks) => marks, grid: { show: false },
  });
  const size = [map.x.length, map.y.length], [low, high] = map.range;
  plot(map.id, "", {
    x: [0, size[0]], y: { range: [0, size[1]] }, series: [{}, { show: false }], cursor: { x: false },
    axes: [{ label: map.x_title, ...middle(map.x) }, { label: "MoE layer", ...middle(map.y) }],
    hooks: { draw: [(u) => paint(u, (ctx, left, top) => {
      // The second colour over the first, the more the higher the value is.
      for (const [tone, weight] of [[map.colors[0], () => 1], [map.colors[1], (value) => (value - low) / (high - low)]]) {
        ctx.fillStyle = color(tone);
        map.z.forEach((row, layer) => row.forEach((value, at) => {
          const from = Math.floor(left(at)), above = Math.floor(top(layer + 1)) + 1;
          ctx.globalAlpha = Math.min(Math.max(weight(value), 0), 1);
          ctx.fillRect(from, above, Math.floor(left(at + 1)) - from, Math.floor(top(layer)) - above);
        }));
      }
      ctx.globalAlpha = 1;
    })] },
    read: (u) => {
      const [at, layer] = [Math.floor(u.posToVal(u.cursor.left, "x")), Math.floor(u.posToVal(u.cursor.top, "y"))];
      const value = map.z[layer]?.[at], title = `${map.x_title} ${map.x[at]}, MoE layer ${map.y[layer]}`;
      return value === undefined ? null : { title, lines: [["none", "", formatValue(value, map.format)]] };
    },
  }, [[0, size[0]], [null, null]]);
}

// -- the page

function follow() {
  for (const group of document.querySelectorAll("details.group")) {
    group.ontoggle = () => { if (group.open) { drawGroup(group); } };
  }
}
const drawsAnything = () => data.charts.length || data.maps.length || data.more.length || data.ages || data.timeline;
if (drawsAnything()) { draw(); }
follow();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (drawsAnything()) { draw(); } });
addEventListener("resize", () => {
  for (const [id, u] of plots) {
    const { clientWidth, clientHeight } = document.getElementById(id);
    if (clientWidth) { u.setSize({ width: clientWidth, height: clientHeight }); }
  }
});
document.addEventListener("change", (event) => {
  if (["axis", "smooth"].includes(event.target.name) && drawsAnything()) { draw(); }
});
