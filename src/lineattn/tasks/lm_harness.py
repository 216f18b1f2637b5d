"""Language models under lm-evaluation-harness: any causal model of Hugging Face in a folder, ours among them.

The model is asked here and not through the harness's own class for Hugging Face, which wants libraries for training on
several devices. Scores are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import yaml
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from lineattn.errors import InputError, unknown

_Pair = tuple[Any, list[int], list[int]]
_ENOUGH = 1000  # resamples for the standard error of a perplexity


class HarnessModel(TemplateLM):
    r"""A causal language model as the harness asks for one.

    .. math:: \log p(\mathrm{continuation} \mid \mathrm{context})

    Args:
        model: A causal model of Hugging Face.
        tokenizer: Its tokenizer.
        batch_size: Texts at a time.
        max_length: Tokens of a text at most, the last ones; by default what the configuration says.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_size: int = 8, max_length: int | None = None) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.max_length = max_length or getattr(model.config, "max_position_embeddings", None) or 2048

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that stands alone."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise InputError("the tokenizer has neither bos_token nor eos_token; one must stand before a text alone")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.tokenizer.encode(string, add_special_tokens=False)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        pairs: list[_Pair] = []
        of: list[int] = []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                pairs.append((None, *make_disjoint_window(window)))
                of.append(index)
        totals = [0.0] * len(requests)
        for index, (score, _) in zip(of, self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm), strict=True):
            totals[index] += score
        return totals

    @torch.inference_mode()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = []
        for request in tqdm(requests, desc="generating", disable=disable_tqdm):
            context, wanted = request.args
            wanted = {**wanted}
            until = wanted.pop("until", [])
            until = [until] if isinstance(until, str) else until
            new = wanted.pop("max_gen_toks", 256)
            tokens = self.tok_encode(context)[-max(1, self.max_length - new) :] or [self.prefix_token_id]
            prompt = torch.tensor([tokens], device=self.model.device)
            stop = {"stop_strings": until, "tokenizer": self.tokenizer} if until else {}
            given: dict[str, Any] = {"do_sample": False, "pad_token_id": self.prefix_token_id, **wanted, **stop}
            out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, **given)
            text = self.tokenizer.decode(out[0, len(tokens) :], skip_special_tokens=True)
            ends = [text.index(end) for end in until if end in text]
            texts.append(text[: min(ends, default=None)])
        return texts

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[_Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        # The longest first: a batch is of texts about as long, and the one that needs most memory is the first.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        progress = tqdm(total=len(order), desc="scoring", disable=disable_tqdm)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for i, score in zip(batch, self._scored([requests[i] for i in batch]), strict=True):
                scores[i] = score
            progress.update(len(batch))
        progress.close()
        return scores

    def _scored(self, batch: Sequence[_Pair]) -> Iterator[tuple[float, bool]]:
        # Without its last token, which is only ever predicted; padded on the right, which a causal model doesn't see.
        # A context of blanks has none left when the harness has given them to the continuation.
        whole = [(context or [self.prefix_token_id]) + cont for _, context, cont in batch]
        rows = [torch.tensor(tokens[-self.max_length - 1 :]) for tokens in whole]
        tokens = pad_sequence([row[:-1] for row in rows], batch_first=True).to(self.model.device)
        first = [len(row) - 1 - min(len(cont), len(row) - 1) for row, (*_, cont) in zip(rows, batch, strict=True)]
        keep = tokens.shape[1] - min(first)
        logits: Tensor = self.model(tokens, use_cache=False, logits_to_keep=keep).logits
        for row, begin, out in zip(rows, first, logits, strict=True):
            shift = tokens.shape[1] - keep
            seen = out[begin - shift : len(row) - 1 - shift].float().log_softmax(-1)
            target = row[begin + 1 :].to(seen.device)
            score = seen.gather(1, target[:, None]).sum().item()
            yield score, bool((seen.argmax(1) == target).all())


class Score(NamedTuple):
    """A metric, and its standard error where there is one."""

    value: float
    error: float | None

    def __str__(self) -> str:
        return f"{self.value:.4g}" if self.error is None else f"{self.value:.4g} ± {self.error:.2g}"


class Result(NamedTuple):
    """Of a task: how many items were scored, and the metrics."""

    items: int
    metrics: dict[str, Score]


def load_model(folder: Path, *, batch_size: int, max_length: int | None = None) -> HarnessModel:
    """A model with its tokenizer from a folder, on the GPU where there is one.

    Raises:
        InputError: No such folder, no model or tokenizer in it, or not all of the model's weights.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import lineattn.hf  # noqa: F401  # which registers ours

    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give one that save_pretrained has written")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no config.json in it; give a folder that save_pretrained has written")
    if not any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        raise InputError(
            f"{folder}: no tokenizer in it; save the model's there, for a model of bytes "
            f"lineattn.hf.byte_tokenizer().save_pretrained({str(folder)!r})"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        auto: Any = AutoModelForCausalLM  # its types don't know of the report
        model, report = auto.from_pretrained(folder, dtype="auto", local_files_only=True, output_loading_info=True)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    except Exception as error:  # of three libraries, without a common kind
        raise InputError(f"{folder}: can't be loaded ({_first_line(error)})") from error
    if lacking := sorted(report["missing_keys"]):
        raise InputError(f"{folder}: the weights lack {lacking[0]}" + (" and others" if len(lacking) > 1 else ""))
    if len(tokenizer) > (known := model.get_input_embeddings().num_embeddings):
        raise InputError(f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model {known}")
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return HarnessModel(model, tokenizer, batch_size=batch_size, max_length=max_length)


def load_tasks(
    names: Sequence[str], scratch: Path, *, include: Path | None = None, data: Path | None = None
) -> dict[str, Any]:
    """Tasks of the harness with their data, as `run` takes them.

    Args:
        names: Tasks, tags, groups, or patterns of them.
        scratch: A folder that stands for as long as the tasks are used.
        include: A folder of tasks, and then these alone; else those of the harness, whose data are on the hub.
        data: The folder in which the files are that those tasks name.

    Raises:
        InputError: A folder, task or file that there isn't, or data that can't be had.
    """
    for option, folder in (("--include", include), ("--data", data)):
        if folder is not None and not folder.is_dir():
            raise InputError(f"{option} {folder}: no such folder")
    manager = TaskManager(include_path=include, include_defaults=include is None)
    if not manager.all_tasks:
        raise InputError(f"--include {include}: there is no task in it")
    found: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in _expanded(names, manager):
        spec = _on_files(name, manager.task_index[name], scratch, data)
        try:
            loaded = manager.load([spec])
        except Exception as error:  # of the harness, of datasets, of the hub
            source = (manager.task_index[name].cfg or {}).get("dataset_path", "its data")
            raise InputError(
                f"task {name}: {source} can't be had ({_first_line(error)}); with --include and --data there are tasks "
                "on files"
            ) from error
        for kind, content in found.items():
            content.update(loaded[kind])
    for task in found["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=0)
    return found


def run(model: HarnessModel, tasks: Mapping[str, Any], *, limit: int | None = None) -> dict[str, Result]:
    """What a model scores, by task; with a limit, in so many first items of each."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # the harness would start a process a core to resample
    evaluate = cast(Any, evaluator.evaluate)  # whose types leave open what it returns
    found = evaluate(model, dict(tasks), limit=limit, bootstrap_iters=_ENOUGH, log_samples=False)
    results: dict[str, Result] = {}
    for name, numbers in found["results"].items():
        values = {key.removesuffix(",none"): value for key, value in numbers.items() if isinstance(value, float | int)}
        metrics = {
            key: Score(float(value), values.get(f"{key}_stderr"))
            for key, value in values.items()
            if not key.endswith("_stderr") and key != "sample_len"
        }
        results[name] = Result(found["n-samples"].get(name, {}).get("effective", 0), metrics)
    return results


def _expanded(names: Sequence[str], manager: TaskManager) -> list[str]:
    """Tasks and groups for names, tags and patterns."""
    found: list[str] = []
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            raise unknown("task", name, manager.all_tasks)
        for match in matching:
            found += sorted(manager.task_index[match].tags) if match in manager.all_tags else [match]
    return list(dict.fromkeys(found))


def _on_files(name: str, entry: Any, scratch: Path, data: Path | None) -> str:
    """The task as it is, or one that reads its files from the folder, written for the harness to include."""
    config = entry.cfg or {}
    arguments = config.get("dataset_kwargs") or {}
    files = arguments.get("data_files")
    if config.get("dataset_path") != "json" or files is None or entry.yaml_path is None:
        return name
    for file in _flat(files):
        path = Path(file) if data is None else data / file
        if data is None and not path.is_absolute():
            raise InputError(f"task {name}: it reads {file}; say where that is with --data FOLDER")
        if not path.is_file():
            raise InputError(f"task {name}: its data {path} is missing")
    placed = {**arguments, "cache_dir": str(scratch)}
    if data is not None:
        placed["data_dir"] = str(data.resolve())
    path = scratch / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"include": str(entry.yaml_path.resolve()), "task": name, "dataset_kwargs": placed}))
    return str(path)


def _flat(files: Any) -> Iterator[str]:
    for file in files.values() if isinstance(files, Mapping) else [files]:
        yield from [file] if isinstance(file, str) else file


def _first_line(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
