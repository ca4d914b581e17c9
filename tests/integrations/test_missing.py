"""Without a framework its integration says what to install; the others still work."""

import json
import subprocess
import sys

CODE = """
import importlib, json, sys
said = {{}}
for integration, absent in {absent}.items():
    for name in absent:
        sys.modules[name] = None  # what Python makes of a package that is not there
    try:
        importlib.import_module(f"smoothout.integrations.{{integration}}")
    except ImportError as error:
        said[integration] = str(error)
    for name in absent:
        del sys.modules[name]
print(json.dumps(said))
"""
ABSENT = {
    "lightning": ["lightning", "pytorch_lightning"],
    "transformers": ["transformers"],
    "accelerate": ["accelerate"],
}


def test_a_missing_framework_is_named_with_its_extra():
    code = CODE.format(absent=ABSENT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    for integration in ABSENT:
        assert f"pip install 'smoothout[{integration}]', or '.[{integration}]' in a checkout" in said[integration]
