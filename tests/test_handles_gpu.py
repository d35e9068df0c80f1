"""The CUDA plane on a real GPU: a producer and a consumer process on one device."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch
from torch.multiprocessing import reductions

from fsdp_ipc import cuda_ipc
from fsdp_ipc.cuda_ipc import _allocator_settings, _set_allocator_settings
from fsdp_ipc.dtypes import view
from fsdp_ipc.handles import (
    IpcHandle,
    allocate,
    device_key,
    export,
    is_exportable,
    open_handle,
    stock_rebuild_args,
)
from fsdp_ipc.staging import StagingBuffer
from tests.peer import Peer

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def gpu():
    return torch.device("cuda", torch.cuda.current_device())


def key():
    return device_key(gpu(), 0)


# What the consumer does


def peer_open(state, fields):
    state["opened"] = open_handle(IpcHandle.from_json(fields), gpu())
    return state["opened"].bytes.data_ptr()


def peer_bytes(state, start=0, stop=None):
    return state["opened"].bytes[start:stop].cpu().tolist()


def peer_fill(state, value):
    state["opened"].bytes.fill_(value)
    torch.cuda.synchronize()


def peer_view(state, offset, dtype, shape):
    return view(state["opened"].bytes, offset, dtype, shape).cpu()


def peer_close(state):
    state.pop("opened").close()


def peer_stock(state, args):
    args = list(args)
    args[cuda_ipc.DEVICE_INDEX] = gpu().index
    tensor = reductions.rebuild_cuda_tensor(*args)
    values = tensor.cpu()
    del tensor
    torch.cuda.ipc_collect()
    return values


def peer_touch(state):
    """The consumer's context still works."""
    torch.ones(1024, device=gpu()).sum().item()
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def peer():
    with Peer() as process:
        yield process


def settle():
    torch.cuda.synchronize()
    cuda_ipc.collect()
    torch.cuda.empty_cache()


def test_two_processes_share_memory_in_both_directions(peer):
    buffer = allocate(3 * MIB + 5, gpu(), key=key())
    buffer.bytes.copy_(torch.arange(3 * MIB + 5, device=gpu()) % 251)
    torch.cuda.synchronize()
    peer.call(peer_open, buffer.handle.to_json())
    assert peer.call(peer_bytes, 0, 600) == [value % 251 for value in range(600)]
    assert peer.call(peer_bytes, 3 * MIB) == [value % 251 for value in range(3 * MIB, 3 * MIB + 5)]
    peer.call(peer_fill, 7)
    assert int(buffer.bytes.min()) == int(buffer.bytes.max()) == 7
    peer.call(peer_close)
    buffer.close()


def test_the_handle_is_of_the_form_that_is_checked():
    buffer = allocate(MIB, gpu(), key=key())
    assert IpcHandle.from_json(buffer.handle.to_json()) == buffer.handle
    assert buffer.handle.device == str(torch.cuda.get_device_properties(gpu()).uuid)
    buffer.close()


def test_field_A2_memory_is_flat_over_syncs(peer):
    """https://github.com/THUDM/slime/pull/1731."""
    settle()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        buffer = allocate(64 * MIB, gpu(), key=key())
        peer.call(peer_open, buffer.handle.to_json())
        peer.call(peer_close)
        buffer.close()
        assert torch.cuda.memory_allocated() == before
    settle()


def test_field_A4_the_block_returns_at_once_and_can_be_given_back(peer):
    """https://github.com/verl-project/verl/pull/7873: no help from the garbage collector."""
    settle()
    reserved = torch.cuda.memory_reserved()
    buffer = allocate(256 * MIB, gpu(), key=key())
    peer.call(peer_open, buffer.handle.to_json())
    peer.call(peer_close)
    buffer.close()
    settle()
    assert torch.cuda.memory_reserved() == reserved


def test_field_A9_memory_returns_though_nobody_opened_it():
    """https://github.com/pytorch/pytorch/issues/145703."""
    settle()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(5):
        allocate(64 * MIB, gpu(), key=key()).close()
    assert torch.cuda.memory_allocated() == before
    settle()
    assert torch.cuda.memory_reserved() == reserved


