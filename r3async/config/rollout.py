"""Configuration sections for rollouts: rows and rewards, environments, engines, sampling and evaluations."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from r3async.config.section import (
    MIX_ENV,
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
    did_you_mean,
    reveal_secrets,
)

# Sections for model, environment, episodes, generators and the endpoint.

INIT_MAX_POSITIONS = 32_768
"""Positions of a model that is made at the start. They cost no weights: positions are rotary."""


class InitConfig(Section):
    """A small random Qwen3-MoE, created and warmed up on the environment's oracle when `model.path` is not given."""

    seed: Seed = 0
    """Seed of the random weights and the warm-up, apart from the run's `seed`, so that runs with other seeds begin with
    the same model."""
    hidden_size: PositiveInt = 128
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    experts: PositiveInt = 8
    top_k: PositiveInt = 2
    expert_hidden_size: PositiveInt = 64
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary positions. Small values distinguish near positions more easily; large ones reach further."""
    warm_reward: SignedFloat = 0.4
    """Mean sampled reward at which supervised steps stop."""
    max_warm_steps: int = 2000

    def check_values(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"`top_k` = {self.top_k} is more than `experts` = {self.experts}")
        if self.hidden_size % self.heads:
            raise ValueError("`hidden_size` must divide by `heads`")

    def build_model_config(self, vocab_size: int) -> dict[str, Any]:
        """Build the model's `config.json`, as transformers has it, without the tokenizer's ids."""
        return {
            "model_type": "qwen3_moe",
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads if self.heads % 2 else self.heads // 2,
            "head_dim": self.hidden_size // self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_hidden_size,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "max_position_embeddings": INIT_MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": False,
        }


class ModelConfig(Section):
    path: str = ""
    """Directory of a Hugging Face model (safetensors + tokenizer with a chat template). Empty: one is created from
    `init`."""
    init: InitConfig = msgspec.field(default_factory=InitConfig)


class EnvConfig(Section):
    """The environment. For several, each with a weight, use `[[env]]`, see below."""

    name: str = "reverse-text"
    """Name of the environment: a built-in one; `module:Class` or `file.py:Class`; `dataset`, which `data=FILE` sets;
    or an adapter's: `reasoning-gym:TASK`, `gymnasium:ID`, `textarena:ID`, `verifiers:ID`, `openenv:URL`,
    `harbor:FOLDER`."""
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of the environment's constructor; a built-in one names them in its docstring."""
    workers: PositiveInt = 2
    """Processes in each generator that play blocking environments (plain `def reset` and `def step`)."""
    step_timeout: PositiveFloat = 30.0
    """Seconds that one call of a blocking environment may take; then its process is killed and replaced."""
    start_timeout: PositiveFloat = 120.0
    """Seconds that such a process may take to start and to import the environment."""
    variables: list[str] = msgspec.field(default_factory=list)
    """Environment variables of the generator that are passed to these processes and to the programs of `agent-command`,
    besides a few that every program needs (PATH, HOME, LANG, TMPDIR, PYTHON…)."""

    def check_values(self) -> None:
        self.args = _hide_secrets(self.name, self.args)
        if self.name == MIX_ENV:
            self.args = {label: _hide_entry_secrets(entry) for label, entry in self.args.items()}

    def reveal_args(self, setting: str = "env.args") -> dict[str, Any]:
        """Return `args` with their secrets revealed. Raises `ConfigError`."""
        return reveal_secrets(self.args, setting)


