"""Sections about what plays: model, environment, episodes, generators, the endpoint."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from r3async.config.section import (
    ConfigError,
    NumberRange,
    Port,
    PositiveFloat,
    PositiveInt,
    Secret,
    Section,
    Seed,
    SignedFloat,
    UnitFraction,
    reveal_secrets,
)


class InitConfig(Section):
    """A small random Qwen3-MoE, made and warmed up on the environment's oracle when `model.path` is not given."""

    seed: Seed = 0
    """Of the random weights and the warm-up. Its own, so that runs with different `seed`s begin with the same model."""
    hidden_size: PositiveInt = 128
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    experts: PositiveInt = 8
    top_k: PositiveInt = 2
    expert_hidden_size: PositiveInt = 64
    gate_std: float = 0.1
    """Standard deviation of the router weights: larger is a sharper router."""
    max_positions: PositiveInt = 1024
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary positions. Small ones distinguish near positions more easily; large ones reach further."""
    warm_reward: SignedFloat = 0.4
    """Supervised steps stop when the mean sampled reward reaches this."""
    max_warm_steps: int = 2000

    def check_values(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"`top_k` = {self.top_k} is more than `experts` = {self.experts}")
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError("`hidden_size` must divide by `heads`, and `heads` by `kv_heads`")


class ModelConfig(Section):
    path: str = ""
    """Directory of a Hugging Face model (safetensors + tokenizer with a chat template). Empty: make one from `init`."""
    init: InitConfig = msgspec.field(default_factory=InitConfig)


MIX_ENV = "mix"
"""`env.name` of several environments: `env.args` has a table for each, by its label."""


class EnvConfig(Section):
    """Which environment. Several, with a weight each: `[[env]]`, see below."""

    name: str = "reverse-text"
    """Built-in name; `module:Class` or `file.py:Class`; `dataset`, which `data=FILE` sets; or an adapter's: `reasoning-gym:TASK`,
    `gymnasium:ID`, `textarena:ID`, `verifiers:ID`."""
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    workers: PositiveInt = 2
    """Processes that play blocking environments (plain `def reset` and `def step`), in each generator."""
    step_timeout: PositiveFloat = 30.0
    """Seconds that one call of a blocking environment may take; its process is then killed and replaced."""
    start_timeout: PositiveFloat = 120.0
    """Seconds that such a process may take to start and to import the environment."""
    variables: list[str] = msgspec.field(default_factory=list)
    """Environment variables of the generator that these processes, and the programs of `agent-command`, get besides a few that
    every program needs (PATH, HOME, LANG, TMPDIR, PYTHON…). No other is passed on."""

    def check_values(self) -> None:
        self.args = _hide_secrets(self.name, self.args)
        if self.name == MIX_ENV:
            self.args = {label: _hide_entry_secrets(entry) for label, entry in self.args.items()}

    def reveal_args(self, setting: str = "env.args") -> dict[str, Any]:
        """`args` with their secrets revealed. Raises `ConfigError`."""
        return reveal_secrets(self.args, setting)


def _hide_secrets(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """With the values of `args.environment` as secrets, and what may be one in a command, or in the servers of `mcp:TASK`."""
    if isinstance(environment := args.get("environment"), Mapping):
        args = {**args, "environment": {name: _wrap_secret(value) for name, value in environment.items()}}
    if name.startswith("mcp:") and isinstance(servers := args.get("servers"), Mapping):
        args = {**args, "servers": {label: _hide_server_secrets(server) for label, server in servers.items()}}
    if name == "agent-command" and isinstance(words := args.get("command"), list):
        args = {**args, "command": _command_with_secrets(words)}
    return args


_VARIABLE_REFERENCE = re.compile(r"(?:(?:Bearer|Basic|Token|ApiKey) )?\$(?:\w+|\{\w+\})", re.IGNORECASE)
_FLAG_PATTERN = re.compile(r"-\w|--[\w-]+")
_NAMES_A_SECRET = re.compile(r"--?[\w-]*(?:key|token|secret|password|credential)s?(=.*)?", re.IGNORECASE | re.DOTALL)


def _command_with_secrets(words: list[Any]) -> list[Any]:
    """The words that a flag such as `--api-key` is given, behind it or in the same word. Others say which agent it is."""
    flags = [_NAMES_A_SECRET.fullmatch(word) if isinstance(word, str) else None for word in words]
    behind = [False, *(flag is not None and flag[1] is None for flag in flags)]
    return [_wrap_secret(w) if after or (f and f[1]) else w for w, f, after in zip(words, flags, behind, strict=False)]


def _hide_server_secrets(server: Any) -> Any:
    """Headers that name no variable, the words of a command but for its program and flags, and a URL with a user or a query."""
    if not isinstance(server, Mapping):
        return server
    hidden = dict(server)
    if isinstance(headers := server.get("headers"), Mapping):
        hidden["headers"] = {
            name: value if isinstance(value, str) and _VARIABLE_REFERENCE.fullmatch(value) else _wrap_secret(value)
            for name, value in headers.items()
        }
    if isinstance(words := server.get("command"), list):
        rest = [
            word if isinstance(word, str) and _FLAG_PATTERN.fullmatch(word) else _wrap_secret(word)
            for word in words[1:]
        ]
        hidden["command"] = [*words[:1], *rest]
    if isinstance(url := server.get("url"), str) and not {"?", "@"}.isdisjoint(url):
        hidden["url"] = _wrap_secret(url)
    return hidden


def _wrap_secret(value: Any) -> Any:
    return Secret(value) if isinstance(value, str) else value


def _hide_entry_secrets(entry: Any) -> Any:
    if isinstance(entry, Mapping) and isinstance(args := entry.get("args"), dict):
        return {**entry, "args": _hide_secrets(str(entry.get("name", "")), args)}
    return entry


RowsMode = Literal["auto", "merged", "stepwise"]


class EpisodeConfig(Section):
    max_turns: PositiveInt = 16
    """Turns after which an episode ends, whatever the environment says."""
    max_new_tokens: PositiveInt = 256
    """Tokens sampled in one turn, at most; less when little context is left."""
    max_prompt_tokens: PositiveInt = 3840
    """Of any turn's prompt, with everything that the model is shown in it: a first prompt that is longer is an error, a later
    one ends the episode (`stop_reason` `length`)."""
    max_total_tokens: PositiveInt = 4096
    """Of any turn's prompt and its answer together: what a sample may have."""
    rows: RowsMode = "auto"
    """`auto`: turns are one sample as long as each prompt extends what the model has seen exactly, and a new sample where
    one does not (a template or an environment that rewrites history). `merged`: the same, but that is an error.
    `stepwise`: one sample a turn."""
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further variables of the chat template, for example `{ enable_thinking = false }`."""
    temperature: float = 1.0
    top_p: Annotated[float, NumberRange(0, 1, excludes_low=True)] = 1.0
    """Sample among the most probable tokens that have this probability together; 1: among all."""
    top_k: int = 0
    """Sample among so many most probable tokens; 0: among all."""
    min_p: UnitFraction = 0.0
    """Sample among tokens that have at least this share of the probability of the most probable one; 0: among all."""
    keep_sampling_mask: bool = True
    """With `top_p`, `top_k` or `min_p`: record which tokens could be sampled, and renormalise the learner's log-probs over the
    same ones. Without it the learner's are of the whole vocabulary and the engine's are not: every importance ratio is too low,
    and the trust region measures that as drift."""
    stop: list[str] = msgspec.field(default_factory=list)
    """Strings that end an answer, with the token that completes one. They were sampled, so they stay in the answer and are
    trained. What the chat template adds to close the turn was not, and is not."""
    ignore_eos: bool = False
    """Sample on where the model ends its turn, until `max_new_tokens` or a `stop`."""
    timeout: PositiveFloat = 600.0
    """Seconds one episode may take. One that has answers by then is trained on them; another is tried again."""
    retries: int = 2
    """Times an episode in which the environment failed is tried again; not once more where its code raised twice at one place,
    unless a connection or a time-out is behind it. What becomes of one that fails for good: `supervise.max_failed_fraction`."""
    engine_retries: int = 2
    """Times in an episode that a call at which the engine failed (an error, an aborted request) is made again. The turns before
    it stay; an episode that needs more has failed."""

    @property
    def truncates_sampling(self) -> bool:
        """Whether tokens may be left out of what is sampled from."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def needs_sampling_mask(self) -> bool:
        """Whether each sampled token has its support with it."""
        return self.keep_sampling_mask and self.truncates_sampling

    def check_values(self) -> None:
        if self.max_prompt_tokens >= self.max_total_tokens:
            raise ValueError("`max_prompt_tokens` must be less than `max_total_tokens`, or nothing can be sampled")
        if not all(self.stop):
            raise ValueError("`stop` has an empty string, which would end every answer")


