"""Rates of links as people write them, the way `tc` reads them: "100mbit", "1gbit", "31.25mbit"."""

from __future__ import annotations

import re

from poseidon.errors import InvalidArgument

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
LEAST_RATE, MOST_RATE = 10**5, 10**11


def parse_rate(text: str, most: int = MOST_RATE) -> int:
    """Bits per second that `text` stands for. Raises InvalidArgument when it is no rate from 100kbit to `most`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower())
    rate = round(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if not LEAST_RATE <= rate <= most:
        raise InvalidArgument(
            f"the link rate is {text!r}: it must be a number with kbit, mbit or gbit, "
            f"from 100kbit to {format_rate(most)}, such as 100mbit, 31.25mbit or 1gbit"
        )
    return rate


def format_rate(bits_per_second: float) -> str:
    """The shortest text that `parse_rate` reads back, e.g. 31.25mbit."""
    for unit in ("gbit", "mbit", "kbit"):
        if bits_per_second >= _UNITS[unit]:
            return f"{bits_per_second / _UNITS[unit]:.12g}{unit}"
    return f"{bits_per_second:.12g}bit"
