"""A process that plays vLLM's engine core: the same handshake and messages, and answers that the test can foresee."""

import multiprocessing
import os
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory

import msgspec
import zmq

from r3async.rollout.vllm.messages import (
    ADD_MESSAGE,
    CALL_MESSAGE,
    CORE_DEAD_MESSAGE,
    CoreCallResult,
    CoreFinishReason,
    CoreOutput,
    CoreOutputs,
)
from r3async.rollout.vllm.scratch import name_shared_memory

NAME = b"\0\0"


def play(args, address, owner, kv_cache_bytes, says):
    """Run the process. `args["do"]`: `serve`; `fail`, before it has started; `hang`, likewise; `hold`, likewise, with a
    semaphore and shared memory; `say where`, where its temporary files and what it compiles are, and end."""
    if args["do"] == "fail":
        says.send("there is no such model")
        raise SystemExit(3)
    if args["do"] == "say where":
        print(tempfile.gettempdir(), os.environ["TORCHINDUCTOR_CACHE_DIR"], flush=True)
        return
    if args["do"] == "hang":
        time.sleep(60)
    if args["do"] == "hold":
        name_shared_memory()
        held = multiprocessing.Lock(), SharedMemory(create=True, size=64)
        print("holds", len(held), flush=True)
        time.sleep(600)
    context = zmq.Context()
    starting, calls, answers = context.socket(zmq.DEALER), context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    for socket in (starting, calls):
        socket.identity = NAME
    starting.connect(address)
    starting.send(msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": False}))
    where = msgspec.msgpack.decode(starting.recv())["addresses"]
    calls.connect(where["inputs"][0])
    answers.connect(where["outputs"][0])
    calls.send(msgspec.msgpack.encode({"max_model_len": 32, "block_size": 8, "dtype": "float32"}))
    starting.send(msgspec.msgpack.encode({"status": "READY", "local": True, "headless": False}))
    while True:
        kind, content = calls.recv_multipart()
        message = msgspec.msgpack.decode(content)
        if kind == ADD_MESSAGE:
            answers.send(msgspec.msgpack.encode(CoreOutputs(outputs=[CoreOutput(message[0], message[1][::-1])])))
        elif kind == CALL_MESSAGE:
            _called(answers, says, *message)


def _called(answers, says, client, number, method, args):
    result, failure = [None, [os.getpid()]], None
    if method == "resume_scheduler":
        last = [CoreOutput(f"last-{i}", [i], finish_reason=CoreFinishReason.STOP) for i in range(3)]
        for output in last:
            answers.send(msgspec.msgpack.encode(CoreOutputs(outputs=[output])))
    elif args[0] == "refuse":
        result, failure = None, "the worker refused"
    elif args[0] == "die":
        os._exit(5)
    elif args[0] == "fail":
        answers.send(CORE_DEAD_MESSAGE)
        says.send("an assertion failed")
        time.sleep(0.2)
        os._exit(1)
    answers.send(msgspec.msgpack.encode(CoreOutputs(utility_output=CoreCallResult(number, failure, result))))
