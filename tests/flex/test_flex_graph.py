"""``flex_attention`` in graphs of ``torch.compile``: no break, and guards on what is captured."""

import functools

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from attndsl.errors import TraceError
from attndsl.flex import AuxRequest, create_block_mask, flex_attention

B, H, L, D = 1, 2, 10, 4
DOC = (torch.arange(L) // 4)[None]
TABLE = torch.linspace(-1, 1, 40).reshape(H, 20)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def documents(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (DOC[b, q_idx] == DOC[b, kv_idx])


@pytest.mark.parametrize("make_blocks", [create_block_mask, torch_flex.create_block_mask])
def test_values_and_gradients(graphs, make_blocks):
    blocks = make_blocks(documents, B, None, L, L, device="cpu", BLOCK_SIZE=4)

    def attention(q, k, v, slopes):
        def score_mod(score, b, h, q_idx, kv_idx):
            bias = slopes[h] * (q_idx - kv_idx) + TABLE[h][q_idx - kv_idx]
            return torch.where(h == 0, score + bias, score * slopes[1])

        out, lse = flex_attention(q, k, v, score_mod, blocks, return_lse=True)
        return flex_attention(out, k, v, score_mod).sin().sum() + lse.sum()

    results = []
    for function in (attention, graphs(attention)):
        shapes = [(B, H, L, D)] * 3 + [(H,)]
        leaves = [random(*s, seed=n).requires_grad_() for n, s in enumerate(shapes)]
        loss = function(*leaves)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)
    assert graphs.counter.frame_count == 1


def test_captures_that_change_are_seen(graphs):
    q = random(B, H, L, D)
    state = {"factor": 2.0}
    table = random(H)

    def attention(q, table):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * state["factor"] + table[h]

        return flex_attention(q, q, q, score_mod)

    function = graphs(attention)
    for factor in (2.0, 3.0):
        state["factor"] = factor
        for other in (table, table * 2):
            torch.testing.assert_close(function(q, other), attention(q, other))


def test_changes_in_place_and_constants_made_inside(graphs):
    def attention(q):
        def score_mod(score, b, h, q_idx, kv_idx):
            alias = score
            score += 1
            alias.mul_(2.0).sub_(kv_idx)
            steps = torch.tensor([0.5, 2.0])
            zero = h.new_zeros(h.shape) + torch.zeros(h.shape)
            return score * steps[h] + torch.tensor(0.25) * q_idx + zero

        return flex_attention(q, q, q, score_mod)

    q = random(B, H, L, D)
    torch.testing.assert_close(graphs(attention)(q), attention(q))


def test_modules_and_parameters(graphs):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(random(H, L))

        def score(self, score, b, h, q_idx, kv_idx):
            return score + self.bias[h, kv_idx]

        def forward(self, x):
            out, aux = flex_attention(x, x, x, self.score, return_aux=AuxRequest(lse=True))
            return out.sum() + aux.lse.sum()

    layer, x = Layer(), random(B, H, L, D)
    gradients = []
    for function in (layer, graphs(layer)):
        (gradient,) = torch.autograd.grad(function(x), [layer.bias])
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)


def test_lengths_that_vary(graphs):
    def attention(q):
        return flex_attention(q, q, q, lambda s, b, h, i, j: s + TABLE[h, i - j + 9])

    function = graphs(attention, dynamic=True)
    for length in (6, 8, 10):
        q = random(B, H, length, D)
        torch.testing.assert_close(function(q), attention(q))
    assert graphs.counter.frame_count == 1


def chunks(x):
    return (part.unflatten(-1, (H, D)).transpose(1, 2) for part in x.chunk(3, -1))


VIEWS = {
    "chunk": chunks,
    "split": lambda x: (y.unflatten(-1, (H, D)).transpose(1, 2) for y in x.split(H * D, -1)),
    "unbind": lambda x: x.unflatten(-1, (3, H, D)).transpose(1, 3).unbind(2),
    "permute": lambda x: x.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4),
    "stack": lambda x: torch.stack(list(chunks(x))),
    "one tensor": lambda x: [next(chunks(x))] * 3,
}


@pytest.mark.parametrize(
    ("views", "breaks"), [*((views, False) for views in VIEWS), ("chunk", True), ("stack", True)]
)
def test_operands_and_captures_that_are_views_of_one_tensor(views, breaks):
    torch._dynamo.reset()
    blocks = create_block_mask(documents, B, None, L, L, device="cpu", BLOCK_SIZE=4)

    def attention(x, bias):
        if breaks:
            torch._dynamo.graph_break()
        q, k, v = VIEWS[views](x)
        slopes, gates = bias[0], bias[1]

        def score_mod(score, b, h, q_idx, kv_idx):
            return score * gates[h] + slopes[h] * (q_idx - kv_idx) + bias[1][h]

        return flex_attention(q, k, v, score_mod, blocks)

    backend = "eager" if breaks else "aot_eager"
    results = []
    for function in (attention, torch.compile(attention, fullgraph=not breaks, backend=backend)):
        leaves = [random(B, L, 3 * H * D).requires_grad_(), random(2, H, seed=1).requires_grad_()]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


