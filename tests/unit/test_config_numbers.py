"""Every number of every section is finite and in range, whoever wrote the section: found by walking over all fields."""

import math
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from r3async.config import Config, ConfigError, Section, config_from_dict, load_config

SIGNED = {"algorithm.entropy_coef", "serving.unrewarded", "model.init.warm_reward", "evaluation.pass_reward"} | {
    f"schedule.difficulty.{name}" for name in ("easy", "hard", "target")
}
"""The only numbers that may be negative."""
ABSURD = [math.nan, math.inf, -math.inf, 10**20, -(10**20), -1, -1e-3]


def numeric(kind: Any) -> set[type]:
    """Which of int and float an annotation names, wherever."""
    if kind in (int, float):
        return {kind}
    parts = typing.get_args(kind)
    return set().union(*(numeric(part) for part in parts)) if parts and typing.get_origin(kind) is not dict else set()


def sections(section: Section, path: str = "") -> Iterator[tuple[str, Section]]:
    yield path, section
    for field in msgspec.structs.fields(section):
        inner = getattr(section, field.name)
        if isinstance(inner, Section):
            yield from sections(inner, f"{path}.{field.name}".lstrip("."))


def numbers() -> Iterator[tuple[str, Section, msgspec.structs.FieldInfo]]:
    for path, section in sections(Config()):
        for field in msgspec.structs.fields(section):
            if numeric(field.type):
                yield f"{path}.{field.name}".lstrip("."), section, field


NUMBERS = {path: (section, field) for path, section, field in numbers()}


def spoilt(section: Section, field: msgspec.structs.FieldInfo, value: Any) -> Any:
    """The field's value with one number of it replaced."""
    old = getattr(section, field.name)
    return [value, *old[1:]] if isinstance(old, tuple) else value


def test_the_walk_finds_the_numbers_that_there_are():
    assert len(NUMBERS) > 100
    assert {"steps", "learner.lr", "learner.betas", "algorithm.rollout_kl.max", "env.step_timeout"} <= set(NUMBERS)
    assert set(NUMBERS) >= SIGNED
    assert not {"observe.timeline", "env.args", "name", "routing.replay"} & set(NUMBERS)


@pytest.mark.parametrize("path", NUMBERS)
def test_a_number_that_is_not_finite_or_out_of_range_is_refused_with_its_name(path):
    section, field = NUMBERS[path]
    for value in ABSURD:
        if path in SIGNED and -(10**9) <= value <= 10**9:
            continue
        bad = spoilt(section, field, value)
        with pytest.raises(ValueError, match=rf"`{field.name}(\[0\])?` must be ."):
            type(section)(**msgspec.structs.asdict(section) | {field.name: bad})
        with pytest.raises(ValueError, match=rf"`{field.name}(\[0\])?` must be ."):
            msgspec.structs.replace(section, **{field.name: bad})
        data: Any = bad
        for key in reversed(path.split(".")):
            data = {key: data}
        with pytest.raises(ConfigError) as caught:
            config_from_dict(data)
        assert path.rpartition(".")[0] in str(caught.value)
        assert field.name in str(caught.value)


@pytest.mark.parametrize("path", sorted(SIGNED))
def test_a_reward_or_a_weight_that_may_be_a_penalty_may_be_negative(path):
    below = ["schedule.difficulty.hard=-1"] * path.endswith("easy")
    assert load_config("quickstart", [*below, f"{path}=-0.5"], None)


@pytest.mark.parametrize(
    "override",
    [
        "learner.betas=[0.9, nan]",
        "learner.betas=[0.9, 1.0]",
        "env.args={ letters = nan }",
        "env.args={ deep = { list = [1, inf] } }",
        "generator.engine_args={ token_seconds = nan }",
        "evaluation.env.args={ limit = nan }",
    ],
)
def test_the_command_line_refuses_it(override):
    with pytest.raises(ConfigError, match=r"finite number|at most"):
        load_config("quickstart", ["evaluation.env.name=reverse-text", override])


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5000, "a." * 5000 + "b = 1", "steps = " + "1" * 5000, "steps = 0x" + "f" * 6000, "name = '\xff'"],
    ids=["brackets", "dots", "digits", "hexadecimal", "latin-1"],
)
def test_a_file_that_python_cannot_read_or_print_is_no_toml(tmp_path, text):
    (tmp_path / "a.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"a\.toml is not valid TOML"):
        load_config(str(tmp_path / "a.toml"))


@pytest.mark.parametrize("value", ["[" * 5000, "{a=" * 5000, "1" * 5000, "0x" + "f" * 6000], ids=range(4))
def test_a_value_that_python_cannot_read_or_print_is_named_in_one_line(value):
    with pytest.raises(ConfigError, match=r"`steps` = .*whole number") as found:
        load_config("quickstart", [f"steps={value}"])
    assert len(str(found.value)) < 300


def test_a_number_that_python_cannot_print_is_named():
    with pytest.raises(ConfigError, match="at most 1,000,000,000, got a int that cannot be printed"):
        load_config("quickstart", {"steps": 10**5000})
