"""Other people's environments under the episode loop, with a real chat template. One of them under the whole
pipeline: `ray/test_mixed_run.py`."""

import json

import pytest

from r3async.config import EnvConfig, EpisodeConfig
from r3async.envs.factory import build_environment_factory
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.scripted import ScriptedEngine
from r3async.tools.init_model import build_byte_tokenizer
from r3async.weights.manifest import WeightManifest
from tests.helpers.playing import make_player, play_lease
from tests.helpers.verifiers import tasksets_in

SETTINGS = EpisodeConfig(max_turns=6, max_new_tokens=32, max_prompt_tokens=2048, max_total_tokens=4096, retries=1)
LAKE = {"render_mode": "ansi", "is_slippery": False, "actions": ["left", "down", "right", "up"]}


@pytest.fixture
def tasks(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "solution": "2"}) + "\n")
    with tasksets_in(tmp_path):
        yield tmp_path


@pytest.mark.parametrize(
    ("name", "args", "answers", "turns", "reward"),
    [
        ("reasoning-gym:chain_sum", {}, ["?"], 1, 0.0),
        ("gymnasium:FrozenLake-v1", LAKE, ["down", "down", "right", "down", "right", "right"], 6, 1.0),
        ("textarena:TicTacToe-v0", {"opponent": "tests.helpers.envs:first_free"}, ["[4]", "[1]", "[7]"], 3, 1.0),
        ("verifiers:vf_single_sums", {"taskset": {"size": 1}}, ["0"], 1, 1.0),
        ("verifiers:vf_coached_sums", {"tasks": 1}, ["no", "0"], 2, 1.5),
        ("dataset:{tasks}/rows.jsonl", {"reward": "tests.helpers.envs:half_for_trying"}, ["3"], 1, 0.5),
        ("tests.helpers.envs:Echo", {}, ["11", "12"], 2, 1.0),
    ],
)
@pytest.mark.long
async def test_a_group_of_episodes_is_played_and_recorded(tasks, name, args, answers, turns, reward):
    chat = ChatRenderer(build_byte_tokenizer())
    encoded = [[*chat.tokenizer.encode(answer, add_special_tokens=False), chat.eos_token_id] for answer in answers]
    # Episodes interleave, so what is answered follows from the turn and not from the number of the call.
    engine = ScriptedEngine(lambda request, call: encoded[int(request.request_id.rsplit("t", 1)[1])])
    await engine.start()
    await engine.install_version(WeightManifest(version=0, path="", tensors={}, nbytes=0), timeout=1)
    trouble = []
    factory = build_environment_factory(EnvConfig(name=name.format(tasks=tasks), args=args))
    player = make_player(factory, engine, chat, SETTINGS, trouble)
    played = [one.trajectory for one in await play_lease(player, 0, 11, (0, 1, 2))]
    assert trouble == []
    first = played[0].samples[0].table["token_ids"].tolist()
    for trajectory in played:
        assert trajectory.stop_reason == "env_done"
        assert len(trajectory.turns) == turns
        assert sum(turn.reward for turn in trajectory.turns) == pytest.approx(reward)
        if "Echo" not in name:  # which says in which process it is
            assert trajectory.samples[0].table["token_ids"].tolist() == first
