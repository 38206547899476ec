"""Tensors of an Adam or AdamW state, as an optimizer step leaves them given its new ``exp_avg``.

The gradient g of a step follows from the first moment m before and after it, and from it the second
moment v and the weight w; what is stored is the difference of the true bits to that. Several steps
are replayed one after the other from one *anchor*, a step whose chunks are stored otherwise: only
the first moments of the steps between are needed. With ``amsgrad`` the largest v so far, x, divides
instead of v. All of it in binary32, one operation after the other, scalars rounded to it first:

    g = m + (m' - m) / (1 - beta1)
    v' = v * beta2 + (g * g) * (1 - beta2)
    x' = x if x >= v' else v'
    w' = w * decay + (m' * -step_size) / (sqrt(v' or x') / root + eps)

with decay = 1 - lr * weight_decay (1 for Adam), step_size = lr / (1 - beta1^t) and root =
sqrt(1 - beta2^t), which are stored as numbers. NaNs among v', x' and w' are 0x7FC00000. Whatever
the optimizer really did only shows in how small the differences are.

Parameters: the role (what the chunk is of), then the stream table. Payload: beta1, beta2, eps,
then decay, step_size and root of each step, as binary64; the planes of the zig-zag differences; the
rest. References: what the chunk was at the anchor (of a weight followed by x, if there is one, then
v; of x by v), then m at the anchor and after each step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltackpt_store.coding import kernels
from deltackpt_store.coding.arithmetic import exact
from deltackpt_store.coding.elements import elements_of, join
from deltackpt_store.coding.streams import Unpacker, damaged

SECOND, WEIGHT, LARGEST, WEIGHT_BY_LARGEST = 0, 1, 2, 3
"""Roles: exp_avg_sq, a weight, max_exp_avg_sq, and a weight where there is a max_exp_avg_sq."""

ANCHORS = {SECOND: 1, WEIGHT: 2, LARGEST: 2, WEIGHT_BY_LARGEST: 3}
"""References of each role before the first moments."""

_BLOCK = 8 * 1024  # elements
_NAN = np.uint32(0x7FC00000)

Floats = NDArray[np.float32]


class Betas(NamedTuple):
    """The numbers that are the same for all steps replayed."""

    beta1: float
    beta2: float
    eps: float


class Step(NamedTuple):
    """The numbers of one step; see the head of this module."""

    decay: float
    step_size: float
    root: float


def numbers(betas: Betas, steps: Sequence[Step]) -> bytes:
    """The front of a payload."""
    return struct.pack(f"<{3 + 3 * len(steps)}d", *betas, *(n for step in steps for n in step))


def floats(data: Any) -> Floats:
    """Bytes as binary32 without a copy; what is left over at the end is left out."""
    view = memoryview(data)
    return np.frombuffer(view, "<f4", len(view) // 4)


def advance(
    betas: Betas, step: Step, before: Floats, after: Floats, second: Floats,
    *, weight: Floats | None = None, largest: Floats | None = None,
) -> None:  # fmt: skip
    """Take one step, in place, of `second`, `largest` and `weight`; `before` and `after` are m.

    All have the same length. Call it within :func:`arithmetic.exact`.
    """
    f = np.float32
    with np.errstate(all="ignore"):
        rest1, beta2, rest2 = f(1 - betas.beta1), f(betas.beta2), f(1 - betas.beta2)
        eps, decay, size, root = f(betas.eps), f(step.decay), f(-step.step_size), f(step.root)
        if kernels.native is not None and before.flags.aligned and after.flags.aligned:
            numbers = np.array((rest1, beta2, rest2, eps, decay, size, root), f)
            kernels.native.adam_step(numbers, before, after, second, weight, largest)
            return
        size_of = min(len(before), _BLOCK)
        room, more = np.empty(size_of, f), np.empty(size_of, f)
        for start in range(0, len(before), _BLOCK):
            m, new = before[start : start + _BLOCK], after[start : start + _BLOCK]
            v = second[start : start + _BLOCK]
            g, d = room[: len(m)], more[: len(m)]
            np.subtract(new, m, out=g)
            np.divide(g, rest1, out=g)
            np.add(m, g, out=g)
            np.multiply(g, g, out=g)
            np.multiply(g, rest2, out=g)
            np.multiply(v, beta2, out=v)
            np.add(v, g, out=v)
            _settle(v)
            if largest is not None:
                x = largest[start : start + _BLOCK]
                np.copyto(x, v, where=~(x >= v))
                _settle(x)
                v = x
            if weight is not None:
                w = weight[start : start + _BLOCK]
                np.sqrt(v, out=d)
                np.divide(d, root, out=d)
                np.add(d, eps, out=d)
                np.multiply(new, size, out=g)
                np.divide(g, d, out=g)
                np.multiply(w, decay, out=w)
                np.add(w, g, out=w)
                _settle(w)


def _settle(values: Floats) -> None:
    """Make all NaNs one."""
    wrong = np.isnan(values)
    if wrong.any():
        values.view(np.uint32)[wrong] = _NAN


def decode_adam(
    params: bytes, payload: memoryview, out: memoryview, references: Sequence[memoryview]
) -> None:
    """Replay the steps and add the differences."""
    unpacker = Unpacker(memoryview(params), payload)
    role = unpacker.byte()
    anchors = ANCHORS.get(role)
    if anchors is None:
        raise damaged(f"{role} is no role")
    firsts = references[anchors:]
    if len(firsts) < 2 or any(len(part) != len(out) for part in references):
        raise damaged("its references are not what a step needs")
    count = 3 * len(firsts)
    found = struct.unpack(f"<{count}d", unpacker.bytes(8 * count))
    betas = Betas(*found[:3])
    steps = [Step(*found[i : i + 3]) for i in range(3, count, 3)]
    values = elements_of(out, 4)
    planes = [unpacker.stream(len(values)) for _ in range(4)]
    rest = unpacker.bytes(len(out) % 4)
    unpacker.end()
    predicted = _replay(role, betas, steps, references[:anchors], firsts)
    join(planes, values, predicted.view("<u4"))
    out[4 * len(values) :] = rest


def _replay(
    role: int, betas: Betas, steps: Sequence[Step], anchors: Sequence[memoryview],
    firsts: Sequence[memoryview],
) -> Floats:  # fmt: skip
    state = [floats(part).copy() for part in anchors]
    second = state[-1]
    largest = state[-2] if role in (LARGEST, WEIGHT_BY_LARGEST) else None
    weight = state[0] if role in (WEIGHT, WEIGHT_BY_LARGEST) else None
    with exact():
        for step, before, after in zip(steps, firsts, firsts[1:], strict=False):
            advance(betas, step, floats(before), floats(after), second,
                    weight=weight, largest=largest)  # fmt: skip
    return state[0]
