"""The page docs/options.md, made from the table of options."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from poseidon.options.table import GROUPS, OPTIONS, PLACE, PLACE_GROUP, Group, Option

_WIDTH = 120
_HEAD = """\
# Options

`poseidon options --markdown` makes this page from the table of options,
[include/poseidon/options.def](../include/poseidon/options.def). Do not edit it. `poseidon options` prints the values
that a process would use, and where each comes from.

An option has one name everywhere. For `chunk_bytes`:

| where | how |
|---|---|
| keyword | `poseidon.init(chunk_bytes="1MiB")`, `poseidon.connect(chunk_bytes="1MiB")` |
| command line | `poseidon run --chunk-bytes 1MiB train.py`; `poseidon server` takes the options marked *server* |
| environment | `POSEIDON_CHUNK_BYTES=1MiB` |
| configuration file | `chunk_bytes = "1MiB"` in `poseidon.toml`, or in the file that `POSEIDON_CONFIG` names |

A keyword beats the command line, which beats the environment, which beats the configuration file, which beats the
default. The secret itself is the keyword `secret` or the variable `POSEIDON_SECRET`
([SECURITY.md](../SECURITY.md)). It is on no command line and in no configuration file.
"""


def markdown_page() -> str:
    """The whole page, which ends with a line break."""
    parts = [_HEAD]
    for group in GROUPS:
        parts += _section(group)
    return "\n".join(parts)


def _section(group: Group) -> Iterator[str]:
    yield f"## {group.title}\n\n{_wrapped(group.help)}"
    for option in (*PLACE, *OPTIONS):
        if option.group == group.name:
            yield _entry(option)


def _entry(option: Option) -> str:
    facts = [f"`{option.variable}`" if option.group == PLACE_GROUP else f"`{option.flag}`"]
    facts.append(option.kind.allowed(option.limits))
    facts += [f"default: {option.default_text}"] if option.default_text else []
    facts += ["*server*"] if option.on_server else []
    values = "".join(_wrapped(f"- `{name}`: {text}", "  ") for name, text in option.limits.names.items() if text)
    return f"### {option.name}\n\n{_wrapped(option.help)}\n{_wrapped('; '.join(facts) + '.')}" + (
        values and f"\n{values}"
    )


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"
