"""The report of a run: one file without a network, right figures, no secrets, and a page that a browser has no fault with."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="needs rich, from the extra 'recipes'")

from fsdp_ipc import TransferStats
from recipes import report_html, report_pictures
from recipes.config import PushJobConfig
from recipes.report import Push, Report
from recipes.report_data import (
    ENVIRONMENT,
    SYNCS,
    Said,
    StageRow,
    read,
    record_run,
    stage_table,
    step_table,
    sync_share,
    without_secrets,
)
from recipes.report_html import write_report

BROWSER = next(
    filter(
        None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser", "chrome-headless-shell"))
    ),
    None,
)


def stats(sync: int, seconds: float) -> dict[str, Any]:
    return TransferStats(
        version=str(sync), sync=sync, backend="fsdp_ipc", bytes=2_000_000, num_tensors=3, num_buckets=2,
        resident_bytes=0, peer_bytes=0, seconds=seconds, stage_s={"prepare": seconds / 2, "gather": seconds / 2},
    ).to_json()  # fmt: skip


def fill(folder: Path, *, ranks: int = 2, steps: int = 4, syncs: bool = True) -> Path:
    """A run directory as the recipes leave it."""
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            sync = stats(step // 2, 0.5 if step == 2 else 0.1) if step % 2 == 0 else None
            row = {
                "step": step,
                "reward": step / 10,
                "loss": 1 / step,
                "said": "\x1b<" * 30,
                "time": {"rollouts": 0.7, "total": 1.0},
                "sync": sync,
            }
            file.write(json.dumps(row) + "\n")
    for rank in range(ranks if syncs else 0):
        with (folder / SYNCS.format(rank=rank)).open("w") as file:
            for number in range(1, steps // 2 + 1):
                seconds = 0.5 if number == 1 else 0.1
                spans = [
                    ["prepare", -1, 0.0, seconds / 2],
                    ["gather", 0, seconds / 2, seconds * 0.7],
                    ["gather", 1, seconds * 0.7, seconds],
                ]
                line = {
                    "time": 100.0 + number + rank / 1000,
                    "rank": rank,
                    **stats(number, seconds),
                    "spans": spans,
                }
                file.write(json.dumps(line) + "\n")
    return folder


class Page(HTMLParser):
    """What is in a page, and whether its elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "img", "source"):
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + " "


def needs_matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, from the extra 'recipes'")


