"""The tool that compares the kernels of two commits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fork_server import run_python, run_script

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import kernel_cases  # noqa: E402
import kernel_diff  # noqa: E402

KERNEL = {
    "case": "c", "setting": "s", "task": "forward", "kernel": "attention_forward", "ir": "1",
    "options": {"num_warps": "4"}, "launches": [{"programs": 8, "heads": 6, "kv_heads": 3}],
}  # fmt: skip


def reply(**changes):
    return {"kernels": [KERNEL | changes]}


def test_equal_replies_do_not_differ():
    assert kernel_diff.compare(reply(), reply()) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"ir": "2"}, "code"),
        ({"options": {"num_warps": "8"}}, "options"),
        ({"launches": [{"programs": 9, "heads": 6, "kv_heads": 3}]}, "launch"),
        ({"launches": [{"programs": 8, "heads": 3, "kv_heads": 6}]}, "launch"),
    ],
    ids=["code", "options", "programs", "swapped arguments"],
)
def test_a_difference_is_found(changes, what):
    found = kernel_diff.compare(reply(), reply(**changes))
    assert found == [("forward attention_forward #1", what)]


def test_ptx_decides_where_there_is_one():
    assert not kernel_diff.compare(reply(ir="1", ptx="p"), reply(ir="2", ptx="p"))
    assert kernel_diff.compare(reply(ir="1", ptx="p"), reply(ir="2", ptx="r"))


def test_an_argument_that_goes_is_no_difference():
    less = [{"programs": 8, "heads": 6}]
    assert not kernel_diff.compare(reply(), reply(launches=less))


def test_a_kernel_that_goes_is_a_difference():
    found = kernel_diff.compare(reply(), {"kernels": []})
    assert found == [("forward attention_forward #1", "is gone")]


TRACE = """
import json, sys
from types import SimpleNamespace
import kernel_trace
source = SimpleNamespace(name="k", signature={"Q": "*bf16", "d": "tensordesc<bf16[1, 64],x>",
                                              "heads": "i32", "N": "constexpr"})
launched = [{"first launch": 1, "kernel": "b"}, {"kernel": "c"}, {"first launch": 0, "kernel": "a"}]
assert [line["kernel"] for line in kernel_trace.in_order(launched)] == ["a", "b", "c"]
print(json.dumps([
    kernel_trace.roles_of(source),
    [
        (kernel_trace.normalise if "ttg." in text else kernel_trace.normalise_ptx)(text, *more)
        for text in json.load(sys.stdin)
        for more in [[["Q", "K"]] if "ttg." in text else [source]]
    ],
]))
"""
FORM = """#mma = #ttg.a<1>
#mma1 = #ttg.b<parent = #mma>
  %true_0 = arith.constant true
    ttg.warp_specialize(%arg0, %1, %arg1) attributes {x}
    default {
      use %arg0, %true_0 : #mma1
    }
    partition0(%arg7: !a, %arg8: !b, %arg9: !c) num_warps(4) {
      use %arg7, %arg8, %arg9, %arg10 : #mma
    } : (!a, !b, !c) -> ()
    use %arg1
