"""The trainer group: who is in it, how its ranks hear of each other's failures, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_ipc import TrainerGroup, WeightSyncError
from fsdp_ipc.group import broadcast_over_mesh
from tests.fake_server import FakeServer
from tests.native_worker import NativeWorker
from tests.runner import RankFailure, run_ranks
from tests.toy import build, expected, make_sender, shard


def _failure(make: Any) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        make()
    return caught.value


# Who is in it.


def _uneven_groups(rank: int, world: int, url: str) -> list[int]:
    """Each rank has another number of torch's groups, before and between the groups of ours."""
    model = shard(build(), init_device_mesh("cpu", (world,)))
    for _ in range(3 * rank):
        dist.new_group([rank], use_local_synchronization=True)
    group = TrainerGroup(dist.group.WORLD, timeout_s=20)
    if rank == 0:
        DeviceMesh("cpu", [0])
    with make_sender(model, url) as sender:
        sender.send(1)
        if rank == world - 1:
            dist.new_group([rank], use_local_synchronization=True)
        with make_sender(model, url) as other:
            other.send(2)
    return group.gather_objects(rank, "end")


def test_members_may_have_different_numbers_of_process_groups() -> None:
    workers = [NativeWorker(index) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        assert run_ranks(_uneven_groups, 2, server.url) == [[0, 1], [0, 1]]
        assert server.published == ["1", "2"]
    wanted = expected(build(), torch.bfloat16)
    for worker in workers:
        assert {n: t for n, t in worker.weights.items() if not torch.equal(t, wanted[n])} == {}
        assert set(worker.weights) == set(wanted)


def _unsorted(rank: int, world: int) -> tuple[Any, ...]:
    group = TrainerGroup(DeviceMesh("cpu", [2, 0, 1]), sender_rank=1, timeout_s=20)
    assert group.ranks == (2, 0, 1)
    assert group.ranks[group.rank] == rank
    assert group.is_sender == (rank == 0)
    said = group.broadcast_object(f"of {rank}" if group.is_sender else None, "said")
    values = []
    for src in range(world):
        box = torch.full((3,), float(rank))
        group.broadcast(box, src)
        values.append(box.tolist())
    assert values == [[src] * 3 for src in range(world)]
    failed = _failure(lambda: group.vote("step", "broken" if rank == 2 else None))
    return group.gather_objects(rank, "ranks"), said, failed.failures


def test_ranks_keep_the_order_in_which_they_are_given() -> None:
    assert run_ranks(_unsorted, 3) == [([2, 0, 1], "of 0", {0: "broken"})] * 3


def _some(rank: int, world: int) -> tuple[int, int, list[int]]:
    pair = dist.new_group([0, 2])
    before = _open()
    if rank == 1:
        with pytest.raises(ValueError, match=r"global rank 1 is no member of the trainer group \[0, 2\]"):
            TrainerGroup(DeviceMesh("cpu", [0, 2], _init_backend=False))
        dist.barrier()
        assert _open() == before
        return -1, -1, []
    group = TrainerGroup(pair, timeout_s=20)
    answer = (group.rank, group.size, group.gather_objects(rank, "ranks"))
    group.close()
    dist.barrier()
    return answer


def test_ranks_outside_are_left_alone() -> None:
    assert run_ranks(_some, 3) == [(0, 2, [0, 2]), (-1, -1, []), (1, 2, [0, 2])]


def _alone(rank: int, world: int) -> None:
    before = _open()
    group = TrainerGroup(dist.group.WORLD)
    assert _open() == before
    assert group.gather_objects("a", "step") == ["a"]
    assert group.broadcast_object("b", "step") == "b"
    assert group.vote("step", flag=True, same=[1]) is True
    assert _failure(lambda: group.vote("step", ValueError("no"))).failures == {0: "ValueError: no"}
    box = torch.ones(2)
    group.broadcast(box, 0)
    assert box.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"sender_rank=1 is a rank of the trainer group, which has 1 ranks"):
        TrainerGroup(dist.group.WORLD, sender_rank=1)
    with pytest.raises(TypeError, match="a ProcessGroup or a DeviceMesh, not list"):
        TrainerGroup([0])
    group.close()