def test_the_report_has_pictures_tables_settings_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_matplotlib()
    monkeypatch.setattr(sys, "argv", ["job.py", "server.token=secret-0"])
    monkeypatch.setenv("VLLM_API_KEY", "secret-1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    config = {"server": {"url": "http://me:secret-2@127.0.0.1", "token": "secret-3"}, "model": {"path": None}}
    said = [Said(prompt="the <prompt>", before="\x1bnoise", after="first line\nsecond")]
    record_run(fill(tmp_path), title="<b>run</b> & more", config=config, said=said)
    path = write_report(tmp_path)
    text = path.read_text()
    page = Page(text)
    assert all(link.startswith("data:") for link in page.links)
    assert len([link for link in page.links if link.startswith("data:image/png;base64,")]) == 8
    assert "script" not in page.tags
    assert "<b>run</b> & more" in page.text
    assert "secret" not in text
    for wanted in (
        "OMP_NUM_THREADS",
        "fsdp-ipc",
        "4 steps, 2 syncs of the weights on 2 ranks",
        "http://…@127.0.0.1",
        "the <prompt>",
        "·noise",
        "first line\nsecond",
    ):
        assert wanted in page.text, wanted
    rows = re.findall(r"<tr[^>]*><td>(.*?)</td></tr>", text)
    cells = [re.split(r"</td><td>", row) for row in rows]
    assert ["gather", "250 ms", "50 ms", "50 ms", "50.0%"] in cells
    assert ["whole sync", "500 ms", "100 ms", "100 ms", "100.0%"] in cells
    assert ["other", "300 ms", "300 ms", "300 ms", "30.0%"] in cells
    assert ["4", "0.4", "0.25", "1.00 s", "100 ms", "2", "·&lt;" * 19 + "·…"] in cells
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(text) < 2_000_000


def test_figures_of_a_run(tmp_path: Path) -> None:
    run = read(fill(tmp_path))
    assert run.typical() == 2
    assert sorted(run.syncs) == [0, 1]
    assert stage_table(run.stats)[-1] == StageRow("whole sync", 0.5, 0.1, 0.1, 1.0)
    # In every second step, and 0 in the others, which is not its time.
    rows = [{"time": {"train": 1.0, "push": push, "total": 1.0 + push}} for push in (0.0, 3.0, 0.0, 2.0, 0.0)]
    assert step_table(rows) == [
        StageRow("train", 1.0, 1.0, 1.0, 4 / 9),
        StageRow("push", 3.0, 2.0, 5 / 4, 5 / 9),
        StageRow("total", 1.0, 2.0, 9 / 4, 1.0),
    ]
    assert sync_share(run.rows) == 0.1


@pytest.mark.parametrize(
    ("time", "other"),
    [
        ({"rollout": 0.5, "train": 0.2, "total": 1.0}, ("other", 0.3)),
        ({"rollout": 0.5, "train": 0.2, "total": 0.6}, ("at the same time", -0.1)),
        ({"rollout": 0.5, "train": 0.2, "total": 0.7000001}, None),
        ({"rollout": 0.5, "train": 0.2}, None),
    ],
)
def test_rows_add_up_to_the_total(time: dict[str, float], other: tuple[str, float] | None) -> None:
    """Between the stages there is time, which used to be in the total alone."""
    sync = {"stage_s": {name: value for name, value in time.items() if name != "total"}}
    tables = [step_table([{"time": time}] * 3)]
    if "total" in time:
        tables.append(stage_table([{**sync, "seconds": time["total"]}] * 3))
    for *rows, whole in tables:
        assert [row.name for row in rows] == ["rollout", "train", *([other[0]] if other else [])]
        if other:
            assert rows[-1].mean == pytest.approx(other[1])
        for column in ("first", "mean", "share"):
            assert sum(getattr(row, column) for row in rows) == pytest.approx(getattr(whole, column))
        assert whole.share == 1


def test_a_stage_that_comes_late_stands_before_the_time_between() -> None:
    rows = [{"time": {"train": 1.0, "total": 2.0}}, {"time": {"train": 1.0, "sync": 1.0, "total": 3.0}}]
    assert [row.name for row in step_table(rows)] == ["train", "sync", "other", "total"]


@pytest.mark.parametrize("parts", [[1.0] * 3, [1.0] * 7, [0.0004, 0.9996], [1e-9, 1e-9, 1.0], [0.0, 1.0]])
def test_shares_add_up_as_they_are_shown(parts: list[float]) -> None:
    """Three thirds are 33.3% each, and 99.9% together, where each is rounded by itself."""
    names = [f"stage {index}" for index in range(len(parts))]
    *shares, whole = report_html._shares(step_table([{"time": dict(zip(names, parts, strict=True))}]))
    assert whole == "100.0%"
    assert sum(round(float(share.rstrip("%")) * 10) for share in shares) == 1000


def test_without_matplotlib_the_report_is_there_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_pictures, "can_draw", lambda: False)
    page = Page(write_report(fill(tmp_path)).read_text())
    assert "matplotlib is not installed" in page.text
    assert "img" not in page.tags
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("case", ["no spans", "32 ranks", "nothing", "cut off, not finite, failed"])
def test_odd_runs_have_a_report(case: str, tmp_path: Path) -> None:
    needs_matplotlib()
    if case == "no spans":
        fill(tmp_path, syncs=False)
    elif case == "32 ranks":
        fill(tmp_path, ranks=40, steps=8)
    elif case != "nothing":
        fill(tmp_path)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "loss": NaN, "reward": null, "time": {}, "sync": null}\n{"step": 6, "lo')
        with (tmp_path / SYNCS.format(rank=0)).open("a") as file:
            failed = {
                "time": 1.0,
                "rank": 0,
                "sync": 3,
                "version": "6",
                "seconds": 0.1,
                "error": "boom <here>",
                "spans": [],
            }
            file.write(json.dumps(failed) + "\n")
    text = write_report(tmp_path).read_text()
    page = Page(text)
    assert page.tags.count("picture") == (0 if case == "nothing" else 2)
    if case.startswith("cut off"):
        assert "sync 3 failed: boom <here>" in page.text
        assert "5 steps, 2 syncs" in page.text
    if case == "nothing":
        assert "there is nothing to draw" in page.text


def test_a_report_that_is_written_anew_keeps_the_jobs_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_pictures, "can_draw", lambda: False)
    monkeypatch.setenv("NCCL_TEST", "then")
    said = [Said(prompt="the prompt", before="noise", after="words")]
    record_run(fill(tmp_path), title="a job", config={"steps": 17}, said=said)
    monkeypatch.setenv("NCCL_TEST", "now")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("steps: 18\nunread: 1\n")
    text = write_report(tmp_path).read_text()
    assert "<td>NCCL_TEST</td><td>then</td>" in text
    assert "steps: 17" in text
    assert "unread" not in text
    assert "<h1>a job</h1>" in text
    assert "<tr><td>the prompt</td><td>noise</td><td>words</td></tr>" in text


