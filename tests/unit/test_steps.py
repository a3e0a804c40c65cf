"""A step's row waits for its delivery, and then says everything."""

import json

from r3async.record.process_time import CounterGrowth
from r3async.record.reading import read_json_objects
from r3async.record.writer import StepWriter


def make(tmp_path, reports):
    now = iter([0.0, 10.0, 20.0, 25.0, 35.0, 45.0]).__next__
    return StepWriter(tmp_path, lambda event, **fields: reports.append((event, fields)), clock=now)


def test_rows_are_written_in_order_when_their_version_is_delivered(tmp_path):
    reports = []
    book = make(tmp_path, reports)  # clock 0
    book.restart_clock()  # 10
    said = [("system", "reverse"), ("user", "cd"), ("assistant", "dc"), ("user", "ab"), ("assistant", "ba")]
    messages = [{"role": role, "content": text} for role, text in said]
    preview = {"trajectory": "g00000000e0001", "reward": 1.0, "rewards": [1.0], "messages": messages}
    book.add(1, 1, {"batch/trained_tokens": 50, "grad_norm": 1.0}, [preview])
    book.add(2, 2, {"batch/trained_tokens": 50, "grad_norm": float("nan")}, [])
    assert not book.has_pending(0)
    assert book.has_pending(1)
    book.write_delivered(1, 100, {"timing/weight_update_seconds": 0.5})  # 20
    assert [r["step"] for r in read_json_objects(tmp_path / "metrics.jsonl")] == [1]
    assert book.rows_after(0)[-1]["throughput/generated_tokens_per_second"] == 10.0
    assert book.rows_after(0)[-1]["throughput/trained_tokens_per_second"] == 5.0
    assert book.rows_after(0)[-1]["timing/weight_update_seconds"] == 0.5
    assert not book.is_empty
    book.write_delivered(5, 160, {})  # 25
    assert book.is_empty
    assert book.rows_after(0)[-1]["throughput/generated_tokens_per_second"] == 12.0
    assert [event for event, _ in reports] == ["metric_not_finite"]
    assert [row["step"] for row in book.rows_after(1)] == [2]
    episode = json.loads((tmp_path / "episodes.jsonl").read_text())
    asked = "reverse\n\ncd\n\ndc\n\nab"  # the answer in the prompt is an example, not the policy's
    turn = {"user": asked, "assistant": "ba", "reward": 1.0}
    assert episode == {"step": 1, "trajectory": "g00000000e0001", "reward": 1.0, "turns": [turn]}


def test_steps_of_one_version_share_one_rate(tmp_path):
    book = make(tmp_path, [])  # clock 0
    book.restart_clock()  # 10
    book.add(1, 1, {"batch/trained_tokens": 30}, [])
    book.add(2, 1, {"batch/trained_tokens": 50}, [])
    book.write_delivered(1, 200, {})  # 20
    for row in read_json_objects(tmp_path / "metrics.jsonl"):
        assert row["throughput/trained_tokens_per_second"] == 8.0
        assert row["throughput/generated_tokens_per_second"] == 20.0


def test_processor_time_is_of_a_row_and_of_its_tokens(tmp_path):
    book = make(tmp_path, [])  # clock 0
    book.restart_clock()  # 10
    book.add(1, 1, {"batch/trained_tokens": 50, "cpu/learner_seconds": 0.5}, [])
    book.write_delivered(0, 10, {}, {"engine": 100.0})  # 20: nothing is ready, so nothing is counted yet
    book.write_delivered(1, 100, {}, {"engine": 101.0, "conductor": 1.0})  # 25
    for step in (2, 3):
        book.add(step, 2, {"batch/trained_tokens": 100, "cpu/learner_seconds": 1.0}, [])
    book.write_delivered(2, 300, {}, {"engine": 103.0, "conductor": 1.5})  # 35
    row = read_json_objects(tmp_path / "metrics.jsonl")[-1]
    assert (row["cpu/engine_seconds"], row["cpu/conductor_seconds"]) == (1.0, 0.25)
    assert row["cpu/generated_token_us"] == 1e6 * 2.5 / 200
    assert row["cpu/trained_token_us"] == 1e6 * 2.0 / 200


def test_growth_counts_from_where_a_process_was_first_seen_also_when_it_restarts():
    growth = CounterGrowth()
    for value in (30.0, 31.0, 35.0, 2.0, 3.5):  # a restart after the third
        growth.add("generator-0", value, "generator")
    growth.add("generator-1", 7.0, "generator")
    growth.add("generator-1", 7.5, "generator")
    assert growth.totals == {"generator": 5.0 + 1.5 + 0.5}
