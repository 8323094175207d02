"""torchtitan's own trainer with sequences that processes share.

It takes what ``test_torchtitan.py`` asks for, and ``torchdata``.
"""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.shard_work import start_processes
from support.titan_trainer import BATCH, LENGTH, RUNS, STEPS, Run, config_of, leave_out, work
from torch.distributed.device_mesh import init_device_mesh

from attndsl import errors
from attndsl.parallel import Shape

NEEDED = ("torchtitan", "torchdata")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module", autouse=True)
def _left_out():
    with leave_out():
        yield


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the first process of each number tells, by number and run; all tell the same losses."""
    folder, found = tmp_path_factory.mktemp("titan"), {}
    for world in RUNS:
        start_processes(work, (world, str(folder)), world)
        ranks = [
            json.loads(Path(folder, f"told{world}.{rank}.json").read_text("utf-8"))
            for rank in range(world)
        ]
        for name in RUNS[world]:
            assert len({str(rank[name]["losses"]) for rank in ranks}) == 1
            found[world, name] = [rank[name] for rank in ranks]
    return found


@pytest.mark.gpu
@pytest.mark.several_gpus
def test_losses_of_two_gpus_are_those_of_one(tmp_path):
    """In bf16, eager with checkpoints, and compiled."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = {}
    for world in (1, 2):
        start_processes(work, (world, str(tmp_path), "cuda"), world)
        found[world] = json.loads((tmp_path / f"told{world}.0.json").read_text("utf-8"))
    alone = found[1].pop("alone")
    assert alone["losses"][2] < alone["losses"][0]
    assert "compiled" in found[2]
    for name, run in found[2].items():
        assert run["losses"] == pytest.approx(alone["losses"], abs=1e-2), name
        assert "rows on 2 ranks" in run["explained"]


SHARED = [(world, name) for world in RUNS for name in RUNS[world] if world > 1]


@pytest.mark.parametrize(("world", "name"), SHARED)
def test_losses_are_those_of_one_process(told, world, name):
    (alone,), shared = told[1, "alone"], told[world, name]
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][2] < alone["losses"][0]
    assert shared[0]["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    if RUNS[world][name].validated:
        assert len(alone["validated"]) == 2
        assert shared[0]["validated"] == pytest.approx(alone["validated"], abs=1e-4)
    else:
        assert shared[0]["validated"] == []
    # Each row is one process's, and all processes have as many.
    assert {rank["tokens"] for rank in shared} == {STEPS * BATCH * LENGTH // world}


def test_layouts_are_those_that_the_configuration_names(told):
    assert told[1, "alone"][0]["explained"] == ""
    assert "head_tail" in told[2, "compiled"][0]["explained"]
    assert "balanced" in told[2, "eager"][0]["explained"]
    layout_of = importlib.import_module("attndsl.torchtitan.sharing_config").layout_of
    assert (layout_of(None), layout_of("auto")) == ("contiguous", "auto")


def test_batches_that_cannot_be_shared_are_refused(told):
    for rank in told[2, "eager"]:
        without, others = rank["refused"]
        assert "ArgumentError" in without
        assert "gives no positions" in without
        assert "UnsupportedError" in others
        assert "pixel_values" in others


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("program", "epilogue"),
    [
        ("score = softcap(score, 5.0)", None),
        ("q - kv < 9", lambda out, lse: out * torch.sigmoid(lse).unsqueeze(-1)),
        ("weights = sigmoid(score)", None),
    ],
)
def test_a_graph_has_what_eager_calls_have(mesh, program, epilogue):
    """The log-sum-exp too, by which gpt-oss scales outputs; gradients come through both."""
    parts = [
        importlib.import_module(f"attndsl.torchtitan.{x}")
        for x in ("shared_attention", "shared_batches")
    ]
    module = parts[0].Shared.Config(program=program, window_size=(20, 0)).build()
    rows = parts[1].SharedRows(mesh, "auto", [module], Shape(1, 4, 2, 8, 8))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    drawn = torch.Generator().manual_seed(2)
    for begin in (20, 33):
        positions = torch.cat([torch.arange(begin), torch.arange(64 - begin)]).expand(2, -1)
        _, _, more = rows.share({"input": positions, "positions": positions}, positions)
        operands = [torch.randn(2, 64, n, 8, generator=drawn).requires_grad_() for n in (4, 2, 2)]
        weight = torch.randn(2, 64, 4, 8, generator=drawn)
        found = []
        for call in (module, compiled):
            out = call(
                *operands, attention_masks=more["attention_masks"], out_transform=epilogue
            )  # fmt: skip
            found.append([out, *torch.autograd.grad((out * weight).sum(), operands)])
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x, y)
        with torch.no_grad():
            lone = compiled(
                *operands, attention_masks=more["attention_masks"], out_transform=epilogue
            )  # fmt: skip
        torch.testing.assert_close(lone, found[0][0])
    assert "64 rows" in rows.explain()


