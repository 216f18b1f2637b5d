"""Language models under lm-evaluation-harness: scores from the logits, tasks on files, errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from lineattn.cli.main import main
from lineattn.errors import InputError
from lineattn.hf import MetalaConfig, MetalaForCausalLM, byte_tokenizer
from lineattn.models.byte_tokenizer import BOS, EOS, PAD, VOCABULARY
from lineattn.tasks import lm_harness

RECIPES = Path(__file__).parents[2] / "recipes" / "lm_eval"
CHOICE = {"query": "Question: how?", "choices": ["so", "or so"], "gold": 1}
SCHEMA = {"context_options": ["Ann saw Bea so Ann", "Ann saw Bea so Bea"], "continuation": "waved.", "gold": 0}
# Of each task its file, an item, and the pairs that are scored, as the harness makes them of the set on the hub.
TASKS = {
    "piqa": ("piqa", {**CHOICE, "query": "Question: how?\n"}, 2 * ["Question: how?\nAnswer:"], [" so", " or so"]),
    "arc_easy": ("arc_easy", CHOICE, 2 * ["Question: how?\nAnswer:"], [" so", " or so"]),
    "arc_challenge": ("arc_challenge", CHOICE, 2 * ["Question: how?\nAnswer:"], [" so", " or so"]),
    "openbookqa": ("openbook_qa", {**CHOICE, "query": "Fog is over"}, 2 * ["Fog is over"], [" so", " or so"]),
    "boolq": (
        "boolq",
        {"query": "Passage: Passage: it is.\nQuestion: is it?", "choices": ["no", "yes"], "gold": 1},
        2 * ["Passage: it is.\nQuestion: is it?\nAnswer:"],
        [" no", " yes"],
    ),
    "winogrande": ("winogrande", SCHEMA, SCHEMA["context_options"], 2 * [" waved."]),
    "wsc273": ("winograd_wsc", SCHEMA, SCHEMA["context_options"], 2 * [" waved."]),
    "lambada_openai": ("lambada_openai", {"context": "he saw the", "continuation": "sea"}, ["he saw the"], [" sea"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of bytes with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = MetalaConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"glu_dim": 16, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
        max_position_embeddings=40,
    )
    model = MetalaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for file, item, *_ in TASKS.values():
        (folder / f"{file}.jsonl").write_text(2 * (json.dumps(item) + "\n"))
    return folder


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, one, 0) for one in arguments]  # pyright: ignore[reportArgumentType]


def score(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Token by token, each from all of the text before it."""
    total, greedy = 0.0, True
    for token in continuation:
        logits = model(torch.tensor([context[-40:]])).logits[0, -1]
        total += logits.log_softmax(0)[token].item()
        greedy &= logits.argmax().item() == token
        context = [*context, token]
    return total, greedy


