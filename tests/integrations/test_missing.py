"""Without a framework its integration says what to install; the others still work."""

import subprocess
import sys

import pytest

CODE = """
import sys
for name in {absent}:
    sys.modules[name] = None  # what Python makes of a package that is not there
try:
    import smoothout.integrations.{integration}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("integration", "absent"),
    [
        ("lightning", ["lightning", "pytorch_lightning"]),
        ("transformers", ["transformers"]),
        ("accelerate", ["accelerate"]),
    ],
)
def test_a_missing_framework_is_named_with_its_extra(integration, absent):
    code = CODE.format(integration=integration, absent=absent)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"pip install 'smoothout[{integration}]'" in done.stdout
