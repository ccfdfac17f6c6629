"""How a request reaches a server: one module per protocol behind ``base.Client``."""
