"""Supervised training: the mean cross entropy of a few texts falls."""

import sys

import tinker
from tinker import types

TEXTS = ["abcd -> dcba", "bcda -> adcb", "cdab -> badc", "dabc -> cbad"]
STEPS = 10


def make_datum(tokens):
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)


def main(model):
    with tinker.ServiceClient() as service:
        client = service.create_lora_training_client(model, rank=8).result()
        tokenizer = client.get_tokenizer()
        data = [make_datum(tokenizer.encode(text)) for text in TEXTS]
        count = sum(len(datum.model_input.to_ints()) for datum in data)
        for step in range(STEPS):
            trained = client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            print(f"step {step}: cross entropy {trained.result().metrics['loss:sum'] / count:.3f}")
        print("saved:", client.save_state("supervised").result().path)


if __name__ == "__main__":
    main(sys.argv[1])
