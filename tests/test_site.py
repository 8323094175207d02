"""Pages that scripts write, the programs of known models, and the site that is built of them."""

import ast
import json
import math
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import yaml
from support.scripts import loader

import attndsl
from attndsl.frontend.prelude import prelude_names

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def script(monkeypatch):
    """``script(name)``: a script of docs/ as a module."""
    return loader(monkeypatch, DOCS)


NOT_TIMED = {
    "big_bird.attn", "dsa.py", "key_groups.attn", "moba.attn", "msa.attn", "nsa.py",
    "retrieval_heads.attn", "video_tiles.py",
}  # fmt: skip
"""Programs of lists, which no run of benchmarks/gallery_times.py has had yet."""


def test_times_of_the_gallery_are_those_of_its_programs(script, monkeypatch, tmp_path):
    gallery = script("gallery")
    entry = gallery.prelude_entries()[0]
    monkeypatch.setattr(gallery, "TIMES", tmp_path / "gallery_times.json")
    row = {"name": entry.name, "text": entry.text, "forward_ms": 1.2345, "backward_ms": 2.0}
    for change, said in (
        ({}, "1.23 / 2"),
        ({"text": "another"}, "-"),
        ({"name": "another"}, "-"),
        ({"why": "no memory"}, "-"),
    ):
        gallery.TIMES.write_text(json.dumps({"machine": "GPU X", "rows": [row | change]}))
        assert gallery.timed(entry) == said


def test_the_gallery_is_that_of_the_prelude_and_the_examples(script):
    gallery = script("gallery")
    assert gallery.PAGE.read_text("utf-8") == gallery.page(), "run docs/gallery.py"
    entries = [*gallery.prelude_entries(), *gallery.example_entries()]
    assert [e.name for e in entries if e.definition] == list(prelude_names())
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"picture.py"}
    programs = {path.name for path in (ROOT / "examples").glob("*.attn")}
    assert {e.file for e in entries if e.file} == scripts | programs
    assert set(gallery.PICTURES.iterdir()) == {e.picture for e in entries}
    for entry in entries:
        # What is drawn; shades of random numbers may differ elsewhere.
        root = ET.fromstring(entry.picture.read_text("utf-8"))
        data = gallery.data(entry)
        assert root.find(f"{SVG}title").text == entry.name
        assert root.find(f"{SVG}desc").text == data.summary, "run docs/gallery.py"
        assert "prefers-color-scheme:dark" in root.find(f"{SVG}style").text


def test_a_function_without_a_program_is_an_error(script, monkeypatch):
    gallery = script("gallery")
    groups = gallery.of_play()
    fewer = groups[1]._replace(examples=groups[1].examples[1:])
    monkeypatch.setattr(gallery, "of_play", lambda: (groups[0], fewer))
    with pytest.raises(ValueError, match=r"no program for \{'causal'\}"):
        gallery.prelude_entries()


def test_times_of_the_gallery_are_those_of_the_file(script):
    gallery = script("gallery")
    found = json.loads(gallery.TIMES.read_text("utf-8"))
    page = gallery.PAGE.read_text("utf-8")
    assert f"on one {found['machine']}: batch 2," in page
    rows = {row["name"]: row for row in found["rows"]}
    shown = dict(re.findall(r"^\| \[`([^`]+)`\].* \| ([^|]+) \|$", page, re.MULTILINE))
    entries = [*gallery.prelude_entries(), *gallery.example_entries()]
    assert list(shown) == [entry.heading for entry in entries]
    assert {name for name, times in shown.items() if times == "-"} == NOT_TIMED
    for name in shown.keys() - NOT_TIMED:
        times, row = shown[name], rows[name]
        assert times == f"{row['forward_ms']:.3g} / {row['backward_ms']:.3g}"


def test_the_notebook_is_the_tutorial_and_runs(script, tmp_path):
    notebook = script("notebook")
    text = notebook.NOTEBOOK.read_text("utf-8")
    assert text == notebook.notebook(notebook.PAGE.read_text("utf-8")), "run docs/notebook.py"
    printed = notebook.run(text, tmp_path)
    assert "did you mean 'causal'?" in printed
    assert re.search(r"loss \d\.\d+ at first, \d\.\d+ now", printed)
    shown = re.findall(r"^```text\n(.*?)^```$", notebook.PAGE.read_text("utf-8"), re.M | re.S)
    assert shown[0] == "pip install .\n"
    assert len(shown) == 5
    for block in shown[1:]:  # Numbers may round differently elsewhere.
        assert _without_numbers(block) in _without_numbers(printed)
    drawn = (tmp_path / notebook.DRAWN).read_text("utf-8")
    now, then = (
        ET.fromstring(each).find(f"{SVG}desc").text
        for each in (drawn, notebook.PICTURE.read_text("utf-8"))
    )
    assert now == then, "run docs/notebook.py"


