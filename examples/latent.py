"""Multi-head latent attention with decoupled rotary keys (DeepSeek-V2, arXiv 2405.04434).

Keys and values of all heads come from one short vector a token. Rotary rows beside them carry the
positions: queries have rows for each head, keys have one row for all heads. `dot` adds the products
of these rows to the score. The task, to repeat the token that stood three places before, is all
about positions.
"""

import torch

import attndsl

from picture import draw, fit

LATENT = """
tensor q_rope[batch, heads, q_len, r]: float
tensor k_rope[batch, kv_len, r]: float
mask  = causal()
score = score + heat * dot(q_rope[b, h, q, :], k_rope[b, kv, :])
param heat: float
"""
PLAIN = "param heat: float; mask = causal(); score = heat * score"
KINDS, LENGTH, HEADS, WIDTH, LATENTS, ROPE, BACK = 6, 16, 2, 8, 6, 8, 3


def rotated(rows):
    """Rows (..., length, ROPE) turned by their positions (RoPE, arXiv 2104.09864)."""
    angles = torch.arange(rows.shape[-2])[:, None] * torch.tensor([1.6, 0.8, 0.4, 0.2])
    x, y = rows.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat([x * angles.cos() - y * angles.sin(), x * angles.sin() + y * angles.cos()], -1)


def train(text, backend):
    """The learned tensors, their outputs for unit values, and the mean loss of the last steps."""
    torch.manual_seed(0)
    attention = attndsl.compile(text, backend=backend)
    sizes = {
        "queries": (HEADS, KINDS, WIDTH), "turned": (HEADS, KINDS, ROPE),
        "latent": (KINDS, LATENTS), "keys": (HEADS, LATENTS, WIDTH),
        "values": (HEADS, LATENTS, KINDS), "shared": (KINDS, ROPE),
    }  # fmt: skip
    learned = {name: (0.5 * torch.randn(size)).requires_grad_() for name, size in sizes.items()}
    learned["turned"] = torch.ones(sizes["turned"], requires_grad=True)
    learned["shared"] = torch.ones(sizes["shared"], requires_grad=True)
    learned["heat"] = torch.tensor(1.0, requires_grad=True)

    def attend(tokens, values=None):
        latent = tokens @ learned["latent"]
        q, k = tokens[:, None] @ learned["queries"], latent[:, None] @ learned["keys"]
        v = latent[:, None] @ learned["values"] if values is None else values
        rows = {
            "q_rope": rotated(tokens[:, None] @ learned["turned"]),
            "k_rope": rotated(tokens @ learned["shared"]),
        }
        captures = rows if "dot" in text else {}
        return attention(q, k, v, heat=learned["heat"], **captures)

    def loss():
        tokens = torch.eye(KINDS)[torch.randint(KINDS, (16, LENGTH))]
        found = attend(tokens).sum(1)
        return (found[:, BACK:] - tokens[:, :-BACK]).square().mean()

    found = fit(learned, loss, steps=100)
    tokens = torch.eye(KINDS)[torch.randint(KINDS, (1, LENGTH))]
    units = torch.eye(LENGTH).expand(1, HEADS, LENGTH, LENGTH)
    return attend(tokens, units).detach()[0], found


def main():
    seen, loss = train(LATENT, "auto")
    _, reference = train(LATENT, "reference")
    _, without = train(PLAIN, "auto")
    draw(seen, "weights of the first head")
    print(f"\nloss {loss:.4f}, without rotary keys {without:.4f}")
    print(f"difference to the reference backend's loss: {abs(loss - reference):.1e}")
    assert loss < without / 3
    assert abs(loss - reference) < 1e-3


if __name__ == "__main__":
    main()
