"""The configuration of a run, read from a preset or a file with `key=value` overrides, and
checked.
"""

from __future__ import annotations

import copy
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from r3async.config.data import DataConfig
from r3async.config.env import EnvConfig, EnvEntryConfig, RunEnv, resolve_env
from r3async.config.others import find_equivalent_setting, find_equivalent_value
from r3async.config.paths import resolve_relative_paths
from r3async.config.run import Config
from r3async.config.secrets import Secret, collect_secrets
from r3async.config.section import ConfigError, Section, did_you_mean, flatten_section, strip_range
from r3async.config.shorthand import (
    DATASET_ENV,
    MIX_ENV,
    SHORTHAND_KEYS,
    UNSET_WORD,
    expand_shorthand,
    merge_tables,
)
from r3async.config.unread_settings import CommandName, explain_unread, find_other_reader
from r3async.config.vllm_arguments import check_engine_args
from r3async.untrusted import MalformedError, decode_toml, format_value

REMOVED_KEYS = {
    "algorithm.correction.anchor": "it is `algorithm.correction.numerator` now",
    "algorithm.correction.max_token_age": "it is `schedule.max_token_age` now",
    "algorithm.decoupled_ppo": "set `algorithm.policy_loss` = 'tis' and `algorithm.tis.cap` = 5",
    "algorithm.normalize_std": "`algorithm.advantage` = 'dr_grpo' does not divide by the deviation",
    "algorithm.rollout_kl.coef_max": "the coefficient is always 1 at most",
    "algorithm.rollout_kl.gain": "the coefficient always rises by 0.2 e-folds a step",
    "algorithm.rollout_kl.gain_down": "the coefficient always falls by 0.1 e-folds a step",
    "algorithm.rollout_kl.probe_tokens": (
        "at least 640 tokens are always probed, or a quarter of the step: raise `probe_share`"
    ),
    "algorithm.rollout_kl.token_limit": "one token's k3 always adds 100 at most",
    "buffer.quarantine_bytes": "`quarantine/` always holds 64 MiB",
    "episode.engine_retries": "a call that the engine failed at is always repeated twice",
    "episode.keep_sampling_mask": "the mask is always recorded",
    "evaluation.episodes": "it is `evaluation.tasks` now",
    "evaluation.every": "it is `evaluation.every_steps` now",
    "evaluation.samples": "it is `evaluation.samples_per_task` now",
    "generator.concurrency_min": "the fewest episodes at once are always 1",
    "learner.parallel.vpp": "there are no virtual pipeline stages: use `learner.parallel.pp`",
    "log.mlflow_uri": "set the variable MLFLOW_TRACKING_URI",
    "log.wandb_mode": "set the variable WANDB_MODE",
    **{
        f"model.init.{name}": "it follows from `model.init.size`"
        for name in ("expert_hidden_size", "experts", "heads", "hidden_size", "kv_heads", "layers")
    },
    "model.init.gate_std": "router weights of a new model always have a standard deviation of 0.1",
    "model.init.max_positions": "a new model always has 32768 positions",
    "model.init.top_k": "a token of a new model always takes 2 experts",
    "model.init.warm_batch": "the supervised start always takes 64 samples a step",
    "model.init.warm_lr": "the supervised start always has a learning rate of 0.001",
    "observe.mlflow_uri": "set the variable MLFLOW_TRACKING_URI",
    "observe.project": "it is `log.project` now",
    "observe.sink_queue": "a sink always keeps 1024 rows that wait",
    "observe.sink_timeout": "the end of a run always waits 15 s for sinks",
    "observe.sinks": "it is `log.to` now",
    "observe.wandb_mode": "set the variable WANDB_MODE",
    "routing.trace_every": (
        "a sample is always of every tenth step: `routing.trace` = 'all' for more"
    ),
    "schedule.difficulty.among": "the curriculum always chooses among four tasks",
    "schedule.groups_per_step": "it is `schedule.prompts_per_step` now",
    "schedule.pace_seconds": "the slower side is always named after 60 s",
    "schedule.samples_per_group": "it is `schedule.group_size` now",
    "serving.max_body_bytes": "a request always has at most 4 MiB",
    "serving.max_messages": "a request always has at most 1024 messages",
    "serving.model_name": "the model is always called 'policy', and requests may name any",
    "serving.read_timeout": "a request always has 30 s to arrive",
    "supervise.max_rank_restarts": "ranks always restart three times in a row",
    "transport.routes": "routes are always sent with as many bits as an expert's number has",
    **dict.fromkeys(
        (
            "checkpoint.write_timeout",
            "evaluation.timeout",
            "generator.start_timeout",
            "learner.collective_timeout",
            "learner.start_timeout",
            "supervise.leave_seconds",
            "supervise.step_seconds",
            "weights.install_timeout",
            "weights.write_timeout",
        ),
        "`supervise.patience` multiplies the time limits of a run",
    ),
}
"""Keys that no longer exist, and what replaces them."""


