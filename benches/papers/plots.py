"""Pictures of the page, small enough for a repository."""

from contextlib import contextmanager

import matplotlib
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

RED, ORANGE, BLUE, GREY = "#c1121f", "#f08c00", "#2a6f97", "#777777"
MOST_BYTES = 60_000


@contextmanager
def picture(path, width, height, columns=1):
    """Axes to draw on, written as a PNG."""
    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")
    yield axes
    for axis in axes if columns > 1 else [axes]:
        axis.tick_params(labelsize=8)
        if not axis.images:
            axis.grid(linewidth=0.3)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    # 64 colours are enough, and take a third of the bytes.
    Image.open(path).convert("RGB").quantize(64, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise AssertionError(f"{path}: {path.stat().st_size} bytes, more than {MOST_BYTES}")
