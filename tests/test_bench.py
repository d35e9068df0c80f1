"""The benchmark: its digests, its refusal to time wrong weights, and a whole run against the fake server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.bench_config import BenchConfig, check
from recipes.bench_report import chrome_trace, table
from recipes.bench_run import _rounds
from recipes.shapes import build, checkpoint_tensors, load_checkpoint, write_checkpoint
from recipes.sizes import SHAPES, parameters_of, shape_of
from recipes.weight_digest import Digester, _as_stored, compare, expected_digests
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent


def _digest(tensor: torch.Tensor) -> str:
    digester = Digester(CPU)
    digester.add("x", tensor)
    return digester.result()["x"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_digest_sees_every_bit_and_every_place(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 1001).to(dtype)
    flipped = tensor.clone()
    flipped.view(torch.uint8)[-1] ^= 1
    swapped = tensor.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    digests = [_digest(t) for t in (tensor, flipped, swapped, tensor[:-1], torch.zeros_like(tensor))]
    assert len(set(digests)) == len(digests)
    assert _digest(tensor.clone()) == digests[0]


def test_a_digest_does_not_depend_on_how_the_memory_lies() -> None:
    whole = torch.randn(7, 5).to(torch.bfloat16)
    assert _digest(whole.t()) == _digest(whole.t().contiguous())
    assert _digest(whole.view(-1)[1:]) == _digest(whole.view(-1)[1:].clone())  # not a multiple of a word


def test_a_long_digest_sees_chunks_that_changed_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.weight_digest._CHUNK", 16)
    tensor = torch.arange(64, dtype=torch.int32)
    assert _digest(tensor) != _digest(torch.cat([tensor[16:32], tensor[:16], tensor[32:]]))


def test_expected_parameters_are_put_together_as_vllm_stores_them() -> None:
    q, k, v, gate, up = (torch.randn(4, 3) for _ in range(5))
    tensors = [("a.q_proj.weight", q), ("a.k_proj.weight", k), ("a.v_proj.weight", v), ("norm.weight", q)]
    tensors += [("m.experts.0.gate_proj.weight", gate), ("m.experts.0.up_proj.weight", up)]
    tensors += [("m.experts.0.down_proj.weight", v)]
    expected = expected_digests(tensors, CPU)
    assert expected["a.qkv_proj.weight"] == (_digest(torch.cat([q, k, v])),)
    assert expected["m.experts.w13_weight[0]"] == (
        _digest(torch.cat([gate, up])),
        _digest(torch.cat([up, gate])),
    )
    assert expected.keys() == {
        "a.qkv_proj.weight",
        "norm.weight",
        "m.experts.w13_weight[0]",
        "m.experts.w2_weight[0]",
    }
    fused = expected_digests([("m.experts.gate_up_proj", torch.cat([gate, up])[None])], CPU)
    assert fused["m.experts.w13_weight[0]"] == expected["m.experts.w13_weight[0]"]


def test_wrong_missing_and_absent_experts() -> None:
    expected = {"a": ("1",), "b": ("2", "3"), "m.experts.w2_weight[4]": ("5",)}
    assert compare(
        expected, {"a": "1", "b": "3", "m.experts.routed_experts.w2_weight[4]": "5", "x": "9"}
    ).good
    verdict = compare(expected, {"a": "0", "b": "3"})
    assert (verdict.wrong, verdict.missing) == (["a"], ["m.experts.w2_weight[4]"])
    assert "differ" in verdict.text()
    assert compare(expected, {"a": "1", "b": "2"}, sharded_experts=True).good
    assert not compare(expected, {}).good


def test_shapes_have_the_real_sizes() -> None:
    def count(name: str, experts: str, layers: int | None = None) -> tuple[int, Any]:
        sizes = [sizes for _, sizes in parameters_of(shape_of(name, layers), experts)]
        return len(sizes), sum(torch.Size(s).numel() for s in sizes) * 2 / 1e9

    assert count("qwen3_8b", "each") == (399, pytest.approx(16.38, abs=0.01))
    assert count("qwen3_30b_a3b", "each", 12) == (4719, pytest.approx(16.20, abs=0.01))
    assert count("qwen3_30b_a3b", "fused", 12)[0] == 135
    assert SHAPES["qwen3_0_6b"].tied


@pytest.mark.parametrize("experts", ["each", "fused", "unfused"])
def test_a_checkpoint_fills_a_module_of_any_style(experts: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors to write a checkpoint")
    shape = shape_of("toy_moe")
    folder = write_checkpoint(shape, tmp_path, seed=3)
    whole = build(shape, None, device=CPU, dtype=torch.bfloat16, seed=3, scale=0.1)
    model = build(shape, None, device=CPU, dtype=torch.float32, experts=experts, seed=4)
    load_checkpoint(model, folder)
    wanted = expected_digests(checkpoint_tensors(whole, "each", torch.bfloat16), CPU)
    assert expected_digests(checkpoint_tensors(model, experts, torch.bfloat16), CPU) == wanted


def test_senders_of_ours_take_turns() -> None:
    assert _rounds(["vllm_packed", "ours", "ours_unpacked", "file"]) == [
        ["vllm_packed", "ours", "file"],
        ["ours_unpacked"],
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"variants": ["fast"]}, "fast"),
        ({"reps": 0}, "reps"),
        ({"dtypes": ["int8"]}, "int8"),
        ({"urls": {"x": ""}}, "x"),
    ],
)
def test_settings_that_cannot_work_are_named(change: dict[str, Any], named: str) -> None:
    config = BenchConfig(**change)
    with pytest.raises(ValueError, match=named):
        check(config)


def test_a_trace_opens_in_perfetto(tmp_path: Path) -> None:
    chrome_trace(
        [("load", 0, 0.0, 0.001), ("request", -1, 0.0, 0.002)], {"load_s": 1.0}, tmp_path / "trace.json"
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["name"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("load 0", 1000.0),
        ("request", 2000.0),
    ]


class _CheckedServer(FakeServer):
    """The fake server with the calls of `recipes.worker_extension`, on what its worker has read."""

    lies = False

    def _do_collective_rpc(self, query: Any, body: Any) -> Any:
        folder, answer = Path(body["args"][0]), {}
        if body["method"] == "check_digests":
            digester = Digester(CPU)
            for name, tensor in _as_stored(self.workers[0].weights.items()):
                if not name.endswith("|swapped"):
                    digester.add(name, tensor + 1 if self.lies and name == "model.norm.weight" else tensor)
            answer = digester.result()
        (folder / "0000.json").write_text(json.dumps({"ok": answer}))
        return {"results": [None]}


def _run(server: FakeServer, out: Path) -> tuple[int, list[dict[str, Any]], str]:
    argv = [
        sys.executable,
        "-m",
        "recipes.bench",
        "shape=toy",
        "device=cpu",
        "reps=2",
        "variants=[ours]",
        "soak=4",
    ]
    argv += [f"++urls.fsdp_ipc='{server.url}'", f"hydra.run.dir={out}", "bucket_mb=0.1", "dtypes=[float32]"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    lines = [json.loads(line) for line in (out / "bench.jsonl").read_text().splitlines()]
    return done.returncode, lines, done.stdout + done.stderr


def test_a_whole_run(tmp_path: Path) -> None:
    pytest.importorskip("hydra", reason="needs the extra 'recipes'")
    pytest.importorskip("transformers", reason="needs the extra 'recipes'")
    with _CheckedServer(backend="fsdp_ipc", workers=[NativeWorker(0)]) as server:
        code, lines, output = _run(server, tmp_path)
    assert code == 0, output
    result = next(line for line in lines if line["kind"] == "result")
    result["requests"].pop("/is_sleeping", None)  # this server does not tell whether it can sleep
    assert result["requests"] == {"/start_weight_update": 1, "/finish_weight_update": 1}
    assert result["tensors"] == 25
    assert "bit-exact" in result["verdict"]
    assert result["seconds"]["n"] == 2
    assert next(line for line in lines if line["kind"] == "soak")["syncs"] == 4
    assert "bit-exact" in (tmp_path / "table.txt").read_text()
    assert json.loads(next(tmp_path.glob("trace-*.json")).read_text())["traceEvents"]
    assert server.violations == []


def test_wrong_weights_get_no_time(tmp_path: Path) -> None:
    pytest.importorskip("hydra", reason="needs the extra 'recipes'")
    pytest.importorskip("transformers", reason="needs the extra 'recipes'")
    with _CheckedServer(backend="fsdp_ipc", workers=[NativeWorker(0)]) as server:
        server.lies = True
        code, lines, output = _run(server, tmp_path)
    assert code == 1, output
    result = next(line for line in lines if line["kind"] == "result")
    assert "model.norm.weight" in result["error"]
    assert "seconds" not in result
    assert "GB/s" in table([result])
    assert not any(line["kind"] == "soak" for line in lines)
