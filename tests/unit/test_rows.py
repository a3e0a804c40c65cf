"""Every engine call lands in a row whose tokens are what the engine saw, and every sampled token is trained once."""

import asyncio
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import EpisodeConfig
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import GrowingTokens, Trajectory
from r3async.data.versions import VersionSpan
from r3async.envs import Message, StepResult
from r3async.rollout import samples as samples_module
from r3async.rollout.engine import Generation, GenerationRequest
from r3async.rollout.episode import EpisodeError, EpisodePlayer, EpisodeTask
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from r3async.rollout.samples import EpisodeSamples, PrefixMismatchError, common_prefix_length
from r3async.tools.init_model import build_byte_tokenizer
from tests.helpers.templates import DEEPSEEK_R1, FAMILIES, GROUPS_TOOLS, QWEN3, Family, renderer

SHAPE = RoutingShape(layers=2, top_k=2, num_experts=300)
LIMITS = EpisodeConfig(max_turns=32, max_new_tokens=64, max_prompt_tokens=6000, max_total_tokens=8000)


def generation(
    prompt_length: int, sampled: list[int], routes_from: int, seed: int, rows: bool = True, version: int | None = None
) -> Generation:
    rng = np.random.default_rng(seed)
    count = prompt_length + len(sampled) - 1 - routes_from
    scores = rng.random((count, SHAPE.layers, SHAPE.num_experts))
    return Generation(
        token_ids=np.asarray(sampled, np.int32),
        logprobs=-rng.random(len(sampled), np.float32) - 0.1,
        version_spans=[VersionSpan(seed if version is None else version, 0, len(sampled))],
        routed_experts=scores.argsort(-1)[..., : SHAPE.top_k].astype(np.uint16) if rows else None,
        routes_from=routes_from,
        stop_reason="stop",
    )


class Says:
    """An engine that says what it is told, one answer a call, and keeps what it saw. Each version answers two calls."""

    version, routing = 0, SHAPE

    def __init__(self, answers, rows=True):
        self.answers, self.rows = list(answers), rows
        self.calls: list[tuple[GenerationRequest, Generation]] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        index = len(self.calls)
        sampled = self.answers[index % len(self.answers)][: request.max_tokens]
        first = request.resolve_routes_from(index // 2)
        out = generation(len(request.prompt_ids), sampled, first, index, self.rows, version=index // 2)
        self.calls.append((request, out))
        return out


class Told:
    """An environment that follows a list: `("say", messages)` or `("rewrite", messages)`."""

    def __init__(self, script, reward=1.0):
        self.script, self.reward = list(script), reward

    async def reset(self, task_seed):
        return [Message("user", "go")]

    async def step(self, action):
        if not self.script:
            return StepResult(self.reward, done=True)
        how, messages = self.script.pop(0)
        return StepResult(self.reward, messages, rewrites=how == "rewrite")


def play(env, engine, chat, limits=LIMITS) -> Trajectory:
    return asyncio.run(EpisodePlayer(EpisodeTask(0, 0, 0), env, limits, PlayContext(engine, chat)).play_episode())


def check(trajectory: Trajectory, engine: Says) -> None:
    """Each call is the beginning of one row; its answer is trained there and nowhere else, with its own numbers. Routes are
    those of the call that the row asked for them; what it did not ask for, an earlier call fed after the very same tokens, in
    the same row or under the same weights."""
    assert len(trajectory.turns) == len(engine.calls)
    trained = {s.sample_id: np.zeros(len(s.table), bool) for s in trajectory.samples}
    fed: dict[tuple[int, ...], list[list]] = {}
    """By version and tokens."""
    asked = {s.sample_id: 0 for s in trajectory.samples}
    for turn, (request, out) in zip(trajectory.turns, engine.calls, strict=True):
        sample = trajectory.samples[turn.sample]
        table, prompt = sample.table, request.prompt_ids.tolist()
        seen = prompt + out.token_ids.tolist()
        assert table["token_ids"][: turn.stop].tolist() == seen
        assert turn.start == len(prompt)
        rows = slice(turn.start, turn.stop)
        assert not trained[sample.sample_id][rows].any()
        trained[sample.sample_id][rows] = True
        assert (table["rollout_logprobs"][rows] == out.logprobs).all()
        version = out.version_spans[0].version
        assert (table["policy_version"][rows] == version).all()
        assert (table["turn"][rows] == turn.index).all()
        for i in range(asked[sample.sample_id], len(seen) - 1):
            if i < out.routes_from:
                assert table["routed_experts"][i].tolist() in fed[(version, *seen[: i + 1])]
            else:
                assert (table["routed_experts"][i] == out.routed_experts[i - out.routes_from]).all()
        asked[sample.sample_id] = len(seen) - 1
        for i in range(out.routes_from, len(seen) - 1):
            fed.setdefault((version, *seen[: i + 1]), []).append(out.routed_experts[i - out.routes_from].tolist())
    for sample in trajectory.samples:
        table = sample.table
        ids = table["token_ids"].tolist()
        assert (table["loss_mask"] == trained[sample.sample_id]).all()
        assert (table["policy_version"][~table["loss_mask"]] == -1).all()
        assert (table["rollout_logprobs"][~table["loss_mask"]] == 0).all()
        assert table["routing_recorded"].tolist() == [True] * (len(ids) - 1) + [False]
    assert sum(s.table["rewards"].sum() for s in trajectory.samples) == pytest.approx(trajectory.reward)


STRIPS = "{%- if '</think>' in c -%}{%- set c = c.split('</think>')[-1] -%}{%- endif -%}"


def template(strip: str, trim: bool, system: bool, blank: bool, empty_thought: bool) -> str:
    """`strip`: thoughts of which answers are left out of history: `none`, `all`, or all but the `last` one."""
    cut = {"none": "", "all": STRIPS, "last": "{%- if not last -%}" + STRIPS + "{%- endif -%}"}[strip]
    return (
        ("<|system|>be good<|end|>" if system else "")
        + "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
        "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
        "{%- for m in messages -%}{%- set c = m.content -%}"
        "{%- if m.role == 'assistant' -%}{%- set last = loop.index0 == ns.last -%}"
        + cut
        + ("{%- set c = c | trim -%}" if trim else "")
        + "{{- '<|assistant|>"
        + (" " if blank else "")
        + "' + c + '<|end|>' -}}{%- else -%}{{- '<|' + m.role + '|>' + c -}}{%- endif -%}{%- endfor -%}"
        "{{- '<|assistant|>' -}}" + ("{{- '<think></think>' -}}" if empty_thought else "")
    )


templates = st.builds(
    template,
    strip=st.sampled_from(["none", "all", "last"]),
    **dict.fromkeys(("trim", "system", "blank", "empty_thought"), st.booleans()),
)
texts = st.sampled_from(["a", "bc", " d ", "<think>x</think>y", "<think>x", "", "caf\u00e9", "\n", "end"])
answers = st.tuples(texts, st.booleans())
histories = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.lists(st.tuples(st.just("user"), texts), min_size=1, max_size=2)),
        st.tuples(
            st.just("rewrite"),
            st.lists(st.tuples(st.sampled_from(["user", "assistant"]), texts), max_size=5),
        ),
    ),
    max_size=7,
)


