"""What the systems whose methods hetopt contains have published, and which figures of the benchmarks answer it.

Published values are facts of the papers, as their tables print them. The figures are those of `benchmarks/results`, in
words that are filled in from there, so that a claim is never older than its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

How = Literal["emulated", "composed", "simulated", "predicted", "not measured"]
"""``emulated``: real processes train, and wait until the machine they stand for would be done. ``composed``: steps are
counted in real training, and their times added up. ``simulated``: nothing trains. ``predicted``: a model's figures."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure.

    Attributes:
        system: name and paper.
        claim: in words.
        published: as it is printed.
        benchmark: that answers it; None: none does, and ``note`` says why.
        theirs: of the published method here; figures in braces.
        ours: of hetopt's default.
        baseline: of the best rival in the same run.
        how: it was measured.
        note: why it differs, or is not measured.
        told_on: page of the documentation, where it is another than that of the system.
    """

    system: str
    claim: str
    published: str
    benchmark: str | None = None
    theirs: str = ""
    ours: str = ""
    baseline: str = ""
    how: How = "not measured"
    note: str = ""
    told_on: str = ""

    @property
    def is_answered(self) -> bool:
        """Whether the published method, or its law, ran here, and a figure says what it came to."""
        return self.benchmark is not None and "{" in self.theirs

    @property
    def page(self) -> str:
        """The page of the documentation that tells it beside its method."""
        return self.told_on or PAGES[self.system]


PARTITION = "data partition (2110.08941)"
QUANTISERS = "quantisers for all-reduce (2109.12497)"
AR_TOPK = "AR-Topk (2312.02493)"
SELSYNC = "SelSync (2307.07950)"
DYNAMIC = "dynamic batching (2305.12213)"
OMNILEARN = "OmniLearn (2503.17469)"
GRAVAC = "GraVAC (2305.12201)"
SCAVENGER = "Scavenger (2303.06659)"
SCADLES = "ScaDLES (2301.08897)"
ALLOCATION = "task allocation (2111.08272)"

PAGES = {
    PARTITION: "methods/proportional.md",
    QUANTISERS: "methods/quantisers.md",
    AR_TOPK: "methods/ar-topk.md",
    SELSYNC: "methods/selsync.md",
    DYNAMIC: "methods/dynamic.md",
    OMNILEARN: "methods/dynamic.md",
    GRAVAC: "methods/gravac.md",
    SCAVENGER: "models.md",
    SCADLES: "methods/scadles.md",
    ALLOCATION: "methods/allocation.md",
}
"""Of each system: where its figures are told beside the method."""

SMALL = "a small ConvNet on two cores"

OMNILEARN_SAYS = "14 to 85 % less time (1.16 to 6.7 times as fast) over all its models and clusters; none is told alone"


def _balanced(system: str, key: str, cores: str, published: str, theirs: str, note: str) -> Claim:
    """A cluster of unequal cores: times as fast as equal batches."""
    return Claim(
        system=system,
        claim=f"workers of {cores} cores: times as fast as with equal batches",
        published=published,
        benchmark="balance",
        theirs=f"{{speed_up_{theirs}_{key}:.2f}}",
        ours=f"{{speed_up_{key}:.2f}}",
        baseline=f"speeds known beforehand {{speed_up_static_{key}:.2f}}; ideal {{ideal_speed_up_{key}:.2f}}",
        how="emulated",
        note=note,
    )


def _averaged(
    model: str,
    published: str,
    key: str,
    here: str,
    metric: str = "accuracy",
    note: str = "",
    *,
    rivals_get_there: bool = True,
) -> Claim:
    """SelSync as it is published, and hetopt's, beside BSP and local SGD that are rounded alike."""
    ends = f"{{{key}_final_{metric}_%s:.3g}}"

    def sooner(figure: str) -> str:
        at_1x, at_5x, at_20x = (f"{{{figure % f'{rate}x'}:.2f}}" for rate in (1, 5, 20))
        return f"{at_1x}, {at_5x} and {at_20x}"

    own, rounded, local = (
        sooner(f"{key}_{figure}_at_%s") for figure in ("speed_up", "bsp__int8_over_bsp", "local_sgd_8___int8_over_bsp")
    )
    return Claim(
        system=SELSYNC,
        claim=f"{model}, threshold 0.3: times as fast as BSP, at its quality",
        published=published,
        benchmark="sync",
        theirs=f"ends at {ends % 'selsync_0_3'} with {{{key}_synchronised_share_selsync_0_3:.0%}} of the steps "
        f"synchronised (published: 17, 9 and 27 %), and at {ends % 'selsync_auto'} with "
        f"{{{key}_synchronised_share_selsync_auto:.0%}}, where BSP has {ends % 'bsp'}, its seeds "
        f"{{{key}_final_{metric}_bsp_apart:.2g}} apart: too far off to be timed",
        ours=f"{own} at 1, 5 and 20 times as much communication as computing (share chosen, int8, half as many "
        f"steps more; 0: not every seed gets there), to BSP's quality less {{{key}_tolerance:.2g}}; ends at "
        f"{ends % 'selsync_auto___int8'}",
        baseline=f"BSP in 8 bits {rounded if rivals_get_there else 'does not get there with every seed'}, ends at "
        f"{ends % 'bsp__int8'}; local SGD every 8 steps, rounded and prolonged as hetopt's, "
        f"{local if rivals_get_there else 'neither'}, ends at {ends % 'local_sgd_8___int8'}",
        how="composed",
        note=f"not reproduced; {here}, three seeds; all synchronise in the first 10 steps, in the first 25 published"
        f"{note}",
    )


