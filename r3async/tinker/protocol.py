"""What clients send, and what they read: JSON and protobuf of the Tinker API, as structs and arrays.

SDKs from 0.25 on send `forward_backward` as protobuf, and read its results and samples as protobuf;
0.15 speaks JSON alone. Protobuf classes are those of the package `tinker` (the extra `tinker`),
which is imported with the first message. Tensors are little-endian.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from r3async.untrusted import MalformedError, decode_json

PROTOBUF = "application/x-protobuf"
MAX_TENSOR_ELEMENTS = 2**28
NO_LOGPROB = -99999.0
"""Stands for a missing one among the most likely tokens, as the SDK's protobuf says."""

AtLeastZero = Annotated[float, Meta(ge=0)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TopK = Annotated[int, Meta(ge=0, le=20)]


class ApiError(Exception):
    """A request that is refused, or that failed.

    `category` is `user` if the client can mend it, else `server`.
    """

    def __init__(self, message: str, *, status: int = 400, category: str = "user"):
        super().__init__(message)
        self.status = status
        self.category = category


# -- requests --------------------------------------------------------------------------------------


class ProvenanceSpan(NamedTuple):
    """A claim: these tokens are tokens `offset .. offset + length` of what was `sampled` as a
    sequence, or of its prompt."""

    sequence_id: str
    offset: int
    length: int
    sampled: bool


class Datum(NamedTuple):
    """A sequence to train on.

    Attributes:
        tokens: int32 `[n]`, the input.
        inputs: What the loss takes of each token, by name: int64 or float32 `[n]` or `[n, k]`.
        token_spans: Spans that tile `tokens`, or none.
        target_spans: Spans that tile `inputs["target_tokens"]`, or none.
    """

    tokens: np.ndarray
    inputs: dict[str, np.ndarray]
    token_spans: list[ProvenanceSpan]
    target_spans: list[ProvenanceSpan]


class TrainRequest(NamedTuple):
    """A `forward` or `forward_backward`."""

    loss_fn: str
    loss_config: dict[str, float | str]
    data: list[Datum]
    forward_only: bool


class ModelRequest(msgspec.Struct):
    """The fields that all requests of a training client have. Those that create its model name
    a session and its number there."""

    model_id: str | None = None
    seq_id: Annotated[int, Meta(ge=1)] | None = None
    session_id: str | None = None
    model_seq_id: Annotated[int, Meta(ge=0)] | None = None


class LoraConfig(msgspec.Struct):
    rank: Annotated[int, Meta(ge=1, le=1024)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerType(msgspec.Struct):
    type: Literal["adamw"]


class CreateModel(msgspec.Struct):
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerType | None = None


class AdamParams(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of one optimizer step. SDKs before 0.25 send only what was set."""

    learning_rate: AtLeastZero = 1e-4
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: AtLeastZero = 1e-12
    weight_decay: AtLeastZero = 0.0
    grad_clip_norm: AtLeastZero = 0.0
    type: Literal["adamw"] | None = None


class OptimStep(msgspec.Struct):
    adam_params: AdamParams | None = None
    optimizer_params: None = None
    """Other optimizers than Adam, which are not supported."""


class SaveWeights(msgspec.Struct):
    """`save_weights`, and `save_weights_for_sampler` under a path or as a snapshot."""

    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool | None = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] | None = None


class LoadWeights(msgspec.Struct):
    """`load_weights`, into a new model if it names none."""

    path: str
    model_id: str | None = None
    base_model: str | None = None
    optimizer: bool | None = False


class Named(msgspec.Struct):
    """The name that a request is about, under one of these keys."""

    session_id: str = ""
    model_id: str = ""
    request_id: str = ""
    tinker_path: str = ""


class CreateSampler(msgspec.Struct):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class InputChunk(msgspec.Struct):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[TokenId] = []


class ModelInput(msgspec.Struct):
    chunks: list[InputChunk]

    def to_tokens(self) -> np.ndarray:
        """Return the tokens of all chunks, int32 `[n]`."""
        return np.asarray([token for chunk in self.chunks for token in chunk.tokens], np.int32)


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    """Texts or token ids. None: the end-of-sequence token; none of them with an empty list."""
    temperature: AtLeastZero = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.stop, list) and len({type(stop) for stop in self.stop}) > 1:
            raise ValueError("stop mixes texts and token ids: send one kind")


class SampleRequest(msgspec.Struct, forbid_unknown_fields=True):
    prompt: ModelInput
    sampling_params: SamplingParams
    sampling_session_id: str
    seq_id: int
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: TopK | None = 0
    topk_sample_logprobs: TopK | None = 0
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None
    type: str | None = None
    # What is not supported has the values that ask for nothing.
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] | None = 0
    record_stability_info: bool | None = None


def decode_request(body: bytes, kind: type[Any]) -> Any:
    """Return a JSON body as that struct. Raises `ApiError`."""
    try:
        return decode_json(body, kind)
    except MalformedError as error:
        raise ApiError(f"the body is not what this path takes: {error}") from error


# -- training requests -----------------------------------------------------------------------------


class JsonTensor(msgspec.Struct):
    data: list[float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def to_array(self, name: str) -> np.ndarray:
        values = np.asarray(self.data, np.float64)
        whole = np.trunc(values).clip(-(2**53), 2**53)
        if self.dtype == "int64" and not np.array_equal(values, whole):
            raise ApiError(f"{name}: not all of its values are whole numbers of 53 bits")
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            values = values.astype(self.dtype)
        sparse = None
        if self.sparse_crow_indices is not None and self.sparse_col_indices is not None:
            sparse = np.asarray(self.sparse_crow_indices), np.asarray(self.sparse_col_indices)
        return build_tensor(name, values, self.shape, sparse)


class JsonDatum(msgspec.Struct):
    model_input: ModelInput
    loss_fn_inputs: dict[str, JsonTensor]


class JsonTrainInput(msgspec.Struct):
    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class JsonTrainRequest(msgspec.Struct):
    forward_backward_input: JsonTrainInput | None = None
    forward_input: JsonTrainInput | None = None


def parse_json_training(body: bytes) -> TrainRequest:
    """Return a training request in JSON, as SDK 0.15 sends it. Raises `ApiError`."""
    request: JsonTrainRequest = decode_request(body, JsonTrainRequest)
    inner = request.forward_backward_input or request.forward_input
    if inner is None:
        raise ApiError("neither forward_backward_input nor forward_input is there")
    data = [
        Datum(
            datum.model_input.to_tokens(),
            {name: tensor.to_array(name) for name, tensor in datum.loss_fn_inputs.items()},
            [],
            [],
        )
        for datum in inner.data
    ]
    forward_only = request.forward_backward_input is None
    return TrainRequest(inner.loss_fn, inner.loss_fn_config or {}, data, forward_only)


def read_proto_training(body: bytes) -> Any:
    """Return the message of a training request in protobuf. Raises `ApiError`."""
    message = load_protobuf().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's DecodeError, whose module the extra brings
        raise ApiError(f"the body is no ForwardBackwardRequest: {error}") from error
    return message


def parse_proto_training(body: bytes) -> TrainRequest:
    """Return a training request in protobuf. Raises `ApiError`."""
    message = read_proto_training(body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    data = [_parse_datum(datum) for datum in message.data]
    return TrainRequest(message.loss_fn, config, data, message.forward_only)


def _parse_datum(message: Any) -> Datum:
    chunks = [np.zeros(0, np.int32)]
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise ApiError("a chunk that is no encoded_text is not supported")
        chunks.append(_read_array("tokens", chunk.encoded_text.tokens, "<i4"))
    inputs = {name: _parse_tensor(name, each) for name, each in message.loss_fn_inputs.items()}
    token_spans = _parse_spans(message.model_input_spans)
    target_spans = _parse_spans(message.loss_fn_input_spans)
    return Datum(np.concatenate(chunks), inputs, token_spans, target_spans)


def _parse_tensor(name: str, tensor: Any) -> np.ndarray:
    pb = load_protobuf()
    dtype = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8"}.get(tensor.dtype)
    if dtype is None:
        raise ApiError(f"{name}: dtype {tensor.dtype} is not supported: send float32 or int64")
    shape = list(tensor.shape) or None
    if not tensor.HasField("sparse_csr"):
        return build_tensor(name, _read_array(name, tensor.dense, dtype), shape)
    csr = tensor.sparse_csr
    rows = _read_array(name, csr.crow_indices, "<i8")
    columns = _read_array(name, csr.col_indices, "<i8")
    return build_tensor(name, _read_array(name, csr.values, dtype), shape, (rows, columns))


def _parse_spans(messages: Iterable[Any]) -> list[ProvenanceSpan]:
    spans = []
    for message in messages:
        sampled = message.HasField("sampled_tokens")
        arm = message.sampled_tokens if sampled else message.prompt_tokens
        if arm.offset < 0 or arm.length < 0:
            raise ApiError("a provenance span has a negative offset or length")
        spans.append(ProvenanceSpan(arm.sequence_id, arm.offset, arm.length, sampled))
    return spans


def _read_array(name: str, data: bytes, dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    if len(data) % kind.itemsize:
        raise ApiError(f"{name}: {len(data)} bytes are no whole number of {kind.name}")
    return np.frombuffer(data, kind)


def build_tensor(
    name: str,
    values: np.ndarray,
    shape: Sequence[int] | None,
    sparse: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Return the dense array of a tensor's values.

    `sparse` has the row pointers and columns of a matrix in CSR form, whose other cells are 0.
    Raises `ApiError` for parts that do not fit together.
    """
    shape = [len(values)] if shape is None else list(shape)
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_TENSOR_ELEMENTS:
        raise ApiError(f"{name}: the shape {shape} is negative, or too large")
    if sparse is None:
        if math.prod(shape) != len(values):
            raise ApiError(f"{name}: {len(values)} values do not have the shape {shape}")
        return values.reshape(shape)
    rows, columns = sparse
    counts = np.diff(rows)
    fits = len(shape) == 2 and len(rows) == shape[0] + 1 and len(columns) == len(values)
    fits = fits and rows[0] == 0 and rows[-1] == len(values) and bool((counts >= 0).all())
    if not fits or not bool(((columns >= 0) & (columns < shape[1])).all()):
        raise ApiError(f"{name}: the parts of the sparse tensor do not have the shape {shape}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


# -- results ---------------------------------------------------------------------------------------


class TrainResult(NamedTuple):
    """The result of a training request.

    Attributes:
        logprobs: float32, in the shape of each datum's targets.
        metrics: Each is named `name:reduction`, by which a client joins those of several requests.
    """

    logprobs: list[np.ndarray]
    metrics: dict[str, float]


class TopLogprobs(NamedTuple):
    """The most likely tokens at N places: `token_ids` int32 and `logprobs` float32 `[N, k]`, NaN
    where there is none."""

    token_ids: np.ndarray
    logprobs: np.ndarray


class SampledSequence(NamedTuple):
    """A sequence that was sampled.

    Attributes:
        tokens: int32 `[T]`.
        logprobs: float32 `[T]`.
        stopped: False if it is as long as it may be.
        routes: The experts of each token that was fed forward, the prompt's too: uint8 or uint16
            `[P + T - 1, layers, top_k]`; None if nothing recorded them.
        recorded: bool `[P + T - 1]`: the rows of `routes` that are a record.
        top: The most likely tokens at each of its places.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    routes: np.ndarray | None = None
    recorded: np.ndarray | None = None
    top: TopLogprobs | None = None


class SampleResult(NamedTuple):
    """The answer to a `SampleRequest`. `prompt_logprobs` is float32 `[P]`, NaN where there is
    none."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    top_prompt: TopLogprobs | None = None


Result = TrainResult | SampleResult | dict[str, Any] | ApiError


class Answer(msgspec.Struct, frozen=True):
    """A result as its client reads it. `failed` marks an error."""

    body: bytes
    content_type: str = "application/json"
    failed: bool = False


def encode_result(result: Result, *, protobuf: bool) -> Answer:
    """Return the answer of a result; log-probs and samples in protobuf, if the client reads it."""
    if isinstance(result, TrainResult):
        if protobuf:
            return Answer(_encode_training(result), PROTOBUF)
        result = _train_result_to_json(result)
    elif isinstance(result, SampleResult):
        if protobuf:
            return Answer(_encode_samples(result), PROTOBUF)
        result = _samples_to_json(result)
    elif isinstance(result, ApiError):
        body = {"error": str(result), "category": result.category}
        return Answer(msgspec.json.encode(body), failed=True)
    return Answer(msgspec.json.encode(result))


def _encode_training(result: TrainResult) -> bytes:
    pb = load_protobuf()
    message = pb.ForwardBackwardOutput(loss_fn_output_type="TorchLossReturn")
    for name, value in result.metrics.items():
        message.metrics[name] = value
    # A record is of data whose dimensions after the first are the same.
    for inner, group in itertools.groupby(result.logprobs, lambda values: values.shape[1:]):
        arrays = [values.astype("<f4") for values in group]
        record = message.loss_fn_outputs.add(num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.dtype = pb.DTYPE_FLOAT32
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
        field.trailing_shape.extend(inner)
    return message.SerializeToString()


def _encode_samples(result: SampleResult) -> bytes:
    pb = load_protobuf()
    message = pb.SampleResponse()
    for sampled in result.sequences:
        sequence = message.sequences.add(
            tokens=sampled.tokens.astype("<i4").tobytes(),
            logprobs=sampled.logprobs.astype("<f4").tobytes(),
            stop_reason=pb.STOP_REASON_STOP if sampled.stopped else pb.STOP_REASON_LENGTH,
        )
        if sampled.top is not None:
            _fill_top(sequence.topk_sampled_logprobs, sampled.top)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.top_prompt is not None:
        _fill_top(message.topk_prompt_logprobs, result.top_prompt)
    return message.SerializeToString()


def _fill_top(message: Any, top: TopLogprobs) -> None:
    message.length, message.k = top.token_ids.shape
    missing = np.isnan(top.logprobs)
    message.token_ids = np.where(missing, 0, top.token_ids).astype("<i4").tobytes()
    message.logprobs = np.where(missing, NO_LOGPROB, top.logprobs).astype("<f4").tobytes()


def _train_result_to_json(result: TrainResult) -> dict[str, Any]:
    outputs = [
        {"logprobs": {"data": _to_list(x), "dtype": "float32", "shape": list(x.shape)}}
        for x in result.logprobs
    ]
    return {
        "loss_fn_output_type": "TorchLossReturn",
        "loss_fn_outputs": outputs,
        "metrics": drop_not_finite(result.metrics),
    }


def _samples_to_json(result: SampleResult) -> dict[str, Any]:
    sequences = [
        {
            "tokens": sampled.tokens.tolist(),
            "logprobs": _to_list(sampled.logprobs),
            "stop_reason": "stop" if sampled.stopped else "length",
        }
        for sampled in result.sequences
    ]
    answer: dict[str, Any] = {"type": "sample", "sequences": sequences}
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = _to_list(result.prompt_logprobs)
    if result.top_prompt is not None:
        answer["topk_prompt_logprobs"] = [
            None
            if np.isnan(logprobs).all()
            else list(zip(ids.tolist(), logprobs.tolist(), strict=True))
            for ids, logprobs in zip(*result.top_prompt, strict=True)
        ]
    return answer


def _to_list(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.reshape(-1).tolist()]


def drop_not_finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that JSON has a number for: with null an SDK takes no result."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


@functools.cache
def load_protobuf() -> Any:
    """Return the module of the SDK's protobuf classes. Raises `ApiError` without the extra."""
    try:
        from tinker.proto import tinker_public_pb2
    except ImportError as error:
        raise ApiError(
            f"the server reads protobuf with the package tinker, which is missing ({error}): "
            'install "r3async[tinker]" on its host',
            status=501,
            category="server",
        ) from error
    return tinker_public_pb2
