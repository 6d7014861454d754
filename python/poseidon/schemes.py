"""What each scheme says of itself, as the core registers it (include/poseidon/scheme.h)."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace

from poseidon import _core


def _plain(traits: _core.SchemeTraits) -> SimpleNamespace:
    """Copy the traits: nanobind warns about its objects that still live at exit, such as by a script's globals."""
    return SimpleNamespace(**{name: getattr(traits, name) for name in dir(traits) if not name.startswith("_")})


SCHEMES = MappingProxyType({scheme.name: _plain(scheme) for scheme in _core.schemes()})
SCHEME_CHOICES = ("auto", *(name for name, scheme in SCHEMES.items() if not scheme.only_one_worker))


_TAKE_ROWS = frozenset(name for name, scheme in SCHEMES.items() if scheme.takes_rows)
_TAKE_FACTORS = frozenset(name for name, scheme in SCHEMES.items() if scheme.takes_factors)
_CONVERT = frozenset(name for name, scheme in SCHEMES.items() if scheme.converts)
_LOSSY = frozenset(name for name, scheme in SCHEMES.items() if scheme.lossy)
_WORKERS_MULTIPLY = frozenset(name for name, scheme in SCHEMES.items() if scheme.workers_multiply)


def takes_rows(scheme: str) -> bool:
    """Whether the scheme of that name takes a gradient as rows. False for "auto" and for an unknown scheme."""
    return scheme in _TAKE_ROWS


def takes_factors(scheme: str) -> bool:
    """Whether the scheme of that name takes a gradient as factors. False for "auto" and for an unknown scheme."""
    return scheme in _TAKE_FACTORS


def converts(scheme: str) -> bool:
    """Whether the numbers of that scheme may travel in another type than they have. False for "auto"."""
    return scheme in _CONVERT


def workers_multiply(scheme: str) -> bool:
    """Whether each worker gets all factors and multiplies them itself. False for "auto" and for an unknown scheme."""
    return scheme in _WORKERS_MULTIPLY


def is_lossy(scheme: str) -> bool:
    """Whether the scheme of that name sends less than the gradient. False for "auto" and for an unknown scheme."""
    return scheme in _LOSSY
