"""MetaLA's published checkpoints into our models.

The names in the published Hugging Face code are ours. Those in its GPT-NeoX code are, theirs to ours: ``attention.`` to
``token_mixer.``, ``mlp.w1``, ``w3`` and ``w2`` to ``channel_mixer.l1``, ``l2`` and ``l3``, ``input_layernorm`` to
``token_norm`` and ``post_attention_layernorm`` to ``channel_norm``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from lineattn.errors import InputError
from lineattn.hosts.sources import Source, Weights, read
from lineattn.hosts.weights import LoadReport, some

_NEOX = {
    "attention.": "token_mixer.",
    "mlp.w1.": "channel_mixer.l1.",
    "mlp.w3.": "channel_mixer.l2.",
    "mlp.w2.": "channel_mixer.l3.",
    "input_layernorm.": "token_norm.",
    "post_attention_layernorm.": "channel_norm.",
}
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_FILES = ("*.safetensors", "pytorch_model*.bin")


def load_published(net: nn.Module, source: Source) -> LoadReport:
    """Loads a checkpoint with the names of MetaLA's published code, its Hugging Face or its GPT-NeoX one.

    All or nothing: an error leaves the model as it was. No code that stands in a file is run. Wrappers (``module.``,
    ``model.``) are taken off, the head may be missing where it is tied, and numbers take the type that the model has.

    Args:
        net: A `MetalaForCausalLM`, another model on the same blocks, or a `LanguageModel`; of the same size.
        source: A folder of safetensors or ``pytorch_model.bin`` files, a file, or a state dict.

    Returns:
        What was loaded.

    Raises:
        InputError: A tensor is missing, left over or of another shape, or the source can't be read.

    Example:
        >>> from lineattn.models.language import LanguageModel
        >>> net, other = (LanguageModel(11, 16, 1, mixer_args={"heads": 2}) for _ in range(2))
        >>> theirs = {f"module.model.{name}": value for name, value in other.state_dict().items()}
        >>> print(load_published(net, theirs))
        state dict: 12 tensors loaded
    """
    found, ours = _read(source), net.state_dict()
    places = {_bare(name): name for name in ours}
    tied = _HEAD not in places or ours[places[_HEAD]].data_ptr() == ours[places[_EMBEDDING]].data_ptr()
    head: Tensor | None = None  # of a file, for a model whose embedding takes its place
    load: dict[str, Tensor] = {}
    unexpected = []
    for key, value in found.tensors.items():
        name = _bare(key)
        if tied and name == _HEAD:
            head = value
            continue
        if name not in places:
            unexpected.append(key)
            continue
        shape = ours[places[name]].shape
        if value.shape != shape:
            raise InputError(
                f"{found.name}: {key} has shape {tuple(value.shape)}, the model's is {tuple(shape)}; is a size in the "
                "configuration another?"
            )
        load[name] = value
    if unexpected:
        field = "norm_type" if all("norm." in key for key in unexpected) else "decoder_layers"
        raise InputError(f"{found.name}: no place for {some(unexpected)}; is {field} another?")
    if lacking := [name for name in places if name not in load and not (tied and name == _HEAD)]:
        raise InputError(f"{found.name}: nothing there for {some(lacking)}; is the configuration another?")
    if head is not None and not torch.equal(head, load[_EMBEDDING]):
        raise InputError(f"{found.name}: its head is not its embedding; the model needs tie_word_embeddings=False")
    load = {places[name]: value for name, value in load.items()}
    net.load_state_dict(load, strict=False)
    return LoadReport(found.name, tuple(load))


def _read(source: Source) -> Weights:
    if not isinstance(source, str | Path) or not Path(source).is_dir():
        return read(source)
    files = next((found for pattern in _FILES if (found := sorted(Path(source).glob(pattern)))), [])
    if not files:
        raise InputError(f"{source}: there is no *.safetensors and no pytorch_model*.bin in it")
    return Weights(str(source), {key: value for file in files for key, value in read(file).tensors.items()})


def _bare(key: str) -> str:
    """The name without wrappers, as ours is."""
    parts = key.split(".")
    while parts[0] in ("module", "model"):
        parts = parts[1:]
    key = ".".join(parts)
    for theirs, name in _NEOX.items():
        key = key.replace(f".{theirs}", f".{name}")
    return key
