"""Default subcommands, and explanations of command lines that no command understands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from r3async.config import Config, config_to_dict, flatten_section
from r3async.config.others import find_equivalent_setting

HELP_OPTIONS = ("-h", "--help")
REMOVED_COMMANDS = {
    "sweep": (
        "train with each seed (`for s in 0 1 2; do r3async train PRESET seed=$s name=run-$s; "
        "done`), and compare the runs (`r3async report run-0 run-1 run-2`)"
    ),
    "plan": "it is `r3async train PRESET --dry-run` now",
    "presets": "it is `r3async train --list` now; `r3async train PRESET --dry-run` shows one",
    "cluster": "it is `r3async submit PRESET --dry-run` now",
    "keys": "it is `python -m r3async.tools keys` now",
    "init-model": "it is `python -m r3async.tools init-model` now",
    "replay": "it is `python -m r3async.tools replay` now",
}
"""Commands that are gone, with what serves in their place."""
_SPEED_ADVICE = (
    "the plan has the speed of both sides in its lines `training` and `generation`, and a run "
    "measures it (pace/ratio)"
)
REMOVED_OPTIONS = {
    "--capacity": _SPEED_ADVICE,
    "--calibrate": _SPEED_ADVICE,
    "--published": _SPEED_ADVICE,
    "--plain": "`tail` prints plain lines everywhere; charts are in `report --serve`",
    "--pack": "pip brings r3async to a machine without an index (docs/gpu.md)",
}
"""Options that are gone, with what serves in their place."""
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Usage error of the click that typer uses, which is another package from one version of
typer to the next."""


class DefaultCommandGroup(TyperGroup):
    """A group whose first subcommand is the default: `submit PRESET` beside `submit status JOB`.

    Its help is that of the first subcommand, and then of all.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in HELP_OPTIONS:
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        first = next(iter(self.commands.values()))
        with type(ctx)(first, info_name=ctx.info_name, parent=ctx.parent) as inner:
            first.format_help(inner, formatter)
        super().format_help(ctx, formatter)


def explain_usage_error(error: Any, arguments: Sequence[str]) -> str:
    """Explain a `UsageError` of the command line `arguments` in one line: what is wrong, and
    where the help is.

    Returns "" if typer has printed the help itself.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    option = getattr(error, "option_name", "")
    hint = ""
    if (
        error.ctx is not None
        and error.ctx.parent is None
        and arguments[1:2]
        and arguments[1] in REMOVED_COMMANDS
    ):
        hint = f": {REMOVED_COMMANDS[arguments[1]]}"
    elif option in REMOVED_OPTIONS:
        hint = f": {REMOVED_OPTIONS[option]}"
    elif option.startswith("--"):
        hint = _suggest_setting(option, arguments)
    said = error.message if hint else error.format_message()
    message = " ".join(said.split()).rstrip(".")
    path = error.ctx.command_path if error.ctx is not None else "r3async"
    return (
        f"{path.removesuffix(' run').removesuffix(' show')}: {message}{hint}; for help: {path} -h"
    )


def _suggest_setting(option: str, arguments: Sequence[str]) -> str:
    """Suggest a setting for an option: `--steps 10` is `steps=10` here. Returns "" if no
    setting is similar."""
    name = option.lstrip("-").replace("-", "_")
    keys = flatten_section(config_to_dict(Config()))
    if name in keys:
        value = next(
            (
                _find_option_value(arguments[i:])
                for i, word in enumerate(arguments)
                if word.split("=")[0] == option
            ),
            "…",
        )
        return f". Settings have no dashes: {name}={value}"
    instead = find_equivalent_setting(name)
    if not instead:
        found = [key for key in keys if key.endswith(f".{name}")]
        if len(found) == 1:
            instead = f"it is `{found[0]}` here"
    return f". Settings have no dashes, and {instead}" if instead else ""


def _find_option_value(arguments: Sequence[str]) -> str:
    """Return the value of the option with which the words begin."""
    _, equals, value = arguments[0].partition("=")
    return value if equals else next(iter(arguments[1:]), "…")
