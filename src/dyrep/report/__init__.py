"""What happened in runs, as pages and pictures made from their folders alone. Needs the ``report`` extra."""