def test_outputs_have_the_memory_layout_of_queries():
    """Graphs may view them as rows of all heads, as code after a packed projection does."""
    torch._dynamo.reset()

    def rows_of_heads(x):
        return flex_attention(*chunks(x)).transpose(1, 2).view(B, L, H * D)

    x = random(B, L, 3 * H * D)
    compiled = torch.compile(rows_of_heads, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), rows_of_heads(x))


def test_functions_that_dynamo_cannot_follow_run_outside_of_the_graph():
    torch._dynamo.reset()
    doubled = torch._dynamo.disable(lambda score: score * 2)

    def attention(q):
        table = TABLE[0] * 2

        def score_mod(score, b, h, q_idx, kv_idx):
            return doubled(score) + table[kv_idx]

        out, aux = flex_attention(q, q, q, score_mod, return_aux=AuxRequest(max_scores=True))
        return out, aux.max_scores

    q = random(B, H, L, D)
    found = torch.compile(attention, backend="eager")(q)
    torch.testing.assert_close(found, attention(q))

    def branches(q):
        return flex_attention(q, q, q, lambda s, b, h, i, j: s if i > j else -s)

    with pytest.raises(TraceError, match="cannot decide"):
        torch.compile(branches, backend="eager")(q)


def test_largest_scores(graphs):
    q = random(B, H, L, D).requires_grad_()
    table = TABLE.clone().requires_grad_()
    blocks = create_block_mask(lambda b, h, i, j: i > j, None, None, L, L, device="cpu")

    def attention(q, factor):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * factor + table[h, kv_idx]

        request = AuxRequest(lse=True, max_scores=True)
        return flex_attention(q, q, q, score_mod, blocks, return_aux=request, scale=0.3)

    function = graphs(attention, dynamic=True)
    for factor in (2.0, 3.0):
        (out, aux), (out_, aux_) = function(q, factor), attention(q, factor)
        torch.testing.assert_close((out, *aux), (out_, *aux_))
        assert not aux.max_scores.requires_grad
        gradients = [torch.autograd.grad(x.sum(), [q, table]) for x in (out, out_)]
        torch.testing.assert_close(*gradients)


def test_partial_functions_with_numbers_that_vary(graphs):
    def near(b, h, q_idx, kv_idx, *, width):
        return (q_idx - kv_idx).abs() < width

    def scaled(score, b, h, q_idx, kv_idx, *, width):
        return score * width

    def attention(q, width, blocks):
        return flex_attention(q, q, q, functools.partial(scaled, width=width), blocks)

    function, q = graphs(attention, dynamic=True), random(B, H, L, D)
    for width in (3, 5):
        mask_mod = functools.partial(near, width=width)
        blocks = create_block_mask(mask_mod, None, None, L, L, device="cpu", BLOCK_SIZE=4)
        torch.testing.assert_close(function(q, width, blocks), attention(q, width, blocks))


def test_batches_that_vary(graphs):
    def attention(q, blocks):
        return flex_attention(q, q, q, None, blocks)

    function = graphs(attention)
    mask_mod = lambda b, h, i, j: i >= j + b % 2  # noqa: E731
    for batch in (5, 7, 3):
        blocks = create_block_mask(mask_mod, batch, None, L, L, device="cpu", BLOCK_SIZE=4)
        q = random(batch, H, L, D)
        for tensor in (q, blocks.kv_num_blocks):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.testing.assert_close(function(q, blocks), attention(q, blocks))


# A mask_mod under torch.vmap, whose tensors Dynamo indexes by a function of its own.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("separate", [True, False])
def test_blocks_may_be_made_within(graphs, separate):
    def attention(q, doc):
        def mask_mod(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (doc[b, q_idx] == doc[b, kv_idx])

        blocks = create_block_mask(
            mask_mod, B, None, L, L, "cpu", BLOCK_SIZE=4, separate_full_blocks=separate
        )
        return flex_attention(q, q, q, block_mask=blocks)

    q, function = random(B, H, L, D), graphs(attention)
    for doc in (DOC, DOC + 1, torch.zeros_like(DOC)):
        torch.testing.assert_close(function(q, doc), attention(q, doc))
    (graph,) = graphs.counter.graphs
    # A compiler drops the blocks: the call has the mask, and reads none of them.
    results = [item for item in graph.graph.nodes if item.op == "output"]
    needed, ahead = set(), list(results)
    while ahead:
        item = ahead.pop()
        if item not in needed:
            needed.add(item)
            ahead += item.all_input_nodes
    assert not any("sort" in str(item.target) for item in needed)
    assert any("sort" in str(item.target) for item in graph.graph.nodes)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: torch.atan(s)), "'atan'"),
        (
            lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s if i > j else -s),
            "data-dependent",
        ),
        (
            lambda q: create_block_mask(documents, 1, 1, L, L, "cpu", compute_dq_write_order=True),
            "drop that argument",
        ),
    ],
)
def test_what_graphs_cannot_have(graphs, function, match):
    with pytest.raises(Exception, match=match):
        graphs(function)(random(B, H, L, D))
