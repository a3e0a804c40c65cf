"""Learner on megatron-core."""

import warnings

with warnings.catch_warnings():
    # Megatron warns, module by module, that TransformerEngine and Apex are not installed. This backend uses neither.
    warnings.simplefilter("ignore", UserWarning)
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