@pytest.mark.parametrize("case", ["another machine's", "by hand", "missing", "broken"])
def test_a_run_of_another_machine_never_gets_this_ones_environment(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_pictures, "can_draw", lambda: False)
    monkeypatch.setenv("NCCL_TEST", "this-one")
    monkeypatch.setattr(sys, "argv", ["report_html.py", str(fill(tmp_path))])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("steps: 17\n")
    kept = {"title": "there", "command": "job.py", "facts": [["written", "2020-01-01"], ["GPU", "of there"]]}
    file = tmp_path / ENVIRONMENT
    if case in ("another machine's", "by hand"):
        file.write_text(json.dumps(kept, indent=2 if case == "by hand" else None))
    elif case == "broken":
        file.write_text('{"title": "the')
    before = file.read_text() if file.exists() else None
    report_html.main()
    page = Page((tmp_path / "report.html").read_text())
    assert (file.read_text() if file.exists() else None) == before
    assert "this-one" not in page.text
    assert "report_html" not in page.text
    assert platform.release() not in page.text
    assert "steps: 17" in page.text
    assert ("of there" in page.text) == (before is not None and case != "broken")
    assert ("Not recorded" in page.text) == (case in ("missing", "broken"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("token: abc", "token: …"),
        ("server.api_key=abc steps=3", "server.api_key=… steps=3"),
        ("token: null", "token: null"),
        ("max_tokens: 40", "max_tokens: 40"),
        ("num_key_value_heads: 2", "num_key_value_heads: 2"),
        ("http://me:pw@host/x", "http://…@host/x"),
    ],
)
def test_secrets_are_left_out(text: str, wanted: str) -> None:
    assert without_secrets(text) == wanted


def _console(page: Path, profile: Path, width: int) -> list[str]:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [
        f"--user-data-dir={profile}",
        f"--window-size={width},900",
        "--enable-logging=stderr",
        "--v=0",
        "--dump-dom",
    ]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=100, check=False)
    assert "</html>" in done.stdout, done.stderr[-2000:]
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium or Google Chrome on PATH")
def test_a_browser_has_nothing_to_say_about_it(tmp_path: Path) -> None:
    needs_matplotlib()
    broken = tmp_path / "broken.html"
    broken.write_text("<html><script>console.error('this is seen')</script></html>")
    assert "this is seen" in _console(broken, tmp_path / "profile", 1280)[0], "the test itself sees errors"
    assert _console(write_report(fill(tmp_path)), tmp_path / "profile", 390) == []


# The terminal.


def _push(version: int) -> Push:
    return Push.of(_stats(version), loss=0.5)


def _stats(version: int) -> TransferStats:
    return TransferStats(**{k: v for k, v in stats(version, 0.1).items() if k != "gb_per_s"})


