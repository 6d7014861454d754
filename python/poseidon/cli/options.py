"""`poseidon options`: every option, with what this process would use, and the page docs/options.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from poseidon.cli.output import JsonFlag, print_json, print_table, wrapped

if TYPE_CHECKING:
    from poseidon.options import Group, Option

EPILOG = "Example: poseidon options --json"

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

## Who follows an option

Most options hold for whatever trains. These do not. "Refused" is an `InvalidArgument` that says what to leave out
([features.md](features.md)); "–" has no effect on what is trained, and nothing to act on.

| option | `DistributedDataParallel` | `LocalSGD` | `poseidon.jax` | `poseidon.tensorflow` | `poseidon.connect()` |
|---|---|---|---|---|---|
| `scheme` | yes | refused | `auto`, `ps`, `sfb`, `sharded_factors` | yes | refused |
| `lossy` | yes | refused | refused | refused | refused |
| `error_feedback` | yes | refused | refused | yes | refused |
| `wire` | yes | of pseudo-gradients | yes | yes | yes |
| `factor_wire` | yes | – | yes | yes | – |
| `parameter_wire` | with `update="server"` | yes | – | – | yes |
| `revise` | yes | – | – | – | – |
| `schedule=sequential` | yes | – | refused | refused | – |
| `priority_threshold`, `priority_order` | with a `DistributedOptimizer` | – | – | – | – |
| `stragglers=drop` | yes | refused | refused | refused | yes |
| `consistency=ssp`, `async` | with `update="server"` | refused | refused | refused | yes |
| `on_failure=rejoin` | yes | yes | refused | refused | refused |
| `on_failure=shrink` | yes | refused | refused | refused | refused |
| `replica_check` | yes | yes | yes | yes | –: a program takes the servers' values itself |
| `checkpoint_dir` | with `update="server"` | refused where servers keep values | refused | refused | yes |
| `record` | yes | – | yes | yes | – |

A model with a communication hook (`register_comm_hook`) that exchanges gradients itself follows none of the options
about how gradients travel: the first seven rows, and `stragglers=drop`.
"""


def options(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/options.md.")] = False,
    json: JsonFlag = False,
) -> None:
    """Print every option: its value here and now, where that comes from, its default and what it means."""
    # Help does not wait for the compiled core.
    from poseidon.options import OPTIONS, resolve

    if markdown:
        print(markdown_page(), end="")
        return
    settings = resolve()
    if json:
        print_json(
            [
                {
                    **{name: getattr(option, name) for name in ("name", "group", "default", "help")},
                    "value": getattr(settings, option.name),
                    "source": settings.sources[option.name],
                    "choices": option.limits.choices,
                }
                for option in OPTIONS
            ]
        )
        return
    rows = [
        (option.name, getattr(settings, option.name), settings.sources[option.name], option.default_text, option.help)
        for option in OPTIONS
    ]
    print_table(("option", "value", "from", "default", "meaning"), rows)


def markdown_page() -> str:
    """The whole page, which ends with a line break."""
    from poseidon.options import GROUPS

    parts = [_HEAD]
    for group in GROUPS:
        parts += _section(group)
    return "\n".join(parts)


def _section(group: Group) -> Iterator[str]:
    from poseidon.options import OPTIONS, PLACE

    yield f"## {group.title}\n\n{wrapped(group.help)}"
    for option in (*PLACE, *OPTIONS):
        if option.group == group.name:
            yield _entry(option)


def _entry(option: Option) -> str:
    from poseidon.options.table import PLACE_GROUP

    facts = [f"`{option.variable}`" if option.group == PLACE_GROUP else f"`{option.flag}`"]
    facts.append(option.kind.allowed(option.limits))
    facts += [f"default: {option.default_text}"] if option.default_text else []
    facts += ["*server*"] if option.on_server else []
    values = "".join(wrapped(f"- `{name}`: {text}") for name, text in option.limits.names.items() if text)
    return f"### {option.name}\n\n{wrapped(option.help)}\n{wrapped('; '.join(facts) + '.')}" + (
        values and f"\n{values}"
    )
