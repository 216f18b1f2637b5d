"""`lineattn to-hf`: a language model of a run, as a folder that Hugging Face's transformers read."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from lineattn.errors import InputError, need


def run(args: list[str]) -> int:
    """Writes configuration, weights and tokenizer, and compares what is read back with the run's network."""
    parser = argparse.ArgumentParser(
        prog="lineattn to-hf",
        description="A MetaLA language model of a run, as Hugging Face's AutoModelForCausalLM reads it.",
        epilog="To load it: import lineattn.hf; AutoModelForCausalLM.from_pretrained(FOLDER)",
        allow_abbrev=False,
    )
    parser.add_argument("ckpt_path", type=Path, metavar="CHECKPOINT", help="a checkpoint of lineattn fit lm")
    parser.add_argument("out", type=Path, metavar="FOLDER", help="new folder to write to")
    options = parser.parse_args(args)
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise InputError(f"{options.out} is not an empty folder; choose a new one")
    need("transformers", "hf", "to-hf")

    import torch

    from lineattn.cli.restore import restore
    from lineattn.hf import MetalaForCausalLM, to_hf
    from lineattn.models.byte_tokenizer import byte_tokenizer
    from lineattn.models.language import LanguageModel
    from lineattn.tasks.data.text import TextData

    trained = restore(options.ckpt_path)
    if not isinstance(trained.net, LanguageModel) or not isinstance(trained.data, TextData):
        raise InputError(f"{options.ckpt_path} is of the task {trained.task}: to-hf is for language models, of task lm")
    tokenizer: Any = trained.data.tokenizer.core or byte_tokenizer()
    # What stands between documents in training begins a text and ends it.
    tokenizer.bos_token = tokenizer.eos_token
    ids = {"bos_token_id": trained.data.separator, "eos_token_id": trained.data.separator}
    model = to_hf(trained.net, **ids, pad_token_id=tokenizer.pad_token_id, max_position_embeddings=trained.data.length)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_name(f".{options.out.name}.{os.getpid()}.part")
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        tokens = torch.randint(trained.data.vocabulary, (1, 64), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = trained.net(tokens)[0]
            found = MetalaForCausalLM.from_pretrained(part).eval()(tokens).logits
        error = (found - expected).abs().max().item()
        if options.out.is_dir():
            options.out.rmdir()
        os.replace(part, options.out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"wrote {options.out}; largest difference of a logit after reading it back: {error:.2g}")
    return 0
