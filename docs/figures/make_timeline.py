"""Draw `timeline.svg` from the spans kept in `timeline.jsonl`: the same work with S = 0 and with S = 4.

    python docs/figures/make_timeline.py                        # draw
    python docs/figures/make_timeline.py RUN_S0 RUN_S4          # first keep a stretch of these runs

Standard library only. The drawing has a background of its own, light or dark as the reader's system asks for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "timeline.jsonl"
SECONDS = 24.0
"""Length of the stretch that is shown."""
WIDTH, LEFT, LANE, GAP = 860, 96, 22, 10
LANES = ("groups", "engine", "learner", "weights")
COLOURS = {
    "play": "a",
    "pause": "d",
    "train": "b",
    "wait": "w",
    "snapshot": "c",
    "write": "c",
    "deliver": "d",
}
STYLE = """
.card{fill:#fff}.ink{fill:#24292f}.soft{fill:#57606a}.axis{stroke:#8c959f}
.a{fill:#1a7f37}.b{fill:#0969da}.c{fill:#8250df}.d{fill:#b3541e}.w{fill:#d0d7de}
@media (prefers-color-scheme: dark){.card{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9da7b1}.axis{stroke:#6e7681}
.a{fill:#3fb950}.b{fill:#58a6ff}.c{fill:#a78bfa}.d{fill:#f0883e}.w{fill:#30363d}}
text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif}.title{font-weight:600;font-size:13px}
"""


def keep(run: Path, staleness: int) -> dict[str, Any]:
    """The spans of `SECONDS` in the middle of the run: before the end of the last step for which new groups were still leased."""
    spans = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    end = sorted(s["end"] for s in spans if s["what"] == "train")[-1 - staleness]
    start = end - SECONDS
    kept = [
        {
            "who": s["who"],
            "what": s["what"],
            "start": round(s["start"] - start, 2),
            "end": round(s["end"] - start, 2),
        }
        for s in spans
        if s["end"] > start and s["start"] < end
    ]
    return {"staleness": staleness, "spans": kept}


def panel(run: dict[str, Any], top: float) -> tuple[list[str], float]:
    """The drawing of one run, and its height."""
    scale = (WIDTH - LEFT - 20) / SECONDS
    out = [
        f'<text class="ink title" x="{LEFT}" y="{top + 14}">max_staleness = {run["staleness"]}</text>'
    ]
    top += 22

    def bar(span: dict[str, Any], y: float, height: float) -> str:
        x0, x1 = (LEFT + scale * min(max(span[k], 0.0), SECONDS) for k in ("start", "end"))
        kind = COLOURS.get(span["what"], "w")
        return f'<rect class="{kind}" x="{x0:.1f}" y="{y:.1f}" width="{max(x1 - x0, 0.8):.1f}" height="{height:.1f}"/>'

    plays = sorted((s for s in run["spans"] if s["what"] == "play"), key=lambda s: s["start"])
    rows: list[float] = []
    placed = []
    for span in plays:  # each group on the first row that is free
        row = next((i for i, until in enumerate(rows) if until <= span["start"]), len(rows))
        rows[row : row + 1] = [span["end"]]
        placed.append((span, row))
    height = max(44.0, min(110.0, 2.0 * len(rows)))
    step = height / max(len(rows), 1)
    for span, row in placed:
        out.append(bar(span, top + row * step, max(step - 0.4, 0.6)))
    out.append(f'<text class="soft" x="8" y="{top + height / 2 + 4}">groups played</text>')
    top += height + GAP
    others = {
        "engine stands": [s for s in run["spans"] if s["what"] == "pause"],
        "learner": [
            s
            for s in run["spans"]
            if s["who"] == "learner" and s["what"] in ("wait", "train", "snapshot")
        ],
        "weights": [s for s in run["spans"] if s["what"] in ("write", "deliver")],
    }
    for name, spans in others.items():
        out += [bar(s, top, LANE - 6) for s in sorted(spans, key=lambda s: s["what"] != "wait")]
        out.append(f'<text class="soft" x="8" y="{top + 12}">{name}</text>')
        top += LANE
    return out, top + GAP


def draw(runs: list[dict[str, Any]]) -> str:
    body: list[str] = []
    top = 14.0
    for run in runs:
        lines, top = panel(run, top)
        body += lines
    scale = (WIDTH - LEFT - 20) / SECONDS
    for second in range(0, int(SECONDS) + 1, 4):
        x = LEFT + scale * second
        body.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{top + 5:.1f}"/>'
        )
        body.append(f'<text class="soft" x="{x - 6:.1f}" y="{top + 18:.1f}">{second} s</text>')
    legend = [
        ("a", "a group of 8 episodes"),
        ("b", "trains"),
        ("w", "waits"),
        ("c", "copies, writes"),
        ("d", "delivers"),
    ]
    x = float(LEFT)
    for kind, label in legend:
        body.append(f'<rect class="{kind}" x="{x:.1f}" y="{top + 30:.1f}" width="12" height="12"/>')
        body.append(f'<text class="soft" x="{x + 17:.1f}" y="{top + 40:.1f}">{label}</text>')
        x += 34 + 6.6 * len(label)
    height = top + 54
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img"'
    title = "<title>Who did what when, with max_staleness 0 and 4</title>"
    card = f'<rect class="card" width="{WIDTH}" height="{height:.0f}" rx="8"/>'
    return "\n".join([f"{head}>", title, f"<style>{STYLE}</style>", card, *body, "</svg>"]) + "\n"


def main(arguments: list[str]) -> None:
    if arguments:
        lines = [json.dumps(keep(Path(run), s)) for run, s in zip(arguments, (0, 4), strict=True)]
        DATA.write_text("\n".join(lines) + "\n")
    runs = [json.loads(line) for line in DATA.read_text().splitlines()]
    (HERE / "timeline.svg").write_text(draw(runs))


if __name__ == "__main__":
    main(sys.argv[1:])
