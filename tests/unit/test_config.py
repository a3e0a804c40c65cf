"""A configuration is refused by key and with the right spelling, before anything heavy is imported."""

import operator
import re
import subprocess
import sys
import tomllib

import msgspec
import pytest

from r3async.checkpoint.resume_checks import check_resume_settings
from r3async.config import ConfigError, config_from_dict, config_to_toml, load_config
from r3async.config.load import REMOVED_KEYS
from r3async.config.shorthand import merge_tables


def test_every_unknown_key_of_a_pasted_configuration_is_named():
    pasted = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.load_format": "dummy",
        "learner.lrr": 0.1,
        "evaluation.sets.a.samples": 3,
    }
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [f"{key}={value}" for key, value in pasted.items()])
    assert str(caught.value).splitlines() == [
        "unknown key `learner.lrr`: did you mean `learner.lr`?",
        "unknown key `algorithm.adv_estimator`: here it is `algorithm.advantage`",
        "unknown key `actor_rollout_ref.rollout.n`: here it is `schedule.group_size`",
        "unknown key `actor_rollout_ref.rollout.load_format`: no setting is known to be like it",
        "unknown key `evaluation.sets.a.samples`: it is `evaluation.samples_per_task` now",
    ]


def test_the_resolved_configuration_loads_back_equal(tmp_path):
    config = load_config("quickstart", ["seed=9223372036854775807", "env.args.letters=5", "learner.betas=[0, 0.9]"])
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config))
    assert load_config(str(path)) == config
    assert tomllib.loads(path.read_text())["env"]["args"]["letters"] == 5


def test_a_typo_on_the_command_line_imports_neither_torch_nor_ray_nor_vllm():
    code = (
        "import sys; sys.argv = ['r3async', 'train', 'quickstart', 'algorithm.rolout_kl.coef=1']\n"
        "from r3async.tools.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "2 []"
    assert "did you mean `algorithm.rollout_kl`?" in done.stderr


def test_another_environment_does_not_inherit_the_arguments_of_the_one_before(tmp_path):
    assert load_config("quickstart").env.args == {"letters": 4, "turns": 3}
    assert load_config("quickstart", ["env.args.letters=5"]).env.args == {"letters": 5, "turns": 3}
    assert load_config("quickstart", ["env.name=guess"]).env.args == {}
    assert load_config("quickstart", ["env.args.limit=5", "env.name=guess"]).env.args == {"limit": 5}
    assert load_config("quickstart", ["env.name=reverse-text", "env.args.letters=5"]).env.args["turns"] == 3
    (tmp_path / "mine.toml").write_text('extends = "quickstart"\n[env]\nname = "countdown"\n')
    assert load_config(str(tmp_path / "mine.toml")).env.args == {}


def test_a_set_of_evaluations_differs_in_what_it_names():
    sets = {"greedy": {"temperature": 0}, "other": {"env": {"name": "guess"}, "samples_per_task": 8, "seed": 3}}
    config = config_from_dict(
        {"evaluation": {"every_steps": 2, "tasks": 5, "sets": sets}, "checkpoint": {"keep_best": "other/pass@8"}}
    )
    greedy, other = config.evaluation.resolve_sets().values()
    assert (greedy.temperature, greedy.tasks, greedy.samples_per_task, greedy.env.name) == (0, 5, 1, "")
    assert (other.temperature, other.tasks, other.samples_per_task, other.seed) == (None, 5, 8, 3)
    assert other.env.name == "guess"
    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config


@pytest.mark.parametrize(
    ("words", "bound"), [([], None), (["target=0.04"], 0.04), (["target=0.04", "limit=0.1"], 0.1), (["limit=0.1"], 0.1)]
)
def test_a_target_alone_shortens_steps_above_it(words, bound):
    config = load_config("quickstart", [f"algorithm.rollout_kl.{word}" for word in words])
    assert config.algorithm.rollout_kl.update_limit == bound


@pytest.mark.parametrize("old", REMOVED_KEYS)
def test_a_setting_that_is_no_more_is_refused_with_what_replaces_it_and_a_new_name_exists(old):
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [f"{old}=1"])
    assert str(caught.value) == f"unknown key `{old}`: {REMOVED_KEYS[old]}"
    if new := re.match("it is `(.+)` now", REMOVED_KEYS[old]):
        operator.attrgetter(new[1])(load_config("quickstart"))


@pytest.mark.parametrize(("old", "new"), [("episodes", "tasks"), ("samples", "samples_per_task")])
def test_a_set_of_evaluations_refuses_an_old_name_with_the_new_one(old, new):
    with pytest.raises(ConfigError, match=f"unknown key `evaluation.sets.a.{old}`: it is `evaluation.{new}` now"):
        load_config("quickstart", [f"evaluation.sets.a.{old}=3"])


OLD_SETTINGS = {
    "algorithm": {
        "advantage": "grpo",
        "normalize_std": False,
        "policy_loss": "decoupled_ppo",
        "decoupled_ppo": {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0, "behaviour_cap": 4.0},
        "correction": {"anchor": "recomputed"},
    },
    "schedule": {"groups_per_step": 4, "pace_seconds": 60.0},
    "serving": {"max_messages": 1024},
    "learner": {"parallel": {"vpp": 1}},
    "model": {"init": {"hidden_size": 128, "layers": 4}},
}
"""Settings that an earlier release saved, beside those of today."""


def test_settings_that_an_earlier_release_saved_are_read_with_their_names_of_today(tmp_path):
    config = load_config("quickstart")
    data = merge_tables(tomllib.loads(config_to_toml(config)), OLD_SETTINGS)
    del data["schedule"]["prompts_per_step"]
    path = tmp_path / "config.toml"
    path.write_bytes(msgspec.toml.encode(data))
    loss = ("policy_loss=tis", "tis.cap=4", "tis.clip_low=0.1", "tis.clip_high=0.28", "tis.dual_clip=3")
    algorithm = [f"algorithm.{word}" for word in (*loss, "advantage=dr_grpo", "correction.numerator=recomputed")]
    today = ["schedule.prompts_per_step=4", *algorithm]
    assert load_config(str(path)) == load_config("quickstart", today)
    changed = check_resume_settings(data, load_config("quickstart", [*today, "learner.lr=1e-5"]))
    assert changed == {"learner.lr": (3e-4, 1e-5)}
    with pytest.raises(ConfigError, match=r"unknown key `schedule\.groups_per_step`"):
        load_config("quickstart", ["schedule.groups_per_step=4"])
