"""What a running server's cache does now: counted in the scheduler, shown by a page of the server and in a terminal.

All but ``agentserve/runtime/sglang_watch_*.py`` is without SGLang. See ``docs/design/watch.md``.
"""