def upgrade_saved_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run saved, maybe of an earlier release, without those that no
    longer exist. A renamed one has its new name."""
    out = copy.deepcopy(dict(saved))
    algorithm = _find_table(out, "algorithm")
    # Values that have another name today, beside the keys.
    if algorithm.get("policy_loss") == "decoupled_ppo":
        algorithm["policy_loss"] = "tis"
        algorithm["tis"] = algorithm["decoupled_ppo"]
        algorithm["tis"]["cap"] = algorithm["tis"].pop("behaviour_cap")
    if not algorithm.get("normalize_std", True) and algorithm["advantage"] == "grpo":
        algorithm["advantage"] = "dr_grpo"
    for old, now in REMOVED_KEYS.items():
        section, _, key = old.rpartition(".")
        table = _find_table(out, section)
        if key in table:
            value = table.pop(key)
            if now.startswith("it is `"):
                for name in reversed(now.split("`")[1].split(".")):
                    value = {name: value}
                out = merge_tables(out, value)
    return out


def _find_table(settings: dict[str, Any], section: str) -> dict[str, Any]:
    """Return the table at a dotted name; an empty one if there is none."""
    table: Any = settings
    for name in section.split("."):
        table = table.get(name) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


@functools.cache
def _field_types(section_type: type) -> dict[str, Any]:
    return {f.encode_name: strip_range(f.type) for f in msgspec.structs.fields(section_type)}


def _make_unknown_key_error(path: str, key: str, value: Any, names: Sequence[str]) -> ConfigError:
    prefix = f"{path}." if path else ""
    # A set has the keys of `[evaluation]`, and had them under the same names.
    known_as = re.sub(r"^evaluation\.sets\.[^.]+\.", "evaluation.", f"{prefix}{key}")
    now = REMOVED_KEYS.get(known_as)
    if now is not None:
        return ConfigError(f"unknown key `{prefix}{key}`: {now}")
    whole, inner = f"{prefix}{key}", value
    # Extend the name while the table has a single key.
    while isinstance(inner, Mapping) and len(inner) == 1:
        ((more, inner),) = inner.items()
        whole = f"{whole}.{more}"
    instead = find_equivalent_setting(whole, inner, sections=not path)
    if instead:
        return ConfigError(f"unknown key `{whole}`: {instead}")
    names = names if path else [*names, *SHORTHAND_KEYS]
    # A section of another trainer (`trainer`) is like one of ours (`transport`) by chance.
    cutoff = 0.7 if isinstance(value, Mapping) and not path else 0.5
    known = f"valid here: {', '.join(names)}"
    hint = did_you_mean(key, names, known, lambda near: f"`{prefix}{near}`", cutoff)
    if hint == known and whole != f"{prefix}{key}":
        return ConfigError(f"unknown key `{whole}`: no setting is known to be like it")
    return ConfigError(f"unknown key `{prefix}{key}`: {hint}")


def _build_section(kind: Any, data: Any, path: str) -> Any:
    """Build section `kind` from plain data. Raises `ConfigError` for all unknown keys together, or
    for the first value that cannot be."""
    unknown = dict.fromkeys(map(str, _list_unknown_keys(kind, data, path)))
    if unknown:
        raise ConfigError("\n".join(unknown))
    return _convert_value(kind, data, path)


def _list_unknown_keys(kind: Any, table: Any, path: str) -> Iterator[ConfigError]:
    """Yield an error for each unknown key of a section's table, and of its sections. A table that
    is unknown has one for each of its values: who pastes another trainer's settings pastes many."""
    if not isinstance(table, Mapping):
        return
    fields = _field_types(kind) if _is_section(kind) else {}
    if typing.get_origin(kind) is dict and _is_section(typing.get_args(kind)[1]):
        fields = dict.fromkeys(table, typing.get_args(kind)[1])  # sections by name
    elif not fields:
        return
    for key, value in table.items():
        if key in fields:
            yield from _list_unknown_keys(fields[key], value, f"{path}.{key}" if path else key)
        else:
            for single in _split_table(value):
                yield _make_unknown_key_error(path, key, single, list(fields))


