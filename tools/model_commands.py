"""Commands about models, without a run: `r3async export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from r3async.tools.terminal import Terminal


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="a run's name or directory, or a checkpoint's")
    ],
    directory: Annotated[Path, typer.Argument(help="directory to make")],
    model: Annotated[Path | None, typer.Option(help="where the start model is now, if it was moved")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="only the adapters of a run with learner.lora, in PEFT's format")
    ] = False,
) -> None:
    """Write a checkpoint's model as a Hugging Face directory: safetensors, configuration, tokenizer."""
    from r3async.checkpoint import CheckpointError
    from r3async.tools import export as exports

    named = Path("runs") / source
    path = Path(source) if Path(source).exists() or not named.exists() else named
    try:
        write = exports.export_adapter if adapter else exports.export
        opened = write(path, directory, model=model)
    except CheckpointError as error:
        _refuse(str(error))
    typer.echo(
        f"{directory}: the {'adapters' if adapter else 'model'} after step {opened.state.steps}, from {opened.path}"
    )


def _refuse(message: str) -> NoReturn:
    Terminal(stderr=True).print(message, style="bold red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2)
