"""Lightning attention for Hopper (sm_90) in Gluon, the kernels: the scan of `scans.py`.

A program takes one item and one head.  One warp loads tiles of a, b and c through TMA into a ring
of buffers; two warpgroups, each with half of c's columns, share them.  A warpgroup keeps its half
of the state, transposed, in registers in float32, and a copy in the inputs' type in shared memory
as operand of the tensor cores.  Per chunk of 64 tokens:

    scores = a b^T              out = decay * (a S) + (scores * mask) c
    S = lambda^n S + (weights * c)^T b

The loading warp goes on to the next document of the item while the math warps finish the last.
Rows of a tile beyond a document's end are zero: TMA fills them at the end of a batch's row, the
math warps where the next document of a pack follows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
FAINT = gl.constexpr(1e-9)  # an item whose weight is below this is not seen in float32


# Arguments that go together through several functions go as tuples:
#   work    item, head, heads, tokens, segments, OFFSETS, TABLE: which chunks a program does
#   tiles   a_tiles, b_tiles, c_tiles [BUFFERS, C, WIDTH], and the barriers full, empty [BUFFERS]
#   own     state_tile, out_tile, stage: a warpgroup's shared memory
#   output  out (descriptor), OUT, o_token
#   states  where they enter and leave: PARTS, shares, ENTRY, ENTERING, LEAVING, leaving
#           (descriptor), SLOTS, KNOWN, SORTED, FIRST, checkpoints
#   sizes   b_width, c_width, the strides of a state state_b, state_c, and leave, whether this
#           scan is the one whose states leave


@gluon.jit
def _bounds(work, item, C: gl.constexpr, PACKED: gl.constexpr):
    """First chunk of an item and the one after its last."""
    _, _, _, tokens, segments, _, TABLE = work
    if PACKED:
        begin = gl.load(TABLE + item * 6)
        end = gl.load(TABLE + item * 6 + 1)
    else:
        chunks = (tokens + C - 1) // C
        segment = item % segments
        begin = (segment * chunks.to(gl.int64) // segments).to(gl.int32)
        end = ((segment + 1) * chunks.to(gl.int64) // segments).to(gl.int32)
    return begin, end


@gluon.jit
def _document(work, PACKED: gl.constexpr, REVERSE: gl.constexpr):
    """The document an item enters first: number, first row, length, number of first chunk."""
    item, _, _, tokens, segments, OFFSETS, TABLE = work
    if PACKED:
        place = TABLE + item * 6 + (4 if REVERSE else 2)
        document = gl.load(place)
        first = gl.load(place + 1)
        row = gl.load(OFFSETS + document)
        length = gl.minimum(gl.load(OFFSETS + document + 1), tokens) - row
    else:
        document = item // segments
        first = item * 0
        row = item * 0
        length = tokens
    return document, row, length, first


@gluon.jit
def _chunks(length, C: gl.constexpr):
    return gl.maximum((length + C - 1) // C, 1)


@gluon.jit
def _next_document(work, document, length, first, C: gl.constexpr, REVERSE: gl.constexpr):
    """The one that the scan comes to next."""
    _, _, _, tokens, _, OFFSETS, _ = work
    if REVERSE:
        document -= 1
    else:
        first += _chunks(length, C)
        document += 1
    row = gl.load(OFFSETS + document)
    length = gl.minimum(gl.load(OFFSETS + document + 1), tokens) - row
    if REVERSE:
        first -= _chunks(length, C)
    return document, row, length, first


@gluon.jit
def _load_tiles(
    a, b, c, tiles, work,
    C: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The loading warp: every chunk of the item, in order, into the next free buffer."""
    a_tiles, b_tiles, c_tiles, full, empty = tiles
    begin, end = _bounds(work, work[0], C, PACKED)
    document, row, length, first = _document(work, PACKED, REVERSE)
    done = 0
    left = end - begin
    while left > 0:
        start, stop = gl.maximum(begin, first), gl.minimum(end, first + _chunks(length, C))
        for step in range(stop - start):
            if REVERSE:
                i = stop - 1 - step - first
            else:
                i = start + step - first
            buffer = done % BUFFERS
            mbarrier.wait(empty.index(buffer), ((done // BUFFERS) & 1) ^ 1)
            ready = full.index(buffer)
            mbarrier.expect(ready, 3 * C * WIDTH * 2)
            place = [row + i * C, 0]
            tma.async_copy_global_to_shared(a, place, ready, a_tiles.index(buffer))
            tma.async_copy_global_to_shared(b, place, ready, b_tiles.index(buffer))
            tma.async_copy_global_to_shared(c, place, ready, c_tiles.index(buffer))
            done += 1
        left -= stop - start
        if PACKED:
            if left > 0:
                document, row, length, first = _next_document(
                    work, document, length, first, C, REVERSE
                )


@gluon.jit
def _zero_tail(tile, n, layout: gl.constexpr, C: gl.constexpr):
    """Rows n and after of a tile become zero."""
    x = tile.load(layout)
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, layout))
    tile.store(gl.where(gl.expand_dims(rows, 1) < n, x, 0.0).to(x.dtype))


@gluon.jit
def _sum_of_parts(
    state, work, PARTS, shares, size, place, inside, slope, first, length,
    C: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Add to `state` what the items before this one hold of the document at its start."""
    item, head, heads = work[0], work[1], work[2]
    begin, end = _bounds(work, item, C, PACKED)
    weight = gl.exp2(-slope * 0.0)
    if REVERSE:
        after = first + _chunks(length, C)
        while (end < after) & (weight > FAINT):
            item += 1
            _, next_end = _bounds(work, item, C, PACKED)
            for share in range(shares):
                part = (item.to(gl.int64) * shares + share) * heads + head
                part = gl.load(PARTS + part * size + place, mask=inside, other=0.0)
                state += weight * part
            passed = gl.minimum(length, (next_end - first) * C) - (end - first) * C
            weight *= gl.exp2(-slope * passed.to(gl.float32))
            end = next_end
    else:
        while (begin > first) & (weight > FAINT):
            item -= 1
            earlier, _ = _bounds(work, item, C, PACKED)
            for share in range(shares):
                part = (item.to(gl.int64) * shares + share) * heads + head
                part = gl.load(PARTS + part * size + place, mask=inside, other=0.0)
                state += weight * part
            passed = (begin - gl.maximum(earlier, first)) * C
            weight *= gl.exp2(-slope * passed.to(gl.float32))
            begin = earlier
    return state


@gluon.jit
def _next_length(SORTED, at, last):
    """Length of checkpoint `at`, if the document has it, or -1."""
    return gl.load(SORTED + at, mask=at < last, other=-1)


@gluon.jit
def _chunk_of(length, chunks, C: gl.constexpr):
    """The chunk of a document in which a checkpoint lies: at its start, if it can be.

    For -1, none, a chunk after all.
    """
    return gl.where(length < 0, 2147483647, gl.minimum(length // C, chunks - 1))


@gluon.jit
def _hidden(x):
    """The same numbers, computed where they are needed.

    The compiler would compute what follows from them once, at the top, and keep it in registers
    through code that needs them all; there they spill, and every chunk reads them from memory.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _places(half: gl.constexpr, sizes, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Where the warpgroup's half of a state lies in memory, and which of it exists."""
    COLUMNS: gl.constexpr = WIDTH // 2
    b_width, c_width, state_b, state_c, _ = sizes
    c = half * COLUMNS + _hidden(gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout)))
    b = _hidden(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)))
    c, b = gl.expand_dims(c, 1), gl.expand_dims(b, 0)
    return c * state_c + b * state_b, (c < c_width) & (b < b_width)


