"""Files of traced routes, and what training used of them compared with what the engine chose."""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from r3async.data.routes import RoutingError
from r3async.data.tokens import UNSAMPLED_VERSION
from r3async.learner import RouteTrace
from r3async.record import routes
from r3async.record.merged_traces import merge_traces
from r3async.record.route_verification import compare_routes, find_engine_routes, verify_routes
from r3async.record.routes import (
    ROUTES_CONTAINER,
    EngineCall,
    RouteFile,
    RouteFileError,
    RouteIndex,
    TrainedRoutes,
    load_route_record,
    scan_route_file,
)
from r3async.world.disk import SystemFiles
from tests.helpers.routes import EXPERTS, ID, LAYERS, TOKENS, call, episode, experts


def with_rows(trained: TrainedRoutes, **columns: Any) -> TrainedRoutes:
    return msgspec.structs.replace(trained, **columns)


def branch_of(trained: TrainedRoutes, lent: np.ndarray, fresh: np.ndarray) -> TrainedRoutes:
    """Sample s1: it keeps the first five tokens, whose routes are `lent`, and differs after them; its last token is sampled."""
    sampled, own = np.arange(8) == 7, experts(31, 8)
    return with_rows(
        trained,
        sample_id=f"{ID}s1",
        token_ids=np.asarray([*TOKENS[:5], 6, 7, 15], np.int32),
        loss_mask=sampled,
        rollout_logprobs=np.where(sampled, np.float32(-1), np.float32(0)),
        policy_version=np.where(sampled, 0, -1).astype(np.int32),
        own=own,
        used=np.concatenate([lent, fresh, own[7:]]),
    )


def test_routes_that_were_replayed_are_equal_and_the_last_token_routes_by_itself() -> None:
    result = compare_routes(*episode())
    assert (result.equal, result.different, result.unrecorded) == (9 * LAYERS, 0, LAYERS)
    assert result.is_verified
    assert result.first is None


def test_the_order_of_experts_within_a_row_does_not_matter() -> None:
    trained, calls = episode()
    assert compare_routes(with_rows(trained, used=trained.used[..., ::-1]), calls).is_verified


@pytest.mark.parametrize("left", [0, 2])
def test_a_sample_of_which_the_loss_takes_nothing_or_a_part_is_compared_whole(left: int) -> None:
    # A group with zero variance, an episode that was cut: their tokens are fed forward, and are out of the loss.
    trained, calls = episode()
    mask = trained.loss_mask & (np.cumsum(trained.loss_mask) <= left)
    result = compare_routes(with_rows(trained, loss_mask=mask), calls)
    assert (result.samples, result.equal, result.different) == (1, 9 * LAYERS, 0)
    assert not result.unmatched


def test_a_sample_that_no_engine_sampled_has_no_rows_of_one() -> None:
    trained, calls = episode()
    nothing = with_rows(trained, policy_version=np.full_like(trained.policy_version, UNSAMPLED_VERSION))
    assert find_engine_routes(nothing, calls) is None


@pytest.mark.parametrize(("position", "layer"), [(0, 0), (4, 2), (5, 1), (8, 2)])
def test_one_flipped_expert_is_found_and_named(position: int, layer: int) -> None:
    trained, calls = episode()
    used = trained.used.copy()
    before = used[position, layer].tolist()
    used[position, layer, 1] = next(e for e in range(EXPERTS) if e not in before)
    result = compare_routes(with_rows(trained, used=used), calls)
    assert (result.equal, result.different) == (9 * LAYERS - 1, 1)
    assert not result.is_verified
    assert result.first is not None
    found = result.first
    assert (found.sample_id, found.step, found.position, found.layer) == (f"{ID}s0", 1, position, layer)
    assert (found.recorded, found.expected, found.used) == (True, before, used[position, layer].tolist())
    assert f"position {position}, MoE layer {layer}: the engine chose {before}" in found.to_text()


def test_what_a_later_call_returns_for_a_position_fed_before_does_not_count() -> None:
    trained, calls = episode()
    again = experts(7, 9)  # the second call's prefill disagrees about every position that the first one fed
    again[5:] = calls[1].rows
    calls[1] = msgspec.structs.replace(calls[1], routes_from=0, rows=again)
    assert compare_routes(trained, calls).is_verified
    late = trained.used.copy()
    late[2] = again[2]  # had the learner been given the later row, it would be found
    assert compare_routes(with_rows(trained, used=late), calls).different > 0


