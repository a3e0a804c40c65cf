"""Every shell block of README.md and docs/*.md is executed, or says why it cannot be.

A comment before a block says how. None: it is run. `<!-- test: dry-run -->`: each line is a `r3async train`, and its
plan is made. `<!-- test: skip: REASON -->`: it is not run. A Python block is executed to its end: as it
is (`<!-- test: run -->`), as the module that `<!-- test: file NAME -->` puts where the page's later blocks find it (a TOML block,
too), or as a program that trains, `<!-- test: train -->`, by tests/ray/test_docs_programs.py.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from r3async.tools.cli import app
from tests.helpers.cli import run_program

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- test: ([^>]+?) -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = ("r3async", ".venv/bin/", "make", "ray", "python ", "pip", "ruff", "mypy")
BLOCK_SECONDS = 240


class Block(NamedTuple):
    how: str
    language: str
    text: str

    @property
    def commands(self):
        """Lines to type, continued ones put together, without comments."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page):
    return [Block(how.strip(), language, text) for how, language, text in BLOCK.findall(page.read_text())]


def test_the_rule_finds_blocks_and_how_they_are_tested():
    everything = [block for page in PAGES for block in blocks(page)]
    shell = [b for b in everything if b.language == "sh"]
    assert len(shell) >= 12
    assert any(not b.how for b in shell)
    assert any(b.how == "dry-run" for b in shell)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_block_says_a_way_that_there_is(page):
    for block in blocks(page):
        if block.language == "sh":
            assert block.how in ("", "dry-run") or re.match(r"skip: \w.{9,}", block.how), (page.name, block)
        elif block.language == "python":
            assert block.how in ("run", "train") or re.match(r"file \w+\.py$", block.how), (page.name, block)
        else:
            file = block.language == "toml" and re.match(r"file \w+\.toml$", block.how)
            assert not block.how or file, (page.name, block)
        if not block.language:
            first = block.text.strip().splitlines()[0] if block.text.strip() else ""
            assert not first.startswith(COMMANDS), f"{page.name}: a block of commands is not marked as sh: {first}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_blocks_do_what_they_say(page, tmp_path, monkeypatch):
    """In a copy of the sources, so that nothing is written into the real ones."""
    mine = blocks(page)
    if not any(b.language in ("sh", "python") for b in mine):
        return
    if any(b.language == "sh" and not b.how for b in mine):
        copy_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in mine:
        if block.language == "python":
            play(block, tmp_path)
        elif block.language == "toml" and block.how:
            (tmp_path / block.how.removeprefix("file ")).write_text(block.text)
        elif block.language == "sh" and block.how == "dry-run":
            for line in block.commands:
                dry_run(line)
        elif block.language == "sh" and not block.how:
            execute(block, tmp_path)


def copy_sources(target):
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("r3async", "actors", "tools", "configs", "docs", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target / name)


def play(block, folder):
    if block.how == "train":
        return
    if block.how.startswith("file "):
        name = block.how.removeprefix("file ")
        (folder / name).write_text(block.text)
        sys.modules.pop(name.removesuffix(".py"), None)
    exec(compile(block.text, "<page>", "exec"), {"__name__": "page"})


def dry_run(line):
    words = shlex.split(line.replace(".venv/bin/", ""))
    assert words[:2] == ["r3async", "train"], f"only training is dry-run: {line}"
    done = CliRunner().invoke(app, [*words[1:], "--dry-run"])
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception}"
    assert "a trained token is at most" in done.output


def execute(block, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "\n".join(["set -e", *(line.replace(".venv/bin/", "") for line in block.commands)])
    done = run_program(["bash", "-c", script], cwd=folder, timeout=BLOCK_SECONDS, PATH=path, PYTHONPATH=str(folder))
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
