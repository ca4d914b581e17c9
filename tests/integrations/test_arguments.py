import importlib
import inspect

import pytest

from smoothout import SmoothOut


@pytest.mark.parametrize(
    ("framework", "name"),
    [("lightning", "SmoothOutCallback"), ("transformers", "SmoothOutCallback"), ("accelerate", "attach")],
)
def test_the_strength_that_nobody_gave_is_smoothouts(framework, name):
    pytest.importorskip(framework)
    entry = getattr(importlib.import_module(f"smoothout.integrations.{framework}"), name)
    defaults = [inspect.signature(each).parameters["strength"].default for each in (entry, SmoothOut)]
    assert defaults[0] == defaults[1]
