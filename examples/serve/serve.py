"""Continuous batching: requests of all lengths in one call a layer, keys in pages, trees of drafts.

    python examples/serve/serve.py [--requests 12] [--device cuda --backend decode --graphs]

Each step packs the next chunk of some prompts and the drafts of other requests into one tensor of
tokens. Drafts are what followed the last byte before. Those that the model would have written
itself are kept. So the bytes are those of the plain model, which computes one request at a time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch

import attndsl

from model import DIM, KV_HEADS, LAYERS, Decoder, plain

CONFIG = Path(__file__).with_name("model.yaml")
SLOTS, PAGE, PAGES, PAGES_OF_A_REQUEST = 4, 4, 160, 40
CHUNK, BRANCHES, DEPTH = 8, 2, 3
MOST_DRAFTS = 1 + BRANCHES * DEPTH
MOST_QUERIES = max(CHUNK, MOST_DRAFTS)
CAPACITY = SLOTS * MOST_QUERIES


@dataclass(slots=True)
class Request:
    """A prompt and what is written behind it."""

    prompt: bytes
    count: int
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    """Keys in the cache: those of the first tokens."""


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens of a request in a step."""

    tokens: list[int]
    positions: list[int]
    context: int
    """Keys that are no drafts."""
    parents: list[int] | None = None
    """Of a tree: the first one is the last token that was written, and no draft."""


def work_of(request: Request) -> Work:
    """A chunk of the prompt, or a tree of drafts."""
    tokens, first = request.tokens, request.cached
    if first < len(tokens) - 1:
        chunk = tokens[first : first + CHUNK]
        end = first + len(chunk)
        return Work(chunk, list(range(first, end)), end)
    found, parents, depths = [tokens[-1]], [-1], [0]
    before = [i for i in range(len(tokens) - 1) if tokens[i] == tokens[-1]]
    for place in before[-BRANCHES:]:
        node = 0
        for token in tokens[place + 1 : place + 1 + DEPTH]:
            known = [i for i, p in enumerate(parents) if p == node and found[i] == token]
            if not known:
                found.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
                known = [len(found) - 1]
            node = known[0]
    return Work(found, [first + depth for depth in depths], first, parents)


@dataclass(frozen=True, slots=True)
class Feed:
    """What a step computes with. Its sizes are those of the largest step."""

    tokens: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    context: torch.Tensor
    starts: torch.Tensor
    ancestor: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device | str) -> Feed:
        """Of a step without tokens."""
        return cls(
            *torch.zeros(2, CAPACITY, dtype=torch.int64, device=device),
            torch.zeros(SLOTS, PAGES_OF_A_REQUEST, dtype=torch.int32, device=device),
            *torch.zeros(2, SLOTS, dtype=torch.int32, device=device),
            torch.zeros(SLOTS + 1, dtype=torch.int32, device=device),
            torch.zeros(CAPACITY, MOST_DRAFTS, dtype=torch.bool, device=device),
        )

    def fill(self, other: Feed) -> None:
        """Take over what ``other`` has. Addresses stay, which a graph reads."""
        for name in self.__slots__:
            getattr(self, name).copy_(getattr(other, name))


