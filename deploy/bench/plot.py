"""Pictures of figures. matplotlib is an extra: whoever asks for a picture without it is told so at once."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cluster.errors import UserError

if TYPE_CHECKING:
    from .serve import ServeReport

Line = tuple[Sequence[float], Sequence[float]]  # x, y
Panel = tuple[str, str, Mapping[str, Line]]  # x label, y label, lines by name


def require_matplotlib() -> None:
    """Raises UserError with the remedy where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("pictures need matplotlib; install it with: pip install 'paceline[bench]'") from None


def draw(file: Path, title: str, panels: Sequence[Panel], *, is_log_x: bool = False) -> None:
    """Panels side by side, as a PNG, without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    for index, (x_label, y_label, lines) in enumerate(panels):
        axes: Any = figure.add_subplot(1, len(panels), index + 1)
        for name, (x, y) in lines.items():
            axes.plot(x, y, marker="o", markersize=3, label=name)
        if is_log_x:
            axes.set_xscale("log", base=2)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=120)


def draw_serve(report: "ServeReport", file: Path) -> None:
    """Throughput, TTFT and inter-token latency by load, a line for each server."""
    loads = report.run.loads
    for kind, label in (("concurrency", "streams"), ("rate", "requests per second")):
        indices = [index for index, load in enumerate(loads) if getattr(load, kind)]
        if not indices:
            continue
        x = [float(getattr(loads[index], kind)) for index in indices]

        def lines(
            value: Callable[[Any], float], x: list[float] = x, indices: list[int] = indices
        ) -> dict[str, Line]:
            return {url: (x, [value(report.row(url, index)) for index in indices]) for url in report.run.urls}

        panels: list[Panel] = [
            (label, "tokens per second", lines(lambda row: row.tokens_per_s)),
            (label, "TTFT p50, ms", lines(lambda row: 1e3 * row.ttft_p50_s)),
            (label, "time per token p50, ms", lines(lambda row: 1e3 * row.tpot_p50_s)),
        ]
        both = all(any(getattr(load, other) for load in loads) for other in ("concurrency", "rate"))
        name = file.with_stem(f"{file.stem}-{kind}") if both else file
        draw(name, f"{report.run.asked.max_tokens} new tokens", panels, is_log_x=kind == "concurrency")
