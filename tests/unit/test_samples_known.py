"""What is known of a prompt is not compared again, and makes no difference to where its answer lands."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data.models import RoutingShape
from r3async.data.tokens import GrowingTokens
from r3async.data.versions import VersionSpan
from r3async.rollout import samples as samples_module
from r3async.rollout.engine import Generation
from r3async.rollout.samples import EpisodeSamples, PrefixMismatchError

SHAPE = RoutingShape(layers=1, top_k=2, num_experts=8)
tokens = st.lists(st.integers(0, 1), max_size=4)
steps = st.lists(
    st.fixed_dictionaries(
        {
            "talk": st.integers(0, 3),
            "keep": st.one_of(st.just(1.0), st.floats(0, 1)),
            "adds": tokens,
            "answers": tokens,
            "newer": st.booleans(),
            "ends": st.sampled_from(["at once", "at once", "later", "cancelled"]),
        }
    ),
    max_size=14,
)


def answer(call, sampled, version, seed):
    """Of a call that entered under `version`, with routes that no other call has."""
    first = call.routes_from if call.routes_version in (None, version) else 0
    count = len(call.prompt_ids) + len(sampled) - 1 - first
    scores = np.random.default_rng(seed).random((count, SHAPE.layers, SHAPE.num_experts))
    return Generation(
        token_ids=np.asarray(sampled, np.int32),
        logprobs=np.full(len(sampled), -float(seed), np.float32),
        version_spans=[VersionSpan(version, 0, len(sampled))],
        routed_experts=scores.argsort(-1)[..., : SHAPE.top_k].astype(np.uint8),
        routes_from=first,
        stop_reason="stop",
    )


class Talk:
    """Tokens that an agent has seen; the first `shared` are those of the sample of `turn`."""

    def __init__(self):
        self.tokens, self.turn, self.shared = [0], -1, 0

    def continued(self, keep, adds):
        kept = round(keep * len(self.tokens))
        talk = Talk()
        talk.tokens = self.tokens[:kept] + adds
        talk.turn, talk.shared = self.turn, min(self.shared, kept)
        return talk


def play(mode, script, known):
    """Samples and turns; and where each prompt landed."""
    samples, talks, later, landed, version = EpisodeSamples(SHAPE, mode), [Talk()], [], [], 0
    for seed, step in enumerate(script):
        talk = talks[step["talk"] % len(talks)].continued(step["keep"], step["adds"])
        try:
            call = samples.start_call(talk.tokens, *((talk.turn, talk.shared) if known else ()))
        except PrefixMismatchError as error:
            landed.append(str(error))
            continue
        landed.append((len(call.sample), call.routes_from, call.routes_version))
        version += step["newer"]
        if step["ends"] == "cancelled":
            samples.cancel_call(call)
            continue
        later.append((call, talk, answer(call, step["answers"] or [1], version, seed)))
        if step["ends"] == "at once":
            for waiting, asked, generation in later:
                asked.turn = samples.finish_call(waiting, generation)
                asked.tokens += generation.token_ids.tolist()
                asked.shared = len(asked.tokens)
                talks.append(asked)
            later = []
    return *samples.build_samples("g", 1.0), landed


@pytest.mark.parametrize("mode", ["auto", "stepwise", "merged"])
@settings(max_examples=80)
@given(script=steps)
def test_what_is_known_makes_no_difference(mode, script):
    samples, turns, landed = play(mode, script, known=True)
    compared, compared_turns, compared_landed = play(mode, script, known=False)
    assert landed == compared_landed
    assert turns == compared_turns
    assert [s.sample_id for s in samples] == [s.sample_id for s in compared]
    assert all(a.table == b.table for a, b in zip(samples, compared, strict=True))


@pytest.mark.parametrize(("mode", "most"), [("auto", 0), ("stepwise", 10)])
def test_a_conversation_that_grows_is_not_compared_with_what_it_was(mode, most, monkeypatch):
    """Merged: no token. Step by step: of each turn's new tokens only, with no more than the newest sample."""
    compared = []

    def counted(a, b, known=0):
        compared.append(min(len(a), len(b)) - known)
        return common_prefix(a, b, known)

    common_prefix = samples_module.common_prefix_length
    monkeypatch.setattr(samples_module, "common_prefix_length", counted)
    samples, talk = EpisodeSamples(SHAPE, mode), Talk()
    for turn in range(50):
        talk.tokens += [turn, 1, 2, 3]
        call = samples.start_call(talk.tokens, talk.turn, talk.shared)
        talk.turn = samples.finish_call(call, answer(call, [turn, 5], 0, turn))
        talk.tokens += [turn, 5]
        talk.shared = len(talk.tokens)
    assert sum(compared) <= most * 50
    assert len(samples.build_samples("g", 1.0)[0]) == (1 if mode == "auto" else 50)


@given(st.lists(tokens, max_size=12))
def test_tokens_grow_and_what_was_handed_out_stays(parts):
    growing, handed, all_tokens = GrowingTokens(), [], []
    for part in parts:
        growing.extend(part)
        all_tokens += part
        handed.append((growing.array, list(all_tokens)))
        with pytest.raises(ValueError, match="read-only"):
            growing.array[:] = 1
    assert len(growing) == len(all_tokens)
    assert all(array.tolist() == expected for array, expected in handed)
