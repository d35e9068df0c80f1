"""The stock wire: dialects by release, chunk layout, payloads, and what they refuse; without a server or a GPU."""

from __future__ import annotations

import base64
import itertools
import json
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ipc.clients import HTTPWeightSyncClient, ServerRequestError
from fsdp_ipc.metadata import ParamMeta
from fsdp_ipc.wire.stock import DIALECTS, StockWire, dialect_for, json_safe, merge_handles, packed_layout
from tests.fake_server import UUIDS, FakeServer, StockWorker, fake_rebuild_args

VERSIONS = [f"0.{minor}.0" for minor in range(22, 34)]
F32, BF16, I64, BOOL = torch.float32, torch.bfloat16, torch.int64, torch.bool


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "a.weight": torch.randn(3, 1, generator=generator).to(BF16),
        "a.scale": torch.randn(64, 3, generator=generator),
        "b.mask": torch.tensor([True, False, True]),
        "b.weight": torch.randn(7, 13, generator=generator).to(BF16),
        "b.count": torch.tensor([5, 6, 7]),
        "b.empty": torch.empty(0, 4),
        "b.step": torch.tensor(3.5),
    }


def metas_of(values: dict[str, torch.Tensor]) -> list[ParamMeta]:
    return [ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in values.items()]


def raw(value: torch.Tensor) -> torch.Tensor:
    return (
        value.contiguous().reshape(-1).view(torch.uint8)
        if value.numel()
        else torch.empty(0, dtype=torch.uint8)
    )


class Exports:
    """Exported memory that a fake worker can read, and the counter that makes each export a different one."""

    def __init__(self) -> None:
        self.buffers: dict[bytes, torch.Tensor] = {}
        self.serial = 0

    def export(self, buffer: torch.Tensor) -> tuple[Any, ...]:
        key = str(id(buffer)).encode()
        self.buffers[key] = buffer
        self.serial += 1
        return fake_rebuild_args(key, buffer.numel(), serial=self.serial)

    def read(self, args: tuple[Any, ...]) -> torch.Tensor:
        return self.buffers[args[7]]


def send_packed(
    client: HTTPWeightSyncClient,
    wire: StockWire,
    exports: Exports,
    chunks: list[dict[str, torch.Tensor]],
    buffer: torch.Tensor,
    uuid: str = UUIDS[0],
) -> None:
    """One sync as a sender does it; the buffer is poisoned after every chunk."""
    client.start_weight_update()
    args = exports.export(buffer)
    for number, chunk in enumerate(chunks):
        layout = packed_layout(metas_of(chunk))
        for meta, offset in zip(layout.metas, layout.offsets, strict=True):
            buffer[offset : offset + meta.nbytes] = raw(chunk[meta.name])
        if number and wire.exports_per_sync == "one a chunk":
            args = exports.export(buffer)
        client.update_weights(wire.update_info(layout.metas, {uuid: args}))
        buffer.fill_(0xFF)
    client.finish_weight_update(wire.weight_version("step-3"))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_packed_sync_delivers_the_bytes_to_every_release(version: str) -> None:
    values, exports = tensors(), Exports()
    wire = StockWire(dialect_for(version))
    with FakeServer(version=version, read=exports.read) as server:
        client = HTTPWeightSyncClient(server.url, request_timeout_s=5)
        client.init_weight_transfer_engine(wire.init_info())
        for _ in range(2):
            names = list(values)
            chunks = [{n: values[n] for n in names[:3]}, {n: values[n] for n in names[3:]}]
            send_packed(client, wire, exports, chunks, torch.zeros(2048, dtype=torch.uint8))
        worker = server.workers[0]
        assert server.violations == []
        assert server.published == (["step-3", "step-3"] if wire.dialect.weight_version else [])
        assert worker.num_opens == (4 if wire.dialect.export_per_chunk else 2)
    assert set(worker.weights) == set(values)
    for name, value in values.items():
        got = worker.weights[name]
        assert got.dtype == value.dtype
        assert torch.equal(got.reshape(value.shape), value), name


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unpacked_sync_delivers_the_bytes_to_every_release(version: str) -> None:
    values, exports = tensors(), Exports()
    wire = StockWire(dialect_for(version), packed=False)
    with FakeServer(version=version, read=exports.read) as server:
        client = HTTPWeightSyncClient(server.url, request_timeout_s=5)
        client.init_weight_transfer_engine(wire.init_info())
        client.start_weight_update()
        buffers = {name: raw(value).clone() for name, value in values.items()}
        handles = [{UUIDS[0]: exports.export(buffer)} for buffer in buffers.values()]
        client.update_weights(wire.update_info(metas_of(values), handles))
        client.finish_weight_update(wire.weight_version("step-3"))
        assert server.violations == []
        got = server.workers[0].weights
    for name, value in values.items():
        assert got[name].shape == value.shape
        assert torch.equal(got[name], value), name


