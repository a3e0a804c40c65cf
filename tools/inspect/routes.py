"""Show a trajectory's routes beside the learner's, token by token, and verify that training
used the engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from r3async.record.reading import read_run_config
from r3async.record.route_verification import verify_routes
from r3async.record.routes import RouteEntry, RouteIndex
from r3async.views.episodes import RunTokenizer, TracedSample, label_token_roles
from r3async.views.number_formats import format_percent

from .run import InspectError, fit_to_cells, suggest_nearest
from .show import make_printer, write_json_lines

TOKEN_TEXT_CELLS = 12


class LayerRoutes(msgspec.Struct, frozen=True):
    """The routes of one token in MoE layer `layer`.

    Attributes:
        engine: The engine's experts; None where the engine recorded nothing.
        own: The experts that the learner's router would have chosen.
        agree: True if both are the same; None where the engine recorded nothing.
    """

    layer: int
    engine: list[int] | None
    own: list[int]
    used: list[int]
    agree: bool | None


class TokenRoutes(msgspec.Struct, frozen=True):
    """One token of a sample.

    Attributes:
        role: prompt, sampled, observation, or injected (an end that was not sampled).
    """

    step: int
    sample: str
    position: int
    token: int
    text: str
    role: str
    version: int | None
    layers: list[LayerRoutes]

    @property
    def disagrees(self) -> bool:
        return any(routes.agree is False for routes in self.layers)


def describe_route_traces(run_dir: Path) -> list[str]:
    """Describe the routes that a run kept for its overview, with the commands to show them."""
    index = RouteIndex(run_dir)
    if not index.trained_entries:
        return [f"routes: none kept ({_explain_missing(run_dir)})"]
    steps = [entry.facts["step"] for entry in index.trained_entries]
    shown = choose_entries(index, None, None)[0].facts
    count = len({entry.facts["trajectory_id"] for entry in index.trained_entries})
    return [
        f"routes: {count} trajector{'y' if count == 1 else 'ies'} of {_format_steps(steps)}",
        (
            f"  inspect routes                            token by token: {shown['trajectory_id']} "
            f"of step {shown['step']}"
        ),
        (
            "  inspect routes --step N --trajectory ID   another one; --layer L, --diff: less of "
            "it; --json: for programs"
        ),
        (
            "  inspect verify                            compare all that was kept with the "
            "engine's own record"
        ),
        *index.problems,
    ]


def _format_steps(steps: Sequence[int]) -> str:
    low = min(steps)
    high = max(steps)
    count = len(set(steps))
    return f"step {low}" if count == 1 else f"{count} steps ({low} to {high})"


def _explain_missing(run_dir: Path) -> str:
    trace = read_run_config(run_dir).get("routing", {}).get("trace", "off")
    if trace == "off":
        return '`routing.trace` was "off"; train with routing.trace="sample" or "all"'
    return f'`routing.trace` was "{trace}", but no step of an MoE model was traced'


def _open_index(run_dir: Path) -> RouteIndex:
    """Open the routes of a run. Raises `InspectError` if there are none."""
    index = RouteIndex(run_dir)
    if not index.trained_entries:
        raise InspectError(f"{run_dir} has no routes: {_explain_missing(run_dir)}")
    return index


def choose_entries(index: RouteIndex, trajectory: str | None, step: int | None) -> list[RouteEntry]:
    """Return all samples of one trajectory: the named one, or the first of `step` or of the
    last traced step."""
    entries = index.trained_entries
    if step is not None:
        entries = [e for e in entries if e.facts["step"] == step]
        steps = sorted({e.facts["step"] for e in index.trained_entries})
        if not entries:
            close = min(steps, key=lambda s: abs(s - step))
            raise InspectError(
                f"no routes of step {step} were kept; the nearest step that has some is {close}"
            )
    if trajectory is None:
        step = step or entries[-1].facts["step"]
        trajectory = next(e.facts["trajectory_id"] for e in entries if e.facts["step"] == step)
    chosen = [e for e in entries if trajectory in (e.facts["trajectory_id"], e.facts["sample_id"])]
    if not chosen:
        known = list(dict.fromkeys(e.facts["trajectory_id"] for e in entries))
        of = f" of step {step}" if step is not None else ""
        raise InspectError(
            f"no routes of trajectory {trajectory!r}{of} were kept; "
            f"{suggest_nearest(trajectory, known)}"
        )
    return chosen


def make_token_routes(
    sample: TracedSample, tokenizer: RunTokenizer, layers: Sequence[int]
) -> list[TokenRoutes]:
    """Return every token of the sample with its routes in these layers."""
    trained = sample.trained_routes
    of = label_token_roles(trained.token_ids, trained.loss_mask, tokenizer.end_id)
    return [
        TokenRoutes(
            step=trained.step,
            sample=trained.sample_id,
            position=at,
            token=int(token),
            text=tokenizer.decode_token(int(token)),
            role=of[at],
            version=int(trained.policy_version[at]) if trained.policy_version[at] >= 0 else None,
            layers=[
                LayerRoutes(
                    layer=layer,
                    engine=sample.engine_experts[at, layer].tolist()
                    if sample.recorded[at]
                    else None,
                    own=trained.own[at, layer].tolist(),
                    used=trained.used[at, layer].tolist(),
                    agree=bool(sample.agrees[at, layer]) if sample.recorded[at] else None,
                )
                for layer in layers
            ],
        )
        for at, token in enumerate(trained.token_ids)
    ]


def print_routes(
    run_dir: Path,
    tokenizer: RunTokenizer,
    console: Console,
    *,
    trajectory: str | None = None,
    step: int | None = None,
    layers: Sequence[int] = (),
    diff: bool = False,
    json: bool = False,
) -> None:
    """Print a trajectory's samples token by token.

    Args:
        layers: Show only these layers.
        diff: Show only tokens whose routes disagree in them.
    """
    index = _open_index(run_dir)
    for entry in choose_entries(index, trajectory, step):
        sample = TracedSample(index, entry)
        count = sample.agrees.shape[1]
        for layer in layers:
            if not 0 <= layer < count:
                raise InspectError(f"there is no MoE layer {layer}: there are 0 to {count - 1}")
        rows = make_token_routes(sample, tokenizer, layers or range(count))
        shown = [row for row in rows if row.disagrees] if diff else rows
        if json:
            write_json_lines(shown, console)
        else:
            _print_sample(sample, shown, len(layers) > 0, console)


def _print_sample(
    sample: TracedSample, rows: Sequence[TokenRoutes], has_layers: bool, console: Console
) -> None:
    say = make_printer(console)
    _print_header(sample, console, say)
    if not rows:
        say("no token to show: the learner would have chosen the engine's experts everywhere")
        return
    cells = [[_format_experts(routes) for routes in row.layers] for row in rows]
    heads = [f"layer {routes.layer}" for routes in rows[0].layers]
    widths = [max(len(head), *(len(line[i]) for line in cells)) for i, head in enumerate(heads)]
    wide = len(_format_token(rows[0])) + sum(widths) + 2 * len(widths) > console.width
    if wide and not has_layers:
        heads = ["layers that agree; those that do not"]
        widths = [0]
        cells = [[_format_agreement(row)] for row in rows]
        say("too many layers for this width; --layer L shows the experts of one")
    else:
        say(
            "experts of the engine; 3>5: of these the learner's router would replace 3 by 5; [3]: "
            "its own, none recorded"
        )
    titles = "  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True))
    say(
        f"{'pos':>5} {'token':<{TOKEN_TEXT_CELLS}} {'role':<11} {'ver':>4}  {titles}".rstrip(),
        "bold",
    )
    for row, line in zip(rows, cells, strict=True):
        text = Text(_format_token(row))
        for cell, width, routes in zip(line, widths, row.layers, strict=False):
            differs = routes.agree is False or (wide and not has_layers and row.disagrees)
            text.append(
                f"  {cell.ljust(width)}",
                "bold red" if differs else "dim" if routes.engine is None else "",
            )
        text.rstrip()
        say(text)


def _print_header(sample: TracedSample, console: Console, print_line: Callable[..., None]) -> None:
    trained = sample.trained_routes
    recorded = sample.recorded
    tokens, layers, top_k = trained.used.shape
    print_line(f"sample {trained.sample_id} of step {trained.step}", "bold")
    print_line(
        f"{tokens} tokens, {int(trained.loss_mask.sum())} sampled; {layers} MoE layers, "
        f"{top_k} experts a token"
    )
    if not sample.has_engine_record:
        print_line(
            (
                "the engine's record of these tokens is not among the files: only the learner's "
                "routes can be shown"
            ),
            "yellow",
        )
        return
    agree = sample.agrees[recorded]
    everywhere = format_percent(float(agree.mean())) if agree.size else "-"
    share = format_percent(float(recorded.mean()))
    print_line(
        f"recorded {int(recorded.sum())} of {tokens} positions ({share}); agreement {everywhere}"
    )
    if agree.size and layers > 1:
        by_layer = "  ".join(
            f"{layer}: {100 * value:.0f}" for layer, value in enumerate(agree.mean(axis=0))
        )
        console.print(Text(f"by layer, %:  {by_layer}"), highlight=False)


def _format_token(row: TokenRoutes) -> str:
    version = "-" if row.version is None else str(row.version)
    return (
        f"{row.position:>5} {fit_to_cells(row.text, TOKEN_TEXT_CELLS)} {row.role:<11} {version:>4}"
    )


def _format_experts(routes: LayerRoutes) -> str:
    if routes.engine is None:
        return f"[{' '.join(map(str, sorted(routes.own)))}]"
    text = " ".join(map(str, sorted(routes.engine)))
    if routes.agree:
        return text
    left = sorted(set(routes.engine) - set(routes.own))
    joined = sorted(set(routes.own) - set(routes.engine))
    return f"{text}  {','.join(map(str, left))}>{','.join(map(str, joined))}"


def _format_agreement(row: TokenRoutes) -> str:
    if row.layers[0].engine is None:
        return "not recorded"
    differing = [str(routes.layer) for routes in row.layers if not routes.agree]
    more = f" and {len(differing) - 6} more" if len(differing) > 6 else ""
    which = f"; not {', '.join(differing[:6])}{more}" if differing else ""
    return f"{len(row.layers) - len(differing)} of {len(row.layers)}{which}"


def print_verification(run_dir: Path, console: Console, *, json: bool = False) -> bool:
    """Compare everything that was kept with the engine's record, and report. Returns True if
    all of it is equal."""
    index = _open_index(run_dir)
    replay = read_run_config(run_dir).get("routing", {}).get("replay")
    if replay in ("learner", "off"):
        raise InspectError(
            f'{run_dir} was trained with routing.replay="{replay}": the routes used are the '
            "learner's own, and not meant to be the engine's; `inspect routes` compares the two"
        )
    result = verify_routes(index)
    if json:
        facts = {
            **msgspec.to_builtins(result),
            "verified": result.is_verified,
            "problems": index.problems,
        }
        write_json_lines([facts], console)
        return result.is_verified

    say = make_printer(console)
    for problem in index.problems:
        say(problem, "yellow")
    steps = _format_steps([entry.facts["step"] for entry in index.trained_entries])
    say(f"{result.samples} samples of {steps}; a row is one position in one MoE layer")
    say(f"equal       {result.equal:>12,}  rows that training used as the engine had chosen them")
    say(f"different   {result.different:>12,}", "bold red" if result.different else "")
    say(
        f"unrecorded  {result.unrecorded:>12,}  rows that the engine did not return; there the "
        "router chose by itself"
    )
    if result.first is not None:
        say(f"first difference: {result.first.to_text()}", "bold red")
    if result.unmatched:
        count = len(result.unmatched)
        first = result.unmatched[0]
        say(
            (
                f"{count} samples are not in the engine's record as they were trained; the "
                f"first is {first}"
            ),
            "bold red",
        )
    if result.is_verified:
        say("every recorded route was used in training as the engine chose it", "green")
    elif not result.different and not result.unmatched:
        say("nothing could be compared", "bold red")
    return result.is_verified