def _hide_secrets(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return `args` with the values of `args.environment` wrapped as secrets, and so those words that may be secrets
    in a command, or in the servers of `mcp:TASK`."""
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
    """Return a command with those words wrapped as secrets that a flag such as `--api-key` is given, behind it or in
    the same word. The other words show which agent it is."""
    flags = [_NAMES_A_SECRET.fullmatch(word) if isinstance(word, str) else None for word in words]
    behind = [False, *(flag is not None and flag[1] is None for flag in flags)]
    return [_wrap_secret(w) if after or (f and f[1]) else w for w, f, after in zip(words, flags, behind, strict=False)]


def _hide_server_secrets(server: Any) -> Any:
    """Return an MCP server's settings with secrets wrapped: headers that name no variable, the words of a command
    except its program and flags, and a URL with a user or a query."""
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
    """Turns after which an episode ends, even if the environment would continue."""
    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens sampled in one turn; fewer when little context is left."""
    max_prompt_tokens: PositiveInt = 3840
    """Maximum number of tokens of a turn's prompt, with the history in it. A longer first prompt is an error; a longer
    later one ends the episode."""
    max_total_tokens: PositiveInt = 4096
    """Maximum number of tokens of any turn's prompt and its answer together, and so of a sample."""
    rows: RowsMode = "auto"
    """Division of an episode into samples. `auto`: turns form one sample as long as each prompt extends what the model
    has seen; otherwise a new one begins. `merged`: a prompt that does not extend it is an error. `stepwise`: one sample
    a turn."""
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further variables of the chat template, for example `{ enable_thinking = false }`."""
    temperature: float = 1.0
    """Sampling temperature. Log-probs and the learner's loss are of the distribution after it."""
    top_p: Annotated[float, NumberRange(0, 1, excludes_low=True)] = 1.0
    """Sample among the most probable tokens that together have this probability. 1: among all."""
    top_k: int = 0
    """Sample among this many most probable tokens. 0: among all."""
    min_p: UnitFraction = 0.0
    """Sample among tokens that have at least this share of the probability of the most probable one. 0: among all."""
    keep_sampling_mask: bool = True
    """Record which tokens could be sampled with `top_p`, `top_k` or `min_p`, and normalise the learner's log-probs over
    the same ones. Off: every importance ratio is too low, which the trust region takes for drift."""
    stop: list[str] = msgspec.field(default_factory=list)
    """Strings that end an answer. They stay in it and are trained, since they were sampled. What the chat template adds
    to close the turn is not trained."""
    ignore_eos: bool = False
    """Continue sampling where the model ends its turn, until `max_new_tokens` or a `stop`."""
    timeout: PositiveFloat = 600.0
    """Seconds that one episode may take. Then its turns that have a reward are trained; without any it is tried
    again."""
    retries: int = 2
    """Times an episode is tried again after the environment failed; not again if your code raised twice at one place,
    unless a connection or a time-out caused it."""
    engine_retries: int = 2
    """Times in an episode that a call is repeated after the engine failed. The turns before it are kept; an episode
    that needs more has failed."""

    @property
    def truncates_sampling(self) -> bool:
        """True if sampling may exclude tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def needs_sampling_mask(self) -> bool:
        """True if the set of tokens that could be sampled is recorded with each sampled token."""
        return self.keep_sampling_mask and self.truncates_sampling

    def check_values(self) -> None:
        if self.max_prompt_tokens >= self.max_total_tokens:
            raise ValueError("`max_prompt_tokens` must be less than `max_total_tokens`, or nothing can be sampled")
        if not all(self.stop):
            raise ValueError("`stop` has an empty string, which would end every answer")


class GeneratorConfig(Section):
    count: PositiveInt = 1
    """Generators, each with an engine of its own. `r3async scale` changes it while the run trains."""
    concurrency: PositiveInt = 64
    """Maximum number of episodes that one generator plays at once."""
    concurrency_min: PositiveInt = 1
    """Minimum number of episodes that one generator plays at once. Between the two, the number follows the fill of the
    engine's KV cache. Set it to `concurrency` to keep the number fixed."""
    engine: Literal["vllm", "scripted"] = "vllm"
    """Rollout engine. `scripted`: random letters without a model, for rehearsing failures; with `weights.probe=false`
    or `learner.backend="scripted"`. Nothing is learnt."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the engine's weights and arithmetic."""
    threads: PositiveInt = 1
    """OpenMP threads of one engine on CPU. More than one is slower beside a learner on the same cores."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache of one engine on CPU, in GiB."""
    on_update: Literal["keep", "recompute", "drain"] = "keep"
    """Handling of running requests when new weights arrive. `keep`: they continue with the keys and values of the old
    weights. `recompute`: keys and values are computed again; tokens, log-probs and routes so far stay. `drain`: the
    weights wait for them, and new requests wait for the weights."""
    colocate: Literal["off", "share"] = "off"
    """Placement of engines on GPUs. `off`: GPUs of their own. `share`: those of the learner's ranks where there are too
    few for both; `engine_args.gpu_memory_utilization` is an engine's part of one."""
    max_restarts: int = 8
    """Times a generator is restarted before the run continues without it. Without the last one the run stops."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that a generator may take to load its engine."""
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments passed unchanged to vLLM's AsyncEngineArgs. Those are refused that r3async sets itself or relies on, and
    those whose effect on memory and log-probs is neither planned nor probed. The scripted engine knows `token_seconds`
    and `install_seconds`."""

    def check_values(self) -> None:
        if self.concurrency_min > self.concurrency:
            raise ValueError("`concurrency_min` must not be more than `concurrency`")


# -- the endpoint ------------------------------------------------------------------------------------------------


LOOPBACK_HOST = "127.0.0.1"


def is_loopback_host(host: str) -> bool:
    """Return whether only this machine can reach `host`. A name other than `localhost` counts as reachable by
    others.

    Accepts IPv6 with and without brackets, and IPv4-mapped addresses (`::ffff:127.0.0.1`).
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
    """Return `host` without the brackets of an IPv6 address, as sockets take it."""
    return host.removeprefix("[").removesuffix("]")


def bracket_ipv6(host: str) -> str:
    """Return `host` with the brackets that a URL puts around an IPv6 address."""
    return f"[{strip_brackets(host)}]" if ":" in host else host


class ServingConfig(Section):
    """The generators' endpoint for agents. An environment `agent:…` or `agent-command` always has its endpoint, for
    its own episodes; `enabled` opens it to agents that others start."""

    enabled: bool = False
    """Let anyone who has the token begin sessions. Address and token of each generator are in
    `runs/NAME/serving-*.json`."""
    host: str = "127.0.0.1"
    """Interface of the endpoint. Loopback unless set; any other needs a `token`."""
    port: Port = 0
    """Port of the endpoint. 0: a free one. A fixed number allows only one generator a host."""
    token: Secret = msgspec.field(default_factory=Secret)
    """Token for opening sessions. Empty: a random one for each generator. `$NAME`: the value of a variable of the
    generator. It is written to no file, so give it to a resumed run again, unless it is a `$NAME`."""
    model_name: str = "policy"
    """Name of the model in `/v1/models`. Requests may name any."""
    tool_parser: str = "auto"
    """Parser of tool calls. `auto`: by the form of the chat template. `builtin`: r3async's own, for the form of Hermes
    and Qwen. Otherwise vLLM's parser of that name, such as `llama3_json`."""
    max_body_bytes: PositiveInt = 4 * 2**20
    """Maximum size of one request in bytes."""
    max_messages: PositiveInt = 1024
    """Maximum number of messages, and of tools, in one request."""
    max_connections: PositiveInt = 512
    """Maximum number of connections to one generator's endpoint. A further one replaces the oldest that has shown no
    key; if all have, it is closed."""
    read_timeout: PositiveFloat = 30.0
    """Seconds that a connection may take for the head of a request, and for its body."""
    max_sessions: PositiveInt = 64
    """Maximum number of sessions open at once for agents that others start."""
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
_DTYPE_REASON = (
    "engines hold what the learner trains in `generator.dtype`: neither the plan nor the installation of weights knows of "
    "quantized ones"
)
_OFFLOAD_REASON = "new weights are installed on the device: raise `generator.engine_args.tensor_parallel_size`"
_TRANSFER_REASON = "keys, values and routes of older weights must end with them, and a store of others would keep them"
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
    "quantization": _DTYPE_REASON,
    "quantization_config": _DTYPE_REASON,
    "enable_lora": "every version replaces all weights of the model",
    "cpu_offload_gb": _OFFLOAD_REASON,
    "offload_backend": _OFFLOAD_REASON,
    "kv_offloading_size": _TRANSFER_REASON,
    "kv_transfer_config": _TRANSFER_REASON,
    "num_gpu_blocks_override": "set `generator.engine_args.kv_cache_memory_bytes`, which is planned",
    "enable_eplb": "weights are installed where the experts were at the start",
    "kv_sharing_fast_prefill": "log-probs of a prompt are needed, and it leaves them out",
    "decode_context_parallel_size": "routes are recorded by workers that have all tokens: set `tensor_parallel_size`",
    "prefill_context_parallel_size": "routes are recorded by workers that have all tokens: set `tensor_parallel_size`",
    "nnodes": "an engine's processes are on one host",
}
"""Arguments refused in `generator.engine_args`, each with the setting to use instead or the reason. The engine takes
what it sets itself from `declare_engine_args`, so it cannot set a key that is neither refused here nor named in
`DEFAULT_ENGINE_ARGS`."""

