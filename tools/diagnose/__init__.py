"""Find where engine and learner diverge, stage by stage on the same tokens: `r3async diagnose`.

Each stage is judged separately. What a witness fed into the stage, and what came out, are compared
with what the same stage of the model files gives in float32 with transformers. So a faulty stage is
named even though it changes everything behind it. All stages together are the whole forward pass:
where none diverges, the log-probs are those of the files.
"""
