"""The episodes of a served report: found, opened, and beside the others of their group."""

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from r3async.record.routes import RouteFile
from r3async.views.episode_search import EpisodeIndex, EpisodeQuery, make_environment_lookup
from r3async.views.episodes import StepVersions
from tests.helpers.routes import damage_last_record, episode
from tests.tools.test_report_served import EVIL, append, said


def found(episodes: EpisodeIndex, **words: str) -> list[str]:
    text = episodes.render_list(EpisodeQuery.from_params(words), StepVersions())
    return [part.split("'")[0] for part in text.split("<tr data-key='")[1:]]


def test_episodes_are_searched_and_filtered(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    label = {1: "text", 2: "maths", 3: "text", 4: "text"}.get
    path.write_text(said(1, user="Hello", reward=0.1) + said(2, reward=0.9) + said(3, reward=0.5))
    episodes = EpisodeIndex(tmp_path)
    assert episodes.read_new(label)
    assert not episodes.read_new(label)
    first, second, third = (f"{step}.g{step:08d}e0000" for step in (1, 2, 3))
    assert found(episodes) == [third, second, first]
    assert found(episodes, order="best") == [second, third, first]
    assert found(episodes, order="worst") == [first, third, second]
    assert found(episodes, text=" hELLO ") == [first]
    assert found(episodes, text="g00000002") == [second]
    assert found(episodes, environment="maths") == [second]
    assert found(episodes, environment="text") == [third, first]
    assert found(episodes, reward_min="0.5") == [third, second]
    assert found(episodes, reward_max="0.1") == [first]
    assert found(episodes, step_min="2", step_max="2") == [second]
    assert found(episodes, page="1") == []
    append(path, said(4)[:-3])
    assert not episodes.read_new(label)
    append(path, said(4)[-3:])
    assert episodes.read_new(label)
    assert len(found(episodes)) == 4
    episodes.close()


def test_in_a_mix_a_group_says_which_environment_it_is_of() -> None:
    entries = {"maths": {"name": "a", "weight": 1.0}, "code": {"name": "b", "weight": 3.0}}
    label = make_environment_lookup({"env": {"name": "mix", "args": entries}})
    assert Counter(label(group) for group in range(40)) == {"code": 30, "maths": 10}
    assert label(None) == "mix"
    assert make_environment_lookup({"env": {"name": "reverse-text", "args": {"length": 3}}})(7) == "reverse-text"
    assert make_environment_lookup({})(7) == ""


def traced(run: Path, step: int, group: int, number: int, reward: float, **columns: np.ndarray) -> None:
    trained, calls = episode()
    name = f"g{group:08d}e{number:04d}"
    rewards = np.where(np.arange(10) == 9, np.float32(reward), np.float32(0))
    record = msgspec.structs.replace(
        trained, step=step, trajectory_id=name, sample_id=f"{name}s0", rewards=rewards, **columns
    )
    RouteFile(run / "routes", "learner").append(record)
    for call in calls:
        RouteFile(run / "routes", "engine-0").append(msgspec.structs.replace(call, trajectory_id=name))


def test_a_group_is_shown_beside_each_other_with_what_is_known_of_its_tokens(tmp_path: Path) -> None:
    gains = np.linspace(-3, 3, 10).astype(np.float32)
    for number, reward in enumerate((0.25, 0.75)):
        traced(tmp_path, 3, 7, number, reward, advantages=gains)
    (tmp_path / "episodes.jsonl").write_text(said(9))
    episodes, ages = EpisodeIndex(tmp_path), StepVersions({3: 2}, 4)
    episodes.read_new(str)
    assert found(episodes, step_max="3", order="worst") == ["3.g00000007e0000", "3.g00000007e0001"]
    assert found(episodes, reward_min="0.7") == ["3.g00000007e0001"]
    listed = episodes.render_list(EpisodeQuery.from_params({}), ages)
    assert "<td>2</td>\n<td>10</td><td>2</td>" in listed, "turns, tokens, age"
    one = episodes.render_episode("3.g00000007e0000", ages)
    assert one is not None
    assert one.count("class='card sample'") == 1
    assert "advantage -1.000" in one
    assert "age 2" in one
    assert "--o:0.5" in one, "half of the bound"
    group = episodes.render_episode("3.g00000007e0000", ages, group=True)
    assert group is not None
    assert group.count("class='card sample'") == 2
    assert "Group 7" in group
    traced(tmp_path, 3, 7, 2, 0.5)
    assert episodes.read_new(str)
    assert len(found(episodes, step_max="3")) == 3
    episodes.close()


def test_a_damaged_trace_is_said_to_be(tmp_path: Path) -> None:
    traced(tmp_path, 3, 7, 0, 0.25)
    damage_last_record(tmp_path / "routes" / "learner.0.routes")
    episodes = EpisodeIndex(tmp_path)
    episodes.read_new(str)
    assert "is damaged" in str(episodes.render_episode("3.g00000007e0000", StepVersions()))
    episodes.close()


def test_what_a_model_said_is_text(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").write_text(
        said(1, user=EVIL) + said(2).replace("g00000002e0000", EVIL.replace('"', ""))
    )
    episodes = EpisodeIndex(tmp_path)
    episodes.read_new(lambda group: EVIL)
    for text in (
        episodes.render_list(EpisodeQuery.from_params({}), StepVersions()),
        str(episodes.render_episode("1.g00000001e0000", StepVersions())),
    ):
        assert "<script" not in text
        assert "&lt;script&gt;" in text
    episodes.close()
