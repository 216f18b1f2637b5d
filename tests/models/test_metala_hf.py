"""MetaLA in Hugging Face: the native model's numbers, through their cache, masks, generation and files."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.cache_utils import Cache, DynamicCache

import lineattn.hf
from lineattn.errors import InputError
from lineattn.models.language import LanguageModel
from lineattn.models.metala_convert import to_hf
from lineattn.models.metala_hf import (
    MetalaConfig,
    MetalaForCausalLM,
    MetalaForSequenceClassification,
    MetalaModel,
)
from lineattn.models.metala_published import load_published
from lineattn.nn.token.base import Layout
from tests.oracles.token import metala

SIZES = {"vocab_size": 23, "decoder_embed_dim": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "glu_dim": 24}
PAD = 2


def filled(model: Any) -> Any:
    """With weights as after some training: at the start all logits are nearly the same."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def language_model(**fields: Any) -> MetalaForCausalLM:
    return filled(MetalaForCausalLM(MetalaConfig(**{**SIZES, **fields})))


def native(**arguments: Any) -> LanguageModel:
    return filled(LanguageModel(23, 16, 2, **{"mixer_args": {"heads": 2}, "hidden": 24, **arguments}))


def some_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, 23, (batch, length))


def padded(rows: list[Tensor], side: str = "left") -> tuple[Tensor, Tensor]:
    """Rows of different lengths in one batch, and its mask."""
    width = max(len(row) for row in rows)
    tokens, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[i, place], mask[i, place] = row, 1
    return tokens, mask


def continued(model: Any, tokens: Tensor, splits: list[int], mask: Tensor | None = None) -> tuple[Tensor, Cache]:
    """Logits of tokens given in pieces, the cache handed on, with all of the mask so far each time."""
    cache, outs, seen = None, [], 0
    for piece in tokens.split(splits, 1):
        seen += piece.shape[1]
        out = model(piece, attention_mask=None if mask is None else mask[:, :seen], cache=cache, use_cache=True)
        cache = out.cache
        outs.append(out.logits)
    assert cache is not None
    return torch.cat(outs, 1), cache


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


greedy = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": PAD}


