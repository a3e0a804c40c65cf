"""docs/same-name.md: every number of its tables is computed by our code, and by the other library where it is installed."""

import collections
import dataclasses
import importlib.metadata
import math
import re
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from r3async.config import OverlongPenaltyConfig
from r3async.config.algorithm import ReferenceKLConfig
from r3async.config.schedule import ScheduleConfig
from r3async.learner.advantages import compute_baseline_and_scale, compute_overlong_penalty, standardize_advantages
from r3async.learner.loss import TokenBatch, compute_loss, compute_loss_weights, compute_reference_kl
from tests.helpers.algorithms import algorithm

PAGE = Path(__file__).parents[2] / "docs" / "same-name.md"
DISTRIBUTIONS = {
    "TRL": "trl",
    "verl": "verl",
    "SkyRL": "skyrl",
    "AReaL": "areal",
    "miles": "miles-rl",
    "Molt": "molt-rl",
}
"""Packages of the libraries, by their names on the page."""


# -- one answer under the three policies -----------------------------------------------------------


@dataclasses.dataclass
class Answer:
    """Log-probs of one answer's T tokens, float32 `[1, T]`."""

    rollout: torch.Tensor
    old: torch.Tensor
    learner: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        return torch.ones_like(self.rollout)


def answer(*, learner_to_old: tuple[float, ...], old_to_rollout: tuple[float, ...] | None = None) -> Answer:
    """Return an answer of tokens with these ratios, each of probability 0.01 under the rollout policy."""
    rollout = torch.full((1, len(learner_to_old)), 0.01).log()
    old = rollout if old_to_rollout is None else rollout + torch.tensor([old_to_rollout]).log()
    return Answer(rollout, old, old + torch.tensor([learner_to_old]).log())


def measure_pull(logprobs: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """Return how a loss pulls each token: its gradient by the log-probs, times -1."""
    x = logprobs.clone().requires_grad_(True)
    compute(x).backward()
    return (-x.grad).flatten().tolist()


def our_pull(made: Answer, advantage: float = 1.0, **settings) -> list[float]:
    """Return the pull of our policy loss on each token, for a weight of 1."""
    return measure_pull(made.learner, lambda x: our_loss(made, x, advantage, **settings))


def our_loss(made: Answer, x: torch.Tensor, advantage: float, **settings) -> torch.Tensor:
    config = algorithm(**settings)
    tokens = made.rollout.shape[1]
    batch = TokenBatch(
        rollout_logprobs=made.rollout[0],
        advantages=torch.full((tokens,), advantage),
        weights=torch.ones(tokens),
        episode_index=torch.zeros(tokens, dtype=torch.int64),
        num_episodes=1,
        staleness=torch.zeros(tokens, dtype=torch.int32),
        old_logprobs=made.old[0],
    )
    loss, _ = compute_loss(batch, x[0], torch.zeros(tokens), config, rollout_kl_coef=0.0)
    return loss


def our_advantages(name: str, rewards: list[float], lengths: tuple[int, ...] = ()) -> list[float]:
    """Return the advantage of each answer of a group, of its first token."""
    baselines, scale = compute_baseline_and_scale(rewards, name)
    values = [scale * (reward - baseline) for reward, baseline in zip(rewards, baselines, strict=True)]
    if lengths:
        columns = [np.full(n, value) for n, value in zip(lengths, values, strict=True)]
        values = [float(a[0]) for a in standardize_advantages(columns, [np.ones(n, bool) for n in lengths])]
    return values


def our_weights(reduction: str, lengths: tuple[int, ...]) -> list[float]:
    """Return the weight of a token of each row, 0 of one without tokens; rows have the width of the longest."""
    masks = [np.arange(max(lengths)) < n for n in lengths]
    weights = compute_loss_weights(masks, range(len(lengths)), [0] * len(lengths), reduction, norm_length=10)
    return [float(row[0]) for row in weights]


def our_kl(reference: float, ratio: float = 1.0, **settings) -> tuple[float, float]:
    """Return value and gradient of the term of one token whose log-prob under the reference is higher by `reference`."""
    x = torch.tensor([-3.0], requires_grad=True)
    config = ReferenceKLConfig(coef=1.0, **settings)
    rollout = torch.tensor([-3.0 - math.log(ratio)])
    value = compute_reference_kl(x, rollout, torch.tensor([-3.0 + reference]), config)
    value.sum().backward()
    return float(value), float(x.grad)


def masks_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(max(lengths)).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)).float()