class GeneratorConfig(Section):
    count: PositiveInt = 1
    concurrency: PositiveInt = 64
    """Episodes that one generator plays at once, at most."""
    concurrency_min: PositiveInt = 1
    """Episodes that it plays at once at least, however full its engine's KV cache is: between the two the number follows
    the cache. Set it to `concurrency` to keep the number fixed."""
    engine: Literal["vllm", "scripted"] = "vllm"
    """`scripted`: no model at all. Answers are letters at random, and log-probs and routes are made up: for rehearsing how a run
    fails and recovers where vLLM is not at hand, with `weights.probe=false` or `learner.backend="scripted"`. Nothing is
    learnt."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    threads: PositiveInt = 1
    """OpenMP threads of one engine on CPU. More than one is slower beside a learner on the same cores."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache of one engine on CPU, GiB."""
    on_update: Literal["keep", "recompute", "drain"] = "keep"
    """Requests that run when new weights come. `keep`: they continue with the keys and values that the old weights made.
    `recompute`: the new weights compute keys and values again; tokens, log-probs and routes that they have stay.
    `drain`: the weights wait for them, and new requests wait for the weights."""
    colocate: Literal["off", "share"] = "off"
    """Whose GPUs engines use. `off`: their own. `share`: where there are too few for both, those of the learner's ranks; what
    an engine takes of one says `engine_args.gpu_memory_utilization`. Has no effect without GPUs."""
    max_restarts: int = 8
    """Times one generator process is restarted before the run continues without it; without the last one it stops."""
    start_timeout: PositiveFloat = 600.0
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Passed to vLLM's AsyncEngineArgs as they are; refused where r3async sets or relies on a value of its own. The scripted
    engine knows `token_seconds` and `install_seconds`."""

    def check_values(self) -> None:
        if self.concurrency_min > self.concurrency:
            raise ValueError("`concurrency_min` must not be more than `concurrency`")


# -- the endpoint ------------------------------------------------------------------------------------------------


def is_loopback_host(host: str) -> bool:
    """Only this machine can reach it. A name other than `localhost` counts as one that others can reach.

    Takes IPv6 with and without brackets, and IPv4 that is mapped into it (`::ffff:127.0.0.1`).
    """
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(strip_brackets(host))
    except ValueError:
        return False
    # Python before 3.13 does not look into a mapped address.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def strip_brackets(host: str) -> str:
    """Without the brackets of an IPv6 address, as sockets take it."""
    return host.removeprefix("[").removesuffix("]")


def bracket_ipv6(host: str) -> str:
    """With the brackets that a URL puts around an IPv6 address."""
    return f"[{strip_brackets(host)}]" if ":" in host else host


class ServingConfig(Section):
    """An environment `agent:…` or `agent-command` has its endpoint in any case, for its own episodes; `enabled` opens the door
    to agents that others start."""

    enabled: bool = False
    """Whether who has the token may begin sessions. Address and token of each generator are in `runs/NAME/serving-*.json`."""
    host: str = "127.0.0.1"
    """Interface of the endpoint. Loopback unless named; any other needs a `token`."""
    port: Port = 0
    """0: a free one. A number fits one generator a host only."""
    token: Secret = msgspec.field(default_factory=Secret)
    """A text: what beginning a session takes. Empty: a random one a generator. `$NAME`: that of an environment variable of the
    generator. It is written to no file, so a run that is resumed has to be given it again, unless it is a `$NAME`."""
    model_name: str = "policy"
    """What `/v1/models` calls the model. Requests may name any."""
    tool_parser: str = "auto"
    """Who reads tool calls. `auto`: by the form that the chat template writes them in. `builtin`: ours, of Hermes' and Qwen's
    form. Any other: vLLM's parser of that name, such as `llama3_json`."""
    max_body_bytes: PositiveInt = 4 * 2**20
    """Of one request; a longer one is refused before it is read."""
    max_messages: PositiveInt = 1024
    """In one request, and as many tools; more are refused before the chat template sees them."""
    max_connections: PositiveInt = 512
    """To one generator's endpoint at once. A further one takes the place of the oldest that has shown no key, and is closed
    where all have."""
    read_timeout: PositiveFloat = 30.0
    """Seconds that a connection may take for the head of a request, and for its body."""
    max_sessions: PositiveInt = 64
    """Sessions that may be open at once for agents that others start."""
    unrewarded: SignedFloat | None = None
    """Reward of an episode whose agent gave none. Unset: such an episode is an error, and is tried again."""

    def check_values(self) -> None:
        if isinstance(self.token, str):
            self.token = Secret(self.token)
        if not is_loopback_host(self.host) and not self.token:
            raise ValueError(
                f"`host` = {self.host!r} is open to other machines: set `token` to a secret, or leave `host` at 127.0.0.1"
            )


