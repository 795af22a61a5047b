"""The command ``dyrep``."""
