"""Language modelling and associative recall as tasks: what is measured, resumed, continued and refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lineattn import registry
from lineattn.cli.main import main
from lineattn.cli.restore import restore
from lineattn.cli.task import run
from lineattn.models.byte_tokenizer import EOS, byte_tokenizer
from lineattn.tasks.lm import LanguageModelling
from lineattn.tasks.optim import Optim
from lineattn.tasks.record import Record
from tests.tasks.helpers import Killed, assert_equal, contents, fails, fit, killed_at

SMALL = ("--model.width", "16", "--model.depth", "2", "--model.attn_args", "{heads: 2}", "--trainer.max_epochs", "2")
TEXT = (*SMALL, "--data.length", "16", "--data.batch_size", "4")
RECALL = (
    *(*SMALL, "--data.length", "16", "--data.pairs", "2", "--data.vocabulary", "16", "--data.batch_size", "8"),
    *("--data.train_examples", "40", "--data.examples", "16"),
)
WORDS = ["the cat", "sat on the mat and", "looked at another cat for a very long time", "né", "mice"]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Record, "plot", lambda self: None)
    for split in ("train", "val", "test"):
        folder = tmp_path / "texts" / split
        folder.mkdir(parents=True)
        for number, words in enumerate(WORDS):
            (folder / f"{number}.txt").write_text(f"{split} {words}")
    return tmp_path / "texts"


@pytest.mark.parametrize("attn", registry.list_methods("token"))
def test_what_is_reported_is_the_loss_of_each_document_by_itself(attn: str, texts: Path, tmp_path: Path):
    """Blocks longer than any document, so that none is cut: then each token sees its whole document and no other."""
    options = ("--data.root", str(texts), "--model.attn", attn, "--data.length", "400", "--trainer.max_epochs", "1")
    arguments = {"s4d": "{}", "mamba": "{}"}.get(attn, "{heads: 2}")
    found = fit(tmp_path / "run", *TEXT, *options, "--model.attn_args", arguments, task="lm")
    net = restore(tmp_path / "run" / "checkpoints" / "last.ckpt").net.double()
    nats, tokens, size = 0.0, 0, 0
    with torch.no_grad():
        for file in sorted((texts / "test").iterdir()):
            document = file.read_bytes()
            line = torch.tensor([[EOS, *document, EOS]])
            log_probabilities = net(line[:, :-1])[0].log_softmax(-1)
            nats -= log_probabilities.gather(2, line[:, 1:, None]).sum().item()
            tokens, size = tokens + len(document) + 1, size + len(document)
    last = found["last"]
    assert last["test/loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert last["test/ppl"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert last["test/bpb"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert last["test/byte_ppl"] == pytest.approx(math.exp(nats / size), rel=1e-5)


def test_the_best_weights_are_those_of_the_fewest_bits(texts: Path, tmp_path: Path):
    found = fit(tmp_path / "run", "--data.root", str(texts), *TEXT, "--optim.lr", "0.01", task="lm")
    bits = [float(row["val/bpb"]) for row in contents(tmp_path / "run")["rows"]]
    assert found["best"]["val/bpb"] == min(bits) and bits[1] < bits[0]


@pytest.mark.parametrize(("task", "options"), [("lm", TEXT), ("mqar", RECALL)])
def test_a_resumed_run_equals_the_one_left_alone(
    task: str, options: tuple[str, ...], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = ("--data.root", str(texts)) if task == "lm" else ()
    every = (*options, *data, "--model.dropout", "0.1", "--checkpoint_every", "1")
    fit(tmp_path / "alone", *every, task=task)
    with monkeypatch.context() as inner:
        killed_at(inner, 3)
        with pytest.raises(Killed):
            fit(tmp_path / "killed", *every, task=task)
    fit(tmp_path / "killed", *every, "--ckpt_path", "last", task=task)
    assert_equal(contents(tmp_path / "killed"), contents(tmp_path / "alone"))


def test_a_text_goes_on_with_what_the_network_finds_likeliest(texts: Path, tmp_path: Path):
    fit(tmp_path / "run", "--data.root", str(texts), *TEXT, task="lm")
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    greedy = ["--ckpt_path", str(checkpoint), "--temperature", "0", "--tokens", "12"]
    found = run("predict", "lm", [*greedy, "--prompt", "the "], quiet=True)
    net, line = restore(checkpoint).net, [EOS, *b"the "]
    with torch.no_grad():
        for _ in range(12):
            line.append(int(net(torch.tensor([line]))[0][0, -1].argmax()))
    expected = bytes(token for token in line[5:] if token < 256).decode(errors="replace")
    assert found["continuation"] == expected
    assert (tmp_path / "run" / "continuation.txt").read_text() == f"the {expected}\n"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the ")
    assert run("predict", "lm", [*greedy, "--input", str(prompt)], quiet=True)["continuation"] == expected


def test_a_tokenizer_of_hugging_face_gives_the_same_run(texts: Path, tmp_path: Path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    plain = fit(tmp_path / "plain", "--data.root", str(texts), *TEXT, task="lm")
    theirs = ("--data.tokenizer", str(tmp_path / "tokenizer"))
    assert fit(tmp_path / "theirs", "--data.root", str(texts), *TEXT, *theirs, task="lm")["last"] == plain["last"]


@pytest.mark.medium
def test_a_run_goes_to_hugging_face_and_says_the_same(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import lineattn.hf  # noqa: F401

    options = ("--optim.lr", "0.01", "--trainer.max_epochs", "4")
    fit(tmp_path / "run", "--data.root", str(texts), *TEXT, *options, task="lm")
    checkpoint, folder = tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "hf"
    assert main(["to-hf", str(checkpoint), str(folder)]) == 0
    assert "largest difference of a logit after reading it back: 0\n" in capsys.readouterr().out
    assert not list(tmp_path.glob(".hf*"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    predict = ["--ckpt_path", str(checkpoint), "--temperature", "0", "--tokens", "12", "--prompt", "the "]
    expected = run("predict", "lm", predict, quiet=True)["continuation"]
    prompt = torch.tensor([[tokenizer.bos_token_id, *tokenizer("the ").input_ids]])
    found = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(found, skip_special_tokens=True) == expected
    capsys.readouterr()  # transformers' bar
    assert f"{folder} is not an empty folder" in fails(capsys, "to-hf", str(checkpoint), str(folder))
    fit(tmp_path / "gla", "--data.root", str(texts), *TEXT, "--model.attn", "gla", task="lm")
    other = tmp_path / "gla" / "checkpoints" / "last.ckpt"
    assert "the mixer is GLA" in fails(capsys, "to-hf", str(other), str(tmp_path / "no"))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_the_average_of_the_weights_has_each_once(tied: bool):
    module = LanguageModelling(
        width=16, depth=1, attn_args={"heads": 2}, tied=tied, vocabulary=259, separator=257, optim=Optim(ema_decay=0.9)
    )
    assert module.ema is not None
    before = {name: tensor.clone() for name, tensor in module.ema.module.state_dict().items()}
    with torch.no_grad():
        for parameter in module.net.parameters():
            parameter.add_(1)
    module.ema.update(module.net)
    for name, tensor in module.ema.module.state_dict().items():
        torch.testing.assert_close(tensor - before[name], torch.full_like(tensor, 0.1), msg=name)


def test_recall_is_learnt_and_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Record, "plot", lambda self: None)
    found = fit(tmp_path / "run", *RECALL, task="mqar")
    assert found["metric"] == "acc" and 0 <= found["last"]["test/acc"] <= 100
    assert found["last"]["val/loss"] < 1.2 * math.log(16)
    tested = run("test", "mqar", ["--ckpt_path", str(tmp_path / "run" / "checkpoints" / "last.ckpt")], quiet=True)
    assert tested["test/acc"] == found["last"]["test/acc"]


def test_what_cannot_be_is_one_line(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = ("--out", str(tmp_path / "run"))
    assert "metala can't be built with {'head': 2}" in fails(
        capsys, "fit", "lm", *out, "--model.attn_args", "{head: 2}"
    )
    assert "nothing to predict for mqar" in fails(capsys, "predict", "mqar", "--ckpt_path", "x")
    line = fails(capsys, "fit", "lm", *out, "--optim.warmup_epochs", "0.5", "--optim.per_step", "false")
    assert "needs --optim.per_step true" in line
    fit(tmp_path / "run", "--data.root", str(texts), *TEXT, task="lm")
    checkpoint = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    two = ("--prompt", "a", "--input", "b.txt")
    assert "leave one out" in fails(capsys, "predict", "lm", "--ckpt_path", checkpoint, *two)
    missing = str(tmp_path / "b.txt")
    assert "can't be read: No such file" in fails(
        capsys, "predict", "lm", "--ckpt_path", checkpoint, "--input", missing
    )
    assert "top_p is 0.0" in fails(capsys, "predict", "lm", "--ckpt_path", checkpoint, "--top_p", "0")
    assert "networks that see images" in fails(
        capsys, "export", "--ckpt_path", checkpoint, "--out", str(tmp_path / "x")
    )