def test_positions_without_a_row_are_counted_and_have_to_route_by_themselves() -> None:
    trained, calls = episode()
    calls[0] = msgspec.structs.replace(calls[0], rows=calls[0].rows[:2])  # positions 2, 3 and 4 came without
    used = trained.used.copy()
    used[2:5] = trained.own[2:5]
    result = compare_routes(with_rows(trained, used=used), calls)
    assert (result.equal, result.different, result.unrecorded) == (6 * LAYERS, 0, 4 * LAYERS)
    used[3, 1] = [0, 1] if set(trained.own[3, 1].tolist()) != {0, 1} else [2, 3]  # a fill where there is no record
    result = compare_routes(with_rows(trained, used=used), calls)
    assert result.first is not None
    assert (result.different, result.first.position, result.first.recorded) == (1, 3, False)
    assert "recorded nothing" in result.first.to_text()


def test_a_call_without_any_rows_leaves_its_positions_unrecorded_for_good() -> None:
    trained, calls = episode()
    calls[0] = msgspec.structs.replace(calls[0], rows=np.zeros((0, 0, 0), np.uint8))
    calls[1] = msgspec.structs.replace(calls[1], routes_from=0, rows=np.concatenate([experts(3, 5), calls[1].rows]))
    found = find_engine_routes(trained, calls)
    assert found is not None
    assert found[1].tolist() == [False] * 5 + [True] * 4 + [False]


def test_of_several_attempts_the_one_that_sampled_these_log_probs_counts() -> None:
    trained, calls = episode()
    _, failed = episode(logprob=-2.0)
    failed = [msgspec.structs.replace(c, rows=experts(20 + c.turn, len(c.rows))) for c in failed]
    assert compare_routes(trained, [*failed, *calls]).is_verified
    assert compare_routes(trained, [*calls, *failed]).is_verified
    assert compare_routes(trained, [failed[0], *calls]).is_verified  # it failed after its first turn
    result = compare_routes(trained, failed)
    assert (result.unmatched, result.is_verified) == ([f"{ID}s0"], False)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_sample_whose_sampling_is_not_in_the_record_is_unmatched(missing: int) -> None:
    trained, calls = episode()
    tokens = trained.token_ids.copy()
    tokens[4] += 1
    others_tokens = with_rows(trained, token_ids=tokens)
    for sample, record in ((trained, calls[:missing] + calls[missing + 1 :]), (trained, []), (others_tokens, calls)):
        assert compare_routes(sample, record).unmatched == [f"{ID}s0"]


def test_a_row_whose_context_was_rewritten_shares_only_what_comes_before() -> None:
    """Rows 5.. belong to the call that fed its own tokens."""
    trained, calls = episode()
    fresh = experts(30, 2)
    branch = branch_of(trained, calls[0].rows, fresh)
    calls.append(call(2, branch.token_ids[:7], [15], fresh, start=5))
    result = compare_routes(branch, calls)
    assert (result.equal, result.different, result.unrecorded, result.unmatched) == (7 * LAYERS, 0, LAYERS, [])
    assert compare_routes(trained, calls).is_verified


def of_version(calls, *versions: int):
    """The calls, each sampled by one version."""
    return [
        msgspec.structs.replace(c, policy_version=np.full(len(c.token_ids), v, np.int32))
        for c, v in zip(calls, versions, strict=True)
    ]


def branched() -> tuple[TrainedRoutes, list[EngineCall]]:
    """Two calls of the same prompt, of which the second, a row of its own, was asked only for what the first did not return."""
    trained, (older, _) = episode()
    lent, fresh = experts(30, 5), experts(32, 2)
    branch = branch_of(trained, lent, fresh)
    again = msgspec.structs.replace(older, turn=1, rows=lent)
    return branch, [older, again, call(2, branch.token_ids[:7], [15], fresh, start=5)]


def test_a_branch_has_to_have_the_rows_of_its_own_weights() -> None:
    branch, calls = branched()
    assert compare_routes(branch, of_version(calls, 0, 1, 1)).is_verified
    stale = branch.used.copy()
    stale[:5] = calls[0].rows
    assert compare_routes(with_rows(branch, used=stale), of_version(calls, 0, 1, 1)).different > 0
    assert compare_routes(with_rows(branch, used=stale), of_version(calls, 1, 0, 1)).is_verified


def test_rows_that_newer_weights_made_within_a_call_are_not_those_of_its_version() -> None:
    branch, calls = branched()
    calls = of_version(calls, 0, 1, 1)
    crossed = msgspec.structs.replace(calls[1], policy_version=np.asarray([1, 2, 2], np.int32))
    found = find_engine_routes(branch, [calls[0], crossed, calls[2]])
    assert found is not None
    assert found[1].tolist() == [True] * 3 + [False] * 2 + [True] * 2 + [False]