def test_memory_returns_though_the_consumer_died_or_opened_it_twice(peer):
    settle()
    before = torch.cuda.memory_allocated()
    buffer = allocate(64 * MIB, gpu(), key=key())
    for _ in range(2):
        peer.call(peer_open, buffer.handle.to_json())
        peer.call(peer_close)
    with Peer() as victim:
        victim.call(peer_open, buffer.handle.to_json())
        victim.kill()
    buffer.close()
    settle()
    assert torch.cuda.memory_allocated() == before


def test_a_consumer_survives_memory_that_is_freed_under_it(peer):
    buffer = allocate(64 * MIB, gpu(), key=key())
    peer.call(peer_open, buffer.handle.to_json())
    buffer.close()
    settle()
    filler = torch.zeros(64 * MIB, dtype=torch.uint8, device=gpu())
    peer.call(peer_close)
    peer.call(peer_touch)
    new = allocate(64 * MIB, gpu(), key=key())
    new.bytes.fill_(9)
    torch.cuda.synchronize()
    peer.call(peer_open, new.handle.to_json())
    assert peer.call(peer_bytes, 0, 4) == [9] * 4
    peer.call(peer_close)
    new.close()
    del filler


def test_a_new_allocation_is_seen_though_the_old_one_is_still_open(peer):
    """The same address, and maybe the same handle, must not show the old memory."""
    for value in range(4):
        buffer = allocate(64 * MIB, gpu(), key=key())
        buffer.bytes.fill_(value)
        torch.cuda.synchronize()
        peer.call(peer_open, buffer.handle.to_json())  # only now is the one before let go
        assert peer.call(peer_bytes, 0, 4) == [value] * 4
        buffer.close()
        settle()
    peer.call(peer_close)


def test_field_A8_bytes_are_the_last_ones_written_not_those_at_the_export(peer):
    """https://github.com/radixark/miles/pull/1923: the event of a share says nothing about later writes."""
    buffer = allocate(8 * MIB, gpu(), key=key())
    peer.call(peer_open, buffer.handle.to_json())
    side = torch.cuda.Stream()
    for value in (1, 2, 3):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            buffer.bytes.fill_(value)
        side.synchronize()
        assert set(peer.call(peer_bytes, 0, 64)) == {value}
    peer.call(peer_close)
    buffer.close()


def test_field_A5_staging_is_exported_once(peer):
    """https://github.com/verl-project/verl/pull/6958."""
    staging = StagingBuffer(num_slots=2, slot_bytes=4 * MIB, device=gpu(), key=key())
    pointers = {staging.slot(0).data_ptr() for _ in range(5)}
    assert len(pointers) == 1
    assert staging.handles[0] is staging.handles[0]
    first = peer.call(peer_open, staging.handles[0].to_json())
    for value in range(5):
        staging.slot(0).fill_(value)
        torch.cuda.synchronize()
        assert peer.call(peer_bytes, 0, 4) == [value] * 4
    assert isinstance(first, int)
    peer.call(peer_close)
    staging.close()