def kl_of(function: Callable[..., torch.Tensor], reference: float, *arguments) -> tuple[float, float]:
    """Return value and gradient of another library's estimator, called with the log-probs of policy and reference."""
    x = torch.tensor([[-3.0]], requires_grad=True)
    value = function(x, torch.tensor([[-3.0 + reference]]), *arguments)
    value.sum().backward()
    return float(value), float(x.grad)


# -- verl ------------------------------------------------------------------------------------------


def verl_advantages(name: str, rewards: list[float], lengths: tuple[int, ...] = ()) -> list[float]:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    mask = masks_of(lengths or (1,) * len(rewards))
    scores = torch.zeros_like(mask)
    scores[torch.arange(len(rewards)), mask.sum(1).long() - 1] = torch.tensor(rewards)
    index = np.zeros(len(rewards), int)
    values = get_adv_estimator_fn(name)(token_level_rewards=scores, response_mask=mask, index=index)[0]
    return values[:, 0].tolist()


def verl_loss(mode: str, learner, old, advantages, mask, *, agg: str = "token-mean", weights=None, **settings):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config.actor import ActorConfig

    info = settings.pop("batch_info", {})
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False, **settings
    )
    config.global_batch_info.update(info)
    function = get_policy_loss_fn(mode)
    return function(old, learner, advantages, mask, loss_agg_mode=agg, config=config, rollout_is_weights=weights)[0]


def verl_pull(mode: str, made: Answer, advantage: float = 1.0, **settings) -> list[float]:
    advantages = torch.full_like(made.rollout, advantage)
    tokens = made.rollout.numel()
    return measure_pull(
        made.learner, lambda x: tokens * verl_loss(mode, x, made.old, advantages, made.mask, **settings)
    )


def verl_row_weights(mode: str, lengths: tuple[int, ...], **settings) -> list[float]:
    mask = masks_of(lengths)
    logprobs = torch.full_like(mask, -1.0)
    x = logprobs.clone().requires_grad_(True)
    verl_loss(mode, x, logprobs, torch.ones_like(mask), mask, **settings).backward()
    return (-x.grad[:, 0]).tolist()


def verl_keeps(option: str, threshold: str, made: Answer) -> float:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    mask, _ = compute_rollout_rejection_mask(made.old - made.rollout, made.mask, option, threshold)
    return float(mask.mean())


def verl_token_weight(made: Answer, threshold: str) -> list[float]:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    weights = compute_rollout_correction_weights(made.old - made.rollout, made.mask, "token", threshold)[0]
    return verl_pull("vanilla", made, weights=weights)


def verl_k3(reference: float) -> tuple[float, float]:
    from verl.trainer.ppo.core_algos import kl_penalty

    return kl_of(kl_penalty, reference, "low_var_kl")


# -- SkyRL -----------------------------------------------------------------------------------------


def skyrl_advantages(name: str, rewards: list[float]) -> list[float]:
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry

    scores = torch.tensor(rewards).unsqueeze(1)
    index = np.zeros(len(rewards), int)
    function = AdvantageEstimatorRegistry._functions[name]
    values = function(
        token_level_rewards=scores, response_mask=torch.ones_like(scores), index=index, gamma=1.0, grpo_norm_by_std=True
    )
    return values[0][:, 0].tolist()


def skyrl_pull(kind: str, made: Answer, advantage: float = 1.0) -> list[float]:
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.train.config import AlgorithmConfig

    function = PolicyLossRegistry._functions[kind]
    advantages = torch.full_like(made.rollout, advantage)
    config = AlgorithmConfig(policy_loss_type=kind)
    return measure_pull(made.learner, lambda x: function(x, made.old, advantages, config, made.mask, made.rollout)[0])


def skyrl_row_weights(reduction: str, lengths: tuple[int, ...], micro_batch: int) -> list[float]:
    from skyrl.backends.skyrl_train.utils.ppo_utils import apply_loss_reduction_to_advantages_minibatch

    mask = masks_of(lengths)
    return apply_loss_reduction_to_advantages_minibatch(torch.ones_like(mask), mask, reduction, micro_batch, 10)[
        :, 0
    ].tolist()


def skyrl_k3(reference: float) -> tuple[float, float]:
    from skyrl.backends.skyrl_train.utils.ppo_utils import compute_approx_kl

    return kl_of(compute_approx_kl, reference)


# -- AReaL, miles, Molt ----------------------------------------------------------------------------


