"""`polytempo key FILE`: new keys for ranks on several hosts, started by torchrun or mpirun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytempo.errors import UsageError


def key(file: Annotated[Path, typer.Argument(help="The file to write; only you can read it.")]) -> None:
    """Make a key file, to be copied to all hosts: it encrypts the links between them, and only its holders can join."""
    from polytempo.transport.keys import make_keys, write_key_file

    try:
        write_key_file(file, make_keys().workers)
    except FileExistsError:
        raise UsageError(f"{file} is there already; use another name, or remove it") from None
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
    typer.echo(f"wrote {file}; copy it to every host, and give it to init(key_file=...) or POLYTEMPO_KEY_FILE")