class TestNumbers:
    @pytest.mark.parametrize("arguments", [{}, {"tied": False}, {"norm": "rms"}, {"norm": "layer"}])
    def test_logits_are_the_native_ones(self, arguments):
        net, tokens = native(**arguments), some_tokens(2, 9)
        model = to_hf(net)
        assert torch.equal(model(tokens).logits, net(tokens)[0])
        assert model.config.tie_word_embeddings == arguments.get("tied", True)

    def test_keys_are_the_published_ones(self):
        block = "model.layers.{}.token_mixer."
        mixer = ("q_proj.weight", "k_gate.weight", "v_proj.weight", "g_proj.weight", "g_proj.bias", "out_proj.weight")
        parts = [block + name for name in (*mixer, "aug_balance", "conv1d.weight")]
        parts += [f"model.layers.{{}}.channel_mixer.{name}.weight" for name in ("l1", "l2", "l3")]
        names = {part.format(i) for part in parts for i in range(2)}
        state = language_model().state_dict()
        assert set(state) == names | {"model.embed_tokens.weight", "lm_head.weight"}
        assert state["model.layers.0.token_mixer.conv1d.weight"].shape == (16, 1, 4)
        assert state["model.layers.1.token_mixer.aug_balance"].shape == (8,)

    def test_start(self):
        model = MetalaForCausalLM(MetalaConfig(**{**SIZES, "decoder_embed_dim": 128, "vocab_size": 99}))
        mixer = model.model.layers[0].token_mixer
        for layer in (mixer.q_proj, mixer.k_gate, mixer.out_proj, model.model.layers[1].channel_mixer.l3):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert mixer.conv1d.weight.abs().max().item() == pytest.approx(0.5, rel=0.05)
        assert not mixer.aug_balance.any() and not mixer.g_proj.bias.any()
        embedding = model.model.embed_tokens.weight
        assert not embedding[PAD].any() and embedding.std().item() == pytest.approx(0.02, rel=0.1)
        assert model.lm_head.weight is embedding

    @pytest.mark.parametrize(
        ("fields", "millions"),
        [
            ({}, 548.8),  # the published defaults
            ({"vocab_size": 50304, "glu_dim": 2816}, 359.9),  # the paper's 360M
            ({"vocab_size": 50304, "hidden_size": 2048, "tie_word_embeddings": False}, 1439.0),  # its 1.4B
        ],
    )
    def test_sizes_of_the_paper(self, fields, millions):
        with torch.device("meta"):
            model = MetalaForCausalLM(MetalaConfig(**fields))
        assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=5e-4)

    def test_scaled_embedding(self):
        plain = language_model()
        scaled = MetalaForCausalLM(MetalaConfig(**SIZES, no_scale_embedding=False)).eval()
        scaled.load_state_dict(plain.state_dict())
        tokens = some_tokens(1, 5)
        embedded = 4 * plain.model.embed_tokens(tokens)
        torch.testing.assert_close(scaled(tokens).logits, plain(inputs_embeds=embedded).logits)

    def test_loss_and_the_last_logits(self):
        model, tokens = language_model(), some_tokens(2, 9)
        labels = tokens.clone()
        labels[:, 4] = -100
        out = model(tokens, labels=labels)
        expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        torch.testing.assert_close(out.loss, expected)
        torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, out.logits[:, -2:])
        torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([3])).logits, out.logits[:, 3:4])

    def test_hidden_states_and_tuples(self):
        model, tokens = language_model(), some_tokens(2, 9)
        out = model(tokens, output_hidden_states=True, use_cache=False)
        assert [state.shape for state in out.hidden_states] == 3 * [(2, 9, 16)] and out.cache is None
        torch.testing.assert_close(model.lm_head(out.hidden_states[-1]), out.logits)
        model.config.return_dict = False
        assert torch.equal(model(tokens)[0], out.logits)

    def test_bfloat16(self):
        model, tokens = language_model(), some_tokens(2, 40)
        expected = model(tokens).logits
        half = copy.deepcopy(model).bfloat16()
        out = half(tokens)
        assert out.logits.dtype == torch.bfloat16 and out.cache.get_recurrent_state(0).dtype == torch.float32
        assert (out.logits - expected).norm() < 0.05 * expected.norm()
        torch.testing.assert_close(continued(half, tokens, [30, 1, 9])[0], out.logits, atol=0.1, rtol=0.05)