def test_of_two_calls_of_the_same_weights_either_may_have_lent_its_rows() -> None:
    branch, calls = branched()
    for order in ((0, 1), (1, 0)):
        assert compare_routes(branch, of_version([*[calls[i] for i in order], calls[2]], 1, 1, 1)).is_verified


def test_a_call_that_was_asked_for_everything_has_its_own_rows_and_nobody_elses() -> None:
    branch, calls = branched()
    whole = experts(40, 7)
    calls = of_version([*calls[:2], call(2, branch.token_ids[:7], [15], whole)], 1, 1, 1)
    assert compare_routes(branch, calls).different > 0
    used = branch.own.copy()
    used[:7] = whole
    assert compare_routes(with_rows(branch, used=used), calls).is_verified


def test_rows_of_another_model_are_refused() -> None:
    trained, calls = episode()
    calls[0] = msgspec.structs.replace(calls[0], rows=calls[0].rows[:, :2])
    with pytest.raises(RouteFileError, match="different models"):
        compare_routes(trained, calls)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    trained, calls = episode()
    RouteFile(tmp_path / "routes", "learner").append(trained)
    engine = RouteFile(tmp_path / "routes", "engine-generator-0")
    for each in reversed(calls):
        engine.append(each)
    index = RouteIndex(tmp_path)
    assert index.problems == []
    (entry,) = index.trained_entries
    again = load_route_record(entry, TrainedRoutes)
    for name, value in msgspec.structs.asdict(trained).items():
        found = getattr(again, name)
        np.testing.assert_array_equal(found, value)
        assert not isinstance(value, np.ndarray) or (found.dtype, found.shape) == (value.dtype, value.shape)
    assert [c.turn for c in index.load_calls(ID)] == [0, 1], "in order of time, not of writing"
    assert verify_routes(index).is_verified
    with pytest.raises(RouteFileError, match="a record of TrainedRoutes"):
        load_route_record(entry, EngineCall)


@pytest.mark.parametrize("cut", [1, 20, 10_000])
def test_a_torn_file_is_read_up_to_there_and_reported(tmp_path: Path, cut: int) -> None:
    file = RouteFile(tmp_path / "routes", "learner")
    trained, _ = episode()
    file.append(trained)
    path = tmp_path / "routes" / "learner.0.routes"
    whole = path.stat().st_size
    file.append(trained)
    path.write_bytes(path.read_bytes()[: min(whole + cut, 2 * whole - 1)])
    entries, problem = scan_route_file(path)
    assert len(entries) == 1
    assert f"from byte {whole} on there is no record" in problem
    assert "its process was killed, or is still writing" in problem
    index = RouteIndex(tmp_path)
    assert len(index.trained_entries) == 1
    assert index.problems == [problem]


def test_damage_is_reported_and_not_taken_for_routes(tmp_path: Path) -> None:
    file = RouteFile(tmp_path, "learner")
    trained, _ = episode()
    file.append(trained)
    path = tmp_path / "learner.0.routes"
    good = path.read_bytes()
    path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])  # the last 7 bytes may be padding
    ((entry,), problem) = scan_route_file(path)
    assert problem == ""
    with pytest.raises(RouteFileError, match=r"learner\.0\.routes: the record at byte \d+ is damaged"):
        load_route_record(entry, TrainedRoutes)
    header = good.index(b"kind")
    path.write_bytes(good[:header] + bytes([good[header] ^ 1]) + good[header + 1 :] + good)
    assert scan_route_file(path)[0] == []
    assert "the record at byte 0 is damaged" in scan_route_file(path)[1]
    path.write_bytes(good + b"something else entirely, longer than a frame's head")
    said = f"from byte {len(good)} on there is no record: b'somethin' is not the beginning of a record"
    assert said in scan_route_file(path)[1]
    path.write_bytes(b"R3RT" + good[4:])  # before they were containers
    assert scan_route_file(path)[0] == []
    assert "is not the beginning of a record, which is b'r3route2'" in scan_route_file(path)[1]


def test_a_process_that_comes_back_writes_a_file_of_its_own(tmp_path: Path) -> None:
    trained, _ = episode()
    for _ in range(3):
        RouteFile(tmp_path, "learner").append(trained)
    RouteFile(tmp_path, "idle")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"learner.{n}.routes" for n in range(3)]


