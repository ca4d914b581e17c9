"""Commands that start processes of gloo."""

import subprocess

TRIES = 5  # on a busy machine two have not been enough


def run(command, **options):
    """As subprocess.run, and again if gloo's threads aborted."""
    for _ in range(TRIES):
        done = subprocess.run(command, capture_output=True, text=True, **options)
        if not aborted(done.stderr):
            break
    return done


def aborted(error):
    """Whether gloo's threads ended the process at Python's end, as they do without smoothout too."""
    return "terminate called without an active exception" in error
