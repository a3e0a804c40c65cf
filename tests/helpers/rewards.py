"""Rows of one's own in files, and the rewards of answers to them."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from r3async.config import EnvConfig, EvaluationConfig
from r3async.envs import Action, EnvironmentFactory
from r3async.envs.factory import build_environment_factory
from r3async.rollout.evaluation import BaselinePolicy, evaluate_without_model


async def mean_reward(factory: EnvironmentFactory, policy: BaselinePolicy, episodes: int) -> float:
    """Return the mean reward of an episode under the environment's oracle or its random policy."""
    env = EnvConfig(name="tested")
    made = await evaluate_without_model(env, factory, policy, EvaluationConfig(tasks=episodes), max_turns=64)
    return made.reward_mean


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format that the suffix of `path` names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@contextmanager
def rewarded_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes an environment of one row in `folder`, where functions that reward it are found too.

    Their processes end after the block, when nobody has such an environment any more.
    """
    monkeypatch.setenv("R3ASYNC_USER_PATH", str(folder))
    made = []

    def make(row: dict[str, Any], reward: Any, *, suffix: str = ".jsonl", args: Any = None, **settings: Any) -> Any:
        path = write_rows(folder / f"rows{suffix}", [row])
        args = {"path": path.name, "reward": reward, **(args or {})}
        made.append(build_environment_factory(EnvConfig(name="dataset", args=args, workers=1, **settings)))
        return made[-1]()

    yield make
    made.clear()


async def play_answer(env: Any, text: str, token_ids: Any = ()) -> tuple[float, dict[str, float]]:
    """Return the reward of an answer to the first task, and its metrics."""
    await env.reset(0)
    result = await env.step(Action(text, token_ids=list(token_ids) if env.takes_tokens else []))
    return result.reward, result.metrics
