"""The control block: signals, failures and reports between two processes, and what happens when one is gone."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from fsdp_ipc import control, control_layout, shm
from fsdp_ipc.control import ControlBlock, PeerError
from fsdp_ipc.handles import IpcHandle, open_handle
from fsdp_ipc.staging import StagingBuffer
from tests.peer import Peer

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("clean_shm")


@pytest.fixture
def trainer():
    block = ControlBlock.create()
    yield block
    block.close()


@pytest.fixture
def worker(trainer):
    block = ControlBlock.open(trainer.name)
    yield block
    block.close()


def in_thread(fn, *args):
    """Run in a thread; what it raises is returned by `join`."""
    raised = []

    def run():
        try:
            fn(*args)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(20)
        assert not thread.is_alive()
        return raised[0] if raised else None

    return join


# A sync like the one before


def test_an_offer_is_taken_and_confirmed(trainer, worker):
    assert not worker.wait_offered(3, 0.01)
    trainer.offer(3)
    assert worker.wait_offered(3, 1)
    assert trainer.wait_taken(3, 0.01) is None
    worker.take(3)
    assert trainer.wait_taken(3, 1) is True
    with pytest.raises(TimeoutError, match="to confirm sync 3; is another of its ranks stuck"):
        worker.wait_confirmed(3, 0.01)
    trainer.confirm(3)
    assert worker.wait_confirmed(3, 1)


def test_an_offer_holds_for_its_own_sync_only(trainer, worker):
    trainer.offer(3)
    worker.take(3)
    trainer.confirm(3)
    assert not worker.wait_offered(4, 0.01)
    trainer.offer(4)
    assert trainer.wait_taken(4, 0.01) is None
    assert worker.wait_offered(4, 1)
    with pytest.raises(TimeoutError):
        worker.wait_confirmed(4, 0.01)


def test_what_is_withdrawn_or_declined_is_known_at_once(trainer, worker):
    trainer.withdraw(2)
    began = time.monotonic()
    assert not worker.wait_offered(2, 10)
    worker.decline(2)
    trainer.offer(2)
    assert trainer.wait_taken(2, 10) is False
    trainer.offer(3)
    worker.take(3)
    trainer.withdraw(3)
    assert not worker.wait_confirmed(3, 10)
    assert time.monotonic() - began < 5


def test_a_worker_that_has_taken_an_offer_hears_that_the_trainer_failed(trainer, worker):
    trainer.offer(2)
    worker.take(2)
    trainer.fail(2, "lost a rank")
    with pytest.raises(PeerError, match="lost a rank"):
        worker.wait_confirmed(2, 10)


def test_nobody_offers_or_takes_who_is_gone(trainer):
    worker = ControlBlock.open(trainer.name)
    worker.take(2)
    worker.close()
    assert trainer.wait_taken(2, 10) is True
    with pytest.raises(PeerError, match="the worker closed the control block"):
        trainer.wait_taken(3, 10)
    worker = ControlBlock.open(trainer.name)
    assert trainer.wait_taken(2, 0.01) is None, "a worker that opens it again has taken nothing"
    trainer.close()
    assert not worker.wait_offered(3, 10)
    with pytest.raises(PeerError, match="the trainer closed the control block"):
        worker.wait_confirmed(3, 10)
    worker.close()


def test_each_side_says_its_own_part(trainer, worker):
    for call in (worker.offer, worker.confirm, worker.withdraw, trainer.take, trainer.decline):
        with pytest.raises(ValueError, match=r"this is for the (trainer|worker)"):
            call(1)


# Progress


def test_the_file_is_private_and_goes_with_its_maker(trainer, worker):
    path = Path("/dev/shm") / trainer.name
    assert path.stat().st_mode & 0o777 == 0o600
    worker.close()
    assert path.exists(), "the worker does not unlink"
    trainer.close()
    assert not path.exists()
    trainer.close()
    worker.close()


def test_waits_end_when_the_count_is_reached(trainer, worker):
    trainer.produce(1, 2)
    worker.wait_produced(1, 1, 1)
    worker.wait_produced(1, 2, 1)
    worker.consume(1, 1)
    trainer.wait_consumed(1, 1, 1)
    with pytest.raises(TimeoutError):
        worker.wait_produced(1, 3, 0.01)
    with pytest.raises(TimeoutError):
        trainer.wait_consumed(1, 2, 0.01)


def test_a_wait_that_has_begun_sees_a_later_signal(trainer, worker):
    joined = in_thread(worker.wait_produced, 1, 1, 10)
    time.sleep(0.05)
    trainer.produce(1, 1)
    assert joined() is None


def test_a_count_of_the_sync_before_does_not_pass_for_one_of_this(trainer, worker):
    trainer.produce(1, 8)
    with pytest.raises(TimeoutError):
        worker.wait_produced(2, 1, 0.01)
    trainer.produce(2, 1)
    worker.wait_produced(2, 1, 1)
    with pytest.raises(TimeoutError):
        worker.wait_produced(2, 8, 0.01)


def test_zero_buckets_need_a_word_all_the_same(trainer, worker):
    with pytest.raises(TimeoutError):
        worker.wait_produced(1, 0, 0.01)
    trainer.produce(1, 0)
    worker.wait_produced(1, 0, 1)


def test_a_peer_that_went_on_is_an_error_at_once(trainer, worker):
    trainer.produce(3, 1)
    with pytest.raises(
        PeerError, match=r"trainer has gone on: bucket count 1 of sync 3, waited for .* sync 2"
    ):
        worker.wait_produced(2, 1, 10)


def test_progress_goes_forward_only(trainer):
    trainer.produce(2, 3)
    trainer.produce(2, 3)
    with pytest.raises(ValueError, match="forward only"):
        trainer.produce(2, 2)
    with pytest.raises(ValueError, match="forward only"):
        trainer.produce(1, 9)


@pytest.mark.parametrize(
    ("sync", "count"), [(-1, 0), (1 << 32, 0), (1, -1), (1, 1 << 32), (1.0, 1), (True, 1)]
)
def test_numbers_out_of_range_are_refused(trainer, sync, count):
    with pytest.raises(ValueError, match="expected"):
        trainer.produce(sync, count)


def test_the_largest_numbers_work(trainer, worker):
    trainer.produce((1 << 32) - 1, (1 << 32) - 1)
    worker.wait_produced((1 << 32) - 1, (1 << 32) - 1, 1)


def test_each_side_has_its_own_verbs(trainer, worker):
    for refused in (
        lambda: trainer.consume(1, 1),
        lambda: trainer.wait_produced(1, 1, 1),
        lambda: trainer.write_report({}),
        lambda: worker.produce(1, 1),
        lambda: worker.wait_consumed(1, 1, 1),
        worker.read_report,
    ):
        with pytest.raises(ValueError, match="this is for the"):
            refused()


def test_a_closed_block_is_refused(trainer, worker):
    worker.close()
    with pytest.raises(ValueError, match="is closed"):
        worker.consume(1, 1)
    with pytest.raises(ValueError, match="is closed"):
        worker.fail(1, "x")


def test_a_timeout_says_what_was_waited_for(trainer, worker):
    trainer.produce(4, 1)
    with pytest.raises(TimeoutError) as caught:
        worker.wait_produced(4, 2, 0.05)
    text = str(caught.value)
    assert "0.05 s" in text
    assert "bucket count 2 of sync 4 to be produced by the trainer" in text
    assert f"pid {os.getpid()}" in text
    assert "is at bucket count 1 of sync 4" in text


def test_a_timeout_says_that_nobody_has_opened_the_block(trainer):
    with pytest.raises(TimeoutError, match="it has not opened the control block"):
        trainer.wait_consumed(1, 1, 0.01)


# Failures


def test_a_failure_ends_the_peers_wait_with_its_text(trainer, worker):
    joined = in_thread(trainer.wait_consumed, 5, 1, 10)
    time.sleep(0.02)
    worker.fail(5, "RuntimeError: shape of 'lm_head.weight' – expected [3, 5]")
    error = joined()
    assert type(error) is PeerError
    assert str(error) == "RuntimeError: shape of 'lm_head.weight' – expected [3, 5]"


def test_a_failure_counts_more_than_what_was_produced(trainer, worker):
    trainer.produce(5, 3)
    trainer.fail(5, "boom")
    with pytest.raises(PeerError, match=r"^boom$"):
        worker.wait_produced(5, 1, 10)


def test_a_failure_is_of_its_sync_alone(trainer, worker):
    worker.fail(5, "boom")
    worker.consume(6, 1)
    trainer.wait_consumed(6, 1, 1)
    worker.fail(7, "bang")
    with pytest.raises(PeerError, match=r"^bang$"):
        trainer.wait_consumed(7, 1, 1)


def test_the_first_failure_of_a_sync_is_kept(trainer, worker):
    worker.fail(5, "cause")
    worker.fail(5, "consequence")
    with pytest.raises(PeerError, match=r"^cause$"):
        trainer.wait_consumed(5, 1, 1)


def test_each_side_fails_for_itself(trainer, worker):
    trainer.fail(1, "mine")
    worker.consume(1, 1)
    trainer.wait_consumed(1, 1, 1)


@pytest.mark.parametrize(("text", "seen"), [("", "no reason given"), ("é" * 100_000, "é" * 32_768)])
def test_texts_of_any_length_arrive(trainer, worker, text, seen):
    worker.fail(0, text)
    with pytest.raises(PeerError) as caught:
        trainer.wait_consumed(0, 1, 1)
    assert str(caught.value) == seen


# Life and death


def test_a_closed_peer_ends_the_wait(trainer, worker):
    worker.consume(1, 1)
    worker.close()
    trainer.wait_consumed(1, 1, 1)  # what was done is done
    with pytest.raises(PeerError, match="worker closed the control block at bucket count 1 of sync 1"):
        trainer.wait_consumed(1, 2, 10)


def test_a_closed_trainer_ends_the_workers_wait(trainer, worker):
    joined = in_thread(worker.wait_produced, 1, 1, 10)
    time.sleep(0.02)
    trainer.close()
    assert "trainer closed the control block" in str(joined())


def test_a_block_that_is_opened_again_starts_anew(trainer, worker):
    worker.consume(3, 2)
    worker.fail(4, "old")
    worker.write_report({"old": True})
    worker.close()
    again = ControlBlock.open(trainer.name)
    assert trainer.read_report() is None
    with pytest.raises(TimeoutError):
        trainer.wait_consumed(4, 1, 0.01)
    again.consume(4, 1)
    trainer.wait_consumed(4, 1, 1)
    again.close()


def peer_open(state, name):
    state["block"] = ControlBlock.open(name)


def peer_create(state):
    state["block"] = ControlBlock.create()
    return state["block"].name


def test_a_killed_worker_is_noticed_though_it_is_still_a_zombie(trainer):
    with Peer() as peer:
        peer.call(peer_open, trainer.name)
        joined = in_thread(trainer.wait_consumed, 1, 1, 30)
        time.sleep(0.05)
        peer.kill()
        began = time.monotonic()
        error = joined()
        assert type(error) is PeerError
        assert f"the worker (pid {peer.pid}) died" in str(error)
        assert time.monotonic() - began < 5


def test_a_killed_trainer_is_noticed_and_its_block_swept():
    with Peer() as peer:
        name = peer.call(peer_create)
        block = ControlBlock.open(name)
        peer.kill()
        with pytest.raises(PeerError, match=r"the trainer \(pid \d+\) died"):
            block.wait_produced(1, 1, 30)
        block.close()
    assert shm.sweep_stale() >= 1
    assert not (Path("/dev/shm") / name).exists()


def test_another_process_with_the_same_pid_is_not_the_peer(trainer, worker):
    trainer._words[control_layout.WORKER.start_time] += 1
    with pytest.raises(PeerError, match="died"):
        trainer.wait_consumed(1, 1, 10)


def test_field_A17_a_pid_of_another_namespace_does_not_count_as_dead(trainer, worker):
    """https://github.com/vllm-project/vllm/pull/55906: containers that share memory need not share PIDs."""
    trainer._words[control_layout.WORKER.pid] = 0x3FFFFF
    trainer._words[control_layout.WORKER.namespace] += 1
    with pytest.raises(TimeoutError):
        trainer.wait_consumed(1, 1, 0.5)
    trainer._words[control_layout.WORKER.namespace] = 0
    with pytest.raises(TimeoutError):
        trainer.wait_consumed(1, 1, 0.5)
    trainer._words[control_layout.WORKER.namespace] = control.pid_namespace()
    with pytest.raises(PeerError, match="pid 4194303"):
        trainer.wait_consumed(1, 1, 10)


