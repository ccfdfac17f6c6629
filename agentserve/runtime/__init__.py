"""What SGLang loads from us: a CPU platform, MiniMax-M3's sparse attention in torch, and the hooks they need.

``msa_torch.py`` is pure torch. Modules named ``sglang_*`` touch SGLang and are imported only inside its processes.
"""
