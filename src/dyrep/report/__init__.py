"""Pictures of a run, made from its event log alone. Needs the ``demo`` extra (matplotlib)."""
