"""A game of three turns: the environment asks for a letter, and the model should answer with it. The whole conversation
is one datum; the tokens of each answer are found in it, with their experts."""

import random
import sys

import tinker
from tinker import types

STEPS = 10
GAMES = 8
TURNS = 3


def play(sampler, tokenizer, rng):
    """Return the conversation's tokens, the log-prob of each, 0 where nobody sampled it, and the reward."""
    tokens = []
    logprobs = []
    reward = 0.0
    for _ in range(TURNS):
        wanted = rng.choice("ab")
        asked = tokenizer.encode(f"{wanted}? ")
        tokens += asked
        logprobs += [0.0] * len(asked)
        prompt = types.ModelInput.from_ints(tokens)
        params = types.SamplingParams(max_tokens=4, stop=[])
        (answer,) = sampler.sample(prompt, 1, params).result().sequences
        tokens = tokens + list(answer.tokens)
        logprobs = logprobs + list(answer.logprobs)
        reward += tokenizer.decode(answer.tokens).count(wanted) / 4 / TURNS
    return tokens, logprobs, reward


def make_datum(tokens, logprobs, advantage):
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": logprobs[1:],
        "advantages": [advantage if logprob else 0.0 for logprob in logprobs[1:]],
    }
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)


def main(model):
    rng = random.Random(0)
    with tinker.ServiceClient() as service:
        client = service.create_lora_training_client(model, rank=8).result()
        tokenizer = client.get_tokenizer()
        for step in range(STEPS):
            sampler = client.save_weights_and_get_sampling_client().result()
            games = [play(sampler, tokenizer, rng) for _ in range(GAMES)]
            mean = sum(reward for _, _, reward in games) / GAMES
            data = [
                make_datum(tokens, logprobs, reward - mean) for tokens, logprobs, reward in games
            ]
            trained = client.forward_backward(data, "importance_sampling")
            client.optim_step(types.AdamParams(learning_rate=2e-2)).result()
            metrics = trained.result().metrics
            print(f"step {step}: reward {mean:.3f}, routes {metrics['routes/recorded:mean']:.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
