"""Log-probs of one text by vLLM's engine for many models, one after the other in this process.

    python -m tests.helpers.engine_scores RESULT.npz DTYPE TOKENS.npy MODEL...

An engine of its own for each would take most of its time to import vLLM. A model that cannot be run has an array of no
numbers, and its error is printed.
"""

import gc
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import numpy as np

from r3async.rollout.vllm.engine_packages import expose_engine_packages


def score(model: str, dtype: str, tokens: list[int]) -> np.ndarray:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    engine = None
    try:
        engine = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=2,
            skip_tokenizer_init=True,
            generation_config="vllm",
            kv_cache_memory_bytes=2**27,
        )
        (output,) = engine.generate(
            [{"prompt_token_ids": tokens}],
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        scores = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        return np.asarray([of_token[token].logprob for token, of_token in scores], np.float32)
    except Exception as error:
        print(f"{model}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        return np.empty(0, np.float32)
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def main(result: str, dtype: str, text: str, *models: str) -> None:
    expose_engine_packages()
    from r3async.rollout.vllm.cpu_patches import patch_vllm_for_cpu

    patch_vllm_for_cpu()
    tokens = np.load(text).tolist()
    np.savez(result, **{model: score(model, dtype, tokens) for model in models})
    sys.stdout.flush()
    os._exit(0)  # vLLM's modules take seconds to be taken apart


if __name__ == "__main__":
    main(*sys.argv[1:])
