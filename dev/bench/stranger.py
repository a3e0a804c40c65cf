"""The benchmark `bench stranger`: the path of somebody who has only the repository, from
`git clone` to a model that transformers loads.

Every command is one of a page's, typed in the order of the pages, in a fresh clone with caches of
its own; only pip's cache is that of the user. Words are those of the pages that teach a stage,
without code, comments and tables' marks.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dev.bench.jobs import BenchError, PrintLine, start_process
from dev.bench.report import Measurements

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 3600.0
"""Of one command: an installation without a cache downloads 4 GB."""
NOT_READ = re.compile(r"<!--.*?-->|^```.*?^```", re.MULTILINE | re.DOTALL)
OWN_ROWS = ("seq 0 99", "seq 0 199")
"""The page's rows, and as many as a stranger has."""


class PathStage(NamedTuple):
    """A part of the path.

    Attributes:
        commands: What is typed, each a line of `pages`; a folder's name and the number of rows
            are the stranger's.
        files: Files that are written by hand: their blocks on the pages begin with `# NAME`.
    """

    name: str
    pages: tuple[str, ...]
    commands: tuple[str, ...]
    files: tuple[str, ...] = ()


PATH = (
    PathStage(
        "install",
        ("README.md", "docs/install.md"),
        ("make install", "source .venv/bin/activate", "r3async doctor"),
    ),
    PathStage(
        "first run",
        ("docs/first-run.md",),
        ("r3async train quickstart name=first", "r3async report first"),
    ),
    PathStage(
        "own rows",
        ("docs/your-data.md",),
        (
            'for i in $(seq 0 99); do echo "{\\"prompt\\": \\"$((i/10))+$((i%10))=\\", '
            '\\"answer\\": \\"$((i/10+i%10))\\"}"; done > sums.jsonl',
            (
                "r3async train math data=sums.jsonl data.eval=20 reward=rewards:correct "
                "learner.lr=2e-4 name=sums --dry-run"
            ),
            (
                "r3async train math data=sums.jsonl data.eval=20 reward=rewards:correct "
                "learner.lr=2e-4 name=sums"
            ),
        ),
        files=("rewards.py",),
    ),
    PathStage("evaluate both", ("docs/evaluate.md",), ("r3async eval sums --baseline start",)),
    PathStage(
        "export and load",
        (),  # the last section of docs/your-data.md
        (
            "r3async export sums my-model",
            'python -c "import transformers; '
            "print(transformers.AutoModelForCausalLM.from_pretrained('my-model').config."
            'model_type)"',
        ),
    ),
)


def walk_path(print_line: PrintLine, path: tuple[PathStage, ...] = PATH) -> Measurements:
    """Walk the path in a fresh clone of what is committed. Raises `BenchError` for a
    command that fails."""
    check_commands(path)
    measured = Measurements()
    with tempfile.TemporaryDirectory(prefix="r3async-stranger-") as scratch:
        clone = Path(scratch, "r3async")
        screen = Path(scratch, "screen.txt")
        totals = dict.fromkeys(("minutes", "commands", "files", "words"), 0.0)
        for number, stage in enumerate(path):
            began = time.monotonic()
            if not number:
                type_command(
                    f"git clone --quiet {ROOT} r3async",
                    Path(scratch),
                    Path(scratch),
                    screen,
                    print_line,
                )
            for name in stage.files:
                (clone / name).write_text(find_file_block(name, stage.pages))
            for command in stage.commands:
                type_command(command.replace(*OWN_ROWS), clone, Path(scratch), screen, print_line)
            figures = {
                "minutes": (time.monotonic() - began) / 60,
                "commands": len(stage.commands) + (0 if number else 2),  # git clone, cd
                "files": len(stage.files),
                "words": count_words(stage.pages),
            }
            measured.add_figures(stage.name, figures)
            totals = {name: totals[name] + figures[name] for name in totals}
        measured.add_figures("all", totals)
        lines = screen.read_text(errors="replace").splitlines()
        # The line of `r3async eval --baseline`: `difference: +0.3000 (95 %: 0.0939 to
        # 0.5061), better on 6 …`
        difference = next(
            line.removeprefix("difference: ") for line in lines if line.startswith("difference: ")
        )
        measured.facts["trained less base"] = difference.partition(", ")[0]
        measured.facts["loaded"] = lines[-1]
    return measured


def type_command(
    command: str, folder: Path, scratch: Path, screen: Path, print_line: PrintLine
) -> None:
    """Run a command as a shell with the activated environment does. Raises `BenchError`."""
    print_line(command)
    activated = "source .venv/bin/activate && " if (folder / ".venv").is_dir() else ""
    pip_cache = subprocess.run(
        ["python3", "-m", "pip", "cache", "dir"], capture_output=True, text=True, timeout=60
    ).stdout.strip()
    mine = f"{Path(os.environ.get('VIRTUAL_ENV', ROOT / '.venv')) / 'bin'}"
    search = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != mine)
    before = screen.stat().st_size if screen.exists() else 0
    with start_process(
        [
            "env",
            "-u",
            "PYTHONPATH",
            "-u",
            "VIRTUAL_ENV",
            "-u",
            "R3ASYNC_RUNS",
            "bash",
            "-c",
            activated + command,
        ],
        screen,
        folder=folder,
        PATH=search,
        XDG_CACHE_HOME=str(scratch / "cache"),
        PIP_CACHE_DIR=pip_cache,
    ) as process:
        try:
            code = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"`{command}` took longer than {TIMEOUT_SECONDS:g} s") from error
    if code:
        raise BenchError(
            f"`{command}` failed with exit code {code}:\n{screen.read_text()[before:][-3000:]}"
        )


def check_commands(path: tuple[PathStage, ...]) -> None:
    """Check that each command is one of the pages that were read until then.
    Raises `BenchError`."""
    text = ""
    for stage in path:
        text += "".join((ROOT / page).read_text() for page in stage.pages)
        for command in stage.commands:
            if command.removesuffix(" --dry-run") not in text:
                raise BenchError(
                    f"no page that was read by {stage.name!r} has the command `{command}`"
                )


def find_file_block(name: str, pages: tuple[str, ...]) -> str:
    """Return the content of a file that a page has the reader write."""
    for page in pages:
        for block in re.findall(
            r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
        ):
            if block.startswith(f"# {name}"):
                return block
    raise BenchError(f"no page of {', '.join(pages)} has the file {name}")


def count_words(pages: tuple[str, ...]) -> int:
    return sum(1 for page in pages for _ in iter_words((ROOT / page).read_text()))


def iter_words(page: str) -> Iterator[str]:
    """Yield the words of a page that are read: not code blocks, comments or what
    only marks a table."""
    yield from (word for word in NOT_READ.sub("", page).split() if re.search(r"\w", word))
