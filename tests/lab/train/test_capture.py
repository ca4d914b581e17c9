"""CUDA graphs that run at the same time. On a machine with a CUDA device."""

import pytest
import torch

from smoothout.lab.train.capture import captured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_graphs_side_by_side_have_scratch_memory_of_their_own():
    """Few outputs of long sums: cuBLAS splits such sums, and adds up the parts in its scratch memory."""
    shape, count, products = (64, 1 << 16), 4, 20
    pairs = [[torch.randn(shape, device="cuda").bfloat16() for _ in range(2)] for _ in range(count)]
    expected = [left @ right.T for left, right in pairs]
    graphs, found, streams = [], [], [torch.cuda.Stream() for _ in range(count)]
    for left, right in pairs:
        graph = torch.cuda.CUDAGraph()
        with captured(graph):
            found.append([left @ right.T for _ in range(products)])
        graphs.append(graph)
    for _ in range(50):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for results, right in zip(found, expected):
        for result in results:
            torch.testing.assert_close(result, right)