def _split_table(value: Any) -> Iterator[Any]:
    """Yield a table's values, each in tables of that one; anything else as it is."""
    if not isinstance(value, Mapping) or not value:
        yield value
        return
    for key, inner in value.items():
        for single in _split_table(inner):
            yield {key: single}


def _convert_value(target_type: Any, value: Any, path: str) -> Any:
    """Convert plain data, of whose sections all keys are known. Every error names the dotted path
    of its key."""
    if typing.get_origin(target_type) is dict:
        inner = typing.get_args(target_type)[1]
        if _is_section(inner):
            if not isinstance(value, Mapping):
                raise ConfigError(f"`{path}` holds sections by name, not the value {value!r}")
            return {
                name: _convert_value(inner, each, f"{path}.{name}") for name, each in value.items()
            }
    if not _is_section(target_type):
        if (
            value == UNSET_WORD
            and type(None) in (members := typing.get_args(target_type))
            and str not in members
        ):
            return None  # unset a value below; TOML has no null
        try:
            return msgspec.convert(value, target_type, dec_hook=_decode_secret)
        except msgspec.ValidationError as error:
            if target_type is Secret:  # without the value
                raise ConfigError(f"`{path}` must be a text") from None
            why = find_equivalent_value(path, value) or _explain_type_error(target_type, str(error))
            raise ConfigError(f"`{path}` = {format_value(value)}: {why}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"`{path}` is a section, not the value {value!r}; set one of its keys: "
            f"{', '.join(_field_types(target_type))}"
        )
    fields = _field_types(target_type)
    built = {}
    for key, inner in value.items():
        built[key] = _convert_value(fields[key], inner, f"{path}.{key}" if path else key)
    try:
        return target_type(**built)
    except ValueError as error:
        raise ConfigError(f"[{path}] {error}" if path else str(error)) from error


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _decode_secret(kind: type, value: Any) -> Any:
    if kind is Secret and isinstance(value, str | Secret):
        return value if isinstance(value, Secret) else Secret(value)
    raise msgspec.ValidationError(f"expected {kind.__name__}")


_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _explain_type_error(target_type: Any, message: str) -> str:
    """Return why a value is not of type `target_type`, given msgspec's error `message`."""
    members = [kind for kind in typing.get_args(target_type) if kind is not type(None)]
    if (
        typing.get_origin(target_type) in (types.UnionType, typing.Union) and len(members) == 1
    ):  # one that may be unset
        return _explain_type_error(strip_range(members[0]), message)
    if typing.get_origin(target_type) is Literal:
        return f"it must be one of {', '.join(map(repr, typing.get_args(target_type)))}"
    if target_type in _TYPE_NAMES:
        return f"it must be {_TYPE_NAMES[target_type]}"
    if typing.get_origin(target_type) is list:
        inner = typing.get_args(target_type)[0]
        kinds = (
            f"of {', '.join(map(repr, typing.get_args(inner)))}"
            if typing.get_origin(inner) is Literal
            else "of texts"
        )
        return f'it must be a list {kinds}, in quotes from the shell: \'KEY=["a", "b"]\''
    if typing.get_origin(target_type) is tuple:
        return f"it must be a list of {len(typing.get_args(target_type))}, such as [0.9, 0.95]"
    if typing.get_origin(target_type) is dict:
        return "it is a table: set KEY.NAME=value, or { NAME = value } in TOML"
    return message.split(" - at")[0]