DRAWN = (templates, st.lists(answers, min_size=1, max_size=8), histories, st.sampled_from(["auto", "stepwise"]))
"""Arguments of `episode_of`."""


def episode_of(written, spoken, history, mode):
    """Return a renderer, the answers' tokens, an environment and limits."""
    chat = renderer(written)
    tokens = [[*chat.encode(text), *([chat.eos_token_id] if ended or not text else [])] for text, ended in spoken]
    script = [(how, [Message(*said) for said in messages] + [Message("user", "?")]) for how, messages in history]
    return chat, tokens, Told(script), msgspec.structs.replace(LIMITS, rows=mode)


@settings(max_examples=60)
@given(*DRAWN)
def test_every_call_is_in_one_row_and_trained_once_whatever_rewrites_history(written, spoken, history, mode):
    chat, tokens, env, limits = episode_of(written, spoken, history, mode)
    engine = Says(tokens)
    trajectory = play(env, engine, chat, limits)
    check(trajectory, engine)
    if mode == "stepwise":
        assert [t.sample for t in trajectory.turns] == list(range(len(engine.calls)))
    for (request, out), (after, _) in zip(engine.calls, engine.calls[1:], strict=False):
        seen = [*request.prompt_ids.tolist(), *out.token_ids.tolist()]
        if mode == "auto" and after.prompt_ids[: len(seen)].tolist() == seen:
            at = engine.calls.index((after, next(o for r, o in engine.calls if r is after)))
            assert trajectory.turns[at].sample == trajectory.turns[at - 1].sample
            assert after.routes_from == len(seen) - 1


