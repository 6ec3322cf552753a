"""The reader of HLO text, on programs made by hand and on compiled ones."""

import jax
import jax.numpy as jnp
import pytest

from maxpipe.compile.hlo import array_bytes, executions, parse, trip_count

LOOP = """
HloModule jit_f, is_scheduled=true

%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one), metadata={op_name="jit(f)/while/body/add (x)"}
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %inner = (s32[], f32[8]) while(%p), condition=%condition.2, body=%body.2
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %x)
}

%condition.1 (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %bound = s32[] constant(12)
  %copied = s32[] copy(%bound)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %copied), direction=LT
}

%body.2 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %negated = (s32[], f32[8]) custom-call(%p), custom_call_target="x"
}

%condition.2 (p: (s32[], f32[8])) -> pred[] {
  ROOT %anything = pred[] custom-call(%p), custom_call_target="y"
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %two = s32[] constant(2)
  %start = (s32[], f32[8]{0}) tuple(%two, %a)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition.1, body=%body.1
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def runs_of(text, **options):
    return {instruction.name: runs for _, instruction, runs in executions(parse(text), **options)}


def test_reads_names_types_operands_and_calls():
    module = parse(LOOP)
    assert module.entry == "main"
    assert list(module.computations) == ["body.1", "condition.1", "body.2", "condition.2", "main"]
    loop = module.computations["main"].instructions["loop"]
    assert (loop.opcode, loop.type, loop.operands) == ("while", "(s32[], f32[8]{0})", ("start",))
    assert loop.called() == {"condition": ["condition.1"], "body": ["body.1"]}


def test_trip_counts_come_from_the_condition_less_the_first_value():
    """Of the inner loop it cannot be read, and counts once; the compiler's own count wins."""
    assert runs_of(LOOP)["next"] == runs_of(LOOP)["negated"] == 10
    known = 'body=%body.1, backend_config={"known_trip_count":{"n":"7"}}'
    assert runs_of(LOOP.replace("body=%body.1", known))["next"] == 7


def test_branches_run_as_often_as_the_caller_says():
    text = """
%yes (x: f32[2]) -> f32[2] {
  ROOT %work = f32[2] negate(%x)
}

%no (x: f32[2]) -> f32[2] {
  ROOT %x = f32[2] parameter(0)
}

ENTRY %main (p: pred[], x: f32[2]) -> f32[2] {
  ROOT %choice = f32[2] conditional(%p, %x, %x), true_computation=%yes, false_computation=%no
}
"""
    assert runs_of(text)["work"] == 1
    assert runs_of(text, branch_runs=lambda runs: runs / 4)["work"] == 0.25


def test_what_an_asynchronous_start_calls_is_counted_once():
    text = """
%wrapped (x: f32[2]) -> f32[2] {
  ROOT %inside = f32[2] negate(%x)
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %s = ((f32[2]), f32[2], s32[]) async-start(%x), calls=%wrapped
  %u = ((f32[2]), f32[2], s32[]) async-update(%s), calls=%wrapped
  ROOT %d = f32[2] async-done(%u), calls=%wrapped
}
"""
    names = [instruction.name for _, instruction, _ in executions(parse(text))]
    assert names.count("inside") == 1


def test_bytes_of_types():
    sizes = {
        "f32[2,3]{1,0:T(8,128)}": [24],
        "(bf16[4]{0}, pred[], s4[3])": [8, 1, 2],
        "f8e4m3fn[16]": [16],
        "token[]": [],
        "(f32[2]{0:T(2,128)S(1)}, /*index=5*/u32[]{:S(2)})": [8, 4],
    }
    assert {text: array_bytes(text) for text in sizes} == sizes


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule x\n")


def test_compiled_loops_have_their_lengths():
    def f(x):
        def outer(x, _):
            return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=5)[0], None

        return jax.lax.scan(outer, x, length=3)[0]

    module = parse(jax.jit(f).lower(jnp.ones((4, 4))).compile().as_text())
    loops, times = [], []
    for computation, instruction, runs in executions(module):
        if instruction.opcode == "while":
            loops.append(trip_count(module, computation, instruction))
        times += [runs] * (instruction.opcode == "sine")
    assert sorted(loops) == [3, 5]
    assert 15 in times


def test_parse_ends_a_computation_of_another_thread_but_not_within_a_kernels_configuration():
    text = """
%offloaded (param.0: f32[8]) -> f32[8] {
  ROOT %param.0 = f32[8]{0} parameter(0)
}, execution_thread="sparsecore"

%branch (param.1: f32[8]) -> f32[8] {
  ROOT %param.1 = f32[8]{0} parameter(0)
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %k = f32[2] custom-call(%x), backend_config={"attributes":{"note":"{1,
"more":2
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %after = f32[2] negate(%k)
}
"""
    module = parse(text)
    found = {name: [*c.instructions] for name, c in module.computations.items()}
    assert found == {"offloaded": ["param.0"], "branch": ["param.1"], "main": ["k", "after"]}
