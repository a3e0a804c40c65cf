"""An engine whose routers are disturbed; imported in its workers.

No run can have it: `generator.engine_args` refuses extensions other than r3async's own.
"""

from __future__ import annotations

import torch

from r3async.rollout.vllm.worker import WorkerExtension

NOISE = 0.3
SEED = 11


class NoisyRouters(WorkerExtension):
    """A worker that adds to every router logit `NOISE` times a standard normal, drawn for each token."""

    def r3_process_id(self) -> int:
        rng = torch.Generator().manual_seed(SEED)

        def disturbed(module, args, output):
            logits, bias = output
            return logits + NOISE * torch.randn(logits.shape, generator=rng).to(logits.dtype), bias

        for name, module in self.model_runner.model.named_modules():
            if name.endswith(".mlp.gate"):
                module.register_forward_hook(disturbed)
        return super().r3_process_id()