class TestModel:
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_log_likelihoods(self, folder, batch_size):
        model = lm_harness.load_model(folder, batch_size=batch_size)
        pairs = [("ab", " c"), ("a", " b cdé"), ("", "xyz"), ("  ", "z"), ("q" * 9, "r")]
        favourite = chr(int(model.model(torch.tensor([[97]])).logits[0, -1, :128].argmax()))
        pairs.append(("a", favourite))
        found = model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
        for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
            blank = not context.strip()
            tokens = [BOS] if blank else list(context.encode())
            continuation = context + continuation if blank else continuation
            expected = score(model.model, tokens, list(continuation.encode()))
            assert value == pytest.approx(expected[0], abs=1e-3) and greedy == expected[1]

    def test_a_long_text_is_cut_from_the_left(self, folder):
        model = lm_harness.load_model(folder, batch_size=2)
        text = "".join(map(chr, range(33, 120)))
        cut, short = model.loglikelihood(
            instances("loglikelihood", (text, "end"), (text[-38:], "end")), disable_tqdm=True
        )
        assert model.max_length == 40 and cut == pytest.approx(short, abs=1e-4)

    def test_log_likelihoods_of_whole_texts(self, folder):
        model = lm_harness.load_model(folder, batch_size=2)
        texts = ["a", "some words", "".join(map(chr, range(33, 93)))]
        found = model.loglikelihood_rolling(instances("loglikelihood_rolling", *((t,) for t in texts)), True)
        for text, value in zip(texts[:2], found, strict=False):
            assert value == pytest.approx(score(model.model, [BOS], list(text.encode()))[0], abs=1e-3)
        tokens = list(texts[2].encode())  # in two windows, the second from as much before as there is room for
        whole = score(model.model, [BOS], tokens[:40])[0] + score(model.model, tokens[19:40], tokens[40:])[0]
        assert found[2] == pytest.approx(whole, abs=1e-3)

    def test_generation_ends_where_it_is_asked_to(self, folder):
        model = lm_harness.load_model(folder, batch_size=1)
        request: dict[str, Any] = {"until": [], "max_gen_toks": 12}
        (text,) = model.generate_until(instances("generate_until", ("abc", request)), disable_tqdm=True)
        prompt = torch.tensor([list(b"abc")])
        tokens = model.model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=PAD)[0, 3:]
        assert text == model.tokenizer.decode(tokens, skip_special_tokens=True) and len(text) > 2
        until = text[2]
        (cut,) = model.generate_until(instances("generate_until", ("abc", {**request, "until": until})), True)
        assert cut == text[: text.index(until)]

    def test_a_tokenizer_without_a_beginning(self, folder):
        model = lm_harness.load_model(folder, batch_size=1)
        model.tokenizer.bos_token = None
        assert model.prefix_token_id == EOS
        model.tokenizer.eos_token = None
        with pytest.raises(InputError, match="neither bos_token nor eos_token"):
            model.loglikelihood(instances("loglikelihood", ("", "a")), disable_tqdm=True)


class TestTasks:
    def test_all_are_here(self):
        assert {path.stem for path in RECIPES.glob("*.yaml")} == set(TASKS)

    @pytest.mark.parametrize("name", TASKS)
    def test_prompts_are_the_harness_s(self, name, data, tmp_path):
        tasks = lm_harness.load_tasks([name], tmp_path, include=RECIPES, data=data)["tasks"]
        tasks[name].build_all_requests()
        _, _, contexts, continuations = TASKS[name]
        pairs = list(zip(contexts, continuations, strict=True))
        assert [instance.args for instance in tasks[name].instances] == 2 * pairs

    def test_tags_and_patterns(self, data, tmp_path):
        def found(*names: str) -> set[str]:
            return set(lm_harness.load_tasks(names, tmp_path, include=RECIPES, data=data)["tasks"])

        assert found("zero_shot") == set(TASKS)
        assert found("arc_*", "piqa", "arc_easy") == {"arc_easy", "arc_challenge", "piqa"}

    def test_data_that_cannot_be_had(self, tmp_path, monkeypatch):
        (tmp_path / "one.yaml").write_text("task: one\ndataset_path: nobody/nothing\ntest_split: test\n")

        def refuse(**_: Any) -> None:
            raise ConnectionError("no route\nto the hub")

        monkeypatch.setattr("datasets.load_dataset", refuse)
        with pytest.raises(InputError, match=r"task one: nobody/nothing can't be had \(ConnectionError: no route\)"):
            lm_harness.load_tasks(["one"], tmp_path, include=tmp_path)


