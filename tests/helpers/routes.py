"""Routes of one small episode as engine and learner would write them."""

from pathlib import Path

import numpy as np

from r3async.record.routes import EngineCall, TrainedRoutes

LAYERS, TOP_K, EXPERTS = 3, 2, 8
ID = "g00000000e0000"


def experts(seed: int, tokens: int) -> np.ndarray:
    """Return routes, uint8 `[tokens, LAYERS, TOP_K]`, distinct in every row."""
    scores = np.random.default_rng(seed).random((tokens, LAYERS, EXPERTS))
    return scores.argsort(axis=-1)[..., :TOP_K].astype(np.uint8)


def call(turn: int, prompt, sampled, rows: np.ndarray, *, start: int = 0, logprob: float = -1.0, at: float = 0.0):
    return EngineCall(
        trajectory_id=ID,
        turn=turn,
        time=at or float(turn),
        routes_from=start,
        prompt_ids=np.asarray(prompt, np.int32),
        token_ids=np.asarray(sampled, np.int32),
        logprobs=np.full(len(sampled), logprob, np.float32),
        rows=rows,
        policy_version=np.zeros(len(sampled), np.int32),
    )


PROMPT, ANSWER, BETWEEN, SECOND = [1, 2, 3], [10, 11, 12], [4, 5], [13, 14]
TOKENS = [*PROMPT, *ANSWER, *BETWEEN, *SECOND]  # position 9 is never fed


def damage_last_record(path: Path) -> None:
    """Change a byte of the last record of a file of routes."""
    data = bytearray(path.read_bytes())
    data[-9] ^= 255  # what follows may be padding
    path.write_bytes(data)


def episode(logprob: float = -1.0) -> tuple[TrainedRoutes, list[EngineCall]]:
    """Return two turns, and what a learner that replays faithfully did. The second call returns what the first left
    out."""
    rows = experts(0, 9)
    calls = [
        call(0, PROMPT, ANSWER, rows[:5], logprob=logprob),
        call(1, TOKENS[:8], SECOND, rows[5:], start=5, logprob=logprob),
    ]
    mask = np.asarray([t >= 10 for t in TOKENS])
    own = experts(1, 10)
    used = own.copy()
    used[:9] = rows
    trained = TrainedRoutes(
        step=1,
        sample_id=f"{ID}s0",
        trajectory_id=ID,
        token_ids=np.asarray(TOKENS, np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(logprob), np.float32(0)),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turn=np.where(mask, np.arange(10) > 6, -1).astype(np.int32),
        rewards=np.where(np.arange(10) == 9, 0.5, 0).astype(np.float32),
        own=own,
        used=used,
    )
    return trained, calls
