"""Recovery for JAX: a training loop that goes on when a worker is lost, with the bits of one in which none was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poseidon.adapter import recovery
from poseidon.adapter.compiled_state import CompiledState
from poseidon.adapter.membership import Membership
from poseidon.errors import InvalidArgument, Mismatch
from poseidon.jax.process import broadcast, connect, context, host_copy, is_array, like, port
from poseidon.jax.turns import wait_for_turns

_LOOP = (
    "begin each attempt with what recovery.state has, and assign what the step makes of it to recovery.state, as "
    "docs/jax.md#recovery does"
)


class TreeState(CompiledState):
    """A tree of arrays. Leaves that are no arrays, such as functions, are each rank's own."""

    framework_errors = (jax.errors.JaxRuntimeError,)

    def __init__(self, tree: Any, seed: int | None, here: Membership) -> None:
        super().__init__(seed, here)
        self._tree, self._kinds = _normal(tree), ""
        self._kinds = _describe(self._tree)
        if not self._kinds:
            raise InvalidArgument("Recovery was given no array: give it all that a step changes, such as parameters")
        self._donates: bool | None = None  # whether steps overwrite the arrays that they are given; None: not known yet
        self.is_open = self.was_read = self.was_set = False  # an attempt is under way; and in that

    @property
    def tree(self) -> Any:
        """The present tree."""
        self.was_read = True
        return self._tree

    @tree.setter
    def tree(self, tree: Any) -> None:
        if not self.is_open:
            raise InvalidArgument(
                f"recovery.state was assigned outside of an attempt, and a step that is made again repeats it: {_LOOP}"
            )
        self.replace(_normal(tree))

    def replace(self, tree: Any) -> None:
        """Makes this the present tree."""
        if (kinds := _describe(tree)) != self._kinds:
            pairs = zip([*self._kinds.split("\n"), "nothing more"], [*kinds.split("\n"), "nothing more"], strict=False)
            before, now = next((before, now) for before, now in pairs if before != now)
            raise Mismatch(
                f"recovery.state had {before!r} and is to have {now!r}: keep its form, for workers that join"
            )
        self._tree, self._taken, self.was_set = tree, None, True

    def describe(self) -> str:
        """The arrays, and the seed."""
        return f"{self._kinds}\nseed {self._seed}"

    def begin(self, step: int, rank: int) -> None:
        super().begin(step, rank)
        self.is_open, self.was_read, self.was_set = True, False, False

    def end(self) -> None:
        """Waits for what the attempt has computed. Raises InvalidArgument if its state was not read, or not set."""
        self.is_open = False
        if not (self.was_read and self.was_set):
            missing = "assigned nothing to" if self.was_read else "did not read"
            raise InvalidArgument(
                f"an attempt {missing} recovery.state, so a replacement would train otherwise: {_LOOP}"
            )
        if not self._recovers:
            return
        jax.block_until_ready(self._arrays())
        wait_for_turns(port())
        super().end()
        assert self._beginning is not None
        leaves, _, copies = self._beginning[1]
        if self._donates is None or not copies:
            self._donates = _some_deleted(leaves)

    def connect_models(self) -> None:
        connect()

    def values(self) -> list[Any]:
        return [host_copy(leaf) for leaf in self._arrays()]

    def take_values(self, values: Sequence[Any]) -> None:
        new = iter(values)
        leaves, form = jax.tree_util.tree_flatten(self._tree)
        leaves = [like(leaf, next(new)) if is_array(leaf) else leaf for leaf in leaves]
        self._tree = jax.tree_util.tree_unflatten(form, leaves)

    def kept_values(self) -> tuple[list[Any], Any, list[Any]]:
        """The leaves and the form of the tree, because a program may change its containers, and copies of its arrays.

        There are no copies where nobody overwrites the arrays that the attempt is given.
        """
        leaves, form = jax.tree_util.tree_flatten(self._tree)
        return leaves, form, [] if self._donates is False else self.values()

    def is_whole(self, kept: Any) -> bool:
        leaves, _, copies = kept
        return bool(copies) or not _some_deleted(leaves)

    def put_back(self, kept: Any) -> None:
        leaves, form, copies = kept
        self.is_open = False
        self._tree = jax.tree_util.tree_unflatten(form, leaves)
        if copies:
            self.take_values(copies)

    def _arrays(self) -> list[Any]:
        return [leaf for leaf in jax.tree_util.tree_leaves(self._tree) if is_array(leaf)]


