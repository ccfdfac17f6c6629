"""Small random checkpoints in the published form, for machines without the real one."""