def areal_advantages(rewards: list[float]) -> list[float]:
    from areal.api.cli_args import NormConfig
    from areal.utils.data import Normalization

    config = NormConfig(mean_level="group", std_level=None, group_size=len(rewards), mean_leave1out=True)
    return Normalization(config)(torch.tensor(rewards)).tolist()


def areal_pull(made: Answer) -> list[float]:
    from areal.api.cli_args import RejectionSamplingConfig
    from areal.utils.functional import ppo_actor_loss_fn

    advantages = torch.ones_like(made.rollout)
    config = RejectionSamplingConfig()
    return measure_pull(
        made.learner,
        lambda x: ppo_actor_loss_fn(
            x, made.old, made.rollout, advantages, 0.2, made.mask.bool(), rejection_sampling=config
        )[0],
    )


def areal_overlong(length: int) -> float:
    from areal.utils.functional.functional import reward_overlong_penalty

    data = {"rewards": torch.zeros(1), "input_ids": torch.zeros(1, length), "loss_mask": torch.ones(1, length)}
    return float(reward_overlong_penalty(data, 8, 1.0, 20)["rewards"][0])


def areal_k3(reference: float) -> tuple[float, float]:
    from areal.utils.data import KLEstimator

    return kl_of(KLEstimator("k3"), reference)


def miles_kl(kind: str, reference: float) -> tuple[float, float]:
    from miles.utils import ppo_utils

    function = ppo_utils.compute_approx_kl
    return kl_of(getattr(function, "_torchdynamo_orig_callable", function), reference, kind)


def molt_advantages(name: str, rewards: list[float]) -> list[float]:
    from molt.trainer.algorithm.advantage import AdvantageContext, get_advantage_estimator

    masks = torch.ones(len(rewards), 1)
    context = AdvantageContext(
        torch.arange(len(rewards)), [len(rewards)], [masks], 0.0, 1.0, 1.0, [torch.zeros_like(masks)]
    )
    values, _ = get_advantage_estimator(name)(torch.tensor(rewards), [list(range(len(rewards)))], context)
    return values[0][:, 0].tolist()


def molt_pull(made: Answer, **settings) -> list[float]:
    from molt.models.loss import PolicyLoss

    loss = PolicyLoss(**settings)
    advantages = torch.ones_like(made.rollout)
    return measure_pull(
        made.learner, lambda x: loss(x, made.old, advantages, made.mask, rollout_log_probs=made.rollout)[0]
    )


def molt_k3(reference: float) -> tuple[float, float]:
    from molt.models.utils import compute_approx_kl

    return kl_of(compute_approx_kl, reference, "k3")


# -- TRL -------------------------------------------------------------------------------------------


def trl_config(**settings):
    from trl import GRPOConfig

    return GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **settings)


def trl_loss(learner, old, advantages, mask, reference=None, *, loss_type="dapo", **settings):
    """Return `GRPOTrainer`'s loss of a generation that is one micro-batch."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    config = trl_config(loss_type=loss_type, beta=0.0 if reference is None else 1.0, **settings)
    trainer = types.SimpleNamespace(
        args=types.SimpleNamespace(
            delta=None,
            use_bias_correction_kl=config.use_bias_correction_kl,
            sapo_temperature_pos=config.sapo_temperature_pos,
            sapo_temperature_neg=config.sapo_temperature_neg,
            steps_per_generation=1,
        ),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        loss_type=loss_type,
        beta=config.beta,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=10,
        current_gradient_accumulation_steps=1,
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction=None: x),
        model=types.SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (learner, torch.zeros_like(mask), None),
    )
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def trl_pull(made: Answer, advantage: float = 1.0, **settings) -> list[float]:
    return measure_pull(made.learner, lambda x: trl_loss(x, made.old, torch.tensor([advantage]), made.mask, **settings))


def trl_row_weights(lengths: tuple[int, ...], loss_type: str) -> list[float]:
    mask = masks_of(lengths)
    logprobs = torch.full_like(mask, -1.0)
    x = logprobs.clone().requires_grad_(True)
    trl_loss(x, logprobs, torch.ones(len(lengths)), mask, loss_type=loss_type).backward()
    return (-x.grad[:, 0]).tolist()


def trl_kl(reference: float, ratio: float) -> tuple[float, float]:
    x = torch.tensor([[-3.0]], requires_grad=True)
    old = torch.tensor([[-3.0 - math.log(ratio)]])
    value = trl_loss(x, old, torch.zeros(1), torch.ones(1, 1), torch.tensor([[-3.0 + reference]]))
    value.backward()
    return float(value), float(x.grad)


def trl_updates(accumulation: int) -> tuple[float, float]:
    """Return `steps_per_generation` with so much accumulation, and the updates that a generation makes."""
    config = trl_config(gradient_accumulation_steps=accumulation)
    return config.steps_per_generation, config.steps_per_generation / config.gradient_accumulation_steps


# -- the rows --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """How a row's numbers are computed: `ours` by this code, `theirs` by that of each library that the row names."""

    ours: Callable[[], object]
    theirs: dict[str, Callable[[], object]]