DEFAULT_ENGINE_ARGS = frozenset(
    {"enforce_eager", "use_tqdm_on_load", "kv_cache_memory_bytes", "block_size", "load_format"}
)
"""Arguments that r3async sets and `generator.engine_args` may replace."""

PLANNED_ENGINE_ARGS = frozenset(
    {"gpu_memory_utilization", "tensor_parallel_size", "max_num_batched_tokens", "kv_cache_dtype", *DEFAULT_ENGINE_ARGS}
)
"""Arguments whose memory is planned (`tools.memory`), and those of `DEFAULT_ENGINE_ARGS`."""

COMPUTING_ENGINE_ARGS = frozenset(
    """
    all2all_backend attention_backend attention_config compilation_config disable_cascade_attn disable_custom_all_reduce
    disable_sliding_window enable_expert_parallel enable_flashinfer_autotune gdn_prefill_backend hf_overrides
    ir_op_priority kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype kv_cache_dtype_skip_layers
    linear_backend mamba_backend mamba_cache_dtype mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm model_impl
    moe_backend optimization_level performance_mode sparse_indexer_topk_backend trust_remote_code use_replayssm
    """.split()  # noqa: SIM905
)
"""Arguments that change what the engine computes, or how. The learner does not know them: only the probe compares."""

