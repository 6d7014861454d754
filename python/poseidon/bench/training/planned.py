"""A method of the benchmark as the planner knows it."""

from __future__ import annotations

from poseidon.bench.training.methods import Method, scaled_sizes
from poseidon.planner import Exchange

_FIELDS = {"partition": "partition", "schedule": "schedule", "priority_order": "order", "priority_classes": "classes"}


def exchange_of(method: Method, scale: int = 1, threshold: str | float = "auto") -> Exchange:
    """The exchange of a method of Poseidon for weights whose dimensions are divided by `scale`.

    `threshold` is that of methods without their own. Raises ValueError for a method that no prediction knows.
    """
    options = dict(method.scaled(scale).options)
    sizes = scaled_sizes(scale)
    sizes |= {name: options.pop(name) for name in sizes if name in options}
    threshold = options.pop("priority_threshold", threshold)
    if method.library != "poseidon" or method.every > 1 or options.keys() - _FIELDS.keys():
        raise ValueError(f"no prediction knows the method {method.name!r}")
    return Exchange(
        scheme=method.scheme,
        wire=method.wire,
        overlap=method.overlap,
        threshold=threshold,
        by_time=False,
        sizes=sizes,
        replayed=True,
        **{_FIELDS[name]: value for name, value in options.items()},
    )
