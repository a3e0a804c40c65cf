"""Log-probs and entropies of a vocabulary that two ranks share, and their gradients."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from r3async.data.supports import SupportSets
from r3async.learner.token_logprobs import token_logprobs

VOCABULARY, TOKENS = 11, 7


def given() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, 5, generator=generator)
    matrix = 3 * torch.randn(VOCABULARY, 5, generator=generator)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    temperatures = 0.5 + torch.rand(TOKENS, generator=generator)
    return hidden, matrix, targets, temperatures


def supports() -> tuple[np.ndarray, SupportSets]:
    """bool `[TOKENS, VOCABULARY]`, some of one rank's part alone, and the same as sets."""
    dense = np.random.default_rng(0).random((TOKENS, VOCABULARY)) < 0.5
    dense[0], dense[1] = np.arange(VOCABULARY) < 3, np.arange(VOCABULARY) > 8
    dense[np.arange(TOKENS), given()[2].numpy()] = True
    return dense, SupportSets.from_bitmaps(np.packbits(dense, axis=1, bitorder="little"), VOCABULARY)


def whole(entropy_gradient: bool, masked: bool):
    hidden, matrix, targets, temperatures = (t.double() if t.is_floating_point() else t for t in given())
    matrix.requires_grad_()
    logits = hidden @ matrix.T / temperatures[:, None]
    if masked:
        logits = logits.masked_fill(~torch.from_numpy(supports()[0]), -torch.inf)
    every = torch.distributions.Categorical(logits=logits)
    logprobs, entropies = every.log_prob(targets), _entropies(logits)
    loss = logprobs.square().sum() + (entropies.pow(3).sum() if entropy_gradient else 0)
    return logprobs.detach(), entropies.detach(), torch.autograd.grad(loss, matrix)[0]


def _entropies(logits):
    logs = torch.log_softmax(logits, -1)
    known = torch.where(logs > -torch.inf, logs, 0.0)
    return -(known.exp() * known * (logs > -torch.inf)).sum(-1)


def split(chunk: int, entropy_gradient: bool, masked: bool):
    hidden, matrix, targets, temperatures = given()
    rank, rows = dist.get_rank(), -(-VOCABULARY // 2)
    part = matrix[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    logprobs, entropies = token_logprobs(
        part,
        hidden,
        targets,
        temperatures,
        first_token_id=rank * rows,
        group=dist.group.WORLD,
        chunk_elements=chunk,
        entropy_gradient=entropy_gradient,
        supports=supports()[1] if masked else None,
    )
    loss = logprobs.square().sum() + (entropies.pow(3).sum() if entropy_gradient else 0)
    (grad,) = torch.autograd.grad(loss, part)
    assert entropies.requires_grad is entropy_gradient
    return logprobs.detach().numpy(), entropies.detach().numpy(), grad.numpy()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk", [10**6, 12])
def test_two_ranks_have_the_log_probs_entropies_and_gradients_of_one(two_ranks, chunk, entropy_gradient, masked):
    logprobs, entropies, gradient = whole(entropy_gradient, masked)
    answers = two_ranks.call(split, chunk, entropy_gradient, masked)
    for ours, spread, _ in answers:
        assert torch.allclose(torch.from_numpy(ours).double(), logprobs, atol=1e-5)
        assert torch.allclose(torch.from_numpy(spread).double(), entropies, atol=1e-5)
    found = torch.cat([torch.from_numpy(g) for _, _, g in answers]).double()
    assert (found - gradient).norm() < 1e-5 * gradient.norm()
    if not masked:
        logits = given()[0].double() @ given()[1].double().T / given()[3][:, None]
        assert torch.allclose(entropies, torch.distributions.Categorical(logits=logits).entropy())
