"""Logs of text that clients and servers write: one parser a kind, for whoever reads them.

``traces/readers`` makes sessions of them, ``eval/diagnose`` looks for the place where a prefix broke. A parser takes
one JSON object at a time and gives complete calls; it knows no files, no tokens and no template.
"""
