"""The commands `bench all` and `bench compare`: run several benchmarks into one file, and find what got worse between
two files.

Two files rarely come from one machine at one load. So only **headlines** are compared: figures without a unit of time
(our figure over a peer's or over raw; shares, exponents, counts). Each has the spread of the measurements that it is
the middle of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dev.bench.jobs import Say, table
from dev.bench.replay import machine
from r3async.config import ConfigError

MARGIN = 0.03
"""Smallest relative difference of a ratio that counts as worse, if the spread is smaller."""

Good = Literal["low", "high"]


class Headline(msgspec.Struct, frozen=True):
    """A figure of a benchmark that can be compared across machines.

    Attributes:
        good: the better direction.
        spread: (largest - smallest) / value over seeds or repeats; 0 with a single one.
    """

    name: str
    value: float
    good: Good
    spread: float = 0.0


class All(msgspec.Struct, frozen=True):
    """The report of `bench all`: headlines and reports of all benchmarks.

    Attributes:
        quick: True if the benchmarks were small.
        load: the load average before each benchmark.
    """

    benchmark: str
    quick: bool
    machine: dict[str, str]
    load: dict[str, float]
    headlines: list[Headline]
    reports: dict[str, Any]


class Difference(msgspec.Struct, frozen=True):
    """A headline that both files have.

    Attributes:
        ratio: the later value over the earlier.
        margin: the difference that is tolerated (`MARGIN`, or the larger spread).
    """

    name: str
    good: Good
    before: float
    after: float
    ratio: float
    margin: float

    @property
    def worse(self) -> bool:
        return self.ratio > 1 + self.margin if self.good == "low" else self.ratio < 1 / (1 + self.margin)


class Compared(msgspec.Struct, frozen=True):
    """The report of `bench compare`; `missing` lists the headlines that only one file has."""

    benchmark: str
    differences: list[Difference]
    worse: list[str]
    missing: list[str]


# -- headlines of each benchmark ---------------------------------------------------------------------------------------

OWN: Mapping[str, Good] = {
    "cpu_per_token_ratio": "low",
    "learner_cpu_ratio": "low",
    "pipeline_cpu_ratio": "low",
    "trainer_cpu_ratio": "low",
    "learner_idle": "low",
    "engine_idle": "low",
}
AGAINST_PEER: Mapping[str, tuple[Good, Callable[[Any], float | None]]] = {
    "step_ratio": ("low", lambda side: side["seconds_per_step"]),
    "cpu_ratio": ("low", lambda side: side["cpu_seconds_per_step"]),
    "seconds_to_07_ratio": ("low", lambda side: side["seconds_to"]["0.7"]),
    "episodes_ratio": ("high", lambda side: side["episodes_per_second"]),
}


def _e2e(report: Mapping[str, Any]) -> Iterator[Headline]:
    for case in ("a", "b", "c"):
        found = report.get(case) or {"pairs": []}
        for name, (good, figure) in AGAINST_PEER.items():
            pairs = [(figure(p["ours"]), figure(p["theirs"])) for p in found["pairs"] if p.get("theirs")]
            ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
            if found.get(name) is not None:
                yield Headline(f"{case}.{name}", found[name], good, _spread(ratios, found[name]))
    if own := report.get("own"):
        for name, good in OWN.items():
            yield Headline(f"own.{name}", own[name], good, _spread([seed[name] for seed in own["by_seed"]], own[name]))


def _scale(report: Mapping[str, Any]) -> Iterator[Headline]:
    for axis in report["axes"]:
        yield Headline(f"{axis['name']}.exponent", max(axis["exponent"], axis["tail"]), "low")


def _wire(report: Mapping[str, Any]) -> Iterator[Headline]:
    for case in report["cases"]:
        yield Headline(f"{case['name']}.bytes_per_token", case["wire"]["bytes_per_token"], "low")
        yield Headline(f"{case['name']}.decode_ratio", case["decode_ratio"], "high")


def _transport(report: Mapping[str, Any]) -> Iterator[Headline]:
    for size in report["sizes"]:
        for way, rate in size["paths"].items():
            if not way.startswith("raw"):
                for than in ("raw", "curve"):
                    name = f"share_of_{than}_cpu"
                    yield Headline(f"{way}.{size['nbytes']}.{name}", rate[name], "high")


def _packing(report: Mapping[str, Any]) -> Iterator[Headline]:
    by_seed = [seed["efficiency"] for seed in report["by_seed"].values()]
    yield Headline("efficiency", report["summary"]["efficiency"], "high", _spread(by_seed, 1.0))
    yield Headline("below", 1.0 + report["summary"]["below"], "low")


def _loss(report: Mapping[str, Any]) -> Iterator[Headline]:
    yield Headline("memory_ratio", report["memory_ratio"], "low")
    yield Headline("time_ratio", report["time_ratio"], "low")


def _sampling(report: Mapping[str, Any]) -> Iterator[Headline]:
    """Yield the KL with the mask over the KL where all tokens could be sampled (arithmetic alone) and over the KL
    without the mask."""
    for other in ("whole", "unmasked"):
        ratios = [seed["scored"]["masked"]["k3"] / seed["scored"][other]["k3"] for seed in report["seeds"]]
        ratio = report["k3_masked"] / report[f"k3_{other}"]
        yield Headline(f"masked_over_{other}", ratio, "low", _spread(ratios, ratio))
    yield Headline("support_bytes", report["support_bytes"], "low")


def _weights(report: Mapping[str, Any]) -> Iterator[Headline]:
    yield Headline("paused_share", report["paused_share"], "low")


def _conductor(report: Mapping[str, Any]) -> Iterator[Headline]:
    for row in report["rows"]:
        of = row["measured"]
        yield Headline(f"{of['way']}.{of['generators']}.messages_per_group", row["messages_per_group"], "low")


def _spread(values: Sequence[float], middle: float) -> float:
    return (max(values) - min(values)) / abs(middle) if len(values) > 1 and middle else 0.0


HEADLINES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Headline]]] = {
    "packing": _packing,
    "wire": _wire,
    "transport": _transport,
    "loss": _loss,
    "sampling": _sampling,
    "scale": _scale,
    "weights": _weights,
    "conductor": _conductor,
    "e2e": _e2e,
}
"""Functions that read the headlines of a report, by benchmark."""


# -- `bench all` and `bench compare` -----------------------------------------------------------------------------------


def measures(peer_python: str, *, quick: bool, say: Say) -> dict[str, Callable[[], Any]]:
    """Return, by name in `HEADLINES`, the function that makes each benchmark's report."""
    from dev.bench import e2e, loss, packing, sampling, scale, transport, weights, wire
    from dev.bench.e2e_report import Plan

    plan = Plan(["a", "b", "c", "own"], [0, 1, 2], "trl", peer_python) if peer_python else Plan(["own"], [0], steps=60)
    job = weights.WeightsJob(*(4 if quick else 20, 4, 128, 8, 64), "float32", "keep", "auto")
    return {
        "packing": lambda: packing.run([0, 1, 2, 3, 4], quick=quick),
        "wire": lambda: wire.run(quick),
        "transport": lambda: transport.run(quick=quick, rounds=3, say=say),
        "loss": lambda: loss.run(quick, say),
        "sampling": lambda: sampling.run([0] if quick else [0, 1, 2], quick, say),
        "scale": lambda: scale.run([], quick=quick, say=say),
        "weights": lambda: weights.run(job, say),
        "e2e": lambda: e2e.run(e2e.small(plan) if quick else plan, say),
    }