def parse_override(text: str) -> tuple[list[str], Any]:
    """Parse one override: `learner.lr=1e-4` -> (["learner", "lr"], 0.0001). Values are TOML; a bare
    word is a string."""
    path, equals, raw = text.partition("=")
    keys = [part.strip() for part in path.split(".")]
    dashes = ": settings have no dashes" if text.startswith("-") else ""
    if not equals or not all(keys) or dashes:
        raise ConfigError(
            f"override {text!r} is not of the form key=value, for example learner.lr=1e-4{dashes}"
        )
    try:
        return keys, decode_toml(f"value = {raw}")["value"]
    except MalformedError:
        return keys, raw


def _merge_layer(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `overlay` merged over it. `env.args` belong to the environment that they
    were set for, and are dropped when `overlay` names another one."""
    env = base.get("env")
    other = overlay.get("env")
    if isinstance(env, Mapping) and isinstance(other, Mapping) and other.get("name") == MIX_ENV:
        env = {**env, "name": ""}  # `[[env]]` replaces the environment below
    if (
        isinstance(env, Mapping)
        and isinstance(other, Mapping)
        and other.get("name", env.get("name")) != env.get("name")
    ):
        base = {**base, "env": {key: value for key, value in env.items() if key != "args"}}
    return merge_tables(base, overlay)


def _drop_unset_args(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings without the arguments of a dataset that are None, which unsets them."""
    env = data.get("env")
    args = env.get("args") if isinstance(env, Mapping) and env.get("name") == DATASET_ENV else None
    if not isinstance(env, Mapping) or not isinstance(args, Mapping):
        return data
    return {
        **data,
        "env": {**env, "args": {key: value for key, value in args.items() if value is not None}},
    }


def parse_mix_entries(env: EnvConfig) -> dict[str, EnvEntryConfig]:
    """Return the environments of a mix, in the order of their labels; none if `env` is no mix.
    Raises `ConfigError` that names the entry."""
    if env.name != MIX_ENV:
        return {}
    if not env.args:
        raise ConfigError("`env.name` = 'mix' without environments: set [[env]], once for each")
    return {
        label: _build_section(EnvEntryConfig, entry, f"env.args.{label}")
        for label, entry in sorted(env.args.items())
    }


def resolve_envs(config: Config) -> list[RunEnv]:
    """Return the environments that the run trains on: a single one, or those of a mix. Raises the
    errors of `parse_mix_entries`."""
    parts = parse_mix_entries(config.env)
    if not parts:
        return [RunEnv("", config.env, 1.0, config.episode)]
    return [resolve_env(label, entry, config.episode) for label, entry in parts.items()]


def parse_data_config(args: Mapping[str, Any]) -> DataConfig:
    """Return the `env.args` of a dataset as a section. Raises `ConfigError` that
    names `data.KEY`."""
    return _build_section(DataConfig, args, "data")


def preset_directory() -> Path:
    """Return the directory of the presets. It is in the package; in a checkout it is a
    link to `configs/`."""
    return Path(__file__).parent.parent / "presets"


def find_config(name_or_path: str) -> Path:
    """Return the path of a TOML file, or of the preset of that name. Raises `ConfigError` with the
    nearest preset's name."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            why = "it is a directory, not a file" if path.is_dir() else "no such file"
            raise ConfigError(f"{why}: {name_or_path}")
        return path
    if "=" in name_or_path:
        raise ConfigError(
            f"{name_or_path!r} is a setting, and a preset or a TOML file comes before settings: "
            f"quickstart {name_or_path}"
        )
    preset = preset_directory() / f"{name_or_path}.toml"
    if not preset.is_file():
        names = sorted(p.stem for p in preset_directory().glob("*.toml"))
        hint = did_you_mean(name_or_path, names, f"there are: {', '.join(names)}")
        raise ConfigError(f"no preset {name_or_path!r}; {hint} (a file must end in .toml)")
    return preset


class _ConfigLayer(NamedTuple):
    """The settings of one file, or of the overrides.

    Attributes:
        data: The settings, as nested tables.
        is_explicit: True if a person set each of them.
    """

    data: dict[str, Any]
    is_explicit: bool


def _read_layers(path: Path, seen: tuple[Path, ...] = ()) -> list[_ConfigLayer]:
    """Return the layers of a file and of those that it extends, the base first. Settings of a
    preset, and of a run's own `config.toml`, are not explicit: a preset has values for other ways
    to run, and a `config.toml` lists every setting, so nobody set them one by one."""
    if path in seen:
        raise ConfigError(
            f"`extends` goes in a circle: {' -> '.join(str(p) for p in (*seen, path))}"
        )
    try:
        data = decode_toml(path.read_bytes())
    except MalformedError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    data = expand_shorthand(data)
    # A run's own `config.toml` has all sections, and maybe keys of an earlier release.
    is_saved = set(Config.__struct_fields__) <= data.keys()
    if is_saved:
        data = upgrade_saved_settings(data)
    preset = path.parent.resolve() == preset_directory().resolve()
    if not preset and path.parent.resolve() != Path.cwd():
        data = resolve_relative_paths(data, path.parent)
    base = data.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{path}: `extends` = {base!r} must be a preset's name, or a TOML file")
    own = _ConfigLayer(data, not preset and not is_saved)
    return [*_read_layers(find_config(base), (*seen, path)), own] if base is not None else [own]


def _build_config(layers: Sequence[_ConfigLayer]) -> Config:
    merged = functools.reduce(_merge_layer, (layer.data for layer in layers))
    return _build_section(Config, _drop_unset_args(merged), "")


def _refuse_unread_settings(
    config: Config, layers: Sequence[_ConfigLayer], command: CommandName | None
) -> None:
    """Raise `ConfigError` for a setting that a person set without effect. What a file
    sets may be turned off by a layer above it: it must have been read in the file's own
    layers, or be read now."""
    if command is None:
        return
    *files, overrides = layers
    for setting, value in flatten_section(overrides.data).items():
        if value is not None:
            elsewhere = find_other_reader(setting, command)
            if elsewhere:
                raise ConfigError(
                    f"`{setting}` has no effect here: {elsewhere} reads it. Leave it out"
                )
    if command in ("eval", "init-model"):
        return
    values = flatten_section(config_to_dict(config, reveal=True))
    for count, layer in enumerate(layers, start=1):
        for setting, value in flatten_section(layer.data).items() if layer.is_explicit else ():
            in_file = layer is not overrides
            # In a table of free keys the word is a text like any other, and unsets nothing.
            is_unset = value is None or (value == UNSET_WORD and values.get(setting) is None)
            if is_unset or not (needs := explain_unread(setting, config, in_file=in_file)):
                continue
            if not in_file or _is_unread_in_files(setting, files[:count]):
                raise ConfigError(
                    f"`{setting}` has no effect: it needs {needs}. Set that, or leave this out"
                )


def _is_unread_in_files(setting: str, files: Sequence[_ConfigLayer]) -> bool:
    try:
        return bool(explain_unread(setting, _build_config(files), in_file=True))
    except ConfigError:  # a layer above sets what is missing
        return False


Overrides = Sequence[str] | Mapping[str, Any]
"""Texts `key=value`, as on a command line, or values by key. Keys may be dotted, and a value may be
a mapping: `{"learner.lr": 1e-4}` and `{"learner": {"lr": 1e-4}}` are the same."""


def nest_overrides(overrides: Overrides) -> dict[str, Any]:
    """Return the overrides as nested tables, as they would stand in a TOML file. Raises
    `ConfigError` for a text that is not `key=value`, and for a key within a value."""
    if isinstance(overrides, Mapping):
        given = [(key.split("."), value) for key, value in overrides.items()]
    else:
        given = [parse_override(text) for text in overrides]
    over: dict[str, Any] = {}
    for keys, value in given:
        if keys == ["data"] and isinstance(value, str) and value != UNSET_WORD:
            keys = ["data", "path"]
        for key in reversed(keys):
            value = {key: value}
        over = merge_tables(over, value)
    return expand_shorthand(over)


def load_config(
    name_or_path: str, overrides: Overrides = (), command: CommandName | None = "train"
) -> Config:
    """Return the configuration of a preset or TOML file (which may `extends` another), with
    `overrides` over it.

    Raises `ConfigError` that names the setting and the fix, also for an explicit setting that has
    no effect for this command in combination with the others.

    Args:
        name_or_path: A preset's name, or the path of a TOML file.
        overrides: Settings that take precedence.
        command: The command that reads the configuration. None trains nothing, and
            reads what it needs.
    """
    config, layers = _load_layers(name_or_path, overrides)
    _refuse_unread_settings(config, layers, command)
    return config


def _load_layers(name_or_path: str, overrides: Overrides) -> tuple[Config, list[_ConfigLayer]]:
    layers = [
        *_read_layers(find_config(name_or_path)),
        _ConfigLayer(nest_overrides(overrides), True),
    ]
    return validate_config(_build_config(layers)), layers


def apply_overrides(
    config: Config, overrides: Overrides, command: CommandName | None = None
) -> Config:
    """Return `config` with `overrides` over it. Raises `ConfigError` as `load_config` does."""
    layers = [
        _ConfigLayer(config_to_dict(config, reveal=True), False),
        _ConfigLayer(nest_overrides(overrides), True),
    ]
    config = validate_config(_build_config(layers))
    _refuse_unread_settings(config, layers, command)
    return config


def validate_config(config: Config) -> Config:
    """Return `config` after checks of what a person wrote. Raises `ConfigError` for a setting that
    the engine has to decide itself."""
    if config.generator.engine == "vllm":
        check_engine_args(config.generator.engine_args, config.weights.probe)
    for each in resolve_envs(config):
        if each.env.name.partition(":")[0] == DATASET_ENV:
            parse_data_config(each.env.args)
    return config


def load_command_config(
    name_or_path: str, overrides: Sequence[str] = (), command: CommandName = "train"
) -> Config:
    """Load a configuration as `load_config` does, for a command line. Raises `ConfigError` also for
    a literal secret in the overrides, which other users of the machine, and everyone who sees a job
    of the cluster, could read there."""
    config, layers = _load_layers(name_or_path, overrides)
    refuse_literal_secrets(config, overrides)
    _refuse_unread_settings(config, layers, command)
    return config


def refuse_literal_secrets(config: Config, overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for a secret of `config` that one of `overrides` gives literally."""
    keys = [text.partition("=")[0].strip() for text in overrides]
    for setting, secret in collect_secrets(config).items():
        given = any(setting == key or setting.startswith(f"{key}.") for key in keys)
        # Words of a command can be read in the command line of the program that it starts, wherever
        # they were given.
        if given and secret and not secret.variable_name and ".command[" not in setting:
            raise ConfigError(
                f"`{setting}` is a secret, and command lines can be read by others: put it into an "
                f"environment variable and set '{setting}=$NAME' (in quotes), or into a TOML file "
                "that only you can read"
            )


def config_from_dict(data: Mapping[str, Any]) -> Config:
    return _build_section(Config, data, "")


def config_from_saved(saved: Mapping[str, Any]) -> Config:
    """Return the configuration that a run saved, maybe of an earlier release."""
    return config_from_dict(upgrade_saved_settings(saved))


def config_to_dict(config: Section, *, reveal: bool = False) -> dict[str, Any]:
    """Return plain data with every key resolved. Secrets are `***`, so that the result may be
    written anywhere; with `reveal` they are as they were given, for the process that needs them."""

    def encode_secret(value: Any) -> str:
        if not isinstance(value, Secret):
            raise TypeError(f"a {type(value).__name__} is no setting")
        return value.raw_text if reveal else value.redacted

    return msgspec.to_builtins(config, enc_hook=encode_secret)


def config_to_toml(config: Config) -> str:
    """Return the resolved configuration as TOML. Unset (None) values are left out:
    TOML has no null."""

    def drop_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: drop_none(v) for k, v in value.items() if v is not None}
        return value

    return msgspec.toml.encode(drop_none(config_to_dict(config))).decode()