@pytest.mark.parametrize("machine", [False, True])
def test_the_end_of_a_job_in_a_file(
    machine: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_pictures, "can_draw", lambda: False)
    with Report(steps=4, active=True, machine=machine) as report:
        report.step(1, 0.5)
        report.pushed(_push(1))
        report.finish({"total_s": 1.0}, out=fill(tmp_path), title="job", config={"steps": 4})
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err, "no colour and no bar where there is no terminal"
    line = json.loads(out.splitlines()[-1])
    assert line["report"] == str(tmp_path / "report.html")
    assert line["pushes"][0]["version"] == "1"
    assert not {"recited_chars", "expected_chars", "before", "after"} & line.keys(), "no server was asked"
    assert line["pushes"][0]["loss"] == 0.5
    assert (len(out.splitlines()) == 1) == machine
    assert ("weight syncs" in err) == machine
    assert f"report: {tmp_path}" in re.sub(r"\s+", " ", err)


def test_a_push_alone_tells_of_no_loss_and_shows_every_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `recipes.push` does it: no training, several prompts, before and after."""
    monkeypatch.setattr(report_pictures, "can_draw", lambda: False)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        time = {"load": 0.5, "sync": 0.1, "total": 0.7}
        file.write(json.dumps({"step": 1, "time": time, "sync": stats(1, 0.1)}) + "\n")
    config = PushJobConfig(prompts=["a", "b"])
    config.model.path = "some/where"
    with Report(steps=1, active=True) as report:
        report.pushed(Push.of(_stats(1)))
        report.said = [
            Said(prompt="a", before="noise 1", after="text 1"),
            Said(prompt="b", before=" \n", after="text 2"),
        ]
        report.finish({"parameters": 7}, out=tmp_path, title="push", config=config)
    shown = capsys.readouterr()
    assert "loss" not in shown.out + shown.err
    line = json.loads(shown.out.splitlines()[-1])
    assert line.keys() == {"parameters", "report", "pushes"}
    assert "loss" not in line["pushes"][0]
    text = (tmp_path / "report.html").read_text()
    assert "<tr><td>a</td><td>noise 1</td><td>text 1</td></tr>" in text
    assert "<tr><td>b</td><td>(nothing)</td><td>text 2</td></tr>" in text
    page = Page(text)
    assert "some/where" in page.text
    for unread in ("optim:", "train:", "The Zen of Python", "loss", "hidden_size", "later"):
        assert unread not in page.text, unread


def test_a_job_that_asks_shows_the_first_and_the_last_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_pictures, "can_draw", lambda: False)
    with Report(steps=4, active=True, prompt="Zen", before="noise", expected="words") as report:
        for version, said in ((2, "wo"), (4, "words")):
            report.pushed(Push.of(_stats(version), loss=0.5, text=said, expected="words"))
        report.finish({}, out=fill(tmp_path))
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    told = {name: line[name] for name in ("before", "after", "recited_chars", "expected_chars")}
    assert told == {"before": "noise", "after": "words", "recited_chars": 5, "expected_chars": 5}
    text = (tmp_path / "report.html").read_text()
    assert "<tr><td>Zen</td><td>noise</td><td>words</td></tr>" in text


def test_a_terminal_gets_a_bar_for_training_and_one_for_a_long_sync() -> None:
    from rich.console import Console

    from tests.test_callbacks import _sync

    with Report(steps=4, active=True) as report:
        report._progress.stop()
        out = StringIO()
        console = Console(file=out, force_terminal=True, width=120)
        report._progress.live.console, report._progress.disable = console, False
        report._progress.live._disable = False
        report._progress.start()
        report.step(2, 0.25)
        (bar,) = report.callbacks()
        bar._after_s = 0.0
        bar.on_sync_start(_sync())
        bar._timer.join()
        bar.on_bucket(_sync(), 0, 3)
        report._progress.refresh()
        shown = out.getvalue()
        bar.on_sync_end(_sync(), None)
    assert "2/4" in shown
    assert "loss 0.250" in shown
    assert "weights 5" in shown
    assert "1/3" in shown


def test_ranks_that_are_not_first_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Report(steps=4, active=False) as report:
        report.finish({}, out=tmp_path)
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())
    assert report_html._seconds(0.00002) == "20 µs"