@gluon.jit
def _run(
    state, done, start, stop, first, row, length, slope,
    half: gl.constexpr, tiles, own, output, c_width,
    C: gl.constexpr, WIDTH: gl.constexpr, BUFFERS: gl.constexpr,
    REVERSE: gl.constexpr, PACKED: gl.constexpr, LEAVES: gl.constexpr,
):  # fmt: skip
    """Chunks [start, stop) of a document: their outputs, and the state after them.

    `done` counts the chunks of the program.
    """
    a_tiles, b_tiles, c_tiles, full, empty = tiles
    state_tile, out_tile, _ = own
    out, OUT, o_token = output
    COLUMNS: gl.constexpr = WIDTH // 2
    DTYPE: gl.constexpr = a_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    scores_operand: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    c_operand: gl.constexpr = gl.DotOperandLayout(0, state.type.layout, 2)
    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row_i = _hidden(gl.arange(0, C, layout=gl.SliceLayout(1, scores_layout)))
    column_j = gl.arange(0, C, layout=gl.SliceLayout(0, scores_layout))
    behind = gl.expand_dims(row_i, 1) - gl.expand_dims(column_j, 0)
    row_c = _hidden(gl.arange(0, C, layout=gl.SliceLayout(0, c_operand)))
    if REVERSE:
        behind = -behind
        weights = gl.exp2(-slope * (row_c + 1).to(gl.float32))
    else:
        weights = gl.exp2(-slope * (C - 1 - row_c).to(gl.float32))
    mask = gl.exp2(-slope * gl.maximum(behind, 0).to(gl.float32))
    mask = gl.where(behind >= 0, mask, 0.0)
    row_o = _hidden(gl.arange(0, C, layout=gl.SliceLayout(1, out_layout)))
    from_start = gl.exp2(-slope * (row_o + 1).to(gl.float32))
    no_scores = gl.zeros([C, C], gl.float32, scores_layout)
    no_out = gl.zeros([C, COLUMNS], gl.float32, out_layout)
    for step in range(stop - start):
        if REVERSE:
            i = stop - 1 - step - first
        else:
            i = start + step - first
        n = gl.minimum(length - i * C, C)
        t = row + i * C
        buffer = done % BUFFERS
        a = a_tiles.index(buffer)
        b = b_tiles.index(buffer)
        c = c_tiles.index(buffer).slice(half * COLUMNS, COLUMNS, dim=1)
        mbarrier.wait(full.index(buffer), (done // BUFFERS) & 1)
        if PACKED:
            if n < C:
                # both warpgroups write the same to b
                _zero_tail(b, n, rows_layout, C)
                _zero_tail(c, n, rows_layout, C)
                fence_async_shared()
                gl.thread_barrier()
        scores = warpgroup_mma(a, b.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        o = warpgroup_mma(a, state_tile.permute((1, 0)), no_out, use_acc=False, is_async=True)
        w = weights
        if LEAVES:
            if not REVERSE:
                if n < C:
                    w = gl.exp2(-slope * gl.maximum(n - 1 - row_c, 0).to(gl.float32))
        c_t = c.permute((1, 0)).load(c_operand)
        weighted = (c_t.to(gl.float32) * gl.expand_dims(w, 0)).to(DTYPE)
        scores = warpgroup_mma_wait(1, deps=[scores])
        p = gl.convert_layout((scores * mask).to(DTYPE), scores_operand)
        o = warpgroup_mma_wait(0, deps=[o])
        if REVERSE:
            scale = gl.exp2(-slope * gl.maximum(n - 1 - row_o, 0).to(gl.float32))
        else:
            scale = from_start
        o = warpgroup_mma(p, c, o * gl.expand_dims(scale, 1), is_async=True)
        decay = gl.exp2(-slope * n.to(gl.float32))
        state = warpgroup_mma(weighted, b, state * decay, is_async=True)
        o = warpgroup_mma_wait(1, deps=[o])
        tma.store_wait(0)
        out_tile.store(o.to(DTYPE))
        if PACKED:
            if n < C:
                gl.thread_barrier()
                kept = out_tile.load(rows_layout)
                rows = gl.arange(0, C, layout=gl.SliceLayout(1, rows_layout))
                columns = half * COLUMNS + gl.arange(
                    0, COLUMNS, layout=gl.SliceLayout(0, rows_layout)
                )
                to = gl.expand_dims((t + rows).to(gl.int64) * o_token, 1)
                to += gl.expand_dims(columns, 0)
                here = gl.expand_dims(rows < n, 1) & gl.expand_dims(columns < c_width, 0)
                gl.store(OUT + to, kept, mask=here)
            else:
                fence_async_shared()
                tma.async_copy_shared_to_global(out, [t, half * COLUMNS], out_tile)
        else:
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [t, half * COLUMNS], out_tile)
        state = warpgroup_mma_wait(0, deps=[state])
        state_tile.store(state.to(DTYPE))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(empty.index(buffer), count=1)
        done += 1
    return state, done


@gluon.jit
def _state_inside(
    state, count, n, half: gl.constexpr, done, tiles, slope,
    C: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """The state after the first `count` of the n rows of the chunk that comes next."""
    _, b_tiles, c_tiles, full, _ = tiles
    COLUMNS: gl.constexpr = state.shape[0]
    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    c_operand: gl.constexpr = gl.DotOperandLayout(0, state.type.layout, 2)
    if count > 0:
        buffer = done % BUFFERS
        b = b_tiles.index(buffer)
        c = c_tiles.index(buffer).slice(half * COLUMNS, COLUMNS, dim=1)
        mbarrier.wait(full.index(buffer), (done // BUFFERS) & 1)
        if n < C:
            _zero_tail(b, n, rows_layout, C)
            _zero_tail(c, n, rows_layout, C)
            fence_async_shared()
            gl.thread_barrier()
        row_c = _hidden(gl.arange(0, C, layout=gl.SliceLayout(0, c_operand)))
        weights = gl.exp2(-slope * gl.maximum(count - 1 - row_c, 0).to(gl.float32))
        weights = gl.expand_dims(gl.where(row_c < count, weights, 0.0), 0)
        weighted = (c.permute((1, 0)).load(c_operand).to(gl.float32) * weights).to(b.dtype)
        state = warpgroup_mma(
            weighted, b, state * gl.exp2(-slope * count.to(gl.float32)), is_async=True
        )
        state = warpgroup_mma_wait(0, deps=[state])
    return state


@gluon.jit
def _store_state(
    state, half: gl.constexpr, place, stage, states, sizes,
    WIDTH: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """Write half of a state to its place among all, by TMA if STAGED: the warps go on meanwhile."""
    LEAVING, leaving = states[4], states[5]
    if STAGED:
        tma.store_wait(0)
        stage.permute((1, 0)).store(state)
        fence_async_shared()
        tma.async_copy_shared_to_global(leaving, [place * WIDTH, half * (WIDTH // 2)], stage)
    else:
        to, inside = _places(half, sizes, WIDTH, state.type.layout)
        start = place.to(gl.int64) * (sizes[0] * sizes[1])
        gl.store(LEAVING + start + to, state, mask=inside)


@gluon.jit
def _math(
    half: gl.constexpr, tiles, own, output, states, sizes, SLOPES, work,
    C: gl.constexpr, WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr,
    ENTERS: gl.constexpr, LEAVES: gl.constexpr, POOL: gl.constexpr, CHECKED: gl.constexpr,
    STAGED: gl.constexpr,
):  # fmt: skip
    """A warpgroup: `half` of c's columns, over all chunks of the item, document by document."""
    item, head, heads = work[0], work[1], work[2]
    PARTS, shares, ENTRY, ENTERING, _, _, SLOTS, KNOWN, SORTED, FIRST, checkpoints = states
    b_width, c_width, _, _, leave = sizes
    state_tile, _, stage = own
    COLUMNS: gl.constexpr = WIDTH // 2
    DTYPE: gl.constexpr = state_tile.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    slope = gl.load(SLOPES + head).to(gl.float32) * LOG2E
    size = b_width * c_width

    begin, end = _bounds(work, item, C, PACKED)
    document, row, length, first = _document(work, PACKED, REVERSE)
    done = 0
    left = end - begin
    while left > 0:
        chunks = _chunks(length, C)
        # the part of this document in this item, [start, stop)
        start, stop = gl.maximum(begin, first), gl.minimum(end, first + chunks)
        whole = (start == first) & (stop == first + chunks)
        if REVERSE:
            enters = stop == first + chunks
            leaves = start == first
        else:
            enters = start == first
            leaves = stop == first + chunks
        slot = document
        known = document >= 0
        if POOL:
            slot = gl.load(SLOTS + document)
            known = gl.load(KNOWN + document) != 0
        state = gl.zeros([COLUMNS, WIDTH], gl.float32, layout)
        if ENTERS:
            if whole:
                place, inside = _places(half, sizes, WIDTH, layout)
                from_ = ENTERING + (slot.to(gl.int64) * heads + head) * size
                state = gl.load(from_ + place, mask=inside & known, other=0.0)
        if SPLIT:
            if whole == 0:
                place, inside = _places(half, sizes, WIDTH, layout)
                if enters:
                    if ENTERS:
                        from_ = ENTRY + (item.to(gl.int64) * heads + head) * size
                        state = gl.load(from_ + place, mask=inside, other=0.0)
                else:
                    state = _sum_of_parts(
                        state, work, PARTS, shares, size, place, inside, slope, first, length,
                        C, REVERSE, PACKED,
                    )  # fmt: skip
        state_tile.store(state.to(DTYPE))
        fence_async_shared()
        gl.thread_barrier()
        if CHECKED:
            at = gl.load(FIRST + document)
            last = gl.load(FIRST + document + 1)
            wanted = _next_length(SORTED, at, last)
            # earlier items have written those that lie in their chunks
            while _chunk_of(wanted, chunks, C) < start - first:
                at += 1
                wanted = _next_length(SORTED, at, last)
            lo = start
            while lo < stop:  # from the chunk of one checkpoint to that of the next
                i = lo - first
                n = gl.minimum(length - i * C, C)
                while _chunk_of(wanted, chunks, C) <= i:
                    copy = _state_inside(
                        state, wanted - i * C, n, half, done, tiles, slope, C, BUFFERS
                    )
                    to = gl.load(SORTED + checkpoints + at) * heads + head
                    _store_state(copy, half, to, stage, states, sizes, WIDTH, STAGED)
                    at += 1
                    wanted = _next_length(SORTED, at, last)
                hi = gl.minimum(stop - first, _chunk_of(wanted, chunks, C)) + first
                hi = gl.maximum(hi, lo + 1)
                state, done = _run(
                    state, done, lo, hi, first, row, length, slope,
                    half, tiles, own, output, c_width, C, WIDTH, BUFFERS, REVERSE, PACKED, LEAVES,
                )  # fmt: skip
                lo = hi
        else:
            state, done = _run(
                state, done, start, stop, first, row, length, slope,
                half, tiles, own, output, c_width, C, WIDTH, BUFFERS, REVERSE, PACKED, LEAVES,
            )  # fmt: skip
        if LEAVES:
            if leaves & (leave != 0):
                to = slot * heads + head
                _store_state(state, half, to, stage, states, sizes, WIDTH, STAGED)
        left -= stop - start
        if PACKED:
            if left > 0:
                document, row, length, first = _next_document(
                    work, document, length, first, C, REVERSE
                )
    tma.store_wait(0)


AXES = ("batch", "token", "head")
STRIDES = [f"{x}_{of}" for x in "abco" for of in AXES]


@gluon.jit(do_not_specialize=["tokens", "segments", "heads", "shares", "checkpoints", *STRIDES])
def scan_kernel(
    A, B, C_, OUT, SLOPES, PARTS, ENTRY, ENTERING, LEAVING, SLOTS, KNOWN, SORTED, FIRST,
    OFFSETS, TABLE, tokens, segments, heads, shares, checkpoints,
    a_batch, a_token, a_head, b_batch, b_token, b_head,
    c_batch, c_token, c_head, o_batch, o_token, o_head,
    KB: gl.constexpr, KC: gl.constexpr, C: gl.constexpr, WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr, REVERSE: gl.constexpr, TRANSPOSED: gl.constexpr,
    PACKED: gl.constexpr, SPLIT: gl.constexpr, ENTERS: gl.constexpr, LEAVES: gl.constexpr,
    POOL: gl.constexpr, CHECKED: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """One scan: a program for each item and head."""
    pid = gl.program_id(0)
    sizes = (KB, KC, 1, KB, 1) if TRANSPOSED else (KB, KC, KC, 1, 1)
    _program(
        pid, A, B, C_, OUT, SLOPES, PARTS, shares, ENTRY, ENTERING, LEAVING,
        SLOTS, KNOWN, SORTED, FIRST, checkpoints, OFFSETS, TABLE, tokens, segments, heads,
        (a_batch, a_token, a_head), (b_batch, b_token, b_head),
        (c_batch, c_token, c_head), (o_batch, o_token, o_head), sizes,
        C, WIDTH, BUFFERS, REVERSE, PACKED, SPLIT, ENTERS, LEAVES, POOL, CHECKED, STAGED,
    )  # fmt: skip


@gluon.jit
def _begin(X, strides, document, head):
    """Where a head of a batch's row begins (of a pack: document 0)."""
    return X + document * strides[0] + head.to(gl.int64) * strides[2]


@gluon.jit
def _program(
    pid, A, B, C_, OUT, SLOPES, PARTS, shares, ENTRY, ENTERING, LEAVING,
    SLOTS, KNOWN, SORTED, FIRST, checkpoints, OFFSETS, TABLE, tokens, segments, heads,
    a_strides, b_strides, c_strides, o_strides, sizes,
    C: gl.constexpr, WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr, REVERSE: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr,
    ENTERS: gl.constexpr, LEAVES: gl.constexpr, POOL: gl.constexpr, CHECKED: gl.constexpr,
    STAGED: gl.constexpr,
):  # fmt: skip
    """Shared memory, descriptors and barriers of a program, and its three roles."""
    DTYPE: gl.constexpr = A.dtype.element_ty
    COLUMNS: gl.constexpr = WIDTH // 2
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    b_width, c_width = sizes[0], sizes[1]
    head = pid % heads
    item = pid // heads
    document = (item * 0).to(gl.int64)
    if not PACKED:
        document = (item // segments).to(gl.int64)
    A = _begin(A, a_strides, document, head)
    B = _begin(B, b_strides, document, head)
    C_ = _begin(C_, c_strides, document, head)
    OUT = _begin(OUT, o_strides, document, head)
    block: gl.constexpr = [C, WIDTH]
    a = tma.make_tensor_descriptor(A, [tokens, b_width], [a_strides[1], 1], block, layout)
    b = tma.make_tensor_descriptor(B, [tokens, b_width], [b_strides[1], 1], block, layout)
    c = tma.make_tensor_descriptor(C_, [tokens, c_width], [c_strides[1], 1], block, layout)
    out = tma.make_tensor_descriptor(
        OUT, [tokens, c_width], [o_strides[1], 1], [C, COLUMNS], layout
    )
    a_tiles = gl.allocate_shared_memory(DTYPE, [BUFFERS, C, WIDTH], layout)
    b_tiles = gl.allocate_shared_memory(DTYPE, [BUFFERS, C, WIDTH], layout)
    c_tiles = gl.allocate_shared_memory(DTYPE, [BUFFERS, C, WIDTH], layout)
    state_tiles = gl.allocate_shared_memory(DTYPE, [2, COLUMNS, WIDTH], layout)
    out_tiles = gl.allocate_shared_memory(DTYPE, [2, C, COLUMNS], layout)
    if STAGED:
        state_shared: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        leaving = tma.make_tensor_descriptor(
            LEAVING, [0x7FFFFFFF, c_width], [c_width, 1], [WIDTH, COLUMNS], state_shared
        )
        stages = gl.allocate_shared_memory(gl.float32, [2, WIDTH, COLUMNS], state_shared)
    else:
        leaving, stages = out, out_tiles
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()
    work = (item, head, heads, tokens, segments, OFFSETS, TABLE)
    tiles = (a_tiles, b_tiles, c_tiles, full, empty)
    output = (out, OUT, o_strides[1])
    states = (
        PARTS, shares, ENTRY, ENTERING, LEAVING, leaving, SLOTS, KNOWN, SORTED, FIRST, checkpoints
    )  # fmt: skip
    own_0 = (state_tiles.index(0), out_tiles.index(0), stages.index(0))
    own_1 = (state_tiles.index(1), out_tiles.index(1), stages.index(1))
    gl.warp_specialize(
        [
            (_math, (
                0, tiles, own_0, output, states, sizes, SLOPES, work,
                C, WIDTH, BUFFERS, REVERSE, PACKED, SPLIT, ENTERS, LEAVES, POOL, CHECKED, STAGED,
            )),
            (_math, (
                1, tiles, own_1, output, states, sizes, SLOPES, work,
                C, WIDTH, BUFFERS, REVERSE, PACKED, SPLIT, ENTERS, LEAVES, POOL, CHECKED, STAGED,
            )),
            (_load_tiles, (
                a, b, c, tiles, work, C, WIDTH, BUFFERS, REVERSE, PACKED,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


BACK_STRIDES = [f"{x}_{of}" for x in ("q", "k", "v", "do", "dk", "dv") for of in AXES]


@gluon.jit(do_not_specialize=["tokens", "segments", "heads", "shares", *BACK_STRIDES])
def scan_back_kernel(
    Q, K, V, DO, DK, DV, SLOPES, PARTS, ENTRY, ENTERING, LEAVING, OFFSETS, TABLE,
    tokens, segments, heads, shares, q_batch, q_token, q_head, k_batch, k_token, k_head,
    v_batch, v_token, v_head, do_batch, do_token, do_head,
    dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head,
    K_WIDTH: gl.constexpr, V_WIDTH: gl.constexpr, C: gl.constexpr, WIDTH: gl.constexpr,
    BUFFERS: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr,
    ENTERS: gl.constexpr, LEAVES: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """dv (even programs) and dk (odd ones) side by side, so that they share q and do in L2."""
    pid = gl.program_id(0)
    of_v = pid % 2 == 0
    A, B, C_, OUT = V, DO, Q, DK
    a_batch, a_token, a_head = v_batch, v_token, v_head
    b_batch, b_token, b_head = do_batch, do_token, do_head
    c_batch, c_token, c_head = q_batch, q_token, q_head
    o_batch, o_token, o_head = dk_batch, dk_token, dk_head
    if of_v:
        A, B, C_, OUT = K, Q, DO, DV
        a_batch, a_token, a_head = k_batch, k_token, k_head
        b_batch, b_token, b_head = q_batch, q_token, q_head
        c_batch, c_token, c_head = do_batch, do_token, do_head
        o_batch, o_token, o_head = dv_batch, dv_token, dv_head
    sizes = (
        gl.where(of_v, K_WIDTH, V_WIDTH), gl.where(of_v, V_WIDTH, K_WIDTH),
        gl.where(of_v, V_WIDTH, 1), gl.where(of_v, 1, V_WIDTH), of_v.to(gl.int32),
    )  # fmt: skip
    _program(
        pid // 2, A, B, C_, OUT, SLOPES, PARTS, shares, ENTRY, ENTERING, LEAVING,
        OFFSETS, OFFSETS, OFFSETS, OFFSETS, 0, OFFSETS, TABLE, tokens, segments, heads,
        (a_batch, a_token, a_head), (b_batch, b_token, b_head),
        (c_batch, c_token, c_head), (o_batch, o_token, o_head), sizes,
        C, WIDTH, BUFFERS, True, PACKED, SPLIT, ENTERS, LEAVES, False, False, STAGED,
    )  # fmt: skip
