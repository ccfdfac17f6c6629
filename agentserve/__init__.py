"""agentserve: MiniMax-M3 on SGLang for coding agents, with the prefix cache explained."""

__version__ = "0.1.0"