# Reports


def test_reports_replace_each_other(trainer, worker):
    assert trainer.read_report() is None
    worker.write_report({"kind": "hello", "experts": None, "pid": 1})
    assert trainer.read_report() == {"kind": "hello", "experts": None, "pid": 1}
    worker.write_report({"kind": "sync", "reasons": {"ü": 2}})
    assert trainer.read_report() == {"kind": "sync", "reasons": {"ü": 2}}
    assert trainer.read_report() == {"kind": "sync", "reasons": {"ü": 2}}


def test_a_report_may_have_a_mebibyte_and_no_more(trainer, worker):
    largest = {"x": "a" * ((1 << 20) - len('{"x":""}'))}
    worker.write_report(largest)
    assert trainer.read_report() == largest
    with pytest.raises(ValueError, match=r"the report has 1048577 bytes; at most 1048576 fit"):
        worker.write_report({"x": largest["x"] + "a"})
    assert trainer.read_report() == largest


def test_a_report_is_plain_json(worker):
    with pytest.raises(ValueError, match="JSON"):
        worker.write_report({"load_s": float("nan")})
    with pytest.raises(TypeError):
        worker.write_report({"tensor": torch.zeros(1)})


@pytest.mark.parametrize("junk", [b"{", b"[1]", b"\xff\xfe"])
def test_a_report_that_is_no_object_is_refused(trainer, worker, junk):
    worker._bytes[control_layout.REPORT_OFFSET : control_layout.REPORT_OFFSET + len(junk)] = junk
    worker._words[control_layout.REPORT] = len(junk)
    with pytest.raises(ValueError, match="report"):
        trainer.read_report()
    worker._words[control_layout.REPORT] = 1 << 40
    with pytest.raises(ValueError, match="claims"):
        trainer.read_report()