def test_the_dialects_leave_no_gap_and_say_where_packed_goes() -> None:
    for earlier, later in itertools.pairwise(DIALECTS):
        assert later.first == (earlier.last[0], earlier.last[1] + 1)
    assert StockWire(dialect_for("0.26.0")).init_info() == {}
    assert StockWire(dialect_for("0.27.0")).init_info() == {"packed": True}
    assert StockWire(dialect_for("0.26.0")).exports_per_sync == "one a chunk"
    assert StockWire(dialect_for("0.28.0")).exports_per_sync == "one"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.26.0", (0, 25)),
        ("0.28.0rc1", (0, 28)),
        ("v0.31.2.post1", (0, 29)),
        ("0.32.0+cpu", (0, 32)),
        ("0.33.1.dev7+gabcdef", (0, 32)),
    ],
)
def test_a_release_finds_its_dialect(version: str, expected: tuple[int, int]) -> None:
    assert dialect_for(version).first == expected


@pytest.mark.parametrize("version", ["0.17.0", "0.21.3", "0.9.2"])
@pytest.mark.parametrize("on_unknown", ["refuse", "nearest"])
def test_releases_before_the_wire_are_refused(version: str, on_unknown: Any) -> None:
    with pytest.raises(ValueError, match=r"too old.*0\.22 to 0\.33"):
        dialect_for(version, on_unknown=on_unknown)


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.1.dev1+g123", "main"])
def test_an_unknown_release_is_refused_or_takes_the_newest_with_a_warning(version: str) -> None:
    with pytest.raises(ValueError, match="on_unknown_version='nearest'"):
        dialect_for(version)
    with pytest.warns(UserWarning, match="unknown"):
        assert dialect_for(version, on_unknown="nearest") is DIALECTS[-1]


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="on_unknown"):
        dialect_for("0.32.0", on_unknown="guess")  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([BF16, F32, I64, BOOL, torch.float8_e4m3fn, torch.complex64, torch.complex128]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=12,
    )
)
def test_any_chunk_has_aligned_views_and_no_gap(specs: list[tuple[torch.dtype, list[int]]]) -> None:
    metas = [ParamMeta(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(specs)]
    layout = packed_layout(metas)
    assert sorted(layout.order) == list(range(len(metas)))
    assert [metas[i] for i in layout.order] == list(layout.metas)
    end = 0
    for meta, offset in zip(layout.metas, layout.offsets, strict=True):
        assert offset == end
        assert offset % meta.dtype.itemsize == 0
        end += meta.nbytes
    assert layout.nbytes == end == sum(meta.nbytes for meta in metas)


def test_tensors_of_one_width_keep_their_order() -> None:
    metas = [ParamMeta(n, d, (3,)) for n, d in [("a", BF16), ("b", F32), ("c", BF16), ("d", F32)]]
    assert [meta.name for meta in packed_layout(metas).metas] == ["b", "d", "a", "c"]


def test_a_name_twice_in_a_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match=r"twice.*'a'"):
        packed_layout([ParamMeta("a", BF16, (3,)), ParamMeta("a", BF16, (3,))])


def test_a_chunk_that_was_not_laid_out_is_refused() -> None:
    metas = [ParamMeta("a", BF16, (3,)), ParamMeta("b", F32, (3,))]
    args = fake_rebuild_args(b"", 18)
    with pytest.raises(ValueError, match=r"b.*byte 6.*packed_layout"):
        StockWire(dialect_for("0.32.0")).update_info(metas, {UUIDS[0]: args})


def test_the_json_form_carries_the_same_handles_and_nothing_else_changes() -> None:
    handles = {UUIDS[0]: fake_rebuild_args(b"\x00\xff", 6)}
    info = StockWire(dialect_for("0.32.0")).update_info([ParamMeta("a", BF16, (3,))], handles)
    safe = json.loads(json.dumps(json_safe(info)))
    assert pickle.loads(base64.b64decode(safe.pop("ipc_handles_pickled"))) == handles
    assert safe == {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[3]], "tensor_sizes": [6]}
    assert json_safe({"session": "x", "plan": None}) == {"session": "x", "plan": None}