SMALL = [0.001, 0.002, 0.003, 0.004]
SEVEN = [0.1] * 7
FAR = answer(learner_to_old=(10.0,))
TWO = answer(learner_to_old=(10.0, 0.5))
BAND = answer(learner_to_old=(1.0,), old_to_rollout=(1.5,))
TENFOLD = answer(learner_to_old=(1.0,), old_to_rollout=(10.0,))
DOUBLE = answer(learner_to_old=(2.0,))
BOTH = {"anchor": "recomputed", "policy_loss": "ppo"}


def our_kept(low: float, high: float) -> float:
    """Return the share of `BAND`'s tokens that the geometric bounds keep."""
    bounds = {"numerator": "recomputed", "geometric_low": low, "geometric_high": high}
    return float(our_pull(BAND, correction=bounds, **BOTH)[0] != 0)


ROWS = {
    "`grpo` of small rewards": Row(
        lambda: our_advantages("grpo", SMALL)[-1],
        {"verl": lambda: verl_advantages("grpo", SMALL)[-1], "SkyRL": lambda: skyrl_advantages("grpo", SMALL)[-1]},
    ),
    "`grpo` of equal rewards": Row(
        lambda: our_advantages("grpo", SEVEN)[0], {"verl": lambda: verl_advantages("grpo", SEVEN)[0]}
    ),
    "`grpo` of equal rewards, Molt": Row(
        lambda: our_advantages("grpo", SEVEN)[0], {"Molt": lambda: molt_advantages("grpo", SEVEN)[0]}
    ),
    "`rloo` of one answer": Row(
        lambda: our_advantages("rloo", [0.7])[0],
        {
            "verl": lambda: verl_advantages("rloo", [0.7])[0],
            "Molt": lambda: molt_advantages("rloo", [0.7])[0],
            "AReaL": lambda: areal_advantages([0.7])[0],
        },
    ),
    "`reinforce_plus_plus_baseline`": Row(
        lambda: our_advantages("reinforce_pp_baseline", [0.0, 1.0], (1, 3))[0],
        {"verl": lambda: verl_advantages("reinforce_plus_plus_baseline", [0.0, 1.0], (1, 3))[0]},
    ),
    "`overlong_penalty_factor`": Row(
        lambda: compute_overlong_penalty(24, 20, OverlongPenaltyConfig(buffer=8)),
        {"AReaL": lambda: areal_overlong(24)},
    ),
    "`vanilla`": Row(lambda: our_pull(FAR, -1.0, **BOTH)[0], {"verl": lambda: verl_pull("vanilla", FAR, -1.0)[0]}),
    "`cispo`, `epsilon_high=5`": Row(
        lambda: our_pull(FAR, anchor="recomputed", policy_loss="cispo", cispo={"clip_high": 5.0})[0],
        {"TRL": lambda: trl_pull(FAR, loss_type="cispo", epsilon_high=5.0)[0]},
    ),
    "`cispo`, `clip_eps_high=5`": Row(
        lambda: our_pull(FAR, anchor="recomputed", policy_loss="cispo", cispo={"clip_high": 5.0})[0],
        {"Molt": lambda: molt_pull(FAR, loss_mode="cispo", clip_eps_high=5.0)[0]},
    ),
    "`cispo` by default": Row(
        lambda: our_pull(TWO, anchor="recomputed", policy_loss="cispo"),
        {"verl": lambda: verl_pull("cispo", TWO)},
    ),
    "`dppo_tv`": Row(
        lambda: our_pull(FAR, anchor="recomputed", policy_loss="dppo")[0],
        {"verl": lambda: verl_pull("dppo_tv", FAR)[0]},
    ),
    '`rollout_rs="seq_mean_k1"`': Row(
        lambda: our_kept(0.8, 1.6), {"verl": lambda: verl_keeps("seq_mean_k1", "0.8_1.6", BAND)}
    ),
    '`rollout_is_threshold="0.5_2.0"`': Row(
        lambda: our_pull(BAND, correction={"numerator": "recomputed", "icepop_low": 0.5, "icepop_high": 2.0}, **BOTH)[
            0
        ],
        {"verl": lambda: verl_token_weight(BAND, "0.5_2.0")[0]},
    ),
    '`policy_loss_type="rollout_is"`': Row(
        lambda: our_pull(DOUBLE, policy_loss="truncated_pg")[0],
        {"SkyRL": lambda: skyrl_pull("rollout_is", DOUBLE)[0]},
    ),
    "`rejection_sampling`": Row(
        lambda: our_pull(TENFOLD, policy_loss="tis", tis={"cap": 5.0})[0], {"AReaL": lambda: areal_pull(TENFOLD)[0]}
    ),
    "`low_var_kl`, `k3`": Row(
        lambda: our_kl(3.0, weighted=False),
        {
            "verl": lambda: verl_k3(3.0),
            "SkyRL": lambda: skyrl_k3(3.0),
            "AReaL": lambda: areal_k3(3.0),
            "Molt": lambda: molt_k3(3.0),
            "miles": lambda: miles_kl("low_var_kl", 3.0),
        },
    ),
    "`kl_loss_type` by default": Row(lambda: our_kl(1.0, weighted=False)[1], {"miles": lambda: miles_kl("k1", 1.0)[1]}),
    "`beta`": Row(lambda: our_kl(1.0, 10.0), {"TRL": lambda: trl_kl(1.0, 10.0)}),
    "`sapo` with a token mean": Row(
        lambda: our_weights("token_mean", (1, 3))[0],
        {"verl": lambda: verl_row_weights("sapo", (1, 3))[0], "TRL": lambda: trl_row_weights((1, 3), "sapo")[0]},
    ),
    "`seq-mean-token-sum-norm`": Row(
        lambda: our_weights("sequence_mean_token_sum_norm", (1, 3))[0],
        {"verl": lambda: verl_row_weights("vanilla", (1, 3), agg="seq-mean-token-sum-norm")[0]},
    ),
    "`token_mean_legacy`": Row(
        lambda: our_weights("token_mean", (1, 3))[0],
        {"SkyRL": lambda: skyrl_row_weights("token_mean_legacy", (1, 3), 1)[0]},
    ),
    "`sequence_mean` beside an empty row": Row(
        lambda: our_weights("sequence_mean", (2, 2, 0))[0],
        {
            "SkyRL": lambda: skyrl_row_weights("sequence_mean", (2, 2, 0), 3)[0],
            "verl": lambda: verl_row_weights(
                "vanilla", (2, 2, 0), agg="seq-mean-token-mean", batch_info={"global_batch_size": 3}
            )[0],
        },
    ),
    "`steps_per_generation`": Row(
        lambda: (4, ScheduleConfig(minibatches_per_step=4, prompts_per_step=4).updates_per_step),
        {"TRL": lambda: trl_updates(4)},
    ),
}
"""By the first cell of the row."""


