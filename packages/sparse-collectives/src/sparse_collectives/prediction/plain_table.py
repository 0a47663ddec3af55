"""Plain text tables."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart; the first one is flush left, numbers are flush right."""
    first, *widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for name, *cells in (header, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def milliseconds(seconds: float) -> str:
    """1.5 ms as 1.50, 1.5 s as 1,500: three digits, more where they stand before the point."""
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def amount(nbytes: float) -> str:
    """Bytes in kB or MB."""
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:,.1f} kB"
