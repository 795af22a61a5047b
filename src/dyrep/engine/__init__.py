"""The batteries: recipes, data, training loop, checkpoints, one command."""
