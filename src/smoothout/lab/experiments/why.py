"""Why the gain on ResNet44 appears or does not: one factor at a time around a shortened CIFAR-10 row of Table 2."""

from __future__ import annotations

from typing import Any

from smoothout.lab.experiments.networks import RESNET44, configure, label
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting

EPOCHS = 100
BOTH = ("plain", "adasmoothout")
ADA = ("adasmoothout",)

# (what is varied, for which methods, settings; the strength in units of the preset's)
FACTORS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("as the preset", BOTH, {}),
    *((f"{n} draws a step", ADA, {"draws": str(n), "ghost_by": "loop"}) for n in (1, 4, 16)),
    ("a draw a ghost", ADA, {"draws": "ghost", "ghost_by": "loop"}),
    ("normalisation perturbed", ADA, {"perturb_bn": True}),
    ("optimizer reset every epoch", BOTH, {"reset_optimizer_every_epoch": True}),
    *((f"a × {factor:g}", ADA, {"strength": factor}) for factor in (0.25, 0.5, 2.0, 4.0)),
    *((f"strength {name}", ADA, {"strength_schedule": name}) for name in ("linear", "tanh", "tanh-falling", "cosine")),
    ("learning rate warmed up, 5 epochs", BOTH, {"lr_warmup": 5.0}),
    *((f"weight decay {decay:g}", BOTH, {"weight_decay": decay}) for decay in (0.0, 5e-4)),
    ("gradient clipped at 5", BOTH, {"clip": 5.0}),
    *((f"{epochs} epochs", BOTH, {"epochs": epochs}) for epochs in (200, 400, 800)),
)


def why(setting: Setting) -> Experiment:
    rows: list[Row] = []
    seen = set()
    for what, methods, settings in FACTORS:
        how = {"epochs": EPOCHS, **settings}
        if "strength" in how:
            how["strength"] *= configure(setting, RESNET44, RESNET44.large, "adasmoothout").strength
        baseline_how = how if "plain" in methods else {"epochs": EPOCHS}
        baseline = configure(setting, RESNET44, RESNET44.large, "plain", **baseline_how)
        for method in methods:
            config = configure(setting, RESNET44, RESNET44.large, method, **how)
            if config in seen:  # a factor at the value that the preset has anyway
                continue
            seen.add(config)
            versus = None if method == "plain" else baseline
            rows.append(Row(label(RESNET44, RESNET44.large, method, f", {what}"), config, versus=versus))
    notes = (f"{EPOCHS} epochs where no other number is named; each method is compared with the baseline of its row.",)
    return Experiment(
        "why", "ResNet44: which factor makes the gain appear", tuple(rows), notes=notes, compares_costs=True
    )
