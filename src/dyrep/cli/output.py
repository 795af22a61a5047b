"""Files that commands write beside what they print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dyrep.errors import DyRepError
from dyrep.files import replacing


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file, atomically.

    Raises:
        DyRepError: it cannot be written.
    """
    write_text(file, json.dumps(data, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a text file, atomically; its folder is made if need be.

    Raises:
        DyRepError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DyRepError(f"{file} cannot be written: {error}") from error