class TestPieces:
    @pytest.mark.parametrize("splits", [[1] * 9, [4, 5], [2, 1, 3, 3], [8, 1], [1, 8]])
    def test_pieces_are_the_whole(self, splits):
        model, tokens = language_model(), some_tokens(2, 9)
        torch.testing.assert_close(continued(model, tokens, splits)[0], model(tokens).logits, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("splits", [[9], [1] * 9, [4, 5], [2, 1, 3, 3]])
    @pytest.mark.parametrize("side", ["left", "right", "inside"])
    def test_padding_anywhere(self, side, splits):
        """The rows' own logits, and those of what comes after; in pieces too, of single tokens that are padding."""
        model, more = language_model(), some_tokens(2, 3)
        rows = [some_tokens(1, 9)[0], some_tokens(1, 4)[0]]
        tokens, mask = padded(rows, "left" if side == "left" else "right")
        if side == "inside":
            tokens[1], mask[1] = PAD, 0
            tokens[1, 1:8:2], mask[1, 1:8:2] = rows[1], 1
        logits, cache = continued(model, tokens, splits, mask)
        after = model(more, attention_mask=torch.cat([mask, torch.ones(2, 3)], 1), cache=cache).logits
        for i, row in enumerate(rows):
            alone = model(torch.cat([row, more[i]])[None]).logits[0]
            torch.testing.assert_close(logits[i][mask[i] == 1], alone[:-3], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(after[i], alone[-3:], atol=1e-5, rtol=1e-5)

    def test_a_cache_of_their_making(self):
        model, tokens = language_model(), some_tokens(1, 9)
        cache = DynamicCache(config=model.config)
        model(tokens[:, :5], cache=cache)
        after = model(tokens[:, 5:], cache=cache).logits
        torch.testing.assert_close(after, model(tokens).logits[:, 5:], atol=1e-5, rtol=1e-5)
        cache.reset()
        torch.testing.assert_close(model(tokens, cache=cache).logits, model(tokens).logits)

    def test_the_cache_by_its_old_name(self):
        model, tokens = language_model(), some_tokens(1, 9)
        cache = model(tokens[:, :5]).cache
        with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
            after = model(tokens[:, 5:], past_key_values=cache).logits
        torch.testing.assert_close(after, model(tokens).logits[:, 5:], atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("cache", [DynamicCache(), DynamicCache(config=MetalaConfig(num_hidden_layers=3)), ((),)])
    def test_another_cache_is_refused(self, cache):
        with pytest.raises(InputError, match="cache is not one of this model"):
            language_model()(some_tokens(1, 3), cache=cache)

    @pytest.mark.parametrize("given", [{}, {"input_ids": some_tokens(1, 3), "inputs_embeds": torch.zeros(1, 3, 16)}])
    def test_tokens_once(self, given):
        with pytest.raises(InputError, match="either input_ids or inputs_embeds"):
            language_model()(**given)

    @pytest.mark.parametrize("shape", [(1, 1, 3, 3), (1, 2)])
    def test_another_mask_is_refused(self, shape):
        with pytest.raises(InputError, match=r"attention_mask is .* 3 tokens"):
            language_model()(some_tokens(1, 3), attention_mask=torch.ones(shape))


class TestGenerate:
    def test_with_and_without_a_cache(self):
        model, prompt = language_model(), some_tokens(2, 5)
        with_cache = model.generate(prompt, **greedy)
        assert torch.equal(with_cache, model.generate(prompt, **greedy, use_cache=False))
        ids = prompt
        for _ in range(6):
            ids = torch.cat([ids, model(ids).logits[:, -1:].index_fill(2, torch.tensor(PAD), -9e9).argmax(2)], 1)
        assert torch.equal(with_cache, ids)

    def test_in_a_batch_as_alone(self):
        model = language_model()
        rows = [some_tokens(1, 7)[0], some_tokens(1, 3)[0], some_tokens(1, 1)[0]]
        tokens, mask = padded(rows)
        together = model.generate(tokens, attention_mask=mask, **greedy)[:, 7:]
        for i, row in enumerate(rows):
            assert torch.equal(together[i], model.generate(row[None], **greedy)[0, len(row) :])
        assert torch.equal(together, model.generate(tokens, attention_mask=mask, **greedy, use_cache=False)[:, 7:])

    @pytest.mark.parametrize("mode", [{"num_beams": 3}, {"do_sample": True}])
    def test_beams_and_samples(self, mode):
        model = language_model()
        tokens, mask = padded([some_tokens(1, 6)[0], some_tokens(1, 4)[0]])
        outs = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            outs.append(model.generate(tokens, attention_mask=mask, **{**greedy, **mode}, use_cache=use_cache))
        assert torch.equal(*outs)

    def test_from_embeddings(self):
        model, prompt = language_model(), some_tokens(1, 5)
        out = model.generate(inputs_embeds=model.model.embed_tokens(prompt), **greedy)
        assert torch.equal(out, model.generate(prompt, **greedy)[:, 5:])

    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_caches_of_generate(self, kind):
        model, prompt = language_model(), some_tokens(2, 5)
        out = model.generate(prompt, **greedy, cache_implementation=kind)
        assert torch.equal(out, model.generate(prompt, **greedy))

    def test_from_a_cache(self):
        model, tokens = language_model(), some_tokens(1, 9)
        cache = model(tokens[:, :5]).cache
        after = model.generate(tokens[:, 5:], cache=cache, **greedy)[:, 4:]
        assert torch.equal(after, model.generate(tokens, **greedy)[:, 9:])

    @pytest.mark.medium
    def test_a_compiled_step_is_one_graph(self):
        model, tokens = language_model(), some_tokens(2, 8)
        graphs = []

        def count(graph, _):
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        step = torch.compile(model, backend=count, fullgraph=True)
        with torch.no_grad():
            cache = model(tokens[:, :5]).cache
            outs = [step(tokens[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(5, 8)]
        torch.testing.assert_close(torch.cat(outs, 1), model(tokens).logits[:, 5:], atol=1e-5, rtol=1e-5)
        assert len(graphs) == 1


class TestTraining:
    def test_gradient_checkpointing(self):
        model, tokens = language_model().train(), some_tokens(2, 9)
        found = []
        for checkpointing in (False, True):
            if checkpointing:
                model.activation_checkpointing_enable()
            model.zero_grad()
            loss = model(tokens, labels=tokens, attention_mask=padded([tokens[0], tokens[1, :5]])[1]).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)
        assert all(gradient.any() for gradient in found[0])
        with pytest.raises(InputError, match="gradient checkpointing"):
            model(tokens, cache=DynamicCache(config=model.config))

    def test_no_cache_in_training_unless_asked_for(self):
        model, tokens = language_model().train(), some_tokens(1, 3)
        assert model(tokens).cache is None and model(tokens, use_cache=True).cache is not None


class TestFiles:
    def test_saved_and_loaded(self, tmp_path):
        model, tokens = language_model(), some_tokens(2, 9)
        model.save_pretrained(tmp_path)
        assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(again) is MetalaForCausalLM and again.lm_head.weight is again.model.embed_tokens.weight
        assert torch.equal(again(tokens).logits, model(tokens).logits)
        trunk = AutoModel.from_pretrained(tmp_path)
        assert type(trunk) is MetalaModel
        assert torch.equal(trunk(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
        half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        torch.testing.assert_close(half.state_dict(), model.bfloat16().state_dict(), atol=0, rtol=0)

    def test_untied(self, tmp_path):
        model, tokens = language_model(tie_word_embeddings=False), some_tokens(2, 9)
        model.save_pretrained(tmp_path)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits)

    def test_a_classifier_from_a_language_model(self, tmp_path, recwarn):
        language_model().save_pretrained(tmp_path)
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
        assert type(model) is MetalaForSequenceClassification and model.score.weight.shape == (3, 16)

    def test_an_old_configuration(self, tmp_path):
        old = {**SIZES, "model_type": "metala", "auto_map": {"AutoConfig": "configuration_metala.MetalaConfig"}}
        old |= {"architectures": ["MetaLAForCausalLM"], "torch_dtype": "float32", "use_lower_bound": True, "rms_eps": 1}
        (tmp_path / "config.json").write_text(json.dumps(old))
        config = AutoConfig.from_pretrained(tmp_path)
        assert type(config) is MetalaConfig and config.use_lower_bound and config.tie_word_embeddings
        assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (16, 2, 2)

    def test_defaults_are_the_published_ones(self):
        config = MetalaConfig()
        assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (32000, 1024, 24)
        assert (config.num_attention_heads, config.intermediate_size, config.init_std) == (8, 5632, 0.02)
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (2, 1, 2)
        assert MetalaConfig(glu_dim=-1, hidden_size=64).glu_dim == 64

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"vocab_size": 0}, "vocab_size is 0"),
            ({"num_hidden_layers": 0}, "decoder_layers is 0"),
            ({"glu_dim": -2}, "glu_dim is -2"),
            ({"norm_type": "layer_norm"}, "did you mean 'layernorm'"),
            ({"glu_act": "relu"}, "glu_act is 'relu'"),
            ({"causal": False}, "causal is False"),
            ({"pad_token_id": 23}, "pad_token_id is 23"),
            ({"decoder_attention_heads": 3}, "heads is 3"),
        ],
    )
    def test_a_configuration_that_cannot_be(self, fields, message):
        with pytest.raises(InputError, match=message) as error:
            MetalaForCausalLM(MetalaConfig(**{**SIZES, **fields}))
        assert "\n" not in str(error.value)


class TestPublished:
    @pytest.mark.parametrize("prefix", ["", "module.", "model.", "module.model."])
    @pytest.mark.parametrize("kind", ["safetensors", "bin"])
    def test_files(self, tmp_path, kind, prefix):
        net, tokens = native(), some_tokens(2, 9)
        weights = {prefix + name: value for name, value in net.state_dict().items()}
        if kind == "bin":
            torch.save(weights, tmp_path / "pytorch_model.bin")
        else:
            half = len(weights) // 2
            parts = [dict(list(weights.items())[:half]), dict(list(weights.items())[half:])]
            for i, part in enumerate(parts):
                save_file(part, tmp_path / f"model-0000{i}-of-00002.safetensors")
        model = language_model()
        report = load_published(model, tmp_path)
        assert len(report.loaded) == len(weights)
        assert torch.equal(model(tokens).logits, net(tokens)[0])
        half = language_model().bfloat16()
        load_published(half, tmp_path)
        assert torch.equal(half.lm_head.weight, net.embed_tokens.weight.bfloat16())

    def test_names_of_neox(self):
        net, model, tokens = native(norm="layer"), language_model(norm_type="layernorm"), some_tokens(2, 9)
        theirs = {"token_mixer": "attention", "token_norm": "input_layernorm"}
        theirs["channel_norm"] = "post_attention_layernorm"
        theirs |= {"channel_mixer.l1": "mlp.w1", "channel_mixer.l2": "mlp.w3", "channel_mixer.l3": "mlp.w2"}
        weights = {}
        for name, value in net.state_dict().items():
            for ours, there in theirs.items():
                name = name.replace(ours, there)
            weights[name] = value
        assert "layers.1.mlp.w3.weight" in weights and "layers.0.input_layernorm.bias" in weights
        load_published(model, weights)
        assert torch.equal(model(tokens).logits, net(tokens)[0])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda w: w.pop("layers.0.token_mixer.k_gate.weight"), "nothing there for layers.0.token_mixer.k_gate"),
            (lambda w: w.update({"layers.0.token_norm.weight": torch.ones(16)}), "is norm_type another"),
            (lambda w: w.update({"layers.2.token_mixer.aug_balance": torch.ones(8)}), "is decoder_layers another"),
            (lambda w: w.update({"embed_tokens.weight": torch.ones(22, 16)}), r"has shape \(22, 16\)"),
            (lambda w: w.update({"lm_head.weight": torch.ones(23, 16)}), "tie_word_embeddings=False"),
        ],
    )
    def test_what_does_not_fit(self, change, message):
        weights, model = native().state_dict(), language_model()
        before = copy.deepcopy(model.state_dict())
        change(weights)
        with pytest.raises(InputError, match=message):
            load_published(model, weights)
        torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)

    def test_an_untied_head_must_be_there(self):
        weights = native().state_dict()
        with pytest.raises(InputError, match="nothing there for lm_head"):
            load_published(language_model(tie_word_embeddings=False), weights)

    def test_code_in_a_file_is_not_run(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return print, ("run",)

        torch.save({"x": Evil()}, tmp_path / "pytorch_model.bin")
        with pytest.raises(InputError, match="could run code"):
            load_published(language_model(), tmp_path)

    def test_nothing_there(self, tmp_path):
        with pytest.raises(InputError, match="there is no"):
            load_published(language_model(), tmp_path)


class TestToHf:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"mixer": "gla"}, "the mixer is GLA"),
            ({"hidden": 0}, "hidden is 0"),
            ({"mixer_args": {"heads": 2, "conv": 2}}, "conv is 2; .* it is 4"),
            ({"mixer_args": {"heads": 2, "conv": 0}}, "conv is 0"),
            ({"mixer_args": {"heads": 2, "key_width": 16}}, "key_width is 16"),
            ({"mixer_args": {"heads": 2, "key": True}}, "key is True"),
            ({"mixer_args": {"heads": 2, "augmentation": "linear"}}, "augmentation is 'linear'"),
            ({"mixer_args": {"heads": 2, "norm": False}}, "norm is False"),
            ({"mixer_args": {"heads": 2, "gate": False}}, "gate is False"),
            ({"mixer_args": {"heads": 2, "tau": 8.0}}, "tau is 8.0"),
            ({"mixer_args": {"heads": 2, "scale": 1.0}}, "scale is 1.0"),
        ],
    )
    def test_what_the_published_model_has_not(self, arguments, message):
        with pytest.raises(InputError, match=message) as error:
            to_hf(native(**arguments))
        assert "\n" not in str(error.value)

    def test_tokens_that_mean_something(self, tmp_path):
        model = to_hf(native(), bos_token_id=20, eos_token_id=21, pad_token_id=22, max_position_embeddings=64)
        model.save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (20, 21, 22)
        assert model.generation_config.eos_token_id == 21 and config.max_position_embeddings == 64

    def test_it_is_a_copy_in_the_same_type(self):
        net = native().double().train()
        model = to_hf(net)
        assert model.dtype == torch.float64 and model.training
        model.lm_head.weight.data.zero_()
        assert net.embed_tokens.weight.any()