# -- vLLM's arguments --------------------------------------------------------------------------------------------

_ONE_ENGINE_REASON = "a generator has one engine: set `generator.count`"
_DRAFT_REASON = (
    "log-probs, routes and versions must come from the forward pass that sampled the token, not from a draft"
)
_SAMPLING_REASON = "set `episode.temperature`, `top_p`, `top_k` or `min_p`: the learner computes the same distribution"

OWNED_ENGINE_ARGS = {
    "model": "set `model.path`",
    "dtype": "set `generator.dtype`",
    "seed": "set `seed`: each generator's engine has one of its own, made from it",
    "max_model_len": "set `episode.max_total_tokens`",
    "max_num_seqs": "set `generator.concurrency`",
    "enable_return_routed_experts": "routes are recorded for every MoE model; `routing.replay` says what is done with them",
    "return_sampling_mask": "set `episode.keep_sampling_mask`",
    "logprobs_mode": "rollout log-probs must be those of the distribution that was sampled from, after temperature",
    "generation_config": _SAMPLING_REASON,
    "override_generation_config": _SAMPLING_REASON,
    "logits_processors": _SAMPLING_REASON,
    "skip_tokenizer_init": "the engine takes tokens and gives tokens; templates and text are `episode.template_args`'s",
    "worker_extension_cls": "weights are installed, and confirmed, by r3async's own",
    "scheduler_cls": "answers leave the engine whole, by a scheduler of r3async's own",
    "disable_log_stats": "the engine's load is among the metrics of the run",
    "weight_transfer_config": "set `weights.backend`",
    "distributed_executor_backend": "an engine's processes are children of its generator, and end with it",
    "pipeline_parallel_size": "set `generator.engine_args.tensor_parallel_size`: routes of pipeline stages are not put together",
    "data_parallel_size": _ONE_ENGINE_REASON,
    "data_parallel_backend": _ONE_ENGINE_REASON,
    "speculative_config": _DRAFT_REASON,
    "spec_method": _DRAFT_REASON,
    "spec_model": _DRAFT_REASON,
    "spec_tokens": _DRAFT_REASON,
    "quantization": "engines hold what the learner trains in `generator.dtype`: neither the plan nor the installation of weights "
    "knows of quantized ones",
    "enable_lora": "every version replaces all weights of the model",
}
"""Refused in `generator.engine_args`, with the setting to use instead or the reason. The engine takes what it sets itself from
`declare_engine_args`, so it cannot set a key that is neither refused here nor named in `DEFAULT_ENGINE_ARGS`."""

DEFAULT_ENGINE_ARGS = frozenset(
    {"enforce_eager", "use_tqdm_on_load", "kv_cache_memory_bytes", "block_size", "load_format"}
)
"""What r3async sets and `generator.engine_args` may replace."""


def declare_engine_args(**values: Any) -> dict[str, Any]:
    """Arguments that the engine sets itself. Raises `KeyError` for one that is neither refused nor a default here."""
    for name in values:
        if name not in OWNED_ENGINE_ARGS and name not in DEFAULT_ENGINE_ARGS:
            raise KeyError(f"{name} is not in r3async.config.generation")
    return values


def check_engine_args(args: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a key of `generator.engine_args` that is not the user's to set."""
    if refused := [
        f"`generator.engine_args.{name}` cannot be set: {OWNED_ENGINE_ARGS[name]}"
        for name in args
        if name in OWNED_ENGINE_ARGS
    ]:
        raise ConfigError("; ".join(refused))
