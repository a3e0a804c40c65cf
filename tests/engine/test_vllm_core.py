"""What leaves vLLM's engine core whole is what would have left it token by token, and what is used of vLLM is there."""

import ast
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from r3async.rollout.engine import EngineError
from r3async.rollout.vllm import core as vllm_core
from r3async.rollout.vllm import messages as vllm_messages
from r3async.rollout.vllm.core import AnswerBufferingMixin, check_vllm_interface
from r3async.rollout.vllm.messages import CoreOutputDecoder, CoreRequest, EngineLoad, build_sampling_params
from r3async.rollout.vllm.names import VLLM_NAMES, check_vllm_names, find_missing_names

pytestmark = pytest.mark.engine
NAMES = ("a", "b", "c")


class Steps:
    """A scheduler whose outputs the test makes."""

    def __init__(self) -> None:
        self.pause_state, self.running, self.waiting = PauseState.UNPAUSED, list(NAMES), []
        self.next: list[EngineCoreOutput] = []

    def update_from_output(self) -> dict[int, EngineCoreOutputs]:
        outputs, self.next = self.next, []
        step = EngineCoreOutputs(outputs=outputs, scheduler_stats=self.make_stats())
        return {0: step} if outputs or step.scheduler_stats else {}

    def finish_requests(self, names, status):
        return [Ended(name, status) for name in names]

    def has_requests(self) -> bool:
        return False

    def make_stats(self):
        return SchedulerStats(kv_cache_usage=0.5, num_waiting_reqs=2)


class Ended:
    def __init__(self, name, status):
        self.request_id, self.status = name, status

    def get_finished_reason(self):
        return RequestStatus.get_finished_reason(self.status)


class Whole(AnswerBufferingMixin, Steps):
    pass


def part(name: str, number: int, rng, count: int, reason: FinishReason | None) -> EngineCoreOutput:
    """The `number`th output of a request: views of a step's arrays, as vLLM gives them."""
    prompt = 3 if number == 0 else 0
    logprobs = rng.random((8, 2)).astype(np.float32)
    return EngineCoreOutput(
        name,
        rng.integers(0, 99, count).tolist(),
        new_logprobs=LogprobsLists(rng.integers(0, 9, (8, 2))[:count], logprobs[:count], np.zeros(8, np.int64)[:count]),
        finish_reason=reason,
        prefill_stats=PrefillStats(num_cached_tokens=7) if number == 0 else None,
        routed_experts=rng.integers(0, 99, (12, 2, 3)).astype(np.uint8)[: prompt + count] if count else None,
    )


def contents(outputs: list[EngineCoreOutput]) -> dict[str, tuple]:
    """Of each request, all that its outputs say together; whole answers have log-probs without alternatives."""
    found = {}
    for name in NAMES:
        mine = [o for o in outputs if o.request_id == name]
        logprobs = [
            lp for o in mine if o.new_logprobs for lp in np.asarray(o.new_logprobs.logprobs).reshape(-1, 2)[:, 0]
        ]
        routes = [row.tobytes() for o in mine if o.routed_experts is not None for row in o.routed_experts]
        tokens = [t for o in mine for t in o.new_token_ids]
        cached = [o.prefill_stats.num_cached_tokens for o in mine if o.prefill_stats]
        found[name] = (tokens, logprobs, routes, cached, [o.finish_reason for o in mine if o.finish_reason is not None])
    return found


def received(outputs: EngineCoreOutputs) -> vllm_messages.CoreOutputs:
    """As the engine's owner sees what vLLM sends."""
    return CoreOutputDecoder().decode([memoryview(frame).cast("B") for frame in MsgpackEncoder().encode(outputs)])


