"""The `lineattn` command: picks the verb, and turns what a user can mend into one line and an exit code.

Nothing but the standard library is imported before a verb is chosen, so that help and version answer at once.
A verb is one line in `VERBS` and a module `lineattn.cli.<verb>` with ``run(args: list[str]) -> int``; a dash of
the verb is an underscore in the module's name.

Exit codes: 0 done, 1 done with failures (a cell of a sweep, a fault in the data), 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module

from lineattn.errors import InputError, unknown
from lineattn.files import causes

VERBS = {
    "demo": "small networks with and without linear attention, in a minute or two: table, pictures; demo seg, demo lm",
    "models": "networks with parameters and MACs, and the attention methods they take",
    "show": "one method (equation, paper, cost) or one network (stages, parameters, MACs)",
    "check-data": "what is wrong with a data set, before training finds out",
    "sweep": "a grid of settings times seeds, one run folder each; finished runs are not run again",
    "compare": "finished runs side by side: mean ± std, parameters, MACs, memory, time",
    "analyze": "what attention over depth does in a trained network, and what each method along tokens can do",
    "profile": "cost against depth: parameters, MACs, memory and time of each method, and how they grow",
    "bench": "time and memory of networks and operators, beside what they are compared with",
    "export": "a checkpoint to safetensors, ONNX or torch.export, with a check against torch",
    "lm-eval": "a language model on zero-shot tasks of lm-evaluation-harness, offline too",
    "to-hf": "a language model of a run as a folder that Hugging Face's transformers read",
    "doctor": "versions, kernels, devices, network: what works here and what doesn't",
}
TASK_VERBS = {
    "fit": "train",
    "validate": "evaluate a checkpoint on the validation set",
    "test": "evaluate a checkpoint on the test set",
    "predict": "what a checkpoint says of a file, a folder or a glob",
}
TASKS = {
    "cls": "image classification: a folder of images, CIFAR-10/100, or the bundled digits",
    "seg": "segmentation: images with masks, ISIC, VOC, ADE20K, Cityscapes, or scenes of the bundled digits",
    "lm": "language modelling: the next token of any text, by any method of the token axis",
    "mqar": "associative recall: how many pairs of keys and values a method of the token axis keeps in mind",
}

EXAMPLES = """\
  lineattn demo
  lineattn fit cls --model.name resnet20_bottleneck_cifar --model.attn kcla --data.root my_images --out runs/mine
  lineattn predict cls --ckpt_path runs/mine/checkpoints/best.ckpt --input photo.jpg"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    # Spinning OpenMP threads cost 4-15x on a busy machine; torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except InputError as error:
        return _fail(str(error))
    except KeyboardInterrupt as stop:
        print(f"lineattn: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe left (`| head`); what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        full = next((cause for cause in causes(error) if getattr(cause, "errno", None) == errno.ENOSPC), None)
        if full is None:
            raise
        where = getattr(full, "filename", None)
        return _fail(f"the disk is full{f', writing {where}' if where else ''}: make room, then run the command again")


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        from lineattn import __version__

        print(f"lineattn {__version__}")
        return 0
    verb, *args = argv
    if verb in TASK_VERBS:
        return _run_task(verb, args)
    if verb not in VERBS:
        raise unknown("command", verb, [*VERBS, *TASK_VERBS])
    return import_module(f"lineattn.cli.{verb.replace('-', '_')}").run(args)


def _run_task(verb: str, args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: lineattn {verb} TASK [OPTIONS]\n\n{TASK_VERBS[verb]}\n\n{_listing('tasks', TASKS)}\n")
        print(f"`lineattn {verb} TASK --help` lists the options.")
        return 0 if args else 2
    task, *options = args
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    import_module("lineattn.cli.task").run(verb, task, options)
    return 0


def _help() -> str:
    return "\n\n".join(
        [
            "usage: lineattn COMMAND [OPTIONS]",
            "Attention whose cost grows linearly: train it, measure it, compare it.",
            _listing("commands", VERBS),
            _listing("commands of a task", {f"{verb} TASK": line for verb, line in TASK_VERBS.items()}),
            _listing("tasks", TASKS),
            "examples:\n" + EXAMPLES,
            "`lineattn COMMAND --help` says more; `lineattn --version` prints the version.",
        ]
    )


def _listing(title: str, lines: dict[str, str]) -> str:
    return "\n".join([f"{title}:", *(f"  {name:<14} {line}" for name, line in lines.items())])


def _fail(line: str) -> int:
    print(f"lineattn: {line}", file=sys.stderr)
    return 2
