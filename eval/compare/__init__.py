"""Runs side by side and paired per request: ``load_run`` -> ``compare`` -> terminal, JSON."""

from eval.compare.schema import CompareError, Comparison
from eval.compare.summary import compare
from eval.compare.terminal import render_comparison

__all__ = ["CompareError", "Comparison", "compare", "render_comparison"]