def test_a_module_without_a_trainer_says_what_it_needs():
    shared = importlib.import_module("attndsl.torchtitan.shared_attention")
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(errors.ArgumentError, match="says no documents") as caught:
        shared.Shared.Config().build()(x, x, x, attention_masks=None)
    assert "attndsl.torchtitan.Trainer" in caught.value.hint


def changed(path, value):
    """A configuration with two processes to a sequence, and one setting of another value."""
    config = config_of(Run(2))
    *parts, last = path.split(".")
    home = config
    for part in parts:
        home = getattr(home, part)
    setattr(home, last, value)
    return config


def layers_with(attention):
    config = config_of(Run(2))
    for layer in config.model_spec.model.layers[2:]:
        layer.attention.inner_attention = attention
    return config


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("parallelism.context_parallel_load_balancer", "ptrr", "there is no such layout"),
        ("training.seq_len", 250, "no layout that gives 2 processes as many"),
        ("parallelism.pipeline_parallel_degree", 2, "a pipeline has several batches"),
        ("parallelism.spmd_backend", "full_dtensor", "gathers all keys"),
        ("debug.spmd_typechecking", True, "checker of SPMD types"),
        ("training.disable_cuda_graphs", False, "would replay the plan"),
    ],
)
def test_what_cannot_be_shared_is_refused(path, value, said):
    sharing = importlib.import_module("attndsl.torchtitan.sharing_config")
    trainer = importlib.import_module("attndsl.torchtitan.trainer")
    with pytest.raises(errors.AttnDSLError, match=said) as caught:
        sharing.shared(changed(path, value), trainer.Validator)
    assert caught.value.hint


def test_models_that_cannot_be_shared_are_refused():
    sharing = importlib.import_module("attndsl.torchtitan.sharing_config")
    attention = importlib.import_module("torchtitan.models.common.attention")
    own = importlib.import_module("attndsl.torchtitan").Attention
    for given, said in (
        (attention.FlexAttention.Config(), r"layers\.2\.attention\.inner_attention is a Flex"),
        (attention.VarlenAttention.Config(), "is a VarlenAttention.Config"),
        (own.Config(program="weights = dropout(softmax(score), 0.5)"), "has dropout"),
    ):
        with pytest.raises(errors.UnsupportedError, match=said):
            sharing.shared(layers_with(given), None)
    config = config_of(Run(2))
    config.model_spec.model.layers.clear()
    with pytest.raises(errors.UnsupportedError, match="no attention of attndsl"):
        sharing.shared(config, None)


def test_a_validator_of_another_kind_is_refused():
    sharing = importlib.import_module("attndsl.torchtitan.sharing_config")
    trainer = importlib.import_module("attndsl.torchtitan.trainer")
    config = config_of(Run(2))
    config.validator = trainer.Validator.Config(enable=True)
    with pytest.raises(errors.UnsupportedError, match="which shards batches by itself"):
        sharing.shared(config, trainer.Validator)


def test_the_configuration_stays_as_it_is():
    sharing = importlib.import_module("attndsl.torchtitan.sharing_config")
    trainer = importlib.import_module("attndsl.torchtitan.trainer")
    own = importlib.import_module("attndsl.torchtitan").Attention
    config = config_of(RUNS[2]["eager"])
    found = sharing.shared(config, trainer.Validator)
    assert isinstance(found.validator, trainer.Validator.Config)
    assert (found.validator.freq, found.validator.steps) == (STEPS, 2)
    assert all(
        isinstance(layer.attention.inner_attention, own.Config)
        for layer in config.model_spec.model.layers
    )
    shape = sharing.shape_of(found)
    assert shape == (1, 16, 16, 16, 16, 4)


def test_without_its_packages_the_error_says_what_to_install(monkeypatch):
    home = importlib.import_module("attndsl.torchtitan")
    monkeypatch.delitem(sys.modules, "attndsl.torchtitan.trainer", raising=False)
    monkeypatch.setitem(sys.modules, "torchtitan.distributed.spmd_types", None)
    with pytest.raises(errors.UnsupportedError, match="spmd_types") as caught:
        _ = home.Trainer
    assert "torchtitan==0.3.0" in caught.value.hint
    with pytest.raises(AttributeError, match="no attribute 'Trained'"):
        _ = home.Trained


def test_the_example_is_a_configuration_of_torchtitan(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "long"))
    config = importlib.import_module("torchtitan.config").ConfigManager().parse_args(
        ["--module", "titan", "--config", "llama3_8b_long",
         "--parallelism.context_parallel_degree", "4"]
    )  # fmt: skip
    home = importlib.import_module("attndsl.torchtitan")
    assert type(config) is home.Trainer.Config
    sharing = importlib.import_module("attndsl.torchtitan.sharing_config")
    validator = importlib.import_module("attndsl.torchtitan.trainer").Validator
    found = sharing.shared(config, validator)
    assert sharing.shape_of(found) == (1, 32, 8, 128, 128, 2)
    programs = [x.attention.inner_attention.program for x in found.model_spec.model.layers]
    assert programs[:4] == ["q - kv < 4096"] * 3 + [""]
