"""Reports and benchmarks: everything that turns what was recorded into numbers somebody reads."""
