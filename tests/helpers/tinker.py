"""A backend of the Tinker server in one process: a `TorchLearner` for each client, and a sampler by forward passes of the
model itself. And a server of it in a thread, for clients that block."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from aiohttp import web

from r3async.checkpoint.rank_files import LearnerStateReader
from r3async.config import Config
from r3async.data.routes import RoutingTrace
from r3async.data.tokens import Sample, TokenTable
from r3async.learner import train_step as verbs
from r3async.learner.micro_batches import collate_samples
from r3async.learner.optimizer import AdamSettings
from r3async.learner.torch.backend import TorchLearner
from r3async.learner.torch.model import PackedInputs
from r3async.tinker.backend import LossBatch, ServedModel, StateLostError
from r3async.tinker.datum_minibatch import run_training
from r3async.tinker.engine_backend import EngineBackend
from r3async.tinker.protocol import AdamParams, LoraConfig, SampledSequence, SamplingParams, TopLogprobs
from r3async.tinker.server import TinkerServer
from r3async.tinker.service import TinkerService
from r3async.tinker.sessions import Snapshot
from r3async.world.real import REAL_WORLD
from tests.helpers.learner import settings

KEY = "tml-test"
MAX_TOKENS = 128


class SingleProcessBackend:
    """Everything runs in one thread, one call after the other."""

    def __init__(self, model: Path, *, name: str = "tiny/moe", tokenizer: Any = None, batch_tokens: int = 96):
        self._path = model
        self._tokenizer = tokenizer
        self._batch_tokens = batch_tokens
        self._lane = REAL_WORLD.threads.new_worker("tinker backend")
        self.learners: dict[str, TorchLearner] = {}
        self._snapshots: dict[str, list[torch.Tensor]] = {}
        self.calls: list[str] = []
        """The verbs that were called, in order."""
        self.sampler = self._load(None)
        self._loaded = "base"
        self._snapshots["base"] = _copy_weights(self.sampler)
        self.served = ServedModel(name, str(model.resolve()), self.sampler.vocab_size, MAX_TOKENS)

    def _load(self, lora: LoraConfig | None) -> TorchLearner:
        changes: dict[str, Any] = {"routing__replay": "rollout"}
        if lora is not None:
            targets = ["all-linear"] if lora.train_mlp else ["self_attn"]
            changes["learner__lora"] = {"rank": lora.rank, "targets": targets}
        config: Config = settings(**changes)
        return TorchLearner.from_pretrained(config, self._path)

    @property
    def changes(self) -> list[str]:
        """The calls but those by which the server saves states and opens snapshots, now and then."""
        return [name for name in self.calls if name not in ("save_state", "open_snapshot")]

    async def _run(self, name: str, function, *args, **kwargs):
        self.calls.append(name)
        return await self._lane.run(function, *args, **kwargs)

    async def close(self) -> None:
        await self._lane.close()

    # -- training ------------------------------------------------------------------------------------------------------

    async def create_model(self, model_id: str, lora: LoraConfig | None) -> None:
        def make() -> None:
            self.learners[model_id] = self._load(lora)

        await self._run("create_model", make)

    def _find(self, model_id: str) -> TorchLearner:
        if model_id not in self.learners:
            raise StateLostError(model_id)
        return self.learners[model_id]

    def lose(self) -> None:
        """End, as it were, the processes of learner and engine, which start again without their clients' weights."""
        self.learners.clear()
        self._snapshots = {"base": self._snapshots["base"]}
        self._loaded = ""

    async def close_model(self, model_id: str) -> None:
        await self._run("close_model", self.learners.pop, model_id, None)

    async def forward(self, model_id: str, batch: LossBatch):
        return await self._run("forward", self.train, model_id, batch, forward_only=True)

    async def forward_backward(self, model_id: str, batch: LossBatch):
        return await self._run("forward_backward", self.train, model_id, batch, forward_only=False)

    def train(self, model_id: str, batch: LossBatch, *, forward_only: bool):
        return run_training(self._find(model_id), batch, self._batch_tokens, forward_only=forward_only)

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        return await self._run("optim_step", self._step, model_id, params)

    def _step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        learner = self._find(model_id)
        learner.optimizer.use_settings(
            AdamSettings(
                params.learning_rate,
                (params.beta1, params.beta2),
                params.eps,
                params.weight_decay,
                params.grad_clip_norm or math.inf,
            )
        )
        update = verbs.optim_step(learner)
        return {"grad_norm": update.grad_norm, "optimizer/skipped": float(bool(update.cause))}

    async def save_state(self, model_id: str, directory: Path) -> None:
        await self._run("save_state", lambda: verbs.save_state(self._find(model_id), directory))

    async def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        def load() -> None:
            names = [path for path in sorted(directory.iterdir()) if path.name.startswith("learner-")]
            self._find(model_id).restore_state(LearnerStateReader(names), with_optimizer=with_optimizer)

        await self._run("load_state", load)

    def gradients(self, model_id: str) -> dict[str, torch.Tensor]:
        named = self._find(model_id).model.causal_lm.named_parameters()
        return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}

    # -- sampling ------------------------------------------------------------------------------------------------------

    async def publish(self, snapshot: Snapshot, directory: Path) -> None:
        def write() -> None:
            torch.save(_copy_weights(self._find(snapshot.model_id)), directory / "weights.pt")

        await self._run("publish", write)

    async def open_snapshot(self, snapshot: Snapshot, directory: Path) -> None:
        def read() -> None:
            self._snapshots[snapshot.name] = torch.load(directory / "weights.pt", weights_only=True)

        await self._run("open_snapshot", read)

    async def close_snapshot(self, snapshot: Snapshot) -> None:
        await self._run("close_snapshot", self._snapshots.pop, snapshot.name, None)

    async def sample(
        self, snapshot: Snapshot, prompt: np.ndarray, params: SamplingParams, *, num_samples: int, top_k: int
    ) -> list[SampledSequence]:
        def run() -> list[SampledSequence]:
            rng = np.random.default_rng(params.seed)
            return [self._sample_one(snapshot, prompt, params, rng, top_k) for _ in range(num_samples)]

        return await self._run("sample", run)

    async def compute_logprobs(
        self, snapshot: Snapshot, tokens: np.ndarray, *, top_k: int
    ) -> tuple[np.ndarray, TopLogprobs | None]:
        def run() -> tuple[np.ndarray, TopLogprobs | None]:
            rows = self._score(snapshot, tokens)[0][:-1]
            logprobs = np.full(len(tokens), np.nan, np.float32)
            logprobs[1:] = rows[np.arange(len(rows)), tokens[1:]]
            empty = np.full((1, rows.shape[1]), np.nan, np.float32)
            return logprobs, _select_top(np.concatenate([empty, rows]), top_k)

        return await self._run("compute_logprobs", run)

    @torch.no_grad()
    def _score(self, snapshot: Snapshot, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probs of what follows each token, `[T, vocab]`, and the experts that routers chose."""
        if snapshot.name not in self._snapshots:
            raise StateLostError(snapshot.name)
        learner = self.sampler
        if self._loaded != snapshot.name:
            for parameter, value in zip(
                learner.model.causal_lm.parameters(), self._snapshots[snapshot.name], strict=True
            ):
                parameter.copy_(value)
            self._loaded = snapshot.name
        micro_batch = collate_samples([Sample("s", TokenTable.from_tokens(tokens))])
        with learner.forward_only(), learner.replay.bind_routes(micro_batch, keep=True) as routes:
            packed = PackedInputs.from_micro_batch(micro_batch, torch.device("cpu"))
            logits = learner.model.causal_lm(**packed.to_model_inputs()).logits[0]
            chosen = torch.stack(routes.preferred_experts, dim=1).numpy()
        return torch.log_softmax(logits.float(), -1).numpy(), chosen

    def _sample_one(
        self, snapshot: Snapshot, prompt: np.ndarray, params: SamplingParams, rng: np.random.Generator, top_k: int
    ) -> SampledSequence:
        replay = self.sampler.replay
        trace = RoutingTrace(layers=replay.num_moe_layers, top_k=replay.top_k, num_experts=replay.num_experts)
        tokens = list(map(int, prompt))
        logprobs, tops = [], []
        stopped = False
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        while len(tokens) < len(prompt) + params.max_tokens and not stopped:
            fed = trace.positions_fed
            rows, routes = self._score(snapshot, np.asarray(tokens, np.int32))
            trace.record_rows(fed, routes[fed:], len(tokens))
            row = rows[-1].astype(np.float64)
            logits = row / params.temperature if params.temperature else np.where(row == row.max(), 0.0, -np.inf)
            if params.top_k > 0:
                logits[np.argsort(-logits)[params.top_k :]] = -np.inf
            order = np.argsort(-logits)
            chances = np.exp(logits - logits.max())
            chances /= chances.sum()
            before = np.cumsum(chances[order]) - chances[order]
            chances[order[before >= params.top_p]] = 0.0
            chances /= chances.sum()
            token = int(rng.choice(len(chances), p=chances))
            tokens.append(token)
            logprobs.append(math.log(chances[token]))
            tops.append(rows[-1])
            text = "" if self._tokenizer is None else self._tokenizer.decode(tokens[len(prompt) :])
            stopped = any(stop in text if isinstance(stop, str) else stop == token for stop in stops)
        experts, recorded = trace.to_arrays(len(tokens) - 1)
        sampled = np.asarray(tokens[len(prompt) :], np.int32)
        top = _select_top(np.stack(tops), top_k)
        return SampledSequence(sampled, np.asarray(logprobs, np.float32), stopped, experts, recorded, top)


def _copy_weights(learner: TorchLearner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.causal_lm.parameters()]


def _select_top(rows: np.ndarray, top_k: int) -> TopLogprobs | None:
    if not top_k:
        return None
    ids = np.argsort(-np.nan_to_num(rows, nan=-1e9), axis=1, kind="stable")[:, :top_k]
    return TopLogprobs(ids.astype(np.int32), np.take_along_axis(rows, ids, axis=1))


class SeenRequest(NamedTuple):
    path: str
    time: float
    headers: Mapping[str, str]

    @property
    def key(self) -> str:
        return self.headers["x-idempotency-key"]


class FaultyServer(TinkerServer):
    """A server whose answers get lost: `lose(path, ...)` makes the next ones a status, after the request was taken."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.faults = []
        self.seen: list[SeenRequest] = []

    def lose(self, path, status, times=1, empty=False, headers=None):
        self.faults.append([path, status, times, empty, headers])

    def seen_at(self, path) -> list[SeenRequest]:
        return [one for one in self.seen if one.path == path]

    def _list_posts(self):
        return {path: self._wrap(path, handler) for path, handler in super()._list_posts().items()}

    def _wrap(self, path, handler):
        async def handle(request):
            self.seen.append(SeenRequest(path, time.monotonic(), request.headers.copy()))
            answer = await handler(request)
            for fault in self.faults:
                if fault[0] == path and fault[2]:
                    fault[2] -= 1
                    body = b"" if fault[3] else b'{"error": "lost"}'
                    return web.Response(body=body, status=fault[1], headers=fault[4], content_type="application/json")
            return answer

        return handle


@contextmanager
def serve(backend, directory: Path, kind: type[TinkerServer] = TinkerServer, port: int = 0) -> Iterator[Any]:
    """Run a server on an event loop of a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(240)

    async def make() -> TinkerServer:
        if isinstance(backend, EngineBackend):
            await backend.start()
        server = kind(TinkerService(backend, directory, REAL_WORLD), key=KEY, port=port)
        await server.start()
        return server

    server = run(make())
    try:
        yield server
    finally:
        run(server.stop())
        if isinstance(backend, EngineBackend):
            run(backend.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(120)
        loop.close()


class ServerProcess:
    """A server in a process of its own, which can be killed and started again on its directory and port."""

    def __init__(self, model: Path, directory: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self._port}"
        self._command = [sys.executable, "-m", "tests.helpers.tinker", str(model), str(directory), str(self._port)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(self._command, env=environment)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


async def _serve_for_ever(model: Path, directory: Path, port: int) -> None:
    server = TinkerServer(TinkerService(SingleProcessBackend(model), directory, REAL_WORLD), key=KEY, port=port)
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve_for_ever(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