def widened(outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
    """Over the wire and back; log-probs in the shape in which vLLM has them."""
    decoded = received(EngineCoreOutputs(outputs=outputs))
    for output in decoded.outputs:
        if output.new_logprobs is not None:
            output.new_logprobs.logprobs = np.repeat(output.new_logprobs.logprobs, 2).reshape(-1, 2)
    return decoded.outputs


@given(
    steps=st.lists(
        st.tuples(
            st.dictionaries(
                st.sampled_from(NAMES), st.sampled_from(["token", "tokens", "stop", "nothing"]), max_size=3
            ),
            st.sampled_from(["", "pause", "resume", "a", "b", "c"]),
        ),
        max_size=20,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_whole_answers_say_what_their_pieces_say(steps, seed):
    rng, whole = np.random.default_rng(seed), Whole()
    pieces, left, over, numbers = [], [], set(), dict.fromkeys(NAMES, 0)
    for outputs, event in steps:
        for name, what in outputs.items():
            if name not in over and what != "nothing" and whole.pause_state == PauseState.UNPAUSED:
                reason = FinishReason.STOP if what == "stop" else None
                piece = part(name, numbers[name], rng, 3 if what == "tokens" else 1, reason)
                numbers[name] += 1
                pieces.append(piece)
                whole.next.append(piece)
                over |= {name} if reason is not None else set()
        if event == "pause":
            whole.pause_state = PauseState.PAUSED_ALL
        elif event == "resume":
            whole.pause_state = PauseState.UNPAUSED
        elif event and event not in over:
            # What vLLM has of the step is sampled before it is told to abort, or not at all.
            left += whole.update_from_output().get(0, EngineCoreOutputs()).outputs
            whole.finish_requests([event], RequestStatus.FINISHED_ABORTED)
            pieces.append(EngineCoreOutput(event, [], finish_reason=FinishReason.ABORT))
            over.add(event)
            assert whole.has_requests()
        left += whole.update_from_output().get(0, EngineCoreOutputs()).outputs
        assert not whole.has_requests(), "a pause would not be confirmed"
        now, said = contents(pieces), contents(widened(list(left)))
        for name in NAMES:
            if name in over or whole.pause_state == PauseState.PAUSED_ALL:
                assert said[name] == now[name]
            assert len([o for o in left if o.request_id == name and o.finish_reason is not None]) == (name in over)
    if not any(event == "pause" for _, event in steps):
        assert len(left) == len(over)


def test_arrays_of_a_step_may_be_used_again():
    whole, rows, logprobs = Whole(), np.ones((1, 2, 3), np.uint8), np.full((1, 1), -0.5, np.float32)
    for _ in range(3):
        output = EngineCoreOutput("a", [5], new_logprobs=LogprobsLists(rows, logprobs, rows), routed_experts=rows)
        whole.next.append(output)
        whole.update_from_output()
        rows[:], logprobs[:] = 9, -9.0
        rows, logprobs = np.ones_like(rows), np.full_like(logprobs, -0.5)
    whole.next.append(EngineCoreOutput("a", [], finish_reason=FinishReason.LENGTH))
    (answer,) = whole.update_from_output()[0].outputs
    assert answer.new_token_ids == [5, 5, 5]
    assert answer.new_logprobs.logprobs.tolist() == [-0.5] * 3
    assert (answer.routed_experts == 1).all()
    assert answer.routed_experts.shape == (3, 2, 3)


def test_the_load_is_sent_now_and_then_and_when_the_engine_is_idle(monkeypatch):
    whole, load, now = Whole(), EngineLoad(), 100.0
    monkeypatch.setattr(vllm_core.time, "monotonic", lambda: now)
    sent = []
    for _ in range(100):
        now += 0.01
        sent += whole.update_from_output().values()
    assert 9 <= len(sent) <= 11
    load.update_from(sent[0])
    assert load.as_metrics() == {"kv_cache_usage": 0.5, "waiting": 2, "preemptions": 0}
    whole.running.clear()
    now += 0.01
    assert whole.update_from_output()[0].scheduler_stats is not None


def test_the_installed_vllm_has_every_name_that_is_used(monkeypatch):
    """The contract with vLLM: a name that a version lacks is reported with the feature that needs it."""
    assert find_missing_names() == []
    check_vllm_interface()
    tomorrow = {"vllm.v1.engine:EngineCoreOutput": "request_id routes_of_tomorrow", "vllm.v1.nowhere": "x"}
    monkeypatch.setitem(VLLM_NAMES, "routes", tomorrow)
    missing = r"vLLM \d.* has no EngineCoreOutput\.routes_of_tomorrow \(routes\), vllm\.v1\.nowhere \(routes\): r3async is made"
    with pytest.raises(EngineError, match=missing):
        check_vllm_names()


def test_the_contract_has_what_our_files_import_of_vllm():
    named = {place.partition(":")[0] for places in VLLM_NAMES.values() for place in places}
    for path in Path(vllm_core.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                modules = {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
                assert modules & named, f"{path.name} imports {node.module}, which names.VLLM_NAMES lacks"


def test_a_field_that_moved_or_a_value_that_changed_is_found(monkeypatch):
    class Moved(vllm_messages.CoreOutput):
        one_more: int = 0

    with monkeypatch.context() as patch:
        patch.setitem(vllm_core._POSITIONAL_TYPES, EngineCoreOutput, Moved)
        with pytest.raises(EngineError, match="has another EngineCoreOutput: r3async is"):
            check_vllm_interface()
    monkeypatch.setattr(vllm_core, "_EXPECTED_VALUES", ((("stop", "length"), ("length", "stop")),))
    with pytest.raises(EngineError, match="has another"):
        check_vllm_interface()


def test_requests_arrive_as_those_that_vllm_would_make():
    params = SamplingParams(
        max_tokens=17,
        temperature=0.7,
        stop_token_ids=[3, 5],
        routed_experts_prompt_start=4,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
    )
    ours = CoreRequest(
        "r",
        [1, 2],
        None,
        build_sampling_params(17, 0.7, (3, 5), routes_from=4, logprobs=0),
        None,
        1.5,
        None,
        "salt",
        None,
    )
    theirs = EngineCoreRequest("r", [1, 2], None, params, None, 1.5, None, "salt", None)
    decoder = MsgpackDecoder(EngineCoreRequest)
    assert decoder.decode([msgspec.msgpack.encode(ours)]) == decoder.decode(MsgpackEncoder().encode(theirs))
    scored = CoreRequest("r", [1], None, build_sampling_params(1, 0.0, prompt_logprobs=0), None, 1.5, None, None, None)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    theirs = EngineCoreRequest("r", [1], None, params, None, 1.5, None, None, None)
    assert decoder.decode([msgspec.msgpack.encode(scored)]) == decoder.decode(MsgpackEncoder().encode(theirs))


@pytest.mark.parametrize("temperature", [-1.0, 2.5, float("nan"), float("inf")])
def test_a_temperature_that_would_end_the_core_is_refused(temperature):
    with pytest.raises(VLLMValidationError, match="temperature"):
        SamplingParams(temperature=temperature)
    with pytest.raises(EngineError, match="temperature"):
        build_sampling_params(1, temperature)


def test_what_vllm_sends_beside_answers_arrives():
    values = torch.arange(6, dtype=torch.float32).reshape(3, 2)
    scores = LogprobsTensors(values.long(), values, values[:, 0].long())
    output = EngineCoreOutput(
        "a", [5], new_prompt_logprobs_tensors=scores, events=[EngineCoreEvent(EngineCoreEventType.PREEMPTED, 1.0)]
    )
    stats = SchedulerStats(kv_cache_usage=0.25, num_waiting_reqs=7)
    decoded = received(EngineCoreOutputs(outputs=[output], scheduler_stats=stats))
    assert decoded.outputs[0].new_prompt_logprobs_tensors.logprobs.tolist() == values.tolist()
    load = EngineLoad()
    load.update_from(decoded)
    assert load.as_metrics() == {"kv_cache_usage": 0.25, "waiting": 7, "preemptions": 1}
    for answer in (UtilityOutput(3, None, UtilityResult([[4, 2**63]])), UtilityOutput(4, "it failed")):
        returned = received(EngineCoreOutputs(utility_output=answer)).utility_output
        assert (returned.call_id, returned.failure_message) == (answer.call_id, answer.failure_message)
        assert returned.result is None or returned.result[1] == [[4, 2**63]]
