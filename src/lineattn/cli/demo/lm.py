"""The demo of language modelling: MetaLA and softmax attention on Python's help texts, a minute each."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineattn.files import write_json, write_whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column
    from torch import Tensor

    from lineattn.models.language import LanguageModel
    from lineattn.tasks.data.corpus import Tokenizer
    from lineattn.tasks.data.text import TextData

METHODS = {"metala": "MetaLA", "softmax_attention": "softmax attention"}
CONTEXTS = (1024, 8192, 32768)
PROMPT = "The with statement "
_STEPS = 30  # timed a context
_WRITTEN = 160  # tokens of a continuation
RECIPE = {
    "data.name": "pydoc",
    "data.length": "256",
    "data.batch_size": "8",
    "data.num_workers": "0",
    "model.width": "128",
    "model.depth": "3",
    "model.attn_args": "{heads: 4}",
    "optim.lr": "0.004",
    "optim.warmup_epochs": "0.2",
    "trainer.max_epochs": "2",
    "trainer.limit_train_batches": "150",
    "seed_everything": "1",
}


def run(out: Path, console: Console) -> None:
    """Trains both; prints their continuations, a table and the time of a token; writes the numbers and a picture."""
    from lineattn.cli.demo.result import read_curve
    from lineattn.cli.progress import bars
    from lineattn.cli.restore import restore

    began = time.monotonic()
    environment: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for attn, title in METHODS.items():
        with bars(console) as board:
            summary = _train(attn, title, out, board)
        trained = restore(out / attn / "checkpoints" / "last.ckpt")
        console.print(f"{title}: test perplexity {summary['last']['test/byte_ppl']:.2f} a byte. It goes on:")
        text = continuation(trained.net, trained.data.tokenizer)  # pyright: ignore[reportAttributeAccessIssue]
        console.print(f"  {PROMPT}{text}\n", style="dim")
        decode = decode_times(trained.net, CONTEXTS)  # pyright: ignore[reportArgumentType]
        environment = json.loads((out / attn / "env.json").read_text())
        curve = read_curve(out / attn / "metrics.csv")
        found[attn] = {"title": title, "continuation": text, "run": summary, "decode": decode, "curve": curve}
    seconds = time.monotonic() - began
    floor = frequencies(trained.data)  # pyright: ignore[reportPossiblyUnbound,reportArgumentType]
    show(found, floor, console)
    draw(found, out / "curves.png")
    for method in found.values():
        del method["curve"]
    content = {"seconds": round(seconds, 1), "environment": environment, "frequencies": floor, "methods": found}
    write_json(out / "results.json", content)
    console.print(f"\n{seconds:.0f} s; picture: {out / 'curves.png'}; numbers: {out / 'results.json'}")


def options(attn: str, out: Path) -> list[str]:
    """The command-line options of one run."""
    settings = {**RECIPE, "model.attn": attn, "out": str(out / attn)}
    return [part for key, value in settings.items() for part in (f"--{key}", value)]


def _train(attn: str, title: str, out: Path, board: Any) -> dict[str, Any]:
    from lineattn.cli.follow import Follow
    from lineattn.cli.task import run as run_task

    line = board.add_task(title, total=1, note="loading PyTorch")

    def tell(fraction: float, bits: float | None) -> None:
        board.update(line, completed=fraction, note="" if bits is None else f"validation {bits:.2f} bits a byte")

    return run_task("fit", "lm", options(attn, out), quiet=True, callbacks=[Follow(tell)])


def continuation(net: Any, tokenizer: Tokenizer) -> str:
    """What a model writes behind the prompt."""
    from itertools import islice

    import torch

    from lineattn.models.generate import generate
    from lineattn.tasks.console import plain

    begin = torch.tensor([[tokenizer.separator, *tokenizer.encode(PROMPT).tolist()]])
    tokens = islice(generate(net, begin, temperature=0.7, seed=1), _WRITTEN)
    return plain(tokenizer.decode([int(token) for token in tokens]))


def decode_times(net: LanguageModel, contexts: Sequence[int], *, steps: int = _STEPS) -> list[dict[str, float]]:
    """Median milliseconds of one more token, and the numbers that are kept, behind so many tokens."""
    import torch

    rows = []
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for context in contexts:
            tokens: Tensor = torch.randint(256, (1, context), generator=draws)
            _, states = net(tokens, keep=1)
            taken = []
            for _ in range(steps):
                began = time.perf_counter()
                net(tokens[:, :1], states)  # always from there: the context stays as long
                taken.append(1e3 * (time.perf_counter() - began))
            rows.append({"context": context, "ms": statistics.median(taken), "state": net.state_size(context)})
    return rows


def frequencies(data: TextData) -> float:
    """Perplexity a byte on test of a guess by how often each token stands in the training text; no token is unseen."""
    import numpy as np

    test = data.splits.test
    assert test is not None
    counts = np.bincount(data.splits.train.corpus.tokens[1:], minlength=data.vocabulary) + 1
    nats = -np.log(counts / counts.sum())[test.corpus.tokens[1:]].sum()
    return float(np.exp(nats / test.corpus.size))


def show(found: dict[str, dict[str, Any]], floor: float, console: Console) -> None:
    """Prints what was learned, and what a token costs."""
    from rich.table import Table

    learned = Table("method", *(right(name) for name in ("parameters", "test perplexity a byte", "bits a byte")))
    for method in found.values():
        last = method["run"]["last"]
        figures = f"{last['test/byte_ppl']:.2f}", f"{last['test/bpb']:.2f}"
        learned.add_row(method["title"], f"{method['run']['params']:,}", *figures)
    learned.add_row("bytes by their frequency", "", f"{floor:.2f}", f"{math.log2(floor):.2f}", style="dim")
    console.print(learned)
    costs = Table(right("tokens before"), title="One more token", title_justify="left")
    for method in found.values():
        costs.add_column(f"{method['title']}, ms", justify="right")
        costs.add_column("kept, KiB", justify="right")
    for place, context in enumerate(CONTEXTS):
        rows = [method["decode"][place] for method in found.values()]
        costs.add_row(f"{context:,}", *(text for row in rows for text in (f"{row['ms']:.2f}", _kib(row["state"]))))
    console.print(costs)


def right(name: str) -> Column:
    from rich.table import Column

    return Column(name, justify="right")


def _kib(numbers: float) -> str:
    return f"{numbers * 4 / 2**10:,.0f}"


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes what was learned, and what a token costs behind longer and longer contexts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.7), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    learned, times, sizes = figure.subplots(1, 3)
    for method, (colour, dashes) in zip(found.values(), (("#0072b2", "solid"), ("#d55e00", "dashed")), strict=True):
        style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 2, "label": method["title"]}
        contexts = [row["context"] for row in method["decode"]]
        epochs = [row["epoch"] + 1 for row in method["curve"]]
        learned.plot(epochs, [row["val/bpb"] for row in method["curve"]], marker="o", **style)
        times.plot(contexts, [row["ms"] for row in method["decode"]], marker="o", **style)
        sizes.plot(contexts, [4 * row["state"] / 2**20 for row in method["decode"]], marker="o", **style)
    learned.set(title="validation, bits a byte", xlabel="epoch")
    learned.xaxis.get_major_locator().set_params(integer=True)
    times.set(title="one more token, ms", xlabel="tokens before it", ylim=(0, None))
    sizes.set(title="kept between tokens, MiB", xlabel="tokens before it", ylim=(0, None))
    for axes in (times, sizes):
        axes.set_xticks(CONTEXTS, [f"{context // 1024}k" for context in CONTEXTS])
    learned.legend(frameon=False)
    for axes in (learned, times, sizes):
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    write_whole(path, lambda file: canvas.print_png(file))
