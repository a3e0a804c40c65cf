"""A client of the Tinker server that retries as the SDK does, and knows what every result has to be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from dev.simulation.invariants import InvariantViolated
from dev.simulation.tinker import backend as scripted
from dev.simulation.tinker.line import ServerLine

RETRY_SECONDS = 900.0
"""Longer than any outage of a run: who tries for so long gets no answer."""
HEARTBEAT_SECONDS = 600.0


class ClientPlan(NamedTuple):
    """The plan of a client's requests.

    Attributes:
        samples: Samples of a step.
        vanishes_in: The step in the middle of which it is gone for good; -1 for never.
        closes: True if it closes its session; False if it goes on with heartbeats alone.
    """

    number: int
    rank: int
    steps: int
    samples: int
    vanishes_in: int
    closes: bool


class _Gone(Exception):
    """The server does not know a request any more (410)."""


class _OpenSampler(NamedTuple):
    """A sampler, and whose weights it has. `version` is None for the base model's."""

    sampler_id: str
    weights: str
    version: int | None


class _SampledDatum(NamedTuple):
    tokens: list[int]
    sampler: _OpenSampler | None


class _Request(NamedTuple):
    number: int
    path: str
    body: dict[str, Any]
    data: list[_SampledDatum]


class SimulatedClient:
    def __init__(
        self,
        plan: ClientPlan,
        line: ServerLine,
        rng: Random,
        time: Callable[[], float],
        *,
        keeps_all: bool,
    ):
        self.plan = plan
        self.session_id = ""
        self.model_id = ""
        self.steps = 0
        self._line = line
        self._rng = rng
        self._time = time
        self._keeps_all = keeps_all
        """True if the server has room for all sequences of the run."""
        self._numbers = itertools.count(1)
        self._sample_numbers = itertools.count()
        self._sampler_numbers = itertools.count()
        self._weights = scripted.start_weights(plan.rank)
        self._gradient = ""
        self._version = 0
        self._samplers: list[_OpenSampler] = []
        self._saved: dict[str, str] = {}

    # -- the SDK -----------------------------------------------------------------------------------

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a request, again after what an SDK takes for a failure of the line or the server."""
        deadline = self._time() + RETRY_SECONDS
        for attempt in itertools.count():
            try:
                status, answer = await self._line.request(path, body)
            except ConnectionError:
                status, answer = 0, {}
            if status == 200:
                return answer
            if status and status not in (408, 409, 429) and status < 500:
                raise _Gone(f"{path}: {status} {answer}")
            if self._time() > deadline:
                raise InvariantViolated(
                    "stuck", f"no answer to {path} of client {self.plan.number}"
                )
            await asyncio.sleep(min(0.5 * 2**attempt, 10.0))
        raise AssertionError

    async def _poll(self, request_id: str) -> dict[str, Any]:
        failures = 0
        deadline = self._time() + 2 * RETRY_SECONDS
        while self._time() < deadline:
            try:
                status, answer = await self._line.request(
                    "retrieve_future", {"request_id": request_id}
                )
                failures = 0
            except ConnectionError:
                await asyncio.sleep(min(2**failures, 30))
                failures += 1
                continue
            if status == 410:
                raise _Gone(request_id)
            if status == 200 and answer.get("type") != "try_again":
                return answer
        raise InvariantViolated("stuck", f"no result of {request_id}")

    async def _finish(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a request of a model."""
        try:
            promise = await self._post(path, body)
            return await self._poll(promise["request_id"])
        except _Gone as gone:
            raise InvariantViolated("lost", f"{path} {body.get('seq_id')}: {gone}") from gone

    # -- the loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until the plan is done. Raises `InvariantViolated`."""
        try:
            await self._train()
        except _Gone as gone:
            raise InvariantViolated("lost", f"client {self.plan.number}: {gone}") from gone

    async def _train(self) -> None:
        self.session_id = (await self._post("create_session", {}))["session_id"]
        created = await self._finish(
            "create_model",
            {
                "session_id": self.session_id,
                "model_seq_id": 0,
                "base_model": scripted.BASE_NAME,
                "lora_config": {"rank": self.plan.rank},
            },
        )
        self.model_id = created["model_id"]
        await self._open_sampler("base_model", scripted.BASE_NAME, scripted.digest("base"), None)
        for step in range(self.plan.steps):
            if step == self.plan.vanishes_in:
                await self._vanish()
                return
            await self._take_step()
            self.steps += 1
        if self.plan.closes:
            try:
                await self._post("finish", {"session_id": self.session_id})
            except _Gone:  # the first one of several was answered, but the answer was lost
                return

    async def _vanish(self) -> None:
        requests = self._plan_requests(await self._draw_samples())
        sent = [
            asyncio.ensure_future(self._line.request(one.path, one.body))
            for one in requests
            if self._rng.random() < 0.5
        ]
        await asyncio.wait([*sent, asyncio.ensure_future(asyncio.sleep(0.1))])
        for one in sent:
            one.cancelled() or one.exception()

    async def beat(self) -> None:
        """Send heartbeats for ever, as an SDK whose client was dropped."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                status, _ = await self._line.request(
                    "session_heartbeat", {"session_id": self.session_id}
                )
            except ConnectionError:
                continue
            if status == 410:
                return

    async def _take_step(self) -> None:
        requests = self._plan_requests(await self._draw_samples())
        order = list(requests)
        if self._rng.random() < 0.7:
            self._rng.shuffle(order)
        results: dict[int, dict[str, Any]] = {}

        async def send(one: _Request) -> None:
            results[one.number] = await self._finish(one.path, one.body)

        await _gather([send(one) for one in order])
        for one in requests:
            self._check_result(one, results[one.number])
        await self._save()

    def _plan_requests(self, data: list[_SampledDatum]) -> list[_Request]:
        """Return the requests of a step: parts of a batch, perhaps one that is refused and one that
        fails, and the update."""
        own = [self._draw_number() for _ in range(self._rng.randint(3, 9))]
        data = [*data, _SampledDatum(own, None)]
        size = self._rng.randint(1, len(data))
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        planned = [("forward_backward", part, "importance_sampling") for part in parts]
        for loss, chance, token in (
            ("no_such_loss", 0.2, 1),
            ("importance_sampling", 0.1, scripted.POISON),
            ("importance_sampling", 0.05, scripted.LETHAL),
        ):
            if self._rng.random() < chance:
                wrong = [_SampledDatum([5, token, 7, 8], None)]
                planned.insert(
                    self._rng.randint(0, len(planned)), ("forward_backward", wrong, loss)
                )
        if self._rng.random() < 0.4:
            planned.append(("forward", data[:1], "importance_sampling"))
        requests = []
        for path, part, loss in planned:
            number = next(self._numbers)
            key = "forward_input" if path == "forward" else "forward_backward_input"
            inner = {"data": [_to_json(one) for one in part], "loss_fn": loss}
            body = {"model_id": self.model_id, "seq_id": number, key: inner}
            requests.append(_Request(number, path, body, part))
        number = next(self._numbers)
        body = {
            "model_id": self.model_id,
            "seq_id": number,
            "adam_params": {"learning_rate": round(self._rng.random(), 6)},
        }
        return [*requests, _Request(number, "optim_step", body, [])]

    def _draw_number(self) -> int:
        return self._rng.randrange(100, scripted.LETHAL)

    def _check_result(self, request: _Request, result: dict[str, Any]) -> None:
        where = f"client {self.plan.number}, request {request.number} ({request.path})"
        wrong = {token for one in request.data for token in one.tokens}
        inner = request.body.get("forward_backward_input", {})
        refused = inner.get("loss_fn") == "no_such_loss"
        hopeless = bool(wrong & {scripted.POISON, scripted.LETHAL})
        if "error" in result:
            category = "user" if refused else "server"
            if result["category"] != category:
                raise InvariantViolated("refused", f"{where}: {result}")
            self._line.counts["failed"] += not (refused or hopeless)
            return
        if refused or hopeless:
            raise InvariantViolated("refused", f"{where} has a result")
        if request.path == "optim_step":
            rate = request.body["adam_params"]["learning_rate"]
            self._weights = scripted.step(self._weights, self._gradient, rate)
            self._gradient = ""
            self._version += 1
            self._compare(where, result["metrics"]["weights:unique"])
            return
        self._compare(where, result["loss_fn_outputs"][0]["logprobs"]["data"][0])
        self._check_metrics(where, request.data, result["metrics"])
        if request.path == "forward_backward":
            tokens = [one.tokens[:-1] for one in request.data]
            self._gradient = scripted.accumulate(self._gradient, tokens)

    def _compare(self, where: str, found: float) -> None:
        expected = scripted.score(self._weights)
        if found != expected:
            raise InvariantViolated(
                "weights", f"{where}: {found}, where its requests once each make {expected}"
            )

    def _check_metrics(
        self, where: str, data: list[_SampledDatum], metrics: dict[str, float]
    ) -> None:
        if metrics["version:unique"] != self._version:
            raise InvariantViolated("version", f"{where}: {metrics}, and not {self._version}")
        if not self._keeps_all:
            return
        recorded = total = routes = 0
        ages = [-1]
        for one in data:
            total += len(one.tokens) - 1
            if one.sampler is not None:
                recorded += len(one.tokens) - 1
                routes += int(scripted.route_tokens(one.sampler.weights, one.tokens).sum())
                if one.sampler.version is not None:
                    ages.append(self._version - one.sampler.version)
        expected = {
            "routes/recorded:mean": recorded / total,
            "routes/sum:sum": routes,
            "staleness:max": max(ages),
        }
        found = {name: metrics[name] for name in expected}
        if recorded and found != expected:
            raise InvariantViolated("kept", f"{where}: {found}, and not {expected}")

    # -- samples -----------------------------------------------------------------------------------

    async def _open_sampler(self, key: str, value: str, weights: str, version: int | None) -> None:
        body = {
            "session_id": self.session_id,
            "sampling_session_seq_id": next(self._sampler_numbers),
            key: value,
        }
        sampler_id = (await self._post("create_sampling_session", body))["sampling_session_id"]
        self._samplers.append(_OpenSampler(sampler_id, weights, version))

    async def _draw_samples(self) -> list[_SampledDatum]:
        found: list[_SampledDatum] = []

        async def draw() -> None:
            sampler = self._rng.choice(self._samplers[-4:])
            prompt = [self.plan.number, *(self._draw_number() for _ in range(3))]
            seed = self._rng.randrange(10**9)
            answer = await self._sample(sampler, prompt, seed)
            for index, sequence in enumerate(answer["sequences"]):
                tokens = scripted.draw_tokens(sampler.weights, prompt, seed, index, 4)
                if sequence["tokens"] != tokens:
                    reason = (
                        f"client {self.plan.number}: not by the weights of {sampler.sampler_id}"
                    )
                    raise InvariantViolated("sampled", reason)
                found.append(_SampledDatum([*prompt, *tokens], sampler))

        await _gather([draw() for _ in range(self.plan.samples)])
        return found[:6]

    async def _sample(self, sampler: _OpenSampler, prompt: list[int], seed: int) -> dict[str, Any]:
        for _ in range(20):
            body = {
                "sampling_session_id": sampler.sampler_id,
                "seq_id": next(self._sample_numbers),
                "num_samples": 2,
                "prompt": {"chunks": [{"tokens": prompt}]},
                "sampling_params": {"max_tokens": 4, "seed": seed},
            }
            try:
                answer = await self._poll((await self._post("asample", body))["request_id"])
            except _Gone as gone:
                if "asample" in str(gone):  # the sampler is not there
                    raise
                continue
            if "error" in answer:
                raise InvariantViolated("sampled", f"client {self.plan.number}: {answer}")
            return answer
        raise InvariantViolated("stuck", f"a sample of client {self.plan.number}")

    # -- weights -----------------------------------------------------------------------------------

    async def _save(self) -> None:
        """Make a snapshot, and perhaps save weights, or load earlier ones."""
        result = await self._save_as("save_weights_for_sampler", {})
        if result is not None:
            sampler_id = result["sampling_session_id"]
            self._samplers.append(_OpenSampler(sampler_id, self._weights, self._version))
        if self._rng.random() < 0.3:
            result = await self._save_as("save_weights", {"path": f"w{self._version}"})
            if result is not None:
                self._saved[result["path"]] = self._weights
        if self._rng.random() < 0.2:
            result = await self._save_as("save_weights_for_sampler", {"path": f"s{self._version}"})
            if result is not None:
                path = result["path"]
                await self._open_sampler("model_path", path, self._weights, self._version)
        if self._saved and self._rng.random() < 0.2:
            path = self._rng.choice(sorted(self._saved))
            if await self._save_as("load_weights", {"path": path, "optimizer": True}) is not None:
                self._weights = self._saved[path]
                self._version += 1

    async def _save_as(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the result; None if the backend failed."""
        number = {"model_id": self.model_id, "seq_id": next(self._numbers)}
        result = await self._finish(path, body | number)
        if result.get("category") == "user":
            raise InvariantViolated("refused", f"client {self.plan.number}, {path}: {result}")
        return None if "error" in result else result


async def _gather(work: list[Any]) -> None:
    """Wait for all, and raise the first error without leaving others to run."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _to_json(datum: _SampledDatum) -> dict[str, Any]:
    tokens, targets = datum.tokens[:-1], datum.tokens[1:]
    zeros = {"data": [0.0] * len(targets), "dtype": "float32"}
    return {
        "model_input": {"chunks": [{"tokens": tokens}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": targets, "dtype": "int64"},
            "logprobs": zeros,
            "advantages": zeros,
        },
    }
