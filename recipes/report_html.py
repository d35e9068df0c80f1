"""`report.html` of a run directory: one file that opens from disk, with pictures, tables, settings and environment.

python -m recipes.report_html outputs/2026-01-31_12-00-00
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from recipes.report_data import (
    Run,
    Said,
    StageRow,
    is_number,
    read,
    stage_table,
    step_table,
    sync_share,
)
from recipes.report_pictures import Look, draw

_MAX_ROWS = 500

# The policy lets the page load nothing at all but what is in it.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ --ink: #1f2328; --soft: #59636e; --line: #d8dde3; --page: #f6f8fa; --card: #fff; --good: #1a7f5a; --bad: #b3261e; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e3e7eb; --soft: #9aa4af; --line: #333a42; --page: #0f1317; --card: #181d23; --good: #54c79a; --bad: #ff8a80; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }}
main {{ max-width: 1080px; margin: 0 auto; padding: 28px 20px 56px; }}
h1 {{ font-size: 1.55rem; line-height: 1.25; margin: 0 0 2px; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.05rem; margin: 34px 0 10px; }}
p {{ margin: 0 0 10px; }}
.soft {{ color: var(--soft); }}
.bad {{ color: var(--bad); overflow-wrap: anywhere; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 10px; margin: 20px 0 0; }}
.card, figure, .box {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px; }}
.card {{ padding: 11px 14px; }}
.card b {{ display: block; font-size: 1.3rem; line-height: 1.3; font-weight: 600; font-variant-numeric: tabular-nums; }}
.card span {{ color: var(--soft); font-size: .84rem; }}
figure {{ margin: 0; padding: 14px; }}
figure img {{ display: block; width: 100%; height: auto; }}
.two {{ display: grid; grid-template-columns: 1fr 1fr; gap: 0 26px; }}
.two section {{ min-width: 0; }}
.box {{ overflow: auto; max-height: 520px; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 6px 14px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 500;
  white-space: normal; }}
tr:last-child td {{ border-bottom: 0; }}
tr.sum td {{ font-weight: 600; }}
.words td {{ white-space: pre-wrap; text-align: left; overflow-wrap: anywhere; }}
.words th {{ text-align: left; }}
.words td:first-child {{ color: var(--soft); width: 15em; }}
pre {{ margin: 0; padding: 12px 14px; font: .82rem/1.5 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; }}
pre.wrap {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
summary {{ cursor: pointer; font-weight: 600; font-size: 1.05rem; margin: 34px 0 10px; }}
@media (max-width: 640px) {{
  main {{ padding: 18px 12px 40px; }}
  .two {{ grid-template-columns: 1fr; }}
  .cards {{ grid-template-columns: 1fr 1fr; }}
  figure {{ padding: 8px; }}
  th, td {{ padding: 6px 9px; }}
  .words td:first-child {{ width: 8.5em; }}
}}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def write_report(run_dir: Path, *, title: str = "", config: Any = None) -> Path:
    """Write `report.html`, `timeline.png` and `curve.png` into a run directory, from what the run left there.

    Without matplotlib the report has no pictures and says so. Versions and environment are those that the job has left in
    `environment.json` (`record_run`), never this process's own.

    Args:
        run_dir: Has `metrics.jsonl` (one object a step: `step`, `loss`, `reward`, `time`, `sync`), and from each rank
            `syncs-rank{rank}.jsonl` (`fsdp_ipc.callbacks.MetricsFile`) where a timeline is wanted.
        title: Heading; empty takes that of an earlier report, or the directory's name.
        config: The settings: a dataclass, a mapping or text; None takes Hydra's file.

    Returns:
        The report.
    """
    run = read(run_dir, config, title)
    pictures = draw(run)
    for name, looks in pictures.items():
        (run_dir / f"{name}.png").write_bytes(looks[Look()])
    report = run_dir / "report.html"
    report.write_text(page(run, pictures))
    return report


def page(run: Run, pictures: Mapping[str, Mapping[Look, bytes]]) -> str:
    """The report as HTML."""
    parts = [
        f"<h1>{escape(run.title)}</h1>",
        f'<p class="soft">{escape(_subtitle(run))}</p>',
        _cards(run),
        *(
            f'<p class="bad">sync {sync.get("sync")} failed: {escape(str(sync["error"]))}</p>'
            for sync in run.failures
        ),
    ]
    if not pictures:
        why = "there is nothing to draw" if not (run.rows or run.stats) else "matplotlib is not installed"
        parts.append(f'<h2>Pictures</h2><p class="soft">None: {why}.</p>')
    curve = " and ".join(name for name in ("reward", "loss") if run.values(name)[0])
    for name, heading, words in (
        ("curve", curve.capitalize(), f"{curve} over the steps"),
        ("timeline", "Timeline of a sync", "Stages and buckets of one sync on every rank"),
    ):
        if name in pictures:
            parts.append(f"<h2>{heading}</h2>{_figure(pictures[name], words)}")
    if run.said:
        parts.append(_said(run.said))
    tables = [
        _times("Stages of a sync", stage_table(run.stats)),
        _times("Stages of a step", step_table(run.rows)),
    ]
    parts.append(f'<div class="two">{"".join(tables)}</div>')
    parts.append(_steps(run.rows))
    if run.config:
        parts.append(f'<h2>Configuration</h2><div class="box"><pre>{escape(run.config)}</pre></div>')
    facts = [("command", run.command), *run.facts] if run.command else list(run.facts)
    rows = "".join(_row(fact) for fact in facts)
    table = f'<div class="box"><table class="words">{rows}</table></div>' if rows else ""
    missing = "" if run.facts else '<p class="soft">Not recorded in the run directory.</p>'
    parts.append(f"<h2>Versions and environment</h2>{missing}{table}")
    return _PAGE.format(title=escape(run.title), body="\n".join(part for part in parts if part))


def _subtitle(run: Run) -> str:
    ranks = f" on {len(run.syncs)} rank{'s' if len(run.syncs) != 1 else ''}" if run.syncs else ""
    syncs = len(run.stats)
    steps = len(run.rows)
    written = dict(run.facts).get("written")
    told = f"{steps} step{'s' if steps != 1 else ''}, {syncs} sync{'s' if syncs != 1 else ''} of the weights{ranks}"
    return told if written is None else f"{told}; {written}"


def _cards(run: Run) -> str:
    cards: list[tuple[str, str]] = []
    for name in ("reward", "loss"):
        _, values = run.values(name)
        if values:
            cards.append((f"{values[-1]:.3g}", f"{name} at the end, from {values[0]:.3g}"))
    stats = run.stats
    if stats:
        later = stats[1:] or stats
        seconds = median(sync["seconds"] for sync in later)
        cards.append((_seconds(seconds), "a sync (median)" if len(stats) > 1 else "the sync"))
        cards.append((_bytes(stats[-1].get("bytes", 0)), f"in {stats[-1].get('num_tensors', '?')} tensors"))
        rate = median(sync.get("gb_per_s", 0.0) for sync in later) * 1e9
        cards.append((f"{_bytes(rate)}/s", "over the whole sync"))
        share = sync_share(run.rows) if len(run.rows) > 1 else None
        if share is not None:
            cards.append((f"{share:.1%}", "of a step with a sync is the sync (median)"))
    items = "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)
    return f'<div class="cards">{items}</div>' if items else ""


def _figure(looks: Mapping[Look, bytes], words: str) -> str:
    def data(look: Look) -> str:
        return "data:image/png;base64," + base64.b64encode(looks[look]).decode()

    dark, narrow = "(prefers-color-scheme: dark)", "(max-width: 640px)"
    return (
        "<figure><picture>"
        f'<source media="{dark} and {narrow}" srcset="{data(Look(dark=True, narrow=True))}">'
        f'<source media="{narrow}" srcset="{data(Look(narrow=True))}">'
        f'<source media="{dark}" srcset="{data(Look(dark=True))}">'
        f'<img src="{data(Look())}" alt="{escape(words)}"></picture></figure>'
    )


def _times(heading: str, rows: Sequence[StageRow]) -> str:
    if not rows:
        return ""
    several = any(row.later is not None for row in rows)
    lines = []
    for row, share in zip(rows, _shares(rows), strict=True):
        later = ["–" if row.later is None else _seconds(row.later), _seconds(row.mean)] if several else []
        lines.append(_row([row.name, _seconds(row.first), *later, share], "sum" if row is rows[-1] else ""))
    names = ["first", "later, median", "later, mean"] if several else ["time"]
    note = '<p class="soft">Means and shares add up.</p>' if several else ""
    table = f"<table>{_head(['stage', *names, 'share'])}{''.join(lines)}</table>"
    return f'<section><h2>{heading}</h2>{note}<div class="box">{table}</div></section>'


def _shares(rows: Sequence[StageRow]) -> list[str]:
    """Shares in tenths of a per cent that add up to the last row's, as rounded ones need not."""
    exact = [row.share * 1000 for row in rows[:-1]]
    whole = [math.floor(share) for share in exact]
    short = round(rows[-1].share * 1000) - sum(whole)
    for index in sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: max(0, short)]:
        whole[index] += 1
    return [f"{share / 10:.1f}%" for share in [*whole, round(rows[-1].share * 1000)]]