NEUTRAL_ENGINE_ARGS = frozenset(
    """
    additional_config async_scheduling code_revision cudagraph_capture_sizes cudagraph_metrics
    disable_hybrid_kv_cache_manager distributed_timeout_seconds download_dir enable_chunked_prefill
    enable_ep_weight_filter enable_prefix_caching expert_placement_strategy fail_on_environ_validation hf_token
    ignore_patterns jit_monitor_mode kv_cache_metrics language_model_only limit_mm_per_prompt
    long_prefill_token_threshold mamba_block_size mamba_cache_mode max_cudagraph_capture_size max_logprobs
    max_num_scheduled_tokens max_parallel_loading_workers model_loader_extra_config numa_bind numa_bind_cpus
    numa_bind_nodes otlp_traces_endpoint prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo profiler_config pt_load_map_location revision safetensors_load_strategy
    safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_reserve_full_isl scheduling_policy
    shutdown_timeout skip_mm_profiling use_fp64_gumbel watermark
    """.split()  # noqa: SIM905
)
"""Arguments that schedule, load or observe, and change neither the planned memory nor what is computed."""

UNWANTED_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM's CPU build brings and text models do not need. They often do not fit its torch, and then vLLM does
not start. `make install` removes them on CPU."""

CACHE_DTYPE_BYTES = {"auto": 0, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of a key's or value's element by `kv_cache_dtype`; 0 stands for `generator.dtype`."""


def declare_engine_args(**values: Any) -> dict[str, Any]:
    """Return the arguments that the engine sets itself. Raises `KeyError` for one that is neither refused nor a
    default here."""
    for name in values:
        if name not in OWNED_ENGINE_ARGS and name not in DEFAULT_ENGINE_ARGS:
            raise KeyError(f"{name} is not in r3async.config.rollout")
    return values


