"""The teacher of on-policy distillation, which scores, token by token, what the learner's
engines sampled.

On samples of the learner itself, the mean of `(log learner - log teacher) grad log learner` is the
gradient of KL(learner || teacher) at each token (MiniLLM, arXiv 2306.08543, eq. 3, with the reward
of the token alone; on-policy: arXiv 2306.13649). So `coef (log teacher - log rollout)` is added to
the token's advantage. It is trained with the same policy loss, trust region and corrections as
rewards, and tokens that are stale or clipped are treated in the same way.

The teacher is a frozen model that the learner's ranks hold beside their own, with the same backend
and the same sharding, or one that is served elsewhere (`served_teacher`). It uses its own routers'
choice. One that the ranks hold scores at the sample's temperature and over the sample's support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from r3async.config import Config, DistillationConfig
from r3async.config.learner import LoraConfig, RoutingConfig
from r3async.learner import build_learner
from r3async.learner.results import LearnerError
from r3async.learner.served_teacher import ServedTeacher
from r3async.untrusted import decode_json_object

if TYPE_CHECKING:
    from r3async.learner.micro_batches import MicroBatch
    from r3async.learner.rank_group import RankGroup

TOKENIZER_FILE = "tokenizer.json"


class Teacher(Protocol):
    """What scores the tokens of samples: a `LearnerBackend`, or `ServedTeacher`."""

    def logprobs(
        self, micro_batches: Sequence[MicroBatch], *, replay: bool, trained_only: bool
    ) -> list[np.ndarray]:
        """Return the log-probs of the tokens of each micro-batch, float32 `[T]`. Collective."""
        ...


def load_teacher(config: Config, model_path: Path, ranks: RankGroup) -> Teacher | None:
    """Return the teacher of a learner of `model_path`, or None if none is configured.

    Collective. Raises `LearnerError` if the teacher's tokens are not the learner's, if the backend
    does not support it, or if its server does not answer.
    """
    settings = config.algorithm.distillation
    if not settings.teacher:
        return None
    if settings.is_served:
        # The other ranks wait for its answers.
        served = ServedTeacher(settings.teacher, ranks, config.supervise.limits.collective / 2)
        served.check_tokens(model_path)
        return served
    check_same_vocabulary(model_path, Path(settings.teacher))
    alone = msgspec.structs.replace(
        config.algorithm, reference_kl=type(config.algorithm.reference_kl)()
    )
    plain = msgspec.structs.replace(
        config,
        algorithm=alone,
        routing=RoutingConfig(replay="off"),
        learner=msgspec.structs.replace(config.learner, lora=LoraConfig()),
    )
    return build_learner(plain, Path(settings.teacher), frozen=True)


def check_same_vocabulary(model: Path, teacher: Path) -> None:
    """Raise `LearnerError` if a token id stands for different text in the two models."""
    try:
        if _read_vocabulary(model) == _read_vocabulary(teacher):
            return
    except (OSError, ValueError) as error:
        raise LearnerError(f"algorithm.distillation.teacher = {str(teacher)!r}: {error}") from error
    raise LearnerError(
        f"algorithm.distillation.teacher = {str(teacher)!r} has other tokens than {str(model)!r}: "
        "it can judge only tokens of its own tokenizer"
    )


def _read_vocabulary(directory: Path) -> Any:
    data = decode_json_object((directory / TOKENIZER_FILE).read_bytes())
    added = {token["content"]: token["id"] for token in data.get("added_tokens") or []}
    return (data.get("model") or {}).get("vocab"), added


def add_teacher_advantages(
    teacher: Teacher,
    micro_batches: Sequence[MicroBatch],
    settings: DistillationConfig,
    ranks: RankGroup,
) -> tuple[list[MicroBatch], dict[str, float]]:
    """Return the micro-batches with the teacher's term in their column `advantages`, and
    figures. Collective."""
    judged = []
    sums = np.zeros(2)
    for m, said in zip(
        micro_batches, teacher.logprobs(micro_batches, replay=False, trained_only=True), strict=True
    ):
        rollout = m.table["rollout_logprobs"]
        trained = m.table["loss_mask"] & np.isfinite(rollout)
        better = np.where(trained, said - rollout, 0.0).astype(np.float32)
        rewarded = m.table["advantages"] if settings.rewards else np.float32(0.0)
        advantages = (rewarded + settings.coef * better).astype(np.float32)
        judged.append(replace(m, table=m.table.with_columns(advantages=advantages)))
        sums += -better.sum(dtype=np.float64), np.count_nonzero(trained)
    total, tokens = ranks.all_reduce(sums * ranks.is_batch_reporter, "sum")
    return judged, {"distillation/reverse_kl": float(total / max(tokens, 1.0))}