def run_all(measures: Mapping[str, Callable[[], Any]], only: Sequence[str], say: Say, *, quick: bool = False) -> All:
    """Run the benchmarks and collect their headlines. Cases of `packing` are left out because they are many.

    Raises `ConfigError` for an unknown name, and whatever a benchmark raises.

    Args:
        measures: the benchmarks, as the function `measures` returns them.
    """
    if unknown := [name for name in only if name not in measures]:
        raise ConfigError(f"--only {unknown[0]!r}: there are {', '.join(measures)}")
    load, reports, headlines = {}, {}, []
    for name in only or measures:
        say(f"all: {name}")
        load[name] = os.getloadavg()[0]
        reports[name] = msgspec.to_builtins(measures[name](), str_keys=True)
        if name == "packing":
            del reports[name]["cases"]
        found = HEADLINES[name](reports[name])
        headlines += [msgspec.structs.replace(h, name=f"{name}.{h.name}") for h in found]
    return All("all", quick, machine(), load, headlines, reports)


def read(path: Path) -> list[Headline]:
    """Return the headlines of a file that `bench all --json` or `bench NAME --json` printed, from its last line. Raises
    `ConfigError`."""
    try:
        report = msgspec.json.decode(path.read_bytes().rstrip().rpartition(b"\n")[2])
        if report.get("benchmark") == "all":
            return msgspec.convert(report["headlines"], list[Headline])
        return list(HEADLINES[report["benchmark"]](report))
    except (OSError, msgspec.DecodeError, AttributeError, KeyError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{path} has no report of `bench all --json`, or of {', '.join(HEADLINES)} ({what})"
        ) from error


def compare(before: Sequence[Headline], after: Sequence[Headline]) -> Compared:
    """Compare, by name, the headlines that both have."""
    was, now = ({h.name: h for h in side if h.value > 0} for side in (before, after))
    differences = [
        Difference(
            name,
            now[name].good,
            was[name].value,
            now[name].value,
            now[name].value / was[name].value,
            max(MARGIN, was[name].spread, now[name].spread),
        )
        for name in was
        if name in now
    ]
    missing = [*(name for name in was if name not in now), *(name for name in now if name not in was)]
    return Compared("compare", differences, [d.name for d in differences if d.worse], missing)


def render_all(report: All) -> str:
    rows = [(h.name, f"{h.value:.3g}", h.good, f"{h.spread:.0%}") for h in report.headlines]
    return "\n".join(table(("headline", "value", "better", "spread"), rows))


def render(compared: Compared) -> str:
    rows = [
        (d.name, f"{d.before:.3g}", f"{d.after:.3g}", f"{d.ratio:.3f}", f"{d.margin:.0%}", "worse" if d.worse else "")
        for d in compared.differences
    ]
    lines = table(("headline", "before", "after", "ratio", "margin", ""), rows)
    if compared.missing:
        lines.append(f"in one file only: {', '.join(compared.missing)}")
    worse = ", ".join(compared.worse)
    return "\n".join([*lines, f"worse beyond its spread: {worse}" if worse else "nothing got worse beyond its spread"])
