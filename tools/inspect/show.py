"""Trajectories on a terminal: one a line, or one token a line."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console

from r3async.tools.inspect.run import fitted
from r3async.tools.inspect.trajectories import Seen, SeenToken, tokens_of
from r3async.views.summary import format_number
from r3async.world.processes import printable

LIST_HEADS = (
    "trajectory",
    "from",
    "step",
    "reward",
    "turns",
    "tokens",
    "trained",
    "lineage",
    "versions",
    "age",
    "ended",
)
LAYERS_SHOWN = 3


def printer(console: Console) -> Callable[..., None]:
    """`say(line, style)`: no markup, no wrapping; lines come from runs."""
    return lambda line, style="": console.print(line, style=style, soft_wrap=True, highlight=False, markup=False)


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """A line a row, its columns as wide as the widest cell of a terminal in them; those in `left` begin at the left."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        return " ".join(c + gap if i in left else gap + c for i, (c, gap) in enumerate(zip(row, gaps, strict=True)))

    return [line(row).rstrip() for row in rows]


def print_list(found: Sequence[dict[str, Any]], hidden: int, console: Console) -> None:
    """`found`: `Seen.facts`. `hidden`: how many more there are."""
    say = printer(console)
    for number, line in enumerate(aligned([LIST_HEADS, *map(_list_row, found)], left=(0, 1, 10))):
        say(line, "" if number else "bold")
    if hidden:
        say(f"and {hidden} more; --limit 0 shows all")


def _list_row(facts: dict[str, Any]) -> tuple[str, ...]:
    low, high = facts["version_min"], facts["version_max"]
    versions = "-" if low is None else str(low) if low == high else f"{low}-{high}"
    return (
        fitted(facts["trajectory_id"] or "-", 40).strip(),
        facts["source"],
        _or_dash(facts["step"]),
        format_number(facts["reward"]),
        str(facts["turns"]),
        str(facts["tokens"] or "-"),
        str(facts["sampled"] or "-"),
        _or_dash(facts["lineage"]),
        versions,
        _or_dash(facts["age"]),
        fitted(facts["stop_reason"] or "", 20).strip(),
    )


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def print_tokens(seen: Seen, version: int | None, text: Callable[[int], str], console: Console) -> None:
    """Every token of every sample."""
    say = printer(console)
    facts = seen.facts(version)
    of = f"step {seen.step}" if seen.step is not None else "not in a checkpoint yet"
    say(f"trajectory {seen.trajectory_id} ({seen.source}; {of})", "bold")
    ended = f"; ended: {seen.stop_reason}" if seen.stop_reason else ""
    of = "" if seen.lineage is None else f", versions of lineage {seen.lineage}"
    say(f"reward {format_number(seen.reward)}, {facts['turns']} turns, age {_or_dash(facts['age'])}{of}{ended}")
    for sample in seen.samples:
        tokens = list(tokens_of(seen, sample, text))
        at = f", temperature {sample.temperature:g}" if sample.temperature is not None else ""
        say(f"sample {sample.sample_id}: {len(tokens)} tokens{at}")
        learner = any(token.learner_logprob is not None for token in tokens)
        learners = ["learner"] * learner
        heads = ["pos", "id", "text", "mask", "logprob", *learners, "ver", "turn", "reward", "experts"]
        lines = aligned([heads, *(_token_row(token, learner) for token in tokens)], left=(2, len(heads) - 1))
        say(lines[0], "bold")
        for token, line in zip(tokens, lines[1:], strict=True):
            say(line, "" if token.loss_mask else "dim")


def _token_row(token: SeenToken, learner: bool) -> list[str]:
    def logprob(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    return [
        str(token.position),
        str(token.token),
        fitted(token.text, 12),
        "1" if token.loss_mask else "0",
        logprob(token.logprob),
        *([logprob(token.learner_logprob)] * learner),
        _or_dash(token.version),
        _or_dash(token.turn),
        "-" if not token.reward else f"{token.reward:g}",
        short_routes(token.routes),
    ]


def short_routes(routes: list[list[int]] | None) -> str:
    """The experts of the first MoE layers, and how many layers more there are; `-` if none are recorded."""
    if routes is None:
        return "-"
    shown = [",".join(map(str, layer)) for layer in routes[:LAYERS_SHOWN]]
    more = len(routes) - len(shown)
    return " ".join([*shown, *([f"+{more}"] if more else [])])


def write_json(objects: Iterable[Any], console: Console) -> None:
    """One object a line."""
    for each in objects:
        console.file.write(printable(msgspec.json.encode(each).decode()) + "\n")
