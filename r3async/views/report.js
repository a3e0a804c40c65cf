"use strict";
// Draws the charts that the page describes; drawn again when the reader changes an axis, the smoothing or the colour scheme,
// and on a served page when the run has gone on.
let data = JSON.parse(document.getElementById("data").textContent);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const font = getComputedStyle(document.body).fontFamily;

const chosen = (name, otherwise) => document.querySelector(`input[name=${name}]:checked`)?.value || otherwise;

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
  return { name, per, range: [(low - margin) / per, (high + margin) / per], few: name === "step" && high - low < 8,
    title: { step: "step", time: "time since the start", tokens: "trained tokens" }[name],
    ticks: { step: ",d", time: "", tokens: "~s" }[name], suffix: name === "time" ? unit : "",
    hover: { step: "step %{x:,d}", time: "%{x:.2f}" + unit, tokens: "%{x:.4s} tokens" }[name] };
}
// A column that depends on the axis has its name behind it.
const column = (name, now) => data.series[name + "@" + now.name] || data.series[name];
const over = (line, now) => (data.series[line.x + "x/" + now.name] || []).map((x) => typeof x === "number" ? x / now.per : null);

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

const box = { margin: { l: 8, r: 8, t: 10, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
const look = () => ({
  font: { family: font, color: color("ink"), size: 12 },
  hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { family: font, color: color("ink"), size: 12 } },
});
const axisLook = () => ({ gridcolor: color("grid"), linecolor: color("line"), zeroline: false,
  tickfont: { color: color("faint"), size: 11 }, automargin: true });
const titled = (text) => ({ text, font: { size: 11, color: color("faint") }, standoff: 4 });

function draw() {
  data.charts.forEach(drawChart);
  drawMaps();
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

function drawAges() {
  const ages = data.ages;
  if (!ages) { return; }
  const beyond = (age) => ages.bound !== null && age > ages.bound;
  Plotly.react(ages.id, [{
    type: "bar", x: ages.x, y: ages.y, marker: { color: ages.x.map((age) => color(beyond(age) ? "red" : "blue")) }, width: 0.6,
    hovertemplate: "age %{x}: %{y:.2%}<extra></extra>",
  }], {
    ...box, ...look(),
    xaxis: { ...axisLook(), showgrid: false, tickformat: ",d", dtick: ages.x.length < 12 ? 1 : null, title: titled("versions") },
    yaxis: { ...axisLook(), tickformat: ".0%", range: [0, Math.max(...ages.y) * 1.08] },
  }, { displayModeBar: false, responsive: true });
}

function drawTimeline() {
  const timeline = data.timeline;
  if (!timeline) { return; }
  const traces = timeline.bars.map((bar) => ({
    type: "bar", orientation: "h", y: bar.lane, base: bar.start, x: bar.seconds, customdata: bar.step, name: bar.label,
    marker: { color: color(bar.color), line: { width: 0 } }, width: bar.color.endsWith("soft") ? 0.8 : 0.55,
    hovertemplate: "%{y} " + bar.label + "%{customdata}: %{x:.3f} s<extra></extra>",
  }));
  Plotly.react(timeline.id, traces, {
    ...box, ...look(), barmode: "overlay", showlegend: false, hovermode: "closest", dragmode: "zoom",
    xaxis: { ...axisLook(), range: timeline.range, title: titled("seconds since the first of these"), ticksuffix: " s" },
    yaxis: { ...axisLook(), showgrid: false, fixedrange: true, categoryorder: "array", categoryarray: timeline.lanes,
      tickfont: { color: color("soft"), size: 12 } },
  }, { displayModeBar: false, responsive: true, doubleClick: "autosize" });
}

function drawMaps() {
  for (const map of data.maps) {
    const whole = (values) => ({ tickformat: ",d", dtick: values.length < 9 ? 1 : null, nticks: 8, showgrid: false });
    Plotly.react(map.id, [{
      type: "heatmap", x: map.x, y: map.y, z: map.z, zmin: map.range[0], zmax: map.range[1], xgap: 0, ygap: 1,
      colorscale: [[0, color(map.colors[0])], [1, color(map.colors[1])]],
      colorbar: { thickness: 8, outlinewidth: 0, tickformat: map.format === ".2%" ? ".0%" : "", nticks: 4,
        tickfont: { color: color("faint"), size: 11 } },
      hovertemplate: map.each + ": %{z:" + map.format + "}<extra></extra>",
    }], {
      ...box, ...look(),
      xaxis: { ...axisLook(), ...whole(map.x), title: titled(map.x_title) },
      yaxis: { ...axisLook(), ...whole(map.y), title: titled("MoE layer") },
    }, { displayModeBar: false, responsive: true });
  }
}

function drawChart(chart) {
  const now = axis(), share = Number(chosen("smooth", "0")), traces = [];
  for (const line of chart.lines) {
    const y = column(line.metric, now), steps = data.series[line.x + "x/step"];
    const soft = share > 0 && !line.points && !line.marks && !line.low && y.length > 20;
    const trace = {
      type: "scatter", x: over(line, now), y, name: line.label, connectgaps: false, customdata: steps,
      mode: line.marks ? "lines+markers" : line.points || y.length < 2 ? "markers" : "lines",
      error_y: line.error ? { type: "data", array: data.series[line.error], thickness: 1, width: 2 } : {},
      marker: { size: line.points ? 4 : 7, color: color(line.color) }, opacity: soft ? 0.4 : 1,
      line: { color: color(line.color), width: soft ? 1 : line.dash ? 1.5 : 2, dash: soft ? "solid" : line.dash || "solid" },
      hovertemplate: "%{y:" + chart.format + "}" + (chart.unit ? " " + chart.unit : "") + "<extra>" + line.label + "</extra>",
    };
    for (const edge of line.low ? [line.low, line.high] : []) {
      traces.push({ type: "scatter", mode: "lines", x: trace.x, y: column(edge, now), hoverinfo: "skip", line: { width: 0 },
        fill: edge === line.high ? "tonexty" : "none", fillcolor: color(line.color) + "26" });
    }
    traces.push(trace);
    if (soft) {
      traces.push({ type: "scatter", mode: "lines", x: trace.x, y: smoothed(y, share), hoverinfo: "skip", connectgaps: false,
        line: { color: color(line.color), width: line.dash ? 1.5 : 2, dash: line.dash || "solid" } });
    }
  }
  if (chart.bound !== null) {
    traces.push({ type: "scatter", mode: "lines", x: now.range, y: [chart.bound, chart.bound], hoverinfo: "skip",
      line: { color: color("red"), width: 1.5, dash: "dash" } });
  }
  const looks = axisLook();
  const y = { ...looks, type: chart.log ? "log" : "linear", tickformat: chart.ticks, nticks: 6, exponentformat: "e" };
  if (chart.log) { y.dtick = 1; y.tickformat = ".0e"; }
  if (chart.log && chart.decades < 2) { y.dtick = "D2"; }
  if (chart.range) { y.range = chart.range; }
  const plot = document.getElementById(chart.id), fresh = !plot.on;
  Plotly.react(plot, traces, {
    ...box, ...look(), showlegend: false, hovermode: "x unified", uirevision: now.name,
    xaxis: { ...looks, showgrid: false, showline: true, nticks: 8, tickformat: now.ticks, ticksuffix: now.suffix, range: now.range,
      dtick: now.few ? 1 : null, title: titled(now.title), unifiedhovertitle: { text: now.hover } },
    yaxis: y,
  }, { displayModeBar: false, responsive: true });
  if (fresh) { plot.on("plotly_click", (event) => pointed(event.points[0].customdata)); }
}

// What a click on a point of that step does: nothing in a file.
let pointed = () => {};

function follow() {
  for (const group of document.querySelectorAll("details.group")) {
    group.ontoggle = () => { if (group.open) { drawGroup(group); } };
  }
}
const drawsAnything = () => data.charts.length || data.maps.length || data.more.length || data.ages || data.timeline;
if (drawsAnything()) { draw(); }
follow();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (drawsAnything()) { draw(); } });
document.addEventListener("change", (event) => {
  if (["axis", "smooth"].includes(event.target.name) && drawsAnything()) { draw(); }
});
