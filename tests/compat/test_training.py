"""The recipes of docs/training.md, in two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
SCRIPT = re.compile(r"^```text\n# (train_\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPTS = dict(SCRIPT.findall(PAGE.read_text("utf-8")))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo"),
]


def run(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def with_eager_attention(text):
    """The script with transformers' own window, which is the same mask."""
    for before, after in (
        ('"attndsl:q - kv < 16"', '"eager"'),
        ("Llama", "Mistral"),
        ("num_key_value_heads=2,", "num_key_value_heads=2, sliding_window=16,"),
    ):
        assert before in text
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize("name", ["train_accelerate.py", "train_lightning.py"])
def test_losses_are_those_of_eager_attention_with_the_same_mask(name, tmp_path):
    launcher = TORCHRUN if "accelerate" in name else ()
    losses = []
    for way, text in (("mine", SCRIPTS[name]), ("eager", with_eager_attention(SCRIPTS[name]))):
        (tmp_path / f"{way}_{name}").write_text(text, "utf-8")
        out = run([sys.executable, *launcher, f"{way}_{name}"], tmp_path)
        losses.append([float(x) for x in re.findall(r"^loss (\S+)$", out, re.MULTILINE)])
    assert len(set(losses[0])) == 4  # 16 sequences, 2 processes, 2 at once.
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GptOssConfig, GptOssForCausalLM
import attndsl

attndsl.hf.register()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
config = GptOssConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, sliding_window=8, num_local_experts=2,
    num_experts_per_tok=1, layer_types=["sliding_attention", "full_attention"],
)
text = "attndsl:tensor gain[heads]: float; score = gain[h] * score"
model = GptOssForCausalLM._from_config(config, attn_implementation=text)
for layer in model.model.layers:
    layer.self_attn.gain = torch.nn.Parameter(torch.linspace(0.5, 1.5, 4))
ids = torch.randint(0, 64, (4, 24))


def gradients(model, ids):
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


whole = {name: grad.clone() for name, grad in gradients(model, ids).items()}
model.zero_grad()
mesh = init_device_mesh("cpu", (2,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
found = gradients(model, ids[2 * rank : 2 * rank + 2])
assert found.keys() == whole.keys()
for name, grad in whole.items():
    torch.testing.assert_close(found[name].full_tensor(), grad, atol=1e-5, rtol=1e-4)
assert any("gain" in name for name in whole) and any("sinks" in name for name in whole)
dist.barrier()
dist.destroy_process_group()
print("equal")
"""


def test_a_sharded_model_has_the_gradients_of_a_whole_one(tmp_path):
    (tmp_path / "sharded.py").write_text(SHARDED, "utf-8")
    out = run([sys.executable, *TORCHRUN, "sharded.py"], tmp_path)
    assert out.count("equal") == 2
