"""Reinforcement learning: answers get more letters "a". Each step samples from the weights of its beginning, and the
experts of every sampled token are replayed in training."""

import sys

import tinker
from tinker import types

PROMPT = "Write letters: "
STEPS = 10
SAMPLES = 16


def make_datum(prompt, sequence, advantage):
    tokens = [*prompt, *sequence.tokens]
    lead = len(prompt) - 1
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * lead + list(sequence.logprobs),
        "advantages": [0.0] * lead + [advantage] * len(sequence.tokens),
    }
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)


def main(model):
    with tinker.ServiceClient() as service:
        client = service.create_lora_training_client(model, rank=8).result()
        tokenizer = client.get_tokenizer()
        prompt = tokenizer.encode(PROMPT)
        params = types.SamplingParams(max_tokens=16)
        for step in range(STEPS):
            sampler = client.save_weights_and_get_sampling_client().result()
            asked = types.ModelInput.from_ints(prompt)
            sequences = sampler.sample(asked, SAMPLES, params).result().sequences
            texts = [tokenizer.decode(sequence.tokens) for sequence in sequences]
            rewards = [text.count("a") / max(len(text), 1) for text in texts]
            mean = sum(rewards) / len(rewards)
            data = [
                make_datum(prompt, sequence, reward - mean)
                for sequence, reward in zip(sequences, rewards, strict=True)
            ]
            trained = client.forward_backward(data, "importance_sampling")
            client.optim_step(types.AdamParams(learning_rate=2e-2)).result()
            metrics = trained.result().metrics
            print(
                f"step {step}: reward {mean:.3f}, routes {metrics['routes/recorded:mean']:.2f}, "
                f"k3 {metrics['k3:mean']:.1e}"
            )


if __name__ == "__main__":
    main(sys.argv[1])