@pytest.mark.parametrize("family", [QWEN3, DEEPSEEK_R1], ids=["qwen3", "deepseek-r1"])
def test_a_template_that_strips_thoughts_gives_a_row_a_turn_of_what_the_engine_saw(family):
    chat = renderer(family)
    engine = Says([[*chat.encode("<think>\nhm\n</think>\n\nfive"), chat.eos_token_id]])
    trajectory = play(Told([("say", [Message("user", f"{i}?")]) for i in range(3)]), engine, chat)
    check(trajectory, engine)
    assert len(trajectory.samples) == 4
    assert all(chat.decode(s.table["token_ids"]).count("hm") == 1 for s in trajectory.samples)


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f not in (DEEPSEEK_R1,)])
def test_a_template_that_keeps_history_gives_one_row(family: Family):
    chat = renderer(family)
    engine = Says([[*chat.encode("five"), chat.eos_token_id], chat.encode("cut")])
    trajectory = play(Told([("say", [Message("user", f"{i}?")]) for i in range(5)]), engine, chat)
    check(trajectory, engine)
    assert len(trajectory.samples) == 1


def test_where_one_row_is_demanded_a_rewritten_history_is_an_error_that_names_the_setting():
    chat = renderer(QWEN3)
    engine = Says([[*chat.encode("<think>\nhm\n</think>\n\nfive"), chat.eos_token_id]])
    limits = EpisodeConfig(max_new_tokens=64, rows="merged")
    with pytest.raises(PrefixMismatchError, match=r'episode\.rows = "merged"'):
        play(Told([("say", [Message("user", "?")])]), engine, chat, limits)
    engine = Says([[*chat.encode("five"), chat.eos_token_id]])
    assert len(play(Told([("say", [Message("user", "?")])]), engine, chat, limits).samples) == 1


def test_results_of_parallel_calls_are_one_turn_and_what_stands_between_turns_is_not_trained():
    """One answer calls twice, one is cut within a call, one ends."""
    chat = renderer(GROUPS_TOOLS)
    answers = [
        [*chat.encode("call two"), chat.eos_token_id],
        chat.encode('<tool_call>{"na'),
        [*chat.encode("ok"), chat.eos_token_id],
    ]
    script = [("say", [Message("tool", "A"), Message("tool", "B")]), ("say", [Message("user", "again")])]
    engine = Says(answers)
    trajectory = play(Told(script), engine, chat)
    check(trajectory, engine)
    (sample,) = trajectory.samples
    ids, trained = sample.table["token_ids"], sample.table["loss_mask"]
    assert chat.decode(ids.tolist()) == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\ncall two<|im_end|>\n"
        "<|im_start|>user\n<tool_response>A</tool_response>\n<tool_response>B</tool_response><|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"na<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n'
        "<|im_start|>assistant\nok<|im_end|>"
    )
    assert chat.decode(ids[trained].tolist()) == 'call two<|im_end|><tool_call>{"naok<|im_end|>'


def test_a_tokenizer_that_does_not_tokenise_its_own_text_back_is_trained_on_what_was_sampled():
    tokenizer = build_byte_tokenizer()
    tokenizer.add_tokens(["ab", "abab", "ba"])
    chat = ChatRenderer(tokenizer)
    a, b = (tokenizer.convert_tokens_to_ids(c) for c in "ab")
    rng = random.Random(0)
    sampled = [[rng.choice([a, b]) for _ in range(12)] + [chat.eos_token_id] for _ in range(10)]
    engine = Says(sampled)
    trajectory = play(Told([("say", [Message("user", "go on")])] * 9), engine, chat)
    check(trajectory, engine)
    (sample,) = trajectory.samples
    assert len(trajectory.turns) == 10
    for turn, ids in zip(trajectory.turns, sampled, strict=True):
        assert sample.table["token_ids"][turn.start : turn.stop].tolist() == ids
        assert chat.encode(chat.decode(ids)) != ids


@pytest.mark.parametrize("mode", ["auto", "stepwise"])
def test_no_row_has_a_longer_prompt_than_allowed_however_long_observations_are(mode):
    """Long observations, of which the environment shows only the last: a row a turn, each within its limits."""
    chat = renderer()
    limits = EpisodeConfig(max_turns=8, max_new_tokens=16, max_prompt_tokens=2200, max_total_tokens=2300, rows=mode)
    turns = [("rewrite", [Message("user", "the task"), Message("user", "x" * 2000)])] * 5
    engine = Says([[*chat.encode("look further"), chat.eos_token_id]])
    trajectory = play(Told(turns), engine, chat, limits)
    check(trajectory, engine)
    assert trajectory.stop_reason == "env_done"
    assert len(trajectory.samples) == 6
    for turn in trajectory.turns:
        table = trajectory.samples[turn.sample].table
        assert turn.start <= limits.max_prompt_tokens
        assert len(table) <= limits.max_prompt_tokens + limits.max_new_tokens
        assert table["loss_mask"].sum() == 13  # no observation in a response


