"use strict";
// Draws the charts that the page describes; drawn again when the reader's colour scheme changes.
const data = JSON.parse(document.getElementById("data").textContent);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const font = getComputedStyle(document.body).fontFamily;

const first = data.steps[0], last = data.steps[data.steps.length - 1];
const span = first === last ? [first - 0.5, last + 0.5] : [first, last];

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
  const traces = chart.lines.map((line) => ({
    type: "scatter", x: line.x ? data.series[line.x] : data.steps, y: data.series[line.metric], name: line.label, connectgaps: false,
    mode: line.marks ? "lines+markers" : line.points || data.steps.length < 2 ? "markers" : "lines",
    error_y: line.error ? { type: "data", array: data.series[line.error], thickness: 1, width: 2 } : {},
    marker: { size: line.points ? 4 : 7, color: color(line.color) },
    line: { color: color(line.color), width: line.dash ? 1.5 : 2, dash: line.dash || "solid" },
    hovertemplate: "%{y:" + chart.format + "}" + (chart.unit ? " " + chart.unit : "") + "<extra>" + line.label + "</extra>",
  }));
  if (chart.bound !== null) {
    traces.push({ type: "scatter", mode: "lines", x: span, y: [chart.bound, chart.bound], hoverinfo: "skip",
      line: { color: color("red"), width: 1.5, dash: "dash" } });
  }
  const axis = axisLook();
  const y = { ...axis, type: chart.log ? "log" : "linear", tickformat: chart.ticks, nticks: 6, exponentformat: "e" };
  if (chart.log) { y.dtick = 1; y.tickformat = ".0e"; }
  if (chart.log && chart.decades < 2) { y.dtick = "D2"; }
  if (chart.range) { y.range = chart.range; }
  Plotly.react(chart.id, traces, {
    ...box, ...look(), showlegend: false, hovermode: "x unified",
    xaxis: { ...axis, showgrid: false, showline: true, nticks: 8, tickformat: ",d", range: chart.span || span, dtick: last - first < 8 ? 1 : null,
      title: titled("step"), unifiedhovertitle: { text: "step %{x}" } },
    yaxis: y,
  }, { displayModeBar: false, responsive: true });
}
const anything = data.charts.length || data.maps.length || data.more.length || data.ages || data.timeline;
if (anything) {
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const group of document.querySelectorAll("details.group")) {
    group.addEventListener("toggle", () => { if (group.open) { drawGroup(group); } });
  }
}
