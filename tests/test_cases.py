"""What users of such libraries report, one test a kind; the numbers are those of the list that they were collected in.

Where another file holds the whole proof, the test here is the smallest input of the report, and names that file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import lm_eval
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

import lineattn
import lineattn.timm
from lineattn.analysis.cost import count_macs
from lineattn.cli.main import TASKS, main
from lineattn.cli.task import run
from lineattn.errors import InputError
from lineattn.hf import MetalaConfig, MetalaForCausalLM, byte_tokenizer
from lineattn.hosts.weights import load_trunk
from lineattn.models.byte_tokenizer import BOS, EOS, PAD, VOCABULARY
from lineattn.tasks.data.images import ImageData
from lineattn.tasks.data.scenes import SceneData
from lineattn.tasks.record import Record
from tests.models import seg_nets
from tests.tasks.helpers import Killed, fails, killed_at, make_small
from tests.tasks.test_seg import scenes

TINY = ("--data.image_size", "32", "--data.batch_size", "4", "--model.width", "8", "--trainer.max_epochs", "1")
SMALL_LM = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "glu_dim": 16,
}
SMALL_LM |= {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
FAMILIES = {
    "resnet20_cifar": 32,
    "resnet18": 64,
    "timm/resnet18": 64,
    "timm/convnext_atto": 64,
    "timm/regnety_002": 64,
    "timm/efficientnet_b0": 64,
    "timm/vit_tiny_patch16_224": 224,
    "timm/swin_tiny_patch4_window7_224": 224,
}


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes of eight images to train on, four to validate and four to test with."""
    monkeypatch.setattr(Record, "plot", lambda self: None)
    draws = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4), ("test", 4)):
        for label in ("cat", "dog"):
            (tmp_path / "photos" / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = draws.integers(0, 255, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / split / label / f"{number}.jpg")
    return tmp_path / "photos"


def train(photos: Path, out: Path, *options: str):
    found = ("--data.root", str(photos), "--out", str(out), "--model.name", "resnet8_cifar")
    return run("fit", "cls", [*found, *TINY, *options], quiet=True)


def train_masks(root: Path, out: Path, *options: str):
    return run("fit", "seg", ["--data.root", str(root), "--out", str(out), *TINY, *options], quiet=True)


# 1: "I added attention to the backbone, how do I load pretrained weights?" More in tests/hosts/test_weights.py.
@pytest.mark.medium
def test_1_a_plain_trunk_loads_into_a_network_with_attention() -> None:
    trunk = lineattn.create_model("resnet50").eval()
    net = lineattn.create_model("resnet50", attn="kcla").eval()
    report = load_trunk(net, trunk.state_dict())
    assert len(report.loaded) == len(trunk.state_dict()) and not report.dropped
    assert report.new and all(name.startswith("sites.") for name in report.new)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(net(x), trunk(x))
    renamed = {name.replace("layer1.0.conv1", "layer1.0.conv_1"): value for name, value in trunk.state_dict().items()}
    with pytest.raises(InputError, match=r"layer1\.0\.conv1"):
        load_trunk(net, renamed)


# 2: A local checkpoint of a classifier, loaded with features_only. More in tests/test_timm.py.
@pytest.mark.medium
def test_2_a_checkpoint_becomes_a_feature_extractor(tmp_path: Path) -> None:
    trained = timm.create_model("resnet18", num_classes=7).eval()
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in trained.state_dict().items()}}, tmp_path / "a.pth"
    )
    pyramid = timm.create_model("resnet18_kcla", features_only=True, trunk=str(tmp_path / "a.pth")).eval()
    x = torch.randn(1, 3, 65, 97)
    with torch.no_grad():
        expected = trained.forward_intermediates(x, intermediates_only=True)
        found = pyramid(x)
    assert len(found) == len(expected) == 5
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# 3: Masks of 0 and 255 end in an assert. More in tests/tasks/data/test_pairs.py, with 0 and 1, palettes and JPEG.
def test_3_masks_of_0_and_255_and_a_value_between(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(Record, "plot", lambda self: None)
    root = scenes(tmp_path / "scenes", count=3)
    assert train_masks(root, tmp_path / "a")["classes"] == 2
    odd = root / "train" / "masks" / "train1.png"
    with Image.open(odd) as mask:
        values = np.array(mask)
    values[0, 0] = 128
    Image.fromarray(values).save(odd)
    line = fails(capsys, "fit", "seg", "--data.root", str(root), "--out", str(tmp_path / "b"), *TINY)
    assert str(odd) in line and "the value 128" in line and "--data.masks threshold" in line
    assert train_masks(root, tmp_path / "b", "--data.masks", "threshold")["status"] == "done"


# 7: A corrupt image ends the training without its name. More in tests/tasks/test_bad_input.py, with workers too.
def test_7_a_corrupt_image_is_named_or_skipped(photos, tmp_path, capsys) -> None:
    broken = photos / "train" / "cat" / "0.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    text = photos / "train" / "dog" / "0.jpg"
    text.write_text("no picture")
    assert main(["check-data", "--root", str(photos)]) == 1
    shown = capsys.readouterr().out
    assert str(broken) in shown and str(text) in shown and "2 files unreadable" in shown
    options = ("--data.root", str(photos), "--model.name", "resnet8_cifar", *TINY)
    line = fails(capsys, "fit", "cls", "--out", str(tmp_path / "a"), *options)
    assert str(broken) in line or str(text) in line
    assert train(photos, tmp_path / "b", "--data.on_error", "skip")["skipped_images"] == 2


@pytest.mark.parametrize("what", ["images", "masks"])
def test_7_a_corrupt_image_or_mask_is_named_or_skipped(what, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(Record, "plot", lambda self: None)
    root = scenes(tmp_path / "scenes", count=4)
    broken = {split: root / split / what / f"{split}1.png" for split in ("train", "val", "test")}
    cut = broken["test"].read_bytes()
    for split, content in (("train", b"no picture"), ("val", b""), ("test", cut[: len(cut) * 2 // 3])):
        broken[split].write_bytes(content)
    assert main(["check-data", "--task", "seg", "--root", str(root)]) == 1
    shown = capsys.readouterr().out
    assert "3 files unreadable" in shown and all(str(path) in shown for path in broken.values())
    line = fails(capsys, "fit", "seg", "--data.root", str(root), "--out", str(tmp_path / "a"), *TINY)
    assert str(broken["train"]) in line or str(broken["val"]) in line
    assert train_masks(root, tmp_path / "b", "--data.on_error", "skip")["skipped_images"] == 3


# 8: A hidden folder becomes a class. More in tests/tasks/data/test_folder.py and tests/cli/test_check_data.py.
def test_8_a_hidden_folder_is_no_class(photos, capsys) -> None:
    hidden = photos / "train" / ".ipynb_checkpoints"
    hidden.mkdir()
    (photos / "train" / "cat" / "0.jpg").rename(hidden / "0-checkpoint.jpg")
    data = ImageData(root=str(photos))
    assert data.classes == ["cat", "dog"] and len(data.splits.train) == 15
    assert any(".ipynb_checkpoints" in notice for notice in data.splits.notices)
    assert main(["check-data", "--root", str(photos)]) == 1  # 8 validation images are few
    assert "hidden folder" in capsys.readouterr().out


# 9: Grey images meet a pipeline of colour ones. More in tests/tasks/data/test_reading.py.
def test_9_grey_images(photos, tmp_path) -> None:
    for path in photos.rglob("*.jpg"):
        Image.open(path).convert("L").save(path)
    grey = ImageData(root=str(photos), channels=1)
    assert grey.splits.train.read(0).shape[0] == 1 and len(grey.mean) == len(grey.std) == 1
    assert train(photos, tmp_path / "grey", "--data.channels", "1")["status"] == "done"
    assert train(photos, tmp_path / "colour")["status"] == "done"

    trunk = lineattn.create_model("resnet8_cifar")
    net = lineattn.create_model("resnet8_cifar", attn="kcla", in_chans=1)
    load_trunk(net, trunk.state_dict())
    torch.testing.assert_close(net.backbone.conv1.weight, trunk.conv1.weight.sum(1, keepdim=True))


def test_9_images_and_masks_of_every_mode(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Record, "plot", lambda self: None)
    root = scenes(tmp_path / "scenes")
    for split in ("train", "val", "test"):
        for index, mode in enumerate(("L", "LA", "P", "RGB", "RGBA", "I;16")):
            for kind in ("images", "masks"):
                path = root / split / kind / f"{split}{index}.png"
                with Image.open(path) as stored:
                    grey = stored.convert("L")
                wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
                (wide if mode == "I;16" else grey.convert(mode)).save(path)
    for channels in (1, 3):
        train = SceneData(root=str(root), channels=channels).splits.train
        for index in range(6):
            image, mask = train.read(index)
            assert image.shape == (channels, *mask.shape) and mask.unique().tolist() == [0, 1]
            assert image[:, mask == 1].float().mean() > image[:, mask == 0].float().mean() + 50
        assert train_masks(root, tmp_path / str(channels), "--data.channels", str(channels))["status"] == "done"


# 10: `predict` fails on a DataModule. More in tests/tasks/test_cls.py.
@pytest.mark.parametrize("task", ["cls", "seg"])
def test_10_all_verbs_run(task, photos, tmp_path) -> None:
    if task == "seg":
        root, network, classes = scenes(tmp_path / "scenes", count=4), "resunet", {"background", "foreground"}
        new = root / "test" / "images"
    else:
        root, network, classes, new = photos, "resnet8_cifar", {"cat", "dog"}, photos / "test" / "cat"
    data = ("--data.root", str(root))
    fitted = run("fit", task, [*data, "--model.name", network, "--out", str(tmp_path / "run"), *TINY], quiet=True)
    last = ("--ckpt_path", "last", "--out", str(tmp_path / "run"))
    for verb in ("validate", "test"):
        found = run(verb, task, [*data, *last], quiet=True)
        key = f"{'val' if verb == 'validate' else verb}/{fitted['metric']}"
        assert found[key] == fitted["last"][key]
    images = run("predict", task, [*last, "--input", str(new)], quiet=True)
    assert len(images) == 4 and all(found.keys() == classes for found in images.values())


@pytest.mark.parametrize("task", ["lm", "mqar"])
def test_10_all_verbs_run_on_tokens(task, tmp_path) -> None:
    (tmp_path / "text.txt").write_text("all work and no play " * 20)
    data = {
        "lm": ("--data.root", str(tmp_path / "text.txt"), "--data.length", "32"),
        "mqar": ("--data.length", "8", "--data.pairs", "1", "--data.train_examples", "8", "--data.examples", "8"),
    }[task]
    small = ("--model.width", "16", "--model.depth", "1", "--trainer.max_epochs", "1", "--data.batch_size", "2")
    fitted = run("fit", task, [*data, *small, "--out", str(tmp_path / "run")], quiet=True)
    last = ("--ckpt_path", "last", "--out", str(tmp_path / "run"))
    for verb, split in [("validate", "val"), *([("test", "test")] if task == "mqar" else [])]:
        found = run(verb, task, [*data, *last], quiet=True)
        assert found[f"{split}/{fitted['metric']}"] == fitted["last"][f"{split}/{fitted['metric']}"]
    if task == "lm":
        assert run("predict", task, [*last, "--tokens", "5"], quiet=True)["tokens"] <= 5


def test_10_no_task_is_forgotten() -> None:
    assert set(TASKS) == {"cls", "seg", "lm", "mqar"}


# 11: A resumed run isn't the one left alone. tests/tasks/test_resume.py compares weights, averages, optimiser and
# curves bit for bit at many places, within an epoch too; tests/tasks/test_processes.py kills real processes.
def test_11_a_resumed_run_equals_the_one_left_alone(tmp_path, monkeypatch) -> None:
    make_small(monkeypatch)
    options = ("--trainer.max_epochs", "4", "--data.batch_size", "30", "--optim.ema_decay", "0.5")
    alone = run("fit", "cls", ["--out", str(tmp_path / "alone"), *options], quiet=True)
    with monkeypatch.context() as patch:
        killed_at(patch, 9)  # of 4 steps an epoch
        with pytest.raises(Killed):
            run("fit", "cls", ["--out", str(tmp_path / "killed"), *options], quiet=True)
    resumed = ["--out", str(tmp_path / "killed"), "--ckpt_path", "last"]
    assert run("fit", "cls", resumed, quiet=True)["last"] == alone["last"]


# 12: Processes that train together find parameters without a gradient: tests/test_contract_processes.py trains every
# method on every family with two of them, tests/tasks/test_processes.py the command line.


# 13: Sizes that 32 doesn't divide. More of segmentation in tests/models/test_seg_contract.py.
SIZES = [
    pytest.param(method, size, marks=pytest.mark.medium if size == (65, 97) or method == "kcla" else pytest.mark.slow)
    for method in lineattn.list_methods("depth")
    for size in ((65, 97), (800, 275))
]


@pytest.mark.parametrize(("method", "size"), SIZES)
def test_13_any_size(method, size) -> None:
    net = lineattn.create_model("resnet18", attn=method, init="paper", num_classes=5).train()
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        maps = net.features(x)
    for info, found in zip(net.feature_info, maps, strict=True):
        assert found.shape[2:] == tuple(math.ceil(side / info["reduction"]) for side in size)
        assert found.isfinite().all()
    net(x).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())


# And 18: every network for segmentation trains, is evaluated and predicts.
@pytest.mark.medium
@pytest.mark.parametrize("name", seg_nets.NAMES)
def test_13_any_size_of_image_and_mask(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Record, "plot", lambda self: None)
    seg_nets.narrow(monkeypatch)
    sizes, out = ((65, 97), (100, 35)), tmp_path / "run"
    root = scenes(tmp_path / "scenes", sizes=sizes, count=2)
    small = [f"--model.{key}={json.dumps(value)}" for key, value in seg_nets.ARGUMENTS.get(name, {}).items()]
    options = [
        "--data.root",
        str(root),
        "--data.image_size",
        "65",
        "--model.name",
        name,
        "--model.attn",
        "kcla",
        *small,
    ]
    found = run("fit", "seg", ["--out", str(out), "--trainer.max_epochs", "1", *options], quiet=True)
    assert found["status"] == "done" and {"val/iou_fg", "test/iou_fg"} <= found["last"].keys()
    last = ["--ckpt_path", "last", "--out", str(out)]
    run("predict", "seg", [*last, "--input", str(root / "test" / "images")], quiet=True)
    for index, (height, width) in enumerate(sizes):
        with Image.open(out / "predictions" / "masks" / f"test{index}.png") as mask:
            assert mask.size == (width, height)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_14_half_precision_at_great_length(dtype) -> None:
    """tests/nn/test_token.py and tests/ops/test_scan.py have the forms and gradients."""
    model = MetalaForCausalLM(MetalaConfig(**SMALL_LM)).eval()
    model.model.layers[0].token_mixer.k_gate.weight.data.mul_(200)  # some channels forget all, and some nothing
    tokens = torch.randint(VOCABULARY, (1, 65_536))
    with torch.no_grad():
        expected = model(tokens, logits_to_keep=1).logits
        with torch.autocast("cpu", dtype=dtype):
            out = model(tokens, logits_to_keep=1).logits
        half = model.to(dtype)(tokens, logits_to_keep=1).logits
    for found in (out, half):
        assert found.isfinite().all() and (found.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.medium
def test_16_a_language_model_is_evaluated_offline(tmp_path, capsys, monkeypatch) -> None:
    """tests/tasks/test_lm_harness.py has the scores, and further tasks and faults."""
    MetalaForCausalLM(MetalaConfig(**SMALL_LM)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    tasks = Path(__file__).parents[1] / "recipes" / "lm_eval"
    (tmp_path / "piqa.jsonl").write_text('{"query": "Question: how?", "choices": ["so", "not so"], "gold": 0}\n')
    args = ["lm-eval", str(tmp_path), "--tasks", "piqa"]
    assert main([*args, "--include", str(tasks), "--data", str(tmp_path)]) == 0
    assert "acc_norm" in capsys.readouterr().out
    for module in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)
    stock = Path(lm_eval.__file__).parent / "tasks" / "piqa"
    assert main([*args, "--include", str(stock)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("lineattn: task piqa: baber/piqa can't be had (ConnectionError: ")


# 15: Attention counts as nothing, on the CPU. More in tests/analysis/test_cost.py and tests/models/test_counts.py.
@pytest.mark.medium
def test_15_attention_is_counted() -> None:
    net = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    tokens, dim, blocks = 14 * 14 + 1, 192, 12
    linear = 12 * tokens * dim**2  # queries, keys, values, projection, and the two layers of four times the width
    softmax = 2 * tokens**2 * dim  # scores, and what they read
    expected = 3 * 16**2 * dim * 14 * 14 + blocks * (linear + softmax) + 10 * dim
    assert count_macs(net, torch.zeros(1, 3, 224, 224)) == expected


@pytest.mark.medium
@pytest.mark.parametrize("method", ["kcla", "mrla_light"])
def test_15_attention_over_depth_is_counted(method) -> None:
    """Of each site its values, a convolution of 3x3 a channel; with pooled vectors there are no matrix products."""
    plain = lineattn.create_model("resnet20_bottleneck_cifar")
    host = lineattn.create_model("resnet20_bottleneck_cifar", attn=method, scope="per_stage")
    x = torch.zeros(1, 3, 32, 32)
    expected = sum(2 * 9 * width * side**2 for width, side in ((64, 32), (128, 16), (256, 8)))
    assert count_macs(host, x) - count_macs(plain, x) == expected


# 17: "Can it be used for ResNet-18?" More in tests/hosts/test_plans.py and docs/backbones.md.
@pytest.mark.medium
@pytest.mark.parametrize("name", FAMILIES)
def test_17_attention_on_many_families(name) -> None:
    net = lineattn.create_model(name, num_classes=5).eval()
    host = lineattn.attach(net, "kcla")
    x = torch.randn(1, 3, FAMILIES[name], FAMILIES[name])
    with torch.no_grad():
        assert torch.equal(host(x), net(x))
    assert len(host.sites) >= 3


def test_17_what_is_supported_is_listed() -> None:
    with pytest.raises(InputError, match=r"supported families: .*ResNet.*ConvNeXt"):
        lineattn.attach(torch.nn.Linear(2, 2), "kcla")


# 18: "Training code for all models?"
def _step(net: torch.nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    net.train()(x).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in net.parameters())


@pytest.mark.medium
@pytest.mark.parametrize("name", [*lineattn.list_models(), *lineattn.list_models(task="seg")])
def test_18_every_network_of_the_list_trains(name) -> None:
    side = 16 if name.endswith("_cifar") else 64
    _step(lineattn.create_model(name, attn="kcla", num_classes=3), torch.randn(2, 3, side, side))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(lineattn.timm.default_cfgs))
def test_18_every_network_registered_in_timm_trains(name) -> None:
    net = timm.create_model(name, num_classes=3)
    side = net.pretrained_cfg["input_size"][-1] if net.pretrained_cfg.get("fixed_input_size") else 64
    _step(net, torch.randn(2, 3, side, side))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if side == 224 else pytest.mark.medium)
        for name, side in FAMILIES.items()
    ],
)
def test_18_fit_works_for_each_family(name, photos, tmp_path) -> None:
    options = ("--data.image_size", str(FAMILIES[name]), "--data.batch_size", "8", "--trainer.max_epochs", "1")
    model = ("--model.name", name, "--model.attn", "kcla", "--optim.lr", "0.001")
    found = run("fit", "cls", ["--data.root", str(photos), "--out", str(tmp_path), *model, *options], quiet=True)
    assert found["status"] == "done" and math.isfinite(found["last"]["val/loss"])


@pytest.mark.medium
@pytest.mark.parametrize("method", lineattn.list_methods("depth"))
def test_18_fit_works_for_each_method(method, photos, tmp_path) -> None:
    assert train(photos, tmp_path / "run", "--model.attn", method)["status"] == "done"
