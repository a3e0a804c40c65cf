"""r3async: asynchronous reinforcement learning for mixture-of-experts language models.

Every token the learner trains on arrives with its rollout log-probability, the policy version that
sampled it and the experts that were chosen for it. See docs/architecture.md for the rooms.
"""

__version__ = "0.1.0"
