"""Commands that start processes of gloo."""

import subprocess


def run(command, **options):
    """As subprocess.run, and once more if gloo's threads aborted at Python's end, as they do without smoothout too."""
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, **options)
        if "terminate called without an active exception" not in done.stderr:
            break
    return done