class Recovery(recovery.Recovery):
    """Trains in attempts. An attempt that fails because another worker is lost is made again, with its replacement.

        recovery = poseidon.Recovery((params, optimizer_state), seed=0)
        while recovery.until(steps):
            with recovery.attempt():
                params, optimizer_state = recovery.state
                inputs = batch(recovery.step, poseidon.rank(), poseidon.world_size())
                recovery.state = step(params, optimizer_state, inputs)

    `state` is a tree of everything that a step changes: parameters, optimizer state, random keys, statistics. Every
    attempt reads `recovery.state` and assigns the next one to it, of the same form, shapes and dtypes. Numbers and
    NumPy's arrays become JAX's. Leaves that are no arrays are each rank's own. All ranks begin with rank 0's values.
    With `seed`, every attempt seeds NumPy's and Python's random numbers from it, the rank and the step. JAX's numbers
    come from keys: keep a key in the state, or fold `recovery.step` into one.

    Rank 0 writes a snapshot to `directory` every `every` steps and keeps the newest `keep`. If all processes are new,
    they go on from the newest snapshot. With on_failure=abort, or one worker, `Recovery` does nothing else.

    After a failure JAX compiles all programs of the process again. A program that the program itself has compiled ahead
    (`lower().compile()`) does not work any more. Collective: with on_failure=rejoin or shrink the workers meet here,
    not in `init`. Raises InvalidArgument for a state without arrays, Mismatch if the ranks differ, and PoseidonTimeout
    naming the ranks that did not come. Use it from the thread that trains. See docs/recovery.md.
    """

    _state: TreeState

    def __init__(
        self,
        state: Any,
        *,
        seed: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        every: int = 100,
        keep: int = 2,
    ) -> None:
        here = context()
        super().__init__(TreeState(state, seed, here), here, directory, every, keep)
        if not here.recovers:
            self._state.replace(broadcast(self._state.tree))

    @property
    def state(self) -> Any:
        """The tree with which the step begins. Assign the next one to it, once in each attempt."""
        return self._state.tree

    @state.setter
    def state(self, tree: Any) -> None:
        self._state.tree = tree


def _some_deleted(leaves: Sequence[Any]) -> bool:
    """Whether a step was given some of these arrays to overwrite."""
    return any(is_array(one) and one.is_deleted() for one in leaves)


def _normal(tree: Any) -> Any:
    """The tree with arrays of JAX that all ranks can have alike."""
    return jax.tree_util.tree_map(_normal_leaf, tree)


def _normal_leaf(leaf: Any) -> Any:
    if not is_array(leaf):
        return leaf
    if not isinstance(leaf, jax.Array):
        made, given = jnp.asarray(leaf), np.asarray(leaf)
        whole = given.dtype.kind not in "fc"
        if (made != given).any() if whole else (np.isfinite(given) & ~np.isfinite(np.asarray(made))).any():
            raise InvalidArgument(
                f"recovery.state has {leaf!r}, which JAX makes {made.dtype} and would change: give it as an array of "
                "the type that it is to have, with jax_enable_x64 for 64 bits"
            )
        # Not weakly typed, as what a replacement gets.
        return jax.lax.convert_element_type(made, made.dtype)
    # Those of a replacement are not weakly typed, and would give other types where they meet others.
    return jax.lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def _describe(tree: Any) -> str:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return "\n".join(
        f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}" for path, leaf in paths if is_array(leaf)
    )
