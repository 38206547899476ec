"""Triton kernels: the ordered list of changed chunks, and their bytes packed into one buffer."""

# Triton compiles these functions from their source: pyright cannot see types through its operators
# (hence basic mode); its language has capitals for compile-time constants and no star in tuples.
# pyright: basic, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: N803  (constants of the compiler are in capitals, as in Triton's own kernels)

import triton
import triton.language as tl

from deltackpt.cuda.kernels import word_at


@triton.jit(do_not_specialize=["chunks"])
def compact(
    flags, digests, changed, changed_digests, chunks, TILE: tl.constexpr, LOOK: tl.constexpr
):
    """Write the rows whose flag is 1 to ``changed[1:]``, ascending, and their count to [0].

    Their digests go to ``changed_digests`` in the same order.

    Each program places one tile of flags; where its part starts is the number of flags set before
    the tile, which it counts itself (bytes from the cache, ``LOOK`` at a time): no atomics, so the
    order is the same in every run. ``changed`` is int32 and holds ``chunks + 1`` entries.
    """
    start = tl.program_id(0) * TILE
    partial = tl.zeros((LOOK,), tl.int32)
    for at in range(0, start, LOOK):
        index = at + tl.arange(0, LOOK)
        partial += tl.load(flags + index, mask=index < start, other=0).to(tl.int32)
    before = tl.sum(partial, axis=0)
    row = start + tl.arange(0, TILE)
    flag = tl.load(flags + row, mask=row < chunks, other=0).to(tl.int32)
    place = before + tl.cumsum(flag, axis=0)
    tl.store(changed + place, row, mask=flag != 0)
    for half in tl.static_range(2):
        word = tl.load(digests + row * 2 + half, mask=flag != 0, other=0)
        tl.store(changed_digests + (place - 1) * 2 + half, word, mask=flag != 0)
    if start + TILE >= chunks:
        tl.store(changed, before + tl.sum(flag, axis=0))


@triton.jit
def _copy_pieces(source, target, length, start, WORDS: tl.constexpr, ALIGNED: tl.constexpr):
    """Copy whole 16-byte pieces of one tile; masks change between pieces only."""
    piece = tl.arange(0, WORDS // 2)[:, None]
    word = piece * 2 + tl.arange(0, 2)[None, :]
    wanted = start + piece * 16 + 16 <= length
    out = tl.multiple_of(target.to(tl.pointer_type(tl.uint64)), 16)
    if ALIGNED:
        data = tl.multiple_of(source.to(tl.pointer_type(tl.uint64)), 16)
        tl.store(out + word, tl.load(data + word, mask=wanted, other=0), mask=wanted)
    else:
        value = word_at(source + word * 8, wanted & (word >= 0))
        tl.store(out + word, value, mask=wanted)


@triton.jit(do_not_specialize=["target", "first", "tiles_log2"])
def gather(table, plan, target, first, tiles_log2, WORDS: tl.constexpr):
    """Copy chunks to offsets from the address ``target``, ``WORDS * 8`` bytes per program.

    ``plan`` is two int64 per copied chunk: row in ``table``, and an offset such that the sum of
    ``target`` and it is a multiple of 16. Copying starts at plan entry ``first``, with
    ``2 ** tiles_log2`` programs to a chunk. Not a byte beyond the chunk's end is written.
    """
    program = tl.program_id(0)
    entry = (first + (program >> tiles_log2)).to(tl.int64)
    row = tl.load(plan + entry * 2)
    offset = tl.load(plan + entry * 2 + 1)
    address = tl.load(table + row * 2)
    length = (tl.load(table + row * 2 + 1) & 0xFFFFFFFF).to(tl.int32)
    start = (program & ((1 << tiles_log2) - 1)) * (WORDS * 8)
    if start < length:
        source = address + start
        out = target + offset + start
        if source & 15 == 0:
            _copy_pieces(source, out, length, start, WORDS, True)
        else:
            _copy_pieces(source, out, length, start, WORDS, False)
        if start + WORDS * 8 >= length:  # the odd bytes at the chunk's end
            byte = (length & -16) - start + tl.arange(0, 16)
            wanted = start + byte < length
            value = tl.load((source + byte).to(tl.pointer_type(tl.uint8)), mask=wanted, other=0)
            tl.store((out + byte).to(tl.pointer_type(tl.uint8)), value, mask=wanted)
