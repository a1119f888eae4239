"""Experts that a token needs and that have no slot: the device chooses who makes room and reads them from host memory.

Both kernels stand between router and experts of a layer, inside of the graph, so no host is waited for. Each layer has slots
of its own; the expert that was used longest ago makes room, the lower slot where two were.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def claim_kernel(LOGITS, TABLE, OWNER, STAMP, CLOCK, JOBS, FIRST, SLOTS, K: tl.constexpr, EXPERTS: tl.constexpr,
                 PAD: tl.constexpr):  # fmt: skip
    """One program. JOBS [2, K]: for each rank the slot to be filled, or -1 where the expert is there; and its number.

    TABLE [EXPERTS]: slots of the layer's experts. OWNER, STAMP [SLOTS]: of the layer's slots, the first of which is FIRST.
    No entry that is written here is read after that, so threads need not wait for each other.
    """
    i = tl.arange(0, EXPERTS)
    s = tl.arange(0, PAD)
    stamps = tl.load(STAMP + s, mask=s < SLOTS, other=2147483647)
    now = tl.load(CLOCK) + 1
    logits = tl.load(LOGITS + i)
    for _ in range(K):
        expert = tl.argmax(logits, 0)
        logits = tl.where(i == expert, float("-inf"), logits)
        slot = tl.load(TABLE + expert)
        stamps = tl.where((slot >= 0) & (s == slot - FIRST), now, stamps)
    logits = tl.load(LOGITS + i)
    for n in range(K):
        expert = tl.argmax(logits, 0).to(tl.int32)
        logits = tl.where(i == expert, float("-inf"), logits)
        missing = tl.load(TABLE + expert) < 0
        victim = tl.argmin(stamps, 0).to(tl.int32)
        before = tl.load(OWNER + victim)
        tl.store(TABLE + before, -1, mask=missing & (before >= 0))
        tl.store(TABLE + expert, FIRST + victim, mask=missing)
        tl.store(OWNER + victim, expert, mask=missing)
        tl.store(JOBS + n, tl.where(missing, FIRST + victim, -1))
        tl.store(JOBS + K + n, expert)
        stamps = tl.where(missing & (s == victim), now, stamps)
    tl.store(STAMP + s, stamps, mask=s < SLOTS)
    tl.store(CLOCK, now)


@triton.jit
def fetch_kernel(RECORDS, POOL, JOBS, ROW, WORDS, K: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (rank, part) copy an expert's record from pinned host memory into its slot. ROW: of the layer's first."""
    slot = tl.load(JOBS + tl.program_id(0))
    if slot >= 0:
        row = ROW + tl.load(JOBS + K + tl.program_id(0))
        source = RECORDS + row.to(tl.int64) * WORDS
        target = POOL + slot.to(tl.int64) * WORDS
        for at in range(tl.program_id(1) * BLOCK, WORDS, tl.num_programs(1) * BLOCK):
            c = at + tl.arange(0, BLOCK)
            tl.store(target + c, tl.load(source + c, mask=c < WORDS), mask=c < WORDS)
