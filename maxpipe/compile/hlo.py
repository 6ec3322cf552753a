"""Parse XLA's optimized HLO text: computations, instructions, and how often each runs.

Only what is needed to count is parsed. Everything else in a line is skipped, so that new attributes
and instructions of later compilers do no harm.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

# Matrix products; TPUs have convolutions only.
PRODUCTS = ("convolution", "dot")

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_END = re.compile(r"^\}(\s*$| //|, execution_thread=)")
_NAME = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
# An array's bits, as in the name of its type (bf16, f8e4m3fn; a pred takes a byte), and its sizes.
_ARRAY = re.compile(r"\b(?:pred|(?:bf|[fsuc])(\d+)\w*)\[([\d,]*)\]")
_REFERENCE = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `arguments` is the text between the parentheses.

    `attributes` is the text after the operands, metadata included; it may have several lines.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str

    def called(self) -> dict[str, list[str]]:
        """Return computations by role: calls, to_apply, body, condition, branches."""
        roles: dict[str, list[str]] = {}
        for role, name in _CALLS.findall(self.attributes):
            roles.setdefault("branches" if role.endswith("_computation") else role, []).append(name)
        for names in _BRANCHES.findall(self.attributes):
            roles.setdefault("branches", []).extend(n.strip().lstrip("%") for n in names.split(","))
        return roles


@dataclass
class Computation:
    """A named sequence of instructions, in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)


@dataclass(frozen=True)
class Module:
    """A parsed HLO module."""

    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Parse the text of one HLO module; ValueError if there is no entry computation."""
    computations: dict[str, Computation] = {}
    entry, current, latest = "", None, ""
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header and "=" not in line.split("(")[0]:
                current = computations.setdefault(header[2], Computation(header[2]))
                entry = header[2] if header[1] else entry
        elif _END.match(line):
            # No other line with a brace ends it: a kernel's configuration may hold line breaks and
            # braces of its own.
            current = None
        elif instruction := _instruction(line):
            current.instructions[instruction.name] = instruction
            latest = instruction.name
        elif latest in current.instructions:
            begun = current.instructions[latest]
            joined = f"{begun.attributes}\n{line}"
            current.instructions[latest] = replace(begun, attributes=joined)
    if not entry:
        raise ValueError("the HLO text has no ENTRY computation")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    named = _NAME.match(line)
    if not named:
        return None
    type_end = _end_of_type(line, named.end())
    opcode = _OPCODE.match(line, type_end + 1)
    if not opcode:
        return None
    close = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : close]
    return Instruction(
        named[1],
        opcode[1],
        line[named.end() : type_end],
        tuple(_REFERENCE.findall(arguments)),
        arguments,
        line[close + 1 :],
    )


def _end_of_type(line: str, start: int) -> int:
    """Return where a type ends; tuples and layouts hold spaces and parentheses."""
    depth = 0
    for i in range(start, len(line)):
        if line[i] in "({[":
            depth += 1
        elif line[i] in ")}]":
            depth -= 1
        elif line[i] == " " and depth == 0:
            return i
    return len(line)


def _closing(line: str, start: int) -> int:
    depth = 0
    for i in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[i], 0)
        if depth == 0:
            return i
    return len(line)


def arrays(type_text: str) -> list[tuple[list[int], int]]:
    """Return dimensions and bytes of every array in a type, tuples flattened; without padding."""
    shapes: list[tuple[list[int], int]] = []
    for bits, dims in _ARRAY.findall(type_text):
        sizes = [int(d) for d in dims.split(",") if d]
        shapes.append((sizes, math.ceil(math.prod(sizes) * int(bits or 8) / 8)))
    return shapes


def array_bytes(type_text: str) -> list[int]:
    return [size for _, size in arrays(type_text)]


def executions(
    module: Module, branch_runs: Callable[[float], float] = lambda runs: runs
) -> Iterator[tuple[Computation, Instruction, float]]:
    """Yield every instruction with the number of times that a step runs it.

    Loops multiply by their trip count, 1 if it is unknown. Instructions inside fusions and calls
    are included.

    Args:
      branch_runs: maps how often a conditional is reached to how often its branches do their work;
        by default each time. All branches count alike: idle ones hold nothing to count.
    """
    yield from _executions(module, module.computations[module.entry], 1.0, branch_runs)


def _executions(
    module: Module, computation: Computation, runs: float, branch_runs: Callable[[float], float]
) -> Iterator[tuple[Computation, Instruction, float]]:
    for instruction in computation.instructions.values():
        yield computation, instruction, runs
        if instruction.opcode.endswith(("-update", "-done")) or instruction.name.startswith(
            "async-collective-done"
        ):
            continue  # these name the same computation as their start, or repeat it
        roles = instruction.called()
        inside = [(name, runs) for name in roles.get("calls", []) + roles.get("to_apply", [])]
        if instruction.opcode == "while":
            count = trip_count(module, computation, instruction)
            times = runs * (1 if count is None else count)
            inside = [(name, times) for name in roles.get("body", [])]
        elif instruction.opcode == "conditional":
            inside = [(name, branch_runs(runs)) for name in roles.get("branches", [])]
        for name, times in inside:
            if name in module.computations:
                yield from _executions(module, module.computations[name], times, branch_runs)


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Return how often a `while` runs, by XLA's own note or a condition `counter < constant`."""
    if known := _TRIPS.search(loop.attributes):
        return int(known[1])
    conditions = loop.called().get("condition", [])
    if not conditions or conditions[0] not in module.computations:
        return None
    body = module.computations[conditions[0]].instructions
    for compare in reversed(list(body.values())):
        if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
            continue
        bounds = [_constant(body, name) for name in compare.operands]
        if len(bounds) == 2 and bounds[0] is None and bounds[1] is not None:
            index = _tuple_index(body, compare.operands[0])
            return max(0, bounds[1] - _initial(computation, loop, index))
    return None


def _constant(instructions: Mapping[str, Instruction], name: str) -> int | None:
    """Return the value of an integer constant, through copies; None if it is not one."""
    source = _source(instructions, name, ("copy", "convert", "bitcast", "reshape"))
    if source is None or source.opcode != "constant":
        return None
    return int(source.arguments) if re.fullmatch(r"-?\d+", source.arguments.strip()) else None


def _tuple_index(instructions: Mapping[str, Instruction], name: str) -> int | None:
    """Return which element of a tuple a value is, through copies; None if unknown."""
    source = _source(instructions, name, ("copy", "convert", "bitcast"))
    index = re.search(r"index=(\d+)", source.attributes) if source is not None else None
    return int(index[1]) if index else None


def _source(
    instructions: Mapping[str, Instruction], name: str, copies: tuple[str, ...]
) -> Instruction | None:
    source = instructions.get(name)
    while source is not None and source.opcode in copies and source.operands:
        source = instructions.get(source.operands[0])
    return source


def _initial(computation: Computation, loop: Instruction, index: int | None) -> int:
    start = computation.instructions.get(loop.operands[0]) if loop.operands else None
    if start is None or start.opcode != "tuple" or index is None or index >= len(start.operands):
        return 0
    return _constant(computation.instructions, start.operands[index]) or 0