@pytest.mark.parametrize("mode", ["auto", "stepwise"])
def test_the_prompt_limit_is_that_of_this_turns_prompt(mode):
    """It ends the episode before the turn that would exceed it, and no later."""
    chat = renderer()
    limits = EpisodeConfig(max_turns=8, max_new_tokens=16, max_prompt_tokens=1000, max_total_tokens=5000, rows=mode)
    engine = Says([[*chat.encode("yes"), chat.eos_token_id]])
    trajectory = play(Told([("say", [Message("user", "x" * 300)])] * 9), engine, chat, limits)
    check(trajectory, engine)
    assert trajectory.stop_reason == "length"
    lengths = [len(request.prompt_ids) for request, _ in engine.calls]
    assert max(lengths) <= 1000 < max(lengths) + 300
    assert len(trajectory.samples) == (1 if mode == "auto" else len(lengths))


def test_a_prompt_that_waits_for_its_answer_is_branched_from_and_a_failed_one_asked_again():
    rows = EpisodeSamples(SHAPE)
    first = rows.start_call([1, 2, 3])
    second = rows.start_call([1, 2, 3])  # an agent that asks twice at once
    assert second.sample is not first.sample
    rows.finish_call(second, generation(3, [7, 8], 0, seed=1))
    rows.finish_call(first, generation(3, [9], 0, seed=2))
    third = rows.start_call([1, 2, 3, 7, 8, 4])
    assert third.sample is second.sample
    rows.cancel_call(third)
    again = rows.start_call([1, 2, 3, 7, 8, 4])
    assert again.sample is second.sample
    rows.cancel_call(again)
    another = rows.start_call([1, 2, 3, 7, 8, 5])  # not what was asked before
    assert another.sample is second.sample
    rows.cancel_call(another)
    samples, turns = rows.build_samples("g", 1.0)
    assert [s.table["token_ids"].tolist() for s in samples] == [[1, 2, 3, 7, 8], [1, 2, 3, 9]]
    assert [t.sample for t in turns] == [0, 1]


def test_of_a_sample_that_went_on_only_what_the_named_turn_had_is_known_to_be_shared():
    rows = EpisodeSamples(SHAPE)
    first = rows.finish_call(rows.start_call([1, 2]), generation(2, [3], 0, seed=0))
    rows.finish_call(rows.start_call([1, 2, 3, 4]), generation(4, [5], 2, seed=0))
    call = rows.start_call([1, 2, 3, 9], first, 4)
    assert call.common_prefix_lengths == [3]
    rows.finish_call(call, generation(4, [6], 0, seed=0))
    samples, _ = rows.build_samples("g", 1.0)
    assert samples[1].table["token_ids"].tolist() == [1, 2, 3, 9, 6]


def test_of_two_samples_that_are_equal_the_newest_is_continued():
    rows = EpisodeSamples(SHAPE)
    calls = [rows.start_call([1, 2, 3]) for _ in range(2)]
    for seed, call in enumerate(calls):
        rows.finish_call(call, generation(3, [7, 8], 0, seed=seed))
    assert rows.start_call([1, 2, 3, 7, 8, 4]).sample is calls[1].sample


def test_of_two_samples_that_a_prompt_extends_the_longer_is_continued_though_it_is_older():
    rows = EpisodeSamples(SHAPE)
    long = rows.start_call([1, 2, 3, 4])
    rows.finish_call(long, generation(4, [5], 0, seed=0))
    short = rows.start_call([1, 2])
    rows.finish_call(short, generation(2, [3], 0, seed=1))
    assert rows.start_call([1, 2, 3, 4, 5, 6]).sample is long.sample


def test_a_sample_is_not_continued_while_any_of_several_calls_waits_for_it():
    rows = EpisodeSamples(SHAPE)
    first = rows.start_call([1, 2])
    rows.finish_call(first, generation(2, [3], 0, seed=0))
    waiting = rows.start_call([1, 2, 3, 4])
    other = rows.start_call([9])
    assert waiting.sample is first.sample
    beside = rows.start_call([1, 2, 3, 5])
    assert beside.sample is not first.sample
    rows.cancel_call(other)
    assert rows.start_call([1, 2, 3, 6]).sample is not first.sample, "that one waits still"


def test_a_branch_borrows_from_the_sample_of_the_newest_weights_though_an_older_one_has_more_in_common():
    rows = EpisodeSamples(SHAPE)
    rows.finish_call(rows.start_call([1, 2, 3, 4, 5]), generation(5, [6], 0, seed=0, version=1))
    rows.finish_call(rows.start_call([1, 2, 9]), generation(3, [8], 0, seed=1, version=2))
    branch = rows.start_call([1, 2, 3, 4, 7])
    assert (branch.routes_from, branch.routes_version) == (2, 2)


