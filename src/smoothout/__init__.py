"""Flat-minima training for PyTorch: SmoothOut, AdaSmoothOut and N-copy SmoothOut (Wen et al., 2018)."""

__version__ = "0.1.0.dev0"
