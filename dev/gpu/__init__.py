"""The GPU path of the project on machines without a GPU: an emulated CUDA device, and programs that
run a learner on it."""
