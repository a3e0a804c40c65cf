"""A step's row is written when it ends, with what was delivered during the step."""

import json

from r3async.record.process_time import CounterGrowth
from r3async.record.reading import read_json_objects
from r3async.record.step_writer import StepWriter


def make(tmp_path, reports):
    now = iter([0.0, 10.0, 20.0, 25.0, 35.0, 45.0]).__next__
    return StepWriter(tmp_path, lambda event, **fields: reports.append((event, fields)), clock=now)


def test_a_row_is_written_when_its_step_ends_with_what_was_delivered_meanwhile(tmp_path):
    reports = []
    book = make(tmp_path, reports)  # clock 0
    book.restart_clock()  # 10
    said = [("system", "reverse"), ("user", "cd"), ("assistant", "dc"), ("user", "ab"), ("assistant", "ba")]
    messages = [{"role": role, "content": text} for role, text in said]
    preview = {"trajectory": "g00000000e0001", "reward": 1.0, "rewards": [1.0], "messages": messages}
    metrics = {"batch/trained_tokens": 50, "grad_norm": 1.0}
    book.write_step(1, 1, metrics, [preview], generated_tokens=100)  # 20
    (first,) = read_json_objects(tmp_path / "metrics.jsonl")
    assert (first["step"], first["version"], "timing/weight_update_seconds" in first) == (1, 1, False)
    assert first["throughput/generated_tokens_per_second"] == 10.0
    assert first["throughput/trained_tokens_per_second"] == 5.0
    book.add_delivery({"timing/weight_write_seconds": 0.25})
    book.add_delivery({"timing/weight_update_seconds": 0.5})
    book.write_step(2, 2, metrics | {"grad_norm": float("nan")}, generated_tokens=160)  # 25
    book.write_step(3, 3, metrics, generated_tokens=160)  # 35
    second, third = book.rows_after(1)
    assert (second["timing/weight_write_seconds"], second["timing/weight_update_seconds"]) == (0.25, 0.5)
    assert second["throughput/generated_tokens_per_second"] == 12.0
    assert (third["step"], "timing/weight_update_seconds" in third) == (3, False)
    assert [event for event, _ in reports] == ["metric_not_finite"]
    episode = json.loads((tmp_path / "episodes.jsonl").read_text())
    asked = "reverse\n\ncd\n\ndc\n\nab"  # the answer in the prompt is an example, not the policy's
    turn = {"user": asked, "assistant": "ba", "reward": 1.0}
    assert episode == {"step": 1, "trajectory": "g00000000e0001", "reward": 1.0, "turns": [turn]}


def test_processor_time_is_of_a_row_and_of_its_tokens(tmp_path):
    book = make(tmp_path, [])  # clock 0
    book.restart_clock()  # 10
    row = {"batch/trained_tokens": 50, "cpu/learner_seconds": 0.5}
    book.write_step(1, 1, row, generated_tokens=100, cpu_seconds={"engine": 101.0, "conductor": 1.0})
    row = {"batch/trained_tokens": 100, "cpu/learner_seconds": 1.0}
    book.write_step(2, 2, row, generated_tokens=300, cpu_seconds={"engine": 103.0, "conductor": 1.5})
    row = read_json_objects(tmp_path / "metrics.jsonl")[-1]
    assert (row["cpu/engine_seconds"], row["cpu/conductor_seconds"]) == (2.0, 0.5)
    assert row["cpu/generated_token_us"] == 1e6 * 2.5 / 200
    assert row["cpu/trained_token_us"] == 1e6 * 1.0 / 100


def test_growth_counts_from_where_a_process_was_first_seen_also_when_it_restarts():
    growth = CounterGrowth()
    for value in (30.0, 31.0, 35.0, 2.0, 3.5):  # a restart after the third
        growth.add("generator-0", value, "generator")
    growth.add("generator-1", 7.0, "generator")
    growth.add("generator-1", 7.5, "generator")
    assert growth.totals == {"generator": 5.0 + 1.5 + 0.5}