def test_threads_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RouteFile(tmp_path, "learner")
    open_file = SystemFiles.open
    # So that all of them want to open it.
    monkeypatch.setattr(SystemFiles, "open", lambda *args, **how: (time.sleep(0.05), open_file(*args, **how))[1])
    trained, _ = episode()
    threads = [threading.Thread(target=lambda: [file.append(trained) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    entries, problem = scan_route_file(tmp_path / "learner.0.routes")
    assert (len(entries), problem) == (200, "")
    assert len(list(tmp_path.iterdir())) == 1


def parts(trace: RouteTrace, rows: list[slice], columns: list[list[int]]) -> list[RouteTrace]:
    return [
        msgspec.structs.replace(trace, first=r.start, columns=c, own=trace.own[r][:, c], used=trace.used[r][:, c])
        for r in rows
        for c in columns
    ]


def whole_trace(name: str = "a", tokens: int = 11) -> RouteTrace:
    cu_seqlens = np.asarray([0, 4, tokens], np.int32)
    own, used = (experts(seed, tokens).astype(np.uint16) for seed in (1, 2))
    return RouteTrace((f"{name}0", f"{name}1"), cu_seqlens, 0, list(range(LAYERS)), own, used)


def assert_same(one: RouteTrace, other: RouteTrace) -> None:
    assert (one.sample_ids, one.first, one.columns) == (other.sample_ids, other.first, other.columns)
    np.testing.assert_array_equal(one.own, other.own)
    np.testing.assert_array_equal(one.used, other.used)


def test_traces_split_by_tokens_and_layers_are_put_together() -> None:
    one, other = whole_trace("a"), whole_trace("b", 6)
    # Tensor parallel over padded tokens: the last rank has padding only, and so no row at all.
    split = parts(one, [slice(0, 4), slice(4, 8), slice(8, 11), slice(11, 11)], [[0, 2], [1]])
    split += parts(other, [slice(0, 6)], [[1], [0], [2]])
    padding = RouteTrace((), np.zeros(1, np.int32), 0, [0], one.own[:0, :1], one.used[:0, :1])
    merged = merge_traces([*reversed(split), padding, split[0]], LAYERS)
    assert len(merged) == 2
    assert_same(merged[1], one)
    assert_same(merged[0], other)


def test_log_probs_of_the_last_stage_are_kept_beside_routes_of_the_others() -> None:
    first, last = parts(whole_trace(), [slice(0, 11)], [[0, 1], [2]])
    nothing = np.zeros((0, 0, 0), np.uint16)
    scores = np.linspace(-2, 0, 11, dtype=np.float32)
    for split in (
        [first, msgspec.structs.replace(last, logprobs=scores)],
        # The last stage has no MoE layer.
        [msgspec.structs.replace(last, columns=[], own=nothing, used=nothing, logprobs=scores), first, last],
    ):
        (merged,) = merge_traces(split, LAYERS)
        assert_same(merged, whole_trace())
        np.testing.assert_array_equal(merged.logprobs, scores)


def test_a_part_that_is_missing_or_contradicts_is_refused() -> None:
    split = parts(whole_trace(), [slice(0, 4), slice(4, 11)], [[0, 1], [2]])
    with pytest.raises(RoutingError, match=r"no trace has row 4 of MoE layer 2 in the micro-batch of a0"):
        merge_traces(split[:3], LAYERS)
    changed = split[1].used.copy()
    changed[0, 0] = changed[0, 0] + 1
    with pytest.raises(RoutingError, match="contradict"):
        merge_traces([*split, msgspec.structs.replace(split[1], used=changed)], LAYERS)


def test_an_index_reads_on_where_it_stopped_and_never_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, calls = episode()
    learner, engine = RouteFile(tmp_path / "routes", "learner"), RouteFile(tmp_path / "routes", "engine-0")
    index = RouteIndex(tmp_path)
    assert index.read_new() == []
    scanned: list[int] = []
    monkeypatch.setattr(
        routes,
        "scan_route_file",
        lambda path, at, files: (scanned.append(at), scan_route_file(path, at, files=files))[1],
    )
    for step in (1, 2, 3):
        learner.append(msgspec.structs.replace(trained, step=step))
        engine.append(calls[step % 2])
        assert [entry.facts["step"] for entry in index.read_new()] == [step]
        assert index.read_new() == []
    assert scanned[-1] > scanned[0] == 0, "from its last record on"
    with learner.path.open("ab") as file:
        file.write(ROUTES_CONTAINER.magic + b"half")
    assert index.read_new() == []
    assert "no record" in index.problems[0]
    whole = RouteIndex(tmp_path)
    assert (index.trained_entries, index.call_entries) == (whole.trained_entries, whole.call_entries)
    assert [entry.facts["time"] for entry in index.call_entries[ID]] == [0.0, 1.0, 1.0]