class TestClassifier:
    def test_the_last_token_that_there_is(self):
        model = filled(MetalaForSequenceClassification(MetalaConfig(**SIZES, num_labels=3)))
        rows = [some_tokens(1, 7)[0], some_tokens(1, 4)[0]]
        alone = torch.cat([model(row[None]).logits for row in rows])
        for side in ("left", "right"):
            tokens, mask = padded(rows, side)
            torch.testing.assert_close(model(tokens, attention_mask=mask).logits, alone, atol=1e-5, rtol=1e-5)
            embedded = model.model.embed_tokens(tokens)
            out = model(inputs_embeds=embedded, attention_mask=mask).logits
            torch.testing.assert_close(out, alone, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(tokens).logits, alone, atol=1e-5, rtol=1e-5)  # padding on the right, by its id
        ends = torch.cat([rows[0], torch.tensor([PAD])])[None]
        torch.testing.assert_close(  # a token that ends a text and pads, where the mask says that it is there
            model(ends, attention_mask=torch.ones_like(ends)).logits,
            model.score(model.model(ends).last_hidden_state[:, -1]),
        )

    def test_loss(self):
        model = filled(MetalaForSequenceClassification(MetalaConfig(**SIZES, num_labels=3)))
        out = model(some_tokens(4, 5), labels=torch.tensor([0, 2, 1, 1]))
        expected = torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 2, 1, 1]))
        torch.testing.assert_close(out.loss, expected)


