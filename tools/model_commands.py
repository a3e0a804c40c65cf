"""Commands about models, without engines: `r3async export` and `r3async sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from r3async.config import load_command
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


def sft(
    preset: Annotated[str, typer.Argument(help="a preset's name, or a TOML file")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value: data=FILE and model.path=DIRECTORY, sft.epochs=3, learner.lr=1e-5", show_default=False
        ),
    ] = None,
    runs: Annotated[Path, typer.Option(help="where run directories are made", envvar="R3ASYNC_RUNS")] = Path("runs"),
) -> None:
    """Supervised training of the answers in your rows: messages, or prompts and answers. The model is in runs/NAME/model."""
    config = load_command(preset, overrides or [])
    from r3async.learner import LearnerError
    from r3async.tools.sft import sft as run
    from r3async.world.processes import files_survive_full_disk

    files_survive_full_disk()
    try:
        run(config, preset, root=runs)
    except LearnerError as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    Terminal(stderr=True).print(message, style="bold red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2)
