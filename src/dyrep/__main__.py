"""``python -m dyrep`` is the command ``dyrep``."""

from dyrep.cli.main import main

if __name__ == "__main__":
    main()
