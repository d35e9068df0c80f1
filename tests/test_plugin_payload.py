"""Payloads of the native wire: what is well-formed passes unchanged, anything else is refused by the field's name."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ipc.handles import allocate
from fsdp_ipc.vllm_plugin import payload_plan
from fsdp_ipc.vllm_plugin.json_fields import MAX_NAME, names_text
from fsdp_ipc.vllm_plugin.payload import AbortInfo, InitInfo, UpdateInfo, parse_update
from fsdp_ipc.vllm_plugin.payload_plan import Plan, TensorRow, check_bounds

SESSION = "0123456789abcdef" * 2


def _init() -> dict[str, Any]:
    return {
        "protocol": 3,
        "session": SESSION,
        "token": None,
        "endpoints": [{"device": "cpu:host:0", "control": "fsdp_ipc-1-ab.ctl"}],
        "timeout_s": 60,
    }


def _plan() -> dict[str, Any]:
    return {
        "tensors": [
            ["a.weight", "bfloat16", [4, 3], 0, 0, 0],
            ["b.weight", "float32", [], 1, 0, 256],
            ["empty", "int64", [0, 5], 1, 1, 0],
        ],
        "num_buckets": 2,
        "packed": True,
        "local": {"cpu:host:0": [["mine", "float8_e4m3fn", [7], 1, 0, 512]]},
    }


def _update(handle: dict[str, Any]) -> dict[str, Any]:
    return {
        "session": SESSION,
        "sync": 1,
        "plan": _plan(),
        "plan_digest": "d" * 64,
        "allocations": {"cpu:host:0": [handle]},
        "epoch": 0,
    }


@pytest.fixture(scope="module")
def handle() -> dict[str, Any]:
    buffer = allocate(1024, torch.device("cpu"), key="cpu:host:0")
    found = buffer.handle.to_json()
    buffer.close()
    return found


def test_well_formed_payloads_arrive_as_they_were_sent(handle: dict[str, Any]) -> None:
    init = InitInfo.from_json(json.loads(json.dumps(_init())))
    assert (init.session, init.token, init.timeout_s) == (SESSION, None, 60.0)
    assert init.endpoints[0].control == "fsdp_ipc-1-ab.ctl"
    update = parse_update(json.loads(json.dumps(_update(handle))))
    assert isinstance(update, UpdateInfo)
    assert update.plan is not None
    assert update.allocations is not None
    assert update.allocations["cpu:host:0"][0].to_json() == handle
    mine = update.plan.buckets_for("cpu:host:0")
    assert [[row.name for row in rows] for rows in mine] == [["a.weight"], ["b.weight", "empty", "mine"]]
    assert mine[0][0] == TensorRow("a.weight", torch.bfloat16, (4, 3), 0, 0, 0)
    assert [row.nbytes for rows in mine for row in rows] == [24, 4, 0, 7]
    others = update.plan.buckets_for("cpu:host:1")
    assert [row.name for rows in others for row in rows] == ["a.weight", "b.weight", "empty"]


def test_plan_and_allocations_may_be_left_to_the_worker(handle: dict[str, Any]) -> None:
    update = UpdateInfo.from_json({**_update(handle), "plan": None, "allocations": None})
    assert update.plan is None
    assert update.allocations is None


def test_an_abort_is_told_from_an_update() -> None:
    assert parse_update({"session": SESSION, "abort": "why"}) == AbortInfo(session=SESSION, abort="why")
    with pytest.raises(ValueError, match="unknown field"):
        parse_update({"session": SESSION, "abort": "why", "sync": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", 2),
        ("protocol", "1"),
        ("protocol", True),
        ("session", SESSION[:-1]),
        ("session", SESSION.upper()),
        ("session", 5),
        ("token", 7),
        ("token", "x" * (MAX_NAME + 1)),
        ("endpoints", []),
        ("endpoints", {}),
        ("endpoints", [{"device": "cpu:host:0"}]),
        ("endpoints", [{"device": "cpu:host:0", "control": "../x"}]),
        ("endpoints", [{"device": "cpu:host:0", "control": ""}]),
        ("endpoints", [{"device": "cpu:host:0", "control": ".."}]),
        ("endpoints", [{"device": "cpu:host:0", "control": "a\0b"}]),
        ("endpoints", [{"device": 0, "control": "x"}]),
        ("endpoints", [{"device": "d", "control": "x", "more": 1}]),
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", True),
        ("timeout_s", "60"),
    ],
)
def test_bad_handshakes_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"init_info\.{field}"):
        InitInfo.from_json({**_init(), field: value})


@pytest.mark.parametrize("missing", ["protocol", "session", "endpoints", "timeout_s"])
def test_missing_and_unknown_fields_of_a_handshake(missing: str) -> None:
    obj = _init()
    del obj[missing]
    with pytest.raises(ValueError, match=f"missing field.* {missing}"):
        InitInfo.from_json(obj)
    with pytest.raises(ValueError, match="unknown field"):
        InitInfo.from_json({**_init(), "extra": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session", None),
        ("sync", 0),
        ("sync", 1.5),
        ("sync", True),
        ("sync", 1 << 32),
        ("plan", []),
        ("plan_digest", ""),
        ("plan_digest", 3),
        ("allocations", {}),
        ("allocations", []),
        ("allocations", {"k": {}}),
        ("allocations", {"k": [None]}),
        ("allocations", {"k": [{}]}),
        ("allocations", {"k": ["/etc/passwd"]}),
        ("epoch", -1),
        ("epoch", None),
    ],
)
def test_bad_updates_name_the_field(handle: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"update_info\.{field}|^plan"):
        UpdateInfo.from_json({**_update(handle), field: value})


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        (0, "", "name"),
        (0, 5, "name"),
        (0, "a\nb", "name"),
        (0, "x" * (MAX_NAME + 1), "name"),
        (1, "torch.bfloat16", "dtype"),
        (1, "storage", "dtype"),
        (1, ["bfloat16"], "dtype"),
        (2, [4, -3], "shape"),
        (2, [4, 3.0], "shape"),
        (2, 12, "shape"),
        (2, [1] * 17, "shape"),
        (2, [1 << 30, 1 << 30], "shape"),
        (3, 2, "bucket"),
        (3, -1, "bucket"),
        (4, -1, "allocation"),
        (4, None, "allocation"),
        (5, -2, "offset"),
        (5, 3, "offset"),
        (5, 1 << 60, "offset"),
    ],
)
def test_bad_rows_name_the_tensor_and_the_column(column: int, value: object, words: str) -> None:
    plan = _plan()
    plan["tensors"][0][column] = value
    with pytest.raises(ValueError, match=rf"plan\.tensors\[0\].*{words}"):
        Plan.from_json(plan)


@pytest.mark.parametrize(
    ("dtype", "held"),
    [("bfloat16", "bfloat16"), ("bfloat16", "uint8"), ("float32", "float32"), ("float8_e4m3fn", "float32")]
    + [("bfloat16", odd) for odd in (7, None, "storage", ["float32"])],
)
def test_only_floats_of_more_bits_are_cast_on_arrival(dtype: str, held: object) -> None:
    plan = _plan()
    plan["tensors"][0][1] = dtype
    plan["tensors"][0].append(held)
    with pytest.raises(ValueError, match=r"plan\.tensors\[0\].*held: expected float32"):
        Plan.from_json(plan)


def test_what_is_cast_on_arrival_is_bounded_by_its_size_in_memory() -> None:
    plan = _plan()
    plan["tensors"][0][1:3] = ["bfloat16", [4, 3]]
    plan["tensors"][0].append("float32")
    (row, *_) = Plan.from_json(plan).tensors
    assert (row.nbytes, row.dtype, row.held) == (48, torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="needs bytes"):
        check_bounds([[row]], {"cpu:host:0": [row.offset + 47]}, "cpu:host:0")


def test_names_must_be_unique_for_each_worker() -> None:
    plan = _plan()
    plan["local"]["cpu:host:0"].append(["a.weight", "bfloat16", [4, 3], 0, 0, 0])
    parsed = Plan.from_json(plan)
    assert parsed.buckets_for("cpu:host:1")
    with pytest.raises(ValueError, match=r"more than once: 'a\.weight'"):
        parsed.buckets_for("cpu:host:0")


def test_a_worker_without_any_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor for this worker"):
        Plan.from_json({**_plan(), "tensors": []}).buckets_for("cpu:host:1")


def test_rows_must_lie_inside_their_allocation() -> None:
    rows = Plan.from_json(_plan()).buckets_for("cpu:host:0")
    own = "cpu:host:0"
    assert check_bounds(rows, {own: [519, 0]}, own) == {(own, 0), (own, 1)}
    with pytest.raises(ValueError, match=r"'mine' needs bytes 512 to 519 of allocation 0 .*, which has 518"):
        check_bounds(rows, {own: [518, 0]}, own)
    with pytest.raises(ValueError, match=r"'empty' lies in allocation 1 .*, but this worker was given 1"):
        check_bounds(rows, {own: [519]}, own)
    with pytest.raises(ValueError, match=r"allocation 0 .*, but this worker was given 0"):
        check_bounds(rows, {"cpu:host:1": [519, 0]}, own)


def _sharded_plan() -> dict[str, Any]:
    """Ten rows of two elements in three chunks of four rows, of which one tensor lies across the first two."""
    holders = {f"cpu:host:{n}": [f"cpu:host:{k}" for k in range(3)] for n in range(3)}
    rows = [
        ["across", "float32", [3, 2], 0, 1, 3 * 8, "", 0, 4 * 8, 0],
        ["last", "float32", [2, 2], 0, 1, 8 * 8, "", 0, 4 * 8, 8],
        ["none", "float32", [0, 2], 0, 1, 5 * 8, "", 0, 4 * 8, 0],
    ]
    return {"tensors": rows, "num_buckets": 1, "packed": True, "holders": [holders]}


def test_a_tensor_in_chunks_is_found_where_each_of_its_parts_lies() -> None:
    (rows,) = Plan.from_json(_sharded_plan()).buckets_for("cpu:host:1")
    parts = {row.name: [(p.device[-1], p.offset, p.nbytes, p.distance) for p in row.parts] for row in rows}
    assert parts == {"across": [("0", 24, 8, 2), ("1", 0, 16, 0)], "last": [("2", 8, 16, 1)], "none": []}
    sizes = {f"cpu:host:{n}": [1, 32 if n < 2 else 24] for n in range(3)}
    assert check_bounds([rows], sizes, "cpu:host:1") == {(f"cpu:host:{n}", 1) for n in range(3)}
    with pytest.raises(ValueError, match=r"'last' needs bytes 8 to 24 of allocation 1 of device cpu:host:2"):
        check_bounds([rows], {**sizes, "cpu:host:2": [1, 23]}, "cpu:host:1")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p["tensors"][0].__setitem__(7, 1), "shards: expected an integer from 0 to 0"),
        (lambda p: p["tensors"][0].__setitem__(7, -1), "shards: expected an integer from 0 to 0"),
        (lambda p: p["tensors"][0].__setitem__(8, 0), "chunk_bytes: expected an integer from 1"),
        (lambda p: p["tensors"][0].__setitem__(8, 30), "30 is not a multiple of 4"),
        (lambda p: p["tensors"][0].__setitem__(9, 6), "base: 6 is not a multiple of 4"),
        (lambda p: p["tensors"][0].__setitem__(9, -(1 << 60)), "base: expected an integer from"),
        (lambda p: p["tensors"][0].__setitem__(6, "int8"), "held: expected float32"),
        (lambda p: p["tensors"][0].pop(), "perhaps the table"),
        (lambda p: p.pop("holders"), "no table of holders"),
        (lambda p: p.update(holders=[[]]), r"plan\.holders\[0\]: expected an object"),
        (lambda p: p.update(holders=[{"cpu:host:0": "cpu:host:0"}]), "expected an array"),
    ],
)
def test_chunks_that_make_no_sense_are_refused(change: Any, text: str) -> None:
    plan = _sharded_plan()
    change(plan)
    with pytest.raises(ValueError, match=text):
        Plan.from_json(plan)


def test_a_worker_whose_chunks_are_not_told_or_too_few_is_refused() -> None:
    plan = _sharded_plan()
    with pytest.raises(ValueError, match="for device 'cpu:host:7' is not said"):
        Plan.from_json(plan).buckets_for("cpu:host:7")
    plan["tensors"][0][9] = -32
    with pytest.raises(ValueError, match="'across' begins at byte -8 of its allocation"):
        Plan.from_json(plan).buckets_for("cpu:host:1")
    plan["tensors"][0][9] = 0
    plan["holders"][0]["cpu:host:1"] = ["cpu:host:0", "cpu:host:1"]
    with pytest.raises(ValueError, match="'last' needs bytes 64 to 80 of 2 chunks of 32"):
        Plan.from_json(plan).buckets_for("cpu:host:1")


def test_a_plan_of_endless_parts_is_refused_before_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.from_json(_sharded_plan())
    monkeypatch.setattr(payload_plan, "MAX_PARTS", 2)
    with pytest.raises(ValueError, match="'last' lies in 1 chunks; with those before more than 2 parts"):
        plan.buckets_for("cpu:host:1")
    monkeypatch.setattr(payload_plan, "MAX_PARTS", 3)
    plan.buckets_for("cpu:host:1")


def test_long_lists_of_names_are_cut() -> None:
    assert names_text(["a", "b"]) == "'a', 'b'"
    assert names_text([str(i) for i in range(100)]).endswith("and 92 more")


def _paths(obj: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    if isinstance(obj, dict):
        for key, value in obj.items():
            found += _paths(value, (*at, key))
    elif isinstance(obj, list):
        for index, value in enumerate(obj):
            found += _paths(value, (*at, index))
    return found


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(junk=_JSON, seed=st.integers(0, 1 << 30), which=st.sampled_from(["init", "update", "abort"]))
def test_whatever_arrives_is_parsed_or_refused_with_a_value_error(
    handle: dict[str, Any], junk: object, seed: int, which: str
) -> None:
    valid = {"init": _init(), "update": _update(handle), "abort": {"session": SESSION, "abort": "x"}}[which]
    obj = copy.deepcopy(valid)
    path = random.Random(seed).choice(_paths(obj))
    place: Any = obj
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = junk
    try:
        parsed = InitInfo.from_json(obj) if which == "init" else parse_update(obj)
    except ValueError as error:
        assert len(str(error)) < 4000  # noqa: PT017  both outcomes are right
        return
    if isinstance(parsed, UpdateInfo) and parsed.plan is not None:
        for rows in parsed.plan.buckets_for("nobody") if parsed.plan.tensors else []:
            for row in rows:
                assert min(row.nbytes, row.offset) >= 0


@given(junk=_JSON)
def test_junk_is_refused_with_a_value_error(junk: object) -> None:
    for parse in (InitInfo.from_json, parse_update, Plan.from_json):
        with pytest.raises(ValueError, match=r"expected|missing"):
            parse(junk)
