"""A step's row waits for its delivery, and then says everything."""

import json

from r3async.record.reading import read_objects
from r3async.record.steps import StepRows


def make(tmp_path, reports):
    now = iter([0.0, 10.0, 20.0, 25.0, 35.0, 45.0]).__next__
    return StepRows(tmp_path, lambda event, **fields: reports.append((event, fields)), clock=now)


def test_rows_are_written_in_order_when_their_version_is_delivered(tmp_path):
    reports = []
    book = make(tmp_path, reports)  # clock 0
    book.restart_clock()  # 10
    preview = {"reward": 1.0, "rewards": [1.0], "messages": [{"content": "ab"}, {"content": "ba"}]}
    book.add(1, 1, {"batch/trained_tokens": 50, "grad_norm": 1.0}, [preview])
    book.add(2, 2, {"batch/trained_tokens": 50, "grad_norm": float("nan")}, [])
    assert not book.waits_for(0)
    assert book.waits_for(1)
    book.delivered(1, 100, {"weights/update_seconds": 0.5})  # 20
    assert [r["step"] for r in read_objects(tmp_path / "metrics.jsonl")] == [1]
    assert book.since(0)[-1]["throughput/generated_tokens_per_second"] == 10.0
    assert book.since(0)[-1]["throughput/trained_tokens_per_second"] == 5.0
    assert book.since(0)[-1]["weights/update_seconds"] == 0.5
    assert not book.empty
    book.delivered(5, 160, {})  # 25
    assert book.empty
    assert book.since(0)[-1]["throughput/generated_tokens_per_second"] == 12.0
    assert [event for event, _ in reports] == ["metric_not_finite"]
    assert [row["step"] for row in book.since(1)] == [2]
    episode = json.loads((tmp_path / "episodes.jsonl").read_text())
    assert episode == {"step": 1, "reward": 1.0, "turns": [{"user": "ab", "assistant": "ba", "reward": 1.0}]}


def test_steps_of_one_version_share_one_rate(tmp_path):
    book = make(tmp_path, [])  # clock 0
    book.restart_clock()  # 10
    book.add(1, 1, {"batch/trained_tokens": 30}, [])
    book.add(2, 1, {"batch/trained_tokens": 50}, [])
    book.delivered(1, 200, {})  # 20
    for row in read_objects(tmp_path / "metrics.jsonl"):
        assert row["throughput/trained_tokens_per_second"] == 8.0
        assert row["throughput/generated_tokens_per_second"] == 20.0