class Engine:
    """A model, its caches, and the requests in its slots."""

    def __init__(self, model: Decoder, backend: str = "auto", graphs: bool = False) -> None:
        """Empty caches on the model's device and in its dtype; ``graphs`` wants a GPU."""
        weight = model.head.weight
        self.model, self.device = model, weight.device
        programs = attndsl.load(CONFIG, backend=backend)
        self.attentions = [programs[name] for name in LAYERS]
        self.append_by = "decode" if backend == "decode" else "auto"
        shape = (len(LAYERS), 2, PAGES, PAGE, KV_HEADS, DIM)
        self.pools = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        self.free = list(range(PAGES))
        self.slots: list[Request | None] = [None] * SLOTS
        self.waiting: deque[Request] = deque()
        self.steps = self.tokens = self.accepted = 0
        self.feed = Feed.empty(self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if graphs:
            self.capture()

    def run(self, prompts: list[tuple[bytes, int]]) -> list[bytes]:
        """What is written behind each prompt; new requests come in as others end."""
        requests = [Request(prompt, count, list(prompt)) for prompt, count in prompts]
        self.waiting.extend(requests)
        while self.waiting or any(self.slots):
            self.admit()
            self.step()
        return [bytes(x.tokens[len(x.prompt) :][: x.count]) for x in requests]

    def admit(self) -> None:
        """Put waiting requests into free slots, in their order, while pages for them are left."""
        for slot in range(SLOTS):
            if self.slots[slot] is None and self.waiting:
                request = self.waiting[0]
                longest = len(request.prompt) + request.count + MOST_DRAFTS
                needed = -(-longest // PAGE)
                if needed > min(len(self.free), PAGES_OF_A_REQUEST):
                    return
                request.pages = [self.free.pop() for _ in range(needed)]
                self.slots[slot] = self.waiting.popleft()

    @torch.no_grad()
    def step(self) -> None:
        """One call of the model for all requests."""
        work = [None if request is None else work_of(request) for request in self.slots]
        feed, counts = self.packed(work)
        self.feed.fill(feed)
        if self.graph is None:
            best = self.best_bytes()
        else:
            self.graph.replay()
            best = self.best
        left = best.tolist()
        self.steps, self.tokens = self.steps + 1, self.tokens + sum(counts)
        for slot, (part, count) in enumerate(zip(work, counts, strict=True)):
            found, left = left[:count], left[count:]
            if part is not None:
                self.take(slot, part, found)

    def packed(self, work: list[Work | None]) -> tuple[Feed, list[int]]:
        """What a step computes with, on the CPU, and how many tokens each slot has."""
        feed = Feed.empty("cpu")
        counts = [0 if part is None else len(part.tokens) for part in work]
        feed.starts[1:] = torch.tensor(counts).cumsum(0)
        for slot, (request, part) in enumerate(zip(self.slots, work, strict=True)):
            if request is None or part is None:
                continue
            first = int(feed.starts[slot])
            rows = slice(first, first + counts[slot])
            feed.tokens[rows] = torch.tensor(part.tokens)
            feed.positions[rows] = torch.tensor(part.positions)
            feed.table[slot, : len(request.pages)] = torch.tensor(request.pages)
            feed.lengths[slot] = request.cached + counts[slot]
            feed.context[slot] = part.context
            for node, parent in enumerate(part.parents or ()):
                if parent >= 0:
                    feed.ancestor[first + node] = feed.ancestor[first + parent]
                feed.ancestor[first + node, node] = True
        return feed, counts

    def best_bytes(self) -> torch.Tensor:
        """The most likely byte behind each token of the feed. Rows of nobody mean nothing."""
        feed = self.feed

        def attend(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache = attndsl.PagedCache(*self.pools[number], feed.table, feed.lengths)
            cache.append(k, v, feed.starts, backend=self.append_by)
            return self.attentions[number].serve(
                q, cache, feed.starts, q_index=feed.positions, most_queries=MOST_QUERIES,
                context=feed.context, ancestor=feed.ancestor,
            )  # fmt: skip

        return self.model(feed.tokens, feed.positions, attend).argmax(-1)

    @torch.no_grad()
    def capture(self) -> None:
        """Record a step as a CUDA graph, with nobody in the slots: it is good for all steps."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.best_bytes()  # Compiles kernels, which a graph cannot record.
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.best = self.best_bytes()

    def take(self, slot: int, part: Work, best: list[int]) -> None:
        """Write what the model says behind each token of a step, and end a request."""
        request = self.slots[slot]
        assert request is not None
        if part.parents is None:
            request.cached += len(part.tokens)
            if request.cached == len(request.tokens):
                request.tokens.append(best[-1])
        else:
            path = [0]
            while True:
                request.tokens.append(best[path[-1]])
                nodes = enumerate(zip(part.tokens, part.parents, strict=True))
                right = [i for i, x in nodes if x == (best[path[-1]], path[-1])]
                if not right:
                    break
                path.append(right[0])
            self.keep(request, path)
        if len(request.tokens) - len(request.prompt) >= request.count:
            self.free += request.pages
            self.slots[slot] = None

    def keep(self, request: Request, path: list[int]) -> None:
        """Move the keys of accepted drafts to their positions, over those of others."""
        pages = torch.tensor(request.pages, device=self.device)
        slots = request.cached + torch.tensor(path, device=self.device)
        places = request.cached + torch.arange(len(path), device=self.device)
        kept = self.pools[:, :, pages[slots // PAGE], slots % PAGE]
        self.pools[:, :, pages[places // PAGE], places % PAGE] = kept
        request.cached += len(path)
        self.accepted += len(path) - 1


def main(arguments: list[str] | None = None) -> int:
    """Serves some requests and compares their bytes with those of the plain model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto", help="decode: kernels that read pages")
    parser.add_argument("--graphs", action="store_true", help="steps are one CUDA graph")
    # In fp64 sums in another order choose no other byte. Kernels compute in fp32.
    parser.add_argument("--dtype", choices=("float32", "float64"), help="that of the model")
    given = parser.parse_args(arguments)
    if given.graphs and given.device == "cpu":
        parser.error("--graphs wants a GPU: add --device cuda")
    dtype = given.dtype or ("float32" if given.backend == "decode" else "float64")
    torch.manual_seed(0)
    model = Decoder().to(given.device, getattr(torch, dtype)).eval()
    prompts = [
        (bytes(torch.randint(97, 123, (int(n),)).tolist()), int(m))
        for n, m in zip(
            torch.randint(1, 60, (given.requests,)), torch.randint(4, 50, (given.requests,)),
            strict=True,
        )
    ]  # fmt: skip
    if given.device != "cpu":
        # Kernels are compiled before the clock runs.
        Engine(model, given.backend, given.graphs).run(prompts)
    engine = Engine(model, given.backend, given.graphs)
    begin = time.perf_counter()
    served = engine.run(prompts)
    seconds = time.perf_counter() - begin
    wanted = [plain(model, *prompt) for prompt in prompts]
    same = sum(a == b for a, b in zip(served, wanted, strict=True))
    written = sum(map(len, served))
    print(f"{len(prompts)} requests, {written} bytes written in {engine.steps} steps")
    print(f"{engine.tokens} tokens computed, {engine.accepted} drafts kept")
    print(f"{written / seconds:.0f} bytes and {engine.steps / seconds:.0f} steps a second")
    print(f"{same} of {len(prompts)} requests have the bytes of the plain model")
    return int(served != wanted)


if __name__ == "__main__":
    sys.exit(main())