def test_of_two_samples_of_the_same_weights_a_branch_borrows_from_the_one_with_more_known_routes():
    rows = EpisodeSamples(SHAPE)
    updated = generation(3, [4, 5, 6], 0, seed=0)
    updated.version_spans[:] = [VersionSpan(1, 0, 1), VersionSpan(2, 1, 3)]
    rows.finish_call(rows.start_call([1, 2, 3]), updated)
    rows.finish_call(rows.start_call([1, 2, 3, 4, 8]), generation(5, [9], 0, seed=1, version=1))
    branch = rows.start_call([1, 2, 3, 4, 5, 7])
    assert branch.common_prefix_lengths == [5, 4]
    assert branch.routes_from == 4, "the first has more tokens in common, and newer weights fed its last ones"


def test_a_branch_borrows_nothing_of_a_later_turn_that_newer_weights_answered():
    rows = EpisodeSamples(SHAPE)
    rows.finish_call(rows.start_call([1, 2, 3]), generation(3, [4], 0, seed=0, version=1))
    continued = rows.start_call([1, 2, 3, 4, 5])
    rows.finish_call(continued, generation(5, [6], continued.routes_from, seed=1, version=2))
    branch = rows.start_call([1, 2, 3, 4, 5, 7])
    assert (branch.routes_from, branch.routes_version) == (3, 1)


def test_a_branch_borrows_nothing_that_follows_positions_without_routes():
    rows = EpisodeSamples(SHAPE)
    rows.finish_call(rows.start_call([1, 2, 3]), generation(3, [4], 0, seed=0, rows=False, version=1))
    continued = rows.start_call([1, 2, 3, 4, 5])
    assert continued.routes_from == 3
    rows.finish_call(continued, generation(5, [6], 3, seed=1, version=1))
    assert rows.start_call([1, 2, 3, 4, 5, 7]).routes_from == 0


def test_two_rewards_of_a_turn_are_added():
    rows = EpisodeSamples(SHAPE)
    turn = rows.finish_call(rows.start_call([1, 2]), generation(2, [3, 4], 0, seed=0))
    for reward in (0.5, 0.25):
        rows.add_reward(turn, reward)
    (sample,), (described,) = rows.build_samples("g", 1.0)
    assert sample.table["rewards"].tolist() == [0, 0, 0, 0.75]
    assert described.reward == 0.75


def test_an_answer_without_tokens_is_no_turn_and_leaves_its_prompt_to_the_next_call():
    rows = EpisodeSamples(SHAPE)
    call = rows.start_call([1, 2])
    empty = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), [], None, 0, "abort")
    assert rows.finish_call(call, empty) == -1
    assert rows.turn_count == 0
    rows.finish_call(rows.start_call([1, 2]), generation(2, [5], 0, seed=0))
    samples, turns = rows.build_samples("g", 1.0)
    assert [s.table["token_ids"].tolist() for s in samples] == [[1, 2, 5]]
    assert len(turns) == 1


async def test_time_that_runs_out_leaves_the_turns_that_have_a_reward():
    class Slow(Told):
        async def step(self, action):
            if len(self.script) == 1:
                await asyncio.sleep(30)
            return await super().step(action)

    chat = renderer()
    engine = Says([[*chat.encode("yes"), chat.eos_token_id]])
    limits = EpisodeConfig(max_new_tokens=8, timeout=0.2)
    env = Slow([("say", [Message("user", "?")])] * 4)
    trajectory = await EpisodePlayer(EpisodeTask(0, 0, 0), env, limits, PlayContext(engine, chat)).play_episode()
    assert trajectory.stop_reason == "timeout"
    assert len(engine.calls) == 4
    assert [t.index for t in trajectory.turns] == [0, 1, 2]
    (sample,) = trajectory.samples
    assert len(sample.table) == trajectory.turns[-1].stop
    with pytest.raises(EpisodeError, match=r"episode\.timeout = 0.2"):
        await EpisodePlayer(EpisodeTask(0, 0, 0), Slow([("say", [])]), limits, PlayContext(engine, chat)).play_episode()


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a, b):
    n = common_prefix_length(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


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
    return generation(len(call.prompt_ids), sampled, first, seed, version=version)


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


def land(mode, script, known):
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
    samples, turns, landed = land(mode, script, known=True)
    compared, compared_turns, compared_landed = land(mode, script, known=False)
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
