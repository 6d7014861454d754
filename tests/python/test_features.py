"""The table of features: what may be combined, and what is said where it may not."""

from __future__ import annotations

import itertools

import pytest

import poseidon
from poseidon.adapter.features import FEATURES, PROPERTIES, SAME_STEP, Feature, Features, refusal
from poseidon.errors import InvalidArgument
from poseidon.options import resolve

ALL = list(FEATURES.values())
EXCLUDING = [pair for pair in itertools.combinations(ALL, 2) if refusal(*pair)]


def test_every_feature_names_known_properties_and_a_remedy() -> None:
    for one in ALL:
        assert {*one.needs, *one.breaks} <= PROPERTIES.keys(), one.name
        assert one.needs or one.breaks, f"{one.name} excludes nothing"
        assert one.remedy, one.name
        for why in (*one.needs.values(), *one.breaks.values()):
            assert why.strip(), one.name


def test_every_property_is_needed_by_a_feature_and_broken_by_another() -> None:
    assert {name for one in ALL for name in one.needs} == PROPERTIES.keys()
    assert {name for one in ALL for name in one.breaks} == PROPERTIES.keys()


@pytest.mark.parametrize("pair", EXCLUDING, ids=lambda pair: f"{pair[0].name} {pair[1].name}")
def test_a_refusal_names_both_why_and_what_to_do(pair: tuple[Feature, Feature]) -> None:
    text = refusal(*pair, {one.name: f"VALUE-{one.name}" for one in pair})
    assert text == refusal(*reversed(pair), {one.name: f"VALUE-{one.name}" for one in pair})
    head, reasons, remedies = text.replace("; ", "\n", 1).replace(" exclude each other: ", "\n", 1).split("\n")
    for one in pair:
        written = one.written.format(f"VALUE-{one.name}")
        assert written in head
        assert written in reasons
        assert one.remedy in remedies


def test_no_feature_excludes_itself() -> None:
    assert [one.name for one in ALL if refusal(one, one)] == []


def test_options_of_a_job_are_refused_together() -> None:
    with pytest.raises(InvalidArgument, match="stragglers=drop and consistency=ssp exclude each other"):
        Features.of(resolve(stragglers="drop", consistency="ssp"))
    with pytest.raises(InvalidArgument, match=r"lossy=topk and poseidon\.jax exclude each other.*use poseidon\.torch"):
        Features.of(resolve(lossy="topk"), "jax")
    for framework in ("jax", "tensorflow"):
        with pytest.raises(InvalidArgument, match=r"checkpoint_dir=/saved and poseidon.* servers keep none"):
            Features.of(resolve(checkpoint_dir="/saved"), framework)
    Features.of(resolve(checkpoint_dir="/saved"), "exchange")


def test_the_push_pull_exchange_asks_the_table() -> None:
    for option in ("error_feedback=on", "scheme=topk", "lossy=bf16", "on_failure=rejoin", "on_failure=shrink"):
        name, _, value = option.partition("=")
        with pytest.raises(InvalidArgument, match=rf"{option} and poseidon\.connect\(\) exclude each other"):
            poseidon.connect(rank=0, world_size=2, master_addr="127.0.0.1", master_port=29500, **{name: value})


def test_local_sgd_does_not_ignore_how_gradients_are_to_travel() -> None:
    for option in ("scheme", "lossy"):
        with pytest.raises(InvalidArgument, match=f"{option}=topk and LocalSGD exclude each other"):
            Features("local_sgd", within=Features.of(resolve(**{option: "topk"})))


def test_what_is_refused_leaves_nothing_behind() -> None:
    job = Features("drop")
    with pytest.raises(InvalidArgument):
        job.add("join")
    assert not job.has("join")
    job.add("per_parameter")
    assert job.has("per_parameter")


def test_properties_follow_from_what_is_present() -> None:
    job = Features("drop")
    model = Features(within=job)
    assert not model.keeps(SAME_STEP)
    assert model.breaking(SAME_STEP) == "stragglers=drop"
    assert model.keeps("common_updates")
    assert Features().keeps(SAME_STEP)


def test_models_know_of_the_job_and_not_of_each_other() -> None:
    job = Features()
    one, other = Features("comm_hook", within=job), Features(within=job)
    job.take(one)
    job.take(other)
    other.add("distributed_optimizer")  # the hook is the other model's
    with pytest.raises(InvalidArgument, match="DistributedOptimizer and the communication hook"):
        one.add("distributed_optimizer")
    job.add("ssp")
    with pytest.raises(InvalidArgument, match="join"):
        other.add("join")


def test_what_comes_later_to_the_job_is_compared_with_its_parts() -> None:
    job = Features()
    model = Features(within=job)
    optimizer = Features("update_server", within=model)
    optimizer.add("aggregator", "'median'")
    job.take(model)
    model.take(optimizer)
    with pytest.raises(InvalidArgument, match="aggregator='median' and reduce_by_host=on"):
        job.add("sums_of_machines")
    model.leave(optimizer)
    job.add("sums_of_machines")
    with pytest.raises(InvalidArgument, match="reduce_by_host=off"):
        Features(within=model).add("aggregator", "'median'")


def test_a_part_that_nobody_holds_is_forgotten() -> None:
    job = Features()
    job.take(Features("join", within=job))
    assert list(job.parts) == []
    job.add("drop")


def test_a_feature_that_has_ended_excludes_nothing() -> None:
    model = Features("join")
    with pytest.raises(InvalidArgument, match="join"):
        model.add("set_weight")
    model.remove("join")
    model.add("set_weight")


def test_a_model_is_not_refused_for_what_another_one_has() -> None:
    """As the second of two models in a job, of which the first resumes from servers and this one updates on workers."""
    job = Features()
    first = Features("wrapped", within=job)
    optimizer = Features("update_server", "resume", within=first)
    job.take(first)
    first.take(optimizer)
    Features(within=job).add("plain_update", "out.bias")
    with pytest.raises(InvalidArgument, match=r"resume=True and the update of parameter out\.bias"):
        job.check("plain_update", "out.bias")
