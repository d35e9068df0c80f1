"""The report's pictures: the timeline of a sync on every rank, and the curves of reward and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from recipes.report_data import Run

_MAX_LANED_RANKS = 4
_MAX_RANKS = 32

# Distinct in both themes and to the colour-blind (Okabe and Ito's, darkened where light text is on them).
_COLOURS = {
    "prepare": "#8c8c8c",
    "start": "#56b4e9",
    "wait": "#f0c14b",
    "load": "#cc79a7",
    "gather": "#0072b2",
    "export": "#7a5ea8",
    "request": "#009e73",
    "finish": "#d55e00",
}
_OTHERS = ("#4c6a92", "#a0603a", "#6b8e23", "#8b4a6b")


@dataclass(frozen=True)
class Look:
    """How a picture is drawn.

    Attributes:
        dark: Light lines on a transparent ground, for a dark page.
        narrow: For a phone: taller than wide, with fewer ticks.
    """

    dark: bool = False
    narrow: bool = False

    @property
    def ink(self) -> str:
        """Colour of text."""
        return "#d7dbe0" if self.dark else "#24292f"

    @property
    def faint(self) -> str:
        """Colour of grids and frames."""
        return "#3a4149" if self.dark else "#d8dde3"

    @property
    def width(self) -> float:
        """In inches."""
        return 4.2 if self.narrow else 10.4


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def timeline(run: Run, look: Look) -> bytes | None:
    """PNG: the stages of the typical sync, on every rank, each bucket a bar; without spans, all syncs by stage.

    Returns:
        None where there was no sync.
    """
    number = run.typical()
    if number is None:
        return _by_sync(run, look) if run.stats else None
    syncs = {
        rank: sync
        for rank, lines in run.syncs.items()
        for sync in lines
        if sync.get("sync") == number and sync.get("spans")
    }
    shown = list(syncs)[:_MAX_RANKS]
    # Ranks' clocks: each sync is drawn from its own begin, moved by how much later than the first it began.
    first = min(syncs[rank]["time"] for rank in shown)
    spans = [
        (rank, name, bucket, syncs[rank]["time"] - first + began, syncs[rank]["time"] - first + ended)
        for rank in shown
        for name, bucket, began, ended in syncs[rank]["spans"]
    ]
    names = [name for name in _COLOURS if any(span[1] == name for span in spans)]
    names += list(dict.fromkeys(span[1] for span in spans if span[1] not in _COLOURS))
    laned = len(shown) <= _MAX_LANED_RANKS
    lanes = [(rank, name) for rank in shown for name in names] if laned else [(rank, "") for rank in shown]
    lanes = [lane for lane in lanes if not laned or any(lane == span[:2] for span in spans)]
    lane_of = {lane: index for index, lane in enumerate(lanes)}
    figure, axes = _figure(look, 0.28 * len(lanes) + 1.3 + 0.12 * len(shown))
    end = max(span[4] for span in spans)
    places = _places([rank for rank, _ in lanes])
    for rank, name, bucket, began, ended in spans:
        y = places[lane_of[(rank, name if laned else "")]]
        colour = _colour(name, names)
        label = "_" if laned else name
        axes.barh(
            y,
            (ended - began) * 1e3,
            left=began * 1e3,
            height=0.74,
            color=colour,
            alpha=0.72 if bucket % 2 else 1.0,
            label=label,
        )
        if bucket >= 0 and ended - began > (0.05 if look.narrow else 0.02) * end:
            axes.text(
                (began + ended) * 500, y, str(bucket), ha="center", va="center", fontsize=7, color="white"
            )
    axes.set_yticks(places, [name if laned else f"rank {rank}" for rank, name in lanes])
    if laned:
        for rank in shown:
            own = [places[index] for index, lane in enumerate(lanes) if lane[0] == rank]
            axes.text(
                -0.005, min(own) - 0.62, f"rank {rank}", transform=axes.get_yaxis_transform(), ha="right", va="center",
                fontsize=8.5, fontweight="bold", color=look.ink,
            )  # fmt: skip
    else:
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(
            unique.values(), unique.keys(), loc="outside lower center", fontsize=7, frameon=False, labelcolor=look.ink,
            ncols=4 if look.narrow else 8,
        )  # fmt: skip
    axes.set_ylim(max(places) + 0.6, -1.0)
    axes.set_xlim(0, end * 1.01e3)
    axes.set_xlabel("ms since the sync began")
    axes.tick_params(axis="y", length=0)
    more = f", {len(shown)} of {len(syncs)} ranks" if len(syncs) > len(shown) else ""
    version = syncs[shown[0]].get("version")
    title = f"sync {number}" + (f", version {version}" if version is not None else "") + more
    _title(axes, f"{title}: {syncs[shown[0]]['seconds'] * 1e3:.1f} ms", look)
    return _png(figure)


def curves(run: Run, look: Look) -> bytes | None:
    """PNG: reward and loss over the steps, one above the other, with a mark where weights were pushed.

    Returns:
        None where there is neither.
    """
    shown = [(name, *run.values(name)) for name in ("reward", "loss")]
    shown = [curve for curve in shown if curve[1]]
    if not shown:
        return None
    pushes = [int(row["step"]) for row in run.rows if row.get("sync")]
    marked = 0 < len(pushes) <= (30 if look.narrow else 60)
    figure, grid = _figure(look, (2.3 if look.narrow else 2.6) * len(shown) + 0.4, rows=len(shown))
    for (name, steps, values), axes in zip(shown, [grid] if len(shown) == 1 else list(grid), strict=True):
        colour = "#3fb68b" if name == "reward" else "#4f9dde"
        window = len(values) // 20 if len(values) >= 60 else 1
        if window > 1:
            axes.plot(steps, values, color=colour, alpha=0.35, linewidth=1)
            axes.plot(steps, _smooth(values, window), color=colour, linewidth=2)
        else:
            axes.plot(
                steps,
                values,
                color=colour,
                linewidth=2,
                marker="o" if len(values) < 20 else "",
                markersize=3.5,
            )
        if marked:
            axes.plot(
                pushes, [0.0] * len(pushes), "|", transform=axes.get_xaxis_transform(), color=look.ink, markersize=7,
                alpha=0.6, clip_on=False,
            )  # fmt: skip
        axes.set_ylabel(name)
        axes.margins(x=0.02)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=True, color=look.faint, linewidth=0.6)
        axes.set_axisbelow(True)
        told = f"{name}: {values[0]:.4g} → {values[-1]:.4g}"
        _title(axes, told + (f", average over {window} steps in bold" if window > 1 else ""), look)
    axes.set_xlabel("step (ticks below: weights pushed)" if marked else "step")
    return _png(figure)


def _by_sync(run: Run, look: Look) -> bytes:
    """All syncs by stage, where no rank recorded its spans."""
    stats = run.stats[-40:]
    names = list(dict.fromkeys(name for sync in stats for name in sync.get("stage_s", {})))
    figure, axes = _figure(look, 3.2)
    below = [0.0] * len(stats)
    for name in names:
        height = [sync.get("stage_s", {}).get(name, 0.0) * 1e3 for sync in stats]
        axes.bar(range(len(stats)), height, bottom=below, color=_colour(name, names), label=name, width=0.75)
        below = [a + b for a, b in zip(below, height, strict=True)]
    axes.set_xticks(range(len(stats)), [str(sync.get("sync", "")) for sync in stats], fontsize=7)
    axes.set_xlabel("sync")
    axes.set_ylabel("ms")
    axes.legend(fontsize=7, ncols=2 if look.narrow else 4, frameon=False, labelcolor=look.ink)
    _title(axes, "stages of each sync", look)
    return _png(figure)


def _places(ranks: Sequence[int]) -> list[float]:
    """Heights of the lanes, with room above the first of each rank."""
    places: list[float] = []
    at = -1.0
    for index, rank in enumerate(ranks):
        at += 1.0 if index and ranks[index - 1] == rank else 1.7 if index else 1.0
        places.append(at)
    return places


def _smooth(values: Sequence[float], window: int) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _colour(name: str, names: Sequence[str]) -> str:
    unknown = [n for n in names if n not in _COLOURS]
    return _COLOURS.get(name) or _OTHERS[unknown.index(name) % len(_OTHERS)]


def _figure(look: Look, height: float, rows: int = 1) -> tuple[Any, Any]:
    # The figure itself, without pyplot: no back end, no state of the process that a job may use otherwise.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(look.width, height), layout="constrained")
    grid = figure.subplots(rows, 1, sharex=rows > 1)
    for axes in [grid] if rows == 1 else grid:
        axes.patch.set_alpha(0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(look.faint)
        axes.tick_params(colors=look.ink, labelsize=8, color=look.faint)
        axes.xaxis.label.set_color(look.ink)
        axes.yaxis.label.set_color(look.ink)
        axes.xaxis.label.set_size(8.5)
        axes.yaxis.label.set_size(8.5)
    return figure, grid


def _title(axes: Any, text: str, look: Look) -> None:
    axes.set_title(text, loc="left", fontsize=8.5 if look.narrow else 9.5, color=look.ink)


def _png(figure: Any) -> bytes:
    out = BytesIO()
    figure.savefig(out, format="png", dpi=140, transparent=True)
    return out.getvalue()


def draw(run: Run) -> dict[str, Mapping[Look, bytes]]:
    """Every picture in every look, by name; empty where matplotlib is missing."""
    if not can_draw():
        return {}
    looks = [Look(dark, narrow) for dark in (False, True) for narrow in (False, True)]
    drawn: dict[str, Mapping[Look, bytes]] = {}
    for name, make in (("curve", curves), ("timeline", timeline)):
        pictures = {look: png for look in looks if (png := make(run, look)) is not None}
        if pictures:
            drawn[name] = pictures
    return drawn