def _said(said: Sequence[Said]) -> str:
    texts = [(entry.prompt, entry.before, entry.after) for entry in said]
    lines = [_row([_readable(text) if text.strip() else "(nothing)" for text in row]) for row in texts]
    head = _head(["prompt", "before the first push", "after the last push"])
    return f'<h2>What the server said</h2><div class="box"><table class="words">{head}{"".join(lines)}</table></div>'


def _steps(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return '<h2>Steps</h2><p class="soft">None were recorded.</p>'
    shown_apart = ("step", "reward", "loss", "time", "sync", "version")
    keys = dict.fromkeys(key for row in rows for key in row)
    first = [name for name in ("reward", "loss") if name in keys]
    others = [name for name in keys if name not in shown_apart]
    # Words last: they are long, and the table scrolls.
    others.sort(key=lambda name: any(isinstance(row.get(name), str) for row in rows))
    stride = -(-len(rows) // _MAX_ROWS)
    shown = [row for index, row in enumerate(rows) if index % stride == 0 or index == len(rows) - 1]
    lines = []
    for row in shown:
        sync = row.get("sync") or {}
        time = row.get("time") or {}
        total = time.get("total", sum(time.values()) if time else None)
        cells = [str(row.get("step", "")), *(_value(row.get(name)) for name in first)]
        cells += ["–" if total is None else _seconds(total), _seconds(sync["seconds"]) if sync else "–"]
        cells.append(_value(sync.get("version") if sync else None))
        lines.append(_row([*cells, *(_value(row.get(name)) for name in others)]))
    every = f'<p class="soft">Every {stride}th of {len(rows)} steps.</p>' if stride > 1 else ""
    head = _head(["step", *first, "time", "sync", "version", *(name.replace("_", " ") for name in others)])
    return f'<h2>Steps</h2>{every}<div class="box"><table>{head}{"".join(lines)}</table></div>'


def _value(value: Any) -> str:
    if is_number(value):
        return f"{value:.4g}"
    text = _readable(str("–" if value is None else value)).replace("\n", "·")
    return text if len(text) <= 40 else text[:39] + "…"


def _readable(text: str) -> str:
    """Without what a page cannot show: an untrained model may have said anything."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


def _head(cells: Sequence[str]) -> str:
    return "<thead><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in cells) + "</tr></thead>"


def _row(cells: Sequence[str], kind: str = "") -> str:
    opened = f'<tr class="{kind}">' if kind else "<tr>"
    return opened + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _seconds(value: float) -> str:
    return (
        f"{value:.2f} s"
        if value >= 1
        else f"{value * 1e3:.3g} ms"
        if value >= 1e-3
        else f"{value * 1e6:.0f} µs"
    )


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def main() -> None:
    """Entry point of `python -m recipes.report_html`."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m recipes.report_html RUN_DIRECTORY")
    print(write_report(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