def test_one_rank_needs_no_control_group() -> None:
    run_ranks(_alone, 1)


# What it does.


def _side_by_side(rank: int, world: int) -> None:
    first, second = (TrainerGroup(dist.group.WORLD, timeout_s=20) for _ in range(2))
    turned = TrainerGroup(DeviceMesh("cpu", list(reversed(range(world)))), timeout_s=20)
    assert second.gather_objects(rank, "a") == [0, 1, 2]
    assert turned.gather_objects(rank, "a") == [2, 1, 0]
    second.close()
    assert first.gather_objects((rank, "x" * rank * 1000), "a") == [(r, "x" * r * 1000) for r in range(3)]
    third = TrainerGroup(dist.group.WORLD, timeout_s=20)
    for group in (first, third, turned):
        assert group.vote("end", flag=rank == 1) is True
        assert group.vote("end") is False
    with pytest.raises(RuntimeError, match="this trainer group is closed"):
        second.vote("late")
    # In two threads at once, each with a group of its own.
    seen: list[bool] = []
    threads = [
        threading.Thread(target=lambda g=g: seen.extend(g.vote("thread", flag=True) for _ in range(50)))
        for g in (first, third)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 100


def test_groups_side_by_side_do_not_disturb_each_other() -> None:
    run_ranks(_side_by_side, 3)


def _counted(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD, timeout_s=20)
    calls = 0
    run = group._run

    def counting(*args: Any) -> None:
        nonlocal calls
        calls += 1
        run(*args)

    group._run = counting
    group.vote("step", same=["x" * 1000, 2], flag=rank == 0)
    assert calls == 1
    with group.together("step", same=[1]) as agreed:
        agreed.append(2)
    assert calls == 2
    group.gather_objects("x" * rank, "step")
    assert calls == 4
    group.broadcast_object("x", "step")
    assert calls == 6


def test_a_vote_is_one_collective_while_all_is_well() -> None:
    run_ranks(_counted, 2)


def _elsewhere(rank: int, world: int) -> None:
    """Tensors that the trainer makes land on another device by default; ours must not."""
    group = TrainerGroup(dist.group.WORLD, timeout_s=20)
    with torch.device("meta"):
        assert group.gather_objects(rank, "step") == [0, 1]
        assert group.broadcast_object("x" if rank == 0 else None, "step") == "x"
        assert group.vote("step", flag=rank == 1)
        assert TrainerGroup(dist.group.WORLD, timeout_s=20).vote("step") is False


def test_a_default_device_of_the_trainer_does_not_matter() -> None:
    run_ranks(_elsewhere, 2)


def _mesh_broadcast(rank: int, world: int) -> None:
    shapes = ([3, 1, 0, 2], [[0, 1], [2, 3]], [[3, 1], [0, 2]], [[[1], [2]], [[0], [3]]])
    for ranks in shapes:
        mesh = DeviceMesh("cpu", ranks)
        for src in range(world):
            box = torch.full((5,), float(rank))
            broadcast_over_mesh(box, src, mesh)
            assert box.tolist() == [src] * 5, (ranks, src)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    members = [int(r) for r in pairs.mesh]
    box = torch.full((5,), float(rank))
    broadcast_over_mesh(box, members[1], pairs)
    assert box.tolist() == [members[1]] * 5


def test_a_broadcast_along_the_dimensions_of_a_mesh_reaches_every_rank() -> None:
    run_ranks(_mesh_broadcast, 4)


# How ranks hear of failures.


def _disagree(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD, timeout_s=20)
    long = "x" * 300
    failed = _failure(lambda: group.vote("plan", same=[7, f"{long}{rank // 2}", rank == 1]))
    assert failed.step == "plan"
    assert set(failed.failures) == {0, 1, 2}
    assert "True" in failed.failures[1] and "False" in failed.failures[0] and "7" not in str(failed)
    assert "all ranks must agree" in str(failed)
    failed = _failure(lambda: group.vote("plan", same=["a"] if rank == 1 else []))
    assert set(failed.failures) == {0, 1} and "has 'a'" in failed.failures[1]
    # A failure counts more than a disagreement, and every rank's cause is told.
    failed = _failure(lambda: group.vote("plan", KeyError(rank) if rank else None, same=[rank]))
    assert failed.failures == {1: "KeyError: 1", 2: "KeyError: 2"}
    assert group.vote("plan", same=["a"]) is False


def test_a_disagreement_names_the_ranks_and_what_they_have() -> None:
    run_ranks(_disagree, 3)


def _astray(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD, timeout_s=20)
    failed = _failure(lambda: group.vote("start") if rank else group.gather_objects(rank, "handles"))
    assert failed.failures[1] == "votes at step 'start'"
    assert failed.failures[0].startswith("gathers objects at step 'handles'; the ranks are out of step")
    failed = _failure(lambda: group.vote(f"bucket {rank}"))
    assert "bucket 0" in failed.failures[0] and "bucket 1" in failed.failures[1]
    # A rank that failed on its way to an exchange is heard there, whatever the others wait for.
    for exchange in (group.gather_objects, group.broadcast_object):

        def block(exchange: Any = exchange) -> None:
            with group.together("a step with a long name"):
                if rank == 1:
                    raise KeyError("lost")
                exchange(rank, "inner")

        failed = _failure(block)
        assert failed.failures == {1: "KeyError: 'lost'"}
        assert "a step with a long name".startswith(failed.step)
    # What can't travel is that rank's failure.
    failed = _failure(lambda: group.gather_objects(threading.Lock() if rank else 0, "handles"))
    assert "cannot pickle" in failed.failures[1] and set(failed.failures) == {1}
    assert group.gather_objects(rank, "after") == [0, 1]


def test_ranks_that_go_different_ways_are_found_out() -> None:
    run_ranks(_astray, 2)


def _missing(rank: int, world: int) -> None:
    before = _open()
    if rank != 1:
        begin = time.monotonic()
        failed = _failure(lambda: TrainerGroup(dist.group.WORLD, timeout_s=2))
        assert 1.5 < time.monotonic() - begin < 10
        assert failed.step == "group"
        assert set(failed.failures) == {1}
        assert (
            "rank 1: had not come to build trainer group number 1 of global ranks [0, 1, 2] after 2 s"
            in str(failed)
        )
        del failed
        assert _settled(before)
    dist.barrier()


def test_a_rank_that_does_not_build_the_group_is_named() -> None:
    run_ranks(_missing, 3)


def _no_interface(rank: int, world: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    failed = _failure(lambda: TrainerGroup(dist.group.WORLD, timeout_s=5))
    assert set(failed.failures) == {rank}
    assert "nosuch0" in str(failed) and "GLOO_SOCKET_IFNAME names another one" in str(failed)


def test_a_rank_that_can_not_connect_says_why() -> None:
    run_ranks(_no_interface, 2)


def _late(rank: int, world: int) -> None:
    before = _open()
    group = TrainerGroup(dist.group.WORLD, timeout_s=2)
    group.vote("warm")
    if rank == 1:
        time.sleep(6)
    begin = time.monotonic()
    failed = _failure(lambda: group.vote("plan", "own cause" if rank == 0 else None))
    assert time.monotonic() - begin < 10
    # Told by the one who waited; the late one hears the same, and at once.
    assert set(failed.failures) == {0, 1} and failed.failures[0] == "own cause"
    assert failed.failures[1].startswith("did not take part within 2 s")
    begin = time.monotonic()
    assert _failure(lambda: group.vote("again")).failures == failed.failures
    assert time.monotonic() - begin < 1
    group.close()  # while the error is still held
    assert _settled(before)
    again = TrainerGroup(dist.group.WORLD, timeout_s=20)
    assert again.gather_objects(rank, "again") == [0, 1]
    assert failed.step == "plan"


def test_after_a_late_rank_a_new_group_works() -> None:
    run_ranks(_late, 2)


def _killed(rank: int, world: int) -> dict[int, str] | None:
    group = TrainerGroup(dist.group.WORLD, timeout_s=30)
    group.vote("warm")
    begin = time.monotonic()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        # A rank that waits for something else sees it, too.
        while not group.others_failed():
            assert time.monotonic() - begin < 20
            time.sleep(0.01)
    if rank == world - 1:
        time.sleep(0.5)  # the others have noticed long before
    failed = _failure(lambda: group.vote("plan", "own cause" if rank == 2 else None))
    assert failed.step == "plan"
    # Whoever was not connected to the dead rank hears of it, too, long before the time-out.
    assert time.monotonic() - begin < 20
    assert (
        failed.failures[1].startswith("its process (pid ") and "died. Restart the job" in failed.failures[1]
    )
    assert {r: c for r, c in failed.failures.items() if r != 1} == {2: "own cause"}
    assert _failure(lambda: group.gather_objects(rank, "handles")).failures == failed.failures
    group.close()
    # A new group is refused too, and says who is not there.
    assert set(_failure(lambda: TrainerGroup(dist.group.WORLD, timeout_s=1)).failures) == {1}
    return failed.failures


def test_a_killed_rank_is_named_by_all_others() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(_killed, 5)
    assert set(caught.value.failures) == {1}, caught.value
    assert "SIGKILL" in caught.value.failures[1]


def _storeless(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD, timeout_s=2)
    group.vote("warm")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the store is gone")

    group._lost._store = Gone()
    assert set(_failure(lambda: group.vote("plan")).failures) == {1}


def test_a_killed_rank_that_kept_the_store_is_named_too() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(_storeless, 2)
    assert set(caught.value.failures) == {1}, caught.value


def _outside_of_a_vote(rank: int, world: int) -> None:
    group = TrainerGroup(dist.group.WORLD, timeout_s=20)
    if rank == 1:
        told = group.tell("gather", KeyError("lost"))
    else:
        told = _failure(lambda: group.gather_objects(rank, "handles"))
        assert group.tell("gather", told) is told
        assert isinstance(group.tell("gather", KeyboardInterrupt()), KeyboardInterrupt)
    assert isinstance(told, WeightSyncError)
    assert told.failures == {1: "KeyError: 'lost'"} and told.step == "gather"
    assert group.gather_objects(rank, "after") == [0, 1]


def test_what_is_raised_outside_of_a_vote_reaches_all() -> None:
    run_ranks(_outside_of_a_vote, 2)


# What it leaves behind.


def _open() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def _settled(wanted: tuple[int, int], within_s: float = 5.0) -> bool:
    """Whether there are no more than `wanted`, at the latest after a while: a thread that has ended is not gone at once."""
    deadline = time.monotonic() + within_s
    while any(now > then for now, then in zip(_open(), wanted, strict=True)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _again_and_again(rank: int, world: int) -> None:
    TrainerGroup(dist.group.WORLD, timeout_s=20).close()
    before = _open()
    for turn in range(20):
        group = TrainerGroup(dist.group.WORLD, timeout_s=20)
        assert group.gather_objects((rank, turn), "turn") == [(r, turn) for r in range(world)]
        assert _open() > before
        if rank == turn % world:
            time.sleep(0.02)
        # Not collective: a rank that is done closes its end while others may still be in the last vote.
        group.vote("last")
        group.close()
        group.close()
    assert _settled(before), (before, _open())


def test_a_group_gives_its_connections_and_threads_back() -> None:
    run_ranks(_again_and_again, 3)


def _senders(rank: int, world: int, url: str) -> None:
    model = shard(build(), init_device_mesh("cpu", (world,)))
    counts = []
    for version in range(6):
        with make_sender(model, url) as sender:
            sender.send(version)
        assert _settled(counts[1]) if version > 1 else True, (counts, _open())
        counts.append(_open())


def test_a_sender_gives_its_group_back() -> None:
    workers = [NativeWorker(index) for index in range(2)]
    with FakeServer(backend="fsdp_ipc", workers=workers) as server:
        run_ranks(_senders, 2, server.url)
        assert server.published == [str(n) for n in range(6)]
