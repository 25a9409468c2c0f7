"""Numbers as text: the only place where seconds, bytes and ratios are formatted."""

_KIB = 1024


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it, three figures."""
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= size or unit == "us":
            return f"{_three(value / size)} {unit}"
    raise AssertionError("the last unit takes every value")


def size(value: int | None) -> str:
    """Bytes in binary units, three figures."""
    if value is None:
        return "-"
    number = float(value)
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < _KIB:
            return f"{value} B" if unit == "B" else f"{_three(number)} {unit}"
        number /= _KIB
    return f"{_three(number)} GiB"


def count(value: float | None) -> str:
    """A count with thousands separated."""
    return "-" if value is None else f"{value:,.0f}"


def counted(number: int, noun: str) -> str:
    """A count of things: "1 row", "1,200 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def flops(value: int | None) -> str:
    """Floating-point operations, in thousands (k), millions (M) or milliards (G)."""
    if value is None:
        return "-"
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{_three(value / scale)} {unit}"
    return str(value)


def times(ratio: float) -> str:
    """A factor as `1.72x`, with the figures that its size deserves."""
    return f"{_three(ratio)}x"


def percent(share: float) -> str:
    """A relative difference as `3.6%`, without its sign."""
    value = abs(share) * 100
    if 99 <= value < 100:  # what is not all is not said to be
        return f"{min(value, 99.9):.1f}%"
    return f"{value:.0f}%" if value >= 10 else f"{f'{value:.1f}'.removesuffix('.0')}%"


def number(value: float) -> str:
    """A plain number with three significant figures."""
    return f"{value:.3g}"


def _three(value: float) -> str:
    """Three significant figures, never in scientific notation."""
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