def check_engine_args(args: Mapping[str, Any], probe: bool = True) -> None:
    """Raise `ConfigError` for a key of `generator.engine_args` that the user may not set.

    Args:
        probe: Whether log-probs of engine and learner are compared (`weights.probe`).
    """
    allowed = PLANNED_ENGINE_ARGS | COMPUTING_ENGINE_ARGS | NEUTRAL_ENGINE_ARGS
    refused = []
    for name in args:
        if name in OWNED_ENGINE_ARGS:
            refused.append(f"`generator.engine_args.{name}` cannot be set: {OWNED_ENGINE_ARGS[name]}")
        elif name not in allowed:
            hint = did_you_mean(name, allowed, "docs/weights.md lists those that can", cutoff=0.7)
            refused.append(
                f"`generator.engine_args.{name}` cannot be set: what it changes in memory, log-probs or routes is unknown; {hint}"
            )
        elif name in COMPUTING_ENGINE_ARGS and not probe:
            refused.append(
                f"`generator.engine_args.{name}` changes what an engine computes, and only the probe compares that with the "
                "learner: set weights.probe=true"
            )
    if (dtype := str(args.get("kv_cache_dtype", "auto"))) not in CACHE_DTYPE_BYTES:
        refused.append(
            f"`generator.engine_args.kv_cache_dtype` = {dtype!r}: its memory is not planned; these are: "
            f"{', '.join(CACHE_DTYPE_BYTES)}"
        )
    if refused:
        raise ConfigError("; ".join(refused))


# Sections for `data` and `reward`: the user's own rows, and the rewards of answers to them.


_WEIGHT_RANGE = NumberRange(-(10**9), 10**9)
PromptTemplate = str | list[dict[str, str]]


class RewardConfig(Section):
    """One of several rewards: `reward = [{ fn = "rewards:correct", weight = 1.0 }, …]`."""

    fn: str
    """Reward function, in the notation of `reward`."""
    weight: SignedFloat = 1.0
    name: str = ""
    """Name in the metrics, as `rewards/NAME/mean`. Empty: the name of the function."""


class DataConfig(Section):
    """Your own rows as tasks of one turn. `data=FILE` is short for `data.path=FILE`; `reward` is set beside `data`,
    at the top. Both become `env.name = "dataset"` and `env.args`, and appear so in a run's `config.toml`."""

    path: str = ""
    """A `.jsonl`, `.json`, `.csv` or `.parquet` file, a directory of such files or of `datasets.save_to_disk`, or the id
    of a dataset on the Hugging Face hub. A relative path starts where the run was started; in a TOML file, at that file.
    From Python also rows: a list of dicts, or a `datasets.Dataset`."""
    subset: str = ""
    """Subset of a dataset on the hub, such as `main`."""
    split: str = "train"
    """Split of a dataset on the hub, also as `train[:100]`. In a directory: the files whose names have it as a word
    (`gsm8k_train.jsonl`). Where no name has the word of any split, `train` is all files."""
    prompt: PromptTemplate = "prompt"
    """Column with a text or chat messages; or a template over columns, such as `"{question}"`, with dotted names for
    nested columns; or messages of such templates: `[{ role = "user", content = "{question}" }]`."""
    answer: str = ""
    """Column, or dotted name such as `extra_info.answer`. Empty: the first of `reward_model.ground_truth` (rows of
    verl), `answer`, `solution` and `ground_truth` that a row has."""
    system: str = ""
    """System message before every prompt."""
    reward: Annotated[str | list[str | dict[str, Any]], _WEIGHT_RANGE] = "exact"
    """Reward function: `exact`, `contains`, `number`, `math`, or your own as `module:function` or `file.py:function`;
    or a list of these or of tables `{ fn, weight, name }`, whose weighted sum is the reward."""
    eval: str | float = 0.0
    """Rows that are evaluated and never trained: a share below 1, a number of rows, a file, or another split of a
    directory or of the hub. 0: none."""
    limit: int = 0
    """Number of rows that are used, from the first on. 0: all."""
    part: Literal["train", "eval"] = "train"
    """Rows that this environment poses, the trained or the evaluated ones; set by evaluations."""
    digest: str = ""
    """Digest of the rows. It is recorded when a run starts, and compared when it resumes and on every host."""

    def check_values(self) -> None:
        if isinstance(self.eval, float | int) and self.eval >= 1 and self.eval != int(self.eval):
            raise ValueError(f"`eval` = {self.eval}: a share below 1, or a whole number of rows")


