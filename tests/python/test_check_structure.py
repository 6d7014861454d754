"""Each rule of tools/check_structure.py, on a small tree that breaks it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from structure.circles import check_circles  # noqa: E402
from structure.contracts import check_cpp_contracts, check_python_contracts  # noqa: E402
from structure.dead import check_dead_headers, check_dead_modules  # noqa: E402
from structure.edges import PACKAGE, cpp_edges, python_edges  # noqa: E402
from structure.rooms import check_doors, check_rooms_are_listed  # noqa: E402
from structure.seam import MOST_SLEEPS, WAITING, check_seam, check_sleeps  # noqa: E402
from structure.text import check_environment, check_length, check_markdown  # noqa: E402
from structure.tree import Tree  # noqa: E402

MakeTree = Callable[[dict[str, str]], Tree]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Makes a checkout of the given files."""

    def make(files: dict[str, str]) -> Tree:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        tree = Tree(tmp_path)
        tree.files = sorted(map(Path, files))
        return tree

    return make


def one(found: Iterable[str]) -> str:
    """The only violation."""
    violations = list(found)
    assert len(violations) == 1, violations
    return violations[0]


def package(**modules: str) -> dict[str, str]:
    """Modules of the package; `a__b` is the module a.b."""
    return {f"python/poseidon/{name.replace('__', '/', 1)}.py": text for name, text in modules.items()}


