"""What notebooks show: tables, tiles and traces as they read, and cells that are programs."""

import pickle
import xml.etree.ElementTree as ET

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import attndsl
from attndsl.errors import NameResolutionError


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """A shell with the extension, whose history is nobody's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        shell = InteractiveShell()
        shell.history_manager.enabled = False
        shell.colors = "nocolor"
        shell.run_line_magic("load_ext", "attndsl")
        yield shell
        shell.history_manager.end_session()


def _texts(html):
    return "".join(ET.fromstring(html).itertext())


def test_tile_maps_show_what_print_shows():
    tiles = attndsl.compile("causal()").tiles(40, 56, 16, 16)
    assert repr(tiles) == str(tiles)
    assert str(tiles).splitlines()[-3:] == ["+...", "#+..", "##+."]
    assert _texts(tiles._repr_html_()).replace("\n\n", "\n") == str(tiles)
    many = attndsl.compile("q // 64 == kv // 64").tiles(2100, 2100, 16, 16)
    assert "one character for 3 x 3 tiles" in repr(many)
    assert _texts(many._repr_html_()).replace("\n\n", "\n") == str(many)
    assert repr([attndsl.compile("causal()").tiles(0, 0)]).startswith("[0 x 0 tiles")


def test_verifications_say_what_was_found():
    found = attndsl.verify("causal()", 40, 40)
    assert (
        repr(found)
        == str(found)
        == (
            "3 tiles checked against the mask, 3 of them live; 0 treated with more care than needed"
        )
    )


def test_traces_show_their_program_and_captures():
    doc, near = torch.arange(20).reshape(2, 10), torch.tensor(2.5)
    traced = attndsl.trace(
        lambda score, b, h, q, kv: torch.where(doc[b, q] == doc[b, kv], score * near, -torch.inf)
    )
    assert repr(traced).startswith(str(traced).rstrip("\n"))
    assert repr(traced).splitlines()[-1] == "# captures: doc int64 (2, 10), near float32 ()"
    assert _texts(traced._repr_html_()) == repr(traced)
    plain = attndsl.trace(lambda b, h, q, kv: q >= kv)
    assert repr(plain) == str(plain).rstrip("\n") == "mask = kv <= q"
    # What is shown is a program too.
    attndsl.compile(repr(traced))


def test_programs_of_a_file_are_a_dict_and_a_table(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(
        "global: causal()\n'<local>':\n  program: |\n    # Gemma's\n    q - kv < window\n"
        "  params: {window: 8}\n"
    )
    programs = attndsl.load(path)
    assert isinstance(programs, dict)
    assert list(programs) == ["global", "<local>"]
    assert programs == dict(programs) == pickle.loads(pickle.dumps(programs))
    table = ET.fromstring(programs._repr_html_())
    rows = [["".join(cell.itertext()) for cell in row] for row in table]
    assert rows == [["global", "causal()"], ["<local>", "# Gemma's\nq - kv < window\n# window = 8"]]
    q = torch.randn(1, 2, 16, 8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(q):
        for name, program in programs.items():
            q = program(q, q, q) + programs[name](q, q, q)
        return q * len(programs)

    out = q
    for program in programs.values():
        out = 2 * program(out, out, out)
    torch.testing.assert_close(layer(q), 2 * out)


def test_representations_leave_comments_out():
    shown = repr(attndsl.compile("# Gemma 2\nparam w: int\nmask = q - kv < w  # near\n"))
    assert shown == "Attention('mask = q - kv < w', backend='auto')"


def test_a_cell_is_a_program(shell):
    ran = shell.run_cell("%%attn local window=8\nmask = causal() and q - kv < window\n")
    local = shell.user_ns["local"]
    assert ran.success
    assert ran.result is local
    assert local == attndsl.compile("mask = causal() and q - kv < window\n", window=8)
    shown = shell.display_formatter.format(local)[0]
    assert set(shown) == {"text/plain", "text/html"}
    assert shown["text/html"].startswith("<svg")
    assert "# window = 8" in shown["text/html"]
    shown = shell.display_formatter.format(local.plot())[0]
    assert set(shown) == {"text/plain", "text/html", "image/svg+xml"}
    assert shown["text/plain"].startswith("<picture of")


def test_bindings_are_numbers_or_variables(shell):
    doc = torch.arange(16)[None] // 5
    shell.user_ns |= {"ids": doc, "near": 3}
    cell = "%%attn packed doc=ids near=near cap=2.5 on=true off=False\n"
    ran = shell.run_cell(
        f"{cell}mask = doc[b, q] == doc[b, kv] and q - kv < near and on and not off\n"
        "score = softcap(score, cap)"
    )
    assert ran.success
    q = torch.randn(1, 2, 16, 8)
    wanted = attndsl.compile(
        "mask = doc[b, q] == doc[b, kv] and q - kv < 3; score = softcap(score, 2.5)", doc=doc
    )
    torch.testing.assert_close(shell.user_ns["packed"](q, q, q), wanted(q, q, q))


def test_errors_of_a_cell_are_shown_alone_and_change_nothing(shell, capsys):
    shell.user_ns["kept"] = "as it was"
    ran = shell.run_cell("%%attn kept window=8\n\nmask = causl() and q - kv < window\n")
    assert isinstance(ran.error_in_exec, NameResolutionError)
    assert capsys.readouterr().out.strip() == (
        "NameResolutionError: %%attn kept:3:8: there is no function 'causl'\n"
        "    mask = causl() and q - kv < window\n"
        "           ^^^^^^^\n"
        "  hint: did you mean 'causal'?"
    )
    assert shell.user_ns["kept"] == "as it was"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "there is no name"),
        ("3d", "'3d' is no name"),
        ("window=8", "'window=8' is no name"),
        ("local window", "'window' gives no param a value"),
        ("local window=", "'window=' gives no param a value"),
        ("local window=nowhere", "'nowhere' is neither a number nor a variable"),
        ("local window='8'", "window is a str"),
    ],
)
def test_wrong_lines_say_what_to_write(shell, capsys, line, said):
    ran = shell.run_cell(f"%%attn {line}\nq >= kv\n")
    assert isinstance(ran.error_in_exec, attndsl.AttnDSLError)
    out = capsys.readouterr().out
    assert said in out
    assert "hint: " in out
    assert "Traceback" not in out


def test_the_magic_can_be_taken_away(shell):
    shell.run_line_magic("unload_ext", "attndsl")
    assert "attn" not in shell.magics_manager.magics["cell"]
    shell.run_line_magic("load_ext", "attndsl")
    assert "attn" in shell.magics_manager.magics["cell"]
