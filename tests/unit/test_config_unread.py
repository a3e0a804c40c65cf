"""A setting that nothing reads beside the others is refused where a person set it, with what would have it read."""

import tomllib

import pytest
from typer.testing import CliRunner

import r3async
from r3async.config import (
    Config,
    ConfigError,
    config_from_dict,
    config_to_dict,
    config_to_toml,
    flatten_section,
    load_config,
)
from r3async.config.load import apply_overrides, load_command_config
from r3async.config.unread_settings import READ_CONDITIONS, explain_unread
from r3async.tools.cli import app
from r3async.tools.presets import list_preset_paths

IN_VAIN = [
    (["algorithm.ppo.clip_high=0.28"], '`algorithm.policy_loss` = "ppo"'),
    (["algorithm.cispo.clip_high=3", "algorithm.policy_loss=ppo"], '`algorithm.policy_loss` = "cispo"'),
    (["algorithm.distillation.coef=2"], "distillation.teacher"),
    (["algorithm.overlong_penalty.factor=2"], "overlong_penalty.buffer"),
    (["algorithm.reference_kl.weight_cap=2"], "reference_kl.coef"),
    ([f"algorithm.reference_kl.{x}" for x in ("weight_cap=2", "coef=0.1", "weighted=false")], "reference_kl.weighted"),
    (["algorithm.rollout_kl.estimator=k3", "algorithm.rollout_kl.coef=0"], "rollout_kl.coef"),
    (["algorithm.rollout_kl.measure=replayed"], "`algorithm.rollout_kl.target` or `max`"),
    (["algorithm.correction.weight_cap=3"], "correction.weight"),
    (["algorithm.loss_args.x=1"], "one of your own"),
    (["algorithm.loss_args.x=null"], "one of your own"),
    (["schedule.difficulty.easy=0.9"], "settled_share"),
    (["schedule.difficulty.groups=5"], "settled_share"),
    (["schedule.window=4", "schedule.max_staleness=0"], "max_staleness"),
    (["routing.min_recorded_fraction=0.5", "routing.replay=off"], "routing.replay"),
    (["learner.min_lr_ratio=0.1"], "lr_schedule"),
    (["learner.lora.alpha=8"], "lora.rank"),
    (["weights.probe_every=3", "weights.probe=false"], "weights.probe"),
    (["weights.relay=false", "weights.backend=shared_memory"], "weights.backend"),
    (["transport.trusted_network=true"], "nccl"),
    (["buffer.disk_bytes=1000"], "buffer.durability"),
    (["log.project=mine"], "log.to"),
    (["observe.prometheus_host=127.0.0.2"], "prometheus_port"),
    (["serving.tool_parser=builtin"], "serving.enabled"),
    (["serving.max_sessions=3", "env.name=agent:a:b"], "serving.enabled"),
    (["evaluation.samples_per_task=8"], "evaluation.every_steps"),
    (["model.init.size=tiny", "model.path=org/name"], "model.path"),
    (["model.init.warm_reward=0.2", "model.init.max_warm_steps=0"], "max_warm_steps"),
    (["sft.epochs=3"], "r3async sft"),
]


@pytest.mark.parametrize(("settings", "needs"), IN_VAIN, ids=lambda each: each[0] if isinstance(each, list) else "")
def test_a_setting_without_effect_is_refused_with_what_it_needs(settings, needs):
    name = settings[0].partition("=")[0]
    with pytest.raises(ConfigError, match="has no effect") as caught:
        load_config("quickstart", settings)
    assert f"`{name}`" in str(caught.value)
    assert needs in str(caught.value)
    load_config("quickstart", settings[1:])


def test_the_command_line_and_python_refuse_it_alike(tmp_path):
    said = CliRunner().invoke(app, ["train", "quickstart", "algorithm.ppo.clip_high=0.28", "--dry-run"])
    assert isinstance(said.exception, ConfigError)
    for config in ("quickstart", Config()):
        with pytest.raises(ConfigError, match="has no effect"):
            r3async.train(config, runs=tmp_path, algorithm={"ppo": {"clip_high": 0.28}})
    assert not list(tmp_path.iterdir())


READ = [
    ["algorithm.policy_loss=ppo", "algorithm.ppo.clip_high=0.28"],
    ["algorithm.policy_loss=clip_cov", "algorithm.ppo.clip_high=0.28"],
    ["algorithm.policy_loss=sequence_truncated_pg", "algorithm.truncated_pg.cap=3"],
    [f"algorithm.advantage={__name__}:own_loss", "algorithm.loss_args.x=1"],
    [f"algorithm.policy_loss={__name__}:own_loss", "algorithm.loss_args.x=1", "algorithm.ppo.clip_low=0.1"],
    ["evaluation.every_steps=5", "evaluation.samples_per_task=8"],
    ["evaluation.every_steps=0"],
    ["serving.enabled=false"],
    ["serving.unrewarded=0", "env.name=agent:a:b"],
    ["serving.unrewarded=0", "evaluation.every_steps=1", "evaluation.env.name=agent:a:b"],
    ["algorithm.rollout_kl.target=0.01", "algorithm.rollout_kl.measure=replayed"],
]