def _steered(policy: str) -> str:
    """What follows a network, on the published schedules: times of the best fixed choice, and of dense training."""
    return (
        f"{{schedule_c1_{policy}_over_best:.2f}} and {{schedule_c2_{policy}_over_best:.2f}} times as long to the "
        f"target as the best fixed choice in hindsight, {{schedule_c1_{policy}_over_dense:.2f}} and "
        f"{{schedule_c2_{policy}_over_dense:.2f}} times as long as dense training (geometric means; at worst "
        f"{{schedule_c1_{policy}_over_dense_worst:.2f}} and {{schedule_c2_{policy}_over_dense_worst:.2f}})"
    )


def _streamed(key: str, rates: str, published: str, note: str) -> Claim:
    return Claim(
        system=SCADLES,
        claim=f"rates {rates} a second: times as fast as equal batches with everything kept",
        published=published,
        benchmark="streams",
        theirs=f"{{{key}_speedup:.2f}}",
        ours="the same rule",
        baseline="equal batches: 1",
        how="emulated",
        note=f"eight workers instead of 16, small and so much faster that streams are 8 times as fast; {note}",
    )


CLAIMS = (
    Claim(
        system=PARTITION,
        claim="ResNet-50, one of two workers delayed by 0.1 and 0.2 s: times as fast",
        published="1.31, 1.26",
        benchmark="balance",
        theirs="{speed_up_proportional_delay_100_ms:.2f}, {speed_up_proportional_delay_200_ms:.2f}",
        ours="{speed_up_delay_100_ms:.2f}, {speed_up_delay_200_ms:.2f}",
        baseline="speeds known beforehand {speed_up_static_delay_100_ms:.2f}, {speed_up_static_delay_200_ms:.2f}; "
        "ideal {ideal_speed_up_delay_100_ms:.2f}, {ideal_speed_up_delay_200_ms:.2f}",
        how="emulated",
        note="with the computation of its logs, 0.221 s for half a batch. A delay does not shrink with the batch: the "
        "published gain at 0.1 s is more than balance can give, and came from a uniform run that was slow itself",
    ),
    Claim(
        system=PARTITION,
        claim="VGG16, one of two workers delayed by 0.01 and 0.02 s: times as fast; and accuracies",
        published="0.98, 1.02; 0.965 to 0.995",
        note="by its own logs nothing is gained there; the accuracies are those of last batches, on parts of the data "
        "that overlap",
    ),
    Claim(
        system=QUANTISERS,
        claim="ResNet-50 and VGG16 against dense sums on two GPUs: times as fast",
        published="1.06, 1.21",
        benchmark="compression",
        theirs="max-norm {convnet_max_norm_over_dense_at_1x_in_equal_steps:.2f} and "
        "{convnet_max_norm_over_dense_at_5x_in_equal_steps:.2f}, two scales "
        "{convnet_two_scales_over_dense_at_1x_in_equal_steps:.2f} and "
        "{convnet_two_scales_over_dense_at_5x_in_equal_steps:.2f}, global random-K of a tenth "
        "{convnet_global_random_k_over_dense_at_1x_in_equal_steps:.2f} and "
        "{convnet_global_random_k_over_dense_at_5x_in_equal_steps:.2f} where communication takes as long as computing, "
        "and 5 times as long, in equal numbers of steps",
        how="composed",
        note=f"{SMALL}, four workers, three seeds; max-norm of 31 levels a worker in 8 bits. Both published figures "
        "are those of global random-K (10,000 elements of millions), whose replicas diverge in the released code; the "
        "best of its others are 1.03 (max-norm of 2 bits) and 1.14 (PowerSGD, which is not in this run)",
    ),
    Claim(
        system=QUANTISERS,
        claim="ResNet-50 and VGG16: accuracy where dense sums have 0.952 and 0.940",
        published="max-norm of 4 bits 0.948 and 0.927, of 2 bits 0.917 and 0.881; global random-K 0.949 and 0.933",
        benchmark="compression",
        theirs="max-norm {convnet_final_accuracy_max_norm:.3f}, two scales {convnet_final_accuracy_two_scales:.3f}, "
        "global random-K of a tenth {convnet_final_accuracy_global_random_k:.3f}",
        baseline="dense sums {convnet_final_accuracy_dense:.3f}, their seeds {convnet_tolerance:.3f} apart",
        how="composed",
        note=f"{SMALL}, four workers, three seeds; max-norm of 31 levels a worker in 8 bits. That global random-K "
        "keeps its accuracy is not reproduced: in the released code each worker keeps its own gradient where nothing "
        "is sent",
    ),
    Claim(
        system=AR_TOPK,
        claim="Table VI: which of all-gather, ring and tree is the fastest, in its 27 settings",
        published="as printed",
        benchmark="exchange",
        theirs="by its law of costs the same best in {published_same_best:.0f}; times {published_mean_error:.1%} off "
        "in the mean, {published_largest_error:.0%} at most",
        how="predicted",
        note="law, latency and rate are the paper's, and some of the printed times are that law's to the last digit: "
        "this shows that the law is written down rightly here, and nothing of any network. Nine settings more, of ViT, "
        "are left out: their times are those of 133 million parameters, where the released code has 304 million (with "
        "which the same is best in 8, and times are up to 2.3 times the printed)",
    ),
    Claim(
        system=AR_TOPK,
        claim="ResNet50 at 1 %: 67.7 ms a step where dense takes 152.5",
        published="2.25 times as fast",
        benchmark="exchange",
        theirs="{published_star_speed_up_resnet50_1_percent:.2f} times as fast by the law of costs; the nine steps of "
        "three models {published_star_speed_up_mean_error:.1%} off in the mean",
        how="predicted",
        note="latency, rate and the dense step are the paper's; its fourth model, ViT, is left out, as above",
    ),
    Claim(
        system=AR_TOPK,
        claim="ResNet50 at 1 %: accuracy 98.57 where dense has 98.72",
        published="-0.15 points",
        benchmark="compression",
        theirs="{convnet_final_accuracy_ar_topk_100x:.3f} with {convnet_sent_over_dense_ar_topk_100x:.1%} of the bytes",
        baseline="dense sums {convnet_final_accuracy_dense:.3f}, their seeds {convnet_tolerance:.3f} apart; Top-k at "
        "10x {convnet_final_accuracy_topk_10x:.3f}",
        how="composed",
        note=f"{SMALL}, three seeds",
    ),
    Claim(
        system=AR_TOPK,
        claim="a ratio and a collective that follow the network (schedules C1, C2): accuracy beside dense training",
        published="ResNet18 0.7 to 0.9 points below, ResNet50 0.1 to 0.2 below, AlexNet and ViT as high or higher",
        benchmark="auto",
        theirs=_steered("scan"),
        ours=_steered("auto"),
        how="simulated",
        note="three recorded jobs, three seeds, to 400 steps of dense progress, so that what a ratio loses is made up "
        "in time. C1 as printed (1 ms and 25 Gbit/s, 1 and 1, 50 and 1, 50 and 25); for C2 the released code's (1 ms "
        "and 25 Gbit/s to 32 ms and 1 Gbit/s, and back). Of its rule the scan is exact, where the paper searches",
    ),
    _averaged(
        "ResNet101",
        "2.03 (1.67 with 0.5)",
        "resnet",
        "ResNet-20 at 16 pixels on two cores, four epochs",
        rivals_get_there=False,
    ),
    _averaged("ResNet101 and VGG11, by a small ConvNet", "2.03, 6.16", "convnet", SMALL),
    _averaged(
        "VGG11",
        "6.16 (13.75 with 0.5)",
        "vgg",
        "VGG-11 at a quarter of its width on two cores, four epochs",
        note=". By the steps that the paper prints, no more than 1.7 (2.1) can be: those that synchronise, over BSP's",
    ),
    _averaged("Transformer", "2.42 (2.06 with 0.5)", "characters", "an LSTM on characters", metric="perplexity"),
    Claim(
        system=SELSYNC,
        claim="AlexNet on ImageNet, threshold 0.3: times as fast as BSP, at its quality",
        published="4.62",
        note="no data set of that kind trains on two cores",
    ),
    Claim(
        system=SELSYNC,
        claim="FedAvg (1, 0.25), one of its rivals: ResNet101 at BSP's quality",
        published="yes, 2.59 times as fast",
        told_on="methods/fedavg.md",
        benchmark="sync",
        theirs="{convnet_final_accuracy_fedavg_1_0_25:.3g} where BSP has {convnet_final_accuracy_bsp:.3g}",
        ours="{convnet_final_accuracy_selsync_auto___int8:.3g}",
        how="composed",
        note=f"not reproduced; {SMALL}",
    ),
    Claim(
        system=SELSYNC,
        claim="SSP, one of its rivals, fails on deep models",
        published="ResNet101 93.8 where BSP has 98.5, VGG11 68.7 where it has 90.9; but AlexNet 4.53 and the "
        "Transformer 2.02 times as fast, at BSP's quality",
        told_on="methods/ssp.md",
        benchmark="sync",
        theirs="{convnet_final_accuracy_ssp_3:.3g} where BSP has {convnet_final_accuracy_bsp:.3g}",
        how="composed",
        note=f"reproduced as to image models; {SMALL}, at most 3 steps apart; published are 100 and 200, in runs of a "
        "hundred thousand",
    ),
    _balanced(
        DYNAMIC,
        "9_12_18",
        "9, 12 and 18",
        "2.0",
        "dynamic",
        "the published gain is more than balance alone can give (1.44)",
    ),
    _balanced(DYNAMIC, "2_17_20", "2, 17 and 20", "2.4", "dynamic", "here nothing is restarted to change a batch"),
    Claim(
        system=DYNAMIC,
        claim="a GPU and a CPU with 81 and 19 % of the speed: times as fast",
        published="over 4",
        benchmark="balance",
        theirs="{speed_up_dynamic_81_19:.2f}",
        ours="{speed_up_81_19:.2f}",
        baseline="speeds known beforehand {speed_up_static_81_19:.2f}; ideal {ideal_speed_up_81_19:.2f}",
        how="emulated",
        note="not reproduced: more than balance alone can give",
    ),
    _balanced(OMNILEARN, "12_12_8_16", "12, 12, 8 and 16", OMNILEARN_SAYS, "omnilearn", "one of its clusters, HL2"),
    _balanced(OMNILEARN, "9_9_6_24", "9, 9, 6 and 24", OMNILEARN_SAYS, "omnilearn", "HL4"),
    _balanced(
        OMNILEARN,
        "6_6_4_32",
        "6, 6, 4 and 32",
        OMNILEARN_SAYS,
        "omnilearn",
        "HL8: its bounds (half to three times the usual batch) keep it from the ideal",
    ),
    Claim(
        system=OMNILEARN,
        claim="accuracy of asynchronous training",
        published="up to 6.9 points better",
        note="there is no asynchronous training with batches by speed here",
    ),
    Claim(
        system=GRAVAC,
        claim="ResNet101, VGG16, LSTM: times as fast as Top-k at 10x, at dense quality",
        published="4.32, 1.95, 6.67",
        benchmark="compression",
        theirs="a small ConvNet {convnet_gravac_topk_over_topk_10x_at_20x:.2f} on Top-k and "
        "{convnet_gravac_dgc_over_topk_10x_at_20x:.2f} on DGC, an LSTM on characters "
        "{characters_gravac_topk_over_topk_10x_at_20x:.2f} and {characters_gravac_dgc_over_topk_10x_at_20x:.2f}, at 20 "
        "times as much communication as computing, to the lower of what dense training and Top-k at 10x end with, less "
        "what dense seeds differ by. The ConvNet ends at {convnet_final_accuracy_gravac_topk:.3f} and "
        "{convnet_final_accuracy_gravac_dgc:.3f}; the LSTM at a perplexity of "
        "{characters_final_perplexity_gravac_topk:.2f} (on Top-k), {characters_final_perplexity_gravac_dgc:.2f} (DGC), "
        "{characters_final_perplexity_gravac_redsync:.2f} (RedSync) and "
        "{characters_final_perplexity_gravac_randomk:.2f} (random-k), and sends "
        "{characters_sent_over_dense_gravac_topk:.0%}, {characters_sent_over_dense_gravac_dgc:.0%}, "
        "{characters_sent_over_dense_gravac_redsync:.0%} and {characters_sent_over_dense_gravac_randomk:.0%} of the "
        "bytes of dense training",
        baseline="the ConvNet ends at {convnet_final_accuracy_topk_10x:.3f} with Top-k at 10x and at "
        "{convnet_final_accuracy_dense:.3f} with dense sums, its seeds {convnet_tolerance:.3f} apart; of the LSTM "
        "Top-k at 10x ends at {characters_final_perplexity_topk_10x:.2f} with "
        "{characters_sent_over_dense_topk_10x:.0%} of the bytes, dense training at "
        "{characters_final_perplexity_dense:.2f}, its seeds {characters_tolerance:.2f} apart; counting three "
        "characters in a row comes to {characters_perplexity_of_counts_of_3:.2f}, four to "
        "{characters_perplexity_of_counts_of_4:.2f}, which no run here reaches",
        how="composed",
        note="three seeds; decided in every step, eps 0.7, a window of 25 steps, which is the released code's (500 are "
        "published). Not reproduced: where a tenth of a gradient keeps less than eps, everything is sent, and that is "
        "often here. It ends nearer to dense training than Top-k at 10x, for more bytes",
    ),
    Claim(
        system=GRAVAC,
        claim="against Accordion: times as fast",
        published="1.94, 5.63, 2.06",
        benchmark="compression",
        theirs="{convnet_gravac_topk_over_accordion_at_1x:.2f}, {convnet_gravac_topk_over_accordion_at_5x:.2f} and "
        "{convnet_gravac_topk_over_accordion_at_20x:.2f} at 1, 5 and 20 times as much communication as computing, to "
        "the accuracy at which Accordion ends ({convnet_final_accuracy_accordion:.3f} where dense sums end at "
        "{convnet_final_accuracy_dense:.3f}); on characters GraVAC ends at a perplexity of "
        "{characters_final_perplexity_gravac_topk:.2f}, Accordion (1 % and 0.1 % of the same) at "
        "{characters_final_perplexity_accordion:.2f}, dense training at {characters_final_perplexity_dense:.2f}",
        how="composed",
        note="not reproduced, and not in the paper's cell: its Accordion goes between ranks 1 and 4 of PowerSGD, this "
        "one between 1 % and 0.1 % of Top-k. It sends hardly anything, so that it is quick, and does not come near to "
        "dense quality. It sees how the gradient's norm changes, and not what its own payload keeps",
    ),
    Claim(
        system=GRAVAC,
        claim="compressing in two levels: times as fast as twice from the start",
        published="1.1 to 1.83",
        benchmark="compression",
        theirs="Top-k {levels_speed_up_topk:.2f}, DGC {levels_speed_up_dgc:.2f}, RedSync "
        "{levels_speed_up_redsync:.2f}, random-k {levels_speed_up_randomk:.2f}",
        how="emulated",
        note="CPU time to select a tenth and a thousandth of four million elements. RedSync as published (1.1 to "
        "1.5), DGC a little less (1.27 to 1.52); less for Top-k (1.49 to 1.83), which finds a thousandth of the "
        "whole quickly here, and nothing for random-k (1.34 to 1.64), which looks at no element",
    ),
    Claim(
        system=SCAVENGER,
        claim="step times of other configurations after profiling",
        published="under 5 % off",
        benchmark="prediction",
        theirs="{no_probe_median_scavenger_every:.0%} off in the median from two nodes, "
        "{one_probe_median_scavenger_every:.0%} after one larger cluster",
        ours="{no_probe_median_cluster_held_out:.0%} and {one_probe_median_cluster_held_out:.1%}, the cluster held out",
        baseline="Ernest after one {one_probe_median_ernest_every:.1%}",
        how="predicted",
        note="on eight public folders of GPU clusters, up to 64 workers",
    ),
    Claim(
        system=SCAVENGER,
        claim="what finding the configuration costs",
        published="10 % of the search by trial",
        benchmark="prediction",
        theirs="{scavenger_partial_usd:.2f} USD for {scavenger_partial_median:.0%} error, {scavenger_full_usd:.0f} USD "
        "for {scavenger_full_median:.0%}",
        how="simulated",
        note="its profiles, partial and full, at the folders' prices",
    ),
    Claim(
        system=SCAVENGER,
        claim="time and cost of the cluster that its predictions choose",
        published="2 times as fast, at half the cost",
        benchmark="decisions",
        theirs="{no_probe_extra_cost_scavenger:.1%} more worker-seconds than the cheapest cluster that keeps a "
        "throughput, which it misses in {no_probe_missed_scavenger:.1%} of the choices; with its own interval "
        "{no_probe_extra_cost_scavenger_with_its_interval:.1%} and {no_probe_missed_scavenger_with_its_interval:.1%}",
        ours="{no_probe_extra_cost_hetopt:.1%} and {no_probe_missed_hetopt:.1%}",
        baseline="Ernest {no_probe_extra_cost_ernest:.1%} and {no_probe_missed_ernest:.1%}, with its own interval "
        "{no_probe_extra_cost_ernest_with_its_interval:.1%} and {no_probe_missed_ernest_with_its_interval:.1%}; the "
        "cheapest by the hour {no_probe_extra_cost_the_cheapest_per_hour:.1%} and "
        "{no_probe_missed_the_cheapest_per_hour:.1%}",
        how="predicted",
        note="not the paper's cell: what it beats are configurations that people would choose, which it alone has",
    ),
    _streamed(
        "uniform_38_24",
        "38 ± 24",
        "1.89 and 1.56 (S1, ResNet152 and VGG19)",
        "rates as unequal as drawn here gain more",
    ),
    _streamed(
        "uniform_300_112", "300 ± 112", "1.15 and 2.83 (S2)", "not reproduced: here computing limits, not the streams"
    ),
    _streamed("normal_64_24", "64 ± 24", "3.29 and 2.06 (S1')", "less than published"),
    _streamed("normal_256_28", "256 ± 28", "1.42 and 2.13 (S2')", "not reproduced: rates are nearly equal"),
    Claim(
        system=SCADLES,
        claim="samples kept by truncation over those kept by persistence",
        published="848 to 9,429 times fewer",
        benchmark="streams",
        theirs="at least {truncation_smaller_by_at_least:,.0f} times fewer",
        how="simulated",
        note="reproduced",
    ),
    Claim(
        system=SCADLES,
        claim="workers that hold one label each: accuracy with samples handed on",
        published="93.6 % where 56 % without (ten devices with a label each); 77.8 % where 35 % (25 with four each)",
        benchmark="sync",
        theirs="{accuracy_one_label_handed_on:.1%} where {accuracy_one_label:.1%} without",
        baseline="all labels everywhere {accuracy_all_labels:.1%}",
        how="emulated",
        note="reproduced, on digits",
    ),
    Claim(
        system=SCADLES,
        claim="compressing where a tenth keeps 0.7 of the energy: accuracy, and what is sent",
        published="ResNet152 98.4 with a tenth of the bytes, VGG19 81.9 where 85.5 with nearly all",
        note="the rule is there (`--ratio-policy threshold`) and was not trained with; by its energy test GraVAC's "
        "contest is the same, but for the candidate",
    ),
    Claim(
        system=ALLOCATION,
        claim="workers of unequal speed: less time than with equal shares",
        published="a third to a half (1.5 to 2 times as fast)",
        benchmark="balance",
        theirs="{speed_up_allocation_9_9_6_24:.2f} and {speed_up_allocation_2_17_20:.2f} times as fast on two clusters",
        ours="{speed_up_9_9_6_24:.2f} and {speed_up_2_17_20:.2f}",
        how="emulated",
        note="reproduced",
    ),
)
