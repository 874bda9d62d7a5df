"""Tables and figures of the page."""


def table(heads, rows):
    """A Markdown table; all columns but the first are numbers."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def ratio(value):
    """Bytes / original."""
    return f"{value:.3g}"


def percent(share):
    """A share in percent, with two or three digits."""
    value = 100 * share
    return f"{value:.0f} %" if value == 0 else f"{value:.2g} %" if value < 10 else f"{value:.3g} %"


def spread(values, digits=2):
    """Median and range."""
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return f"{middle:.{digits}f} ({ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f})"