def parse_rewards(reward: str | list[str | dict[str, Any]]) -> list[RewardConfig]:
    """Return the rewards of the setting, each with its weight. Raises `ValueError`."""
    listed = [reward] if isinstance(reward, str) else reward
    out: list[RewardConfig] = []
    for at, item in enumerate(listed):
        try:
            given = {"fn": item} if isinstance(item, str) else item
            one = msgspec.convert(given, RewardConfig)
        except msgspec.ValidationError as error:
            raise ValueError(f"`reward[{at}]` = {item!r}: {error}; it takes fn, weight and name") from error
        out.append(msgspec.structs.replace(one, name=one.name or one.fn.rpartition(":")[2].rpartition(".")[2]))
    names = [one.name for one in out]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"`reward`: two are called {twice!r}; give each a `name` of its own")
    return out


# Several environments in one run: the entries of `[[env]]`.


class EnvEntryConfig(EnvConfig):
    """One of several environments: `[[env]]`, once for each. It takes the keys of `[env]`, or `data` and `reward`,
    and those below. In a run's `config.toml` they are `env.args.LABEL` of the environment `mix`, and so they are on
    the command line: `env.args.guess.weight=2`. An unset key has the value of `[episode]`, which is also its
    maximum."""

    weight: PositiveFloat = 1.0
    """Share of the groups, relative to the sum of all weights."""
    max_turns: PositiveInt | None = None
    max_new_tokens: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    timeout: PositiveFloat | None = None


EPISODE_LIMITS = ("max_turns", "max_new_tokens", "max_prompt_tokens", "max_total_tokens", "timeout")


class RunEnv(NamedTuple):
    """An environment of a run.

    Attributes:
        label: Its name in metrics; "" if it is the only one.
        env: Its section `[env]`.
        weight: Its share of the groups, relative to the sum of all weights.
        episode: The section `[episode]`, with this environment's own limits.
    """

    label: str
    env: EnvConfig
    weight: float
    episode: EpisodeConfig


def resolve_env(label: str, entry: EnvEntryConfig, episode: EpisodeConfig) -> RunEnv:
    """Return the environment of a mix's entry, with its own episode limits. Raises `ConfigError` that names the
    entry."""
    limits: dict[str, Any] = {name: value for name in EPISODE_LIMITS if (value := getattr(entry, name)) is not None}
    for name, value in limits.items():
        if value > (most := getattr(episode, name)):
            raise ConfigError(
                f"`env.args.{label}.{name}` = {value} is more than `episode.{name}` = {most}, which is the most that any "
                "environment of the run may have: raise that"
            )
    env = EnvConfig(**{name: getattr(entry, name) for name in EnvConfig.__struct_fields__})
    try:
        return RunEnv(label, env, entry.weight, msgspec.structs.replace(episode, **limits))
    except ValueError as error:
        raise ConfigError(f"[env.args.{label}] {error}") from error


# The section for evaluations: tasks, interval, sampling, and the metric of the best checkpoint.


Temperature = Annotated[float, NumberRange(0, 10**9)]


class EvaluationEnvConfig(EnvConfig):
    name: str = ""
    """Name of the environment, as `env.name`. Empty: see `[evaluation]`."""

    def check_values(self) -> None:
        super().check_values()
        if not self.name and self.args:
            raise ValueError("`args` without `name`: name the environment that they are for")


class EvaluationSetConfig(Section):
    """One of `evaluation.sets`. Unset keys have the values of `[evaluation]`."""

    env: EvaluationEnvConfig = msgspec.field(default_factory=lambda: EvaluationEnvConfig())
    """Environment of the set. An empty name: that of `[evaluation]`."""
    tasks: PositiveInt | None = None
    samples_per_task: PositiveInt | None = None
    temperature: Temperature | None = None
    pass_reward: SignedFloat | None = None
    seed: Seed | None = None


