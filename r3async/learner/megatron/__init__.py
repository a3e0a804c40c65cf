"""The learner backend on megatron-core."""

import warnings

from r3async.learner.megatron.cpu import light_megatron_import

with warnings.catch_warnings(), light_megatron_import():
    # Megatron warns, module by module, that TransformerEngine and Apex are not installed. This
    # backend uses neither.
    warnings.simplefilter("ignore", UserWarning)
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
