"""tools/check_thread_comments.py on small trees, and on this one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from check_thread_comments import violations  # noqa: E402
from structure.tree import Tree  # noqa: E402

Check = Callable[..., list[str]]

HEADER = """
/// Counts. Only the loop's thread uses it.
class Counter {
 public:
  void add();
};
"""


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Checks a tree of these files of src/base: the names have _h or _cc at their ends."""

    def run(**files: str) -> list[str]:
        tree = Tree(tmp_path)
        tree.files = []
        for name, text in files.items():
            stem, _, suffix = name.rpartition("_")
            path = Path(f"src/base/{stem}.{suffix}")
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
            tree.files.append(path)
        return list(violations(tree))

    return run


def test_this_tree_has_no_sentence_without_a_check() -> None:
    assert list(violations(Tree(ROOT))) == []


def test_a_class_without_a_check_is_listed_with_its_sentence(check: Check) -> None:
    expected = "src/base/counter.h:2: Counter does not check: Only the loop's thread uses it."
    assert check(counter_h=HEADER) == [expected]
    unrelated = "void Counter::add() { ++count; }\nvoid Other::add() { loop.check_thread(); }\n"
    assert check(counter_h=HEADER, counter_cc=unrelated) == [expected]


@pytest.mark.parametrize(
    "sentence",
    [
        "Only one thread uses it.",
        "One thread at a time uses it.",
        "After construction only the loop thread uses it.",
        "Not thread-safe.",
        "Any thread but the loop's may call it.",
        "The loop's thread must not call it.",
    ],
)
def test_all_ways_to_say_it_are_found(check: Check, sentence: str) -> None:
    assert len(check(counter_h=HEADER.replace("Only the loop's thread uses it.", sentence))) == 1


@pytest.mark.parametrize("sentence", ["Thread-safe.", "Any thread.", "It starts one thread. It uses it."])
def test_what_holds_for_all_threads_needs_no_check(check: Check, sentence: str) -> None:
    assert check(counter_h=HEADER.replace("Only the loop's thread uses it.", sentence)) == []


@pytest.mark.parametrize(
    "definition",
    [
        "void Counter::add() {\n  loop_.check_thread();\n  ++count_;\n}\n",
        "void Counter::add() { loop_->check_other_thread(); }\n",
    ],
)
def test_a_check_may_stand_in_a_definition_of_a_member(check: Check, definition: str) -> None:
    assert check(counter_h=HEADER, counter_cc=definition) == []


def test_a_check_may_stand_in_the_class(check: Check) -> None:
    assert (
        check(
            counter_h=HEADER.replace("  void add();", "  void add() { one_thread_.check(); }\n  OneThread one_thread_;")
        )
        == []
    )


def test_a_comment_within_a_class_belongs_to_it(check: Check) -> None:
    inside = "class Counter {\n public:\n  // Only the loop's thread calls the following.\n  void add();\n};\n"
    assert len(check(counter_h=inside)) == 1
    behind = "class Counter {\n  int count_ = 0;  // only the loop's thread uses it\n};\n"
    assert len(check(counter_h=behind)) == 1


def test_whoever_is_named_has_to_check(check: Check) -> None:
    named = HEADER.replace("uses it.", "uses it (Owner and Keeper check it).")
    owner = "class Owner {\n  OneThread one_thread_;\n};\n"
    missing = "class Keeper {\n  int count_ = 0;\n};\n"
    assert check(counter_h=named, owner_h=owner, keeper_h=owner.replace("Owner", "Keeper")) == []
    (found,) = check(counter_h=named, owner_h=owner, keeper_h=missing)
    assert "Keeper does not check" in found


def test_all_that_derive_have_to_check(check: Check) -> None:
    base = HEADER.replace("uses it.", "uses it (those that derive from it check it).")
    one = "class One final : public Counter {\n  OneThread one_thread_;\n};\n"
    other = "class Other final : public Counter, private Listener {\n  int count_ = 0;\n};\n"
    assert check(counter_h=base, one_h=one) == []
    (found,) = check(counter_h=base, one_h=one, other_h=other)
    assert "Other does not check" in found
    (found,) = check(counter_h=base)
    assert "Counter does not check" in found
