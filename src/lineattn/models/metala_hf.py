r"""MetaLA as Hugging Face has models: ``model_type`` ``metala``.

.. math::
    x \leftarrow x + \mathrm{MetaLA}(\mathrm{Norm}(x)), \qquad x \leftarrow x + \mathrm{GLU}(\mathrm{Norm}(x)), \qquad
    \mathrm{logits} = \mathrm{Norm}(x) W^\top

The blocks are those of `lineattn.models.language`; what is here says to them what Hugging Face's callers say: the
cache, the mask, the head. Names of the weights and fields of the configuration are the published checkpoints'.
``import lineattn.hf`` registers the classes with the ``Auto`` ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from lineattn.errors import InputError, unknown
from lineattn.models.language import Block, Norm, make_mixer, norm_of
from lineattn.nn.token.metala import MetaLA
from lineattn.nn.token.recurrent import RecurrentState

NORMS: dict[str, Norm] = {"simplermsnorm": "simple_rms", "rmsnorm": "rms", "layernorm": "layer"}
_old_name = deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")


class MetalaConfig(PreTrainedConfig):
    """What the published ``config.json`` says, under its names; the defaults are its own.

    ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads`` and ``intermediate_size`` are other names of
    ``decoder_embed_dim``, ``decoder_layers``, ``decoder_attention_heads`` and ``glu_dim``. Fields that this model has
    no use for are kept as they are.

    Args:
        vocab_size: Tokens that there are.
        decoder_embed_dim: Width of a token.
        decoder_layers: Blocks.
        decoder_attention_heads: Heads of a mixer.
        glu_dim: Width inside the MLPs; -1 for that of a token.
        glu_act: Their activation, ``silu``.
        bias: Biases in them.
        norm_type: ``simplermsnorm``, without weights; ``layernorm``, which is what the published code makes of any
            other name; ``rmsnorm``, which it has not.
        no_scale_embedding: Embeddings as they are; else times the square root of the width.
        causal: Always true.
        init_std: Standard deviation at the start, of embeddings and linear maps.
        max_position_embeddings: The model has no limit; what evaluates it cuts texts to so many tokens.
        tie_word_embeddings: Use the embedding for the logits too.
        use_cache: Return the cache in evaluation.
        add_bos_token: Said to tokenizers.
        pad_token_id: The token whose embedding stays zero, or ``None``.
        bos_token_id: The token that begins a text.
        eos_token_id: The token that ends one, or several.

    Raises:
        InputError: A field that can't be.

    Example:
        >>> config = MetalaConfig(vocab_size=259, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> config.decoder_embed_dim, config.glu_dim, config.tie_word_embeddings
        (64, 5632, True)
    """

    model_type = "metala"
    attribute_map = {  # noqa: RUF012  # a ClassVar of the base
        "hidden_size": "decoder_embed_dim",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
        "intermediate_size": "glu_dim",
    }
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012

    vocab_size: int = 32000
    decoder_embed_dim: int = 1024
    decoder_layers: int = 24
    decoder_attention_heads: int = 8
    glu_dim: int = 5632
    glu_act: str = "silu"
    bias: bool = False
    norm_type: str = "simplermsnorm"
    no_scale_embedding: bool = True
    causal: bool = True
    init_std: float = 0.02
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    use_cache: bool = True
    add_bos_token: bool = False
    pad_token_id: int | None = 2
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        if self.glu_dim == -1:
            self.glu_dim = self.decoder_embed_dim
        for name in ("vocab_size", "decoder_embed_dim", "decoder_layers", "decoder_attention_heads", "glu_dim"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.norm_type not in NORMS:
            raise unknown("norm_type", self.norm_type, NORMS)
        if self.glu_act != "silu" or not self.causal:
            raise InputError(f"glu_act is {self.glu_act!r}, causal is {self.causal}; they must be 'silu' and True")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise InputError(f"pad_token_id is {self.pad_token_id}; it must be below vocab_size, {self.vocab_size}")

    @property
    def layer_types(self) -> list[str]:
        """Of the layers of the cache."""
        return ["linear_attention"] * self.decoder_layers

    @property
    def norm(self) -> Norm:
        """Our name of ``norm_type``."""
        return NORMS[self.norm_type]


class MetalaLayer(Block, GradientCheckpointingLayer):
    """A block that finds its state in the cache and leaves the new one there."""

    def __init__(self, config: MetalaConfig, index: int) -> None:
        mixer = make_mixer("metala", config.decoder_embed_dim, {"heads": config.decoder_attention_heads})
        super().__init__(mixer, config.glu_dim, norm=config.norm, bias=config.bias)
        self.index = index

    def forward(self, x: Tensor, mask: Tensor | None = None, *, cache: Cache | None = None) -> Tensor:
        x, state = super().forward(x, None if cache is None else _recall(cache, self.index), mask)
        if cache is not None:
            _keep(cache, self.index, state)
        return x


def _recall(cache: Cache, index: int) -> RecurrentState | None:
    memory, recent = cache.get_recurrent_state(index), cache.get_conv_state(index)
    if memory is None or recent is None:
        return None
    if torch.is_grad_enabled():  # the cache writes into its tensors, which a backward would want as they were
        memory, recent = memory.clone(), recent.clone()
    return RecurrentState(memory, recent.mT)


def _keep(cache: Cache, index: int, state: RecurrentState) -> None:
    # The cache keeps as many columns as it was given at first, the newest ones: these, whatever it had.
    cache.update_conv_state(state.recent.mT, index)
    cache.update_recurrent_state(state.memory, index)


class MetalaPreTrainedModel(PreTrainedModel):
    """What the models have in common."""

    config_class = MetalaConfig
    config: MetalaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MetalaLayer"]  # noqa: RUF012
    _is_stateful = True
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv1d):  # as PyTorch does it
            bound = module.kernel_size[0] ** -0.5
            initialization.uniform_(module.weight, -bound, bound)
            return
        super()._init_weights(module)
        if isinstance(module, MetaLA) and module.aug_balance is not None:
            initialization.zeros_(module.aug_balance)


class MetalaModel(MetalaPreTrainedModel):
    """MetaLA without a head.

    Args:
        config: Its configuration.

    Shape:
        - ``input_ids``: ``(B, T)``, or ``inputs_embeds``: ``(B, T, C)``.
        - ``attention_mask``: ``(B, T)``, or with the tokens before too; ones where there is a token. Others are as if
          they were not there, wherever they stand.
        - ``cache``: What a call before returned, or a `DynamicCache` made with ``config``; it is changed in place, and
          goes on from there with tokens that it has not seen.
        - ``last_hidden_state``: ``(B, T, C)``.

    Raises:
        InputError: Arguments of ours that can't be: a cache of another model, tokens given twice or not at all.
    """

    def __init__(self, config: MetalaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.decoder_embed_dim, config.pad_token_id)
        self.embed_scale = 1.0 if config.no_scale_embedding else config.decoder_embed_dim**0.5
        self.layers = nn.ModuleList(MetalaLayer(config, index) for index in range(config.decoder_layers))
        self.final_norm = norm_of(config.norm, config.decoder_embed_dim)
        self.gradient_checkpointing = False
        self.post_init()

    @_old_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        if inputs_embeds is None and input_ids is not None:
            x = self.embed_tokens(input_ids)
        elif inputs_embeds is not None and input_ids is None:
            x = inputs_embeds
        else:
            raise InputError("give either input_ids or inputs_embeds")
        cache = self._cache_of(cache, use_cache)
        mask = _padding(attention_mask, x.shape[1])
        x = x * self.embed_scale
        seen = [x]
        for layer in self.layers:
            x = layer(x, mask, cache=cache)
            seen.append(x)
        x = seen[-1] = self.final_norm(x)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPast(last_hidden_state=x, cache=cache, hidden_states=tuple(seen) if wanted else None)

    def _cache_of(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache to read and write, if any."""
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if cache is not None:
            if checkpointing:  # layers would run twice, and leave the state behind their tokens twice
                raise InputError("cache: there is none in training with gradient checkpointing")
            linear = cache.is_linear if isinstance(cache, Cache) else []
            if len(linear) != self.config.decoder_layers or not all(linear):
                raise InputError("cache is not one of this model; make it with DynamicCache(config=model.config)")
            return cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return DynamicCache(config=self.config) if use_cache and not checkpointing else None


def _here(attention_mask: Tensor, tokens: int) -> Tensor:
    """The mask of the last so many tokens, ``(B, T)`` of booleans; those before are in the cache."""
    if attention_mask.ndim != 2 or attention_mask.shape[1] < tokens:
        raise InputError(f"attention_mask is {tuple(attention_mask.shape)}; it must be (B, T) for T >= {tokens} tokens")
    return attention_mask[:, attention_mask.shape[1] - tokens :].bool()


def _padding(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """The mask of the last so many tokens, or ``None`` where there is no padding among them.

    transformers has `create_recurrent_attention_mask`, which takes a single token for one that was generated and never
    padding; but a prompt may come token by token too.
    """
    if attention_mask is None:
        return None
    mask = _here(attention_mask, tokens)
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask


class MetalaForCausalLM(MetalaPreTrainedModel, GenerationMixin):
    """MetaLA as a language model.

    Args:
        config: Its configuration.

    Shape:
        - What `MetalaModel` takes; ``labels``: ``(B, T)``, the tokens themselves, -100 for those without a loss.
        - ``logits``: ``(B, T, V)``; with ``logits_to_keep`` those of the last so many tokens, or of given positions.

    Note:
        ``generate`` goes on from a cache with the tokens that are new alone, as for all models whose state doesn't
        tell how many tokens it has seen; ``prefill_chunk_size``, which would count them, is refused by transformers.

    Example:
        >>> sizes = {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = MetalaForCausalLM(MetalaConfig(**sizes, glu_dim=128)).eval()
        >>> prompt = torch.randint(250, (1, 10))
        >>> model.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False).shape
        torch.Size([1, 15])

    Reference:
        "MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map" (2024), arXiv 2411.10741.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MetalaConfig) -> None:
        super().__init__(config)
        self.model = MetalaModel(config)
        self.lm_head = nn.Linear(config.decoder_embed_dim, config.vocab_size, bias=False)
        self.post_init()

    @_old_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **of_the_loss: Any,
    ) -> CausalLMOutputWithPast:
        out = self.model(
            input_ids, attention_mask, cache, inputs_embeds, use_cache, output_hidden_states, return_dict=True
        )
        logits = self.lm_head(slice_logits_to_keep(out.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **of_the_loss)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=out.cache, hidden_states=out.hidden_states)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *, inputs_embeds: Tensor | None = None, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        # generate looks at the names of these arguments, at "kwargs" too.
        base: Any = super()  # the mixin's protocol of a model is narrower than transformers' own models
        inputs = base.prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration and inputs.get("cache") is not None:
            inputs["attention_mask"] = None  # what was generated is no padding, and the mask of the rest would grow
        return inputs


class MetalaForSequenceClassification(MetalaPreTrainedModel):
    """MetaLA as a classifier of sequences, from what it makes of the last token.

    Args:
        config: Its configuration; ``num_labels`` classes, ``problem_type`` as elsewhere in transformers.

    Shape:
        - What `MetalaModel` takes. The last token is that of ``attention_mask``; without one, the last that is not
          ``pad_token_id``.
        - ``labels``: ``(B,)``; ``logits``: ``(B, num_labels)``.
    """

    def __init__(self, config: MetalaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2  # the property says that it may be None, which it never is
        self.model = MetalaModel(config)
        self.score = nn.Linear(config.decoder_embed_dim, self.num_labels, bias=False)
        self.post_init()

    @_old_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> SequenceClassifierOutputWithPast:
        out = self.model(
            input_ids, attention_mask, cache, inputs_embeds, use_cache, output_hidden_states, return_dict=True
        )
        x = out.last_hidden_state
        if attention_mask is not None:
            there = _here(attention_mask, x.shape[1])
        elif input_ids is not None and self.config.pad_token_id is not None:
            there = input_ids != self.config.pad_token_id
        else:
            there = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        last = (there * torch.arange(x.shape[1], device=x.device)).argmax(1)
        logits = self.score(x.take_along_dim(last[:, None, None], 1)[:, 0])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, cache=out.cache, hidden_states=out.hidden_states
        )
