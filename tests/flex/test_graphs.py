"""``flex_attention`` in graphs of ``torch.compile``: no break, and guards on what is captured."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from attndsl.flex import AuxRequest, create_block_mask, flex_attention

B, H, L, D = 1, 2, 10, 4
DOC = (torch.arange(L) // 4)[None]
TABLE = torch.linspace(-1, 1, 40).reshape(H, 20)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def documents(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (DOC[b, q_idx] == DOC[b, kv_idx])


@pytest.fixture
def compiled():
    """Compiles without breaks, and counts the graphs."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    def make(function, **options):
        return torch.compile(function, fullgraph=True, backend=backend, **options)

    make.graphs = graphs
    yield make
    torch._dynamo.reset()


@pytest.mark.parametrize("make_blocks", [create_block_mask, torch_flex.create_block_mask])
def test_values_and_gradients(compiled, make_blocks):
    blocks = make_blocks(documents, B, None, L, L, device="cpu", BLOCK_SIZE=4)

    def attention(q, k, v, slopes):
        def score_mod(score, b, h, q_idx, kv_idx):
            bias = slopes[h] * (q_idx - kv_idx) + TABLE[h][q_idx - kv_idx]
            return torch.where(h == 0, score + bias, score * slopes[1])

        out, lse = flex_attention(q, k, v, score_mod, blocks, return_lse=True)
        return flex_attention(out, k, v, score_mod).sin().sum() + lse.sum()

    results = []
    for function in (attention, compiled(attention)):
        shapes = [(B, H, L, D)] * 3 + [(H,)]
        leaves = [random(*s, seed=n).requires_grad_() for n, s in enumerate(shapes)]
        loss = function(*leaves)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)
    assert len(compiled.graphs) == 1


def test_captures_that_change_are_seen(compiled):
    q = random(B, H, L, D)
    state = {"factor": 2.0}
    table = random(H)

    def attention(q, table):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * state["factor"] + table[h]

        return flex_attention(q, q, q, score_mod)

    function = compiled(attention)
    for factor in (2.0, 3.0):
        state["factor"] = factor
        for other in (table, table * 2):
            torch.testing.assert_close(function(q, other), attention(q, other))


def test_changes_in_place_and_constants_made_inside(compiled):
    def attention(q):
        def score_mod(score, b, h, q_idx, kv_idx):
            alias = score
            score += 1
            alias.mul_(2.0).sub_(kv_idx)
            steps = torch.tensor([0.5, 2.0])
            return score * steps[h] + torch.tensor(0.25) * q_idx

        return flex_attention(q, q, q, score_mod)

    q = random(B, H, L, D)
    torch.testing.assert_close(compiled(attention)(q), attention(q))


def test_modules_and_parameters(compiled):
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
    for function in (layer, compiled(layer)):
        (gradient,) = torch.autograd.grad(function(x), [layer.bias])
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)


def test_lengths_that_vary(compiled):
    def attention(q):
        return flex_attention(q, q, q, lambda s, b, h, i, j: s + TABLE[h, i - j + 9])

    function = compiled(attention, dynamic=True)
    for length in (6, 8, 10):
        q = random(B, H, length, D)
        torch.testing.assert_close(function(q), attention(q))
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: torch.atan(s)), "'atan'"),
        (
            lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s if i > j else -s),
            "data-dependent",
        ),
        (
            lambda q: flex_attention(
                q, q, q, block_mask=create_block_mask(documents, 1, 1, L, L, "cpu")
            ),
            "before the graph",
        ),
    ],
)
def test_what_graphs_cannot_have(compiled, function, match):
    with pytest.raises(Exception, match=match):
        compiled(function)(random(B, H, L, D))
