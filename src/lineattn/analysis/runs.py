"""Finished runs, gathered and summarised: which belong together, mean and spread over seeds, paired differences."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from lineattn.errors import InputError

# What tells methods apart; everything else of a run's settings is its recipe, and has to be equal to be compared.
ATTENTION_KEYS = ("model.attn", "model.attn_args", "model.init", "model.scope", "model.at", "model.swap")

# Settings that change no result: how a run is watched, read and saved.
_NO_EFFECT = {
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.enable_autolog_hparams",
    "trainer.logger",
    "data.num_workers",
    "data.download",
    "checkpoint_every",
    "test_after_fit",
}


@dataclass(frozen=True)
class Run:
    """A finished run folder.

    Attributes:
        folder: Where it is.
        summary: Its ``summary.json``.
        attention: The settings of the attention, by dotted key.
        recipe: All other settings that a result may depend on, by dotted key, and what its memory is measured of.
    """

    folder: Path
    summary: dict[str, Any]
    attention: dict[str, Any]
    recipe: dict[str, Any]

    @property
    def seed(self) -> int | None:
        return self.summary.get("seed")


@dataclass
class Group:
    """Runs that differ in nothing but the seed."""

    label: str
    runs: list[Run] = field(default_factory=list)

    def values(self, metric: str, which: str = "last") -> list[float]:
        """The metric of each run that has it, in order of seed; ``which`` is ``last`` or ``best``."""
        found = [(run.summary.get(which) or {}).get(metric) for run in self.runs]
        return [value for value in found if value is not None]

    def by_seed(self, metric: str, which: str = "last") -> dict[int, float]:
        """The metric of each run that has it and a seed, by seed."""
        found = {run.seed: (run.summary.get(which) or {}).get(metric) for run in self.runs}
        return {seed: value for seed, value in found.items() if seed is not None and value is not None}

    def mean(self, key: str) -> float | None:
        """Mean over the runs of an entry of the summary, such as ``seconds_per_epoch``."""
        found = [run.summary[key] for run in self.runs if run.summary.get(key) is not None]
        return fmean(found) if found else None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping by dotted keys; empty mappings and lists are values.

    Example:
        >>> flatten({"model": {"attn": "kcla", "attn_args": {}}, "epochs": 3})
        {'model.attn': 'kcla', 'model.attn_args': {}, 'epochs': 3}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key
        if isinstance(value, Mapping) and value and name not in ATTENTION_KEYS:
            flat.update(flatten(value, name + "."))
        else:
            flat[name] = value
    return flat


def read_run(folder: Path) -> Run:
    """Reads one finished run folder.

    Raises:
        InputError: A file of the folder is missing or is not what it should be.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
        config = flatten(yaml.safe_load((folder / "config.yaml").read_text()))
        recipe = {key: value for key, value in flatten(summary["recipe"]).items() if key not in _NO_EFFECT}
        recipe["peak_memory_of"] = summary.get("peak_memory_of")
    except (OSError, ValueError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{folder} is no whole run folder ({error}); run it again or leave it out") from error
    attention = {key: config[key] for key in ATTENTION_KEYS if config.get(key) not in (None, {})}
    return Run(folder, summary, attention, recipe)


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[Path]]:
    """All finished runs in and under the folders, and the folders of unfinished ones.

    Raises:
        InputError: A folder is missing, or there is no finished run at all.
    """
    folders = list(folders)
    done: dict[Path, Run] = {}
    unfinished: set[Path] = set()
    for top in folders:
        if not top.is_dir():
            raise InputError(f"{top}: no such folder; give the folders of runs or of a sweep")
        for config in sorted(top.rglob("config.yaml")):
            folder = config.parent
            if (folder / "summary.json").exists():
                done[folder.resolve()] = read_run(folder)
            else:
                unfinished.add(folder)
    if not done:
        raise InputError(f"{', '.join(map(str, folders))}: no finished run (a folder with summary.json) here")
    return list(done.values()), sorted(unfinished)


def differing_keys(runs: Iterable[Run]) -> list[str]:
    """The recipe's keys in which the runs are not all alike."""
    recipes = [run.recipe for run in runs]
    keys = sorted({key for recipe in recipes for key in recipe})
    return [key for key in keys if any(recipe.get(key) != recipes[0].get(key) for recipe in recipes)]


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Runs that differ only in the seed, together; labelled by the attention and whatever else tells them apart.

    Raises:
        InputError: The same settings and seed stand in two folders, which would count one result twice.
    """
    runs = list(runs)
    keys = differing_keys(runs)
    groups: dict[str, Group] = {}
    for run in sorted(runs, key=lambda run: (run.seed is None, run.seed or 0)):
        identity = json.dumps([run.attention, {key: run.recipe.get(key) for key in keys}], sort_keys=True, default=str)
        group = groups.setdefault(identity, Group(""))
        twin = next((other for other in group.runs if other.seed == run.seed), None)
        if twin is not None:
            raise InputError(f"{twin.folder} and {run.folder} have the same settings and seed; leave one out")
        group.runs.append(run)
    found = list(groups.values())
    for group in found:
        group.label = _label(group, found, keys)
    return sorted(found, key=lambda group: (_attn(group) != "none", group.label))


def _attn(group: Group) -> str:
    return str(group.runs[0].attention.get("model.attn", "none"))


def _label(group: Group, groups: list[Group], keys: list[str]) -> str:
    """The method's name, and where another group has the same one, all that tells them apart."""
    first = group.runs[0]
    kin = [other.runs[0] for other in groups if other is not group and _attn(other) == _attn(group)]
    telling = [
        (key, first.attention.get(key, first.recipe.get(key)))
        for key in (*ATTENTION_KEYS[1:], *keys)
        if any(
            first.attention.get(key, first.recipe.get(key)) != other.attention.get(key, other.recipe.get(key))
            for other in kin
        )
    ]
    return " ".join([_attn(group), *(f"{key.split('.')[-1]}={value}" for key, value in telling)])


def mean_std(values: list[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; ``None`` for a single value, which has no spread."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def paired_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Mean of ``a - b`` over pairs (the same seeds), and the ends of its 95 % t-interval.

    .. math:: \\bar d \\pm t_{n-1} \\, s_d / \\sqrt n

    Args:
        a: One result a seed, at least two.
        b: The results to compare with, in the same order.

    Example:
        >>> paired_interval([3.0, 4.0, 5.0], [1.0, 2.0, 3.0])
        (2.0, 2.0, 2.0)
    """
    from scipy.stats import t  # half a second, which most commands need not spend

    differences = [x - y for x, y in zip(a, b, strict=True)]
    quantile = float(t.ppf(0.975, len(differences) - 1))
    centre, half = fmean(differences), quantile * stdev(differences) / math.sqrt(len(differences))
    return centre, centre - half, centre + half


def verdict(low: float, high: float, *, less_is_better: bool = False) -> str:
    """What an interval of differences allows to say.

    Example:
        >>> verdict(-0.4, 1.0), verdict(0.1, 0.5), verdict(-2.0, -1.0), verdict(0.2, 0.2)
        ('within noise', 'better here', 'worse here', 'within noise')
    """
    # Accuracies are counts: three equal differences have no spread, and no meaning for the next run either.
    if low <= 0 <= high or high - low <= 1e-9 * abs(high):
        return "within noise"
    return "better here" if (low > 0) != less_is_better else "worse here"