class EvaluationConfig(Section):
    """Episodes that are played during training, and are never trained."""

    every_steps: int = 0
    """Steps between two evaluations; one more follows the last step. 0: none."""
    at_start: bool = False
    """Evaluate before the first step too."""
    tasks: PositiveInt = 32
    """Number of tasks, or all of the environment's if it has fewer. Each is played `samples_per_task` times."""
    samples_per_task: PositiveInt = 1
    """Episodes of each task. With n of them the mean reward is avg@n, and pass@k is reported for k = 1, 2, 4, … n."""
    temperature: Temperature | None = None
    """Sampling temperature of the answers. 0: greedy. Unset: `episode.temperature`."""
    pass_reward: SignedFloat = 1.0
    """Reward at or above which an episode passes (pass@k)."""
    env: EvaluationEnvConfig = msgspec.field(default_factory=lambda: EvaluationEnvConfig())
    """Environment of the evaluation. An empty name: the one that is trained, with its arguments."""
    sets: dict[str, EvaluationSetConfig] = msgspec.field(default_factory=dict)
    """Several sets of tasks, or of answers to the same tasks: `[evaluation.sets.greedy]` with `temperature = 0` beside
    `[evaluation.sets.sampled]` with `samples_per_task = 8`. A set lists what differs from `[evaluation]`. Views show
    the first one first."""
    seed: Seed = 0
    """Seed of the tasks. Every evaluation uses the same ones, and training uses none of them."""
    timeout: PositiveFloat = 1800.0
    """Seconds after which an evaluation times out."""

    def check_values(self) -> None:
        for name in self.sets:
            if not name or not all(c.isalnum() or c in "-_." for c in name):
                raise ValueError(f"`sets`: {name!r} is no name: letters, digits, `-`, `_` and `.`")
        if not self.sets and self.temperature == 0 and self.samples_per_task > 1:
            raise ValueError(
                f"`temperature` = 0 is greedy, and {self.samples_per_task} greedy answers to a task are all the same: "
                "set `samples_per_task` = 1"
            )
        for name in self.sets:
            try:
                self.resolve_set(name)
            except ValueError as error:
                raise ValueError(f"`sets.{name}`: {error}") from error

    def resolve_sets(self) -> dict[str, EvaluationConfig]:
        """Return the sets by name, each as an evaluation without sets. If none is named, the evaluation itself is
        the only set, named ""."""
        return {name: self.resolve_set(name) for name in self.sets} or {"": self}

    def resolve_set(self, name: str) -> EvaluationConfig:
        """Return the set `name` as an evaluation, with everything that it leaves unset filled in."""
        own = self.sets[name]
        given = {field: value for field in own.__struct_fields__ if (value := getattr(own, field)) is not None}
        if not own.env.name:
            del given["env"]
        return msgspec.structs.replace(self, sets={}, **given)

    def check_keep_best(self, metric: str, steps_per_publication: int) -> None:
        """Raise `ValueError` if no checkpoint can be the best by `metric` (`checkpoint.keep_best`)."""
        if not metric:
            return
        if not self.every_steps:
            raise ValueError(f"`checkpoint.keep_best` = {metric!r} needs evaluations: set `evaluation.every_steps`")
        if self.every_steps % steps_per_publication:
            raise ValueError(
                f"`checkpoint.keep_best` needs a checkpoint of each evaluated step, and only every {steps_per_publication} steps "
                f"make a version (`schedule.steps_per_publication`): `evaluation.every_steps` = "
                f"{self.every_steps} must be a multiple of that"
            )
        figures = [
            f"{name}/{figure}" if name else figure
            for name, each in self.resolve_sets().items()
            for figure in ("reward_mean", *(f"pass@{k}" for k in list_pass_ks(each.samples_per_task)))
        ]
        if metric not in figures:
            raise ValueError(
                f"`checkpoint.keep_best` = {metric!r} is no figure of the evaluations: {', '.join(figures)}"
            )


def list_pass_ks(samples: int) -> list[int]:
    """Return the values of k for which pass@k is reported with `samples_per_task` episodes of each task: powers of two, and
    `samples_per_task`."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})
