"""Names in Hugging Face: ``import lineattn.hf`` registers ``model_type`` ``metala`` with the ``Auto`` classes.

>>> import lineattn.hf
>>> from transformers import AutoConfig, AutoModelForCausalLM
>>> config = AutoConfig.for_model("metala", vocab_size=259, hidden_size=64, num_hidden_layers=2, glu_dim=128)
>>> type(AutoModelForCausalLM.from_config(config)).__name__
'MetalaForCausalLM'

No code comes with a checkpoint, and ``trust_remote_code`` is not needed.
"""

from __future__ import annotations

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        __version__,
    )
except ImportError as error:
    raise ImportError("lineattn.hf needs transformers: pip install 'lineattn[hf]'") from error
if tuple(map(int, __version__.split(".")[:2])) < (5, 24):  # before, generate had other names for the cache
    raise ImportError(f"lineattn.hf needs transformers 5.24 or later, not {__version__}: pip install 'lineattn[hf]'")

from lineattn.models.byte_tokenizer import byte_tokenizer
from lineattn.models.metala_convert import to_hf
from lineattn.models.metala_hf import MetalaConfig, MetalaForCausalLM, MetalaForSequenceClassification, MetalaModel
from lineattn.models.metala_published import load_published

__all__ = [
    "MetalaConfig",
    "MetalaForCausalLM",
    "MetalaForSequenceClassification",
    "MetalaModel",
    "byte_tokenizer",
    "load_published",
    "to_hf",
]

AutoConfig.register("metala", MetalaConfig)
AutoModel.register(MetalaConfig, MetalaModel)
AutoModelForCausalLM.register(MetalaConfig, MetalaForCausalLM)
AutoModelForSequenceClassification.register(MetalaConfig, MetalaForSequenceClassification)