class TestCommand:
    def test_it_scores_and_writes(self, folder, data, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "200")
        args = ["--tasks", "piqa, lambada_openai", "--include", str(RECIPES), "--data", str(data)]
        assert main(["lm-eval", str(folder), *args, "--out", str(tmp_path / "out")]) == 0
        shown = capsys.readouterr().out
        assert "piqa" in shown and "acc_norm" in shown and "perplexity" in shown
        written = json.loads((tmp_path / "out" / "lm_eval.json").read_text())
        assert (
            f"{written['parameters']:,} parameters" in shown
            and {"torch", "lm_eval"} <= written["environment"]["versions"].keys()
        )
        model = lm_harness.load_model(folder, batch_size=1).model
        pairs = [(list(b"Question: how?\nAnswer:"), list(text)) for text in (b" so", b" or so")]
        values = torch.tensor([score(model, *pair)[0] for pair in pairs])
        piqa = written["tasks"]["piqa"]
        assert piqa["items"] == 2 and piqa["acc"]["value"] == (values.argmax() == 1)
        assert piqa["acc_norm"]["value"] == ((values / torch.tensor([2, 5])).argmax() == 1)
        value = score(model, list(b"he saw the"), list(b" sea"))[0]
        perplexity = written["tasks"]["lambada_openai"]["perplexity"]
        assert perplexity["value"] == pytest.approx(torch.tensor(-value).exp().item(), rel=1e-3)

    @pytest.mark.medium
    def test_on_the_shared_sets(self, folder, tmp_path, shared_data):
        data = shared_data("zeroshot_eval")
        args = ["--tasks", "zero_shot", "--include", str(RECIPES), "--data", str(data), "--limit", "2"]
        assert main(["lm-eval", str(folder), *args, "--out", str(tmp_path)]) == 0
        tasks = json.loads((tmp_path / "lm_eval.json").read_text())["tasks"]
        assert {name: task["items"] for name, task in tasks.items()} == dict.fromkeys(TASKS, 2)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": "gone"}, "gone: no such folder"),
            ({"model": "empty"}, "no config.json in it"),
            ({"--tasks": "piqa,pica"}, "unknown task 'pica': did you mean 'piqa'"),
            ({"--tasks": ","}, "--tasks names none"),
            ({"--data": None}, "it reads piqa.jsonl; say where that is with --data FOLDER"),
            ({"--data": "gone"}, "--data gone: no such folder"),
            ({"--data": "empty"}, "piqa.jsonl is missing"),
            ({"--include": "gone"}, "--include gone: no such folder"),
            ({"--include": "empty"}, "there is no task in it"),
            ({"--limit": "0"}, "--limit is 0"),
            ({"--out": "file"}, "is a file"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, change, message, folder, data, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").touch()
        given = {"model": str(folder), "--tasks": "piqa", "--include": str(RECIPES), "--data": str(data), **change}
        model = given.pop("model")
        options = [word for name, value in given.items() if value is not None for word in (name, value)]
        assert main(["lm-eval", model, *options]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("lineattn: ") and message in error

    @pytest.mark.parametrize(
        ("missing", "message"),
        [("tokenizer*", "no tokenizer in it"), ("model.safetensors", "can't be loaded (OSError")],
    )
    def test_a_folder_that_lacks_something(self, missing, message, folder, data, tmp_path, capsys):
        for file in folder.iterdir():
            if not file.match(missing):
                (tmp_path / file.name).write_bytes(file.read_bytes())
        assert main(["lm-eval", str(tmp_path), "--tasks", "piqa"]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]

    def test_weights_that_lack_something(self, folder, tmp_path, capsys):
        model = MetalaForCausalLM.from_pretrained(folder)
        weights = {name: value for name, value in model.state_dict().items() if "aug_balance" not in name}
        model.save_pretrained(tmp_path, state_dict=weights)
        byte_tokenizer().save_pretrained(tmp_path)
        assert main(["lm-eval", str(tmp_path), "--tasks", "piqa"]) == 2
        assert "the weights lack model.layers.0.token_mixer.aug_balance" in capsys.readouterr().err

    def test_a_tokenizer_with_more_tokens_than_the_model(self, folder, tmp_path, capsys):
        MetalaForCausalLM.from_pretrained(folder, pad_token_id=None).save_pretrained(tmp_path)
        small = MetalaForCausalLM.from_pretrained(tmp_path)
        small.resize_token_embeddings(256)
        small.save_pretrained(tmp_path)
        byte_tokenizer().save_pretrained(tmp_path)
        assert main(["lm-eval", str(tmp_path), "--tasks", "piqa"]) == 2
        assert "the tokenizer has 259 tokens, the model 256" in capsys.readouterr().err

    @pytest.mark.parametrize("missing", ["lm_eval", "transformers"])
    def test_without_the_extra(self, missing, folder, capsys, monkeypatch):
        monkeypatch.setattr("lineattn.errors.find_spec", lambda name: None if name == missing else name)
        assert main(["lm-eval", str(folder), "--tasks", "piqa"]) == 2
        assert capsys.readouterr().err == "lineattn: lm-eval needs the lm extra: pip install 'lineattn[lm]'\n"
