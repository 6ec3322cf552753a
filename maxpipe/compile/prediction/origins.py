"""Tell where an operation comes from: its source line, its phase and the part of the model.

XLA keeps JAX's name stack and the id of a Python stack frame with each operation; the frames
themselves stand in tables at the top of the text.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from maxpipe.compile.hlo import PRODUCTS, Instruction, Module
from maxpipe.model.experts.imbalance import USUAL_CALL

# Scopes that the programs name, the innermost of which says what an operation belongs to.
SCOPES = ("attention", "mlp", "layer", "head", "embedding", "optimizer", "transfer")
# Parts of the pipeline, for operations in none of these scopes, such as a gather of weights.
PIPELINE_SCOPES = ("forward", "backward", "weight_gradients", "stage")
# Scope of the conditional that chooses between experts' rows for a usual share and for all.
ALL_ROWS = "uneven experts"
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_PHASE = re.compile(r"\bphase_(\d+)\b")
_BRANCH = "/cond/branch_"  # follows the name of a conditional in those of what it runs
_ENTRY = re.compile(r"^(\d+) (.*)$")


class Origin(NamedTuple):
    """Where an operation comes from; "" for what is unknown.

    Attributes:
      op_name: JAX's name stack, such as "jit(train_step)/phase_1/while/body/forward/layer/mlp".
      source: file and line, such as "maxpipe/model/layers.py:52".
    """

    op_name: str = ""
    source: str = ""

    @property
    def words(self) -> list[str]:
        """Return the words of the name stack, the outermost first."""
        return re.findall(r"\w+", self.op_name)

    @property
    def scope(self) -> str:
        """Return `ALL_ROWS`, or the innermost of `SCOPES`, else of `PIPELINE_SCOPES`; else ""."""
        if self.op_name.removesuffix("/cond").endswith(f"jit({USUAL_CALL})"):
            return ALL_ROWS
        inner_first = self.words[::-1]
        named = (
            word for scopes in (SCOPES, PIPELINE_SCOPES) for word in inner_first if word in scopes
        )
        return next(named, "")

    @property
    def phase(self) -> int | None:
        """Return the number of the scheduled engine's phase; None outside of its phases."""
        number = _PHASE.search(self.op_name)
        return int(number[1]) if number else None

    @property
    def is_backward(self) -> bool:
        """Return whether differentiation has made this operation out of a forward one."""
        return "transpose(" in self.op_name or "backward" in self.words


class Origins:
    """The origins of the instructions of one module.

    Args:
      text: HLO text with its tables of frames.
      module: the same text, parsed.
    """

    def __init__(self, text: str, module: Module):
        self._module = module
        files = {number: entry.strip('"') for number, entry in _table(text, "FileNames").items()}
        locations = {
            number: (files.get(_value(entry, "file_name_id"), ""), _value(entry, "line"))
            for number, entry in _table(text, "FileLocations").items()
        }
        self._frames = {
            number: (
                locations.get(_value(entry, "file_location_id"), ("", 0)),
                # Numbers of parents are one too large; an outermost frame is its own parent.
                _value(entry, "parent_frame_id") - 1,
            )
            for number, entry in _table(text, "StackFrames").items()
        }

    def of(self, instruction: Instruction) -> Origin:
        """Return the origin of an instruction; of its main part for a fusion without one."""
        op_name = _OP_NAME.search(instruction.attributes)
        if instruction.opcode == "conditional" and op_name and not op_name[1].endswith("cond"):
            return Origin(self._renamed(instruction) or op_name[1])
        if op_name:
            return Origin(op_name[1], self._source(instruction.attributes))
        if instruction.opcode != "fusion":
            return Origin()
        name = instruction.called().get("calls", [""])[0]
        inside = self._module.computations.get(name)
        # A matrix product says what a fusion is for, else whatever comes last.
        inner = sorted(
            inside.instructions.values() if inside else (), key=lambda i: i.opcode in PRODUCTS
        )
        return next((origin for i in reversed(inner) if (origin := self.of(i)).op_name), Origin())

    def _renamed(self, conditional: Instruction) -> str:
        """Return the name of a conditional to which the partitioner has given another."""
        inside = (
            self.of(instruction).op_name.rpartition(_BRANCH)[0]
            for name in conditional.called()["branches"]
            for instruction in self._module.computations[name].instructions.values()
        )
        ((name, _),) = Counter(filter(None, inside)).most_common(1) or [("", 0)]
        return name

    def _source(self, attributes: str) -> str:
        """Return the innermost line that lies in no installed package, else the innermost line."""
        if direct := _SOURCE.search(attributes):
            return f"{_short(direct[1])}:{direct[2]}"
        frame = _FRAME.search(attributes)
        number = int(frame[1]) if frame else 0
        innermost = ""
        for _ in range(len(self._frames)):
            if number not in self._frames:
                break
            (file, line), number = self._frames[number]
            source = f"{_short(file)}:{line}" if file else ""
            innermost = innermost or source
            if file and "site-packages" not in file:
                return source
        return innermost


def _table(text: str, title: str) -> Mapping[int, str]:
    """Return the numbered lines under a title; empty if the text has no such table."""
    start = text.find(f"\n{title}\n")
    lines = text[start + len(title) + 2 :].splitlines() if start >= 0 else []
    entries: dict[int, str] = {}
    for line in lines:
        entry = _ENTRY.match(line)
        if not entry:
            break
        entries[int(entry[1])] = entry[2]
    return entries


def _value(entry: str, key: str) -> int:
    """Return a number of an entry such as {file_name_id=1 line=266}; 0 if it is not there."""
    match = re.search(rf"\b{key}=(\d+)", entry)
    return int(match[1]) if match else 0


def _short(file: str) -> str:
    """Return a path from the package's directory on; other paths from site-packages on."""
    for mark in ("/site-packages/", "/maxpipe/"):
        if mark in file:
            keep = mark[1:] if mark == "/maxpipe/" else ""
            return keep + file.rpartition(mark)[2]
    return file