@pytest.mark.parametrize("settings", READ, ids=lambda each: each[-1])
def test_what_is_read_is_taken(settings):
    load_config("quickstart", settings)


def own_loss(inputs):
    return inputs


def test_every_condition_names_settings_that_there_are():
    known = flatten_section(config_to_dict(Config()))
    for condition in READ_CONDITIONS:
        for each in condition.settings:
            assert each == "algorithm.loss_args" or any(k == each or k.startswith(f"{each}.") for k in known), each


def test_presets_may_have_values_for_other_ways_to_run():
    for path in list_preset_paths():
        load_config(path.stem, ["model.path=org/name"])


def test_a_file_is_refused_for_what_it_sets_in_vain_and_may_be_turned_off_from_the_command_line(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "quickstart"\n[algorithm.ppo]\nclip_high = 0.28\n')
    with pytest.raises(ConfigError, match=r"`algorithm\.ppo\.clip_high` has no effect"):
        load_config(str(path))
    load_config(str(path), ["algorithm.policy_loss=ppo"])
    path.write_text('extends = "quickstart"\nalgorithm.policy_loss = "ppo"\n[algorithm.ppo]\nclip_high = 0.28\n')
    assert load_config(str(path), ["algorithm.policy_loss=gspo"]).algorithm.policy_loss == "gspo"
    (tmp_path / "over.toml").write_text(f'extends = "{path}"\nalgorithm.policy_loss = "gspo"\n')
    load_config(str(tmp_path / "over.toml"))
    (tmp_path / "over.toml").write_text(f'extends = "{path}"\n[algorithm.gspo]\nnoise = 0.1\n')
    with pytest.raises(ConfigError, match=r"`algorithm\.gspo\.noise` has no effect"):
        load_config(str(tmp_path / "over.toml"))


def test_a_file_may_be_of_several_commands(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "quickstart"\n[sft]\nepochs = 2.0\n[evaluation]\nsamples_per_task = 4\n')
    assert load_config(str(path)).evaluation.samples_per_task == 4


def test_the_configuration_of_a_run_is_taken_whatever_it_has(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(load_config("quickstart", ["model.path=org/name", "schedule.max_staleness=0"])))
    config = load_config(str(path))
    assert config.model.init.rope_theta == 5.0
    assert explain_unread("model.init.rope_theta", config)
    with pytest.raises(ConfigError, match="has no effect"):
        load_config(str(path), ["model.init.rope_theta=4"])


def test_each_command_takes_its_own(tmp_path):
    load_command_config("quickstart", ["sft.epochs=3"], "sft")
    load_command_config("math_1b", ["model.init.size=tiny"], "init-model")
    with pytest.raises(ConfigError, match=r"`generator\.count` has no effect here: `r3async train` reads it"):
        load_command_config("quickstart", ["generator.count=3"], "sft")
    apply_overrides(Config(), ["evaluation.samples_per_task=8"], "eval")
    with pytest.raises(ConfigError, match=r"`schedule\.window` has no effect here: training reads it"):
        apply_overrides(Config(), ["schedule.window=8"], "eval")


TABLES = {
    "env.args": "x",
    "episode.template_args": "x",
    "algorithm.loss_args": "x",
    "generator.engine_args": "watermark",
}
"""Tables of a user's own names, each with one that it may have."""
VALUES = ["null", "true", "1e5", "[a]", "a: b", "", "~", "007", "a # b", [1, "null"], {"inner": "null"}]


def settings_with(table, value):
    own = {"algorithm.policy_loss": f"{__name__}:own_loss"} if table == "algorithm.loss_args" else {}
    return {"env.name": "module:Class", **own, table: {TABLES[table]: value}}


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("table", TABLES)
def test_the_written_configuration_gives_back_what_was_given(table, value):
    config = load_config("quickstart", settings_with(table, value))
    again = config_from_dict(tomllib.loads(config_to_toml(config)))
    found = flatten_section(config_to_dict(again))
    assert again == config
    assert flatten_section({f"{table}.{TABLES[table]}": value}).items() <= found.items()


@pytest.mark.parametrize(
    ("value", "where"),
    [(None, ""), ([1, None], r"\[1\]"), ({"inner": None}, r"\.inner"), ([{"a": [None]}], r"\[0\]\.a\[0\]")],
    ids=repr,
)
@pytest.mark.parametrize("table", TABLES)
def test_none_in_a_table_is_refused_by_its_place(table, value, where):
    last = table.rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"`{last}\.{TABLES[table]}{where}` is None, .*leave it out"):
        load_config("quickstart", settings_with(table, value))


@pytest.mark.parametrize("setting", ["schedule.max_token_age", "algorithm.rollout_kl.max", "evaluation.temperature"])
def test_null_unsets_what_a_file_has_set(tmp_path, setting):
    section, _, key = setting.rpartition(".")
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "quickstart"\n[{section}]\n{key} = 1\n')
    assert flatten_section(config_to_dict(load_config(str(path))))[setting] == 1
    assert flatten_section(config_to_dict(load_config(str(path), [f"{setting}=null"])))[setting] is None
    (tmp_path / "over.toml").write_text(f'extends = "{path}"\n[{section}]\n{key} = "null"\n')
    assert flatten_section(config_to_dict(load_config(str(tmp_path / "over.toml"))))[setting] is None
