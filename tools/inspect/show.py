"""Show trajectories on a terminal: one per line, or one token per line."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console

from r3async.views.number_formats import format_number
from r3async.world.process_output import escape_control_characters

from .run import fit_to_cells
from .trajectories import InspectedToken, InspectedTrajectory, iter_tokens

LIST_HEADERS = (
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
MAX_LAYERS_SHOWN = 3


def make_printer(console: Console) -> Callable[..., None]:
    """Return a function `say(line, style)` that prints without markup and wrapping, because
    lines come from runs."""
    return lambda line, style="": console.print(
        line, style=style, soft_wrap=True, highlight=False, markup=False
    )


def align_columns(rows: Sequence[Sequence[str]], left_columns: Container[int]) -> list[str]:
    """Align rows in columns as wide as their widest cell on a terminal; `left_columns`
    are left-aligned."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        return " ".join(
            c + gap if i in left_columns else gap + c
            for i, (c, gap) in enumerate(zip(row, gaps, strict=True))
        )

    return [line(row).rstrip() for row in rows]


def print_trajectories(
    trajectory_facts: Sequence[dict[str, Any]], hidden: int, console: Console
) -> None:
    """Print a list of trajectories.

    Args:
        trajectory_facts: Facts from `InspectedTrajectory.to_facts`.
        hidden: Number of trajectories that are not shown.
    """
    say = make_printer(console)
    for number, line in enumerate(
        align_columns(
            [LIST_HEADERS, *map(_format_list_row, trajectory_facts)], left_columns=(0, 1, 10)
        )
    ):
        say(line, "" if number else "bold")
    if hidden:
        say(f"and {hidden} more; --limit 0 shows all")


def _format_list_row(facts: dict[str, Any]) -> tuple[str, ...]:
    low = facts["version_min"]
    high = facts["version_max"]
    versions = "-" if low is None else str(low) if low == high else f"{low}-{high}"
    return (
        fit_to_cells(facts["trajectory_id"] or "-", 40).strip(),
        facts["source"],
        _format_or_dash(facts["step"]),
        format_number(facts["reward"]),
        str(facts["turns"]),
        str(facts["tokens"] or "-"),
        str(facts["sampled"] or "-"),
        _format_or_dash(facts["lineage"]),
        versions,
        _format_or_dash(facts["age"]),
        fit_to_cells(facts["stop_reason"] or "", 20).strip(),
    )


def _format_or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def print_tokens(
    trajectory: InspectedTrajectory,
    version: int | None,
    decode_token: Callable[[int], str],
    console: Console,
) -> None:
    """Print every token of every sample."""
    say = make_printer(console)
    facts = trajectory.to_facts(version)
    of = f"step {trajectory.step}" if trajectory.step is not None else "not in a checkpoint yet"
    say(f"trajectory {trajectory.trajectory_id} ({trajectory.source}; {of})", "bold")
    ended = f"; ended: {trajectory.stop_reason}" if trajectory.stop_reason else ""
    of = "" if trajectory.lineage is None else f", versions of lineage {trajectory.lineage}"
    say(
        f"reward {format_number(trajectory.reward)}, {facts['turns']} turns, age "
        f"{_format_or_dash(facts['age'])}{of}{ended}"
    )
    for sample in trajectory.samples:
        tokens = list(iter_tokens(trajectory, sample, decode_token))
        at = f", temperature {sample.temperature:g}" if sample.temperature is not None else ""
        say(f"sample {sample.sample_id}: {len(tokens)} tokens{at}")
        learner = any(token.learner_logprob is not None for token in tokens)
        learners = ["learner"] if learner else []
        heads = [
            "pos",
            "id",
            "text",
            "mask",
            "logprob",
            *learners,
            "ver",
            "turn",
            "reward",
            "experts",
        ]
        lines = align_columns(
            [heads, *(_format_token_row(token, learner) for token in tokens)],
            left_columns=(2, len(heads) - 1),
        )
        say(lines[0], "bold")
        for token, line in zip(tokens, lines[1:], strict=True):
            say(line, "" if token.loss_mask else "dim")


def _format_token_row(token: InspectedToken, learner: bool) -> list[str]:
    def logprob(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    return [
        str(token.position),
        str(token.token),
        fit_to_cells(token.text, 12),
        "1" if token.loss_mask else "0",
        logprob(token.logprob),
        *([logprob(token.learner_logprob)] if learner else []),
        _format_or_dash(token.version),
        _format_or_dash(token.turn),
        "-" if not token.reward else f"{token.reward:g}",
        format_short_routes(token.routes),
    ]


def format_short_routes(routes: list[list[int]] | None) -> str:
    """Format the experts of the first MoE layers and the number of further layers; `-` if
    none are recorded."""
    if routes is None:
        return "-"
    shown = [",".join(map(str, layer)) for layer in routes[:MAX_LAYERS_SHOWN]]
    more = len(routes) - len(shown)
    return " ".join([*shown, *([f"+{more}"] if more else [])])


def write_json_lines(objects: Iterable[Any], console: Console) -> None:
    """Write one JSON object per line."""
    for each in objects:
        console.file.write(escape_control_characters(msgspec.json.encode(each).decode()) + "\n")
