"""Lightning attention in plain Triton, the kernels: one scan for the output and every gradient.

What a scan is stands in `scans.py`.  It goes chunk by chunk, with the state in registers.

A program takes one item of the plan, one head and a block of c's columns.  Where a sequence is
spread over items, `parts` runs first: the sum of each item's own tokens, from which the programs
after it put their starting states together.  Tokens whose weight at the end of the item is below
2^-CUT are not read there.  Every exponent is <= 0, so no slope overflows, and the scores that the
state needs transposed come from a product of their own, never from a transposed result.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
CUT = tl.constexpr(26.0)  # a token of weight 2^-CUT at the end of an item is not seen in float32
FAINT = tl.constexpr(1e-9)  # nor an item whose weight is below this


VARYING = ["documents", "items", "tokens", "segments", "heads", "shares", "checkpoints"]


@triton.jit(do_not_specialize=VARYING[:2])
def place_items(
    OFFSETS, TABLE, documents, items,
    C: tl.constexpr, SEGMENT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of a pack's table; SEGMENT > 0 cuts each document by itself."""
    item = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    total = 0
    if SEGMENT == 0:
        for d in range(0, documents, BLOCK):
            live = d + at < documents
            length = tl.load(OFFSETS + d + at + 1, mask=live, other=0)
            length -= tl.load(OFFSETS + d + at, mask=live, other=0)
            total += tl.sum(tl.where(live, tl.maximum(tl.cdiv(length, C), 1), 0))
    begin = (item.to(tl.int64) * total // items).to(tl.int32)
    end = ((item + 1).to(tl.int64) * total // items).to(tl.int32)
    inside = tl.maximum(end - 1, begin)  # a chunk of the last document
    first, first_chunk, last, last_chunk = -1, 0, -1, 0
    own_items, document_end = 0, 0
    chunks, parts = 0, 0  # of the documents before
    for d in range(0, documents, BLOCK):
        live = d + at < documents
        length = tl.load(OFFSETS + d + at + 1, mask=live, other=0)
        length -= tl.load(OFFSETS + d + at, mask=live, other=0)
        count = tl.where(live, tl.maximum(tl.cdiv(length, C), 1), 0)
        start = chunks + tl.cumsum(count, 0) - count
        if SEGMENT == 0:
            before = live & (start <= begin)
            first += tl.sum(before.to(tl.int32))
            first_chunk = tl.maximum(first_chunk, tl.max(tl.where(before, start, 0)))
            before = live & (start <= inside)
            last += tl.sum(before.to(tl.int32))
            last_chunk = tl.maximum(last_chunk, tl.max(tl.where(before, start, 0)))
        else:
            own = tl.cdiv(count, SEGMENT)
            place = parts + tl.cumsum(own, 0) - own
            before = live & (place <= item)
            first += tl.sum(before.to(tl.int32))
            first_chunk = tl.maximum(first_chunk, tl.max(tl.where(before, start, 0)))
            own_items = tl.maximum(own_items, tl.max(tl.where(before, place, 0)))
            document_end = tl.maximum(document_end, tl.max(tl.where(before, start + count, 0)))
            parts += tl.sum(own)
        chunks += tl.sum(count)
    if SEGMENT > 0:
        begin = first_chunk + (item - own_items) * SEGMENT
        end = tl.maximum(tl.minimum(begin + SEGMENT, document_end), begin)
        last, last_chunk = first, first_chunk
    row = TABLE + item * COLUMNS
    tl.store(row, begin)
    tl.store(row + 1, end)
    tl.store(row + 2, first)
    tl.store(row + 3, first_chunk)
    tl.store(row + 4, last)
    tl.store(row + 5, last_chunk)


@triton.jit
def _item_bounds(item, TABLE, tokens, segments, C: tl.constexpr, PACKED: tl.constexpr):
    """First chunk of an item and the one after its last.

    In a batch chunks are counted from the start of their sequence, in a pack from its start.
    """
    if PACKED:
        begin = tl.load(TABLE + item * 6)
        end = tl.load(TABLE + item * 6 + 1)
    else:
        chunks = tl.maximum(tl.cdiv(tokens, C), 1)
        segment = item % segments
        begin = (segment * chunks.to(tl.int64) // segments).to(tl.int32)
        end = ((segment + 1) * chunks.to(tl.int64) // segments).to(tl.int32)
    return begin, end


@triton.jit
def _item_document(
    item, OFFSETS, TABLE, tokens, segments, PACKED: tl.constexpr, REVERSE: tl.constexpr
):
    """The document that an item enters first: number, first row, length, number of first chunk."""
    if PACKED:
        place = TABLE + item * 6 + (4 if REVERSE else 2)
        document = tl.load(place)
        first = tl.load(place + 1)
        row = tl.load(OFFSETS + document)
        length = tl.minimum(tl.load(OFFSETS + document + 1), tokens) - row
    else:
        document = item // segments
        first, row, length = 0, 0, tokens
    return document, row, length, first


@triton.jit(do_not_specialize=VARYING[2:6])
def parts_kernel(
    B, C_, SLOPES, PARTS, ENTRY, STATES, SLOTS, KNOWN, OFFSETS, TABLE,
    tokens, segments, heads, shares, b_batch, b_token, b_head, c_batch, c_token, c_head,
    KB: tl.constexpr, KC: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr, C: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr, ENTERING: tl.constexpr, POOL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over shares of an item's tokens, of the document that goes on in the next item.

    Each as it stands at the end of the item.
    """
    blocks: tl.constexpr = (KC + BC - 1) // BC
    pid = tl.program_id(0)
    block = pid % blocks
    share = pid // blocks % shares
    head = pid // blocks // shares % heads
    item = pid // blocks // shares // heads
    begin, end = _item_bounds(item, TABLE, tokens, segments, C, PACKED)
    # the document on the side where the scan leaves the item
    document, row, length, first = _item_document(
        item, OFFSETS, TABLE, tokens, segments, PACKED, not REVERSE
    )
    after = first + tl.maximum(tl.cdiv(length, C), 1)
    goes_on = (begin > first) if REVERSE else (end < after)
    if (begin < end) & goes_on:
        slope = tl.load(SLOPES + head).to(tl.float32) * LOG2E
        r = tl.arange(0, C)
        columns_b = tl.arange(0, BB)
        columns_c = block * BC + tl.arange(0, BC)
        has_b, has_c = columns_b < KB, columns_c < KC
        start, stop = tl.maximum(begin, first), tl.minimum(end, after)
        reach = tl.minimum(CUT / tl.maximum(slope, 1e-30), 1e9).to(tl.int32) // C + 2
        whole = reach >= stop - start
        if REVERSE:
            stop = tl.minimum(stop, start + reach)
        else:
            start = tl.maximum(start, stop - reach)
        chunks = stop - start
        own_stop = start + (share + 1) * chunks // shares
        own_start = start + share * chunks // shares
        after_us = (own_start - start) if REVERSE else (stop - own_stop)
        is_first = (share == shares - 1) if REVERSE else (share == 0)
        if not PACKED:
            B += document.to(tl.int64) * b_batch
            C_ += document.to(tl.int64) * c_batch
        B += head.to(tl.int64) * b_head
        C_ += head.to(tl.int64) * c_head
        place = columns_c[:, None] + columns_b[None, :] * KC
        inside = has_c[:, None] & has_b[None, :]
        state = tl.zeros([BC, BB], tl.float32)
        if ENTERING:
            enters = is_first & ((end >= after) if REVERSE else (begin <= first))
            slot, known = document, True
            if POOL:
                slot = tl.load(SLOTS + document)
                known = tl.load(KNOWN + document) != 0
            source = STATES + (slot.to(tl.int64) * heads + head) * KB * KC + place
            initial = tl.load(source, mask=inside & enters & known, other=0.0)
            entry = (item.to(tl.int64) * heads + head) * KB * KC + place
            tl.store(ENTRY + entry, initial, mask=inside & enters)
            if whole:
                state = initial.to(tl.float32)
        for step in range(0, own_stop - own_start):
            i = (own_stop - 1 - step) if REVERSE else (own_start + step)
            n = tl.minimum(length - (i - first) * C, C)
            live = (r < n)[:, None]
            t = (row + (i - first) * C + r).to(tl.int64)[:, None]
            b = tl.load(B + t * b_token + columns_b[None, :], mask=live & has_b[None, :], other=0.0)
            c = tl.load(
                C_ + t * c_token + columns_c[None, :], mask=live & has_c[None, :], other=0.0
            )
            distance = (r + 1) if REVERSE else tl.maximum(n - 1 - r, 0)
            weight = tl.exp2(-slope * distance.to(tl.float32))[:, None]
            weighted = tl.trans((c.to(tl.float32) * weight).to(b.dtype))
            state *= tl.exp2(-slope * n.to(tl.float32))
            state = tl.dot(weighted, b, state, input_precision=PRECISION)
        state *= tl.exp2(-slope * (after_us * C).to(tl.float32))
        part = ((item.to(tl.int64) * shares + share) * heads + head) * KB * KC + place
        tl.store(PARTS + part, state, mask=inside)


@triton.jit
def _sum_of_parts(
    state, PARTS, shares, item, head, heads, place, inside, slope, first, length, TABLE, tokens,
    segments,
    SIZE: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Add to `state` what the items before this one hold of the document at its start."""
    begin, end = _item_bounds(item, TABLE, tokens, segments, C, PACKED)
    weight = tl.exp2(-slope * 0.0)
    if REVERSE:
        after = first + tl.maximum(tl.cdiv(length, C), 1)
        while (end < after) & (weight > FAINT):
            item += 1
            _, next_end = _item_bounds(item, TABLE, tokens, segments, C, PACKED)
            for share in range(shares):
                part = (item.to(tl.int64) * shares + share) * heads + head
                part = tl.load(PARTS + part * SIZE + place, mask=inside, other=0.0)
                state += weight * part
            tokens_of = tl.minimum(length, (next_end - first) * C) - (end - first) * C
            weight *= tl.exp2(-slope * tokens_of.to(tl.float32))
            end = next_end
    else:
        while (begin > first) & (weight > FAINT):
            item -= 1
            earlier, _ = _item_bounds(item, TABLE, tokens, segments, C, PACKED)
            for share in range(shares):
                part = (item.to(tl.int64) * shares + share) * heads + head
                part = tl.load(PARTS + part * SIZE + place, mask=inside, other=0.0)
                state += weight * part
            tokens_of = (begin - tl.maximum(earlier, first)) * C
            weight *= tl.exp2(-slope * tokens_of.to(tl.float32))
            begin = earlier
    return state


@triton.jit(do_not_specialize=["count", "documents"])
def sort_checkpoints(CHECKPOINTS, SORTED, FIRST, count, documents, BLOCK: tl.constexpr):
    """Checkpoints [3, count] (document, length, slot) in the order of document and length.

    SORTED [2, count]: lengths and slots; FIRST [documents + 1]: the first one of each document.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, is_document = own < count, own <= documents
    document = tl.load(CHECKPOINTS + own, mask=real, other=0)
    length = tl.load(CHECKPOINTS + count + own, mask=real, other=0)
    rank, first = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for m in range(count):
        other_document = tl.load(CHECKPOINTS + m)
        other_length = tl.load(CHECKPOINTS + count + m)
        earlier = (other_length < length) | ((other_length == length) & (m < own))
        before = (other_document < document) | ((other_document == document) & earlier)
        rank += before.to(tl.int32)
        first += (other_document < own).to(tl.int32)
    slot = tl.load(CHECKPOINTS + 2 * count + own, mask=real, other=0)
    tl.store(SORTED + rank, length, mask=real)
    tl.store(SORTED + count + rank, slot, mask=real)
    tl.store(FIRST + own, first, mask=is_document)


@triton.jit
def _next_length(SORTED, at, last):
    """Length of checkpoint `at`, if the document has it, or more than any."""
    return tl.load(SORTED + at, mask=at < last, other=2147483647)


@triton.jit(do_not_specialize=VARYING[2:])
def scan_kernel(
    A, B, C_, OUT, SLOPES, PARTS, ENTRY, ENTERING, LEAVING, SLOTS, KNOWN, SORTED, FIRST,
    OFFSETS, TABLE, tokens, segments, heads, shares, checkpoints,
    a_batch, a_token, a_head, b_batch, b_token, b_head,
    c_batch, c_token, c_head, o_batch, o_token, o_head,
    KB: tl.constexpr, KC: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr, C: tl.constexpr,
    REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
    ENTERS: tl.constexpr, LEAVES: tl.constexpr, POOL: tl.constexpr, CHECKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (KC + BC - 1) // BC
    pid = tl.program_id(0)
    block = pid % blocks
    head = pid // blocks % heads
    item = pid // blocks // heads
    begin, end = _item_bounds(item, TABLE, tokens, segments, C, PACKED)
    document, row, length, first = _item_document(
        item, OFFSETS, TABLE, tokens, segments, PACKED, REVERSE
    )
    if not PACKED:
        A += document.to(tl.int64) * a_batch
        B += document.to(tl.int64) * b_batch
        C_ += document.to(tl.int64) * c_batch
        OUT += document.to(tl.int64) * o_batch
    A += head.to(tl.int64) * a_head
    B += head.to(tl.int64) * b_head
    C_ += head.to(tl.int64) * c_head
    OUT += head.to(tl.int64) * o_head

    slope = tl.load(SLOPES + head).to(tl.float32) * LOG2E
    r = tl.arange(0, C)
    columns_b = tl.arange(0, BB)
    columns_c = block * BC + tl.arange(0, BC)
    has_b, has_c = (columns_b < KB)[None, :], (columns_c < KC)[None, :]
    if TRANSPOSED:
        place = columns_c[:, None] * KB + columns_b[None, :]
    else:
        place = columns_c[:, None] + columns_b[None, :] * KC
    inside = (columns_c < KC)[:, None] & has_b
    behind = (r[None, :] - r[:, None]) if REVERSE else (r[:, None] - r[None, :])
    decay = tl.exp2(-slope * tl.maximum(behind, 0).to(tl.float32))
    decay = tl.where(behind >= 0, decay, 0.0)

    left = end - begin  # chunks still to do
    while left > 0:
        chunks = tl.maximum(tl.cdiv(length, C), 1)
        # the part of this document in this item, [start, stop)
        start, stop = tl.maximum(begin, first), tl.minimum(end, first + chunks)
        whole = (start == first) & (stop == first + chunks)
        enters = (stop == first + chunks) if REVERSE else (start == first)
        leaves = (start == first) if REVERSE else (stop == first + chunks)
        slot, known = document, True
        if POOL:
            slot = tl.load(SLOTS + document)
            known = tl.load(KNOWN + document) != 0
        own = (slot.to(tl.int64) * heads + head) * KB * KC + place
        state = tl.zeros([BC, BB], tl.float32)
        if ENTERS:
            if whole:
                state = tl.load(ENTERING + own, mask=inside & known, other=0.0).to(tl.float32)
        if SPLIT:
            if not whole:
                if enters:
                    if ENTERS:
                        entry = (item.to(tl.int64) * heads + head) * KB * KC + place
                        state = tl.load(ENTRY + entry, mask=inside, other=0.0)
                else:
                    state = _sum_of_parts(
                        state, PARTS, shares, item, head, heads, place, inside, slope, first,
                        length,
                        TABLE, tokens, segments, KB * KC, C, REVERSE, PACKED,
                    )  # fmt: skip
        if CHECKED:
            at, last = tl.load(FIRST + document), tl.load(FIRST + document + 1)
            wanted = _next_length(SORTED, at, last)
            # an earlier item has written those up to its end
            while (start > first) & (wanted <= (start - first) * C):
                at += 1
                wanted = _next_length(SORTED, at, last)
        for step in tl.range(0, stop - start, num_stages=STAGES):
            i = ((stop - 1 - step) if REVERSE else (start + step)) - first
            n = tl.minimum(length - i * C, C)
            live = (r < n)[:, None]
            t = (row + i * C + r).to(tl.int64)[:, None]
            a = tl.load(A + t * a_token + columns_b[None, :], mask=live & has_b, other=0.0)
            b = tl.load(B + t * b_token + columns_b[None, :], mask=live & has_b, other=0.0)
            c = tl.load(C_ + t * c_token + columns_c[None, :], mask=live & has_c, other=0.0)
            from_start = tl.exp2(-slope * (r + 1).to(tl.float32))
            to_end = tl.exp2(-slope * tl.maximum(n - 1 - r, 0).to(tl.float32))
            scores = tl.dot(a, tl.trans(b), input_precision=PRECISION)
            out = tl.dot(a, tl.trans(state.to(a.dtype)), input_precision=PRECISION)
            out *= (to_end if REVERSE else from_start)[:, None]
            out = tl.dot((scores * decay).to(a.dtype), c, out, input_precision=PRECISION)
            summed = 0 * n  # rows of the chunk that the state holds
            if CHECKED:
                while wanted <= i * C + n:
                    count = wanted - i * C
                    upto = tl.exp2(-slope * tl.maximum(count - 1 - r, 0).to(tl.float32))
                    upto = tl.where((r >= summed) & (r < count), upto, 0.0)[:, None]
                    part = tl.trans((c.to(tl.float32) * upto).to(a.dtype))
                    state *= tl.exp2(-slope * (count - summed).to(tl.float32))
                    state = tl.dot(part, b, state, input_precision=PRECISION)
                    to = tl.load(SORTED + checkpoints + at).to(tl.int64)
                    tl.store(LEAVING + (to * heads + head) * KB * KC + place, state, mask=inside)
                    summed = count
                    at += 1
                    wanted = _next_length(SORTED, at, last)
            state *= tl.exp2(-slope * (n - summed).to(tl.float32))
            weight = from_start if REVERSE else to_end
            if CHECKED:
                weight = tl.where(r >= summed, weight, 0.0)
            weighted = tl.trans((c.to(tl.float32) * weight[:, None]).to(a.dtype))
            state = tl.dot(weighted, b, state, input_precision=PRECISION)
            tl.store(
                OUT + t * o_token + columns_c[None, :],
                out.to(OUT.dtype.element_ty),
                mask=live & has_c,
            )
        if LEAVES:
            if leaves:
                tl.store(LEAVING + own, state, mask=inside)
        left -= stop - start
        if PACKED:
            if left > 0:
                if REVERSE:
                    document -= 1
                else:
                    document += 1
                row = tl.load(OFFSETS + document)
                length = tl.minimum(tl.load(OFFSETS + document + 1), tokens) - row
                if REVERSE:
                    first -= tl.maximum(tl.cdiv(length, C), 1)
                else:
                    first += chunks
