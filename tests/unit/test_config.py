"""A configuration is refused by key and with the right spelling, before anything heavy is imported."""

import operator
import subprocess
import sys
import tomllib

import msgspec
import pytest

from r3async.checkpoint.resume_checks import check_resume_settings
from r3async.config import ConfigError, config_from_dict, config_to_toml, load_config
from r3async.config.load import REMOVED_KEYS
from r3async.config.shorthand import merge_tables


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algorithm.rolout_kl.coef=1", ["algorithm.rolout_kl", "algorithm.rollout_kl"]),
        ("generator.dtype=fp8", ["generator.dtype", "'float32', 'bfloat16'"]),
        ("episode.max_total_tokens=100000", ["max_total_tokens", "max_tokens_per_micro_batch"]),
        ("observe.sink_queue=8", ["unknown key `observe.sink_queue`", "1024 rows"]),
        ("model.init.warm_lr=1e-4", ["unknown key `model.init.warm_lr`", "0.001"]),
    ],
)
def test_a_wrong_setting_is_named_with_the_fix(override, parts):
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [override])
    for part in parts:
        assert part in str(caught.value)


def test_the_resolved_configuration_loads_back_equal(tmp_path):
    config = load_config("quickstart", ["seed=3", "env.args.letters=5", "learner.betas=[0.8, 0.9]"])
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"evaluation": {"sets": {"a": {"temperature": 0, "samples_per_task": 3}}}},
            r"`sets\.a`: `temperature` = 0 is greedy, and 3",
        ),
        ({"evaluation": {"sets": 3}}, "holds sections by name"),
        (
            {"episode": {"temperature": 0}},
            r"`episode\.temperature` must be greater than 0.*`evaluation\.temperature` = 0",
        ),
        (
            {"checkpoint": {"keep_best": "pass@8"}, "evaluation": {"every_steps": 1, "samples_per_task": 4}},
            "'pass@8' is no figure of the evaluations: reward_mean, pass@1, pass@2, pass@4$",
        ),
        (
            {
                "checkpoint": {"keep_best": "reward_mean"},
                "evaluation": {"every_steps": 3},
                "schedule": {"steps_per_publication": 2},
            },
            "`evaluation.every_steps` = 3 must be a multiple",
        ),
    ],
)
def test_evaluations_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(settings)


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


RENAMED = {old: now.split("`")[1] for old, now in REMOVED_KEYS.items() if now.startswith("it is `")}


@pytest.mark.parametrize("old", RENAMED)
def test_a_setting_with_a_new_name_is_refused_by_the_old_one_and_the_new_one_exists(old):
    with pytest.raises(ConfigError, match=f"unknown key `{old}`: it is `{RENAMED[old]}` now"):
        load_config("quickstart", [f"{old}=1"])
    operator.attrgetter(RENAMED[old])(load_config("quickstart"))


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
