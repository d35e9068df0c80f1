"""The report of a run: one file without a network, right figures, no secrets, and a page that a browser has no fault with."""

from __future__ import annotations

import json
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
from recipes.report import Push, Report
from recipes.report_data import SYNCS, StageRow, read, stage_table, step_table, sync_share, without_secrets
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
        resident_bytes=0, seconds=seconds, stage_s={"prepare": seconds / 2, "gather": seconds / 2},
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
    path = write_report(fill(tmp_path), title="<b>run</b> & more", config=config)
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
    ):
        assert wanted in page.text, wanted
    rows = re.findall(r"<tr[^>]*><td>(.*?)</td></tr>", text)
    cells = [re.split(r"</td><td>", row) for row in rows]
    assert ["gather", "250 ms", "50 ms", "50%"] in cells
    assert ["whole sync", "500 ms", "100 ms", "100%"] in cells
    assert ["4", "0.4", "0.25", "1.00 s", "100 ms", "2", "·&lt;" * 19 + "·…"] in cells
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(text) < 2_000_000


def test_figures_of_a_run(tmp_path: Path) -> None:
    run = read(fill(tmp_path))
    assert run.typical() == 2
    assert sorted(run.syncs) == [0, 1]
    assert stage_table(run.stats)[-1] == StageRow("whole sync", 0.5, 0.1, 1.0)
    # In every second step, and 0 in the others, which is not its time.
    rows = [{"time": {"train": 1.0, "push": push, "total": 1.0 + push}} for push in (0.0, 3.0, 0.0, 2.0, 0.0)]
    assert step_table(rows)[:2] == [StageRow("train", 1.0, 1.0, 4 / 9), StageRow("push", 3.0, 2.0, 5 / 9)]
    assert sync_share(run.rows) == 0.1


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
    write_report(fill(tmp_path), title="a job")
    monkeypatch.setenv("NCCL_TEST", "now")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("steps: 17\n")
    text = write_report(tmp_path).read_text()
    assert "<td>NCCL_TEST</td><td>then</td>" in text
    assert "steps: 17" in text
    assert "<h1>a job</h1>" in text


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
    return Push.of(
        TransferStats(**{k: v for k, v in stats(version, 0.1).items() if k != "gb_per_s"}), loss=0.5
    )


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
    assert (len(out.splitlines()) == 1) == machine
    assert ("weight syncs" in err) == machine
    assert f"report: {tmp_path}" in re.sub(r"\s+", " ", err)


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
