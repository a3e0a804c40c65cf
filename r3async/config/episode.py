"""The configuration section `episode`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from r3async.config.section import NumberRange, PositiveFloat, PositiveInt, Section, UnitFraction

RowsMode = Literal["auto", "merged", "stepwise"]


class EpisodeConfig(Section):
    max_turns: PositiveInt = 16
    """Turns after which an episode ends."""
    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens sampled in one turn."""
    max_prompt_tokens: PositiveInt = 3840
    """Maximum number of tokens of a turn's prompt. A longer first prompt is an error; a longer
    later one ends the episode."""
    max_total_tokens: PositiveInt = 4096
    """Maximum number of tokens of a turn's prompt and answer together, and so of a sample."""
    rows: RowsMode = "auto"
    """How an episode becomes samples. `auto`: a new one where a prompt does not extend what the
    model has seen. `merged`: that is an error. `stepwise`: one sample a turn."""
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Extra variables for the chat template, such as `{ enable_thinking = false }`."""
    temperature: float = 1.0
    """Sampling temperature. Log-probs and the loss refer to the distribution after it."""
    top_p: Annotated[float, NumberRange(0, 1, excludes_low=True)] = 1.0
    """Sample from the most probable tokens with this total probability."""
    top_k: int = 0
    """Sample from this many most probable tokens. 0: from all."""
    min_p: UnitFraction = 0.0
    """Sample from tokens with at least this share of the top token's probability. 0: from all."""
    stop: list[str] = msgspec.field(default_factory=list)
    """Strings that end an answer. They are kept and trained."""
    ignore_eos: bool = False
    """Sample past the end of the turn, until `max_new_tokens` or a `stop`."""
    timeout: PositiveFloat = 600.0
    """Seconds that an episode may take. Then its rewarded turns are trained; without any it is
    tried again."""
    retries: int = 2
    """Times an episode is tried again after the environment failed."""

    @property
    def truncates_sampling(self) -> bool:
        """True if sampling may exclude tokens; then the set of tokens that could be sampled is
        recorded with each sampled token."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def check_values(self) -> None:
        if self.max_prompt_tokens >= self.max_total_tokens:
            raise ValueError(
                "`max_prompt_tokens` must be less than `max_total_tokens`, or "
                "nothing can be sampled"
            )
        if not all(self.stop):
            raise ValueError("`stop` has an empty string, which would end every answer")
