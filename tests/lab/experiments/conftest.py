from dataclasses import replace
from pathlib import Path

import pytest

from smoothout.lab.experiments.records import Records

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """The records of C1, from their pack."""
    return Records.read([], [RESULTS / "c1-cifar10.jsonl"], tmp_path_factory.mktemp("unpacked"))


@pytest.fixture(scope="session")
def as_if_run(packed):
    """A run that was made, under another configuration with other accuracies: what verdicts are tested with."""
    made, *_ = packed.all()

    def found(config, last, best=None):
        record = made.run.record
        last_epoch = replace(record.last, test_accuracy=last)
        best_epoch = replace(record.best, test_accuracy=last if best is None else best)
        record = replace(record, config=config, last=last_epoch, best=best_epoch)
        return replace(made, run=replace(made.run, config=config, record=record), measured=frozenset())

    return found
