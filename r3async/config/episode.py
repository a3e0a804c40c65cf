"""The configuration section `episode`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from r3async.config.section import NumberRange, PositiveFloat, PositiveInt, Section, UnitFraction

RowsMode = Literal["auto", "merged", "stepwise"]


class EpisodeConfig(Section):
    max_turns: PositiveInt = 16
    """Turns after which an episode ends, even if the environment would continue."""
    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens sampled in one turn; fewer when little context is left."""
    max_prompt_tokens: PositiveInt = 3840
    """Maximum number of tokens of a turn's prompt, with the history in it. A longer first prompt is
    an error; a longer later one ends the episode."""
    max_total_tokens: PositiveInt = 4096
    """Maximum number of tokens of any turn's prompt and its answer together, and so of a sample."""
    rows: RowsMode = "auto"
    """Division of an episode into samples. `auto`: turns form one sample as long as each prompt
    extends what the model has seen; otherwise a new one begins. `merged`: a prompt that does not
    extend it is an error. `stepwise`: one sample a turn."""
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further variables of the chat template, for example `{ enable_thinking = false }`."""
    temperature: float = 1.0
    """Sampling temperature. Log-probs and the learner's loss are of the distribution after it."""
    top_p: Annotated[float, NumberRange(0, 1, excludes_low=True)] = 1.0
    """Sample among the most probable tokens that together have this probability. 1: among all."""
    top_k: int = 0
    """Sample among this many most probable tokens. 0: among all."""
    min_p: UnitFraction = 0.0
    """Sample among tokens that have at least this share of the probability of the most probable
    one. 0: among all."""
    keep_sampling_mask: bool = True
    """Record which tokens could be sampled with `top_p`, `top_k` or `min_p`, and normalise the
    learner's log-probs over the same ones. Off: every importance ratio is too low, which the trust
    region takes for drift."""
    stop: list[str] = msgspec.field(default_factory=list)
    """Strings that end an answer. They stay in it and are trained, since they were sampled. What
    the chat template adds to close the turn is not trained."""
    ignore_eos: bool = False
    """Continue sampling where the model ends its turn, until `max_new_tokens` or a `stop`."""
    timeout: PositiveFloat = 600.0
    """Seconds that one episode may take. Then its turns that have a reward are trained; without any
    it is tried again."""
    retries: int = 2
    """Times an episode is tried again after the environment failed; not again if your code raised
    twice at one place, unless a connection or a time-out caused it."""
    engine_retries: int = 2
    """Times in an episode that a call is repeated after the engine failed. The turns before it are
    kept; an episode that needs more has failed."""

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
            raise ValueError(
                "`max_prompt_tokens` must be less than `max_total_tokens`, or "
                "nothing can be sampled"
            )
        if not all(self.stop):
            raise ValueError("`stop` has an empty string, which would end every answer")