"""
PTX = """
.version 8.7
.visible .entry k(
	.param .u64 k_param_0,
	.param .u32 k_param_6
)
{
	.loc	1 20 0
	ld.param.b64 	%rd7, [k_param_0]; // a comment
$L__BB0_3:
	ld.param.b32 	%r9, [k_param_6];
	@%p2 bra 	$L__BB0_3;
}
"""


def traced(*texts):
    environment = {"PYTHONPATH": str(ROOT / "tools"), "PATH": ""}
    done = run_python(TRACE, given=json.dumps(texts), env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ptx_is_compared_by_what_it_does():
    renumbered = PTX.replace("%rd7", "%rd8").replace("%r9", "%r4").replace("BB0_3", "BB0_17")
    swapped = PTX.replace("param_0]", "x").replace("param_6]", "param_0]").replace("x", "param_6]")
    roles, (text, same, other) = traced(PTX, renumbered, swapped)
    assert roles == ["Q", "d", "d.0", "d.1", "d.2", "d.3", "heads"]
    assert "[Q]" in text
    assert "[heads]" in text
    assert ".loc" not in text
    assert "comment" not in text
    assert same == text
    assert other != text


def test_forms_are_compared_by_what_warpgroups_are_handed():
    shuffled = FORM.replace("(%arg0, %1, %arg1)", "(%arg1, %arg0, %1)")
    shuffled = shuffled.replace("use %arg7, %arg8, %arg9", "use %arg8, %arg9, %arg7")
    shuffled = shuffled.replace("(!a, !b, !c)", "(!c, !a, !b)")
    shuffled = shuffled.replace("#mma1", "#mma7").replace("%true_0", "%true_3")
    other = FORM.replace("use %arg7, %arg8", "use %arg8, %arg7")
    _, (text, same, different) = traced(FORM, shuffled, other)
    assert "use %Q.handed, %1.handed, %K.handed, %arg10 : #ttg.a<1>" in text
    assert "use %Q, [true] : #ttg.b<parent = #ttg.a<1>>" in text
    assert same == text
    assert different != text


def test_cases_and_settings_have_names_of_their_own():
    for found in (kernel_cases.CASES, kernel_cases.SETTINGS):
        names = [item.name for item in found]
        assert len(names) == len(set(names))


def test_parts_share_out_all_calls():
    def calls(**given):
        return kernel_diff.calls_of(SimpleNamespace(**{"only": None, "sample": False} | given))

    whole = calls(part="1/1")
    settings = kernel_cases.SETTINGS
    assert len(whole) == sum(len(kernel_cases.cases_of(setting)) for setting in settings)
    known = {case.name for case in kernel_cases.CASES}
    assert {case for case, _ in whole} == known
    for family, rows in kernel_cases.ROWS.items():
        few = [setting for setting in settings if setting.family == family]
        assert few and 0 < len(kernel_cases.cases_of(few[0])) < len(known) and rows > 0  # noqa: PT018
    assert sorted(call for k in (1, 2, 3) for call in calls(part=f"{k}/3")) == sorted(whole)
    assert {setting for _, setting in calls(part="1/1", sample=True)} == set(kernel_diff.SAMPLE)


@pytest.mark.slow
def test_a_changed_template_is_noticed(tmp_path):
    """The working tree, and a copy whose forward has another constant."""
    tree = tmp_path / "copy"
    for part in (*kernel_diff.PARTS, "tools"):
        subprocess.run(["cp", "-r", str(ROOT / part), f"{tree}-{part}"], check=True)
    tree.mkdir()
    for part in (*kernel_diff.PARTS, "tools"):
        Path(f"{tree}-{part}").rename(tree / part)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "add", "."], cwd=tree, check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *author, "commit", "-qm", "base"], cwd=tree, check=True)
    (template,) = (tree / "backends").rglob("triton/**/templates/softmax.py")
    template.write_text(template.read_text().replace("0.6931471805599453", "0.6931471805599"))
    (template,) = (tree / "backends").rglob("triton/**/templates/backward_q.py")
    template.write_text(template.read_text().replace("dq * scale", "scale * dq * 2"))
    arguments = ["tools/kernel_diff.py", "HEAD", "--only", "causal | ", "--cache", str(tmp_path)]
    arguments[3] = "causal"
    found = subprocess.run(
        [sys.executable, *arguments, "--only", "no such case"], cwd=tree, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 1, found.stderr
    told = [
        line for line in found.stdout.splitlines() if line.startswith("causal | triton-bf16-64")
    ]
    assert len(told) == 2, found.stdout
    assert "attention_backward_q" in told[0]


def test_labels_that_nothing_jumps_to_are_no_difference():
    old = "L1:\n\tadd;\n\t@%p1 bra \tL2;\nL2:\n\tret;"
    new = "L1:\n\tadd;\nL2:\n\t@%p1 bra \tL3;\nL3:\n\tret;"
    assert kernel_diff.named_labels(old) == kernel_diff.named_labels(new)
    other = new.replace("bra \tL3", "bra \tL2")
    assert kernel_diff.named_labels(other) != kernel_diff.named_labels(old)


def test_calls_are_traced_with_lists_of_tiles_and_of_few_rows(tmp_path):
    wanted = {
        "hopper-bf16-64-cuda90": ("documents",
                                  {"list_tiles", "attention_forward", "attention_backward_kv"}),
        "decode-bf16-128-cuda90": ("sink", {"attention_decode"}),
        "serve-bf16-128-cuda90": ("alibi", {"attention_serve"}),
        "short-bf16-64-cuda90": ("causal",
                                 {"attention_short_forward", "attention_short_backward"}),
    }  # fmt: skip
    calls = [json.dumps([case, setting]) for setting, (case, _) in wanted.items()]
    done = run_script(
        ROOT / "tools" / "kernel_trace.py", "--texts", tmp_path, "--tree", ".",
        given="\n".join(calls), cwd=ROOT,
        env={name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for found in map(json.loads, done.stdout.splitlines()):
        assert "error" not in found
        names = {kernel["kernel"] for kernel in found["kernels"]}
        assert wanted[found["setting"]][1] <= names