class TestFaultsOfThePublishedCode:
    """Ten, by their numbers in the list of those that were found in it."""

    def test_1_a_channel_that_forgets_slowly_still_writes(self):
        slow = torch.tensor(5.0).bfloat16()
        assert 1 - (torch.nn.functional.logsigmoid(slow) / 16).exp() == 0  # the published key
        mixer = language_model().model.layers[0].token_mixer.bfloat16()
        mixer.conv1d.weight.data.fill_(0.5)
        mixer.k_gate.weight.data.fill_(5 / 16)
        x = torch.ones(1, 20, 16, dtype=torch.bfloat16)
        assert (mixer.parts(mixer.local(x, None, Layout())[0]).k[0, 4:] > 0).all()
        assert (mixer(x)[1].memory != 0).all()

    def test_2_heads_and_tokens_are_not_mixed_up(self):
        model = language_model().double()
        mixer = model.model.layers[0].token_mixer
        x = torch.randn(2, 5, 16, dtype=torch.float64)
        torch.testing.assert_close(mixer(x)[0], metala(mixer, x))

    def test_3_several_tokens_see_those_before_in_the_convolution(self):
        model, tokens = language_model(), some_tokens(1, 6)
        torch.testing.assert_close(continued(model, tokens, [3, 3])[0], model(tokens).logits, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("pad", [0, 1])
    def test_4_ones_and_zeros_of_a_mask_are_no_tokens(self, pad):
        model = language_model(pad_token_id=pad)
        tokens, mask = padded([some_tokens(1, 5)[0], some_tokens(1, 3)[0]])
        alone = model(tokens[1:, 2:]).logits
        torch.testing.assert_close(model(tokens, attention_mask=mask).logits[1:, 2:], alone, atol=1e-5, rtol=1e-5)
        model(tokens, attention_mask=torch.ones_like(mask))

    def test_5_beams_are_reordered_with_all_of_their_state(self):
        model, tokens = language_model(), some_tokens(2, 6)
        cache = model(tokens[:, :5]).cache
        cache.reorder_cache(torch.tensor([1, 1]))
        after = model(tokens[[1, 1], 5:], cache=cache).logits
        torch.testing.assert_close(after, model(tokens[[1, 1]]).logits[:, 5:], atol=1e-5, rtol=1e-5)

    def test_6_it_generates(self):
        assert language_model().generate(some_tokens(1, 3), **greedy).shape == (1, 9)

    def test_7_gradients_reach_through_the_cache(self):
        model, tokens = language_model(), some_tokens(1, 8)
        found = []
        for splits in ([8], [3, 4, 1]):
            embedded = model.model.embed_tokens(tokens).detach().requires_grad_()
            cache, outs = None, []
            for piece in embedded.split(splits, 1):
                out = model(inputs_embeds=piece, cache=cache, use_cache=True)
                cache = out.cache
                outs.append(out.logits)
            (found_here,) = torch.autograd.grad(torch.cat(outs, 1).square().sum(), embedded)
            found.append(found_here)
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)

    def test_8_a_cache_can_be_forked(self):
        model, prompt = language_model(), some_tokens(1, 5)
        with torch.no_grad():
            cache = model(prompt).cache
        for _ in range(2):
            more = some_tokens(1, 4)
            after = model(more, cache=copy.deepcopy(cache)).logits
            whole = model(torch.cat([prompt, more], 1)).logits
            torch.testing.assert_close(after, whole[:, 5:], atol=1e-5, rtol=1e-5)

    @pytest.mark.medium
    def test_9_it_runs_without_cuda_and_its_kernels(self):
        done = in_a_process(
            "import sys; sys.modules |= dict.fromkeys(('fla', 'causal_conv1d', 'triton')); import torch, lineattn.hf; "
            "m = lineattn.hf.MetalaForCausalLM(lineattn.hf.MetalaConfig(vocab_size=9, hidden_size=16, glu_dim=8, "
            "num_hidden_layers=1, num_attention_heads=2)); print(m(torch.ones(1, 3, dtype=torch.long)).logits.shape)"
        )
        assert done.stdout == "torch.Size([1, 3, 9])\n"

    def test_10_nothing_is_changed_in_place(self):
        model = language_model()
        tokens, mask = padded([some_tokens(1, 5)[0], some_tokens(1, 3)[0]])
        embedded, mask_before = model.model.embed_tokens(tokens).detach(), mask.clone()
        before, normed = embedded.clone(), []
        model.model.layers[0].token_norm.register_forward_hook(lambda _m, _i, out: normed.append((out, out.clone())))
        model(inputs_embeds=embedded, attention_mask=mask)
        assert torch.equal(embedded, before) and torch.equal(mask, mask_before) and torch.equal(*normed[0])


