"""Commands that start processes of gloo."""

import subprocess


def run(command, **options):
    """As subprocess.run, and again if gloo's threads aborted at Python's end, as they do without smoothout too.

    On a busy machine two tries have not been enough.
    """
    for _ in range(5):
        done = subprocess.run(command, capture_output=True, text=True, **options)
        if "terminate called without an active exception" not in done.stderr:
            break
    return done
