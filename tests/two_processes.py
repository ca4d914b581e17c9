"""Two real processes in one gloo group, started once and handed one check after another."""

import os
import socket
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def _serve(rank, port, connection):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    while (work := connection.recv()) is not None:
        function, args = work
        try:
            torch.manual_seed(0)
            function(rank, *args)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
    dist.destroy_process_group()


def gathered(tensor):
    """What every rank has, for a function that runs in both."""
    tensors = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(tensors, tensor.detach().contiguous())
    return tensors


class TwoProcesses:
    """`pool(function, *args)` runs `function(rank, *args)` in both; a failure in either fails here."""

    def __init__(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        context = mp.get_context("spawn")
        self._connections, self._processes = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def __call__(self, function, *args):
        for connection in self._connections:
            connection.send((function, args))
        failures = [
            f"rank {rank}:\n{failure}"
            for rank, connection in enumerate(self._connections)
            if (failure := connection.recv() if connection.poll(120) else "no answer within two minutes")
        ]
        assert not failures, "\n".join(failures)

    def close(self):
        for connection, process in zip(self._connections, self._processes):
            connection.send(None)
            process.join(10)
            process.kill()
