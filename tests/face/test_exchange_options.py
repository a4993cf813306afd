"""What a person types about the exchange of gradients becomes what the run is told, or one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.api.changes import exchanged
from hetopt.api.options import Changes
from hetopt.core.comm.composition import CODINGS, COLLECTIVES, METHODS, Combination, combinations, why_not_controlled
from hetopt.core.comm.compression_text import USUAL_RATIO, parse_compression, spell
from hetopt.core.errors import BadInput
from hetopt.core.run_rules import CONTROLLERS
from hetopt.core.run_spec import WEIGHS_WAYS, Compression, RunSpec, StopRule, WorkerSpec

ratios = st.floats(1e-6, 1.0)
whole = st.one_of(st.none(), st.integers(1, 2**20))


@st.composite
def compressions(draw: st.DrawFn) -> Compression:
    """Any compression that can be written down, whether its parts go together or not."""
    name = draw(st.sampled_from(sorted(METHODS)))
    return Compression(
        name=name,
        ratio=draw(ratios) if METHODS[name].by_ratio else 1.0,
        collective=draw(st.sampled_from(["auto", *COLLECTIVES])),
        memory=draw(st.sampled_from(["auto", "none", "error_feedback", "momentum_correction"])),
        bits=draw(whole),
        levels=draw(whole),
        rank=draw(whole),
        floor_ratio=draw(st.one_of(st.none(), ratios)),
        coding=draw(st.one_of(st.none(), st.sampled_from(sorted(CODINGS)))),
        momentum=draw(st.one_of(st.none(), st.floats(0, 1, exclude_max=True))),
        clip_norm=draw(st.one_of(st.none(), st.floats(1e-6, 1e6))),
    )


def run_of(**told: object) -> RunSpec:
    worker = WorkerSpec(host="a", type="local", local_batch_size=1)
    return RunSpec.model_validate({"task": "digits", "workers": (worker,), "stop": StopRule(max_steps=1), **told})


def decided(run: RunSpec, **typed: str) -> RunSpec:
    return exchanged(Changes(**typed), run)


@given(compressions())
def test_what_is_spelt_is_read_back(compression: Compression) -> None:
    assert parse_compression(spell(compression)) == compression


@given(st.integers(1, 10**6), st.sampled_from(sorted(name for name in METHODS if METHODS[name].by_ratio)))
def test_how_many_times_less_is_a_fraction_too(factor: int, name: str) -> None:
    assert parse_compression(f"{name}:{factor}x") == Compression(name=name, ratio=1 / factor)
    assert parse_compression(f" {name} : {factor} x ") == Compression(name=name, ratio=1 / factor)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("topk:0.01", Compression(name="topk", ratio=0.01)),
        ("topk,ratio=0.01", Compression(name="topk", ratio=0.01)),
        ("topk", Compression(name="topk", ratio=USUAL_RATIO)),
        ("dense", Compression()),
        ("none", Compression()),
        ("identity", Compression()),
        ("dgc:0.001,momentum=0.9", Compression(name="dgc", ratio=0.001, momentum=0.9)),
        ("powersgd,rank=2", Compression(name="powersgd", rank=2)),
        ("qsgd_maxnorm, bits=8", Compression(name="qsgd_maxnorm", bits=8)),
        ("topk:1000x,floor_ratio=10x", Compression(name="topk", ratio=0.001, floor_ratio=0.1)),
        (
            "mstopk:5e-3,collective=ar_topk_var,coding=packed",
            Compression(name="mstopk", ratio=0.005, collective="ar_topk_var", coding="packed"),
        ),
    ],
)
def test_compressions_as_people_write_them(text: str, expected: Compression) -> None:
    assert parse_compression(text) == expected


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("tpok:0.01", "no compressor called 'tpok'", "did you mean 'topk'"),
        ("", "no compressor called ''", "choose one of"),
        ("densee", "no compressor called 'densee'", "did you mean 'dense'"),
        ("auto:0.1", "auto takes no ratio", "auto alone"),
        ("topk:0", "ratio must be greater than 0, got '0'", "correct"),
        ("topk:1.5", "ratio must be less than or equal to 1, got '1.5'", "correct"),
        ("topk:-0.1", "ratio must be greater than 0, got '-0.1'", "correct"),
        ("topk:nan", "ratio must be a fraction, got 'nan'", "0.01, 1% or 100x"),
        ("topk:0x", "ratio must be a fraction, got '0x'", "100x"),
        ("topk:0.5x", "ratio must be less than or equal to 1, got '0.5x'", "correct"),
        ("topk:", "must be a name with its values in parentheses, got 'topk:'", "NAME(VALUE"),
        ("topk:lots", "ratio must be a fraction, got 'lots'", "100x"),
        ("powersgd,rnak=2", "no option of powersgd called 'rnak'", "did you mean 'rank'"),
        ("powersgd,rank", "does not say what rank is", "rank=VALUE"),
        ("powersgd,rank=", "does not say what rank is", "rank=VALUE"),
        ("powersgd,rank=0", "rank must be greater than 0, got '0'", "correct"),
        ("powersgd,rank=two", "rank must be a valid integer, got 'two'", "correct"),
        ("powersgd,rank=2,rank=3", "says twice what rank is", "once"),
        ("topk:0.1,ratio=0.1", "says twice what ratio is", "once"),
        ("dgc:0.1,momentum=1", "momentum must be less than 1, got '1'", "correct"),
        ("powersgd,name=topk", "no option of powersgd called 'name'", "choose one of"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text: str, said: str, hint: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_compression(text)
    assert said in caught.value.message
    assert caught.value.message.endswith(".")
    assert hint in str(caught.value.hint)


def test_auto_leaves_everything_to_the_run() -> None:
    planned = run_of(compression=Compression(name="topk", ratio=0.1))
    auto = planned.model_copy(update={"ratio_policy": "auto", "collective_policy": "cheapest"})
    assert decided(planned, compression="auto") == auto
    assert decided(planned, ratio_policy="auto") == auto
    assert decided(run_of(), compression="auto").compression == Compression()
    named = decided(run_of(), compression="redsync:0.001", ratio_policy="auto")
    assert named.compression == Compression(name="redsync", ratio=0.001)
    assert (named.ratio_policy, named.collective_policy) == ("auto", "cheapest")
    tied = decided(planned, compression="auto", collective="ar_topk_star")
    assert tied.collective_policy == "fixed"
    assert tied.compression.collective == "ar_topk_star"


def test_a_named_compression_is_fixed_unless_somebody_decides() -> None:
    planned = run_of(ratio_policy="auto", collective_policy="cheapest")
    fixed = decided(planned, compression="topk:0.01")
    assert (fixed.ratio_policy, fixed.collective_policy) == ("fixed", "cheapest"), "the rest is as planned"
    warm = decided(run_of(), compression="dgc:0.001", ratio_policy="warm_up")
    assert (warm.compression.name, warm.ratio_policy, warm.collective_policy) == ("dgc", "warm_up", "fixed")
    dense = decided(planned, compression="dense", collective="all_reduce")
    assert (dense.ratio_policy, dense.collective_policy) == ("fixed", "fixed")


def test_a_collective_is_the_plans_the_named_or_the_cheapest() -> None:
    planned = run_of(compression=Compression(name="topk", ratio=0.1))
    assert decided(planned, collective="auto").collective_policy == "cheapest"
    for typed in (
        {"collective": "ar_topk"},
        {"compression": "topk:0.1,collective=ar_topk"},
        {"compression": "topk:0.1,collective=ar_topk", "collective": "ar_topk"},
    ):
        told = decided(planned, **typed)
        assert (told.compression.collective, told.collective_policy) == ("ar_topk", "fixed")
    begun = decided(planned, compression="topk:0.1,collective=ar_topk", collective="auto")
    assert (begun.compression.collective, begun.collective_policy) == ("ar_topk", "cheapest")


@pytest.mark.parametrize("policy", sorted(CONTROLLERS))
@pytest.mark.parametrize("combination", combinations(), ids=lambda c: f"{c.name}-{c.memory}-{c.collective}")
def test_every_combination_is_taken_or_refused_as_the_matrix_says(combination: Combination, policy: str) -> None:
    ratio = ":0.01" if combination.method.by_ratio else ""
    typed = f"{combination.name}{ratio},memory={combination.memory},collective={combination.collective}"
    reason = why_not_controlled(combination.name, policy, combination.collective)
    if reason is None or (combination.name == "identity" and policy in WEIGHS_WAYS):
        told = decided(run_of(), compression=typed, ratio_policy=policy)
        assert (told.compression.name, told.ratio_policy) == (combination.name, policy)
    else:
        with pytest.raises(BadInput) as caught:
            decided(run_of(), compression=typed, ratio_policy=policy)
        assert caught.value.message == reason


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"compression": "auto", "ratio_policy": "accordion"}, '`compression="auto"` decides the ratio itself'),
        ({"ratio_policy": "gravca"}, "no ratio policy called 'gravca'"),
        ({"collective": "all-gather"}, "no collective called 'all-gather'"),
        ({"compression": "topk:0.1,collective=ar_topk", "collective": "all_gather"}, "and `collective` for all_gather"),
        ({"compression": "topk:0.1", "collective": "all_reduce"}, "Every worker selects other elements"),
        ({"compression": "powersgd", "ratio_policy": "accordion"}, "same amount at every ratio"),
        ({"compression": "topk_threshold:0.1", "ratio_policy": "gravac"}, "selects from a selection"),
        ({"compression": "topk:0.1", "ratio_policy": "gravac", "collective": "ar_topk"}, "one worker selects for all"),
        ({"compression": "qsgd_maxnorm:0.1"}, "the ratio of qsgd_maxnorm must be 1"),
        ({"compression": "topk:0.1,bits=8"}, "has no option bits"),
        ({"compression": "topk:0.1,coding=zip"}, "no coding called 'zip'"),
        ({"compression": "topk:0.1,memory=none"}, "never be learnt without a memory"),
        (
            {"compression": "topk:1", "ratio_policy": "accordion"},
            "the ratio of accordion must be above 0 and below 1, got 1",
        ),
        ({"ratio_policy": "threshold"}, "same amount at every ratio"),
    ],
)
def test_what_does_not_go_together_is_refused(typed: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        decided(run_of(), **typed)
    assert said in caught.value.message
    assert caught.value.hint


def test_a_learning_rate_that_follows_the_noise_needs_all_of_the_gradient() -> None:
    noisy = run_of(learning_rate_rule="adascale")
    for typed in ({"compression": "topk:0.1"}, {"compression": "auto"}):
        with pytest.raises(BadInput, match="follows the noise"):
            decided(noisy, **typed)
    assert decided(noisy, compression="dense").ratio_policy == "fixed"
