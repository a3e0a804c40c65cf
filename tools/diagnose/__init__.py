"""`r3async diagnose`: where engine and learner part, stage by stage on the same tokens, and why.

Each stage is judged by itself. What a witness fed into it, and what came out, are compared with what the same stage gives in
float32 by transformers, from the files. So one that computes otherwise is named even where all behind it is changed by it. All
stages together are the whole forward pass: where none parts, log-probs are the files'.
"""
