"""What the processes of `bench replay` say to each other, and the report that comes out. Fields only."""

from __future__ import annotations

import msgspec

from r3async.tools.bench.replay_stats import Comparison, StepTime


class RandomModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Qwen3-MoE of random weights: matrices normal with standard deviation `weight_std`, the routers' with `gate_std`,
    norms 1."""

    layers: int = 16
    experts: int = 64
    top_k: int = 8
    gate_std: float = 0.1
    weight_std: float = 0.08
    hidden_size: int = 128
    expert_hidden_size: int = 64
    seed: int = 0


class RolloutJob(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`model`: the directory to sample from; made there first if `random` says of what.

    `samples` random prompts of `prompt_tokens` tokens are continued by `new_tokens` tokens each at temperature 1. With
    `episodes` (a run's configuration file), episodes of that run's environment are played instead, as many as `samples`.
    """

    model: str
    random: RandomModel | None = None
    episodes: str = ""
    samples: int = 48
    prompt_tokens: int = 32
    new_tokens: int = 160
    dtype: str = "bfloat16"
    seed: int = 0
    concurrency: int = 64


class Rollouts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What was sampled, and from what: `gate_std` is measured, over all router weights of the model.

    Bytes are per token of the samples, prompts included, as encoded for the wire.
    """

    tokens: int
    sampled_tokens: int
    seconds: float
    gate_std: float
    layers: int
    experts: int
    top_k: int
    route_bytes_per_token: float
    wire_bytes_per_token: float
    wire_bytes_per_token_without_routes: float


class LearnerJob(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`dtypes`: compare the learner with the engine in these. `step_dtypes`: time whole steps in these, `pairs` pairs, with
    the first `step_samples` samples."""

    model: str
    seed: int = 0
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    step_dtypes: tuple[str, ...] = ()
    pairs: int = 0
    step_samples: int = 24
    max_tokens_per_micro_batch: int = 4096


class LearnerDone(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """By the learner's dtype."""

    comparisons: dict[str, Comparison]
    steps: dict[str, StepTime]


class Case(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One model. `varied`: what is not as in the headline model, or empty. `learners`: by the learner's dtype."""

    label: str
    varied: str
    rollout_job: RolloutJob
    learner_job: LearnerJob
    rollouts: Rollouts
    learners: dict[str, Comparison]


class Summary(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The headline model over all seeds: means, but for `max_abs_*` the largest. `_without`: own routing, `_with`: replay.

    `kl_ratio`: of the means; `kl_ratio_by_seed`, `max_abs_ratio_by_seed`: own / replay within each seed.
    """

    kl_without: float
    kl_with: float
    kl_ratio: float
    kl_ratio_by_seed: list[float]
    mean_abs_without: float
    mean_abs_with: float
    p99_abs_without: float
    p99_abs_with: float
    max_abs_without: float
    max_abs_with: float
    max_abs_ratio: float
    max_abs_ratio_by_seed: list[float]
    beyond_2x_without: float
    beyond_2x_with: float
    agreement_without: float
    agreement_with: float
    grad_error_without: float
    grad_error_with: float
    grad_error_own_without: float
    grad_error_own_with: float


class Branches(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Turns that branch off, after an update, from turns of older weights; the learner has the engine's new weights exactly.

    `drift`: KL(old ‖ new), k3, of the first turns. `k3_*`, `max_abs_*`: of the branches' sampled tokens, with the routes of
    their own call, and with those that the first turn recorded of the common prefix. `moved_routes`: share of a branch's
    recorded (position, MoE layer) in which the two name other experts.
    """

    dtype: str
    branch_tokens: int
    drift: float
    k3_own: float
    k3_inherited: float
    max_abs_own: float
    max_abs_inherited: float
    moved_routes: float


class Report(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`bench replay --json`. The headline figures come first: engine and learner both in bfloat16, `step_ratio` in CPU
    time of the bfloat16 learner. 0 where something was not measured (`--pairs 0`)."""

    benchmark: str = "replay"
    step_ratio: float
    step_ratio_wall: float
    route_bytes_per_token: float
    wire_bytes_per_token: float
    wire_bytes_per_token_without_routes: float
    kl_without: float
    kl_with: float
    kl_ratio: float
    max_abs_ratio: float
    summary: dict[str, Summary]
    steps: dict[str, StepTime]
    headline: list[Case]
    table: list[Case]
    models: list[Case]
    machine: dict[str, str]
    seconds: float
    branches: Branches | None = None
    """None in reports of older releases."""
