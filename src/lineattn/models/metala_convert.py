"""A language model of this library as a model of Hugging Face's type ``metala``."""

from __future__ import annotations

from torch import nn

from lineattn.errors import InputError
from lineattn.models.language import Block, LanguageModel
from lineattn.models.metala_hf import NORMS, MetalaConfig, MetalaForCausalLM
from lineattn.models.metala_published import load_published
from lineattn.nn.token.metala import MetaLA


def to_hf(
    net: LanguageModel,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    max_position_embeddings: int = 2048,
) -> MetalaForCausalLM:
    """A language model of MetaLA as Hugging Face has it, with the same weights and logits.

    Dropout is left out: it belongs to the training.

    Args:
        net: The model.
        bos_token_id: The token that begins a text, if any.
        eos_token_id: The token that ends one, if any.
        pad_token_id: The token of padding, if any.
        max_position_embeddings: Tokens that an evaluation gives the model at most.

    Raises:
        InputError: The model has what the published one can't have.

    Example:
        >>> import torch
        >>> net = LanguageModel(259, 64, 2, mixer_args={"heads": 4}).eval()
        >>> tokens = torch.randint(259, (1, 10))
        >>> torch.equal(to_hf(net)(tokens).logits, net(tokens)[0])
        True
    """
    block = net.layers[0]
    assert isinstance(block, Block)
    mixer, mlp = block.token_mixer, block.channel_mixer
    if not isinstance(mixer, MetaLA):
        raise InputError(f"the mixer is {type(mixer).__name__}; a model of Hugging Face's type metala has metala alone")
    if mlp is None:
        raise InputError("hidden is 0; a model of Hugging Face's type metala has MLPs")
    _need_published(mixer)
    embedding, norm = net.embed_tokens.weight, net.final_norm
    kind = "layer" if isinstance(norm, nn.LayerNorm) else "simple_rms" if norm.weight is None else "rms"
    config = MetalaConfig(
        vocab_size=embedding.shape[0],
        decoder_embed_dim=mixer.channels,
        decoder_layers=len(net.layers),
        decoder_attention_heads=mixer.heads,
        glu_dim=mlp.l1.out_features,
        bias=mlp.l1.bias is not None,
        norm_type=next(name for name, ours in NORMS.items() if ours == kind),
        tie_word_embeddings=net.lm_head is None,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        max_position_embeddings=max_position_embeddings,
    )
    model = MetalaForCausalLM(config)
    model.train(net.training).to(embedding.device, embedding.dtype)  # pyright: ignore[reportArgumentType]
    load_published(model, net.state_dict())
    return model


def _need_published(mixer: MetaLA) -> None:
    """Refuses switches of the mixer for which the published model has no field."""
    published = MetaLA(mixer.channels, mixer.heads)
    for name, (found, wanted) in {
        "key_width": (mixer.key_width, published.key_width),
        "conv": (_length(mixer), _length(published)),
        "key": (mixer.k_proj is not None, False),
        "augmentation": (mixer.augmentation, published.augmentation),
        "norm": (mixer.norm, published.norm),
        "gate": (mixer.g_proj is not None, True),
        "tau": (mixer.tau, published.tau),
        "scale": (mixer.scale, published.scale),
    }.items():
        if found != wanted:
            raise InputError(f"{name} is {found!r}; in a model of Hugging Face's type metala it is {wanted!r}")


def _length(mixer: MetaLA) -> int:
    return 0 if mixer.conv1d is None else mixer.conv1d.kernel_size[0]