def test_a_tree_has_the_files_that_git_tracks_or_would_add(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name in ("tracked.py", "new.py", "ignored.py"):
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    subprocess.run(["git", "add", "tracked.py"], cwd=tmp_path, check=True)
    assert Tree(tmp_path).files == [Path(".gitignore"), Path("new.py"), Path("tracked.py")]


# Doors


def test_a_room_may_include_only_what_its_row_names(make_tree: MakeTree) -> None:
    tree = make_tree(
        {
            "src/base/text.h": "",
            "src/plan/plan.h": '#include "base/text.h"\n#include "wire/header.h"\n',
            "src/wire/header.h": "",
        }
    )
    doors = {"base": set(), "plan": {"base"}, "wire": set()}
    found = check_doors(cpp_edges(tree), Path("src"), doors)
    assert one(found) == "src/plan/plan.h:2: plan may not use wire"


def test_a_door_of_a_sub_room_is_judged_among_its_neighbours(make_tree: MakeTree) -> None:
    tree = make_tree(
        {
            "src/server/core/core.h": '#include "server/pace/pace.h"\n',
            "src/server/pace/pace.h": '#include "server/core/core.h"\n#include "base/text.h"\n',
            "src/base/text.h": "",
        }
    )
    doors = {"server": {"base"}, "server/core": {"pace"}, "server/pace": set()}
    found = check_doors(cpp_edges(tree), Path("src"), doors)
    assert one(found) == "src/server/pace/pace.h:1: server/pace may not use core"


@pytest.mark.parametrize(
    "statement",
    [
        "import poseidon.torch",
        "from poseidon import torch",
        "from poseidon.torch import join",
        "from poseidon.torch.join import Join",
        "from .torch import join",
        "def late():\n    import poseidon.torch.join",
        "if TYPE_CHECKING:\n    from poseidon.torch.join import Join",
    ],
)
def test_every_form_of_import_is_seen(make_tree: MakeTree, statement: str) -> None:
    tree = make_tree(package(errors=statement, torch____init__="", torch__join="Join = 1"))
    doors = {"errors": set(), "torch": {"errors"}}
    assert "errors may not use torch" in one(check_doors(python_edges(tree), PACKAGE, doors))


def test_the_compiled_extension_is_a_neighbour(make_tree: MakeTree) -> None:
    tree = make_tree(package(errors="from poseidon._core import Client", notices="from poseidon import _core"))
    found = check_doors(python_edges(tree), PACKAGE, {"errors": set(), "notices": {"_core"}})
    assert one(found).endswith("errors may not use _core")


def test_a_folder_without_a_row_is_a_violation(make_tree: MakeTree) -> None:
    tree = make_tree({"src/base/text.h": "", "src/attic/old.h": ""})
    assert one(check_rooms_are_listed(tree.files, Path("src"), {"base": set()})).startswith("src/attic: ")


# Circles


def circles_of(tree: Tree) -> Iterator[str]:
    return check_circles([*cpp_edges(tree), *python_edges(tree)])


def test_two_headers_that_include_each_other_are_a_circle(make_tree: MakeTree) -> None:
    tree = make_tree({"src/base/a.h": '#include "base/b.h"\n', "src/base/b.h": '#include "base/a.h"\n'})
    assert "src/base: circle a.h → b.h → a.h (src/base/a.h:1, src/base/b.h:1)" in one(circles_of(tree))


def test_a_circle_of_three_modules_is_named_once(make_tree: MakeTree) -> None:
    modules = package(
        torch__a="from poseidon.torch.b import x",
        torch__b="if TYPE_CHECKING:\n    from poseidon.torch.c import x",
        torch__c="def late():\n    from poseidon.torch import a",
        torch__d="from poseidon.torch.a import x",
    )
    assert "circle a.py → b.py → c.py → a.py" in one(circles_of(make_tree(modules)))


def test_folders_that_use_each_other_are_a_circle_though_no_files_are(make_tree: MakeTree) -> None:
    tree = make_tree(
        {
            "src/server/core/core.h": '#include "server/pace/clock.h"\n',
            "src/server/pace/clock.h": "",
            "src/server/pace/pace.h": '#include "server/core/core.h"\n',
        }
    )
    assert "src/server: circle core → pace → core" in one(circles_of(tree))


def test_a_module_that_imports_its_own_package_is_a_circle(make_tree: MakeTree) -> None:
    modules = package(
        models____init__="from poseidon.models.table import Table", models__table="import poseidon.models"
    )
    assert "circle __init__.py → table.py → __init__.py" in one(circles_of(make_tree(modules)))


def test_a_circle_of_scripts_is_found(make_tree: MakeTree) -> None:
    tree = make_tree({"bench/soak.py": "import soak_result", "bench/soak_result.py": "from soak import x"})
    assert "bench: circle soak.py → soak_result.py → soak.py" in one(circles_of(tree))


def test_imports_one_way_are_no_circle(make_tree: MakeTree) -> None:
    modules = package(a="import poseidon.b\nimport poseidon.c", b="import poseidon.c", c="")
    assert list(circles_of(make_tree(modules))) == []


# Dead files


def test_a_module_that_nobody_imports_is_dead(make_tree: MakeTree) -> None:
    modules = package(old="", used="", program="from poseidon.used import x\nMODULE = 'poseidon.started'", started="")
    tree = make_tree(modules)
    found = check_dead_modules(tree, python_edges(tree), entry_points={"poseidon.program"})
    assert one(found) == "python/poseidon/old.py: nobody imports this module"


def test_a_module_that_only_tests_import_is_dead(make_tree: MakeTree) -> None:
    tree = make_tree({**package(old=""), "tests/python/test_old.py": "from poseidon import old"})
    assert one(check_dead_modules(tree, python_edges(tree))).startswith("python/poseidon/old.py")


def test_programs_and_what_they_import_are_alive(make_tree: MakeTree) -> None:
    program = "import soak_result\nif __name__ == '__main__':\n    pass\n"
    tree = make_tree({"bench/soak.py": program, "bench/soak_result.py": "", "bench/old.py": ""})
    assert one(check_dead_modules(tree, python_edges(tree))) == "bench/old.py: nobody imports this module"


def test_a_header_that_only_its_source_and_tests_include_is_dead(make_tree: MakeTree) -> None:
    tree = make_tree(
        {
            "src/kernel/old.h": "",
            "src/kernel/old.cc": '#include "kernel/old.h"\n',
            "src/kernel/sum.h": "",
            "src/plan/plan.cc": '#include "kernel/sum.h"\n',
            "tests/cpp/kernel/old_test.cc": '#include "kernel/old.h"\n',
        }
    )
    assert one(check_dead_headers(tree, cpp_edges(tree))) == "src/kernel/old.h: no other file includes this header"


# Contracts


def missing_in_header(make_tree: MakeTree, body: str) -> list[str]:
    tree = make_tree({"include/poseidon/x.h": f"// About x.\n\nnamespace poseidon {{\n\n{body}\n\n}}\n"})
    return [line.split(": ")[1].removesuffix(" has no comment") for line in check_cpp_contracts(tree)]


@pytest.mark.parametrize(
    "body",
    [
        "class Client {\n};",
        "struct Client {\n  int rank = 0;\n};",
        "enum class Client : std::uint8_t {\n  one,\n};",
        "template <typename T>\nclass [[nodiscard]] Client {\n};",
        "int Client(int rank);",
        "std::vector<std::pair<int, int>> Client(\n    int rank);",
        "constexpr int Client(int rank) {\n  return rank;\n}",
        "/// About another one.\nint other();\n\nint Client();",
        "/// About the class.\nclass Outer {\n public:\n  virtual int Client() const = 0;\n};",
        "/// About the class.\nstruct Outer {\n  struct Client {\n  };\n};",
    ],
)
def test_a_public_declaration_needs_a_comment(make_tree: MakeTree, body: str) -> None:
    assert missing_in_header(make_tree, body) == ["Client"]


@pytest.mark.parametrize(
    "body",
    [
        "/// A client.\nclass Client {\n};",
        "int rank();  // of this process",
        "/// Which worker it is, of how many.\nint rank();\nint world_size();",
        "/// A client.\nclass Client {\n public:\n  Client();\n  ~Client();\n  Client(const Client&) = delete;\n"
        "  bool operator==(const Client&) const = default;\n\n private:\n  void hidden();\n  struct State {\n  };\n};",
        "/// A client.\nclass Client {\n  void hidden();\n};",
        "/// Calls a function.\ninline int rank() {\n  int value(3);\n  return other(value);\n}",
    ],
)
def test_what_has_a_comment_or_needs_none_is_no_violation(make_tree: MakeTree, body: str) -> None:
    assert missing_in_header(make_tree, body) == []


@pytest.mark.parametrize(
    ("text", "violation"),
    [
        ("", "x has no docstring"),
        ('"""about x"""', "the docstring of x does not begin with a full sentence"),
        ('"""About x."""\ndef f(): ...', "f has no docstring"),
        ('"""About x."""\nclass C: ...', "C has no docstring"),
        ('"""About x."""\nclass C:\n    """A C is."""\n    def f(self): ...', "C.f has no docstring"),
    ],
)
def test_a_public_python_name_needs_a_sentence(make_tree: MakeTree, text: str, violation: str) -> None:
    assert one(check_python_contracts(make_tree(package(x=text)))).endswith(violation)


def test_private_names_and_overridden_methods_need_no_docstring(make_tree: MakeTree) -> None:
    text = '''"""About x."""
def _f(): ...
class _C:
    def f(self): ...
class D(Base):
    """A D does what a Base does."""
    def f(self): ...
'''
    assert list(check_python_contracts(make_tree(package(x=text)))) == []


# Text


def test_a_long_file_is_a_violation(make_tree: MakeTree) -> None:
    tree = make_tree({"a.py": "x = 1\n" * 500, "b.py": "x = 1\n" * 499})
    assert one(check_length(tree)) == "a.py: 500 lines, at most 499 are allowed"


def test_a_wide_line_of_markdown_is_a_violation(make_tree: MakeTree) -> None:
    tree = make_tree({"a.md": "short\n" + "x" * 121 + "\n", "b.md": "ä" * 120})
    assert one(check_markdown(tree)) == "a.md:2: more than 120 columns"


def test_the_environment_is_read_in_one_place(make_tree: MakeTree) -> None:
    read = 'x = os.environ.get("POSEIDON_TIMEOUT")\n'
    tree = make_tree({"src/base/x.cc": "std::getenv(name);\n", **package(options__sources=read, store=read)})
    assert sorted(check_environment(tree)) == [
        "python/poseidon/store.py:1: POSEIDON_* is read in poseidon.options only",
        "src/base/x.cc:1: the core reads no environment variables",
    ]


@pytest.mark.parametrize(
    "code",
    [
        "const auto now = std::chrono::steady_clock::now();",
        "std::this_thread::sleep_for(kPause);",
        "std::condition_variable changed_;",
        "std::thread thread_;",
        "::clock_gettime(CLOCK_MONOTONIC, &time);",
        "const auto seconds = std::time(nullptr);",
        "std::random_device random;",
        "std::promise<void> done;",
        "::sleep(1);",
    ],
)
def test_nothing_goes_past_the_seam(make_tree: MakeTree, code: str) -> None:
    allowed = "inbox.sleep(); const auto now = Clock::now();  // not a steady_clock\n"
    tree = make_tree({"src/client/x.cc": f"{allowed}{code}\n", "src/base/thread.cc": code, "tests/cpp/x.cc": code})
    assert one(check_seam(tree)).startswith("src/client/x.cc:2: ")


NAP = f"time.{'sleep'}(1)"  # in pieces, or the check would find it here


@pytest.mark.parametrize(
    "code", [NAP, f"    {NAP}  # ugly", NAP.removeprefix("time."), f'SCRIPT = "import time; {NAP}"']
)
def test_a_test_that_sleeps_says_why(make_tree: MakeTree, code: str) -> None:
    allowed = f"{NAP}  # the kernel's own time is what counts\nlayers_{NAP.removeprefix('time.')}\n"
    tree = make_tree({"tests/python/test_x.py": f"{allowed}{code}\n", str(WAITING): code, "python/poseidon/x.py": code})
    assert one(check_sleeps(tree)).startswith("tests/python/test_x.py:3: ")


def test_few_tests_sleep(make_tree: MakeTree) -> None:
    line = f"{NAP}  # the kernel's own time is what counts\n"
    assert not list(check_sleeps(make_tree({"tests/deploy/a.py": line * MOST_SLEEPS})))
    found = one(check_sleeps(make_tree({"tests/deploy/a.py": line * MOST_SLEEPS, "tests/python/b.py": line})))
    assert found.startswith(f"tests: {MOST_SLEEPS + 1} sleeps")
