"""Writes docs/contract.md from a report of the contract tests: what holds for every method on every family.

`make contract` runs the tests, then this.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

import torch

from lineattn.cli.compare import markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "contract.md"
FILES = ("test_contract", "test_contract_graphs", "test_contract_processes")
_ALL_CELLS = "test_two_processes_use_every_parameter"  # one test, which walks every cell
_REFUSED = "test_what_a_family_has_not_is_refused_with_what_it_has"
_HEAD = """# The contract

Each method of the depth axis on each family of networks, as the tests build them (a few blocks each, see
`tests/hosts/nets.py`). A number says how many properties were tested on that cell and hold; "refused": the family's
blocks don't fall into branch and shortcut, which the method needs, and `attach` says so. A property that the network
itself does not have (sizes that a vision transformer doesn't take) is not counted. Families whose plan is that of
another in other names have three methods, one for each thing that a plan offers (the output, branch and shortcut, the
branch alone); `make test-slow` has them all. Written by `make contract`, from tests that every change passes.
"""


def page(report: Path) -> str:
    """The page for a junit report.

    Raises:
        SystemExit: A test failed, or the report is of something else.
    """
    passed: dict[str, set[tuple[str, str]]] = defaultdict(set)
    refused: set[tuple[str, str]] = set()
    walked: set[str] = set()  # tests that are of no cell
    for case in ElementTree.parse(report).iter("testcase"):
        name, _, cell = case.attrib["name"].rstrip("]").partition("[")
        if any(child.tag in ("failure", "error") for child in case):
            raise SystemExit(f"{case.attrib['name']} failed; there is no table of a contract that is broken")
        if any(child.tag == "skipped" for child in case):
            continue
        if not cell:
            walked.add(name)
            continue
        method, family = cell.split("-", 1)
        if name == _REFUSED:
            refused.add((method, family))
        else:
            passed[name].add((method, family))
    if not passed:
        raise SystemExit(f"{report} holds no cells of the contract")
    cells = set().union(*passed.values())
    if _ALL_CELLS in walked:
        passed[_ALL_CELLS] = cells
    counts = Counter(cell for holds in passed.values() for cell in holds)
    methods = sorted({method for method, _ in cells})
    families = sorted({family for _, family in cells})
    table = [
        {"method": method}
        | {
            family: "refused" if (method, family) in refused else str(counts[method, family] or "")
            for family in families
        }
        for method in methods
    ]
    words = _sentences()
    properties = [{"property": words[name], "cells": str(len(passed[name]))} for name in words if passed.get(name)]
    origin = f"<sub>`make contract`; PyTorch {torch.__version__}, {len(cells)} cells.</sub>"
    parts = [_HEAD.strip(), markdown(table, list(table[0])), "Properties, and on how many cells each was tested:"]
    return "\n\n".join([*parts, markdown(properties, list(properties[0])), origin]) + "\n"


def _sentences() -> dict[str, str]:
    """What each test says, by its name: the name in words, with its docstring."""
    found = {}
    for file in FILES:
        for node in ast.parse((ROOT / "tests" / f"{file}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name != _REFUSED:
                words = re.sub("_", " ", node.name.removeprefix("test_"))
                more = ast.get_docstring(node)
                found[node.name] = f"{words}. {more}" if more else words
    return found


def main(args: list[str]) -> int:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(Path(args[0])))
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