def test_scalars_travel_as_one_element_where_the_worker_cannot_unpack_them() -> None:
    meta, args = ParamMeta("s", F32, ()), {UUIDS[0]: fake_rebuild_args(b"", 4)}
    assert StockWire(dialect_for("0.31.0")).update_info([meta], args)["shapes"] == [[1]]
    assert StockWire(dialect_for("0.32.0")).update_info([meta], args)["shapes"] == [[]]
    assert StockWire(dialect_for("0.31.0"), packed=False).update_info([meta], [args])["shapes"] == [[]]


# Field cases.


@pytest.mark.parametrize("version", ["0.26.0", "0.28.0", "0.32.0"])
@pytest.mark.parametrize("bad", [(print, (1, 2)), (1, 2, 3), [0] * 15, tuple(range(14)), None])
def test_field_E13_handles_that_are_no_bare_tuple_of_15_are_refused(version: str, bad: Any) -> None:
    """https://github.com/vllm-project/vime/issues/58: (function, args) pairs became bare args."""
    with pytest.raises(ValueError, match=UUIDS[0]):
        StockWire(dialect_for(version)).update_info([ParamMeta("a", F32, (1,))], {UUIDS[0]: bad})


def test_field_E13_what_torch_gives_is_a_tuple_of_15_with_the_device_at_6() -> None:
    """https://github.com/vllm-project/vllm-ascend/pull/10996: too many values to unpack."""
    import inspect

    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    parameters = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert len(parameters) == 15
    assert parameters[6] == "storage_device"


def test_field_A14_the_device_index_of_the_exporter_matches_nothing() -> None:
    """https://github.com/pytorch/pytorch/issues/149196: each process sees only its own GPU, as 0."""
    exports = Exports()
    wire = StockWire(dialect_for("0.32.0"))
    buffers = {uuid: torch.full((4,), index, dtype=torch.uint8) for index, uuid in enumerate(UUIDS[:2])}
    per_rank = []
    for index, (uuid, buffer) in enumerate(buffers.items()):
        args = list(exports.export(buffer))
        args[6] = 1 - index
        per_rank.append({uuid: tuple(args)})
    info = wire.update_info([ParamMeta("a", torch.uint8, (4,))], merge_handles(per_rank))
    for uuid, buffer in buffers.items():
        worker = StockWorker(wire.dialect, uuid, exports.read)
        worker.init(wire.init_info())
        worker.start()
        worker.update(info)
        worker.finish()
        assert torch.equal(worker.weights["a"], buffer)


@pytest.mark.parametrize("prefix", ["", "GPU-", "gpu-", "MIG-"])
def test_field_A15_a_worker_gets_the_bytes_of_its_gpu_whatever_the_rank_order(prefix: str) -> None:
    """https://github.com/sgl-project/sglang/pull/32685: payload picked by rank instead of GPU UUID."""
    exports = Exports()
    wire = StockWire(dialect_for("0.32.0"))
    buffers = [torch.full((4,), rank, dtype=torch.uint8) for rank in range(2)]
    reversed_uuids = [UUIDS[1], UUIDS[0]]
    per_rank = [
        {prefix + uuid.upper(): exports.export(buffers[rank])} for rank, uuid in enumerate(reversed_uuids)
    ]
    merged = merge_handles(per_rank)
    assert set(merged) == set(UUIDS[:2])
    with FakeServer(uuids=UUIDS[:2], read=exports.read) as server:
        client = HTTPWeightSyncClient(server.url, request_timeout_s=5)
        client.init_weight_transfer_engine(wire.init_info())
        client.start_weight_update()
        client.update_weights(wire.update_info([ParamMeta("a", torch.uint8, (4,))], merged))
        client.finish_weight_update()
        weights = {worker.uuid: worker.weights["a"] for worker in server.workers}
    assert torch.equal(weights[UUIDS[0]], buffers[1])
    assert torch.equal(weights[UUIDS[1]], buffers[0])


def test_field_A13_a_worker_on_another_gpu_names_both_sets_and_the_likely_mix_up() -> None:
    """https://github.com/vllm-project/vime/pull/144: local indices taken for absolute CUDA_VISIBLE_DEVICES."""
    wire = StockWire(dialect_for("0.32.0"))
    with FakeServer(uuids=[UUIDS[5]]) as server:
        client = HTTPWeightSyncClient(server.url, request_timeout_s=5)
        client.init_weight_transfer_engine(wire.init_info())
        client.start_weight_update()
        info = wire.update_info([ParamMeta("a", F32, (1,))], {UUIDS[1]: fake_rebuild_args(b"", 4)})
        with pytest.raises(ServerRequestError) as caught:
            client.update_weights(info)
    text = str(caught.value)
    assert UUIDS[5] in text
    assert UUIDS[1] in text
    assert "CUDA_VISIBLE_DEVICES" in text


