"""The memory that a trainer rank packs buckets into: a few slots, allocated and exported once, used for every sync.

An export per chunk would rotate handles and make the worker map memory each time; kept slots are opened once and stay
at one address (https://github.com/verl-project/verl/pull/6958, https://github.com/radixark/miles/pull/1923).
"""

from __future__ import annotations

import itertools

import torch

from fsdp_ipc import shm
from fsdp_ipc.handles import IpcHandle, SharedBuffer, allocate

_EPOCHS = itertools.count(1)


class StagingBuffer:
    """Slots of equal size on one device; bucket `k` of a sync goes into slot `k % num_slots`.

    The bytes are uint8, so that packing parameters into them can never become a part of an autograd graph.

    Attributes:
        num_slots: Number of slots; with two, one is filled while the worker reads the other.
        slot_bytes: Bytes of each slot.
        device: Where they lie.
        epoch: Number of this allocation, unique in the process. A worker that sees a new one opens the new handles.
        handles: One handle for each slot, in order.
    """

    def __init__(self, *, num_slots: int, slot_bytes: int, device: torch.device, key: str) -> None:
        """Allocate and export the slots (each trainer rank for itself). Not collective.

        Args:
            num_slots: Number of slots, at least 1.
            slot_bytes: Bytes of each slot, at least 1.
            device: A CUDA device or the CPU.
            key: Device key to write into the handles.

        Raises:
            ValueError: A number is not positive.
            MemoryError: They do not all fit; nothing stays allocated.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(
                f"expected num_slots and slot_bytes of at least 1, got {num_slots} and {slot_bytes}"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.device = device
        self._slots: list[SharedBuffer] = []
        try:
            # On CPU all slots are checked against the free space before the first one takes its share.
            if device.type == "cpu" and num_slots * slot_bytes > (free := shm.free_bytes()):
                raise MemoryError(f"{shm.SHM_DIR} has {free} bytes free")
            for _ in range(num_slots):
                self._slots.append(allocate(slot_bytes, device, key=key))
        except MemoryError as error:
            self.close()
            raise MemoryError(
                f"no room on {device} for a staging buffer of {num_slots} slots of {slot_bytes} bytes "
                f"({num_slots * slot_bytes} in all): {error}. Lower bucket_bytes (now {slot_bytes}) or num_slots"
            ) from error
        except BaseException:
            self.close()
            raise
        self.handles: list[IpcHandle] = [slot.handle for slot in self._slots]
        self.epoch = next(_EPOCHS)

    def slot(self, index: int) -> torch.Tensor:
        """Return the memory of a slot, uint8 `[slot_bytes]`.

        Raises:
            ValueError: The staging buffer is closed.
            IndexError: There is no such slot.
        """
        if not self._slots:
            raise ValueError("the staging buffer is closed")
        if not 0 <= index < self.num_slots:
            raise IndexError(f"expected a slot from 0 to {self.num_slots - 1}, got {index}")
        return self._slots[index].bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._slots

    def close(self) -> None:
        """Free all slots, after the worker has reported that it no longer reads them; a second call does nothing."""
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.close()
