"""What is refused before a run starts anything: a reward that its first row shows to be none."""

import re
import time

import pytest

from r3async.config import ConfigError, load_config
from r3async.tools.preflight import try_environments

ROWS = '{"prompt": "2+2=", "answer": "4"}\n{"prompt": "3+3=", "answer": "6"}\n'


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """`tried(body, rows)`: what becomes of a reward with that body, in seconds."""
    monkeypatch.chdir(tmp_path)

    async def attempt(body, form="def", rows=ROWS):
        (tmp_path / "rows.jsonl").write_text(rows)
        file = tmp_path / f"mine{time.monotonic_ns()}.py"
        file.write_text(f"import asyncio, os, sys\n{form} score(completion, answer=None):\n    {body}\n")
        given = [f"data={tmp_path / 'rows.jsonl'}", f"reward={file}:score", "env.workers=1"]
        before = time.monotonic()
        await try_environments(load_config("math", given))
        return time.monotonic() - before

    return attempt


@pytest.mark.parametrize("form", ["def", "async def"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "no reward applies: all returned None"),
        ("return '1.0'", "must return a finite number or None, not '1.0'"),
        ("return {'score': 1.0}", "must return a finite number or None, not {'score': 1.0}"),
        ("return [1.0]", r"must return a finite number or None, not \[1.0\]"),
        ("return float('nan')", "must return a finite number or None, not nan"),
        ("sys.exit(0)", r"called sys\.exit\(0\) \(mine\d+\.py:3 in score\)"),
        ("return 1.0 if answer.strp() == completion else 0.0", r"AttributeError: .*strp.* \(mine\d+\.py:3 in score\)"),
    ],
)
async def test_what_is_no_reward_is_refused_by_the_first_row_and_its_own_answer(tried, form, body, message):
    with pytest.raises(ConfigError, match=f"^`reward` .*{message}"):
        await tried(body, form)


async def test_a_reward_is_called_with_the_answer_of_the_row(tried):
    told = r"`reward` fails with a row's own answer, '(\d)': AssertionError: \1 for \1 "
    with pytest.raises(ConfigError, match=told):
        await tried("assert False, f'{completion} for {answer}'", "async def")


@pytest.mark.parametrize(
    "body",
    [
        "return float(completion == answer)",
        "raise ConnectionError('the judge is away')",
        "raise RuntimeError('no answer') from TimeoutError()",
    ],
)
async def test_a_reward_and_one_whose_judge_is_away_are_let_in(tried, body):
    await tried(body)


async def test_without_an_answer_of_the_row_only_what_it_returns_is_judged(tried):
    rows = ROWS.replace("answer", "level")
    await tried("return float(completion[0] == 'x')", "async def", rows)  # the empty answer may be none to it
    with pytest.raises(ConfigError, match=r"not '1\.0'"):
        await tried("return '1.0'", "async def", rows)


async def test_a_reward_of_nothing_for_the_answer_of_the_row_is_noted(tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "mine.py").write_text(
        "def equal(completion, answer): return float(completion == int(answer))\n"
        "def right(completion, answer): return float(completion == answer)\n"
    )
    of_row, other = (
        load_config("math", [f"data={tmp_path / 'rows.jsonl'}", f"reward={tmp_path / 'mine.py'}:{name}"])
        for name in ("equal", "right")
    )
    (note,) = await try_environments(of_row)
    assert re.fullmatch("`reward` gives a row's own answer, '[46]', 0", note)
    assert await try_environments(other) == []


class Leaves:
    """An environment of plain functions that ends its process in an orderly way."""

    async def reset(self, task_seed):
        return "go"

    async def step(self, action):
        raise SystemExit("no licence")


async def test_an_environment_that_exits_is_refused_and_does_not_end_the_command():
    with pytest.raises(
        ConfigError, match=r"failed in its first episode: SystemExit: no licence \(test_preflight\.py:\d+ in step\)"
    ):
        await try_environments(load_config("quickstart", ["env.name=tests.tools.test_preflight:Leaves", "env.args={}"]))


def test_a_module_that_exits_when_it_is_loaded_is_refused_by_name(tmp_path):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "rows.jsonl").write_text(ROWS)
    from r3async.rollout.evaluation import check_environment

    with pytest.raises(ConfigError, match=r"exits\.py:score' cannot be loaded: SystemExit: 0"):
        check_environment(
            load_config("math", [f"data={tmp_path / 'rows.jsonl'}", f"reward={tmp_path / 'exits.py'}:score"])
        )
