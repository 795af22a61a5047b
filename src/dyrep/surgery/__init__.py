"""Change a live model: find what can grow, expand, cut, fold, describe, rebuild."""
