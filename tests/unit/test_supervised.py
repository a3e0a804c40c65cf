"""Supervised steps: the loss and gradient of plain cross entropy on answers, and rows that become samples."""

import contextlib

import numpy as np
import pytest
import torch

from r3async.config import ConfigError, DataConfig
from r3async.data.tokens import Sample, TokenTable
from r3async.envs import Message
from r3async.envs.row_conversations import parse_conversation
from r3async.envs.row_tasks import parse_tools
from r3async.envs.rows import LocatedRow
from r3async.learner import build_learner
from r3async.learner.micro_batches import pack_samples
from r3async.learner.supervised import compute_supervised_loss, run_supervised_step
from r3async.rollout.demonstrations import build_demonstration
from r3async.rollout.renderer import ChatRenderer
from r3async.tools.init_model import build_byte_tokenizer
from tests.helpers import architectures as ha
from tests.helpers import lora as hl
from tests.helpers import models as hm

LENGTHS = [9, 40, 5, 17]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4, mlp_only_layers=[1])


def rows() -> list[Sample]:
    rng = np.random.default_rng(4)
    out = []
    for number, length in enumerate(LENGTHS):
        mask = rng.random(length) < 0.6
        mask[0] = False
        mask[-1] = True
        table = TokenTable.from_tokens(rng.integers(0, hm.VOCAB, length)).with_columns(loss_mask=mask)
        out.append(Sample(str(number), table))
    return out


def reference(model_path):
    """Loss, and gradients by the names of a checkpoint, of plain transformers, row by row."""
    model, count, total = hm.load_hf(model_path), sum(int(s.table["loss_mask"].sum()) for s in rows()), 0.0
    for sample in rows():
        ids = torch.from_numpy(sample.table["token_ids"].astype(np.int64))
        labels = torch.where(torch.from_numpy(sample.table["loss_mask"]), ids, -100)
        logits = model(ids[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum") / count
        loss.backward()
        total += float(loss)
    return total, ha.gradients_of(model)


@pytest.mark.parametrize("budget", [40, 1000])
def test_a_step_has_the_loss_and_gradient_of_cross_entropy(model_path, budget):
    loss, expected = reference(model_path)
    learner = build_learner(hl.settings("megatron"), model_path)
    taken: dict[str, torch.Tensor] = {}
    norm = learner.optimizer.reducer.compute_squared_norm

    def capture(gradients):
        for held, gradient in zip(learner.trained_slices(), gradients, strict=True):
            taken.update(zip([p.name for p in held.places], held.layout.split(gradient.clone()), strict=True))
        return norm(gradients)

    try:
        batches = pack_samples(rows(), budget)
        before, tokens = compute_supervised_loss(learner, batches)
        learner.optimizer.reducer.compute_squared_norm = capture
        metrics = run_supervised_step(learner, batches)
        after, _ = compute_supervised_loss(learner, batches)
    finally:
        learner.close()
    assert tokens == metrics["batch/trained_tokens"] == sum(int(s.table["loss_mask"].sum()) for s in rows())
    assert before / tokens == pytest.approx(loss, rel=1e-5)
    assert metrics["loss/answers"] == pytest.approx(loss, rel=1e-5)
    assert after < before
    hl.assert_close(taken, {n: g.double() for n, g in expected.items()})


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_rows_without_an_answer_change_nothing(model_path, backend):
    with contextlib.closing(build_learner(hl.settings(backend), model_path)) as learner:
        start = learner.export_weights()
        empty = [Sample("a", TokenTable.from_tokens(np.arange(5)))]
        assert run_supervised_step(learner, pack_samples(empty, 100))["optimizer/updates"] == 0
        assert all(torch.equal(t, start[n]) for n, t in learner.export_weights().items())
        assert learner.update_count == 0


RENDERER = ChatRenderer(build_byte_tokenizer())


def found(**row) -> LocatedRow:
    return LocatedRow(row, "rows.jsonl", "line", 3)


def spoken(sample: Sample) -> list[str]:
    """The answers that are learnt: text of each run of the mask, with what ends it."""
    ids, mask = sample.table["token_ids"], sample.table["loss_mask"]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [RENDERER.decode(ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


def text(sample: Sample) -> str:
    return RENDERER.decode(sample.table["token_ids"].tolist())


TURNS = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}]
TURNS += [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "settings", "answers"),
    [
        ({"prompt": "one?", "answer": "1"}, {}, ["1"]),
        ({"prompt": "one?", "completion": "1", "answer": "no"}, {}, ["1"]),
        ({"question": "one?", "a": {"b": 1}}, {"prompt": "{question}", "answer": "a.b"}, ["1"]),
        ({"prompt": TURNS[:1], "completion": TURNS[1:2]}, {}, ["1"]),
        ({"prompt": TURNS[:3], "completion": TURNS[3:]}, {}, ["1", "2"]),
        ({"messages": TURNS}, {}, ["1", "2"]),
        ({"messages": TURNS}, {"system": "Count."}, ["1", "2"]),
        ({"prompt": "one?", "reward_model": {"ground_truth": "1"}}, {}, ["1"]),
    ],
)
def test_answers_of_all_forms_are_learnt_and_nothing_else(row, settings, answers):
    task = parse_conversation(found(**row), DataConfig(path="x", **settings))
    (sample,) = build_demonstration(RENDERER, task.messages, parse_tools(task)).build_samples("row")
    assert spoken(sample) == [f"{answer}<|end|>" for answer in answers]
    assert "one?" in text(sample)
    assert text(sample).startswith("<|system|>Count." if settings.get("system") else "<|user|>one?")


def test_a_demonstration_is_what_an_episode_would_have_sampled():
    """The template that the tokens are of renders the same conversation to the same text."""
    messages = [Message(m["role"], m["content"]) for m in TURNS]
    (sample,) = build_demonstration(RENDERER, messages).build_samples("row")
    rendered = RENDERER.tokenizer.apply_chat_template([m.to_template_dict() for m in messages], tokenize=False)
    assert text(sample) == rendered


def test_a_template_that_strips_history_makes_two_rows():
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] if m['role'] == 'user' or loop.last else '-' }}"
        "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    samples = build_demonstration(
        ChatRenderer(tokenizer), [Message(m["role"], m["content"]) for m in TURNS]
    ).build_samples("row")
    assert [s.sample_id for s in samples] == ["row", "row/1"]
    assert [spoken(s) for s in samples] == [["1<|end|>"], ["2<|end|>"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "one?"}, "there is no answer to learn.*name it with `data.answer`"),
        ({"messages": TURNS[:3]}, "does not end with an answer"),
        ({"messages": TURNS[1:]}, "begins with an answer"),
        ({"messages": [TURNS[0], TURNS[1], TURNS[1]]}, "join them"),
        ({"messages": "text"}, "must have role and content"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": " "}]}, "is empty"),
        ({"prompt": "one?", "answer": {"x": 1}}, "must be a text, a number or chat messages"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_named(row, message):
    with pytest.raises(ConfigError, match=f"rows.jsonl, line 3: .*{message}"):
        parse_conversation(found(**row), DataConfig(path="x"))
