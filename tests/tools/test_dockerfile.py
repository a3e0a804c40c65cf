"""The Dockerfile names what there is: a pinned base, extras, targets, folders, and the command."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs/examples/cluster/Dockerfile"
TEXT = PATH.read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = [
    tuple(line.split(maxsplit=1))
    for line in TEXT.replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]
KNOWN = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT"}


def arguments(name: str) -> list[str]:
    return [text for word, text in INSTRUCTIONS if word == name]


def test_it_has_only_instructions_that_docker_knows_and_begins_with_a_base() -> None:
    assert {word for word, _ in INSTRUCTIONS} <= KNOWN
    assert INSTRUCTIONS[0][0] == "FROM"


def test_the_base_is_pinned_to_a_release_of_python_that_is_taken() -> None:
    (base,) = arguments("FROM")
    version = re.fullmatch(r"python:(\d+\.\d+\.\d+)-slim-[a-z]+", base)
    assert version, "a release and a distribution: other bases move"
    assert version[1] in SpecifierSet(PROJECT["requires-python"])


def test_extras_and_targets_are_those_of_the_project() -> None:
    extras = {*re.findall(r"EXTRA=(\w+)", TEXT)}
    assert extras == {"cpu", "gpu"}
    assert extras <= set(PROJECT["optional-dependencies"])
    (target,) = {word for run in arguments("RUN") for word in re.findall(r"make (\w+)", run) if word != "g"}
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_packages_of_the_system_leave_no_lists_behind() -> None:
    (install,) = (run for run in arguments("RUN") if "apt-get" in run)
    assert "--no-install-recommends" in install
    assert install.endswith("rm -rf /var/lib/apt/lists/*")


def test_the_command_is_in_the_environment_that_the_target_makes() -> None:
    (folder,) = arguments("WORKDIR")
    assert f"PATH={folder}/.venv/bin:$PATH" in arguments("ENV")
    assert arguments("ENTRYPOINT") == ['["r3async"]']
    assert "r3async" in PROJECT["scripts"]


def test_everything_is_copied_but_what_is_of_this_folder() -> None:
    assert arguments("COPY") == [". ."]
    left_out = set((ROOT / ".dockerignore").read_text().split("\n"))
    assert {".git", ".venv", "runs"} <= left_out
    for name in ("pyproject.toml", "Makefile", "README.md", "r3async", "actors", "tools", "configs"):
        assert (ROOT / name).exists()
        assert name not in left_out


@pytest.mark.parametrize("line", [line[2:] for line in TEXT.splitlines() if line.startswith("# docker ")])
def test_commands_of_its_head_name_this_file_and_a_preset(line: str) -> None:
    words = shlex.split(line)
    if words[1] == "build":
        assert ROOT / words[words.index("-f") + 1] == PATH
    else:
        assert (ROOT / "configs" / f"{words[words.index('train') + 1]}.toml").is_file()
