"""A picture of how a trace uses a model's experts and which of them a store keeps, layer by layer.

matplotlib is an extra (`plot`): everything else works without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moeflux.bench.replay import Heat, ReplayReport
from moeflux.core.atomic_file import find_target, write_atomically
from moeflux.core.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

KINDS = (".png", ".pdf", ".svg")
FIRST = 99.5  # percentile of use that gets the brightest colour: a few experts must not darken all others


def check_plot(path: Path) -> None:
    """Before the work that would be lost."""
    if path.suffix.lower() not in KINDS or not path.parent.is_dir():
        hint = f"a file in a folder that exists, ending in {', '.join(KINDS)}"
        raise OptionError("cannot be drawn", where=f"option 'plot', {path}", hint=hint)
    find_target(path)
    _figure()


def draw_heat(report: ReplayReport, heat: Heat, path: Path) -> None:
    """Whole or not at all."""
    trace = report.trace
    order = np.argsort(-heat.use, axis=1, kind="stable")
    even = trace.ids.shape[2] / trace.n_experts
    figure = _figure()(figsize=(11, 2.4 + 0.09 * max(20, len(trace.layers))), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    use = np.take_along_axis(heat.use, order, axis=1) / even
    top = float(np.percentile(use, FIRST))
    _panel(left, use, trace.layers, "Use: how often a token chose it", "times an even share", "magma", _norm(top))
    kept, hits = f"{heat.result.n_slots} slots for {report.n_experts} experts, {heat.result.policy}", heat.result.hit_rate
    title, residency = f"Residency: {kept}, {hits:.0%} hits", np.take_along_axis(heat.residency, order, axis=1)
    _panel(right, residency, trace.layers, title, "share of the time in memory", "viridis", _norm(1.0, 1.0))
    left.set_ylabel("layer")
    overlap = "" if report.overlap is None else f", {report.overlap:.0%} of a token's experts are those of the token before"
    figure.suptitle(f"{trace.model}: {len(trace)} tokens{overlap}", fontsize=11)
    kind = path.suffix.lower().removeprefix(".")
    write_atomically(path, lambda file: figure.savefig(file, format=kind, dpi=150), mode=0o644)


def _panel(
    axes: Axes, values: npt.NDArray[Any], layers: tuple[int, ...], title: str, unit: str, colours: str, norm: Normalize
) -> None:
    n_layers, n_experts = values.shape
    image = axes.imshow(
        values, aspect="auto", interpolation="nearest", cmap=colours, norm=norm,
        extent=(0.5, n_experts + 0.5, n_layers - 0.5, -0.5),
    )  # fmt: skip
    shown = range(0, n_layers, max(1, -(-n_layers // 12)))
    axes.set_yticks(list(shown), [str(layers[i]) for i in shown])
    axes.set_xlabel("experts of the layer, most used first")
    axes.set_title(title, fontsize=10)
    axes.figure.colorbar(image, ax=axes, label=unit, pad=0.02)


def _norm(top: float, power: float = 0.5) -> Normalize:
    """Square roots by default, because most experts are used little."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(power, 0, max(top, 1e-9))


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install 'moeflux[plot]'"
        raise OptionError(f"pictures need matplotlib: {error}", where="option 'plot'", hint=hint) from error
    return Figure
