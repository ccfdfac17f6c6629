"""Runs side by side and paired per request: ``load_run`` -> ``compare`` -> terminal, JSON, Markdown."""

from eval.compare.markdown import render_comparison_markdown
from eval.compare.schema import CompareError, Comparison
from eval.compare.summary import compare
from eval.compare.terminal import render_comparison

__all__ = ["CompareError", "Comparison", "compare", "render_comparison", "render_comparison_markdown"]