class TestRegistration:
    @pytest.mark.medium
    def test_import_registers_where_transformers_is_loaded(self):
        done = in_a_process(
            "import transformers, lineattn; from transformers import AutoConfig, AutoModelForCausalLM; "
            "c = AutoConfig.for_model('metala', vocab_size=9, hidden_size=16, glu_dim=8, num_hidden_layers=1); "
            "print(type(AutoModelForCausalLM.from_config(c)).__name__)"
        )
        assert done.stdout == "MetalaForCausalLM\n"

    def test_without_transformers(self):
        done = in_a_process("import sys; sys.modules['transformers'] = None; import lineattn; import lineattn.hf")
        assert done.stderr.splitlines()[-1] == "ImportError: lineattn.hf needs transformers: pip install 'lineattn[hf]'"

    @pytest.mark.medium
    def test_an_old_transformers_breaks_nothing_but_ours(self):
        done = in_a_process(
            "import transformers; transformers.__version__ = '4.57.1'; import lineattn; import lineattn.hf"
        )
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: lineattn.hf needs transformers 5.24 or later, not 4.57.1")
        assert done.stderr.count("Traceback") == 1  # of the second import alone

    def test_names(self):
        assert all(hasattr(lineattn.hf, name) for name in lineattn.hf.__all__)
