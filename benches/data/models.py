"""Three small models whose training states differ in kind, and their losses."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A block of a transformer; ``experts`` in place of the dense layers, if there are any."""

    def __init__(self, width, heads, experts=0):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn_qkv, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if experts:
            self.experts = Experts(width, experts)
        else:
            self.mlp_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.attn_qkv(self.ln_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(attended.transpose(1, 2).reshape(batch, length, width))
        inner = self.ln_2(x)
        return x + (self.experts(inner) if hasattr(self, "experts") else self.mlp_proj(F.gelu(self.mlp_fc(inner))))


class Experts(nn.Module):
    """Dense layers of which each token uses the best two."""

    def __init__(self, width, count):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            rows, which = (chosen == expert).nonzero(as_tuple=True)
            if len(rows):
                inner = F.gelu(tokens[rows] @ self.up[expert]) @ self.down[expert]
                out = out.index_add(0, rows, inner * weights[rows, which, None])
        return out.view_as(x)


class GPT(nn.Module):
    """A language model, with tied embedding. 5.85 M parameters by default."""

    def __init__(self, layers=6, width=256, heads=8, vocabulary=4096, length=256, experts=0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads, experts) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


class Recommender(nn.Module):
    """Guesses the next item of a user from the last eight: a large embedding, of which a step changes few rows, and a small network."""

    def __init__(self, items, width=32, history=8):
        super().__init__()
        self.table = nn.Embedding(items, width)
        self.hidden, self.out = nn.Linear(history * width, 256), nn.Linear(256, width)
        nn.init.normal_(self.table.weight, std=0.05)

    def forward(self, history, candidates):
        """Scores of candidates: history (batch, 8), candidates (batch, n)."""
        user = self.out(F.relu(self.hidden(self.table(history).flatten(1))))
        return (self.table(candidates) @ user.unsqueeze(-1)).squeeze(-1)


def pick(step, count, rows):
    """Random rows that depend on the step alone, so that a resumed run takes the same."""
    return torch.randint(count, (rows,), generator=torch.Generator().manual_seed(step))


def text_loss(model, tokens, step, batch=4, length=256):
    rows = torch.stack([tokens[at : at + length + 1] for at in pick(step, len(tokens) - length - 1, batch)]).long()
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def item_loss(model, items, step, batch=512, history=8, others=16):
    rows = torch.stack([items[at : at + history + 1] for at in pick(step, len(items) - history - 1, batch)])
    # The right item first, then others of the same batch.
    shifted = torch.stack([rows[:, -1].roll(shift) for shift in range(others)], 1)
    return F.cross_entropy(model(rows[:, :-1], shifted), torch.zeros(batch, dtype=torch.long))