# Opening


@pytest.mark.parametrize(
    "name", ["", "../x.ctl", f"fsdp_ipc-1-{'0' * 32}", f"/dev/shm/fsdp_ipc-1-{'0' * 32}.ctl"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="not of the form"):
        ControlBlock.open(name)


def test_a_block_that_is_gone_says_so():
    with pytest.raises(FileNotFoundError, match="do not share /dev/shm"):
        ControlBlock.open(f"fsdp_ipc-1-{'0' * 32}.ctl")


def test_a_file_that_is_no_control_block_is_refused():
    file = shm.create(control_layout.FILE_BYTES, suffix=".ctl")
    with pytest.raises(ValueError, match="not a control block of this release"):
        ControlBlock.open(file.name)
    file.close()
    file = shm.create(64, suffix=".ctl")
    with pytest.raises(ValueError, match="has 64 bytes"):
        ControlBlock.open(file.name)
    file.close()


# Two processes and real bytes

SLOT_BYTES = 256 << 10


def pattern(sync, bucket):
    seed = torch.Generator().manual_seed(1000 * sync + bucket)
    return torch.randint(0, 256, (SLOT_BYTES,), dtype=torch.uint8, generator=seed)


def peer_receive(state, name, handles, syncs, num_buckets, delay_s):
    """Open once, then load every bucket of every sync; returns how many held exactly what was sent."""
    block = ControlBlock.open(name)
    opened = [open_handle(IpcHandle.from_json(handle), CPU) for handle in handles]
    right = 0
    for sync in range(1, syncs + 1):
        for bucket in range(num_buckets):
            block.wait_produced(sync, bucket + 1, 30)
            slot = opened[bucket % len(opened)].bytes
            time.sleep(delay_s)
            right += torch.equal(slot, pattern(sync, bucket))
            block.consume(sync, bucket + 1)
        block.write_report({"kind": "sync", "sync": sync})
    for buffer in opened:
        buffer.close()
    block.close()
    return right


def test_a_last_word_before_closing_counts(trainer):
    """The worker consumes and closes just between the trainer's look at its progress and the one at its door."""
    worker = ControlBlock.open(trainer.name)
    worker.consume(1, 1)
    words = trainer._words

    class Slow:
        looked = False

        def __getitem__(self, index):
            value = words[index]
            if index == control_layout.WORKER.progress and not self.looked:
                self.looked = True
                worker.consume(1, 2)
                worker.close()
            return value

    trainer._words = Slow()
    try:
        trainer.wait_consumed(1, 2, 5)
        with pytest.raises(PeerError, match="closed the control block at bucket count 2"):
            trainer.wait_consumed(1, 3, 5)
    finally:
        trainer._words = words


@pytest.mark.parametrize(("num_slots", "delay_s"), [(1, 0.0), (2, 0.003), (3, 0.0)])
def test_a_poisoning_trainer_never_reaches_a_worker_that_reads(trainer, num_slots, delay_s):
    """Every slot is overwritten with 0xFF the moment that the worker has let go of it."""
    syncs, num_buckets = 3, 7
    staging = StagingBuffer(num_slots=num_slots, slot_bytes=SLOT_BYTES, device=CPU, key="cpu:host:0")
    with Peer() as peer:
        handles = [handle.to_json() for handle in staging.handles]
        peer.start(peer_receive, trainer.name, handles, syncs, num_buckets, delay_s)
        for sync in range(1, syncs + 1):
            for bucket in range(num_buckets):
                if bucket >= num_slots:
                    trainer.wait_consumed(sync, bucket + 1 - num_slots, 60)
                    staging.slot(bucket % num_slots).fill_(255)
                staging.slot(bucket % num_slots).copy_(pattern(sync, bucket))
                trainer.produce(sync, bucket + 1)
            trainer.wait_consumed(sync, num_buckets, 60)
            for slot in range(num_slots):
                staging.slot(slot).fill_(255)
        assert peer.result() == syncs * num_buckets
        assert trainer.read_report() == {"kind": "sync", "sync": syncs}
    staging.close()