def test_a_parameter_is_exported_where_it_lies(peer):
    """Including the offset in its storage, and without a tie between its memory and the consumer."""
    settle()
    before = torch.cuda.memory_allocated()
    whole = torch.randn(1000, 64, device=gpu(), dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(whole[37:137])
    handle = export(parameter, key=key())
    assert handle.nbytes == 100 * 64 * 2
    assert handle.offset == 37 * 64 * 2
    torch.cuda.synchronize()
    peer.call(peer_open, handle.to_json())
    seen = peer.call(peer_view, 0, "bfloat16", [100, 64])
    assert torch.equal(seen, parameter.detach().cpu())
    with torch.no_grad():
        parameter.add_(1)
    torch.cuda.synchronize()
    assert torch.equal(peer.call(peer_view, 0, "bfloat16", [100, 64]), parameter.detach().cpu())
    peer.call(peer_close)
    del parameter, whole
    assert torch.cuda.memory_allocated() == before


def test_many_small_parameters_of_one_segment(peer):
    parameters = [torch.full((17,), float(index), device=gpu()) for index in range(50)]
    exported = [export(parameter, key=key()) for parameter in parameters]
    torch.cuda.synchronize()
    for index, handle in enumerate(exported):
        peer.call(peer_open, handle.to_json())
        assert peer.call(peer_view, 0, "float32", [17]).tolist() == [float(index)] * 17
    peer.call(peer_close)


def test_what_has_holes_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        export(torch.zeros(4, 6, device=gpu())[:, ::2], key=key())
    with pytest.raises(ValueError, match="no memory"):
        export(torch.zeros(0, 6, device=gpu()), key=key())


def test_the_stock_wire_opens_each_export_once(peer):
    settle()
    before = torch.cuda.memory_allocated()
    buffer = allocate(4 * MIB, gpu(), key=key())
    for value in range(5):
        buffer.bytes.fill_(value)
        torch.cuda.synchronize()
        args = stock_rebuild_args(buffer.bytes)
        assert len(args) == 15
        assert args[0] is torch.Tensor
        seen = peer.call(peer_stock, args)
        assert seen.dtype == torch.uint8
        assert seen.shape == buffer.bytes.shape
        assert set(seen.unique().tolist()) == {value}
    buffer.close()
    settle()
    assert torch.cuda.memory_allocated() == before


def test_the_exporting_process_itself_cannot_open(peer):
    buffer = allocate(MIB, gpu(), key=key())
    with pytest.raises(RuntimeError, match="What to do: "):
        open_handle(buffer.handle, gpu())
    buffer.close()


def test_too_much_is_a_memory_error_with_numbers():
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(MemoryError, match=rf"of {total} bytes free, {2 * total} are wanted"):
        allocate(2 * total, gpu(), key=key())
    with pytest.raises(MemoryError, match="Lower bucket_bytes"):
        StagingBuffer(num_slots=2, slot_bytes=total, device=gpu(), key=key())
    assert free > 0


# A trainer with expandable segments, in a process of its own


def trainer_allocate(state):
    state["filler"] = torch.zeros(64 * MIB, dtype=torch.uint8, device=gpu())
    before = _allocator_settings()
    state["buffer"] = allocate(32 * MIB, gpu(), key=key())
    state["buffer"].bytes.fill_(5)
    torch.cuda.synchronize()
    after = _allocator_settings()
    return before, after, state["buffer"].handle.to_json()


def trainer_export(state):
    try:
        export(state["filler"], key=key())
    except ValueError as error:
        return str(error)
    return None


def trainer_turn_on(state):
    """Expandable segments on, and then a settings string that does not say so."""
    _set_allocator_settings("expandable_segments:True")
    _set_allocator_settings("max_split_size_mb:512")


class Managed:
    """Memory of CUDA's that did not come from torch's allocator."""

    def __init__(self, nbytes: int) -> None:
        pointer = ctypes.c_void_p()
        cudart = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        assert cudart.cudaMallocManaged(ctypes.byref(pointer), ctypes.c_size_t(nbytes), 1) == 0
        self.__cuda_array_interface__ = {
            "data": (pointer.value, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def test_memory_of_another_allocator_is_staged_instead_of_exported():
    assert is_exportable(torch.zeros(8, device=gpu()))
    tensor = torch.as_tensor(Managed(MIB), device=gpu())
    assert not is_exportable(tensor)
    with pytest.raises(RuntimeError, match="use packed staging"):
        export(tensor, key=key())


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_field_A10_staging_lies_outside_expandable_segments(peer, variable):
    """https://github.com/pytorch/pytorch/issues/165685."""
    with Peer(env={variable: "expandable_segments:True"}) as trainer:
        before, after, handle = trainer.call(trainer_allocate)
        assert before == after == "expandable_segments:True"
        assert "expandable_segments" in trainer.call(trainer_export), "the rest stays as the user set it"
        peer.call(peer_open, handle)
        assert peer.call(peer_bytes, 0, 4) == [5] * 4
        peer.call(peer_close)


def test_field_A10_expandable_segments_that_the_settings_hide(peer):
    """https://github.com/pytorch/pytorch/issues/165685."""
    with Peer() as trainer:
        trainer.call(trainer_turn_on)
        _, _, handle = trainer.call(trainer_allocate)
        peer.call(peer_open, handle)
        assert peer.call(peer_bytes, 0, 4) == [5] * 4
        peer.call(peer_close)


def test_opening_and_closing_takes_milliseconds(peer):
    buffer = allocate(256 * MIB, gpu(), key=key())
    fields = buffer.handle.to_json()
    peer.call(peer_open, fields)
    peer.call(peer_close)
    began = time.monotonic()
    for _ in range(20):
        peer.call(peer_open, fields)
        peer.call(peer_close)
    assert (time.monotonic() - began) / 20 < 0.1
    buffer.close()