@pytest.mark.parametrize("second", [UUIDS[0], "GPU-" + UUIDS[0].upper()])
def test_field_A16_two_ranks_on_one_gpu_are_refused(second: str) -> None:
    """No report; follows from vLLM's merge by UUID, which keeps the last rank's handle only."""
    args = fake_rebuild_args(b"", 4)
    with pytest.raises(ValueError, match=f"2 trainer ranks share GPU {UUIDS[0]}: ranks 0 and 2"):
        merge_handles([{UUIDS[0]: args}, {}, {second: args}])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("packed", [True, False])
def test_field_B17_packed_is_one_setting_for_handshake_and_updates(version: str, packed: bool) -> None:
    """https://github.com/huggingface/trl/pull/7104: the `packed` flag must agree on both sides."""
    wire = StockWire(dialect_for(version), packed=packed)
    meta, args = ParamMeta("a", F32, (1,)), {UUIDS[0]: fake_rebuild_args(b"", 4)}
    with pytest.raises(ValueError, match="agreed on in the handshake"):
        wire.update_info([meta], [args] if packed else args)
    flags = [
        wire.init_info().get("packed"),
        wire.update_info([meta], args if packed else [args]).get("packed"),
    ]
    assert flags == ([None, packed] if wire.dialect.packed_at == "update" else [packed, None])


def test_field_B17_a_server_that_was_told_otherwise_refuses_before_data() -> None:
    """https://github.com/huggingface/trl/pull/7104: server initialised with packed=False, sender packs."""
    wire = StockWire(dialect_for("0.32.0"))
    with FakeServer() as server:
        client = HTTPWeightSyncClient(server.url, request_timeout_s=5)
        client.init_weight_transfer_engine({"packed": False})
        client.start_weight_update()
        with pytest.raises(ServerRequestError, match="status 500"):
            client.update_weights(
                wire.update_info([ParamMeta("a", F32, (1,))], {UUIDS[0]: fake_rebuild_args(b"", 4)})
            )
        assert server.workers[0].names == []


def test_field_E17_rank_local_payloads_reach_their_worker_and_may_be_empty() -> None:
    """https://github.com/vllm-project/vllm/pull/52497: a list with one payload a worker, for owners of experts."""
    exports = Exports()
    wire = StockWire(dialect_for("0.29.0"))
    expert = torch.arange(4, dtype=torch.uint8)
    idle = torch.zeros(4, dtype=torch.uint8)
    entries = [
        wire.update_info([ParamMeta("experts.0", torch.uint8, (4,))], {UUIDS[0]: exports.export(expert)}),
        wire.update_info([], {UUIDS[1]: exports.export(idle)}),
    ]
    with FakeServer(version="0.29.0", uuids=UUIDS[:2], read=exports.read) as server:
        client = HTTPWeightSyncClient(server.url, request_timeout_s=5)
        client.init_weight_transfer_engine(wire.init_info())
        client.start_weight_update()
        client.update_weights(wire.list_payload(entries, world_size=2))
        client.finish_weight_update()
        first, second = server.workers
    assert torch.equal(first.weights["experts.0"], expert)
    assert second.weights == {}


def test_field_E17_rank_local_payloads_are_refused_where_they_would_lose_tensors() -> None:
    """https://github.com/vllm-project/vllm/pull/52497: a shared payload needs every tensor on every rank."""
    old, new = StockWire(dialect_for("0.28.0")), StockWire(dialect_for("0.29.0"))
    entry = new.update_info([], {UUIDS[0]: fake_rebuild_args(b"", 4)})
    with pytest.raises(ValueError, match=r"not every trainer rank holds every tensor.*0\.29"):
        old.list_payload([entry])
    with pytest.raises(ValueError, match="1 rank-local payloads for 2 workers"):
        new.list_payload([entry], world_size=2)
    with pytest.raises(ValueError, match="worker 1 has no payload"):
        new.list_payload([entry, None])


def test_the_strict_server_notices_an_export_that_is_opened_again() -> None:
    exports = Exports()
    for version in ("0.26.0", "0.28.0"):
        wire = StockWire(dialect_for(version))
        args = exports.export(torch.zeros(4, dtype=torch.uint8))
        worker = StockWorker(wire.dialect, read=exports.read)
        worker.init(wire.init_info())
        for name in ("a", "b"):
            worker.update(wire.update_info([ParamMeta(name, torch.uint8, (4,))], {UUIDS[0]: args}))
        assert bool(worker.violations) == wire.dialect.export_per_chunk
