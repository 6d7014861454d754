"""Rates of links: as people write them for a command, and as commands print them. All are bits per second."""

from __future__ import annotations

import re

from poseidon.errors import InvalidArgument

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bits?|b|)(?:/s|ps|e)?", re.IGNORECASE)
LEAST_RATE, MOST_RATE = 10**5, 10**11


def parse_rate(text: str, most: int = MOST_RATE) -> int:
    """Bits per second that `text` stands for: 10gbit, 10gb, 10 Gb/s or 10G.

    Raises InvalidArgument when it is no rate from 100kbit to `most`, and for bytes (10GB), which it gives as bits.
    """
    match = _RATE.fullmatch(text.strip())
    rate = round(float(match[1]) * _UNITS[match[2].lower()]) if match and (match[2] or match[3]) else 0
    if match and (match[3] == "B" or text.strip().endswith("B")):
        raise InvalidArgument(
            f"the link rate is {text!r}, which is bytes: rates are bits, so give {format_rate(8 * rate)} for it, or "
            f"{format_rate(rate)} if you mean bits"
        )
    if not LEAST_RATE <= rate <= most:
        raise InvalidArgument(
            f"the link rate is {text!r}: it must be a number of bits per second with kbit, mbit or gbit, "
            f"from 100kbit to {format_rate(most)}, such as 100mbit, 31.25mbit or 10gbit"
        )
    return rate


def format_rate(bits_per_second: float) -> str:
    """The shortest text that `parse_rate` and tc read back, e.g. 31.25mbit."""
    for unit in "gmk":
        if bits_per_second >= _UNITS[unit]:
            return f"{bits_per_second / _UNITS[unit]:.12g}{unit}bit"
    return f"{bits_per_second:.12g}bit"


def rate_text(bits_per_second: float) -> str:
    """The same to four digits, for what was measured or computed."""
    return format_rate(float(f"{bits_per_second:.4g}"))
