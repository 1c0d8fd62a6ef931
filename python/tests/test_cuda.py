# SPDX-License-Identifier: Apache-2.0
"""The prefill on a Hopper GPU through PyTorch (and CuPy, where it is): against PyTorch's attention, on its streams, in
its graphs. Skipped where there is no such GPU, no CUDA in the build, or no PyTorch.

Without a network, on a machine with CUDA: python -m pip install --no-deps --no-index tilesieve-*.whl, then
python -m pytest python/tests -m cuda.
"""

from __future__ import annotations

from typing import Any

import pytest

import tilesieve

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
_kernels = [kernel for kernel in tilesieve.kernels() if kernel.device == "cuda"]
if not torch.cuda.is_available():
    _why_not = "PyTorch sees no CUDA device"
elif not _kernels:
    _why_not = "this build of tilesieve has no CUDA kernels"
else:
    _why_not = _kernels[0].why_not
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(_why_not), reason=_why_not)]

BLOCK = 128


def ids_of(q_lens: list[int], kv_lens: list[int], num_kv_heads: int, top_k: int) -> Any:
    """Random ids, some of them out of range, -1, and twice; each token's own block is among them."""
    total_q = sum(q_lens)
    ids = torch.randint(-1, max(2, max(kv_lens) // BLOCK + 2), (num_kv_heads, total_q, top_k), dtype=torch.int32)
    token = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        for i in range(q_len):
            ids[:, token, -1] = (kv_len - q_len + i) // BLOCK
            token += 1
    return ids.cuda()


class Call:
    """A batch on the GPU."""

    def __init__(self, dtype: Any = torch.bfloat16, head_dim: int = 128, group: int = 16, num_kv_heads: int = 2,
                 q_lens: tuple[int, ...] = (200, 0, 65), kv_lens: tuple[int, ...] = (200, 40, 1500),
                 top_k: int = 4) -> None:
        torch.manual_seed(1)
        self.q_lens, self.kv_lens, self.group = list(q_lens), list(kv_lens), group
        total_q, total_kv = sum(q_lens), sum(kv_lens)

        def random(tokens: int, heads: int) -> Any:
            return torch.randn(tokens, heads, head_dim, device="cuda").to(dtype)

        self.q = random(total_q, num_kv_heads * group)
        self.k, self.v = random(total_kv, num_kv_heads), random(total_kv, num_kv_heads)
        self.ids = ids_of(self.q_lens, self.kv_lens, num_kv_heads, top_k)
        self.lengths: dict[str, Any] = {
            "cu_seqlens_q": torch.tensor([0, *q_lens]).cumsum(0).int().cuda(),
            "cu_seqlens_kv": torch.tensor([0, *kv_lens]).cumsum(0).int().cuda()}

    def run(self, **options: Any) -> Any:
        return tilesieve.attend(self.q, self.k, self.v, self.ids, **(self.lengths | options))

    def prefill(self, **options: Any) -> Any:
        return tilesieve.sparse_prefill(self.q, self.k, self.v, **(self.lengths | options))

    def workspace_bytes(self, **options: Any) -> int:
        return tilesieve.workspace_bytes(self.q, self.k, self.v, self.ids, **self.lengths, **options)

    def index(self, dtype: Any = torch.bfloat16) -> dict[str, Any]:
        """Tensors of the index branch, of numbers so small that scores are exact and the choice is the CPU's."""
        return {name: torch.randint(-2, 3, shape, device="cuda").to(dtype)
                for name, shape in (("index_q", (self.q.shape[0], self.k.shape[1], 128)),
                                    ("index_k", (self.k.shape[0], 128)))}

    def paged(self, packed: Any) -> tuple[Any, dict[str, Any]]:
        """A tensor of keys as pages in any order, with NaN where there is no key, and the lengths that go with them."""
        counts = [-(-length // BLOCK) for length in self.kv_lens]
        table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        cache = torch.full((sum(counts) + 2, BLOCK, *packed.shape[1:]), torch.nan, device="cuda").to(packed.dtype)
        torch.manual_seed(2)
        pages, begin, used = torch.randperm(len(cache)), 0, 0
        for row, (count, length) in enumerate(zip(counts, self.kv_lens, strict=True)):
            for b in range(count):
                table[row, b], used = int(pages[used]), used + 1
                tokens = slice(begin + b * BLOCK, begin + min(length, (b + 1) * BLOCK))
                cache[table[row, b], : tokens.stop - tokens.start] = packed[tokens]
            begin += length
        return cache, {"cu_seqlens_q": self.lengths["cu_seqlens_q"], "block_table": table.cuda(),
                       "kv_lens": torch.tensor(self.kv_lens, dtype=torch.int32).cuda()}

    def want(self) -> tuple[Any, Any]:
        """o and lse in f64, by PyTorch's arithmetic over a mask."""
        os, lses = [], []
        q_begin = kv_begin = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            q = self.q[q_begin : q_begin + q_len].double().transpose(0, 1)
            k, v = (x[kv_begin : kv_begin + kv_len].double().transpose(0, 1).repeat_interleave(self.group, 0)
                    for x in (self.k, self.v))
            keys = torch.arange(kv_len, device="cuda")
            picked = torch.ones((self.k.shape[1], q_len, kv_len), dtype=torch.bool, device="cuda")
            if self.ids is not None:
                picked = (self.ids[:, q_begin : q_begin + q_len, :, None] == keys // BLOCK).any(2)
            visible = keys <= torch.arange(q_len, device="cuda")[:, None] + kv_len - q_len
            scores = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
            scores = scores.masked_fill(~(picked & visible).repeat_interleave(self.group, 0), -torch.inf)
            os.append((scores.softmax(2).nan_to_num() @ v).transpose(0, 1))
            lses.append(scores.logsumexp(2).transpose(0, 1))
            q_begin, kv_begin = q_begin + q_len, kv_begin + kv_len
        return torch.cat(os), torch.cat(lses)


def assert_close(got: Any, want: Any, tolerance: float, lse_tolerance: float) -> None:
    assert got[0].isfinite().all()
    torch.testing.assert_close(got[0].double(), want[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(got[1].double(), want[1], atol=lse_tolerance, rtol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize(("dtype", "tolerance", "lse_tolerance"), [(torch.bfloat16, 2e-2, 1e-3),
                                                                   (torch.float8_e4m3fn, 0.2, 2e-2)])
def test_matches_torch(dtype: Any, tolerance: float, lse_tolerance: float, group: int, head_dim: int) -> None:
    call = Call(dtype, head_dim, group)
    want = call.want()
    for loop_order in ("auto", "q_outer", "kv_outer"):
        o, lse = call.run(return_lse=True, loop_order=loop_order)
        assert o.dtype == torch.bfloat16 and o.is_cuda and lse.dtype == torch.float32
        assert_close((o, lse), want, tolerance, lse_tolerance)


def test_without_ids_all_keys_are_attended_to() -> None:
    call = Call()
    call.ids = None
    assert_close(call.run(return_lse=True), call.want(), 2e-2, 1e-3)
    workspace = torch.empty(call.workspace_bytes(), dtype=torch.uint8, device="cuda")
    assert torch.equal(call.run(workspace=workspace), call.run())
    with pytest.raises(ValueError, match=r"^loop_order: got 'kv_outer' without a block_index"):
        call.run(loop_order="kv_outer")


def test_tile_tokens_change_no_bit() -> None:
    call = Call()
    want = call.run(loop_order="q_outer")
    for tile_tokens in (1, 2, 4):  # 4 tokens of 16 heads are 64 rows
        assert torch.equal(call.run(loop_order="q_outer", tile_tokens=tile_tokens), want)
    with pytest.raises(ValueError, match=r"^tile_tokens: got 5, expected 0 to 4"):
        call.run(tile_tokens=5)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"kv_block_size": 64}, {"local_blocks": 0},
                                     {"local_blocks": 2, "init_blocks": 1}, {"top_k": 32}, {"router": "index"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_route_chooses_as_the_cpu(dtype: Any, options: dict[str, Any]) -> None:
    call = Call()
    index = call.index(dtype)
    options = {"top_k": 4} | options
    got = tilesieve.route(**index, **call.lengths, **options)
    want = tilesieve.route(**{name: tensor.cpu() for name, tensor in (index | call.lengths).items()}, **options)
    assert got.is_cuda and got.dtype == torch.int32 and torch.equal(got.cpu(), want)
    assert torch.equal(tilesieve.route(call.q, call.k, **index, **call.lengths, **options), got)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"kv_block_size": 64}, {"local_blocks": 0}, {"top_k": 32},
                                     {"init_blocks": 2}])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("router", ["qk_max", "mean_pool"])
def test_route_by_queries_and_keys_chooses_as_the_cpu(router: Any, dtype: Any, head_dim: int,
                                                      options: dict[str, Any]) -> None:
    call = Call(dtype, head_dim, group=4)
    call.q = torch.randint(-2, 3, call.q.shape, device="cuda").bfloat16()  # bf16 queries, whatever the keys are
    call.k = torch.randint(-2, 3, call.k.shape, device="cuda").to(dtype)
    if router == "mean_pool":  # means of any part of a block are exact where its keys are equal
        for begin, length in zip(call.lengths["cu_seqlens_kv"].tolist(), call.kv_lens, strict=False):
            keys = call.k[begin : begin + length]
            keys.copy_(keys[torch.arange(length, device="cuda") // 64 * 64] if options.get("kv_block_size") == 64
                       else keys[torch.arange(length, device="cuda") // BLOCK * BLOCK])
    options = {"top_k": 4, "router": router} | options
    got = tilesieve.route(call.q, call.k, **call.lengths, **options)
    want = tilesieve.route(call.q.cpu(), call.k.cpu(), **{name: tensor.cpu() for name, tensor in call.lengths.items()},
                           **options)
    assert got.is_cuda and got.dtype == torch.int32 and torch.equal(got.cpu(), want)
    if router == "qk_max":  # what is taken where there are no index tensors
        assert torch.equal(tilesieve.route(call.q, call.k, **call.lengths, **(options | {"router": None})), got)


@pytest.mark.parametrize("router", ["qk_max", "mean_pool"])
def test_route_by_queries_and_keys_takes_pages_and_graphs(router: Any) -> None:
    call = Call(q_lens=(200, 65), kv_lens=(200, 1500))
    want = tilesieve.route(call.q, call.k, router=router, top_k=3, **call.lengths)
    pages, lengths = call.paged(call.k)
    assert torch.equal(tilesieve.route(call.q, pages, router=router, top_k=3, **lengths), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = tilesieve.route(call.q, pages, router=router, top_k=3, **lengths)
    call.q.copy_(torch.randn_like(call.q))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(ids, tilesieve.route(call.q, call.k, router=router, top_k=3, **call.lengths))


@pytest.mark.parametrize("router", ["qk_max", "mean_pool"])
def test_sparse_prefill_by_queries_and_keys_attends_to_what_route_chooses(router: Any) -> None:
    call = Call(top_k=3)
    options = {"top_k": 3, "init_blocks": 1, "router": router}
    call.ids = tilesieve.route(call.q, call.k, **call.lengths, **options)
    want = call.run(loop_order="q_outer")
    call.ids = None
    workspace = torch.empty(call.workspace_bytes(router=router, top_k=3, loop_order="q_outer"), dtype=torch.uint8,
                            device="cuda")
    assert torch.equal(call.prefill(loop_order="q_outer", workspace=workspace, **options), want)


def test_route_takes_pages_and_one_sequence() -> None:
    call = Call(q_lens=(200, 65), kv_lens=(200, 1500))
    index = call.index()
    want = tilesieve.route(top_k=3, **index, **call.lengths)
    pages, lengths = call.paged(index["index_k"])
    assert torch.equal(tilesieve.route(top_k=3, index_q=index["index_q"], index_k=pages, **lengths), want)
    call = Call(q_lens=(200,), kv_lens=(1500,))
    index = call.index()
    assert torch.equal(tilesieve.route(top_k=3, **index), tilesieve.route(top_k=3, **index, **call.lengths))


@pytest.mark.parametrize("loop_order", ["q_outer", "kv_outer"])
def test_sparse_prefill_attends_to_what_route_chooses(loop_order: str) -> None:
    call = Call(top_k=3)
    index = call.index()
    options = {"top_k": 3, "local_blocks": 1, "init_blocks": 1}
    call.ids = tilesieve.route(**index, **call.lengths, **options)
    o, lse = call.prefill(return_lse=True, loop_order=loop_order, **index, **options)
    want, want_lse = call.run(return_lse=True, loop_order=loop_order)
    assert torch.equal(o, want) and torch.equal(lse, want_lse)
    assert_close((o, lse), call.want(), 2e-2, 1e-3)


def test_sparse_prefill_takes_pages() -> None:
    call = Call(q_lens=(200, 65), kv_lens=(200, 1500))
    index = call.index()
    want = call.prefill(loop_order="q_outer", top_k=3, **index)
    (call.k, lengths), (call.v, _), (pages, _) = (call.paged(x) for x in (call.k, call.v, index["index_k"]))
    call.lengths = lengths
    got = call.prefill(loop_order="q_outer", top_k=3, index_q=index["index_q"], index_k=pages)
    assert torch.equal(got, want)


def test_sparse_prefill_of_few_keys_is_dense() -> None:
    call = Call(kv_lens=(1000, 40, 1500))
    index = call.index()
    call.ids = None
    dense = call.run()
    assert torch.equal(call.prefill(top_k=2, dense_up_to=2540, **index), dense)  # the shapes allow as many
    for most in (0, 2539):
        assert not torch.equal(call.prefill(top_k=2, dense_up_to=most, **index), dense)


def test_sparse_prefill_works_in_given_memory_on_a_given_stream_and_in_graphs() -> None:
    call = Call()
    index, options = call.index(), {"top_k": 3, "dense_up_to": 0}
    want = call.prefill(**index, **options)
    call.ids = None
    needed = call.workspace_bytes(**index, **options)
    out, workspace = torch.empty_like(want), torch.empty(needed, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    call.prefill(out=out, workspace=workspace, stream=side, **index, **options)
    side.synchronize()
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match=rf"^workspace: got {needed - 256} bytes, need {needed}"):
        call.prefill(workspace=workspace[:-256], **index, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.prefill(out=out, workspace=workspace, **index, **options)
        ids = tilesieve.route(top_k=3, **index, **call.lengths)
    for tensor in index.values():
        tensor.copy_(torch.randint(-2, 3, tensor.shape, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call.prefill(**index, **options)) and not torch.equal(out, want)
    assert torch.equal(ids, tilesieve.route(top_k=3, **index, **call.lengths))


def test_explain_says_which_loop() -> None:
    call = Call()
    sizes = {"q": call.q, "k": call.k, **call.lengths}
    for loop_order in ("q_outer", "kv_outer"):
        text = tilesieve.explain(block_index=call.ids, loop_order=loop_order, **sizes)
        assert text.startswith(f"{loop_order} (as asked); 265 query tokens, top_k 4")
    assert tilesieve.explain(block_index=call.ids, **sizes).startswith(("q_outer (", "kv_outer ("))
    assert tilesieve.explain(block_index=None, **sizes).startswith("q_outer (dense: no block index)")


def test_a_measured_device_goes_into_the_roofline() -> None:
    device = tilesieve.measure_roofline_device()
    assert 1e12 < device.hbm_bandwidth < device.l2_bandwidth and device.usable_l2_bytes > 1e7
    model = tilesieve.roofline(num_selected_blocks=2048, device=device)
    assert 0 < model.rows["q_outer"].seconds < 1


def test_matches_the_cpu() -> None:
    call = Call()
    on_cpu = tilesieve.attend(call.q.cpu(), call.k.cpu(), call.v.cpu(), call.ids.cpu(), return_lse=True,
                              **{name: lengths.cpu() for name, lengths in call.lengths.items()})
    assert_close([x.cpu() for x in call.run(return_lse=True)], [x.double() for x in on_cpu], 2e-2, 1e-3)


def test_pages_are_the_same_as_packed_keys() -> None:
    call = Call(q_lens=(200, 65), kv_lens=(200, 1500))
    want = call.run(loop_order="kv_outer")
    cache, call.lengths = call.paged(torch.stack((call.k, call.v), 1))
    call.k, call.v = cache[:, :, 0], cache[:, :, 1]
    assert torch.equal(call.run(loop_order="kv_outer"), want)


def test_works_on_the_current_stream() -> None:
    """q is written on a side stream behind much work: a call on any other stream would read the old one."""
    call = Call()
    want = call.run()
    q = call.q.clone()
    call.q.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        call.q.copy_(q)
        got = call.run()
    side.synchronize()
    assert torch.equal(got, want)


class PtrStream:
    """A stream as CuPy has it."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


class ProtocolStream:
    """A stream of CUDA's own protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def test_works_on_a_given_stream_after_the_current_one() -> None:
    call = Call()
    want = call.run()
    q = call.q.clone()
    call.q.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    torch.cuda._sleep(200_000_000)
    call.q.copy_(q)  # on the current stream: the call on the other must wait for it
    out = torch.empty_like(want)
    workspace = torch.empty(call.workspace_bytes(), dtype=torch.uint8, device="cuda")
    call.run(out=out, workspace=workspace, stream=side.cuda_stream)
    side.synchronize()
    assert torch.equal(out, want)
    for given in (side, torch.cuda.ExternalStream(side.cuda_stream), PtrStream(side.cuda_stream),
                  ProtocolStream(side.cuda_stream)):
        out.zero_()
        call.run(out=out, workspace=workspace, stream=given)
        side.synchronize()
        assert torch.equal(out, want)
    with pytest.raises(TypeError, match="stream: got str"):
        call.run(out=out, workspace=workspace, stream="side")
    for missing in ({"out": None}, {"workspace": None}, {"return_lse": True}, {"cu_seqlens_q": None},
                    {"cu_seqlens_kv": None}):
        with pytest.raises(ValueError, match="needed with a stream"):
            call.run(**({"out": out, "workspace": workspace, "stream": side.cuda_stream} | missing))


def test_is_captured_in_a_graph_and_replayed_with_other_data() -> None:
    call = Call()
    out, lse = torch.empty_like(call.q), torch.empty(call.q.shape[:2], device="cuda")
    workspace = torch.empty(call.workspace_bytes(), dtype=torch.uint8, device="cuda")
    call.run(out=out, lse=lse, workspace=workspace)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(out=out, lse=lse, workspace=workspace)
        allocated = call.run()  # outputs and workspace of the graph's own pool
    for seed in (1, 2):
        torch.manual_seed(seed)
        for tensor in (call.q, call.k, call.v):
            tensor.normal_()
        call.ids.copy_(ids_of(call.q_lens, call.kv_lens, 2, 4))
        graph.replay()
        torch.cuda.synchronize()
        assert_close((out, lse), call.want(), 2e-2, 1e-3)
        assert torch.equal(allocated, out)
    # Other lengths below the capacity: the first sequence loses its last 50 tokens to the padding at the end.
    call.q_lens, call.kv_lens = [150, 0, 65], [150, 40, 1500]
    call.lengths["cu_seqlens_q"].copy_(torch.tensor([0, 150, 150, 215]))
    call.lengths["cu_seqlens_kv"].copy_(torch.tensor([0, 150, 190, 1690]))
    graph.replay()
    torch.cuda.synchronize()
    want = call.want()
    assert_close((out[:215], lse[:215]), want, 2e-2, 1e-3)
    assert (out[215:] == 0).all() and lse[215:].isneginf().all()


def test_passes_through_little_memory_change_no_bit() -> None:
    call = Call(kv_lens=(2000, 40, 3000), q_lens=(2000, 0, 1000))
    want = call.run(loop_order="kv_outer")
    assert torch.equal(call.run(loop_order="kv_outer", workspace_limit=64 << 20), want)


def test_calls_leak_nothing() -> None:
    call = Call()
    call.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for _ in range(1000):
        call.run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before[0]
    assert before[1] - torch.cuda.mem_get_info()[0] < 64 << 20


@pytest.mark.parametrize(("change", "words"), [
    ({"num_threads": 2}, "num_threads: is for calls on the CPU"),
    ({"isa": "amx"}, "isa: is for calls on the CPU"),
    ({"progress": True}, "progress: is for calls on the CPU"),
    ({"kv_block_size": 32}, "kv_block_size: got 32"),
    ({"cu_seqlens_kv": None}, "cu_seqlens_kv: got None"),
    ({"num_threads": 0}, "num_threads: is for calls on the CPU"),
    ({"max_kv_blocks": 0}, "max_kv_blocks: got 0, expected 1 or more, or None"),
    ({"softmax_scale": 0}, "softmax_scale: got 0"),
    ({"out": torch.empty(1)}, "out: lies on the CPU, expected cuda:0"),
    ({"cu_seqlens_q": torch.zeros(4, dtype=torch.int32)}, "cu_seqlens_q: lies on the CPU, expected cuda:0"),
])
def test_refuses_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Call().run(**change)


def test_without_lengths_there_is_one_sequence() -> None:
    call = Call(q_lens=(200,), kv_lens=(1500,))
    want = call.run()
    for left_out in (("cu_seqlens_q",), ("cu_seqlens_kv",), ("cu_seqlens_q", "cu_seqlens_kv")):
        assert torch.equal(call.run(**dict.fromkeys(left_out)), want)
    assert tilesieve.workspace_bytes(call.q, call.k, call.v, call.ids) == call.workspace_bytes()


def test_what_is_written_may_not_overlap_what_is_read() -> None:
    call = Call()
    out = torch.empty_like(call.q)
    workspace = torch.empty(call.workspace_bytes() + call.q.nbytes, dtype=torch.uint8, device="cuda")
    for options, words in (({"out": call.q}, "out: overlaps q"),
                           ({"out": out, "workspace": out}, "workspace: overlaps out"),
                           ({"lse": workspace[: call.q.shape[0] * call.q.shape[1] * 4].view(torch.float32).view(
                               call.q.shape[:2]), "workspace": workspace}, "workspace: overlaps lse")):
        with pytest.raises(ValueError, match=words):
            call.run(**options)


def test_scales_may_have_no_dimension() -> None:
    call = Call(torch.float8_e4m3fn)
    half = torch.tensor([0.5], device="cuda")
    assert torch.equal(call.run(v_scale=half[0]), call.run(v_scale=half))


def test_refuses_what_is_not_on_the_gpu_yet() -> None:
    call = Call()
    with pytest.raises(ValueError, match=r"^router: got 'oracle', expected index"):
        call.prefill(router="oracle")
    with pytest.raises(ValueError, match=r"^q: lies on a CUDA device; the scores are on the CPU"):
        tilesieve.route_scores(call.q, call.k)
    with pytest.raises(ValueError, match="workspace: got|need"):
        call.run(workspace=torch.empty(256, dtype=torch.uint8, device="cuda"))


def test_cupy_arrays_are_taken() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    call = Call()
    want = call.run()
    # CuPy has no bf16 of its own everywhere: the ids and lengths are CuPy's, and the outputs are PyTorch's as q is.
    ids = cupy.from_dlpack(call.ids)
    lengths = {name: cupy.from_dlpack(tensor) for name, tensor in call.lengths.items()}
    got = tilesieve.attend(call.q, call.k, call.v, ids, **lengths)
    assert isinstance(got, torch.Tensor) and torch.equal(got, want)
