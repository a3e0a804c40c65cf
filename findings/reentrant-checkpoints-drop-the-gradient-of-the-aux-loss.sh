#!/usr/bin/env bash
# transformers 5.24.0: with reentrant gradient checkpointing the routers' own loss is in the loss, but no router gets a
# gradient of it.
#
# Guess: checkpointing computes again what it did not keep, so losses and gradients are those without it, also of
# `output_router_logits=True`.
# Behaviour: router logits are recorded in the first forward pass, which a reentrant checkpoint runs without a graph. The
# load-balancing loss is computed from them and added, `loss` and `aux_loss` are as they should be, and the gradients are
# those of a loss without it. Nothing balances the experts while the coefficient seems to be set, without an error. With
# `use_reentrant` = False, the default of this version, gradients are right.
# r3async is not affected: it checkpoints without re-entrance and computes the routers' loss itself.
# Seen on Python 3.11, CPU, float32, torch 2.13.0: losses of qwen3_moe 4.186, with aux 6.189, reentrant 6.189; norms of
# its routers' gradients 0.0014, with aux 0.1318, reentrant 0.0014. Of mixtral 0.0031, 0.0809, 0.0031; of gpt_oss 0.0209,
# 0.2915, 0.0209.
# Date: 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None,
    "router_aux_loss_coef": 1.0,
}
FAMILIES = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, head_dim=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, head_dim=16),
}
TEXT = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def differentiate(family, aux, reentrant):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    loss = model(TEXT, labels=TEXT, output_router_logits=aux, use_cache=False).loss
    loss.backward()
    routers = [each.grad for name, each in model.named_parameters() if "gate.weight" in name or "router.weight" in name]
    return loss.item(), torch.cat([each.flatten() for each in routers])


for family in FAMILIES:
    plain, without_aux = differentiate(family, False, None)
    whole, with_aux = differentiate(family, True, None)
    found = {reentrant: differentiate(family, True, reentrant) for reentrant in (False, True)}
    print(
        f"{family}: loss {plain:.3f}, with aux {whole:.3f}, checkpointed {found[False][0]:.3f}, reentrant"
        f" {found[True][0]:.3f}; gradients {without_aux.norm():.4f}, with aux {with_aux.norm():.4f}, checkpointed"
        f" {found[False][1].norm():.4f}, reentrant {found[True][1].norm():.4f}"
    )
    assert abs(found[True][0] - whole) < 1e-5 and whole - plain > 1
    torch.testing.assert_close(found[False][1], with_aux, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found[True][1], without_aux, rtol=1e-3, atol=1e-6)
    assert with_aux.norm() > 5 * without_aux.norm()
PYTHON