def read_rows() -> dict[str, list[str]]:
    """Return the rows of the page's tables, by their first cells."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 6:
            found[cells[0]] = cells
    return found


def spell(values: object) -> str:
    """Return numbers as the page has them: four digits, and 0 for what is below rounding."""
    numbers = values if isinstance(values, list | tuple) else [values]
    return ", ".join("0" if abs(number) < 1e-9 else f"{number:.4g}" for number in numbers)


PEERS = [(name, library) for name, row in ROWS.items() for library in row.theirs]


def test_the_page_has_the_rows_that_are_computed_each_with_versions():
    rows = read_rows()
    assert list(rows) == list(ROWS)
    for name, cells in rows.items():
        assert re.sub(r" [\d.]+", "", cells[1]).split(", ") == list(ROWS[name].theirs), name
        assert len(re.findall(r" \d+\.\d+\.\d+", cells[1])) == len(ROWS[name].theirs), name


@pytest.mark.parametrize("name", ROWS)
def test_our_numbers_are_those_of_our_code(name):
    assert read_rows()[name][4] == spell(ROWS[name].ours())


@pytest.mark.long
@pytest.mark.parametrize(("name", "library"), PEERS)
def test_their_numbers_are_those_of_their_code(name, library):
    cells = read_rows()[name]
    version = re.search(rf"{library} ([\d.]+)", cells[1])[1]
    try:
        installed = importlib.metadata.version(DISTRIBUTIONS[library])
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed != version:
        pytest.skip(f"needs {library} {version}, installed: {installed}")
    assert cells[3] == spell(ROWS[name].theirs[library]())
