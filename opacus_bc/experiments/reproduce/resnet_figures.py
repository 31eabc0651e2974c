"""The figures about ResNet-18 on CIFAR-10 (figures 1 to 5 and 16 to 18)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from opacus_bc.experiments.reproduce.specs import Claim, Run, Spec
from opacus_bc.experiments.reproduce.sweeps import BATCHES, prints, schedules, sweep

_resnet = partial(Spec, model="resnet18", dataset="cifar10")
_PLAIN = Run(label="m = 64", mode="none")
_BC_AT_64 = (*prints(60, epoch=20), *prints(67))
_NORMS = replace(_PLAIN, x=64, record_norms=True, core=True, paper=(*prints(88.31, epoch=20), *prints(90.24)))
_PANELS = ("css, constant C", "css, diminishing C", "dss, constant C", "dss, diminishing C")
_SIZES = tuple(f"m = {m}" for m in BATCHES)
_ALC = Run(label="ALC", paper=prints(66.66), core=True)

FIGURES: tuple[Spec, ...] = (
    _resnet(
        id="fig1",
        title="Layer gradient norms, trained without privacy",
        where="figure 1, section 3.3",
        axis="epoch",
        runs=(Run(label="gradient norms", mode="none", record_norms=True),),
        claims=(Claim(words="most layers' gradient norms fall only slowly from epoch to epoch"),),
    ),
    _resnet(
        id="fig2",
        title="SGD without privacy by batch size",
        where="figure 2, section 4.2",
        axis="m",
        runs=(
            _NORMS,  # figure 1's own run
            *sweep(_PLAIN, "batch_size", BATCHES[1:]),
        ),
        claims=(Claim(words="m = 64 is the best batch size", best=_SIZES),),
    ),
    _resnet(
        id="fig3",
        title="BC + ALC by batch size, at both printed master bounds",
        where="figure 3, section 4.2",
        axis="m",
        runs=(
            replace(_NORMS, label="no privacy, m = 64", core=False, paper=()),
            *sweep(
                Run(label="", clip=0.0095),
                "batch_size",
                BATCHES,
                {64: _BC_AT_64},
                core=(64,),
                suffix=", C = 0.0095",
            ),
            *sweep(
                Run(label="", clip=0.095),
                "batch_size",
                BATCHES,
                {64: _BC_AT_64},
                core=(64,),
                suffix=", C = 0.095",
            ),
        ),
        claims=(
            Claim(
                words="m = 64 is the best batch size", best=tuple(f"{size}, C = 0.0095" for size in _SIZES)
            ),
        ),
    ),
    _resnet(
        id="fig4",
        title="The paper's ALC against Zhang's, and BC against IC",
        where="figure 4, sections 4.3 and 4.4",
        axis="method",
        runs=(
            Run(label="BC, C = 0.0095", clip=0.0095, paper=_BC_AT_64, core=True),
            Run(label="BC, C = 0.095", clip=0.095, paper=_BC_AT_64, core=True),
            Run(label="Zhang", rule="norm", clip=1.0, core=True),
            Run(label="IC, C = 0.0095", mode="ic", clip=0.0095),
            Run(label="IC, C = 0.095", mode="ic", clip=0.095, core=True),
        ),
        claims=(
            Claim(words="the enhanced ALC beats Zhang's", above=("BC, C = 0.0095", "Zhang")),
            Claim(words="the same at C = 0.095", above=("BC, C = 0.095", "Zhang")),
            Claim(words="BC converges while IC does not", above=("BC, C = 0.0095", "IC, C = 0.0095")),
            Claim(words="BC is ahead of IC at C = 0.095", above=("BC, C = 0.095", "IC, C = 0.095")),
        ),
    ),
    _resnet(
        id="fig5",
        title="BC + ALC at different noise",
        where="figure 5, section 4.5 (its numbers in section A.1)",
        axis="sigma",
        epochs=10,
        runs=sweep(
            Run(label=""),
            "sigma",
            (0.01875, 0.05, 0.1, 0.2, 0.5, 1.0),
            {0.5: prints(20, epoch=10, about=True)},
        ),
        claims=(
            Claim(words="at most 20 % for σ > 0.5", at_most=("σ = 1", 20.0)),
            Claim(words="below 40 % from σ = 0.2 on", at_most=("σ = 0.2", 40.0)),
            Claim(words="accuracy falls with noise", above=("σ = 0.01875", "σ = 0.2", "σ = 0.5")),
        ),
    ),
    _resnet(
        id="fig16",
        title="BC + ALC without BatchNorm, step size and bound constant or diminishing",
        where="figure 16, section A.3 (settings: table 3)",
        axis="schedules",
        runs=schedules(Run(label="", norm="none"), prints(40, about=True)),
        claims=(Claim(words="BC reaches 30 to 40 % without BatchNorm", within=(_PANELS, 30.0, 40.0)),),
    ),
    _resnet(
        id="fig17",
        title="IC + ALC without BatchNorm, step size and bound constant or diminishing",
        where="figure 17, section A.3 (settings: table 3)",
        axis="schedules",
        runs=schedules(Run(label="", mode="ic", norm="none"), ()),
        claims=(Claim(words="IC reaches 18 to 22 % without BatchNorm", within=(_PANELS, 18.0, 22.0)),),
    ),
    _resnet(
        id="fig18a",
        title="ALC against full gradient clipping (FGC) at the same σ",
        where="figure 18a, section A.4",
        axis="method",
        runs=(_ALC, Run(label="FGC", rule=None, paper=prints(46.35), core=True)),
        claims=(Claim(words="ALC beats FGC", above=("ALC", "FGC")),),
    ),
    _resnet(
        id="fig18b",
        title="ALC against full gradient clipping (FGC) at the same guarantee",
        where="figure 18b, section A.4",
        axis="method",
        runs=(_ALC, Run(label="FGC, σ/√62", rule=None, sigma=0.01875 / 62**0.5, core=True)),
        claims=(Claim(words="ALC beats FGC at the same guarantee", above=("ALC", "FGC, σ/√62")),),
    ),
)