def _without_numbers(text):
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.]*(e[-+]\d+)?", "0", text))


def _program(heading, number=0):
    """A program of the page of models."""
    text = (DOCS / "models.md").read_text("utf-8").partition(f"\n## {heading}\n")[2]
    part = text.partition("\n## ")[0]
    return re.findall(r"^```attn\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)[number]


L = 96
IDS = torch.arange(L) // 40
FLAGS = torch.arange(L) % 31 == 0
MASKS = [
    ("Causal", 0, {}, lambda q, kv: kv <= q),
    ("Causal window", 0, {"window": 9}, lambda q, kv: (kv <= q) & (kv > q - 9)),
    ("Soft cap", 0, {"window": 9}, lambda q, kv: (kv <= q) & (kv > q - 9)),
    (
        "Images in text", 0, {"image": torch.where(IDS == 1, 0, -1)[None]},
        lambda q, kv: (kv <= q) | ((IDS[q] == 1) & (IDS[kv] == 1)),
    ),
    (
        "Images in text", 1, {"window": 50, "image": torch.where(IDS == 1, 0, -1)[None]},
        lambda q, kv: ((kv <= q) | ((IDS[q] == 1) & (IDS[kv] == 1))) & (kv > q - 50),
    ),
    ("Sinks", 0, {"window": 9}, lambda q, kv: (kv <= q) & (kv > q - 9)),
    ("Chunks", 0, {"chunk": 20}, lambda q, kv: (kv <= q) & (q // 20 == kv // 20)),
    ("Padding", 0, {"lengths": torch.tensor([50])}, lambda q, kv: kv < 50),
    ("Padding", 1, {"keep": FLAGS[None]}, lambda q, kv: FLAGS[kv]),
    ("Two-sided window", 0, {"reach": 5}, lambda q, kv: (q - kv).abs() <= 5),
    ("Packed sequences", 0, {"doc": IDS[None]}, lambda q, kv: IDS[q] == IDS[kv]),
    (
        "Window and global tokens", 0, {"reach": 5, "whole": FLAGS[None]},
        lambda q, kv: ((q - kv).abs() <= 5) | FLAGS[q] | FLAGS[kv],
    ),
    (
        "Random blocks", 0, {"block": 16, "drawn": torch.eye(6).flip(0).bool()[None]},
        lambda q, kv: (
            (q // 16 % 5 == 0) | (kv // 16 % 5 == 0) | ((q // 16 - kv // 16).abs() <= 1)
            | (q // 16 + kv // 16 == 5)
        ),
    ),
    (
        "Text and image together", 0, {"room": 20, "text_len": torch.tensor([7])},
        lambda q, kv: (kv < 7) | (kv >= 20),
    ),
    ("Prefix", 0, {"prefix": torch.tensor([30])}, lambda q, kv: (kv <= q) | (kv < 30)),
    (
        "Block diffusion", 0, {"n": 48, "w": 8},
        lambda q, kv: torch.where(
            q < 48,
            torch.where(kv < 48, q // 8 == kv // 8, (kv - 48) // 8 < q // 8),
            (kv >= 48) & (kv // 8 <= q // 8),
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("heading", "number", "captures", "live"), MASKS)
def test_masks_of_models(heading, number, captures, live):
    attention = attndsl.compile(_program(heading, number))
    found = attention.mask(L, L, captures=captures)
    q, kv = torch.meshgrid(torch.arange(L), torch.arange(L), indexing="ij")
    assert torch.equal(found[0, 0], live(q, kv))


def test_the_scores_of_models():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 24, 8, dtype=torch.float64).unbind()
    raw = q @ k.mT
    back = torch.arange(24)[:, None] - torch.arange(24)
    dead = torch.zeros(24, 24).double().masked_fill(back < 0, -torch.inf)
    rope_q, rope_k = torch.randn(2, 3, 24, 4).double(), torch.randn(2, 24, 4).double()
    latent = attndsl.compile(_program("Latent attention"))
    found = latent.scores(q, k, scale=1.0, rate=0.3, q_rope=rope_q, k_rope=rope_k)
    torch.testing.assert_close(found, 0.3 * (raw + rope_q @ rope_k[:, None].mT) + dead)
    default = re.search(r"rate: float = ([\d.]+)", _program("Latent attention"))[1]
    assert float(default) == pytest.approx((0.1 * math.log(40) + 1) ** 2 * (128 + 64) ** -0.5)
    slope = torch.rand(3).double()
    found = attndsl.compile(_program("ALiBi", 1)).scores(q, k, scale=1.0, slope=slope)
    torch.testing.assert_close(found, raw - slope[:, None, None] * back + dead)
    found = attndsl.compile(_program("ALiBi")).scores(q[:, :2], k[:, :2], scale=1.0)
    torch.testing.assert_close(
        found, raw[:, :2] - torch.tensor([2.0**-4, 2.0**-8]).double()[:, None, None] * back + dead
    )
    capped = attndsl.compile(_program("Soft cap", 1)).scores(q, k, scale=1.0)
    torch.testing.assert_close(capped, 50 * torch.tanh(raw / 50) + dead)
    assert torch.equal(attndsl.compile(_program("All pairs")).scores(q, k, scale=1.0), raw)
    near = torch.randn(2, 3, 24, 5).double()
    found = attndsl.compile(_program("Per-query bias")).scores(q, k, scale=1.0, near=near, window=9)
    # Inkling's own rule (transformers' ``InklingRelativeLogits``): none from distance 5 on.
    index = back.clamp(0, 4).expand(2, 3, -1, -1)
    bias = near.gather(-1, index).masked_fill((back < 0) | (back >= 5), 0.0)
    torch.testing.assert_close(found, raw + bias + dead.masked_fill(back >= 9, -torch.inf))


def test_the_snippets_of_models_compute_what_the_programs_do():
    text = (DOCS / "models.md").read_text("utf-8")
    names = {}
    for snippet in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(snippet, "models.md", "exec"), names)
    q, k, v, table, sink = (names[name] for name in ("q", "k", "v", "table", "sink"))
    of_pairs = attndsl.compile(_program("T5", 1))
    torch.testing.assert_close(names["attended"], of_pairs(q, k, v, table=table, scale=1.0))
    dead = torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(dead, -torch.inf)
    weights = torch.cat([scores, sink[..., None]], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(names["out"], weights @ v, atol=1e-5, rtol=1e-5)


def _t5_bucket(relative, bidirectional, buckets=32, longest=128):
    """T5's own rule (arXiv 1910.10683; mesh_tensorflow's ``_relative_position_bucket``).

    ``relative`` is the key's position less the query's.
    """
    found = torch.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        found = (relative > 0).long() * buckets
        back = relative.abs()
    else:
        back = (-relative).clamp_min(0)
    exact = buckets // 2
    ratio = (back.float().clamp_min(1) / exact).log() / torch.tensor(longest / exact).log()
    far = exact + (ratio * (buckets - exact)).long()
    return found + torch.where(back < exact, back, far.clamp_max(buckets - 1))


@pytest.mark.parametrize(("number", "bidirectional"), [(0, True), (1, False)])
def test_the_bias_of_t5(number, bidirectional):
    length = 300
    zeros = torch.zeros(1, 2, length, 4)
    table = torch.randn(2, 32)
    given = {"lengths": torch.tensor([length])} if bidirectional else {}
    program = attndsl.compile(_program("T5", number))
    found = program.scores(zeros, zeros, scale=1.0, table=table, captures=given)[0]
    relative = torch.arange(length) - torch.arange(length)[:, None]
    wanted = table[:, _t5_bucket(relative, bidirectional)]
    if not bidirectional:
        wanted = wanted.masked_fill(relative > 0, -torch.inf)
    # At powers of two of the ratio, logarithms may round to either side.
    assert (found == wanted).float().mean() > 0.99


def test_the_windows_of_swin():
    side, heads, windows = 3, 2, 2
    n = side * side
    table = torch.randn(heads, (2 * side - 1) ** 2)
    region = torch.tensor([[0] * n, [0, 0, 1, 0, 0, 1, 2, 2, 3]])
    zeros = torch.zeros(4, heads, n, 4)
    found = attndsl.compile(_program("Swin")).scores(
        zeros, zeros, side=side, table=table, region=region
    )
    # Swin's own index (arXiv 2103.14030): of differences along both axes.
    y, x = torch.arange(n) // side, torch.arange(n) % side
    down, across = y[:, None] - y + side - 1, x[:, None] - x + side - 1
    bias = table[:, down * (2 * side - 1) + across]
    same = region[:, :, None] == region[:, None]
    wanted = torch.where(same[:, None], bias, -torch.inf)
    assert torch.equal(found, wanted.repeat(4 // windows, 1, 1, 1))


def test_every_row_of_the_models_leads_to_a_program():
    text = (DOCS / "models.md").read_text("utf-8")
    rows = re.findall(r"^\| (?!model|---).*$", text, re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        anchors = re.findall(r"\]\(#([\w-]+)\)", row)
        assert anchors, row
        for anchor in anchors:
            heading = next(
                h for h in re.findall(r"^## (.*)$", text, re.MULTILINE)
                if h.lower().replace(" ", "-") == anchor
            )  # fmt: skip
            assert attndsl.compile(_program(heading))


def _settings():
    """mkdocs.yml, whose tags name functions of Python."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    return yaml.safe_load(re.sub(r"!!python\S+", "", text))


def _pages(nav):
    for item in nav:
        (found,) = item.values() if isinstance(item, dict) else (item,)
        yield from _pages(found) if isinstance(found, list) else [found]


def test_the_site_has_every_page_once_and_nothing_from_elsewhere():
    settings = _settings()
    pages = list(_pages(settings["nav"]))
    found = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}
    for_developers = {page for page in found if page.startswith("dev/")}
    assert sorted(pages) == sorted(found - for_developers)
    assert settings["not_in_nav"].split() == ["dev/*.md"]
    index = (DOCS / "dev" / "contributing.md").read_text("utf-8")
    for page in for_developers - {"dev/contributing.md"}:
        assert f"({page.removeprefix('dev/')})" in index, page
    assert settings["theme"]["font"] is False
    for path in (*DOCS.rglob("*.css"), *DOCS.rglob("*.svg")):
        text = re.sub(r"http://www\.w3\.org/\S+", "", path.read_text("utf-8"))
        assert "http" not in text, path
        assert "url(" not in text, path


def test_the_api_pages_have_every_public_name():
    pages = {path.stem: path.read_text("utf-8") for path in (DOCS / "api").glob("*.md")}
    shown = set(re.findall(r"^## `(\S+)`$", "\n".join(pages.values()), re.MULTILINE))
    modules = {"compat", "errors", "flex", "layout", "nn", "parallel"}
    for name in set(attndsl.__all__) - modules - {"AttnDSLError"}:
        assert f"attndsl.{name}" in shown, name
    listed = set(re.findall(r"^## `attndsl\.errors\.(\w+)`$", pages["errors"], re.MULTILINE))
    tree = ast.parse((ROOT / "attndsl" / "errors.py").read_text("utf-8"))
    assert listed == {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for name in attndsl.flex.__all__:
        assert f"attndsl.flex.{name}" in shown or f"`{name}`" in pages["flex"] or name == "trace"
    for name in attndsl.compat.__all__:
        assert f"attndsl.compat.{name}" in shown or f"`{name}`" in pages["compat"]
    methods = set(re.findall(r"^### `Attention\.(\w+)`$", pages["attention"], re.MULTILINE))
    assert {"__call__", "backward", "mask", "serve", "tiles", "tune"} <= methods


def test_the_api_pages_are_those_of_the_docstrings(script):
    api = script("api_pages")
    pages = {path.stem: path.read_text("utf-8") for path in (DOCS / "api").glob("*.md")}
    assert pages == {stem: api.page(stem) for stem in api.PAGES}, "run docs/api_pages.py"
    words = {stem: len(text.split()) for stem, text in pages.items()}
    assert max(words.values()) <= api.MOST_WORDS_OF_A_PAGE
    assert sum(words.values()) <= api.MOST_WORDS


def test_what_github_shows_and_the_site_would_not(script):
    hooks = script("hooks")
    page = "```yaml train.yaml key=a\nx\n```\n<details>\n```attn error\ny\n```\n"
    assert hooks.on_page_markdown(page, page=None, config=None, files=None) == (
        '```yaml title="train.yaml"\nx\n```\n<details markdown="1">\n'
        '```attn title="An error"\ny\n```\n'
    )


def _described(amount, scale=1.0, *, mode="auto", seed=None):
    """Multiply ``amount``, as :func:`~a.b.other` does.

    This paragraph is left out.

    Args:
        amount: (B, Hq, Lq, D). This sentence is left out.
        scale: A factor of so many words that this is a long sentence with several clauses;
            this one says nothing of values; 1 by default.
        mode: ``auto``: the fastest. ``slow``: the other one. This is left out.
        seed: Of e.g. Philox.

    Returns:
        The product. More.

    Raises:
        ShapeError, DTypeError: Whatever.
        ArgumentError: Another
            line.

    Example:
        >>> _described(1)
    """


def test_docstrings_of_the_site(script):
    api = script("api_pages")
    lines = api._about("described", _described, api.Described())
    assert "\n".join(lines).split("\n\n") == [
        "```text\ndescribed(amount, scale=1.0, *, mode='auto', seed=None)\n```",
        "Multiply `amount`, as `other` does.",
        "- `amount`: (B, Hq, Lq, D).\n"
        "- `scale`: A factor of so many words that this is a long sentence with several clauses; "
        "1 by default.\n"
        "- `mode`: `auto`: the fastest. `slow`: the other one.\n"
        "- `seed`: Of e.g. Philox.",
        "**Returns** The product.",
        "**Raises** `ShapeError`, `DTypeError`, `ArgumentError`\n",
    ]


def test_arguments_that_a_page_has_described_are_references(script):
    described = script("api_pages").Described()
    assert described.lines("f", [("a", "One."), ("b", "Two."), ("c", "Two.")]) == [
        "- `a`: One.", "- `b`, `c`: Two."
    ]  # fmt: skip
    assert described.lines("g", [("a", "One."), ("b", "Other.")]) == [
        "- `b`: Other.", "- `a`: see `f`."
    ]  # fmt: skip
    call = [("scale", "A factor."), ("q", "As of a call."), ("k", "The same."), ("n", "Own.")]
    assert described.lines("Attention.g", call) == [
        "- `n`: Own.", "- `scale`, `q`, `k`: see `Attention.__call__`."
    ]  # fmt: skip


def test_the_files_beside_the_readme_name_the_project_as_it_is():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    security = (ROOT / "SECURITY.md").read_text("utf-8")
    for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", security):
        headings = re.findall(r"^#+ (.*)$", (ROOT / target).read_text("utf-8"), re.MULTILINE)
        assert not anchor or anchor in [h.lower().replace(" ", "-") for h in headings]
    assert f"version {project['version']}" in (DOCS / "versions.md").read_text("utf-8")


def test_a_release_is_published_only_under_the_name_of_its_version():
    path = ROOT / ".github" / "workflows" / "publish.yml"
    workflow = yaml.safe_load(path.read_text("utf-8"))
    steps = workflow["jobs"]["build"]["steps"]
    (check,) = (step["run"] for step in steps if step.get("name") == "The tag is the version")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for tag, code in ((f"v{version}", 0), (version, 1), ("v99.0.0", 1)):
        environment = {**os.environ, "PATH": path, "GITHUB_REF_NAME": tag}
        done = subprocess.run(["bash", "-ec", check], cwd=ROOT, env=environment)
        assert done.returncode == code, tag
    assert workflow["jobs"]["publish"]["needs"] == "build"
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}


def test_the_charts_and_pictures_are_dark_on_dark_pages():
    for name in ("pictures", "speed", "decode", "benchmarks", "tutorial"):
        root = ET.fromstring((DOCS / f"{name}.svg").read_text("utf-8"))
        assert "prefers-color-scheme:dark" in root.find(f"{SVG}style").text, name
    pictures = ET.fromstring((DOCS / "pictures.svg").read_text("utf-8"))
    cells = [group for group in pictures.iter(f"{SVG}g") if group.get("class") == "w"]
    assert len(cells) == 6
    assert {group.get("shape-rendering") for group in cells} == {"crispEdges"}


LINKED = ("arxiv.org", "huggingface.co", "pre-commit.com", "pygments.org", "semver.org")
"""Sites that pages point to."""


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in tmp_path.rglob("*.html"):
        for found in re.findall(r'(?:src|href)="(https?://[^"]+)"', path.read_text("utf-8")):
            # Links that a reader may follow; nothing that a browser fetches.
            assert any(site in found for site in LINKED), found
