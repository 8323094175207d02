"""Warnings about programs and calls that are hardly meant so."""

import inspect
import pickle
import subprocess
import sys
import warnings

import pytest
import torch

import attndsl
from attndsl.errors import AttnDSLError, ProgramWarning, ShapeError, UnusedWarning


def rows(length, heads=2, dim=8):
    return torch.randn(1, heads, length, dim)


def warned(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert all(issubclass(each.category, ProgramWarning) for each in caught)
    # Each points at the caller, not into the package.
    assert {each.filename for each in caught} <= {__file__}
    return [each.message.message for each in caught]


def test_compile_and_load_tell_what_a_program_hardly_means(tmp_path):
    text = "near = q - kv\nmask = q < kv and kv < q"
    expected = ["nothing reads 'near'", "the mask is false for all pairs"]
    assert warned(lambda: attndsl.compile(text)) == expected
    assert warned(lambda: attndsl.compile(text)) == expected  # From memory as well.
    (tmp_path / "m.yaml").write_text("a: |\n  near = q - kv\n  mask = q < kv and kv < q\n")
    with pytest.warns(UnusedWarning, match=r"m\.yaml.*:2:\d+: nothing reads 'near'"):
        attndsl.load(tmp_path / "m.yaml")
    assert warned(lambda: attndsl.compile("causal()")) == []


def test_values_may_switch_a_mask_off():
    text = "param is_causal: bool\nmask = not is_causal or q >= kv"
    assert warned(lambda: attndsl.compile(text, is_causal=False)) == []
    none = "param w: int\nmask = causal() and q - kv < w"
    assert warned(lambda: attndsl.compile(none, w=0)) == ["the mask is false for all pairs"]


def test_each_is_printed_once(tmp_path):
    script = tmp_path / "layers.py"
    script.write_text(
        "import attndsl\n"
        "for _ in range(24):\n"
        "    attndsl.compile('x = q; mask = causal()')\n"
    )  # fmt: skip
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stderr.count("UnusedWarning") == 1
    assert done.stderr.startswith(f"{script}:3: UnusedWarning: <program>:1:1: nothing reads 'x'")


def test_causal_calls_of_two_lengths():
    attn = attndsl.compile("causal() and q - kv < 100")
    q, k = rows(1), rows(9)
    (said,) = warned(lambda: attn(q, k, k))
    assert said == (
        "the mask is causal, and a call of 1 rows and 9 keys has no offset: row 0 sees key 0 "
        "alone, and no row sees the last 8"
    )
    assert warned(lambda: attn(q, k, k)) == []  # A later call of the same signature.
    with pytest.warns(ProgramWarning) as caught:
        attndsl.compile("causal()")(q, k, k)
    assert "pass q_offset=8 if the rows are the last ones" in str(caught[0].message)
    assert "no row sees" not in warned(lambda: attn(k, q, q))[0]
    length = torch.tensor([9])
    for given in ({"q_offset": 8}, {"kv_offset": -8}, {"q_offset": length - 1},
                  {"kv_lengths": length}, {"q_index": torch.tensor([8])},
                  {"q_len": 9, "kv_len": 9}):  # fmt: skip
        assert warned(lambda given=given: attndsl.compile("causal()")(q, k, k, **given)) == []
    for text in ("causal_lower_right()", "q - kv < 3", "prefix_lm(3)", "score"):
        assert warned(lambda text=text: attndsl.compile(text)(q, k, k)) == []
    assert warned(lambda: attn(k, k, k)) == []
    for few, many in ((rows(0), k), (k, rows(0))):
        assert warned(lambda few=few, many=many: attndsl.compile("causal()")(few, many, many)) == []


@pytest.mark.parametrize("name", ["q_offset", "kv_offset", "h_offset", "b_offset"])
def test_an_offset_of_0_says_where_a_call_lies(name):
    """The first part of a split has it."""
    q, k = rows(1), rows(9)
    attn = attndsl.compile("causal()")
    first = attn(q, k, k, q_offset=0)
    assert warned(lambda: attndsl.compile("causal()")(q, k, k, **{name: 0})) == []
    assert torch.equal(attn(q, k, k, **{name: 0}), first)
    assert "warning" not in attn.explain(q_len=1, kv_len=9, **{name: 0})
    assert "warning" in attn.explain(q_len=1, kv_len=9, **{name: None})
    assert len(warned(lambda: attndsl.compile("causal()")(q, k, k, kv_len=None))) == 1


def test_what_a_caller_wrote_is_no_name_of_a_call():
    x = rows(5)
    named = attndsl.compile("param said: float\nscore = score * said")
    assert torch.equal(named(x, x, x, said=0.5), named(x, x, x, captures={"said": 0.5}))
    assert "said" not in inspect.signature(attndsl.compile("causal()")).parameters


def test_torch_s_own_arguments_mean_what_torch_says():
    q, k = rows(1), rows(9)
    sdpa = attndsl.scaled_dot_product_attention
    assert warned(lambda: sdpa(q, k, k, is_causal=True)) == []
    score = attndsl.flex.flex_attention
    assert warned(lambda: score(q, k, k, score_mod=lambda s, b, h, i, j: s)) == []


def test_a_shape_with_heads_behind_lengths():
    attn = attndsl.compile("causal()")
    q = rows(4, heads=512)
    (said,) = warned(lambda: attn(q, q, q))
    assert said.startswith("q has 512 heads and 4 rows")
    assert warned(lambda: attn(rows(1, heads=128), *[rows(9, heads=128)] * 2, q_offset=8)) == []
    swapped = torch.randn(8, 128, 8, 64)  # (batch, length, heads, dim)
    for text in ("causal()", "score = 2 * score"):
        (said,) = warned(lambda text=text: attndsl.compile(text)(swapped, swapped, swapped))
        assert said.startswith("q has 128 heads and 8 rows")
    doc = attndsl.compile("tensor doc[batch, kv_len]: int\nmask = doc[b, q] == doc[b, kv]")
    swapped = rows(4, heads=64)
    with pytest.raises(ShapeError, match="dim 1 is declared as kv_len, which is 4") as caught:
        doc(swapped, swapped, swapped, doc=torch.zeros(1, 64, dtype=torch.int64))
    assert "transpose(1, 2)" in caught.value.hint
    with pytest.raises(ShapeError) as caught:
        doc(swapped, swapped, swapped, doc=torch.zeros(1, 63, dtype=torch.int64))
    assert "transpose" not in caught.value.hint


def test_few_rows_of_many_heads_are_usual_where_a_model_makes_them():
    attn = attndsl.compile("causal()")
    projected = torch.randn(1, 8, 128 * 4).view(1, 8, 128, 4).transpose(1, 2)
    assert warned(lambda: attn(projected, projected, projected)) == []
    q, shared = rows(8, heads=128), rows(8, heads=8)
    assert warned(lambda: attn(q, shared, shared)) == []
    assert warned(lambda: attn(q, q, q, q_offset=0)) == []
    for heads, length in ((32, 8), (64, 64), (128, 1), (16, 4)):
        q = rows(length, heads=heads)
        assert warned(lambda q=q: attn(q, q, q)) == []


def test_warnings_can_be_errors_or_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedWarning)
        with pytest.raises(AttnDSLError, match="nothing reads 'x'"):
            attndsl.compile("x = q\nmask = causal()")
        warnings.simplefilter("ignore", ProgramWarning)
        attndsl.compile("x = q\nmask = causal()")


def test_copies_warn_as_the_first_does():
    attn = pickle.loads(pickle.dumps(attndsl.compile("causal()")))
    assert len(warned(lambda: attn(rows(1), rows(9), rows(9)))) == 1
    optional = attndsl.compile("param w: int = none\nmask = causal() and q - kv < w")
    assert len(warned(lambda: optional(rows(1), rows(9), rows(9)))) == 1


def test_explain_says_it_too():
    text = attndsl.compile("causal()").explain(q_len=1, kv_len=64)
    assert text.splitlines()[-1].startswith("warning      the mask is causal")
    assert "warning" not in attndsl.compile("causal()").explain(q_len=1, kv_len=64, q_offset=63)


def test_another_process_reads_them_from_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path))
    text = "unread = q\nmask = causal() and q - kv < 7654"
    code = f"import attndsl; attndsl.compile({text!r}); import sys; print('lark' in sys.modules)"
    run = [sys.executable, "-c", code]
    first, again = (subprocess.run(run, capture_output=True, text=True) for _ in range(2))
    assert (first.stdout, again.stdout) == ("True\n", "False\n")
    assert "nothing reads 'unread'" in first.stderr
    assert again.stderr == first.stderr
