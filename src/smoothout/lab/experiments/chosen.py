"""What preset `ours` adds to a network's rows: chosen on training images held out, never on the test set.

`smoothout reproduce choice --preset ours` makes the runs (`reproduce finals` those of ResNet44's best few, with more
seeds) and says which candidate is the best of each network, batch size and method; that is entered here, with the date
in docs/log.md, and a test compares it with the records. Nothing here: the preset's own values.
"""

from __future__ import annotations

from typing import Any

_WARMED_UP: dict[str, Any] = {"lr_warmup": 5.0, "remeasure_bn": "clean"}

_RESNET44_FIRST_CHOICE: dict[str, dict[str, Any]] = {
    "smoothout": {
        **_WARMED_UP,
        "strength": 0.075,
        "strength_schedule": "constant",
        "draws": "ghost",
        "clean_share": 0.5,
        "perturb_bn": False,
    },
    "adasmoothout": {
        **_WARMED_UP,
        "strength": 0.3,
        "strength_schedule": "constant",
        "draws": "ghost",
        "clean_share": 0.0,
        "perturb_bn": False,
    },
}

_RESNET44_ADASMOOTHOUT: dict[str, Any] = {  # by `finals`
    **_RESNET44_FIRST_CHOICE["adasmoothout"],
    "strength": 0.15,
    "perturb_bn": True,
}

CHOSEN: dict[tuple[str, int, str], dict[str, Any]] = {
    ("f1", 256, "smoothout"): {"strength": 0.0375, "strength_schedule": "linear", "draws": "one"},
    ("f1", 256, "adasmoothout"): {"strength": 0.6, "strength_schedule": "constant", "draws": "one"},
    ("f1", 6000, "smoothout"): {"strength": 0.009375, "strength_schedule": "constant", "draws": "one"},
    ("f1", 6000, "adasmoothout"): {"strength": 0.15, "strength_schedule": "constant", "draws": "one"},
    ("c1", 256, "smoothout"): {"strength": 0.15, "strength_schedule": "constant", "draws": "one"},
    ("c1", 256, "adasmoothout"): {"strength": 0.15, "strength_schedule": "tanh", "draws": "one"},
    ("c1", 5000, "smoothout"): {"strength": 0.0375, "strength_schedule": "constant", "draws": "one"},
    ("c1", 5000, "adasmoothout"): {"strength": 0.15, "strength_schedule": "constant", "draws": "one"},
    ("resnet44", 2048, "plain"): _WARMED_UP,
    ("resnet44", 2048, "smoothout"): _RESNET44_FIRST_CHOICE["smoothout"],
    ("resnet44", 2048, "adasmoothout"): _RESNET44_ADASMOOTHOUT,
}  # by model, batch size and method
# What went to the test set first. Where CHOSEN becomes something else, Table 2 keeps this in a row of its own: a choice
# that leaves out what came before it flatters itself.
CHOSEN_BEFORE: dict[str, dict[str, Any]] = _RESNET44_FIRST_CHOICE  # of ResNet44, by method
