"""What an optimizer's step does with an argument that is None, followed through its code."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType

NONE_TESTS = {
    "POP_JUMP_IF_NONE": True,
    "POP_JUMP_FORWARD_IF_NONE": True,
    "POP_JUMP_BACKWARD_IF_NONE": True,
    "POP_JUMP_IF_NOT_NONE": False,
    "POP_JUMP_FORWARD_IF_NOT_NONE": False,
    "POP_JUMP_BACKWARD_IF_NOT_NONE": False,
}
"""Instructions that test for None, and whether they jump there (Python 3.11 and later)."""
TRUTH_TESTS = {
    "POP_JUMP_IF_TRUE": True,
    "POP_JUMP_FORWARD_IF_TRUE": True,
    "POP_JUMP_BACKWARD_IF_TRUE": True,
    "POP_JUMP_IF_FALSE": False,
    "POP_JUMP_FORWARD_IF_FALSE": False,
    "POP_JUMP_BACKWARD_IF_FALSE": False,
}
"""Instructions that test a value, and for which value they jump."""
ENDS = ("RETURN_VALUE", "RETURN_CONST")
LEAVES = (*ENDS, "RAISE_VARARGS", "RERAISE")
JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD_NO_INTERRUPT")


def use_of_none(code: CodeType | None, argument: str) -> str:
    """How a step uses an argument that is None: "none", "handed on" to another step, or "used"."""
    if code is None:
        return "used"
    instructions = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    at = {one.offset: number for number, one in enumerate(instructions)}
    seen: set[int] = set()
    waiting, returns, handed_on = [0], False, False
    while waiting:
        number = waiting.pop()
        if number in seen or number >= len(instructions):
            continue
        seen.add(number)
        one = instructions[number]
        if _reads(one, argument):
            known = _after_test(instructions, number)
            if known is not None:
                jump, jumps = known
                waiting.append(at[instructions[jump].argval] if jumps else jump + 1)
            elif _is_argument_of_step(instructions, number):
                handed_on = True
                waiting.append(number + 1)
            else:
                return "used"
            continue
        if one.opname in LEAVES:
            returns = returns or one.opname in ENDS
            continue
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            waiting.append(at[one.argval])
        if one.opname not in JUMPS:
            waiting.append(number + 1)
    return "used" if not returns else "handed on" if handed_on else "none"


def _reads(one: dis.Instruction, argument: str) -> bool:
    """Whether an instruction reads the argument; some read two variables at once."""
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    return one.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")) and argument in names


def _after_test(instructions: list[dis.Instruction], number: int) -> tuple[int, bool] | None:
    """Where a test of the argument jumps or goes on, and whether it jumps; None if it's no test."""
    following = iter(range(number + 1, len(instructions)))
    jump = next(following)
    name = instructions[jump].opname
    if name in NONE_TESTS:
        return jump, NONE_TESTS[name]
    value = False  # bool(None)
    if name == "LOAD_CONST" and instructions[jump].argval is None:
        test = instructions[next(following)]
        if test.opname != "IS_OP":
            return None
        jump, value = next(following), test.arg == 0
    jump = next(following) if instructions[jump].opname == "TO_BOOL" else jump
    name = instructions[jump].opname
    return (jump, TRUTH_TESTS[name] is value) if name in TRUTH_TESTS else None


def _is_argument_of_step(instructions: list[dis.Instruction], number: int) -> bool:
    before: Iterator[dis.Instruction] = reversed(instructions[:number])
    called = next((one for one in before if one.opname != "PUSH_NULL"), None)
    return called is not None and called.argval == "step"
